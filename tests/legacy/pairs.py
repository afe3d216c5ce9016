"""A PROMPT and a DECODER of the v1 interface, linked, each with a pool; and models that leave something to look at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiodatadist import CacheDesc, CacheKey, DataType, LLMClusterInfo, LLMRole, LLMStatusCode
from aiodatadist._legacy.link_locks import LinkLocks
from aiodatadist.legacy import KvCache, KvCacheManager, LLMConfig, LLMDataDist, LLMModel, ModelConfig, ModelRunner

OK = LLMStatusCode.LLM_SUCCESS
POOL = {"ge.flowGraphMemMaxSize": "4194304"}
SLOTS = CacheDesc(4, [3, 512], DataType.DT_UINT8)
BLOCKS = CacheDesc(4, [16, 256], DataType.DT_UINT8)
UNSET = 2**64 - 1


def info_of(datadist: LLMDataDist) -> LLMClusterInfo:
    info = LLMClusterInfo(datadist.cluster_id)
    assert datadist.listen_address is not None
    info.append_remote_ip_info(*datadist.listen_address)
    return info


@asynccontextmanager
async def open_one(role: LLMRole, cluster_id: int, **options: Any) -> AsyncIterator[LLMDataDist]:
    given = {"listen_ip_info": "127.0.0.1:0", "ge_options": POOL, "device_id": cluster_id % 8, **options}
    async with LLMDataDist(role, cluster_id, LLMConfig(**given)) as datadist:
        yield datadist


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
        found = [manager.pool_usage() for manager in (self.owner, self.puller)]
        return [usage.free for usage in found if usage is not None]


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[Pair]:
    async with (
        open_one(LLMRole.PROMPT, 1, **options) as prompt,
        open_one(LLMRole.DECODER, 2, **options) as decoder,
    ):
        assert await decoder.link_clusters([info_of(prompt)], 5000) == (OK, [OK])
        await prompt.wait_linked(2)
        yield Pair(prompt, decoder)


def locks_of(manager: KvCacheManager) -> LinkLocks:
    """Return the manager's links that are in use."""
    return manager._v1_engine.link_locks


def uses_of(manager: KvCacheManager) -> dict[int, str]:
    """Return what each link is used for just now."""
    return locks_of(manager).uses


def value(tensor: int, piece: int) -> int:
    """Return the value of all bytes of a filled slot or block."""
    return 16 * tensor + piece + 1


def fill(manager: KvCacheManager, cache: KvCache) -> None:
    for tensor, array in enumerate(manager.arrays(cache)):
        for piece in range(len(array)):
            array[piece] = value(tensor, piece)


def held(manager: KvCacheManager, cache: KvCache) -> list[Any]:
    """Return a copy of each tensor."""
    return [array.copy() for array in manager.arrays(cache)]


async def filled(manager: KvCacheManager, keys: list[CacheKey], desc: CacheDesc = SLOTS) -> KvCache:
    cache = await manager.allocate_cache(desc, keys)
    fill(manager, cache)
    return cache


# ---- models ----

SHAPE = "2,32,8"
TENSORS = 4


def options(shape: str = SHAPE, **others: Any) -> dict[str, str]:
    config = ModelConfig()
    config.kv_shapes = [shape] * TENSORS
    config.kv_dtypes = [DataType.DT_FLOAT] * TENSORS
    config.kv_seq_len_dim_index = 1
    config.enable_shared_system_prefix = True
    config.kv_tensor_format = "BSH"
    for name, each in others.items():
        setattr(config, name, each)
    return config.generate_options()


class Writer(ModelRunner):
    """Writes what it is given into the first tokens of each slot: ``inputs`` is a list of (slot, first token, values)."""

    def __init__(self, datadist: LLMDataDist) -> None:
        self.manager = datadist.kv_cache_manager
        self.told: list[tuple[str, KvCache]] = []
        self.shapes: list[list[int]] = []
        self.interrupt: Callable[[], object] = lambda: None

    def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Any:
        self.shapes.append(list(kv_cache.cache_desc.shape))
        for slot, first, values in input_tensors:
            for tensor, array in enumerate(self.manager.arrays(kv_cache)):
                array[slot, first : first + len(values)] = np.array(values, np.float32)[:, None] + 1000 * tensor
        self.interrupt()
        return kwargs.get("answer", "done")

    def on_cache_allocated(self, kv_cache: KvCache) -> None:
        self.told.append(("allocated", kv_cache))

    def on_cache_deallocated(self, kv_cache: KvCache) -> None:
        self.told.append(("deallocated", kv_cache))


class AsyncWriter(Writer):
    """The same, awaited."""

    async def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return super().run_model(kv_cache, input_tensors, **kwargs)


@dataclass
class Models:
    pair: Pair
    prompt: LLMModel
    decoder: LLMModel
    writer: Writer
    reader: Writer

    def slot(self, slot: int) -> list[Any]:
        """Return the values of a slot on DECODER, one of each token. Tensors agree but for 1000 per tensor."""
        (kind, cache), *_ = self.reader.told
        assert kind == "allocated"
        tensors = held(self.pair.puller, cache)
        for tensor, array in enumerate(tensors):
            written = tensors[0][slot] != 0
            assert (array[slot] == (tensors[0][slot] + 1000 * tensor) * written).all()
        return [float(each) for each in tensors[0][slot, :, 0]]


@asynccontextmanager
async def models(prompt_shape: str = SHAPE, kind: type[Writer] = Writer, **others: Any) -> AsyncIterator[Models]:
    async with pair(**others) as linked:
        writer, reader = kind(linked.prompt), Writer(linked.decoder)
        prompt = await linked.prompt.add_model(options(prompt_shape), writer)
        yield Models(linked, prompt, await linked.decoder.add_model(options(), reader), writer, reader)
