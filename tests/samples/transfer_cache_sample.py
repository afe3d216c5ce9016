"""Layer by layer, each as soon as it is computed; the client sends to addresses, and then by key in the one-sided mode."""

import threading

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

LAYERS = 4
DESC = CacheDesc(2 * LAYERS, [6, 512], DataType.DT_UINT8)
ME = SERVER if IS_SERVER else CLIENT
OK = LLMStatusCode.LLM_SUCCESS


class Computed(LayerSynchronizer):
    """A thread computes layer after layer, and the transfer waits for it here."""

    def __init__(self, tensors, value):
        self.asked = []
        self._events = [threading.Event() for _ in range(LAYERS)]
        self._thread = threading.Thread(target=self._compute, args=(tensors, value))
        self._thread.start()

    def _compute(self, tensors, value):
        for layer, event in enumerate(self._events):
            for tensor in tensors[2 * layer : 2 * layer + 2]:
                tensor[:] = value + layer
            event.set()

    def synchronize_layer(self, layer_index, timeout_in_millis):
        self.asked.append(layer_index)
        return self._events[layer_index].wait(10)


def transfer(manager, cache, tensors, config, value):
    computed = Computed(tensors, value)
    task = manager.transfer_cache_async(cache, computed, [config], [1, 2], [4, 0])
    assert task.synchronize(10_000) == OK
    assert task.get_results() == [OK]
    assert computed.asked == list(range(LAYERS))


def check(tensors, value):
    for number, tensor in enumerate(tensors):
        assert (tensor[[4, 0]] == value + number // 2).all(), number
        assert (tensor[[1, 2, 3, 5]] == 250).all(), number


def play(config_of, one_sided, value, word):
    datadist = initialise(enable_remote_cache_accessible=one_sided)
    manager = datadist.cache_manager
    tensors = [np.full(DESC.shape, 250, np.uint8) for _ in range(2 * LAYERS)]
    cache = manager.register_blocks_cache(DESC, [t.ctypes.data for t in tensors], BlocksCacheKey(ME))
    if IS_SERVER:
        say(" ".join(str(address) for address in cache.tensor_addrs))
        hear(word)
        check(tensors, value)
        say("checked")
    else:
        addresses = [int(text) for text in input().split()]
        link(datadist, peer(SERVER, PORT))
        transfer(manager, cache, tensors, config_of(addresses), value)
        unlink(datadist)
        say(word)
        hear("checked")
    datadist.finalize()


play(lambda addresses: TransferConfig(SERVER, addresses), False, 10, "by address")
layers = range(LAYERS)
play(lambda _: TransferWithCacheKeyConfig(BlocksCacheKey(SERVER), layers, layers), True, 20, "by key")
