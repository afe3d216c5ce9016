"""A cluster with a cache of DEVICE memory, whose contents are written and read through the runtime."""

from __future__ import annotations

import struct
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole
from aiodatadist._device import CopyKind, Program, Stream
from aiodatadist._testing.patterns import pattern
from aiodatadist._values.descriptors import Placement
from aiodatadist._values.grid import Grid
from tests.hardware.place import Place

HUGE_PAGE = 2 << 20
COPY_SECONDS = 60.0

Mark = tuple[int, int, int] | None
"""Owner, tensor and block that a block's contents name; None: they are not one block's."""


class Member:
    """A cluster of a test, here or in the peer's process."""

    def __init__(self, datadist: LLMDataDist, stream: Stream) -> None:
        self.datadist = datadist
        self.manager = datadist.cache_manager
        self.cluster_id = datadist.cluster_id
        self._stream = stream
        self._cache: Cache | None = None

    @property
    def cache(self) -> Cache:
        assert self._cache is not None, "allocate() makes it"
        return self._cache

    @property
    def info(self) -> LLMClusterInfo:
        assert self.datadist.listen_address is not None
        return address_of(self.cluster_id, *self.datadist.listen_address)

    # ---- memory ----

    async def allocate(self, tensors: int, blocks: int, nbytes: int) -> None:
        """Allocate a blocks cache from the pool, instead of the one before, and fill it with this cluster's own pattern."""
        if self._cache is not None:
            await self.manager.deallocate_blocks_cache(self._cache)
        desc = CacheDesc(tensors, [blocks, nbytes], DataType.DT_UINT8)
        self._cache = await self.manager.allocate_blocks_cache(desc, BlocksCacheKey(self.cluster_id))
        await self.fill()

    async def fill(self) -> None:
        """Fill each block with a pattern that names its cluster, its tensor and itself."""
        desc = self.cache.cache_desc
        await self.write(
            b"".join(
                pattern(self.cluster_id, tensor, block, desc.stride)
                for tensor in range(desc.num_tensors)
                for block in range(desc.shape[0])
            )
        )

    async def write(self, contents: bytes) -> None:
        """Write all tensors, one after the other."""
        host = self.datadist.device.allocate(len(contents), Placement.HOST)
        host.view()[:] = contents
        await self._copy(CopyKind.HOST_TO_DEVICE, self._grid(host.address).mirrored())
        host.free()

    async def read(self) -> bytes:
        """Read all tensors, one after the other, as they are in the device's memory now."""
        host = self.datadist.device.allocate(self.cache.cache_desc.size * len(self.cache.tensor_addrs), Placement.HOST)
        await self._copy(CopyKind.DEVICE_TO_HOST, self._grid(host.address))
        contents = bytes(host.view())
        host.free()
        return contents

    async def whose(self) -> list[list[Mark]]:
        """Return whose pattern each block of each tensor holds, byte for byte."""
        desc = self.cache.cache_desc
        contents = await self.read()
        starts = range(0, len(contents), desc.stride)
        marks = [mark_of(contents[start : start + desc.stride]) for start in starts]
        return [marks[first : first + desc.shape[0]] for first in range(0, len(marks), desc.shape[0])]

    def _grid(self, host: int) -> Grid:
        """Return a grid between the host's copy and the device's tensors."""
        size, tensors = self.cache.cache_desc.size, self.cache.tensor_addrs
        here = array("Q", [host + number * size for number in range(len(tensors))])
        zero = array("Q", [0])
        return Grid(here, array("Q", tensors), zero, zero, size, size, size, size)

    async def _copy(self, kind: CopyKind, grid: Grid) -> None:
        await self._stream.submit(Program().copy(kind, grid), COPY_SECONDS).wait()

    # ---- moving ----

    async def pull(self, peer: int, source: Sequence[int], target: Sequence[int], notify: bytes | None = None) -> None:
        await self.manager.pull_blocks(BlocksCacheKey(peer), self.cache, source, target, notify=notify)

    async def push(self, peer: int, source: Sequence[int], target: Sequence[int], notify: bytes | None = None) -> None:
        await self.manager.push_blocks(BlocksCacheKey(peer), self.cache, source, target, notify=notify)

    async def notes(self, count: int) -> list[str]:
        """Wait for ``count`` notifications, including those that are waiting already."""
        found: list[str] = []
        async for note in self.datadist.notifications():
            found.append(note.payload.decode())
            if len(found) == count:
                break
        return found


def mark_of(block: bytes) -> Mark:
    owner, tensor, number = struct.unpack_from("<QII", block.ljust(16, b"\0"))
    return (owner, tensor, number) if block == pattern(owner, tensor, number, len(block)) else None


def address_of(cluster_id: int, host: str, port: int) -> LLMClusterInfo:
    info = LLMClusterInfo(cluster_id)
    info.append_remote_ip_info(host, port)
    return info


@asynccontextmanager
async def member(place: Place, cluster_id: int, pool: int = 64 << 20, **options: Any) -> AsyncIterator[Member]:
    """Open a cluster at a place. ``pool`` is the number of bytes of DEVICE memory for its caches."""
    chosen = {"sync_kv_timeout": 10_000, "mem_pool_cfg": f'{{"memory_size": {pool}}}', **place.options, **options}
    async with LLMDataDist(LLMRole.MIX, cluster_id, LLMConfig(**chosen)) as datadist:
        stream = datadist.device.open_stream("contents")
        try:
            yield Member(datadist, stream)
        finally:
            await stream.aclose()
