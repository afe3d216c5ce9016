"""v1: the client pulls by requests that the server allocated slots for; then the two change roles, and places."""

from llm_datadist import CacheDesc, CacheKey, DataType, LLMRole, LLMStatusCode
from sample_common import (
    CLIENT,
    HOSTS,
    IS_SERVER,
    PORT,
    SERVER,
    hear,
    initialise,
    link,
    peer,
    say,
    stamp,
    status_of,
    unlink,
    write,
)

SLOT = 4096
DESC = CacheDesc(4, [2, SLOT], DataType.DT_UINT8)
LISTEN = {"llm.listenIpInfo": f"{HOSTS[SERVER if IS_SERVER else CLIENT]}:{PORT}"}
POOL = {"ge.flowGraphMemMaxSize": "4194304"}

datadist = initialise(enable_cache_manager=False, enable_switch_role=True, ge_options=POOL)
manager = datadist.kv_cache_manager
assert manager.is_initialized()


def offer(owner):
    """Make a cache with a request in each slot, as PROMPT."""
    cache = manager.allocate_cache(DESC, [CacheKey(owner, 7), CacheKey(owner, 8)])
    for tensor, address in enumerate(cache.per_device_tensor_addrs[0]):
        for slot in range(2):
            write(address + slot * SLOT, stamp(owner, tensor, slot, SLOT))
    return cache


def fetch(owner):
    """Pull the two requests in reverse order, as DECODER."""
    cache = manager.allocate_cache(DESC)
    manager.pull_cache(CacheKey(owner, 8), cache)
    assert status_of(manager.pull_cache, CacheKey(owner, 8), cache) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    manager.pull_cache(CacheKey(owner, 7), cache, batch_index=1, size=-1)
    for tensor in range(4):
        (found,) = manager.get_cache_tensors(cache, tensor)
        assert found.numpy().tobytes() == stamp(owner, tensor, 1, SLOT) + stamp(owner, tensor, 0, SLOT)
    manager.copy_cache(cache, cache, dst_batch_index=1, src_batch_index=0)
    assert manager.get_cache_tensors(cache, 3)[0].numpy().tobytes() == 2 * stamp(owner, 3, 1, SLOT)
    assert status_of(manager.allocate_cache, DESC, [CacheKey(owner, 9)]) == LLMStatusCode.LLM_PARAM_INVALID
    manager.deallocate_cache(cache)
    assert cache.per_device_tensor_addrs == []


if IS_SERVER:
    cache = offer(SERVER)
    say("ready")
    hear("pulled")
    manager.deallocate_cache(cache)
    datadist.switch_role(LLMRole.DECODER)
    say("switched")
    hear("listening")
    link(datadist, peer(CLIENT))
    fetch(CLIENT)
    unlink(datadist, peer(CLIENT))
    say("done")
else:
    hear("ready")
    link(datadist)
    datadist.check_link_status(SERVER)
    fetch(SERVER)
    assert status_of(datadist.switch_role, LLMRole.PROMPT, LISTEN) == LLMStatusCode.LLM_EXIST_LINK
    unlink(datadist)
    say("pulled")
    hear("switched")
    datadist.switch_role(LLMRole.PROMPT, LISTEN)
    cache = offer(CLIENT)
    say("listening")
    hear("done")
    del cache  # without a reference it goes back
datadist.finalize()
assert not manager.is_initialized()
