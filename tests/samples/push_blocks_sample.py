"""One-sided: the client pushes blocks into the server's paged cache; memory by ctypes."""

import ctypes

from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from sample_common import CLIENT, IS_SERVER, SERVER, hear, initialise, link, read, say, stamp, unlink, write

BLOCKS, BLOCK = 8, 1024
DESC = CacheDesc(4, [BLOCKS, BLOCK], DataType.DT_UINT8)
ME = SERVER if IS_SERVER else CLIENT
PUSHED = {4: 1, 5: 2, 0: 7}  # to: from

datadist = initialise(enable_remote_cache_accessible=True)
buffers = [(ctypes.c_uint8 * (BLOCKS * BLOCK))() for _ in range(4)]
addresses = [ctypes.addressof(buffer) for buffer in buffers]
for tensor, address in enumerate(addresses):
    for block in range(BLOCKS):
        write(address + block * BLOCK, stamp(ME, tensor, block, BLOCK))
cache = datadist.cache_manager.register_blocks_cache(DESC, addresses, BlocksCacheKey(ME, 3))
if IS_SERVER:
    say("ready")
    hear("done")
    for tensor, address in enumerate(addresses):
        for block in range(BLOCKS):
            wanted = (CLIENT, tensor, PUSHED[block]) if block in PUSHED else (SERVER, tensor, block)
            assert read(address + block * BLOCK, BLOCK) == stamp(*wanted, BLOCK), (tensor, block)
else:
    hear("ready")
    link(datadist)
    key = BlocksCacheKey(SERVER, 3)
    datadist.cache_manager.push_blocks(key, cache, list(PUSHED.values()), list(PUSHED))
    unlink(datadist)
    say("done")
datadist.finalize()
