"""Shares of peers: what one peer sent, or keeps waiting, costs no other peer its turn.

Everything is counted: steps of the interpreter, claims, bytes and turns. Nothing is timed.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import weakref
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from functools import partial
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMStatusCode, Placement, Quotas
from aiodatadist._cache import digester as digesting
from aiodatadist._cache.catalogue import RemoteCache
from aiodatadist._concurrency import loop_time
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._counting import Totals
from aiodatadist._device.checksums import add_checksums
from aiodatadist._layered.request import Places
from aiodatadist._link.control.block_leases import BlockLeases, LeaseEnd
from aiodatadist._link.control.layer_events import LayerEvents
from aiodatadist._link.control.peer_claim import PeerClaim
from aiodatadist._link.link import ROUNDS_OF_OTHERS
from aiodatadist._values import peer_budget
from aiodatadist._values.grid import Side
from aiodatadist._values.lease_ticket import new_lease_name
from aiodatadist._wire.messages import CacheEntry, Digest, Digests, Ping, Watch
from aiodatadist.errors import TransferError
from aiodatadist.testing import Cluster, inside, linked_pair, open_cluster

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry
    from aiodatadist._link.control.layer_events import Sender
    from aiodatadist._link.control.questions import PendingQuestions

# ---- claims of leases that do not exist ----


def steps_of(call: Callable[[], object]) -> int:
    """Count the Python instructions of a call: the same number each time, on any machine."""
    steps, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps


def leases_of(totals: Totals) -> BlockLeases:
    return BlockLeases(totals, lambda: None)


def early(leases: BlockLeases, peer: object, call: int, answers: list[bool]) -> Callable[[], None]:
    claim = PeerClaim(peer, call, 10, answers.append)
    return lambda: leases.claim(new_lease_name(), claim, 1e6)


async def test_an_early_claim_costs_the_same_whatever_was_claimed_before() -> None:
    leases, answers, liar = leases_of(Totals()), list[bool](), object()
    first = steps_of(early(leases, liar, 0, answers))
    for call in range(1, 200):
        early(leases, liar, call, answers)()
    assert steps_of(early(leases, liar, 200, answers)) <= first + 20
    once_more = steps_of(lambda: leases.claim("0" * 32, PeerClaim(liar, 100, 10, answers.append), 60))
    assert once_more <= first
    assert not answers
    leases.end()


async def test_a_lease_is_opened_in_the_same_steps_beside_early_claims_and_releases() -> None:
    leases, answers, liars = leases_of(Totals()), list[bool](), [object() for _ in range(20)]
    entry = cast("Entry", SimpleNamespace(cache_id=1))

    def open_one() -> None:
        leases.open(1, entry, array("Q", [1]), 60, 60)

    alone = steps_of(open_one)
    for peer in liars:
        for call in range(1, 101):
            early(leases, peer, call, answers)()
            leases.unclaim(peer, 0, new_lease_name(), LeaseEnd.RELEASED)
    assert steps_of(open_one) <= alone + 20
    leases.end()


async def test_a_peer_has_so_many_early_claims_and_the_oldest_gives_way_and_is_counted() -> None:
    totals = Totals()
    leases, liar, honest = leases_of(totals), object(), object()
    refused, others = list[int](), list[bool]()

    def claim(call: int) -> PeerClaim:
        return PeerClaim(liar, call, 10, lambda is_kept: refused.append(-1 if is_kept else call))

    early(leases, honest, 0, others)()
    for call in range(4096):
        leases.claim(new_lease_name(), claim(call), 1e6)
    assert refused == list(range(4096 - 256)), "each is answered once, at once, the oldest first"
    assert others == []
    assert totals.budget_refusals == {"early_claims": 4096 - 256}
    leases.claim(new_lease_name(), claim(4095), 1e6)  # it comes again
    assert len(refused) == 4096 - 256
    leases.end()


async def test_claims_of_leases_that_do_not_exist_let_a_lease_of_the_same_peer_be_a_little_late() -> None:
    """A peer is a decode engine with all of its clients: one of them names leases that do not exist, all the time."""
    leases, engine, calls, answers, others = (
        leases_of(Totals()),
        object(),
        itertools.count(),
        list[bool](),
        list[bool](),
    )
    entry = cast("Entry", SimpleNamespace(cache_id=1))
    for _ in range(300):
        early(leases, engine, next(calls), others)()
    for _ in range(20):
        name, honest = new_lease_name(), PeerClaim(engine, next(calls), 10, answers.append)
        leases.claim(name, honest, 5)
        for _ in range(250):
            early(leases, engine, next(calls), others)()
        leases.open(1, entry, array("Q", [1]), 60, 60, name)
    assert answers == [True] * 20
    assert True not in others
    leases.end()


async def test_an_early_claim_waits_as_long_as_its_owner_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(PeerClaim, "within", lambda self, seconds, then: waits.append(seconds))
    leases = leases_of(Totals())
    leases.claim(new_lease_name(), PeerClaim(object(), 0, 10, lambda _: None), 864_000)
    leases.claim(new_lease_name(), PeerClaim(object(), 0, 10, lambda _: None), 5)
    assert waits == [peer_budget.EARLY_CLAIM_SECONDS, 5]
    leases.end()


def test_a_watch_costs_the_same_beside_any_number_of_transfers() -> None:
    def nothing(*_: object) -> None:
        """Do nothing."""

    events = LayerEvents(nothing, nothing, cast("PendingQuestions", None), lambda: True, nothing)
    alone = steps_of(lambda: events.on_watch(Watch(cache_id=1, on=True)))
    for number in range(500):
        events.begin(cast("Sender", object()), 10 + number)
    assert steps_of(lambda: events.on_watch(Watch(cache_id=2, on=True))) <= alone + 20


def cache_of(tensors: int) -> RemoteCache:
    """Return a peer's cache whose tensors are apart, and in no order."""
    addresses = [(1 << 40) + (7 * number % tensors << 20) for number in range(tensors)]
    entry = CacheEntry(
        cache_id=1, blocks=True, placement=1, data_type=4, pieces=16, stride=1024, addresses=addresses, epoch=1
    )
    return RemoteCache(entry)


def test_an_address_in_a_peers_cache_costs_the_same_with_any_number_of_tensors() -> None:
    few, many = cache_of(16), cache_of(4096)
    for cache in (few, many):
        for number, address in enumerate(cache.addresses):
            assert cache.tensor_at(address + 3 * 1024) == number
            assert cache.room_at(address + 3 * 1024) == 13 * 1024
        for outside in (
            0,
            min(cache.addresses) - 1,
            min(cache.addresses) + 16 * 1024,
            max(cache.addresses) + (1 << 20),
        ):
            assert cache.room_at(outside) == 0
    address = (1 << 40) + 1024
    for look in (RemoteCache.room_at, RemoteCache.tensor_at):
        assert steps_of(lambda: look(many, address)) <= steps_of(lambda: look(few, address)) + 20  # noqa: B023


def test_places_that_a_peer_made_up_cost_the_same_however_close_they_are() -> None:
    """Two destinations of 160 tensors each; a peer said that its tensors are a few bytes apart."""

    def steps(apart: int) -> int:
        places, numbers = Places(), array("Q", [0, (1 << 40) + 1])
        for key in range(2):
            starts = array("Q", [(1 << 30) + (2 * number + key) * apart for number in range(160)])
            taken = SimpleNamespace(key=BlocksCacheKey(2, key))
            if key == 0:
                places.take(cast("Any", taken), Side(starts, numbers, 1024, 1024, 1024))
        return steps_of(lambda: places.take(cast("Any", taken), Side(starts, numbers, 1024, 1024, 1024)))

    assert steps(1 << 11) <= steps(1 << 50) + 100


async def test_a_peer_releases_so_many_leases_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    leases, liar, honest = leases_of(Totals()), object(), object()
    leases.unclaim(honest, 0, "1" * 32, LeaseEnd.RELEASED)
    for _ in range(4096):
        leases.unclaim(liar, 0, new_lease_name(), LeaseEnd.RELEASED)
    leases.peer_gone(honest)
    answers: list[bool] = []
    leases.claim("1" * 32, PeerClaim(honest, 0, 10, answers.append), 60)
    assert answers == [False]
    assert len(leases._released) == peer_budget.RELEASED_NAMES + 1
    leases.end()


class Peer:
    """Stands for a link, which lives as long as a lease has it."""


async def test_a_lease_forgets_peers_that_are_gone_and_all_of_them_when_it_ends() -> None:
    leases, answers = leases_of(Totals()), list[bool]()
    entry = cast("Entry", SimpleNamespace(cache_id=1))
    lease = leases.open(1, entry, array("Q", [1]), 60, 60)
    peers = [Peer(), Peer()]
    known = [weakref.ref(peer) for peer in peers]
    for peer in peers:
        leases.claim(lease.name, PeerClaim(peer, 1, 10, answers.append), 0)
        leases.unclaim(peer, 1, lease.name, None)
    assert answers == [True, True]
    leases.peer_gone(peers[0])
    del peer
    peers.clear()
    gc.collect()
    assert known[0]() is None
    assert known[1]() is not None  # a claim that comes again is known to be over
    leases.end()
    gc.collect()
    assert known[1]() is None
    assert lease.ended is LeaseEnd.WITHDRAWN


async def test_claims_of_one_peer_make_a_lease_forget_none_of_another() -> None:
    leases, liar, honest, answers = leases_of(Totals()), object(), object(), list[bool]()
    lease = leases.open(1, cast("Entry", SimpleNamespace(cache_id=1)), array("Q", [1]), 60, 60)
    leases.claim(lease.name, PeerClaim(honest, 1, 10, answers.append), 0)
    leases.unclaim(honest, 1, lease.name, None)
    for call in range(1, 1000):
        leases.unclaim(liar, call, lease.name, None)
    leases.claim(lease.name, PeerClaim(honest, 1, 10, answers.append), 0)  # it comes again, late
    assert answers == [True, False]
    leases.end()


# ---- checksums ----


@pytest.mark.parametrize("placement", [Placement.HOST, Placement.DEVICE], ids=str)
async def test_peers_take_turns_with_what_sums_up(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer with 63 questions delays each slice of another peer's question by a turn."""
    for name, value in (("SMALL_BYTES", 0), ("SLICE_BYTES", 64), ("WINDOW_BYTES", 64), ("THREADS", 1), ("WINDOWS", 1)):
        monkeypatch.setattr(digesting, name, value)
    slices = list[int]()

    async def counted(call: Any, *args: Any, **how: Any) -> Any:
        if call is add_checksums:
            slices.append(len(slices))
        return await in_thread(call, *args, **how)

    monkeypatch.setattr(digesting, "in_thread", counted)
    async with open_cluster(1) as one:
        cache = await one.blocks(CacheDesc(1, [8, 64], DataType.DT_UINT8, placement))
        entry, digester = (
            inside(one.datadist).registry.table.find(cache.cache_id),
            inside(one.datadist).digester,
        )
        assert entry is not None

        def sums(peer: int) -> Coroutine[Any, Any, array[int]]:
            return digester.digests(entry, Side(entry.addresses, array("Q", range(8)), entry.stride, 64, 64), peer)

        await sums(1)  # the stream and the windows are open from now on
        async with asyncio.TaskGroup() as group:
            for _ in range(63):
                group.create_task(sums(2))
            await anyio.lowlevel.checkpoint()
            before = len(slices)
            assert len(await sums(3)) == 8
            assert len(slices) - before <= 2 * 8 + 2


@pytest.fixture
async def linked() -> AsyncIterator[tuple[Cluster, Cluster, Cache, Cache]]:
    async with linked_pair(CacheDesc(2, [16, 64], DataType.DT_UINT8), sync_kv_timeout=20_000) as pair:
        yield pair


async def test_questions_for_more_than_four_times_a_peers_caches_wait_for_each_other(
    linked: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older peers do not count the bytes that they ask for: they are not refused, and each peer has a line of its own."""
    owner, peer, _, cache = linked
    await peer.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
    link, digester = inside(peer.datadist).links.find(1), inside(owner.datadist).digester
    sums, at_a_time = digester.digests, Counter[str]()

    async def counted(entry: Entry, side: Side, line: Hashable = None) -> array[int]:
        at_a_time["now"] += len(side.index)
        at_a_time["most"] = max(at_a_time["most"], at_a_time["now"])
        try:
            await anyio.lowlevel.checkpoint()
            return await sums(entry, side, line)
        finally:
            at_a_time["now"] -= len(side.index)

    monkeypatch.setattr(digester, "digests", counted)
    monkeypatch.setattr(digesting, "SMALL_BYTES", 0)  # what is small has no task
    statuses: list[int] = []

    async def ask(pieces: int) -> None:
        question = partial(
            Digest, cache_id=1, first_tensor=0, tensors=2, offset=0, step=64, nbytes=64, tail=64, seconds=5.0
        )
        indexes = [0] * pieces
        with link.session.questions.open(
            lambda call: question(call=call, indexes=indexes), Digests, checksums=pieces
        ) as asking:
            await asking.answered.wait()
        assert isinstance(asking.answer, Digests)
        statuses.append(asking.answer.status)

    async with asyncio.TaskGroup() as group:
        for pieces in (32, 32, 33, 64, 1):
            group.create_task(ask(pieces))
    assert at_a_time["most"] == 64
    await ask(65)  # one alone may be larger
    assert statuses == [LLMStatusCode.LLM_SUCCESS] * 6
    assert at_a_time["most"] == 65
    assert link.session.is_ready


async def test_honest_pulls_of_repeated_blocks_stay_within_that(
    linked: tuple[Cluster, Cluster, Cache, Cache],
) -> None:
    """Pull one source block into many: more bytes than four caches, requested in parts, one after the other."""
    owner, peer, _, _ = linked
    large = await peer.blocks(CacheDesc(2, [512, 64], DataType.DT_UINT8), 1)
    pull = peer.datadist.cache_manager.pull_blocks
    tasks = [pull(BlocksCacheKey(1), large, [3] * 512, range(512), checksum=True) for _ in range(4)]
    for task in tasks:
        await task
    assert owner.datadist.figures().budget_refusals == {}


# ---- requests that wait ----


def lists_of(count: int) -> int:
    return sum(1 for each in gc.get_objects() if type(each) is list and len(each) == count)


async def test_requests_that_wait_are_kept_without_lists_of_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of numbers takes five times the memory, and all that a peer keeps waiting is walked with the garbage."""
    count, wanted = 1021, 6
    desc = CacheDesc(2, [count, 64], DataType.DT_UINT8)
    async with linked_pair(desc, enable_remote_cache_accessible=False, sync_kv_timeout=60_000) as (
        owner,
        peer,
        _,
        cache,
    ):
        digester, all_wait, go_on = inside(owner.datadist).digester, asyncio.Event(), asyncio.Event()
        sums, waiting = digester.digests, Counter[str]()

        async def held(entry: Entry, side: Side, line: Hashable = None) -> array[int]:
            waiting["now"] += 1
            if waiting["now"] == wanted:
                all_wait.set()
            await go_on.wait()
            return await sums(entry, side, line)

        monkeypatch.setattr(digester, "digests", held)
        before, blocks, pull = lists_of(count), range(count), peer.datadist.cache_manager.pull_blocks
        tasks = [pull(BlocksCacheKey(1), cache, blocks, blocks, checksum=True) for _ in range(wanted)]
        await all_wait.wait()
        lists = lists_of(count) - before
        go_on.set()
        for task in tasks:
            await task
        assert lists <= 2  # of the message that came last


async def test_the_blocks_of_requests_that_wait_are_bounded_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request beyond the limit is refused, and counted. What it would have taken is there for later ones."""
    count, most = 8, 3
    quotas = Quotas(request_blocks=most * 2 * count + 1)
    desc = CacheDesc(2, [count, 64], DataType.DT_UINT8)
    async with linked_pair(desc, enable_remote_cache_accessible=False, sync_kv_timeout=60_000, quotas=quotas) as (
        owner,
        peer,
        _,
        cache,
    ):
        digester, go_on = inside(owner.datadist).digester, asyncio.Event()
        sums = digester.digests

        async def held(entry: Entry, side: Side, line: Hashable = None) -> array[int]:
            await go_on.wait()
            return await sums(entry, side, line)

        monkeypatch.setattr(digester, "digests", held)
        blocks, pull = range(count), peer.datadist.cache_manager.pull_blocks

        async def pull_all() -> None:
            go_on.clear()
            tasks = [pull(BlocksCacheKey(1), cache, blocks, blocks, checksum=True) for _ in range(most)]
            refused = pull(BlocksCacheKey(1), cache, blocks, blocks, checksum=True)
            with pytest.raises(TransferError, match=f"would name {(most + 1) * 2 * count} blocks"):
                await refused
            await pull(BlocksCacheKey(1), cache, blocks, blocks)  # it waits for nothing, so it takes no room
            go_on.set()
            for task in tasks:
                await task

        await pull_all()
        await pull_all()
        assert owner.datadist.figures().budget_refusals == {"request_blocks": 2}


async def test_others_have_some_rounds_of_the_loop_after_each_slice_of_a_peers_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer to another peer takes a few rounds, and must not meet a slice of a flood in each of them."""
    many, loop, rounds, handled = 20, asyncio.get_running_loop(), 0, list[int]()

    def go_round() -> None:
        nonlocal rounds
        rounds += 1
        if len(handled) < many:
            loop.call_soon(go_round)

    async with linked_pair(CacheDesc(1, (4, 64), DataType.DT_UINT8)) as (prompt, decoder, _, _):
        flooded, liar = (inside(each.datadist).links.current[0] for each in (prompt, decoder))
        monkeypatch.setattr(flooded.session, "post", lambda _: handled.append(rounds))
        monkeypatch.setattr(loop_time, "HELD", 0)
        with liar.session.wire.together():
            for number in range(many):
                liar.session.post(Ping(call=2**40 + number))
        go_round()
        while len(handled) < many:
            await anyio.lowlevel.checkpoint()
        assert handled[-1] - handled[0] >= ROUNDS_OF_OTHERS * (many // 2 - 1), "each slice is of two messages here"
        monkeypatch.undo()
