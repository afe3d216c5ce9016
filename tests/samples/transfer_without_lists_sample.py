"""Layer by layer out of a blocks cache without block lists: block 0 of each tensor travels, to addresses and by key."""

import numpy as np
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from sample_common import CLIENT, IS_SERVER, PORT, SERVER, hear, initialise, link, peer, say, unlink

LAYERS = 2
DESC = CacheDesc(2 * LAYERS, [6, 512], DataType.DT_UINT8)
ME = SERVER if IS_SERVER else CLIENT
OK = LLMStatusCode.LLM_SUCCESS


class Computed(LayerSynchronizer):
    """Every layer is there already."""

    def synchronize_layer(self, layer_index, timeout_in_millis):
        return True


def play(config_of, one_sided, value, word):
    datadist = initialise(enable_remote_cache_accessible=one_sided)
    manager = datadist.cache_manager
    tensors = [np.full(DESC.shape, 250 if IS_SERVER else value + i, np.uint8) for i in range(2 * LAYERS)]
    cache = manager.register_blocks_cache(DESC, [t.ctypes.data for t in tensors], BlocksCacheKey(ME))
    if IS_SERVER:
        say(" ".join(str(address) for address in cache.tensor_addrs))
        hear(word)
        for number, tensor in enumerate(tensors):
            assert (tensor[0] == value + number).all(), number
            assert (tensor[1:] == 250).all(), number
        say("checked")
    else:
        addresses = [int(text) for text in input().split()]
        link(datadist, peer(SERVER, PORT))
        task = manager.transfer_cache_async(cache, Computed(), [config_of(addresses)])
        assert task.synchronize(10_000) == OK
        assert task.get_results() == [OK]
        unlink(datadist)
        say(word)
        hear("checked")
    datadist.finalize()


play(lambda addresses: TransferConfig(SERVER, addresses), False, 10, "by address")
layers = range(LAYERS)
play(lambda _: TransferWithCacheKeyConfig(BlocksCacheKey(SERVER), layers, layers), True, 20, "by key")
