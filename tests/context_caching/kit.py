"""A rank with a KV cache whose contents say where they belong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodatadist._device import Device
from aiodatadist.context_caching import CcConfig_v1, ContextCache, KVPool

BLOCK = 4
BLOCKS = 16
SLOTS = BLOCK * BLOCKS
ROOM = 1 << 20


class Kv:
    """Tensors ``[blocks, block, *row]``, two or more per layer, with random contents.

    Args:
        rows: of each layer, the shapes of a token in its tensors.
        memory: bytes to make them in, or None for numpy's own.
    """

    def __init__(
        self,
        seed: int = 0,
        rows: Sequence[Sequence[tuple[int, ...]]] = (((2, 24), (2, 24)),) * 3,
        blocks: Sequence[int] | int = BLOCKS,
        block: int = BLOCK,
        dtype: str = "float16",
        memory: memoryview | None = None,
    ) -> None:
        random = np.random.default_rng(seed)
        self.layers: list[list[NDArray[Any]]] = []
        used = 0
        for i, layer in enumerate(rows):
            count = blocks if isinstance(blocks, int) else blocks[i]
            self.layers.append([])
            for row in layer:
                made = random.integers(0, 1 << 14, (count, block, *row)).astype(dtype)
                if memory is not None:
                    place = np.frombuffer(memory, dtype, made.size, used).reshape(made.shape)
                    place[...] = made
                    used += -(-made.nbytes // 64) * 64
                    made = place
                self.layers[-1].append(made)

    def rows(self, slots: Sequence[int], layers: Sequence[int] | None = None) -> list[bytes]:
        """Return the contents of these slots, tensor by tensor."""
        chosen = range(len(self.layers)) if layers is None else layers
        return [t.reshape(-1, *t.shape[2:])[list(slots)].tobytes() for layer in chosen for t in self.layers[layer]]

    def wipe(self) -> None:
        for layer in self.layers:
            for tensor in layer:
                tensor[...] = 0

    def image(self) -> list[bytes]:
        return [tensor.tobytes() for layer in self.layers for tensor in layer]


def block_slots(blocks: Sequence[int]) -> list[int]:
    return [block * BLOCK + row for block in blocks for row in range(BLOCK)]


def by_slots(blocks: Sequence[int]) -> dict[str, Any]:
    """Return the arguments for these whole blocks, one per hash."""
    return {"slots": block_slots(blocks), "offsets": [BLOCK] * len(blocks)}


def by_chunks(blocks: Sequence[int]) -> dict[str, Any]:
    return {"chunks": [[(block * BLOCK, BLOCK) for block in blocks]]}


def rank(**fields: Any) -> CcConfig_v1:
    return CcConfig_v1(**{"rank_id": 0, "device_id": 0, "model_id": "model", **fields})


@asynccontextmanager
async def opened(pool: KVPool | str, kv: Kv | None = None, **options: Any) -> AsyncIterator[ContextCache]:
    """Open a cache with a registered KV cache."""
    config = options.pop("config", rank())
    async with await ContextCache.open(config, pool, **options) as cache:
        if kv is not None:
            await cache.register_kvcache(kv.layers)
        yield cache


@asynccontextmanager
async def kv_in(kind: str, **options: Any) -> AsyncIterator[Kv]:
    """Make a KV cache in ordinary memory of the host, or in a device's."""
    async with AsyncExitStack() as stack:
        memory = None
        if kind == "device":
            device = await stack.enter_async_context(await Device.open(0))
            memory = device.allocate(ROOM).view()
        kv = Kv(memory=memory, **options)
        del memory
        try:
            yield kv
        finally:
            kv.layers.clear()
