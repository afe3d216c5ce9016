"""A link that broke is made again by the end whose call made it, and what becomes of links is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheNotFound,
    DataType,
    InternalError,
    LeaseEnd,
    LinkChange,
    LinkChanges,
    LinkClosed,
    LinkError,
    LinkPhase,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    ParamInvalid,
    PeerLost,
    TransferPriority,
    TransferTimeout,
)
from aiodatadist._cluster.initiator import LinkInitiator
from aiodatadist._cluster.link_changes import MAX_UNREAD
from aiodatadist._device import give_way
from aiodatadist._link.transfers.transfers import Transfers
from aiodatadist._testing.cancelling import CancelAt
from aiodatadist._testing.views import cut_link
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    inside,
    linked_pair,
    open_cluster,
    soft_fault,
    soft_faults_cleared,
    verify,
)
from tests.clock import took
from tests.test_symmetric_links import link_all, settled

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
KEY = BlocksCacheKey(1)
QUICK = {"first_delay": 0.005, "max_delay": 0.05}
SLOW = {"first_delay": 30, "max_delay": 30}
"""No attempt is made while a test lasts."""
SUCCESS = LLMStatusCode.LLM_SUCCESS

LINKED, LOST, RELINKING = LinkPhase.LINKED, LinkPhase.LOST, LinkPhase.RELINKING
GIVEN_UP, UNLINKED = LinkPhase.GIVEN_UP, LinkPhase.UNLINKED

pytestmark = pytest.mark.timeout(60)


async def cut(prompt: Cluster, peer: int = 2) -> None:
    """Break the connection between the two."""
    await cut_link(inside(prompt.datadist).links.any(peer))


class Door:
    """A cluster's listener, which can be closed and opened again at the same port."""

    def __init__(self, cluster: Cluster) -> None:
        self._engine = inside(cluster.datadist)
        self._address = cluster.datadist.listen_address

    @property
    def port(self) -> int:
        assert self._address is not None
        return self._address[1]

    async def close(self) -> None:
        await self._engine.listen_elsewhere(None)

    async def open(self) -> None:
        await self._engine.listen_elsewhere(self._address)


async def until(changes: LinkChanges, *phases: LinkPhase) -> list[LinkChange]:
    """Return the changes up to the first of these phases."""
    told = []
    async for change in changes:
        told.append(change)
        if change.state in phases:
            break
    return told


def phases(told: list[LinkChange]) -> list[tuple[LinkPhase, int]]:
    """Return the phases without the attempts, of which there may be any number."""
    return [(change.state, change.generation) for change in told if change.state is not RELINKING]


async def rest(changes: LinkChanges) -> list[LinkChange]:
    return [change async for change in changes]


async def pulled(decoder: Cluster, cache: Cache, source: int, target: int) -> None:
    await decoder.datadist.cache_manager.pull_blocks(KEY, cache, [source], [target])
    verify(decoder.memory(cache), cache, [(tensor, target, 1, source) for tensor in range(2)])


@asynccontextmanager
async def waiting_pair(**options: Any) -> AsyncIterator[tuple[Cluster, Cluster, Cache, Cache, Door, LinkChanges]]:
    """Open a pair whose link is lost, and whose peer does not listen."""
    relink = {**QUICK, "wait": 30, **options.pop("relink", {})}
    async with linked_pair(DESC, relink=relink, **options) as (prompt, decoder, source, cache):
        door, changes = Door(prompt), decoder.datadist.link_changes()
        await door.close()
        await cut(prompt)
        await until(changes, LOST)
        yield prompt, decoder, source, cache, door, changes


# ---- made again ----


@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])
async def test_a_link_that_broke_is_made_again_and_told(one_sided: bool) -> None:
    async with linked_pair(DESC, relink=QUICK, enable_remote_cache_accessible=one_sided) as (prompt, decoder, _, cache):
        hers, ours = prompt.datadist.link_changes(), decoder.datadist.link_changes()
        await pulled(decoder, cache, 1, 2)
        await cut(prompt)
        told = await until(ours, LINKED)
        assert phases(told) == [(LOST, 1), (LINKED, 2)]
        assert phases(await until(hers, LINKED)) == [(LOST, 1), (LINKED, 2)]
        lost, first, linked = told[0], told[1], told[-1]
        assert (lost.cluster_id, type(lost.reason), lost.attempt, lost.next_delay) == (1, PeerLost, 0, None)
        assert (first.state, type(first.reason), first.attempt) == (RELINKING, PeerLost, 1)
        assert first.next_delay is not None
        assert 0.0025 <= first.next_delay <= 0.005
        assert (linked.reason, linked.attempt) == (None, len(told) - 2)
        assert [link.generation for link in decoder.datadist.statistics().links] == [2]
        await pulled(decoder, cache, 3, 4)
        figures = decoder.datadist.figures()
        assert figures.relinking.statuses["LLM_SUCCESS"] == 1
        assert (figures.links_made, figures.relinks_given_up, figures.relinking.running) == (2, 0, 0)
        assert figures.linking.statuses == {"LLM_SUCCESS": 1}
        assert prompt.datadist.figures().relinking.ended == 0


async def test_a_link_is_made_again_as_often_as_it_breaks() -> None:
    async with linked_pair(DESC, relink=QUICK) as (prompt, decoder, _, cache):
        changes = decoder.datadist.link_changes()
        for generation in range(1, 8):
            await cut(prompt)
            assert phases(await until(changes, LINKED)) == [(LOST, generation), (LINKED, generation + 1)]
            await prompt.datadist.wait_linked(2)
            await pulled(decoder, cache, generation, 0)
        assert decoder.datadist.figures().relinking.statuses["LLM_SUCCESS"] == 7


@pytest.mark.autojump
async def test_a_peer_that_breaks_off_at_once_is_linked_less_and_less_often() -> None:
    async with linked_pair(DESC, relink={"first_delay": 1, "max_delay": 8, "duration": 600}) as (prompt, decoder, _, _):
        changes, delays = decoder.datadist.link_changes(), list[float]()

        async def broken() -> None:
            await cut(prompt)
            told = await until(changes, LINKED)
            delays.extend(change.next_delay or 0.0 for change in told if change.state is RELINKING)
            await prompt.datadist.wait_linked(2)

        await anyio.sleep(9)
        for _ in range(5):
            await broken()
        await anyio.sleep(9)
        await broken()
        assert len(delays) == 6
        for delay, longest in zip(delays, [1, 2, 4, 8, 8, 1], strict=True):
            assert longest / 2 <= delay <= longest


async def test_without_the_option_it_is_not() -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, cache):
        changes = decoder.datadist.link_changes()
        await cut(prompt)
        await until(changes, LOST)
        with pytest.raises(NotLinked, match="the last link ended"):
            decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [0])
    assert await rest(changes) == []


async def test_the_end_that_was_asked_for_the_link_does_not_make_it_again() -> None:
    async with open_cluster(1, LLMRole.PROMPT, relink=QUICK) as prompt, open_cluster(2, device_id=1) as decoder:
        assert await decoder.datadist.link_clusters([cluster_info(prompt)], 5000) == (SUCCESS, [SUCCESS])
        await prompt.datadist.wait_linked(2)
        changes = prompt.datadist.link_changes()
        await cut_link(inside(decoder.datadist).links.find(1))
        await until(changes, LOST)
    assert await rest(changes) == []


async def by_us(prompt: Cluster, decoder: Cluster) -> None:
    await decoder.datadist.unlink_clusters([cluster_info(prompt)])


async def by_us_with_force(prompt: Cluster, decoder: Cluster) -> None:
    await decoder.datadist.unlink_clusters([cluster_info(prompt)], force=True)


async def by_the_peer(prompt: Cluster, decoder: Cluster) -> None:
    await prompt.datadist.unlink_clusters([cluster_info(decoder)])


async def by_the_peer_with_force(prompt: Cluster, decoder: Cluster) -> None:
    await prompt.datadist.unlink_clusters([cluster_info(decoder)], force=True)


async def by_the_peers_end(prompt: Cluster, decoder: Cluster) -> None:
    await prompt.datadist.finalize()


@pytest.mark.parametrize("end", [by_us, by_us_with_force, by_the_peer, by_the_peer_with_force, by_the_peers_end])
async def test_a_link_that_a_call_ended_is_not_made_again(end: Callable[[Cluster, Cluster], Awaitable[None]]) -> None:
    async with linked_pair(DESC, relink={**QUICK, "wait": 30}) as (prompt, decoder, _, cache):
        changes = decoder.datadist.link_changes()
        await end(prompt, decoder)
        (change,) = await until(changes, UNLINKED)
        assert (change.generation, type(change.reason)) == (1, LinkClosed)
        with pytest.raises(NotLinked):
            decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [0])
    assert await rest(changes) == []
    assert decoder.datadist.figures().relinking.ended == 0


async def test_links_by_rank_table_are_not_made_again_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"listen_ip_info": None, "relink": QUICK}
    async with open_cluster(1, **options) as one, open_cluster(2, device_id=1, **options) as two:
        await link_all(one, two)
        await settled(one, 1)
        await settled(two, 1)
        changes = two.datadist.link_changes()
        await cut(one)
        await until(changes, LOST)
    assert await rest(changes) == []
    warned = [record.getMessage() for record in caplog.records if "relink has no effect" in record.getMessage()]
    assert warned == [
        f"cluster {n}: relink has no effect on links by rank table: all members must link() again" for n in (1, 2)
    ]


async def test_links_that_belong_to_their_initiators_are_both_made_again() -> None:
    async with linked_pair(DESC, relink=QUICK, transfer_backend="hixl") as (prompt, decoder, source, cache):
        assert await prompt.datadist.link_clusters([cluster_info(decoder)], 5000) == (SUCCESS, [SUCCESS])
        changes = [each.datadist.link_changes() for each in (prompt, decoder)]
        await cut(prompt)
        for each in changes:
            assert phases(await until(each, LINKED)) == [(LOST, 1), (LINKED, 2)]
        await until_owned(decoder, 1)
        await pulled(decoder, cache, 1, 2)
        await until_owned(prompt, 2)
        await prompt.datadist.cache_manager.pull_blocks(BlocksCacheKey(2), source, [1], [2])
        verify(prompt.memory(source), source, [(tensor, 2, 2, 1) for tensor in range(2)])
        await decoder.datadist.unlink_clusters([cluster_info(prompt)])  # its own; the peer's stays
        await cut(prompt)
        await until(changes[0], LINKED)
        await decoder.datadist.wait_linked(1)
        lost = [change.reason for change in await until(changes[1], LINKED) if change.state is LOST]
        assert [reason is not None and reason.retryable for reason in lost] == [False], "the other end makes it again"
        with pytest.raises(NotLinked, match="only that end may use its link"):
            decoder.datadist.cache_manager.pull_blocks(KEY, cache, [1], [2])


async def test_a_caller_that_joins_the_link_of_its_initiator_lets_transfers_begin() -> None:
    policy = {**SLOW, "wait": 30}
    async with linked_pair(DESC, relink=policy, transfer_backend="hixl") as (prompt, decoder, _, cache):
        changes = decoder.datadist.link_changes()
        await cut(prompt)
        await until(changes, RELINKING)
        pull = decoder.datadist.cache_manager.pull_blocks(KEY, cache, [1], [2])
        async with inside(decoder.datadist).relinker.paused(1, 5):  # its own attempt does not join it first
            assert await prompt.datadist.link_clusters([cluster_info(decoder)], 5000) == (SUCCESS, [SUCCESS])
            assert not pull.done()
            assert await decoder.datadist.link_clusters([cluster_info(prompt)], 5000) == (SUCCESS, [SUCCESS])
            await pull
        verify(decoder.memory(cache), cache, [(tensor, 2, 1, 1) for tensor in range(2)])
        assert decoder.datadist.figures().relinking.running == 0


async def until_owned(cluster: Cluster, peer: int) -> None:
    """Wait until the cluster's own attempt has made the link, or has joined the one that the peer made."""
    while not inside(cluster.datadist).relinker._is_linked(peer):
        await anyio.lowlevel.checkpoint()


async def test_a_link_that_the_peer_makes_meanwhile_is_enough() -> None:
    async with linked_pair(DESC, relink=SLOW) as (prompt, decoder, _, cache):
        changes = decoder.datadist.link_changes()
        await cut(prompt)
        await until(changes, RELINKING)
        assert await prompt.datadist.link_clusters([cluster_info(decoder)], 5000) == (SUCCESS, [SUCCESS])
        (linked,) = await until(changes, LINKED)
        assert (linked.generation, linked.attempt) == (2, 1)
        await pulled(decoder, cache, 1, 2)
        assert decoder.datadist.figures().relinking.ended == 0


@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])
async def test_both_ends_may_ask_for_the_link_at_the_same_moment(one_sided: bool) -> None:
    """Make one link each time, and report it to the caller.

    An attempt that this call stops may have made one before, of which no caller was told.
    """
    quick = {"first_delay": 0.001, "max_delay": 0.002}
    async with linked_pair(DESC, relink=quick, enable_remote_cache_accessible=one_sided) as (prompt, decoder, _, cache):
        changes = decoder.datadist.link_changes()
        for _ in range(10):
            await cut(prompt)
            await until(changes, LOST)  # an attempt of before may be under way still, and make the link
            _, (status,) = await prompt.datadist.link_clusters([cluster_info(decoder)], 5000)
            assert status in {SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}
            await until(changes, LINKED)
            await prompt.datadist.wait_linked(2)
            await pulled(decoder, cache, 1, 2)
            for each in (prompt, decoder):
                assert [link.state for link in each.datadist.statistics().links] == ["ready"]
        stopped = sum(each.datadist.figures().relinking.statuses.get("CANCELLED", 0) for each in (prompt, decoder))
        assert all(11 <= each.datadist.figures().links_made <= 11 + stopped for each in (prompt, decoder))


# ---- given up ----


async def test_it_is_given_up_when_its_time_is_over() -> None:
    policy = {**QUICK, "duration": 0.3, "wait": 30}
    async with waiting_pair(relink=policy) as (_, decoder, _, cache, _, changes):
        task = decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [0])
        told = await until(changes, GIVEN_UP)
        *attempts, last = told
        assert [each.attempt for each in attempts] == list(range(1, len(attempts) + 1))
        delays = [each.next_delay or 0.0 for each in attempts]
        assert max(delays) <= 0.05
        assert all(0.0025 * 2**n <= delay <= 0.005 * 2**n for n, delay in enumerate(delays[:3]))
        assert (last.generation, last.attempt, last.next_delay) == (1, len(attempts), None)
        assert last.reason is not None
        assert last.reason.status_code is LLMStatusCode.LLM_LINK_FAILED
        with pytest.raises(type(last.reason)):
            await task
        with pytest.raises(NotLinked, match="no cluster can be reached"):
            decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [0])
        figures = decoder.datadist.figures()
        assert figures.relinking.statuses == {"LLM_LINK_FAILED": len(attempts)}
        assert (figures.relinks_given_up, figures.relinking.running) == (1, 0)
    assert await rest(changes) == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"auth_key": b"b" * 32}, "the peer does not have this end's key"),
        ({"auth_key": None, "trust": "none"}, "an unproved peer refused: protocol differs: 4 here, 5 at the peer"),
        ({"cluster_id": 9}, "cluster 1 was asked for, 9 answered"),
    ],
    ids=["another key", "no key", "another cluster"],
)
async def test_it_goes_on_where_what_listens_there_cannot_prove_that_it_is_the_peer(
    options: dict[str, Any], why: str
) -> None:
    key = b"a" * 32
    async with waiting_pair(relink=QUICK, auth_key=key) as (prompt, decoder, _, cache, door, changes):
        await prompt.datadist.finalize()
        there: dict[str, Any] = {
            "cluster_id": 1,
            "device_id": 3,
            "auth_key": key,
            "listen_ip_info": f"127.0.0.1:{door.port}",
        }
        async with open_cluster(**{**there, **options}):
            async for change in changes:
                assert change.state is RELINKING
                if why in str(change.reason):
                    break
        async with open_cluster(**there) as again:
            await again.blocks(DESC)
            assert phases(await until(changes, LINKED, GIVEN_UP)) == [(LINKED, 2)]
            await pulled(decoder, cache, 3, 4)


async def test_it_is_given_up_at_once_where_the_peer_proves_that_it_does_not_fit() -> None:
    """Give up on a sealed hello only: without a key, a hello proves nothing."""
    key, why = b"a" * 32, "enable_remote_cache_accessible differs: True at cluster 2, False at cluster 1"
    async with waiting_pair(relink=QUICK, auth_key=key) as (prompt, decoder, _, cache, door, changes):
        await prompt.datadist.finalize()
        waiting = decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [0])
        listen = f"127.0.0.1:{door.port}"
        async with open_cluster(
            1, device_id=3, listen_ip_info=listen, auth_key=key, enable_remote_cache_accessible=False
        ):
            told = await until(changes, GIVEN_UP)
            assert why in str(told[-1].reason)
            assert not any(why in str(change.reason) for change in told[:-1] if change.state is RELINKING)
            with pytest.raises(LinkError, match=why):
                await waiting


async def test_a_link_of_the_peers_that_comes_and_breaks_during_an_attempt_is_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attempt fails before the end of that link has been heard of."""
    async with waiting_pair() as (prompt, decoder, _, _, door, changes):
        again, calls = LinkInitiator.link_once, itertools.count()

        async def link_once(self: LinkInitiator, *arguments: Any) -> None:
            if next(calls):
                await again(self, *arguments)
                return
            assert (await prompt.datadist.link_clusters([cluster_info(decoder)], 5000))[0] is SUCCESS
            inside(decoder.datadist).links.any(1).session.break_off(PeerLost("it is gone"))
            await door.open()
            raise PeerLost("it is gone")

        monkeypatch.setattr(LinkInitiator, "link_once", link_once)
        told = [*await until(changes, LINKED), *await until(changes, LINKED, GIVEN_UP)]
        assert [state for state, _ in phases(told)] == [LINKED, LOST, LINKED]


# ---- transfers that wait ----


@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])
async def test_transfers_wait_for_the_link(one_sided: bool) -> None:
    async with waiting_pair(enable_remote_cache_accessible=one_sided) as (prompt, decoder, _, cache, door, _):
        manager = decoder.datadist.cache_manager
        entry = inside(decoder.datadist).registry.table.find(cache.cache_id)
        assert entry is not None
        tasks = [manager.pull_blocks(KEY, cache, [n], [7 - n], notify=bytes([n])) for n in range(4)]
        assert not any(task.done() for task in tasks)
        assert entry.leases == 4
        await door.open()
        reports = [await task for task in tasks]
        assert [report.bytes for report in reports] == [2 * 4096] * 4
        verify(decoder.memory(cache), cache, [(tensor, 7 - n, 1, n) for tensor in range(2) for n in range(4)])
        notes = prompt.datadist.notifications()
        assert [(await anext(notes)).payload for _ in range(4)] == [bytes([n]) for n in range(4)]
        assert entry.leases == 0
        assert decoder.datadist.figures().transfers["pull_blocks"].statuses == {"LLM_SUCCESS": 4}


async def test_pushes_and_leased_pulls_wait_too() -> None:
    async with waiting_pair() as (prompt, decoder, source, cache, door, _):
        lease = prompt.datadist.cache_manager.lease_blocks(source, [1, 2], 30)
        push = decoder.datadist.cache_manager.push_blocks(KEY, cache, [3], [5])
        pull = decoder.datadist.cache_manager.pull_leased(lease.ticket(), cache, [6, 7])
        await door.open()
        await push
        await pull
        verify(prompt.memory(source), source, [(tensor, 5, 2, 3) for tensor in range(2)])
        verify(decoder.memory(cache), cache, [(tensor, 6 + n, 1, 1 + n) for tensor in range(2) for n in range(2)])
        assert await lease.wait_ended() is LeaseEnd.TAKEN


async def test_what_does_not_wait_says_that_the_link_is_being_made_again() -> None:
    async with waiting_pair() as (_, decoder, _, _, door, changes):
        with pytest.raises(
            NotLinked, match=r"the last link ended: .*the link is being re-established: await wait_linked\(\)"
        ):
            await decoder.datadist.notify(1, b"x")
        await door.open()
        await until(changes, LINKED)
        await decoder.datadist.notify(1, b"x")


@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])
async def test_what_fails_because_of_a_link_that_comes_back_can_be_tried_again(one_sided: bool) -> None:
    options: dict[str, Any] = {"relink": QUICK, "enable_remote_cache_accessible": one_sided}
    async with linked_pair(DESC, **options) as (prompt, decoder, _, cache):
        door, changes, pull = Door(prompt), decoder.datadist.link_changes(), decoder.datadist.cache_manager.pull_blocks
        for _ in range(2):  # the second time it is a link that was made again
            await door.close()
            with soft_faults_cleared():
                soft_fault("HcclBatchGet:hang;HcclBatchPut:hang")
                under_way = pull(KEY, cache, [0], [0])
                await give_way()
                await cut(prompt)
                with pytest.raises(PeerLost) as lost:
                    await under_way
            await until(changes, LOST)
            with pytest.raises(NotLinked, match="being re-established") as meanwhile:
                pull(KEY, cache, [0], [0])
            assert (lost.value.retryable, meanwhile.value.retryable) == (True, True)
            await door.open()
            await until(changes, LINKED)
            await pull(KEY, cache, [0], [0])
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang;HcclBatchPut:hang")
            under_way = pull(KEY, cache, [0], [0])
            await give_way()
            await by_the_peer_with_force(prompt, decoder)
            with pytest.raises(LinkClosed) as unlinked:
                await under_way
        assert not unlinked.value.retryable, "a call ended it"


@pytest.mark.autojump
async def test_a_transfer_waits_no_longer_than_it_may() -> None:
    async with waiting_pair(relink={"first_delay": 4, "max_delay": 4, "wait": 20}) as (
        prompt,
        decoder,
        source,
        cache,
        _,
        _,
    ):
        manager = decoder.datadist.cache_manager
        lease = prompt.datadist.cache_manager.lease_blocks(source, [1], 30)
        with took(20), pytest.raises(NotLinked, match="not linked again within 20 s: no cluster"):
            await manager.pull_blocks(KEY, cache, [0], [0])
        with took(5), pytest.raises(NotLinked, match="within 5 s"):
            await manager.pull_leased(lease.ticket(), cache, [0], deadline=5)


@pytest.mark.autojump
async def test_a_deadline_counts_while_a_transfer_waits_and_its_other_terms_when_it_begins() -> None:
    async with waiting_pair(relink={"first_delay": 4, "max_delay": 4}) as (_, decoder, _, cache, door, _):
        pull = decoder.datadist.cache_manager.pull_blocks
        with took(10):
            late = pull(KEY, cache, [0], [0], deadline=10)
            checked = pull(KEY, cache, [1], [2], checksum=True, priority=TransferPriority.CRITICAL, deadline=30)
            with pytest.raises(TransferTimeout, match="the deadline, 10 s from the call"):
                await late
        await door.open()
        await checked
        verify(decoder.memory(cache), cache, [(tensor, 2, 1, 1) for tensor in range(2)])
        statuses = decoder.datadist.figures().transfers["pull_blocks"].statuses
        assert statuses == {"LLM_TIMEOUT": 1, "LLM_SUCCESS": 1}


async def test_arguments_are_checked_before_a_transfer_waits() -> None:
    async with waiting_pair() as (_, decoder, _, cache, _, _):
        manager = decoder.datadist.cache_manager
        with pytest.raises(ParamInvalid, match="dst_blocks"):
            manager.pull_blocks(KEY, cache, [0], [99])
        with pytest.raises(ParamInvalid, match="the limit is 65536"):
            manager.pull_blocks(KEY, cache, [0], [0], notify=bytes(65537))
        with pytest.raises(NotLinked):
            manager.pull_blocks(BlocksCacheKey(77), cache, [0], [0])


async def test_a_transfer_that_waits_can_be_cancelled_and_leaves_nothing() -> None:
    async with waiting_pair() as (_, decoder, _, cache, door, changes):
        manager = decoder.datadist.cache_manager
        entry = inside(decoder.datadist).registry.table.find(cache.cache_id)
        assert entry is not None
        task, other = (manager.pull_blocks(KEY, cache, [n], [n]) for n in range(2))
        waiter = asyncio.create_task(_wait(other))
        await asyncio.sleep(0)
        assert task.cancel()
        assert task.cancelled()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert entry.leases == 0
        await door.open()
        await until(changes, LINKED)
        await pulled(decoder, cache, 3, 4)
        assert decoder.datadist.figures().transfers["pull_blocks"].statuses == {"CANCELLED": 2, "LLM_SUCCESS": 1}


async def _wait(task: Any) -> None:
    await task


@pytest.mark.autojump
async def test_finalize_while_relinking_ends_what_waits() -> None:
    async with waiting_pair() as (_, decoder, _, cache, _, changes):
        task = decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [0])
        with took(0):
            await decoder.datadist.finalize()
        with pytest.raises(LinkClosed, match="finalized"):
            await task
    assert {change.state for change in await rest(changes)} <= {RELINKING}


async def test_a_link_that_is_being_made_again_counts_as_one() -> None:
    async with waiting_pair(mem_pool_cfg='{"memory_size": 1048576}') as (_, decoder, _, cache, _, changes):
        manager = decoder.datadist.cache_manager
        await until(changes, RELINKING)
        with pytest.raises(LLMException, match="LLM_EXIST_LINK"):
            await manager.unregister_cache(cache.cache_id)
        with pytest.raises(LLMException, match="LLM_EXIST_LINK"):
            await decoder.datadist.switch_role(LLMRole.PROMPT)
        allocated = await manager.allocate_blocks_cache(DESC)
        task = manager.pull_blocks(KEY, allocated, [0], [0])
        giving_up = asyncio.create_task(manager.deallocate_blocks_cache(allocated))
        await anyio.wait_all_tasks_blocked()
        assert not giving_up.done()  # what waits leases its cache
        task.cancel()
        await giving_up
        await decoder.datadist.unlink_clusters([LLMClusterInfo(1)])
        await manager.unregister_cache(cache.cache_id)
        with pytest.raises(CacheNotFound):
            manager.pull_blocks(KEY, cache, [0], [0])


# ---- with callers at the same time ----


@pytest.mark.autojump
async def test_a_callers_link_clusters_takes_the_link_over() -> None:
    async with linked_pair(DESC, relink=SLOW) as (prompt, decoder, _, cache):
        changes = decoder.datadist.link_changes()
        await cut(prompt)
        await until(changes, RELINKING)
        with took(0):
            assert await decoder.datadist.link_clusters([cluster_info(prompt)], 5000) == (SUCCESS, [SUCCESS])
        assert phases(await until(changes, LINKED)) == [(LINKED, 2)]
        await pulled(decoder, cache, 1, 2)
        assert decoder.datadist.figures().relinking.running == 0


async def test_after_a_callers_link_clusters_that_failed_it_goes_on() -> None:
    async with waiting_pair() as (prompt, decoder, _, cache, door, changes):
        elsewhere = LLMClusterInfo(1)
        elsewhere.append_remote_ip_info("127.0.0.1", 1)
        for _ in range(3):
            status, _ = await decoder.datadist.link_clusters([elsewhere], 1000)
            assert status is LLMStatusCode.LLM_LINK_FAILED
        await door.open()
        await until(changes, LINKED)
        await pulled(decoder, cache, 1, 2)
        await prompt.datadist.wait_linked(2)


async def test_a_callers_unlink_clusters_ends_it() -> None:
    async with waiting_pair() as (_, decoder, _, cache, door, changes):
        task = decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [0])
        assert await decoder.datadist.unlink_clusters([LLMClusterInfo(1)]) == (SUCCESS, [SUCCESS])
        with pytest.raises(LinkClosed, match="was unlinked"):
            await task
        assert (await until(changes, UNLINKED))[-1].generation == 1
        await door.open()
        with pytest.raises(NotLinked):
            decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [0])
        assert decoder.datadist.figures().relinking.running == 0
    assert await rest(changes) == []


async def test_unlinking_that_is_cancelled_at_any_await_ends_it_all_the_same() -> None:
    async with waiting_pair() as (prompt, decoder, _, cache, door, changes):
        for k in itertools.count(1):
            task = decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [0])
            call = CancelAt(k, inside(decoder.datadist).unlink(1, 5.0, force=False))
            with contextlib.suppress(asyncio.CancelledError):
                await call
            with pytest.raises(LinkClosed, match="was unlinked"):
                await task
            await until(changes, UNLINKED)
            await anyio.wait_all_tasks_blocked()
            assert decoder.datadist.figures().relinking.running == 0
            assert not inside(decoder.datadist).links.has_any
            if call.suspensions < k:
                break
            await door.open()
            assert await decoder.datadist.link_clusters([cluster_info(prompt)], 5000) == (SUCCESS, [SUCCESS])
            await prompt.datadist.wait_linked(2)
            await until(changes, LINKED)
            await door.close()
            await cut(prompt)
            await until(changes, LOST)
        assert k > 1


async def test_callers_link_and_unlink_while_the_link_breaks_again_and_again() -> None:
    """Whatever the order was: after the last unlink there is no link, and after the last link there is one."""
    async with linked_pair(DESC, relink=QUICK) as (prompt, decoder, _, cache):
        datadist, info = decoder.datadist, [cluster_info(prompt)]
        engine = inside(prompt.datadist)

        async def break_links() -> None:
            while True:
                if (link := engine.links.peek(2)) is not None:
                    await cut_link(link)
                await anyio.sleep(0.003)

        for _ in range(10):
            async with anyio.create_task_group() as group:
                group.start_soon(break_links)
                for _ in range(3):
                    await datadist.link_clusters(info, 5000)
                    await datadist.unlink_clusters(info, 5000)
                group.cancel_scope.cancel()
            await inside(datadist).links.wait_parted()
            assert datadist.statistics().links == ()
            assert datadist.figures().relinking.running == 0
            assert await datadist.link_clusters(info, 5000) == (SUCCESS, [SUCCESS])
            await pulled(decoder, cache, 1, 2)


# ---- readers ----


async def test_readers_each_get_all_changes_and_end_with_finalize() -> None:
    async with linked_pair(DESC, relink=QUICK) as (prompt, decoder, _, _):
        one, two = decoder.datadist.link_changes(), decoder.datadist.link_changes()
        closed = decoder.datadist.link_changes()
        await closed.aclose()
        await cut(prompt)
        told = await until(one, LINKED)
        late = decoder.datadist.link_changes()
        waiter = asyncio.create_task(rest(late))
    assert await rest(two) == told + await rest(one)
    assert phases(await waiter) == [(UNLINKED, 2)]
    assert await rest(closed) == []
    with pytest.raises(RuntimeError):
        decoder.datadist.link_changes()


async def test_a_slow_reader_loses_the_oldest_changes_and_is_told_how_many() -> None:
    async with linked_pair(DESC) as (_, decoder, _, _):
        feed = inside(decoder.datadist).changes
        slow, quick = decoder.datadist.link_changes(), decoder.datadist.link_changes()
        for number in range(MAX_UNREAD + 10):
            feed.tell(LinkChange(number, LOST, 1))
            assert (await anext(quick)).cluster_id == number
        assert (slow.dropped, quick.dropped) == (10, 0)
        assert (await anext(slow)).cluster_id == 10
        assert decoder.datadist.figures().link_changes_dropped == 10


async def test_a_reader_that_was_dropped_is_forgotten_and_a_cancelled_one_loses_nothing() -> None:
    async with linked_pair(DESC) as (_, decoder, _, _):
        feed = inside(decoder.datadist).changes
        reader = decoder.datadist.link_changes()
        decoder.datadist.link_changes()
        gc.collect()
        assert list(feed._readers) == [reader]
        waiter = asyncio.create_task(_next(reader))
        await asyncio.sleep(0)
        feed.tell(LinkChange(5, LOST, 1))
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert (await anext(reader)).cluster_id == 5


async def _next(reader: LinkChanges) -> LinkChange:
    return await anext(reader)


@pytest.mark.autojump
async def test_attempts_are_counted_and_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    async with waiting_pair(relink={"first_delay": 4, "max_delay": 4, "duration": 30}) as (
        _,
        decoder,
        _,
        _,
        _,
        changes,
    ):
        caplog.clear()
        given_up = (await until(changes, GIVEN_UP))[-1]
        assert decoder.datadist.figures().incidents["relink_failed"] == given_up.attempt > 4
        (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert "gives up the link to cluster 1 after" in warning.getMessage()


async def test_a_transfer_that_cannot_begin_fails_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever keeps it from beginning: its caller is not there any more to be told, and the others are not to blame."""
    async with waiting_pair() as (_, decoder, _, cache, door, _):
        begin, calls = Transfers.begin, itertools.count()

        def begins(transfers: Transfers, *words: Any) -> Any:
            if next(calls) == 0:
                raise MemoryError("no room for a program")
            return begin(transfers, *words)

        monkeypatch.setattr(Transfers, "begin", begins)
        first, second = (decoder.datadist.cache_manager.pull_blocks(KEY, cache, [n], [7 - n]) for n in range(2))
        await door.open()
        with pytest.raises(InternalError, match="the transfer could not begin: MemoryError") as failed:
            await first
        assert failed.value.peer == 1
        assert isinstance(failed.value.__cause__, MemoryError)
        await second
        await pulled(decoder, cache, 3, 4)
