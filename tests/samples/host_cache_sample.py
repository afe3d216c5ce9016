"""The client pulls into memory of its host, registered without a flag; in either mode, which both ends are given."""

import ctypes

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, Placement
from sample_common import CLIENT, IS_SERVER, SERVER, hear, initialise, link, read, say, stamp, unlink, write

BLOCK, BLOCKS = 4096, 8
POOL = '{"memory_size": 4194304}'


def in_mode(one_sided):
    datadist = initialise(enable_remote_cache_accessible=one_sided, mem_pool_cfg=POOL)
    manager = datadist.cache_manager
    if IS_SERVER:
        desc = CacheDesc(2, [BLOCKS, BLOCK], DataType.DT_UINT8)
        cache = manager.allocate_blocks_cache(desc, BlocksCacheKey(SERVER))
        for tensor, address in enumerate(cache.tensor_addrs):
            for block in range(BLOCKS):
                write(address + block * BLOCK, stamp(SERVER, tensor, block, BLOCK))
        say("ready")
        hear("done")
    else:
        desc = CacheDesc(2, [BLOCKS, BLOCK], DataType.DT_UINT8, Placement.HOST)
        memory = [ctypes.create_string_buffer(desc.size) for _ in range(2)]
        addresses = [ctypes.addressof(each) for each in memory]
        cache = manager.register_blocks_cache(desc, addresses, BlocksCacheKey(CLIENT))
        hear("ready")
        link(datadist)
        manager.pull_blocks(BlocksCacheKey(SERVER), cache, [5, 6], [0, 7])
        for tensor, address in enumerate(addresses):
            assert read(address, BLOCK) == stamp(SERVER, tensor, 5, BLOCK)
            assert read(address + BLOCK, 6 * BLOCK) == bytes(6 * BLOCK)
            assert read(address + 7 * BLOCK, BLOCK) == stamp(SERVER, tensor, 6, BLOCK)
        unlink(datadist)
        manager.unregister_cache(cache.cache_id)
        say("done")
    datadist.finalize()


for mode in (True, False):
    in_mode(mode)
    say("again")
    hear("again")
