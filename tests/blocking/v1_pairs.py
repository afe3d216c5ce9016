"""A PROMPT and a DECODER in the KvCacheManager mode, linked; and a model that leaves something to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiodatadist.blocking import (
    CacheKey,
    KvCache,
    KvCacheManager,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMModel,
    LLMReq,
    LLMRole,
    LLMStatusCode,
    ModelRunner,
)
from tests.legacy.pairs import POOL, SLOTS, UNSET, options, value

OK = LLMStatusCode.LLM_SUCCESS


def request(req_id: int, length: int = 0, prefix_id: int = UNSET) -> LLMReq:
    return LLMReq(req_id, length, 1, 2, prefix_id)


@contextmanager
def cluster(role: LLMRole, cluster_id: int, **values: Any) -> Iterator[LLMDataDist]:
    """Open a cluster whose options say nothing of modes."""
    given = {"ge_options": POOL, "device_id": cluster_id % 8, "sync_kv_timeout": 20_000, **values}
    if role is LLMRole.PROMPT:
        given.setdefault("listen_ip_info", "127.0.0.1:0")
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(LLMConfig(**given).generate_options())
    try:
        yield datadist
    finally:
        datadist.finalize()


def info_of(datadist: LLMDataDist) -> LLMClusterInfo:
    address = datadist.listen_address
    assert address is not None
    info = LLMClusterInfo(datadist.cluster_id)
    info.append_remote_ip_info(*address)
    return info


def free(datadist: LLMDataDist) -> int:
    usage = datadist.kv_cache_manager.pool_usage()
    assert usage is not None
    return usage.free


@dataclass
class Pair:
    """Cluster 1 is PROMPT, cluster 2 DECODER."""

    prompt: LLMDataDist
    decoder: LLMDataDist

    @property
    def owner(self) -> KvCacheManager:
        return self.prompt.kv_cache_manager

    @property
    def puller(self) -> KvCacheManager:
        return self.decoder.kv_cache_manager

    def free(self) -> list[int]:
        """Return the free bytes of both pools."""
        return [free(self.prompt), free(self.decoder)]


@contextmanager
def linked_pair(**values: Any) -> Iterator[Pair]:
    with cluster(LLMRole.PROMPT, 1, **values) as prompt, cluster(LLMRole.DECODER, 2, **values) as decoder:
        assert decoder.link_clusters([info_of(prompt)], 5000) == (OK, [OK])
        prompt.wait_linked(2)
        yield Pair(prompt, decoder)


def fill(manager: KvCacheManager, cache: KvCache) -> None:
    for tensor, array in enumerate(manager.arrays(cache)):
        for piece in range(len(array)):
            array[piece] = value(tensor, piece)


def filled(manager: KvCacheManager, keys: list[CacheKey]) -> KvCache:
    cache = manager.allocate_cache(SLOTS, keys)
    fill(manager, cache)
    return cache


def held(manager: KvCacheManager, cache: KvCache) -> list[list[int]]:
    """Return the first byte of each piece of each tensor. All bytes of a piece must be alike."""
    tensors = [manager.get_cache_tensors(cache, i)[0].numpy() for i in range(cache.cache_desc.num_tensors)]
    assert all((array == array[:, :1]).all() for array in tensors)
    return [array[:, 0].tolist() for array in tensors]


class Writer(ModelRunner):
    """Writes what it is given into the first tokens of each slot: ``inputs`` is a list of (slot, first token, values)."""

    def __init__(self, datadist: LLMDataDist) -> None:
        self.datadist = datadist
        self.told: list[str] = []
        self.cache: KvCache | None = None
        self.meanwhile: Callable[[], Any] = lambda: None

    def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Any:
        for slot, first, values in input_tensors:
            for tensor, array in enumerate(self.datadist.kv_cache_manager.arrays(kv_cache)):
                array[slot, first : first + len(values)] = np.array(values, np.float32)[:, None] + 1000 * tensor
        found = self.meanwhile()
        return kwargs.get("answer", found)

    def on_cache_allocated(self, kv_cache: KvCache) -> None:
        self.told.append("allocated")
        self.cache = kv_cache

    def on_cache_deallocated(self, kv_cache: KvCache) -> None:
        self.told.append("deallocated")
        assert self.datadist.kv_cache_manager.is_initialized()
        self.cache = None


@dataclass
class Models:
    pair: Pair
    prompt: LLMModel
    decoder: LLMModel
    writer: Writer
    reader: Writer

    def slot(self, slot: int, tensor: int = 0) -> list[float]:
        """Return the values of a slot on DECODER, one of each token."""
        assert self.reader.cache is not None
        (found,) = self.pair.puller.get_cache_tensors(self.reader.cache, tensor)
        return [float(each) for each in found.numpy()[slot, :, 0]]


@contextmanager
def models(**values: Any) -> Iterator[Models]:
    with linked_pair(**values) as pair:
        writer, reader = Writer(pair.prompt), Writer(pair.decoder)
        prompt = pair.prompt.add_model(options(), writer)
        decoder = pair.decoder.add_model(options(), reader)
        yield Models(pair, prompt, decoder, writer, reader)
