"""The budget of a peer: what it sends beyond that is not read, and its other links add nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, Quotas, TransferPriority
from aiodatadist._link.session import Session
from aiodatadist._wire.messages import MAX_NOTE, Digest, Digests, Found, Grant, KeyName, Lookup, Ping, Revoke
from aiodatadist.testing import Cluster, cluster_info, inside, linked_pair, open_cluster
from tests.test_requests_in_line import HeldSums

BLOCKS = CacheDesc(1, [4, 64], DataType.DT_UINT8)
FEW = Quotas(frames=100, frame_bytes=1 << 20, revocations=4)


def session(one: Cluster, other: int) -> Session:
    return inside(one.datadist).links.any(other).session


def other_end() -> AbstractAsyncContextManager[Cluster]:
    """Open a cluster whose links have no threads of C, which keep real time."""
    return open_cluster(2, device_id=1, transport="loopback")


@contextmanager
def seconds_of_the_loop(expected: float) -> Iterator[None]:
    """Assert that a body waits for exactly this long, by the clock of a loop that jumps."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    yield
    assert loop.time() - began == pytest.approx(expected, abs=0.3), "and a turn of others here and there"


@pytest.mark.autojump
async def test_messages_beyond_the_limit_wait_for_the_next_second() -> None:
    async with linked_pair(BLOCKS, quotas=FEW, transport="loopback") as (owner, peer, *_):
        liar = session(peer, owner.datadist.cluster_id)
        await liar.ping()
        with seconds_of_the_loop(3):
            for call in range(2**40, 2**40 + 320):
                liar.post(Ping(call=call))
            await liar.ping()
        assert owner.datadist.figures().budget_waits["frames"] == 3
        assert owner.datadist.figures().links == {"ready": 1}, "it only waited"


@pytest.mark.autojump
async def test_bytes_beyond_the_limit_wait_too_and_other_peers_do_not() -> None:
    quotas = Quotas(frame_bytes=1 << 20)
    async with linked_pair(BLOCKS, quotas=quotas, transport="loopback") as (owner, peer, *_):
        liar = session(peer, owner.datadist.cluster_id)
        async with open_cluster(3, device_id=2, transport="loopback") as third:
            await third.datadist.link_clusters([cluster_info(owner)])
            honest = session(third, owner.datadist.cluster_id)
            for _ in range(16):  # 88 KB each
                await liar.notify(bytes(MAX_NOTE))
            with seconds_of_the_loop(0):
                await honest.ping()
            with seconds_of_the_loop(1):
                await liar.ping()
        assert owner.datadist.figures().budget_waits == {"frame_bytes": 1}


@pytest.mark.autojump
async def test_revocations_beyond_the_limit_wait() -> None:
    async with linked_pair(BLOCKS, quotas=FEW, transport="loopback") as (owner, peer, *_):
        liar = session(peer, owner.datadist.cluster_id)
        with seconds_of_the_loop(2):
            for number in range(1, 11):
                liar.post(Revoke(cache_id=2**40 + number, number=2**40 + number, seconds=1))
            await liar.ping()
        assert owner.datadist.figures().budget_waits == {"revocations": 2}


@pytest.mark.autojump
async def test_a_new_link_gives_a_peer_no_further_budget() -> None:
    async with open_cluster(1, quotas=FEW, transport="loopback") as owner, other_end() as peer:
        for _ in range(4):
            await peer.datadist.link_clusters([cluster_info(owner)])
            liar = session(peer, 1)
            for call in range(2**40, 2**40 + 60):
                liar.post(Ping(call=call))
            await liar.ping()
            await peer.datadist.unlink_clusters([cluster_info(owner)])
        assert owner.datadist.figures().budget_waits == {"frames": 2}, "for 240 messages, and a few of each link"


async def test_figures_name_every_limit() -> None:
    async with open_cluster(1, quotas=Quotas(frames=123)) as owner:
        assert owner.datadist.figures().quotas == Quotas(frames=123).model_dump()


@pytest.mark.autojump
async def test_notifications_beyond_the_limit_stay_with_their_sender_and_hold_up_nothing_else() -> None:
    async with open_cluster(1, transport="loopback") as owner, other_end() as peer:
        await owner.blocks(BLOCKS)
        mine = await peer.blocks(BLOCKS)
        for link in range(2):
            await peer.datadist.link_clusters([cluster_info(owner)])
            for number in range(40 * link, 40 * (link + 1)):
                await session(peer, 1).notify(b"%d" % number)
            await session(peer, 1).ping()
            if not link:
                await peer.datadist.unlink_clusters([cluster_info(owner)])
        room = session(owner, 2).share.notes
        assert room.notes == 64, "over both links"
        await peer.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), mine, [0], [1])
        notes = owner.datadist.notifications()
        assert [(await anext(notes)).payload for _ in range(80)] == [b"%d" % number for number in range(80)]
        assert room.notes == room.nbytes == 0


async def test_requests_beyond_the_limit_wait_in_line_and_all_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": False, "sync_kv_timeout": 60_000}
    async with linked_pair(BLOCKS, quotas=Quotas(requests=4), **options) as made:
        owner, peer, _, cache = made
        sums, pull = HeldSums(owner, monkeypatch), peer.datadist.cache_manager.pull_blocks
        held = [pull(BlocksCacheKey(1), cache, [0], [number % 4], checksum=True) for number in range(6)]
        plain = pull(BlocksCacheKey(1), cache, [0], [2])
        await sums.have_begun(4)
        await session(peer, 1).ping()
        assert sums.begun == 4
        assert not plain.done(), "it has its turn, though it needs no checksum"
        assert owner.datadist.figures().budget_waits == {"requests": 3}
        sums.go_on()
        for task in (*held, plain):
            await task
        await pull(BlocksCacheKey(1), cache, [0], [2])
        assert owner.datadist.figures().budget_waits == {"requests": 3}


async def test_questions_for_checksums_take_no_turn_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": False, "sync_kv_timeout": 60_000}
    async with linked_pair(BLOCKS, quotas=Quotas(requests=1), **options) as (owner, peer, theirs, cache):
        await peer.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
        sums, asking = HeldSums(owner, monkeypatch), session(peer, 1)
        await asking.questions.ask(
            lambda call: Lookup(call=call, name=KeyName(kind="id", id=theirs.cache_id, model_id=0)), Found
        )

        def question(call: int) -> Digest:
            where: dict[str, Any] = {"first_tensor": 0, "tensors": 1, "offset": 0, "step": 64, "nbytes": 64, "tail": 64}
            return Digest(call=call, cache_id=theirs.cache_id, indexes=[0], seconds=60, **where)

        with asking.questions.open(question, Digests, checksums=1) as asked:
            await sums.have_begun(1)
            await peer.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [2])
            assert not asked.answered.is_set(), "nor does a request wait for them"
            sums.go_on()
            await asking.questions.persist(asked, question)


async def test_critical_requests_beyond_the_limit_are_served_as_normal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": False, "sync_kv_timeout": 60_000}
    async with linked_pair(BLOCKS, quotas=Quotas(critical_requests=2), **options) as made:
        owner, peer, _, cache = made
        sums, pull = HeldSums(owner, monkeypatch), peer.datadist.cache_manager.pull_blocks
        priority = TransferPriority.CRITICAL
        tasks = [pull(BlocksCacheKey(1), cache, [0], [number], checksum=True, priority=priority) for number in range(4)]
        await sums.have_begun(4)
        assert owner.datadist.figures().budget_waits == {"critical_requests": 2}
        assert session(owner, 2).share.critical.requests == 2
        sums.go_on()
        for task in tasks:
            await task
        assert session(owner, 2).share.critical.requests == 0


@pytest.mark.parametrize(
    ("quotas", "words"),
    [(Quotas(caches=2), "more than 2 caches"), (Quotas(tensors=2), "more than 2 tensors in all")],
    ids=["caches", "tensors"],
)
async def test_a_peer_that_announces_more_than_its_quota_loses_its_link(quotas: Quotas, words: str) -> None:
    async with linked_pair(BLOCKS, quotas=quotas) as (owner, peer, *_):
        liar = session(peer, 1)
        for number in range(3):
            made = await peer.blocks(BLOCKS, 10 + number)
            entry = inside(peer.datadist).registry.table.find(made.cache_id)
            assert entry is not None
            liar.post(Grant(cache=entry.message()))
        assert words in await owner.datadist.wait_link_closed(2)


async def test_look_ups_have_the_quota_that_users_set() -> None:
    async with open_cluster(1, quotas=Quotas(look_ups=3)) as owner:
        assert inside(owner.datadist).initiator.host_names.of_share == 3
