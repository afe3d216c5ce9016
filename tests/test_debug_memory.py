"""``AIODATADIST_DEBUG_MEMORY=1``: freed memory of a pool is filled, so that a use after free is seen."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
from typing import Any

import pytest

from aiodatadist import Cache, CacheDesc, CacheKey, CacheManager, DataType, ParamInvalid, Placement
from aiodatadist._device import Device
from aiodatadist.testing import open_cluster, soft_fault, soft_faults_cleared

VARIABLE = "AIODATADIST_DEBUG_MEMORY"
POOL = {"memory_size": 1 << 20, "page_shift": 12}
POOLS: dict[str, Any] = {"mem_pool_cfg": POOL, "host_mem_pool_cfg": POOL}
NBYTES = 3 * 5000


def desc(placement: Placement) -> CacheDesc:
    return CacheDesc(2, [3, 5000], DataType.DT_UINT8, placement)


def bytes_at(addresses: list[int]) -> list[bytes]:
    """Read through a pointer that was kept too long: memory of softnpu's pools stays mapped."""
    return [ctypes.string_at(address, NBYTES) for address in addresses]


async def written(manager: CacheManager, placement: Placement, value: int, *keys: CacheKey) -> Cache:
    cache = await manager.allocate_cache(desc(placement), keys)
    for array in manager.arrays(cache):
        array[:] = value
    return cache


@pytest.mark.parametrize("placement", list(Placement))
async def test_freed_memory_reads_as_not_a_number_and_its_neighbour_is_untouched(
    monkeypatch: pytest.MonkeyPatch, placement: Placement
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    async with open_cluster(1, **POOLS) as cluster:
        manager = cluster.datadist.cache_manager
        before, cache, behind = [await written(manager, placement, 7) for _ in range(3)]
        addresses = list(cache.tensor_addrs)
        await manager.deallocate_cache(cache)
        assert bytes_at(addresses) == [b"\xff" * NBYTES] * 2
        for neighbour in (before, behind):
            assert bytes_at(neighbour.tensor_addrs) == [b"\x07" * NBYTES] * 2
        heir = await manager.allocate_cache(CacheDesc(2, [3, 2500], DataType.DT_FLOAT16, placement))
        assert heir.tensor_addrs == addresses
        assert all((array != array).all() for array in manager.arrays(heir))  # noqa: PLR0124 - of NaN alone


@pytest.mark.parametrize("value", [None, "", "0"])
async def test_without_it_memory_keeps_its_contents(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    async with open_cluster(1, **POOLS) as cluster:
        manager = cluster.datadist.cache_manager
        cache = await written(manager, Placement.DEVICE, 7)
        addresses = list(cache.tensor_addrs)
        await manager.deallocate_cache(cache)
        assert bytes_at(addresses) == [b"\x07" * NBYTES] * 2


async def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ParamInvalid, match="AIODATADIST_DEBUG_MEMORY is 'yes': must be 1, 0 or empty"):
        async with open_cluster(1, **POOLS):
            pass


async def test_memory_is_filled_with_its_last_reference_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    threads: list[threading.Thread] = []
    fill = Device.fill

    def watched(self: Device, ranges: Any, value: int) -> None:
        threads.append(threading.current_thread())
        fill(self, ranges, value)

    monkeypatch.setattr(Device, "fill", watched)
    async with open_cluster(1, **POOLS) as cluster:
        manager = cluster.datadist.cache_manager
        cache = await written(manager, Placement.DEVICE, 7, CacheKey(1, 5))
        addresses = list(cache.tensor_addrs)
        await manager.deallocate_cache(cache)
        assert bytes_at(addresses) == [b"\x07" * NBYTES] * 2, "a key refers to it"
        await manager.remove_cache_key(CacheKey(1, 5))
        assert bytes_at(addresses) == [b"\xff" * NBYTES] * 2
        assert len(threads) == 1
        assert threading.current_thread() not in threads


async def test_memory_is_given_back_also_where_the_device_refuses_to_fill_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    async with open_cluster(1, **POOLS) as cluster:
        manager = cluster.datadist.cache_manager
        cache = await written(manager, Placement.DEVICE, 7)
        with soft_faults_cleared(), caplog.at_level(logging.WARNING, "aiodatadist"):
            soft_fault("aclrtMemset:fail=507899")
            await manager.deallocate_cache(cache)
        assert "cache 1: its freed memory keeps its contents: " in caplog.text
        usage = manager.pool_usage()[Placement.DEVICE]
        assert usage.free == usage.total


async def test_a_cancelled_deallocation_fills_and_frees_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    async with open_cluster(1, **POOLS) as cluster:
        manager = cluster.datadist.cache_manager
        cache = await written(manager, Placement.DEVICE, 7)
        again = Cache(cache.cache_id, desc(Placement.DEVICE), cache.tensor_addrs, False)
        addresses = list(cache.tensor_addrs)
        task = asyncio.create_task(manager.deallocate_cache(cache))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await manager.deallocate_cache(again)  # waits for what the other began
        assert bytes_at(addresses) == [b"\xff" * NBYTES] * 2
        usage = manager.pool_usage()[Placement.DEVICE]
        assert usage.free == usage.total
