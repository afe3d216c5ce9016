"""A context cache on a machine, as a program: it saves and loads blocks over a pool, as it is told.

Its argument is JSON: the ``url`` of the pool.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np

from aiodatadist.context_caching import CcConfig_v1, ContextCache
from tests.machines.orders import serve

LAYERS, BLOCKS, TOKENS = 2, 8, 16
SHAPE = (BLOCKS, TOKENS, 4, 64)


class Reader:
    """A cache over blocks in this process's memory. Its public methods are orders."""

    def __init__(self, cache: ContextCache, memory: list[list[np.ndarray]]) -> None:
        self._cache = cache
        self._memory = memory

    async def save(self, hashes: list[int], timeout: float = 20.0) -> int:
        """Fill a block for each hash with a pattern of the hash, and save them; return how many were saved."""
        for block, name in enumerate(hashes):
            for number, tensor in enumerate(self._tensors):
                tensor[block] = _pattern(name, number)
        return (await self._cache.save(hashes, chunks=[_chunks(len(hashes))], timeout=timeout)).success

    async def load(self, hashes: list[int], timeout: float = 20.0) -> int:
        """Load blocks, and compare them with their patterns; return how many were there."""
        for tensor in self._tensors:
            tensor[:] = 0
        found = (await self._cache.load(hashes, chunks=[_chunks(len(hashes))], timeout=timeout)).success
        for block, name in enumerate(hashes):
            for number, tensor in enumerate(self._tensors):
                assert (tensor[block] == (_pattern(name, number) if block < found else 0)).all(), (name, number)
        return found

    @property
    def _tensors(self) -> list[np.ndarray]:
        return [tensor for layer in self._memory for tensor in layer]


def _pattern(name: int, tensor: int) -> np.ndarray:
    return np.random.default_rng([name, tensor]).integers(0, 256, SHAPE[1:], np.uint8)


def _chunks(blocks: int) -> list[tuple[int, int]]:
    return [(TOKENS * block, TOKENS) for block in range(blocks)]


async def main(url: str) -> None:
    memory = [[np.zeros(SHAPE, np.uint8) for _ in "KV"] for _ in range(LAYERS)]
    async with await ContextCache.open(CcConfig_v1(rank_id=0, device_id=0, model_id="model"), url) as cache:
        await cache.register_kvcache(memory)
        await serve(Reader(cache, memory), None)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
