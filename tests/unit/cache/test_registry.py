"""Caches are made whole, answered for while a caller refers to them, and given back when nothing touches them."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheNotFound,
    DataType,
    FeatureNotEnabled,
    LLMException,
    LLMStatusCode,
    OutOfMemory,
    ParamInvalid,
    Placement,
)
from aiodatadist._cache.names import Name, name_of
from aiodatadist._cache.registry import CacheRegistry
from aiodatadist._cache.table import Entry
from aiodatadist._concurrency.signal import Signal
from aiodatadist._config.llm_config import PoolConfig
from aiodatadist._device import Device
from aiodatadist._testing.faults import soft_fault, soft_faults_cleared
from aiodatadist._testing.views import transport_of
from aiodatadist._transport import Region, Transport, open_transport
from aiodatadist._values.descriptors import UNSET

PAGE = 1 << 16
PAGES = 16
TWO = CacheDesc(2, [4, PAGE // 4], DataType.DT_INT8)
"""A cache of two pages, with four batch slots or blocks."""
K0, K1 = CacheKey(1, 10), CacheKey(1, 11)
N0, N1 = name_of(K0), name_of(K1)
ALL = range(2)


MEMORY = ctypes.create_string_buffer(10 << 20)


def at(mebibyte: int) -> int:
    """Return an address in memory of the caller's."""
    return ctypes.addressof(MEMORY) + (mebibyte << 20)


class Peer:
    """A holder that is asked for a cache, and gives it back when the test says so."""

    failure: LLMException | None = None

    def __init__(self) -> None:
        self._answers: dict[int, Signal] = {}
        self.asked: list[Entry] = []

    def revoke(self, entry: Entry) -> Signal:
        if entry.cache_id not in self._answers:
            self._answers[entry.cache_id] = Signal()
            self.asked.append(entry)
        return self._answers[entry.cache_id]

    def link_is_gone(self) -> None:
        for event in self._answers.values():
            event.set()

    def give_back(self, entry: Entry) -> None:
        self._answers.pop(entry.cache_id, Signal()).set()
        entry.drop_holder(self)


@asynccontextmanager
async def open_registry(*pools: Placement, pages: int = PAGES) -> AsyncIterator[CacheRegistry]:
    async with await Device.open(0) as device, anyio.create_task_group() as group:

        def spawn(call: Callable[[], Coroutine[Any, Any, None]]) -> bool:
            group.start_soon(call)
            return True

        registry = CacheRegistry(device, open_transport("loopback", device), spawn)
        for placement in pools:
            await registry.pools.open(placement, PoolConfig(memory_size=pages * PAGE))
        yield registry
        group.cancel_scope.cancel()


@pytest.fixture
async def registry() -> AsyncIterator[CacheRegistry]:
    """Open a registry with a pool of device memory in its own task: a fixture begins and ends in different ones."""
    opened: asyncio.Future[CacheRegistry] = asyncio.get_running_loop().create_future()
    enough = Signal()

    async def host() -> None:
        async with open_registry(Placement.DEVICE) as registry:
            opened.set_result(registry)
            await enough.wait()

    task = asyncio.create_task(host())
    yield await opened
    enough.set()
    await task


def free(registry: CacheRegistry) -> int:
    """Return the number of free pages in the device's pool."""
    return registry.pools.usage()[Placement.DEVICE].free // PAGE


def allocate(registry: CacheRegistry, *keys: CacheKey, desc: CacheDesc = TWO) -> tuple[Cache, Entry]:
    cache = registry.allocate(desc, False, lambda: registry.table.check_slots(desc, keys))
    return cache, registry.local(cache, "cache")


def allocate_blocks(registry: CacheRegistry, key: BlocksCacheKey | None = None) -> tuple[Cache, Entry]:
    cache = registry.allocate(TWO, True, lambda: registry.table.check_blocks(key))
    return cache, registry.local(cache, "cache")


async def register(
    registry: CacheRegistry,
    addresses: Sequence[int] = (at(1), at(2)),
    *keys: CacheKey,
    keep: object = None,
    accessible: bool = True,
) -> tuple[Cache, Entry]:
    cache = await registry.register(
        TWO, addresses, [keep], False, lambda: registry.table.check_slots(TWO, keys), accessible
    )
    return cache, registry.local(cache, "cache")


# ---- pools ----


async def test_pool_is_as_large_as_it_was_asked_for(registry: CacheRegistry) -> None:
    usage = registry.pools.usage()[Placement.DEVICE]
    assert (usage.total, usage.free, usage.largest, usage.pinned) == (PAGES * PAGE, PAGES * PAGE, PAGES * PAGE, 0)
    assert list(registry.pools.usage()) == [Placement.DEVICE]


async def test_each_placement_has_its_own_pool() -> None:
    async with open_registry(Placement.DEVICE, Placement.HOST) as registry:
        host = CacheDesc(1, [1, 1], DataType.DT_INT8, Placement.HOST)
        allocate(registry, desc=host)
        usage = registry.pools.usage()
        assert (usage[Placement.HOST].free, usage[Placement.DEVICE].free) == ((PAGES - 1) * PAGE, PAGES * PAGE)


async def test_pool_can_be_reached_by_peers() -> None:
    async with open_registry() as registry:
        before = transport_of(registry).epoch
        await registry.pools.open(Placement.DEVICE, PoolConfig(memory_size=PAGE))
        _, entry = allocate(registry, desc=CacheDesc(1, [1], DataType.DT_INT8))
        assert entry.epoch == transport_of(registry).epoch > before
        inside = Region(entry.addresses[0] + 64, 64, Placement.DEVICE)
        with pytest.raises(ParamInvalid, match="overlaps the registered"):
            await transport_of(registry).register([inside])


async def test_pool_that_the_device_has_no_room_for_is_refused_by_name() -> None:
    async with open_registry() as registry:
        with soft_faults_cleared():
            soft_fault("aclrtMalloc:fail=207001")
            with pytest.raises(OutOfMemory, match="the device pool"):
                await registry.pools.open(Placement.DEVICE, PoolConfig(memory_size=PAGE))
        assert registry.pools.usage() == {}


async def test_without_any_pool_there_is_nothing_to_allocate_or_to_deallocate() -> None:
    async with open_registry() as registry:
        cache, _ = await register(registry)
        with pytest.raises(FeatureNotEnabled, match="mem_pool_cfg"):
            allocate(registry)
        with pytest.raises(FeatureNotEnabled):
            await registry.deallocate(cache, False)
        with pytest.raises(FeatureNotEnabled):
            await registry.remove_key(N0)


async def test_pool_of_the_other_placement_does_not_do(registry: CacheRegistry) -> None:
    with pytest.raises(ParamInvalid, match=r"there is no memory pool for Placement.HOST"):
        allocate(registry, desc=CacheDesc(1, [1], DataType.DT_INT8, Placement.HOST))


# ---- allocating ----


async def test_tensors_are_apart_and_inside_of_the_pool(registry: CacheRegistry) -> None:
    desc = CacheDesc(3, [1, PAGE + 1], DataType.DT_INT8)
    cache, entry = allocate(registry, desc=desc)
    assert cache.tensor_addrs == list(entry.addresses)
    gaps = [b - a for a, b in zip(sorted(entry.addresses), sorted(entry.addresses)[1:], strict=False)]
    assert gaps == [2 * PAGE] * 2
    assert free(registry) == PAGES - 6


async def test_cache_is_allocated_as_a_whole_or_not_at_all(registry: CacheRegistry) -> None:
    with pytest.raises(OutOfMemory, match="65536 bytes do not fit") as caught:
        allocate(registry, K0, desc=CacheDesc(PAGES + 1, [1, PAGE], DataType.DT_INT8))
    assert caught.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
    usage = registry.pools.usage()[Placement.DEVICE]
    assert (usage.free, usage.largest) == (PAGES * PAGE, PAGES * PAGE)
    assert len(registry.table) == 0
    allocate(registry, K0, desc=CacheDesc(PAGES, [1, PAGE], DataType.DT_INT8))


async def test_cache_with_wrong_names_or_shape_takes_no_memory(registry: CacheRegistry) -> None:
    _, entry = allocate(registry, K0)
    for keys in ([K0], [CacheKey(1, i) for i in range(5)]):
        with pytest.raises(ParamInvalid):
            allocate(registry, *keys)
    with pytest.raises(ParamInvalid, match="num_tensors is 0"):
        allocate(registry, desc=CacheDesc(0, [1], DataType.DT_INT8))
    assert free(registry) == PAGES - 2
    assert list(registry.table) == [entry]


async def test_new_cache_is_there_for_us_and_for_peers(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry, CacheKey(1, UNSET), K0)
    assert registry.offered(N0) == (entry, 1), "a placeholder takes slot 0 and names nothing"
    assert registry.offered(Name("id", cache.cache_id)) == (entry, 0)
    assert registry.offered(N1) is None
    assert registry.offered(Name("request", UNSET)) is None


async def test_cache_that_was_never_made_is_not_found(registry: CacheRegistry) -> None:
    with pytest.raises(CacheNotFound, match="src_cache 7 is unknown here"):
        registry.local(Cache(7, TWO, [0, 0], False), "src_cache")


# ---- references ----


async def test_cache_lives_until_its_id_and_all_its_keys_are_gone(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry, K0, K1)
    registry.consumption.pulled(entry, N0, 0, ALL)
    await registry.deallocate(cache, False)
    assert free(registry) == PAGES - 2, "the other key still refers to it"
    assert registry.offered(N0) is None
    assert registry.offered(N1) == (entry, 1)
    registry.consumption.pulled(entry, N1, 1, ALL)
    await anyio.wait_all_tasks_blocked()
    assert (free(registry), len(registry.table)) == (PAGES, 0)


async def test_deallocated_cache_cannot_be_used_here_any_more(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry, K0)
    await registry.deallocate(cache, False)
    assert (cache.tensor_addrs, cache.cache_id) == ([], entry.cache_id)
    with pytest.raises(CacheNotFound, match="unknown here"):
        registry.local(cache, "cache")


async def test_last_key_may_go_before_the_id(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry, K0)
    registry.consumption.pulled(entry, N0, 0, ALL)
    await anyio.wait_all_tasks_blocked()
    assert free(registry) == PAGES - 2
    await registry.deallocate(cache, False)
    assert free(registry) == PAGES


async def test_key_goes_when_all_layers_were_pulled_and_not_when_one_was_pulled_twice(registry: CacheRegistry) -> None:
    desc = CacheDesc(8, [1, 8], DataType.DT_INT8)
    _, entry = allocate(registry, K0, desc=desc)
    for _ in range(2):
        registry.consumption.pulled(entry, N0, 0, range(4))
        assert registry.offered(N0) == (entry, 0)
    registry.consumption.pulled(entry, N0, 0, range(4, 8))
    assert registry.offered(N0) is None


async def test_pull_by_id_consumes_the_request_key_of_that_slot_only(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry, K0, K1)
    registry.consumption.pulled(entry, Name("id", cache.cache_id), 1, ALL)
    assert (registry.offered(N0), registry.offered(N1)) == ((entry, 0), None)
    registry.consumption.pulled(entry, Name("id", cache.cache_id), 3, ALL)
    assert registry.offered(N0) == (entry, 0)


async def test_layers_pulled_by_id_and_by_key_are_those_of_one_key(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry, K0)
    registry.consumption.pulled(entry, N0, 0, range(1))
    registry.consumption.pulled(entry, Name("id", cache.cache_id), 0, range(1, 2))
    assert registry.offered(N0) is None


async def test_prefixes_blocks_and_the_callers_memory_are_never_consumed(registry: CacheRegistry) -> None:
    prefix, blocks = name_of(CacheKey(1, UNSET, 0, 10)), name_of(BlocksCacheKey(1, 3))
    shared, by_prefix = allocate(registry, CacheKey(1, UNSET, 0, 10))
    _, in_blocks = allocate_blocks(registry, BlocksCacheKey(1, 3))
    _, mine = await register(registry, (at(1), at(2)), K0)
    for entry, name in ((by_prefix, prefix), (in_blocks, blocks), (mine, N0)):
        registry.consumption.pulled(entry, name, 0, ALL)
        registry.consumption.pulled(entry, Name("id", entry.cache_id), 0, ALL)
        assert registry.offered(name) == (entry, 0)
    await registry.deallocate(shared, False)
    assert registry.offered(prefix) == (by_prefix, 0)


async def test_key_that_was_given_to_another_cache_is_not_consumed_there(registry: CacheRegistry) -> None:
    _, before = allocate(registry, K0, K1)
    await registry.remove_key(N0)
    _, after = allocate(registry, K0)
    registry.consumption.pulled(before, N0, 0, ALL)
    assert registry.offered(N0) == (after, 0)


# ---- deallocating ----


async def test_deallocated_blocks_are_back_at_once_and_their_key_is_free(registry: CacheRegistry) -> None:
    cache, _ = allocate_blocks(registry, BlocksCacheKey(1, 3))
    await registry.deallocate(cache, True)
    assert (free(registry), registry.offered(name_of(BlocksCacheKey(1, 3)))) == (PAGES, None)
    allocate_blocks(registry, BlocksCacheKey(1, 3))


async def test_deallocate_waits_for_transfers_and_for_peers(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry)
    peer = Peer()
    entry.lease()
    entry.lease()
    entry.holders.add(peer)
    waiting = asyncio.create_task(registry.deallocate(cache, False))
    for less in (entry.release, lambda: peer.give_back(entry), entry.release):
        await anyio.wait_all_tasks_blocked()
        assert not waiting.done()
        assert free(registry) == PAGES - 2
        less()
    await waiting
    assert free(registry) == PAGES
    assert peer.asked == [entry]


async def test_cache_that_is_being_given_up_is_offered_to_no_peer(registry: CacheRegistry) -> None:
    cache, entry = allocate_blocks(registry, BlocksCacheKey(1, 3))
    entry.lease()
    waiting = asyncio.create_task(registry.deallocate(cache, True))
    await anyio.wait_all_tasks_blocked()
    assert registry.offered(name_of(BlocksCacheKey(1, 3))) is None
    assert registry.offered(Name("id", cache.cache_id)) is None
    _, after = allocate_blocks(registry, BlocksCacheKey(1, 3))
    assert not set(after.addresses) & set(entry.addresses)
    entry.release()
    await waiting
    assert registry.offered(name_of(BlocksCacheKey(1, 3))) == (after, 0)


async def test_cancelled_deallocate_gives_the_memory_back_all_the_same(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry)
    entry.lease()
    waiting = asyncio.create_task(registry.deallocate(cache, False))
    await anyio.wait_all_tasks_blocked()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert free(registry) == PAGES - 2
    entry.release()
    await anyio.wait_all_tasks_blocked()
    assert free(registry) == PAGES


async def test_second_deallocate_waits_for_the_first_and_a_third_does_nothing(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry)
    entry.lease()
    both = [asyncio.create_task(registry.deallocate(cache, False)) for _ in range(2)]
    await anyio.wait_all_tasks_blocked()
    assert not any(task.done() for task in both)
    entry.release()
    await asyncio.gather(*both)
    again, _ = allocate(registry)
    await registry.deallocate(cache, False)
    assert free(registry) == PAGES - 2, "pages that have another owner meanwhile are not given back"
    await registry.deallocate(again, False)


async def test_kind_has_to_match(registry: CacheRegistry) -> None:
    contiguous, _ = allocate(registry)
    blocks, _ = allocate_blocks(registry)
    with pytest.raises(ParamInvalid, match="use deallocate_cache"):
        await registry.deallocate(contiguous, True)
    with pytest.raises(ParamInvalid, match="use deallocate_blocks_cache"):
        await registry.deallocate(blocks, False)
    assert free(registry) == PAGES - 4


async def test_deallocating_the_callers_memory_does_nothing(registry: CacheRegistry) -> None:
    cache, entry = await register(registry, (at(1), at(2)), K0)
    await registry.deallocate(cache, False)
    await registry.remove_key(N0)
    assert registry.offered(N0) == (entry, 0)
    assert cache.tensor_addrs == [at(1), at(2)]


async def test_pages_in_use_are_pinned(registry: CacheRegistry) -> None:
    _, entry = allocate(registry)
    pinned = []
    for more_or_less in (entry.lease, entry.release, lambda: entry.holders.add(Peer())):
        more_or_less()
        pinned.append(registry.pools.usage()[Placement.DEVICE].pinned)
    assert pinned == [2 * PAGE, 0, 2 * PAGE]


async def test_pages_that_wait_for_a_transfer_are_pinned_although_they_were_deallocated(
    registry: CacheRegistry,
) -> None:
    cache, entry = allocate(registry)
    entry.lease()
    waiting = asyncio.create_task(registry.deallocate(cache, False))
    await anyio.wait_all_tasks_blocked()
    pinned = registry.pools.usage()[Placement.DEVICE].pinned
    entry.release()
    await waiting
    assert pinned == 2 * PAGE


async def test_a_full_pool_says_what_has_been_pinned_the_longest(registry: CacheRegistry) -> None:
    _, first = allocate(registry)
    _, oldest = allocate(registry)
    oldest.hold(Peer())
    oldest.lease()
    first.lease()
    all_of_it = CacheDesc(1, [PAGES, PAGE], DataType.DT_INT8)
    words = r"pinned by transfers and peers \(since the longest: cache 2, for [\d.e-]+ s, by 1 transfers, <.*Peer"
    with pytest.raises(OutOfMemory, match=words):
        allocate(registry, desc=all_of_it)
    oldest.release()
    oldest.drop_holder(next(iter(oldest.holders)))
    oldest.hold(Peer())  # anew: it is younger than the other now
    with pytest.raises(OutOfMemory, match=r"since the longest: cache 1, for [\d.e-]+ s, by 1 transfers\); pages have"):
        allocate(registry, desc=all_of_it)


# ---- memory into which a lost peer may still write ----


class Piece:
    """A piece that a peer was writing when it was stopped."""

    def __init__(self, error: LLMException | None = None) -> None:
        self.is_over = anyio.Event()
        self.is_abandoned = False
        self._error = error

    async def wait_let_go(self) -> None:
        await self.is_over.wait()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        self.is_abandoned = True


async def test_withheld_pages_are_not_waited_for_and_come_back_when_the_peer_lets_go(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry)
    peer, piece = Peer(), Piece()
    entry.holders.add(peer)
    waiting = asyncio.create_task(registry.deallocate(cache, False))
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    registry.withheld.withhold([entry], peer, piece)
    await waiting
    usage = registry.pools.usage()[Placement.DEVICE]
    assert (usage.free, usage.pinned, usage.withheld) == ((PAGES - 2) * PAGE, 2 * PAGE, 2 * PAGE)
    piece.is_over.set()
    await anyio.wait_all_tasks_blocked()
    usage = registry.pools.usage()[Placement.DEVICE]
    assert (usage.free, usage.pinned, usage.withheld) == (PAGES * PAGE, 0, 0)
    assert not piece.is_abandoned


async def test_withheld_cache_waits_for_its_other_holders_first(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry)
    stopped, healthy, piece = Peer(), Peer(), Piece()
    entry.holders |= {stopped, healthy}
    registry.withheld.withhold([entry], stopped, piece)
    waiting = asyncio.create_task(registry.deallocate(cache, False))
    await anyio.wait_all_tasks_blocked()
    assert (waiting.done(), healthy.asked, stopped.asked) == (False, [entry], [])
    healthy.give_back(entry)
    await waiting
    piece.is_over.set()
    await anyio.wait_all_tasks_blocked()
    assert free(registry) == PAGES


async def test_cache_is_usable_when_the_links_that_are_over_are_closed_with_other_holders(
    registry: CacheRegistry,
) -> None:
    cache, entry = allocate(registry)
    lost, healthy = Peer(), Peer()
    entry.holders |= {lost, healthy}
    await registry.wait_usable(cache)
    lost.failure = LLMException("its link is over")
    waiting = asyncio.create_task(registry.wait_usable(cache))
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    entry.drop_holder(lost)
    await waiting
    assert entry.holders == {healthy}
    entry.drop_holder(healthy)


async def test_withheld_cache_is_not_used_and_not_offered_until_the_peer_lets_go(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry, K0)
    peer, piece = Peer(), Piece()
    entry.holders.add(peer)
    registry.withheld.withhold([entry], peer, piece)
    with pytest.raises(CacheNotFound, match="src_cache 1 is withheld: a lost peer was stopped while it wrote"):
        registry.local(cache, "src_cache")
    assert registry.offered(N0) is None
    piece.is_over.set()
    await anyio.wait_all_tasks_blocked()
    assert registry.local(cache, "src_cache") is entry
    assert registry.offered(N0) == (entry, 0)


async def test_registered_memory_is_the_callers_only_when_the_peer_let_go(registry: CacheRegistry) -> None:
    cache, entry = await register(registry, (at(1), at(2)), K0)
    peer, piece = Peer(), Piece()
    entry.holders.add(peer)
    registry.withheld.withhold([entry], peer, piece)
    waiting = asyncio.create_task(registry.unregister(cache.cache_id, False))
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    piece.is_over.set()
    await waiting


async def test_memory_is_lost_when_it_is_never_known_whether_the_peer_let_go(
    registry: CacheRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    cache, entry = allocate(registry)
    piece = Piece(LLMException("HcclCommDestroy was refused"))
    registry.withheld.withhold([entry], Peer(), piece)
    piece.is_over.set()
    await anyio.wait_all_tasks_blocked()
    assert "may write for ever: HcclCommDestroy was refused" in caplog.text
    with pytest.raises(LLMException, match="never released"):
        await registry.deallocate(cache, False)
    assert free(registry) == PAGES - 2


async def test_piece_is_abandoned_when_the_cluster_is_finalized(caplog: pytest.LogCaptureFixture) -> None:
    piece = Piece()
    async with open_registry(Placement.DEVICE) as registry:
        _, pooled = allocate(registry)
        _, own = await register(registry, (at(1), at(2)), K0)
        registry.withheld.withhold([pooled, own], Peer(), piece)
        await anyio.wait_all_tasks_blocked()
        before = piece.is_abandoned
    assert (before, piece.is_abandoned) == (False, True)
    assert f"cache {own.cache_id}: a peer that was stopped while it wrote there may continue" in caplog.text
    assert f"cache {pooled.cache_id}:" not in caplog.text


# ---- memory that the device did not let go of ----


async def test_lost_memory_is_never_given_back(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry)
    entry.lease()
    first = asyncio.create_task(registry.deallocate(cache, False))
    await anyio.wait_all_tasks_blocked()
    entry.poison()
    for attempt in (first, registry.deallocate(cache, False)):
        with pytest.raises(LLMException, match=f"cache {cache.cache_id}: the device never released its memory"):
            await attempt
    assert free(registry) == PAGES - 2


async def test_lost_cache_takes_part_in_nothing_any_more(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry, K0)
    entry.poison()
    assert registry.offered(N0) is None
    with pytest.raises(CacheNotFound, match="is lost: the device never released"):
        registry.local(cache, "cache")


async def test_lost_memory_of_the_callers_stays_registered(registry: CacheRegistry) -> None:
    cache, entry = await register(registry)
    entry.lease()
    entry.poison()
    for _ in range(2):
        with pytest.raises(LLMException, match="never released"):
            await registry.unregister(cache.cache_id, has_links=False)
    with pytest.raises(ParamInvalid, match="overlaps the registered"):
        await transport_of(registry).register([Region(entry.addresses[0] + 64, 64, Placement.DEVICE)])


# ---- keys ----


async def test_removed_key_is_gone_and_the_last_one_takes_the_memory_with_it(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry, K0, K1)
    await registry.deallocate(cache, False)
    await registry.remove_key(N0)
    assert (registry.offered(N0), registry.offered(N1), free(registry)) == (None, (entry, 1), PAGES - 2)
    await registry.remove_key(N1)
    assert (registry.offered(N1), free(registry)) == (None, PAGES)


async def test_unknown_key_is_removed_without_a_word(registry: CacheRegistry) -> None:
    await registry.remove_key(N0)
    _, entry = allocate(registry, K0)
    await registry.remove_key(N1)
    assert registry.offered(N0) == (entry, 0)


async def test_key_is_removed_when_no_peer_remembers_it(registry: CacheRegistry) -> None:
    _, entry = allocate(registry, K0, K1)
    one, other = Peer(), Peer()
    entry.holders |= {one, other}
    waiting = asyncio.create_task(registry.remove_key(N0))
    for peer in (one, other):
        await anyio.wait_all_tasks_blocked()
        assert not waiting.done()
        peer.give_back(entry)
    await waiting
    assert (one.asked, other.asked) == ([entry], [entry])
    assert registry.offered(N1) == (entry, 1), "the cache itself stays"


async def test_removing_a_key_does_not_wait_for_transfers(registry: CacheRegistry) -> None:
    _, entry = allocate(registry, K0)
    entry.lease()
    await registry.remove_key(N0)
    entry.release()


async def test_peer_that_asks_for_the_cache_by_another_key_does_not_hold_up_a_removal(registry: CacheRegistry) -> None:
    _, entry = allocate(registry, K0, K1)
    old, new = Peer(), Peer()
    entry.holders.add(old)
    waiting = asyncio.create_task(registry.remove_key(N0))
    await anyio.wait_all_tasks_blocked()
    entry.holders.add(new)
    old.give_back(entry)
    await anyio.wait_all_tasks_blocked()
    is_done = waiting.done()
    waiting.cancel()
    assert is_done


async def test_removing_a_key_of_a_cache_that_is_lost_meanwhile_does_not_wait_for_ever(registry: CacheRegistry) -> None:
    _, entry = allocate(registry, K0, K1)
    peer = Peer()
    entry.holders.add(peer)
    waiting = asyncio.create_task(registry.remove_key(N0))
    await anyio.wait_all_tasks_blocked()
    entry.poison()
    peer.link_is_gone()
    await anyio.wait_all_tasks_blocked()
    is_done = waiting.done()
    waiting.cancel()
    assert is_done


async def test_peer_that_was_told_while_a_cache_is_given_up_is_asked_too(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry)
    early, late = Peer(), Peer()
    entry.lease()
    entry.holders.add(early)
    waiting = asyncio.create_task(registry.deallocate(cache, False))
    await anyio.wait_all_tasks_blocked()
    early.give_back(entry)
    entry.holders.add(late)
    entry.release()
    await anyio.wait_all_tasks_blocked()
    waiting.cancel()
    assert late.asked == [entry]


# ---- memory of the caller's ----


async def test_registered_cache_is_there_until_it_is_unregistered(registry: CacheRegistry) -> None:
    cache, entry = await register(registry, (at(1), at(2)), K0)
    assert entry.epoch == transport_of(registry).epoch
    assert registry.offered(N0) == (entry, 0)
    await registry.unregister(cache.cache_id, has_links=False)
    assert registry.offered(N0) is None
    with pytest.raises(CacheNotFound):
        registry.local(cache, "cache")
    await registry.unregister(cache.cache_id, has_links=False)
    await register(registry, (at(1), at(2)), K0)


async def test_callers_memory_is_kept_alive_until_then(registry: CacheRegistry) -> None:
    class Tensor:
        pass

    tensor = Tensor()
    alive = weakref.ref(tensor)
    cache, _ = await register(registry, keep=tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    await registry.unregister(cache.cache_id, has_links=False)
    gc.collect()
    assert alive() is None


async def is_registered(transport: Transport, address: int) -> bool:
    """Return True if it is registered: a region that overlaps a registered one in part is refused."""
    part = [Region(address + 64, 64, Placement.DEVICE)]
    try:
        await transport.register(part)
    except ParamInvalid:
        return True
    await transport.unregister(part)
    return False


async def test_memory_that_two_caches_share_stays_known_until_both_are_gone(registry: CacheRegistry) -> None:
    one, _ = await register(registry, (at(1), at(2)))
    other, _ = await register(registry, (at(2), at(3)))
    known = []
    for cache in (None, one, other):
        if cache is not None:
            await registry.unregister(cache.cache_id, has_links=False)
        known.append([await is_registered(transport_of(registry), at(i)) for i in (1, 2, 3)])
    assert known == [[True, True, True], [False, True, True], [False, False, False]]


async def test_cache_that_cannot_be_registered_leaves_nothing_behind(registry: CacheRegistry) -> None:
    await register(registry)
    with pytest.raises(ParamInvalid, match="overlaps the registered"):
        await register(registry, (at(8), at(1) + 64), K0)
    assert len(registry.table) == 1
    assert not await is_registered(transport_of(registry), at(8))
    await register(registry, (at(8), at(9)), K0)


async def test_cancelled_registration_leaves_nothing_behind(
    registry: CacheRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(regions: Sequence[Region]) -> None:
        await anyio.sleep_forever()

    with monkeypatch.context() as patch:
        patch.setattr(transport_of(registry), "register", never)
        under_way = asyncio.create_task(register(registry, (at(1), at(2)), K0))
        await anyio.wait_all_tasks_blocked()
        assert registry.offered(N0) is None, "not yet"
        under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await under_way
    assert len(registry.table) == 0
    await register(registry, (at(1), at(2)), K0)


async def test_cache_for_ourselves_is_offered_to_no_peer(registry: CacheRegistry) -> None:
    memory = ctypes.create_string_buffer(2 * PAGE)
    where = ctypes.addressof(memory)
    before = transport_of(registry).epoch
    cache, entry = await register(registry, (where, where + PAGE), K0, keep=memory, accessible=False)
    assert registry.local(cache, "cache") is entry
    assert (registry.offered(N0), registry.offered(Name("id", cache.cache_id))) == (None, None)
    assert transport_of(registry).epoch == before
    await registry.unregister(cache.cache_id, has_links=True)
    assert len(registry.table) == 0


async def test_unregister_waits_for_transfers_and_for_peers_and_goes_on_when_cancelled(registry: CacheRegistry) -> None:
    cache, entry = await register(registry)
    peer = Peer()
    entry.lease()
    entry.holders.add(peer)
    waiting = asyncio.create_task(registry.unregister(cache.cache_id, has_links=False))
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    with pytest.raises(CacheNotFound, match="is being released"):
        registry.local(cache, "cache")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    entry.release()
    peer.give_back(entry)
    await anyio.wait_all_tasks_blocked()
    assert peer.asked == [entry]
    assert len(registry.table) == 0


async def test_linked_peers_keep_their_caches_registered(registry: CacheRegistry) -> None:
    cache, _ = await register(registry)
    with pytest.raises(LLMException, match="can be reached through links") as caught:
        await registry.unregister(cache.cache_id, has_links=True)
    assert caught.value.status_code is LLMStatusCode.LLM_EXIST_LINK
    registry.local(cache, "cache")


async def test_allocated_cache_cannot_be_unregistered(registry: CacheRegistry) -> None:
    cache, _ = allocate(registry)
    with pytest.raises(ParamInvalid, match="was allocated: deallocate it"):
        await registry.unregister(cache.cache_id, has_links=False)
    registry.local(cache, "cache")


async def test_cache_that_the_runtime_does_not_forget_can_be_used_on_and_unregistered_later(
    registry: CacheRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(regions: Sequence[Region]) -> None:
        raise LLMException("not now")

    cache, entry = await register(registry, (at(1), at(2)), K0)
    with monkeypatch.context() as patch:
        patch.setattr(transport_of(registry), "unregister", refuse)
        with pytest.raises(LLMException, match="not now"):
            await registry.unregister(cache.cache_id, has_links=False)
    assert registry.local(cache, "cache") is entry
    assert registry.offered(N0) == (entry, 0)
    await registry.unregister(cache.cache_id, has_links=False)
    assert not await is_registered(transport_of(registry), at(1))


# ---- arrays ----


async def test_buffers_are_the_memory_of_the_tensors(registry: CacheRegistry) -> None:
    _, entry = allocate(registry)
    first, second = registry.buffers(entry)
    memoryview(first).cast("B")[:] = b"a" * PAGE
    memoryview(second).cast("B")[:] = b"b" * PAGE
    assert [ctypes.string_at(address, entry.nbytes) for address in entry.addresses] == [b"a" * PAGE, b"b" * PAGE]


async def test_cache_with_arrays_cannot_be_deallocated_and_is_not_harmed(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry)
    views = registry.buffers(entry)
    more = registry.buffers(entry)
    for dropped in (views, more):
        with pytest.raises(ParamInvalid, match="arrays or tensors over its memory that are still alive"):
            await registry.deallocate(cache, False)
        assert registry.local(cache, "cache") is entry
        dropped.clear()
    await registry.deallocate(cache, False)
    assert free(registry) == PAGES


async def test_one_slice_of_one_tensor_is_enough_to_keep_it(registry: CacheRegistry) -> None:
    cache, entry = allocate(registry)
    view = memoryview(registry.buffers(entry)[1]).cast("B")[4:8]
    with pytest.raises(ParamInvalid, match="still alive"):
        await registry.deallocate(cache, False)
    view.release()
    del view
    await registry.deallocate(cache, False)


async def test_arrays_of_one_cache_do_not_keep_another(registry: CacheRegistry) -> None:
    (_, one), (other, _) = allocate(registry), allocate(registry)
    views = registry.buffers(one)
    await registry.deallocate(other, False)
    assert len(views) == 2


async def test_callers_memory_has_no_buffers_of_ours(registry: CacheRegistry) -> None:
    _, entry = await register(registry)
    with pytest.raises(ParamInvalid, match="in your own memory"):
        registry.buffers(entry)
