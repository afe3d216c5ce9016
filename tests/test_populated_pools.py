"""Pools get their pages when ``populate`` says, and never those that the machine or the container needs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from aiodatadist import Cache, CacheDesc, DataType, OutOfMemory, Placement
from aiodatadist._device import Device
from aiodatadist._device import device as module
from aiodatadist._device.memory_limit import MemoryLimit
from aiodatadist._native.library import ffi
from aiodatadist.testing import Cluster, open_cluster, soft_faults_cleared, soft_hold

SIZE = 8 << 20
LARGE = 300 << 20
"""Bytes of a pool that no registration populates."""


def present(device: Device, address: int, nbytes: int) -> int:
    """Return how many bytes have pages."""
    return int(device.runtime.acl.softnpu_present(ffi.cast("void *", address), nbytes))


class Whole:
    """A whole pool, as one cache."""

    def __init__(self, cluster: Cluster, cache: Cache, nbytes: int) -> None:
        self._device = cluster.datadist.device
        self._cache, self._nbytes = cache, nbytes
        self._manager = cluster.datadist.cache_manager

    @property
    def present(self) -> int:
        """The number of its bytes that have pages."""
        return present(self._device, self._cache.tensor_addrs[0], self._nbytes)

    def touch(self) -> None:
        (array,) = self._manager.arrays(self._cache)
        array[0, 0] = 1


async def whole_of(cluster: Cluster, nbytes: int, placement: Placement = Placement.DEVICE) -> Whole:
    desc = CacheDesc(1, [1, nbytes], DataType.DT_UINT8, placement)
    return Whole(cluster, await cluster.datadist.cache_manager.allocate_cache(desc), nbytes)


def pool(populate: str | None, nbytes: int = SIZE) -> str:
    return json.dumps({"memory_size": nbytes} | ({} if populate is None else {"populate": populate}))


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of a container with a limit of 32 MiB, of which 24 are in use."""
    (tmp_path / "memory.max").write_text(f"{32 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {20 << 20}\nshmem {4 << 20}\n")
    found = MemoryLimit(32 << 20, 24 << 20, str(tmp_path / "memory.max"))
    monkeypatch.setattr(module, "memory_limit", lambda: found)
    return tmp_path


async def test_pages_come_before_init_returns() -> None:
    async with open_cluster(1, mem_pool_cfg=pool("init", LARGE)) as cluster:
        assert (await whole_of(cluster, LARGE)).present == LARGE


async def test_pages_come_with_their_first_use() -> None:
    async with open_cluster(1, mem_pool_cfg=pool("use", LARGE)) as cluster:
        whole = await whole_of(cluster, LARGE)
        assert whole.present == 0
        whole.touch()
        assert 0 < whole.present <= 2 << 20


@pytest.mark.parametrize("populate", [None, "background"])
async def test_pages_come_behind_init(populate: str | None) -> None:
    options: dict[str, Any] = {"mem_pool_cfg": pool(populate), "host_mem_pool_cfg": pool(populate)}
    async with open_cluster(1, transport="loopback", **options) as cluster:
        device, host = await whole_of(cluster, SIZE), await whole_of(cluster, SIZE, Placement.HOST)
        while (device.present, host.present) != (SIZE, SIZE):  # noqa: ASYNC110, the kernel has no event for it
            await asyncio.sleep(0.01)


async def test_a_pool_is_not_populated_beyond_the_containers_limit(container: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"an eighth of the machine's memory, and of the container's limit, is left"):
        async with open_cluster(1, mem_pool_cfg=pool("init")):
            pass
    (container / "memory.stat").write_text("anon 1\n")
    async with open_cluster(1, mem_pool_cfg=pool("init")) as cluster:
        assert (await whole_of(cluster, SIZE)).present == SIZE


async def test_populating_stops_when_its_caller_is_cancelled() -> None:
    async with await Device.open(0) as device:
        memory = device.allocate(SIZE)
        with soft_faults_cleared(), soft_hold("softnpu_populate") as held:
            populating = asyncio.create_task(device.populate(memory))
            await held.arrived()
            populating.cancel()
            await asyncio.sleep(0)
            held.release()
            with pytest.raises(asyncio.CancelledError):
                await populating
        assert present(device, memory.address, SIZE) == 0
