"""The client pulls a contiguous slot into blocks of its paged cache; the last block is not filled to its end."""

import numpy as np
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMStatusCode,
)
from sample_common import CLIENT, IS_SERVER, SERVER, hear, initialise, link, say, status_of, unlink

SLOT, BLOCK = 2500, 1024
SLOTS = CacheDesc(2, [2, SLOT], DataType.DT_UINT8)
BLOCKS = CacheDesc(2, [6, BLOCK], DataType.DT_UINT8)
source = [np.random.default_rng(seed).integers(0, 256, (2, SLOT), np.uint8) for seed in (1, 2)]

datadist = initialise(enable_remote_cache_accessible=True)
manager = datadist.cache_manager
if IS_SERVER:
    keys = [CacheKey(SERVER, 0), CacheKey(SERVER, 1)]
    cache = manager.register_cache(SLOTS, [tensor.ctypes.data for tensor in source], keys)
    say(str(cache.cache_id))
    hear("done")
else:
    cache_id = int(input())
    tensors = [np.full((6, BLOCK), 77, np.uint8) for _ in range(2)]
    cache = manager.register_blocks_cache(BLOCKS, [tensor.ctypes.data for tensor in tensors], BlocksCacheKey(CLIENT))
    link(datadist)
    manager.pull_blocks(CacheKey(SERVER, 1), cache, [], [4, 0, 2])
    for tensor, theirs in zip(tensors, source, strict=True):
        pulled = np.concatenate([tensor[4], tensor[0], tensor[2]])
        assert np.array_equal(pulled[:SLOT], theirs[1])
        assert (pulled[SLOT:] == 77).all()
        assert (tensor[[1, 3, 5]] == 77).all()
    manager.pull_blocks(CacheKeyByIdAndIndex(SERVER, cache_id, 0), cache, (), (5, 3, 1))
    assert all(np.array_equal(t[[5, 3, 1]].ravel()[:SLOT], s[0]) for t, s in zip(tensors, source, strict=True))
    assert status_of(manager.pull_blocks, CacheKey(SERVER, 1), cache, [], [4, 0]) == LLMStatusCode.LLM_PARAM_INVALID
    unlink(datadist)
    say("done")
datadist.finalize()
