"""One-sided: the client pulls blocks of a paged cache of numpy arrays, all layers and then some."""

import numpy as np
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from sample_common import CLIENT, IS_SERVER, SERVER, hear, initialise, link, say, unlink

LAYERS, BLOCKS = 3, 10
DESC = CacheDesc(2 * LAYERS, [BLOCKS, 16, 8], DataType.DT_FLOAT)


def contents(owner):
    """Return contents in which block b of tensor t holds owner * 1000 + t * 100 + b."""
    blocks = np.arange(BLOCKS, dtype=np.float32)[:, None, None]
    return [np.broadcast_to(owner * 1000 + t * 100 + blocks, DESC.shape).copy() for t in range(2 * LAYERS)]


datadist = initialise(enable_remote_cache_accessible=True)
tensors = contents(SERVER if IS_SERVER else CLIENT)
addresses = [tensor.ctypes.data for tensor in tensors]
cache = datadist.cache_manager.register_blocks_cache(DESC, addresses, BlocksCacheKey(SERVER if IS_SERVER else CLIENT))
if IS_SERVER:
    say("ready")
    hear("done")
    assert all(np.array_equal(a, b) for a, b in zip(tensors, contents(SERVER), strict=True))
else:
    hear("ready")
    link(datadist)
    expected, theirs = contents(CLIENT), contents(SERVER)
    datadist.cache_manager.pull_blocks(BlocksCacheKey(SERVER), cache, [3, 4, 9], [0, 1, 7])
    for mine, other in zip(expected, theirs, strict=True):
        mine[[0, 1, 7]] = other[[3, 4, 9]]
    assert all(np.array_equal(a, b) for a, b in zip(tensors, expected, strict=True))
    layers = {"src_layer_range": range(1, 2), "dst_layer_range": range(2, 3)}
    datadist.cache_manager.pull_blocks(BlocksCacheKey(SERVER), cache, [5], [5], **layers)
    for k_or_v in range(2):
        expected[4 + k_or_v][5] = theirs[2 + k_or_v][5]
    assert all(np.array_equal(a, b) for a, b in zip(tensors, expected, strict=True))
    unlink(datadist)
    say("done")
datadist.finalize()
