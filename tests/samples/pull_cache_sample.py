"""Request/response: the client pulls slots of a contiguous cache by the requests that they were allocated for."""

from llm_datadist import CacheDesc, CacheKey, DataType, LLMStatusCode
from sample_common import CLIENT, IS_SERVER, SERVER, hear, initialise, link, read, say, stamp, status_of, unlink, write

SLOT = 4096
DESC = CacheDesc(4, [2, SLOT], DataType.DT_UINT8)
POOL = '{"memory_size": 1048576, "page_shift": 12}'

datadist = initialise(mem_pool_cfg=POOL)
manager = datadist.cache_manager
if IS_SERVER:
    cache = manager.allocate_cache(DESC, [CacheKey(SERVER, 7), CacheKey(SERVER, 8)])
    for tensor, address in enumerate(cache.tensor_addrs):
        for slot in range(2):
            write(address + slot * SLOT, stamp(SERVER, tensor, slot, SLOT))
    say("ready")
    hear("done")
    manager.deallocate_cache(cache)
    assert cache.tensor_addrs == []
else:
    cache = manager.allocate_cache(DESC)
    for tensor, address in enumerate(cache.tensor_addrs):
        write(address, stamp(CLIENT, tensor, 0, 2 * SLOT))
    hear("ready")
    link(datadist)
    manager.pull_cache(CacheKey(SERVER, 8), cache, 0)
    for tensor, address in enumerate(cache.tensor_addrs):
        assert read(address, SLOT) == stamp(SERVER, tensor, 1, SLOT)
        assert read(address + SLOT, SLOT) == stamp(CLIENT, tensor, 0, SLOT)
    assert (
        status_of(manager.pull_cache, CacheKey(SERVER, 8), cache, 1) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    )  # a request is pulled once
    manager.pull_cache(CacheKey(SERVER, 7), cache, batch_index=1, size=SLOT // 2)
    for tensor, address in enumerate(cache.tensor_addrs):
        assert read(address + SLOT, SLOT // 2) == stamp(SERVER, tensor, 0, SLOT // 2)
        assert read(address + SLOT + SLOT // 2, SLOT // 2) == stamp(CLIENT, tensor, 0, SLOT // 2)
    unlink(datadist)
    manager.deallocate_cache(cache)
    say("done")
datadist.finalize()
