"""One-sided: the client pushes a slot of its contiguous cache into a slot of the server's, which is named by its id."""

from llm_datadist import CacheDesc, CacheKeyByIdAndIndex, DataType
from sample_common import CLIENT, IS_SERVER, SERVER, hear, initialise, link, read, say, stamp, unlink, write

SLOTS, SLOT = 3, 2048
DESC = CacheDesc(4, [SLOTS, SLOT], DataType.DT_INT8)
ME = SERVER if IS_SERVER else CLIENT

datadist = initialise(enable_remote_cache_accessible=True, mem_pool_cfg='{"memory_size": 1048576}')
manager = datadist.cache_manager
cache = manager.allocate_cache(DESC)
for tensor, address in enumerate(cache.tensor_addrs):
    for slot in range(SLOTS):
        write(address + slot * SLOT, stamp(ME, tensor, slot, SLOT))
if IS_SERVER:
    say(str(cache.cache_id))
    hear("done")
    for tensor, address in enumerate(cache.tensor_addrs):
        for slot in range(SLOTS):
            pushed = slot == 2 and tensor >= 2  # the second layer of slot 2, from slot 1
            wanted = stamp(CLIENT, tensor, 1, SLOT) if pushed else stamp(SERVER, tensor, slot, SLOT)
            assert read(address + slot * SLOT, SLOT) == wanted, (tensor, slot)
else:
    key = CacheKeyByIdAndIndex(SERVER, int(input()), 2)
    link(datadist)
    manager.push_cache(key, cache, 1, src_layer_range=range(1, 2), dst_layer_range=range(1, 2))
    unlink(datadist)
    say("done")
manager.deallocate_cache(cache)
datadist.finalize()
