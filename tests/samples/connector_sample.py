"""The life of a serving stack's connector: register, link by rank table and poll, pull, fail, unlink, link again.

It never calls finalize.
"""

import json
import sys
import time

import llm_datadist
import numpy as np
from llm_datadist import BlocksCacheKey, CacheDesc, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode
from llm_datadist import RegisterMemStatus as Status
from sample_common import hear, say, status_of

IS_PRODUCER = sys.argv[1] == "server"
ME = 1 if IS_PRODUCER else 2
SHAPE = [16, 8, 2, 4]
RANK_TABLE = json.dumps(
    {
        "version": "1.2",
        "server_count": "1",
        "status": "completed",
        "server_list": [
            {
                "server_id": "127.0.0.1",
                "device": [
                    {"device_id": str(i), "device_ip": f"10.0.0.{i}", "rank_id": str(i), "super_device_id": str(i)}
                    for i in range(2)
                ],
            }
        ],
        "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "127.0.0.1"}]}],
    }
)


def add_remote_agent():
    comm_id = datadist.link("pd_comm_a_b", {1: 0, 2: 1}, RANK_TABLE)
    while True:
        status = datadist.query_register_mem_status(comm_id=comm_id)
        if status == Status.OK:
            return comm_id
        if status == Status.FAILED:
            raise RuntimeError("the memory could not be registered")
        time.sleep(0.01)


datadist = LLMDataDist(LLMRole.PROMPT if IS_PRODUCER else LLMRole.DECODER, ME)
config = LLMConfig()
config.device_id = ME - 1
config.sync_kv_timeout = 33064
config.enable_switch_role = True
config.enable_cache_manager = True
config.enable_remote_cache_accessible = True
datadist.init(config.generate_options())
manager = datadist.cache_manager

tensors = [np.full(SHAPE, ME, np.float16) for _ in range(8)]
desc = CacheDesc(len(tensors), SHAPE, llm_datadist.DataType.DT_FLOAT16)
cache = manager.register_blocks_cache(desc, [tensor.ctypes.data for tensor in tensors], BlocksCacheKey(ME))
comm_id = add_remote_agent()
if IS_PRODUCER:
    for number, tensor in enumerate(tensors):
        for block in (3, 4, 9):
            tensor[block] = number * 16 + block
    image = [tensor.copy() for tensor in tensors]
    say("prefilled")
    hear("unlinking")
    add_remote_agent()
    hear("finished")
    assert all(np.array_equal(a, b) for a, b in zip(tensors, image, strict=True))
else:
    key = BlocksCacheKey(1)
    hear("prefilled")
    expected = [tensor.copy() for tensor in tensors]
    for number, tensor in enumerate(expected):
        for source, target in ((3, 0), (4, 1), (9, 7)):
            tensor[target] = number * 16 + source
    for _ in range(2):  # blocks are never consumed
        manager.pull_blocks(key, cache, [3, 4, 9], [0, 1, 7])
        assert all(np.array_equal(a, b) for a, b in zip(tensors, expected, strict=True))
    pull = manager.pull_blocks
    assert status_of(pull, BlocksCacheKey(1, 5), cache, [3], [0]) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert status_of(pull, key, cache, [3], [0]) == LLMStatusCode.LLM_SUCCESS
    assert status_of(pull, BlocksCacheKey(3), cache, [3], [0]) == LLMStatusCode.LLM_NOT_YET_LINK
    assert status_of(pull, key, cache, [3, 4], [0]) == LLMStatusCode.LLM_PARAM_INVALID
    assert status_of(pull, key, cache, [16], [0]) == LLMStatusCode.LLM_PARAM_INVALID
    assert status_of(pull, key, cache, [3], [16]) == LLMStatusCode.LLM_PARAM_INVALID
    datadist.unlink(comm_id)
    assert status_of(pull, key, cache, [3], [0]) == LLMStatusCode.LLM_NOT_YET_LINK
    say("unlinking")
    add_remote_agent()
    pull(key, cache, [3, 4, 9], [0, 1, 7])
    assert all(np.array_equal(a, b) for a, b in zip(tensors, expected, strict=True))
    say("finished")
