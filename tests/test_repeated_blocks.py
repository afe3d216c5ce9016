"""A block that a call would write twice is refused before anything starts, on every way that blocks take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlockParts,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    ParamInvalid,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from aiodatadist.testing import Cluster, inside, linked_pair, open_cluster, verify
from tests.blocking.pairs import linked_pair as blocking_pair

BLOCKS = 16
DESC = CacheDesc(4, [BLOCKS, 1024], DataType.DT_UINT8)
KEY = BlocksCacheKey(1)
modes = pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "requests"])
checksums = pytest.mark.parametrize("checksum", [None, True], ids=["plain", "checksum"])


def refused(name: str, call: Callable[[], object], at: int = 1, first: int = 0, block: int = 2) -> None:
    """Check that the call itself raises, and names the block and the rule."""
    with pytest.raises(ParamInvalid) as caught:
        call()
    assert caught.value.args[0].startswith(f"{name}[{at}] is {block}, as {name}[{first}] is: ")
    assert "once" in caught.value.args[0]


def nothing_started(*clusters: Cluster) -> None:
    """Check that no peer's transfer has started."""
    for cluster in clusters:
        assert all(not link.transfers and not link.running for link in cluster.datadist.statistics().links)


@modes
@checksums
async def test_pulls(one_sided: bool, checksum: bool | None) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as (prompt, decoder, _, target):
        manager = decoder.datadist.cache_manager
        refused("dst_blocks", lambda: manager.pull_blocks(KEY, target, [0, 1], [2, 2], checksum=checksum))
        refused(
            "dst_blocks", lambda: manager.pull_blocks(KEY, target, range(5), [7, 2, 5, 3, 2], checksum=checksum), 4, 1
        )
        many = [*range(BLOCKS), 9]
        refused("dst_blocks", lambda: manager.pull_blocks(KEY, target, [0] * 17, many, checksum=checksum), 16, 9, 9)
        nothing_started(prompt, decoder)
        verify(decoder.memory(target), target, [])
        await manager.pull_blocks(KEY, target, [3, 3], [2, 1], checksum=checksum)
        verify(decoder.memory(target), target, [(t, b, 1, 3) for t in range(4) for b in (1, 2)])


@modes
async def test_a_slot_to_blocks(one_sided: bool) -> None:
    desc = CacheDesc(4, [2, 2048], DataType.DT_UINT8)
    async with linked_pair(desc, slots=True, enable_remote_cache_accessible=one_sided) as (prompt, decoder, _, _):
        target, manager = await decoder.blocks(DESC), decoder.datadist.cache_manager
        refused("dst_blocks", lambda: manager.pull_blocks(CacheKey(1, 0), target, dst_blocks=[2, 2]))
        nothing_started(prompt, decoder)


@checksums
async def test_pushes(checksum: bool | None) -> None:
    async with linked_pair(DESC) as (prompt, decoder, source, target):
        manager = decoder.datadist.cache_manager
        refused("dst_blocks", lambda: manager.push_blocks(KEY, target, [0, 1], [2, 2], checksum=checksum))
        nothing_started(prompt, decoder)
        verify(prompt.memory(source), source, [])
        await manager.push_blocks(KEY, target, [3, 3], [2, 1], checksum=checksum)
        verify(prompt.memory(source), source, [(t, b, 2, 3) for t in range(4) for b in (1, 2)])


@pytest.mark.parametrize("call", ["pull_blocks", "push_blocks"])
@pytest.mark.parametrize("count", [2, 255, 256, 257])
async def test_what_was_done_before(call: str, count: int) -> None:
    """Small transfers of the same caches take a shortcut from the third one on."""
    desc = CacheDesc(2, [600, 16], DataType.DT_UINT8)
    async with linked_pair(desc) as (prompt, decoder, source, target):
        manager = decoder.datadist.cache_manager
        cluster, cache = (decoder, target) if call == "pull_blocks" else (prompt, source)
        for _ in range(3):
            await getattr(manager, call)(KEY, target, [0], [0])
        before = bytes(cluster.memory(cache).view())
        twice = [*range(count - 1, 0, -1), 2 if count > 2 else 1]
        at, block = count - 1, twice[-1]
        first = twice.index(block)
        refused("dst_blocks", lambda: getattr(manager, call)(KEY, target, range(count), twice), at, first, block)
        assert bytes(cluster.memory(cache).view()) == before
        report = await getattr(manager, call)(KEY, target, twice, range(100, 100 + count))
        assert report.bytes == 2 * 16 * count


async def test_copies_within_a_cluster() -> None:
    async with open_cluster(1) as cluster:
        manager, here = cluster.datadist.cache_manager, await cluster.blocks(DESC)
        host = await cluster.blocks(CacheDesc(4, [BLOCKS, 1024], DataType.DT_UINT8, Placement.HOST), model_id=None)
        before = bytes(cluster.memory(here).view())
        refused("dst_blocks", lambda: manager.copy_blocks(here, {0: [2], 1: [2]}))
        refused("dst_blocks", lambda: manager.copy_blocks(here, {0: [2, 2]}))
        refused("dst_blocks", lambda: manager.swap_blocks(host, here, {0: 2, 1: 2}))
        refused("dst_blocks", lambda: manager.swap_blocks(here, host, {0: 2, 1: 2}))
        assert bytes(cluster.memory(here).view()) == before
        assert (await manager.copy_blocks(here, {0: [2, 3]})).bytes == 2 * 4 * 1024


@modes
async def test_blocks_that_are_kept(one_sided: bool) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as (prompt, decoder, source, target):
        lease = prompt.datadist.cache_manager.lease_blocks(source, [3, 3], 60)
        pull, ticket = decoder.datadist.cache_manager.pull_leased, lease.ticket()
        refused("dst_blocks", lambda: pull(ticket, target, [2, 2]))
        refused("dst_blocks", lambda: pull(ticket, target, [2, 2], parts=BlockParts(512, [0, 1], [0, 1])))
        refused("parts.dst", lambda: pull(ticket, target, [1, 2], parts=BlockParts(512, [0, 1], [2, 2])))
        nothing_started(prompt, decoder)
        assert lease.ended is None
        await pull(ticket, target, [2, 1])
        verify(decoder.memory(target), target, [(t, b, 1, 3) for t in range(4) for b in (1, 2)])


@modes
@checksums
async def test_layers(one_sided: bool, checksum: bool | None) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as (prompt, decoder, source, target):
        manager, layers = decoder.datadist.cache_manager, AwaitableLayerSynchronizer(2)
        addresses = list(source.tensor_addrs)
        config = TransferWithCacheKeyConfig(KEY) if one_sided else TransferConfig(1, addresses)

        def start(configs: list[Any], src: list[int], dst: list[int]) -> object:
            return manager.transfer_cache_async(target, layers, configs, src, dst, checksum=checksum)

        refused("dst_block_indices", lambda: start([config], [0, 1], [2, 2]))
        if not one_sided:
            twice = TransferConfig(1, [addresses[0], *addresses[:3]])
            refused("dst_addrs", lambda: start([twice], [0], [1]), block=addresses[0])
        nothing_started(prompt, decoder)
        assert _leases(decoder, target) == 0
        verify(prompt.memory(source), source, [])


async def test_a_slot_to_blocks_layer_by_layer() -> None:
    desc = CacheDesc(4, [2, 2048], DataType.DT_UINT8)
    async with linked_pair(desc, slots=True) as (prompt, decoder, _, target):
        await prompt.blocks(DESC)
        refused(
            "dst_block_indices",
            lambda: decoder.datadist.cache_manager.transfer_cache_async(
                target, AwaitableLayerSynchronizer(2), [TransferWithCacheKeyConfig(KEY)], None, [2, 2], 1024
            ),
        )
        nothing_started(prompt, decoder)


def test_without_await() -> None:
    with blocking_pair() as pair:
        manager, cache = pair.target.manager, pair.target.cache
        refused("dst_blocks", lambda: manager.pull_blocks(KEY, cache, [0, 1], [2, 2]))
        refused("dst_blocks", lambda: manager.push_blocks(KEY, cache, [0, 1], [2, 2]))
        refused("dst_blocks", lambda: manager.submit_pull_blocks(KEY, cache, [0, 1], [2, 2]))
        refused("dst_blocks", lambda: manager.submit_push_blocks(KEY, cache, [0, 1], [2, 2]))
        refused("dst_blocks", lambda: manager.copy_blocks(cache, {0: [2], 1: [2]}))
        pair.target.check({})
        pair.source.check({})


def _leases(cluster: Cluster, cache: Cache) -> int:
    entry = inside(cluster.datadist).registry.table.find(cache.cache_id)
    assert entry is not None
    return entry.leases
