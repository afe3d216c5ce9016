"""The two change places: who listened links, and who linked listens."""

import numpy as np
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMRole, LLMStatusCode
from sample_common import CLIENT, HOSTS, IS_SERVER, PORT, SERVER, hear, initialise, link, peer, say, status_of, unlink

DESC = CacheDesc(2, [4, 64], DataType.DT_FLOAT16)
ME, OTHER = (SERVER, CLIENT) if IS_SERVER else (CLIENT, SERVER)

datadist = initialise(enable_remote_cache_accessible=True, enable_switch_role=True)
tensors = [np.full(DESC.shape, ME * 10 + tensor, np.float16) for tensor in range(2)]
cache = datadist.cache_manager.register_blocks_cache(DESC, [t.ctypes.data for t in tensors], BlocksCacheKey(ME))


def pull():
    datadist.cache_manager.pull_blocks(BlocksCacheKey(OTHER), cache, [0], [ME])
    assert all((t[ME] == OTHER * 10 + i).all() for i, t in enumerate(tensors))
    assert all((np.delete(t, ME, 0) == ME * 10 + i).all() for i, t in enumerate(tensors))


listen = {"llm.listenIpInfo": f"{HOSTS[ME]}:{PORT}"}
if IS_SERVER:
    say("ready")
    hear("pulled")
    datadist.switch_role(LLMRole.DECODER)
    say("switched")
    hear("listening")
    link(datadist, peer(CLIENT))
    pull()
    unlink(datadist, peer(CLIENT))
    say("done")
else:
    hear("ready")
    link(datadist)
    pull()
    assert status_of(datadist.switch_role, LLMRole.PROMPT, listen) == LLMStatusCode.LLM_EXIST_LINK
    unlink(datadist)
    say("pulled")
    hear("switched")
    datadist.switch_role(LLMRole.PROMPT, listen)
    say("listening")
    hear("done")
datadist.finalize()
