"""The memory of one end: a blocks cache, and the host's view of it.

softnpu's memory is host memory. DEVICE memory of an NPU is staged in pinned memory of the same shape, by ``swap_blocks``.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheManager, LLMDataDist, Placement
from aiodatadist._cli.bench.workload import Case, MemoryKind
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._device import Memory
from aiodatadist.testing import pattern

PAGE = 2 << 20
"""The alignment of tensors in bytes: over HCCS every tensor must start at a page."""
MAX_NAMED = 3
"""The most wrong blocks that are named one by one."""

Piece = tuple[int, int, int]
"""A tensor, a block, and the block of the other end whose contents it must have."""


@dataclass(frozen=True)
class BenchCache:
    """A registered cache of a case.

    Attributes:
        views: views of the host, one per tensor: of the cache itself, or of its staging.
        staging: pinned memory for a cache that the host cannot address.
        lent: the library's memory behind it.
    """

    case: Case
    manager: CacheManager
    cache: Cache
    views: list[memoryview]
    staging: Cache | None
    lent: list[Memory]

    async def aclose(self) -> None:
        """Unregister the cache, and release its memory.

        Raises:
            LLMException: ``LLM_EXIST_LINK``: peers may reach it. Nothing has changed.
        """
        await self.manager.unregister_cache(self.cache.cache_id)
        _give_back(self.views, self.lent)

    async def fill(self, owner: int) -> None:
        """Fill each block with its owner and its number, or with zeros if ``owner`` is 0."""
        await in_thread(self._fill, owner)
        if self.staging is not None:
            await self.manager.swap_blocks(self.staging, self.cache, self._all)

    async def wrong(self, owner: int, pieces: Iterable[Piece]) -> list[str]:
        """Return which blocks differ from those of ``owner``: the first by name, then the number of the others."""
        if self.staging is not None:
            await self.manager.swap_blocks(self.cache, self.staging, self._all)
        return await in_thread(self._wrong, owner, list(pieces))

    @property
    def _all(self) -> dict[int, int]:
        return {block: block for block in range(self.case.blocks)}

    def _fill(self, owner: int) -> None:
        if owner == 0:
            _clear(self.views)
            return
        size = self.case.block
        for tensor, view in enumerate(self.views):
            for block in range(self.case.blocks):
                view[block * size : (block + 1) * size] = pattern(owner, tensor, block, size)

    def _wrong(self, owner: int, pieces: list[Piece]) -> list[str]:
        size, more = self.case.block, 0
        named: list[str] = []
        for tensor, block, source in pieces:
            if self.views[tensor][block * size : (block + 1) * size] == pattern(owner, tensor, source, size):
                continue
            if len(named) < MAX_NAMED:
                named.append(f"block {block} of tensor {tensor} does not hold block {source} of cluster {owner}")
            else:
                more += 1
        return [*named, f"{more} more"] if more else named


def moved(case: Case) -> list[Piece]:
    """Return where each block is once all transfers of a case are done."""
    return [
        (tensor, target, source)
        for moves in case.moves
        for tensor in range(case.tensors)
        for source, target in zip(moves.sources, moves.targets, strict=True)
    ]


async def open_cache(datadist: LLMDataDist, case: Case, key: BlocksCacheKey | None) -> BenchCache:
    """Return registered memory for a case: all zeros, with every page touched. The caller must close it.

    Raises:
        LLMException: if there is not enough memory, or it cannot be registered.
    """
    manager, desc = datadist.cache_manager, case.desc
    tensors, views, lent = await in_thread(_allocate, datadist, case, desc)
    try:
        staging = None
        if not views:
            host = CacheDesc(case.tensors, list(desc.shape), desc.data_type, Placement.HOST)
            addresses, views, pinned = await in_thread(_addressable, datadist, host)
            lent += pinned
            staging = Cache.create_cpu_cache(host, addresses)
        await in_thread(_clear, views)
        cache = await manager.register_blocks_cache(desc, tensors, key, True)
    except BaseException:
        tensors.clear()
        _give_back(views, lent)
        raise
    return BenchCache(case, manager, cache, views, staging, lent)


def _give_back(views: list[memoryview], lent: list[Memory]) -> None:
    views.clear()  # no array may be alive when memory is freed
    for memory in lent:
        memory.free()


def _allocate(datadist: LLMDataDist, case: Case, desc: CacheDesc) -> tuple[list[Any], list[memoryview], list[Memory]]:
    """Allocate the tensors.

    Return them, the host's views of them (none if it cannot address them), and the memory to free.
    """
    if case.memory is MemoryKind.USER:
        views = [memoryview(mmap.mmap(-1, desc.size, mmap.MAP_PRIVATE)) for _ in range(desc.num_tensors)]
        return list(views), views, []
    if desc.placement is Placement.HOST or datadist.runtime.is_soft:
        addresses, views, lent = _addressable(datadist, desc)
        return list(addresses), views, lent
    memory = datadist.device.allocate(desc.num_tensors * _stride(desc))
    return [memory.address + i * _stride(desc) for i in range(desc.num_tensors)], [], [memory]


def _addressable(datadist: LLMDataDist, desc: CacheDesc) -> tuple[list[int], list[memoryview], list[Memory]]:
    stride = _stride(desc)
    memory = datadist.device.allocate(desc.num_tensors * stride, desc.placement)
    view = memory.view()
    starts = range(0, desc.num_tensors * stride, stride)
    return [memory.address + i for i in starts], [view[i : i + desc.size] for i in starts], [memory]


def _stride(desc: CacheDesc) -> int:
    return -(-desc.size // PAGE) * PAGE


def _clear(views: list[memoryview]) -> None:
    for view in views:
        view[:] = bytes(len(view))
