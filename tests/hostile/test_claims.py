"""Tickets that a router or a client has changed: nothing that they name is used, and leases stay for their true takers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aiodatadist import (
    BlockLease,
    CacheNotFound,
    FeatureNotEnabled,
    LeaseEnd,
    LeaseMismatch,
    LeaseTicket,
    LLMStatusCode,
    new_lease_name,
    prompt_digest,
)
from aiodatadist._cluster.engine import Engine
from aiodatadist._link.control.block_leases import BlockLeases
from aiodatadist._link.control.peer_claim import PeerClaim
from aiodatadist._link.transfers.responder import Responder
from aiodatadist._testing.views import transfer_of
from aiodatadist._values.digests import LeaseDigests
from aiodatadist._wire import frames, messages
from aiodatadist._wire.messages import Claim, Pull, Unclaim
from aiodatadist.testing import inside
from tests.test_block_leases import BLOCKS, DESC, MINUTE, TARGETS, Pair, ended, pair_of

PROMPT, ANOTHER = prompt_digest([1, 2, 3]), prompt_digest([1, 2, 4])


@pytest.fixture(params=[True, False], ids=["one_sided", "requests"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with pair_of(enable_remote_cache_accessible=request.param) as made:
        yield made


def refused(pair: Pair) -> dict[str, int]:
    return dict(pair.two.datadist.figures().claims_refused)


async def is_refused(pair: Pair, ticket: Any, why: str, **options: Any) -> None:
    """Check that the pull fails as a whole: no block of it may be used."""
    with pytest.raises(LeaseMismatch, match=f"refused the claim of lease .*: {why}") as failed:
        await pair.puller.pull_leased(ticket, pair.mine, TARGETS[: len(LeaseTicket.of(ticket).blocks)], **options)
    assert (failed.value.status_code, failed.value.landed_blocks) == (LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, 0)


async def is_taken(pair: Pair, lease: BlockLease, **options: Any) -> None:
    """By who has the true ticket."""
    assert lease.ended is None
    await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, **options)
    pair.verify()
    assert await ended(lease) is LeaseEnd.TAKEN


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param([5, 6, 7], id="others"),
        pytest.param([3, 9, 5], id="one other"),
        pytest.param([3, 4, 9], id="another order"),
        pytest.param([3, 9], id="fewer"),
        pytest.param([3, 9, 4, 4][1:], id="twice"),
    ],
)
async def test_a_ticket_with_other_blocks_reads_none_of_them(pair: Pair, forged: list[int]) -> None:
    lease = pair.lease()
    ticket = {**lease.ticket().model_dump(mode="json"), "blocks": forged}
    await is_refused(pair, ticket, "other blocks")
    assert (refused(pair), lease.refused) == ({"other_blocks": 1}, 1)
    await is_taken(pair, lease)


async def test_the_blocks_that_a_reader_leaves_out_count_too(pair: Pair) -> None:
    lease = pair.lease()
    ticket = lease.ticket().model_copy(update={"blocks": (5, *BLOCKS[1:])})
    with pytest.raises(LeaseMismatch, match="other blocks"):
        await pair.puller.pull_leased(ticket, pair.mine, TARGETS[1:], first=1)
    await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS[1:], first=1)
    assert await ended(lease) is LeaseEnd.TAKEN


async def test_a_lease_of_one_block_gives_no_freed_ones(pair: Pair) -> None:
    freed = pair.lease()
    blocks = freed.ticket().blocks
    await pair.puller.pull_leased(freed.ticket(), pair.mine, TARGETS)
    await ended(freed)
    lease = pair.owner.lease_blocks(pair.theirs, [0], MINUTE)
    await is_refused(pair, lease.ticket().model_copy(update={"blocks": blocks}), "other blocks")
    assert lease.ended is None


async def test_a_lease_is_of_one_cache(pair: Pair) -> None:
    """Two caches of an owner have the same block numbers."""
    other = await pair.two.blocks(pair.theirs.cache_desc, 7)
    lease = pair.lease()
    await is_refused(pair, lease.ticket().model_copy(update={"cache_id": other.cache_id}), "other blocks")
    await is_taken(pair, lease)


async def test_an_owner_that_writes_is_asked_for_nothing_before_it_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair_of(enable_remote_cache_accessible=False) as pair:
        asked: list[Pull] = []
        begin = Responder.begin

        def watched(self: Responder, message: Pull) -> None:
            asked.append(message)
            begin(self, message)

        monkeypatch.setattr(Responder, "begin", watched)
        lease = pair.lease()
        await is_refused(pair, lease.ticket().model_copy(update={"blocks": (5, 6, 7)}), "other blocks")
        assert asked == []
        await is_taken(pair, lease)
        assert len(asked) == 1


async def test_what_was_read_meanwhile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one-sided mode this end reads by itself, and a refusal may come when all the bytes are here."""
    async with pair_of() as pair:
        lease = pair.lease()
        held: list[Callable[[], None]] = []
        claim = BlockLeases.claim
        monkeypatch.setattr(BlockLeases, "claim", lambda *given: held.append(partial(claim, *given)))
        forged = lease.ticket().model_copy(update={"blocks": (5, 6, 7)})
        task = pair.puller.pull_leased(forged, pair.mine, TARGETS)
        with anyio.fail_after(10):
            while not held or transfer_of(task)._outcome is None:  # type: ignore[attr-defined]
                await anyio.lowlevel.checkpoint()
        pair.verify([5, 6, 7])
        assert not task.done()
        monkeypatch.undo()
        held[0]()
        with pytest.raises(LeaseMismatch, match="other blocks") as failed:
            await task
        assert failed.value.landed_blocks == 0
        await is_taken(pair, lease)


async def test_a_destination_stays_while_the_claim_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """In request/response mode nothing has begun then that would hold it."""
    held: list[Callable[[], None]] = []
    claim = BlockLeases.claim
    pool = {"memory_size": 1 << 20}
    async with pair_of(enable_remote_cache_accessible=False, mem_pool_cfg=pool) as pair:
        lease, cache = pair.lease(), await pair.puller.allocate_blocks_cache(DESC)
        monkeypatch.setattr(BlockLeases, "claim", lambda *given: held.append(partial(claim, *given)))
        task = pair.puller.pull_leased(lease.ticket(), cache, TARGETS)
        given_up: list[bool] = []

        async def give_up() -> None:
            await pair.puller.deallocate_blocks_cache(cache)
            given_up.append(task.done())

        async with anyio.create_task_group() as group:
            group.start_soon(give_up)
            with anyio.fail_after(10):
                while not held:
                    await anyio.lowlevel.checkpoint()
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            assert given_up == []
            monkeypatch.undo()
            for each in held:
                each()
        assert given_up == [True]
        with pytest.raises(CacheNotFound):
            await task


async def test_another_prompt_s_blocks_are_not_used(pair: Pair) -> None:
    lease = pair.lease(prompt_digest=PROMPT)
    await is_refused(pair, lease.ticket(), "another prompt", prompt_digest=ANOTHER)
    await is_refused(pair, lease.ticket(), "another prompt .*; the lease has a prompt_digest, and this pull has none")
    assert (refused(pair), lease.refused) == ({"another_prompt": 2}, 2)
    await is_taken(pair, lease, prompt_digest=PROMPT)


async def test_who_asks_for_a_prompt_gets_no_blocks_of_which_the_owner_knows_none(pair: Pair) -> None:
    lease = pair.lease()
    await is_refused(pair, lease.ticket(), "another prompt", prompt_digest=PROMPT)
    await is_taken(pair, lease)


async def test_a_claim_that_comes_before_its_lease_is_compared_as_well(pair: Pair) -> None:
    name = new_lease_name()
    ticket = pair.lease().ticket().model_copy(update={"lease": name})
    forged = ticket.model_copy(update={"blocks": (5, 6, 7)})
    wrong = pair.puller.pull_leased(forged, pair.mine, [10, 11, 12], patience=10, prompt_digest=PROMPT)
    another = pair.puller.pull_leased(ticket, pair.mine, [13, 14, 15], patience=10, prompt_digest=ANOTHER)
    right = pair.puller.pull_leased(ticket, pair.mine, TARGETS, patience=10, prompt_digest=PROMPT)
    leases = inside(pair.two.datadist).block_leases
    with anyio.fail_after(10):
        while len(leases._early) < 3:
            await anyio.lowlevel.checkpoint()
    lease = pair.lease(name=name, prompt_digest=PROMPT)
    await right
    pair.verify()
    assert await ended(lease) is LeaseEnd.TAKEN
    for task, why in ((wrong, "other blocks"), (another, "another prompt")):
        with pytest.raises(LeaseMismatch, match=why):
            await task


async def test_a_stranger_s_claim_is_in_no_true_taker_s_way(pair: Pair) -> None:
    """Refuse a stranger's claim: it takes no taker's place, and does not decide how many takers there are."""
    lease = pair.lease(prompt_digest=PROMPT)
    ticket = lease.ticket()
    await pair.puller.pull_leased(ticket, pair.mine, TARGETS, takers=2, prompt_digest=PROMPT)
    await is_refused(pair, ticket, "another prompt", takers=2, prompt_digest=ANOTHER)
    await is_refused(pair, ticket, "another prompt", takers=9, prompt_digest=ANOTHER)
    await pair.puller.pull_leased(ticket, pair.mine, [10, 11, 12], takers=2, prompt_digest=PROMPT)
    assert await ended(lease) is LeaseEnd.TAKEN


# ---- ending what is not theirs ----


@pytest.mark.parametrize("change", [{"blocks": (5, 6, 7)}, {}], ids=["other blocks", "another prompt"])
async def test_a_stranger_ends_no_lease(pair: Pair, change: dict[str, Any]) -> None:
    """Its name was enough."""
    lease = pair.lease(prompt_digest=PROMPT)
    ticket = lease.ticket().model_copy(update=change)
    digest = PROMPT if change else ANOTHER
    await pair.puller.release_lease(ticket, prompt_digest=digest)
    await pair.puller.release_lease(ticket)
    await is_refused(pair, ticket, "other blocks" if change else "another prompt", prompt_digest=digest)
    await is_taken(pair, lease, prompt_digest=PROMPT)


async def test_a_stranger_s_release_that_comes_before_the_lease_is_of_no_effect(pair: Pair) -> None:
    name = new_lease_name()
    ticket = pair.lease().ticket().model_copy(update={"lease": name})
    await pair.puller.release_lease(ticket, prompt_digest=ANOTHER)
    await pair.puller.release_lease(ticket.model_copy(update={"blocks": (5, 6, 7)}), prompt_digest=PROMPT)
    task = pair.puller.pull_leased(ticket, pair.mine, TARGETS, patience=10, prompt_digest=PROMPT)
    leases = inside(pair.two.datadist).block_leases
    with anyio.fail_after(10):
        while not leases._early:
            await anyio.lowlevel.checkpoint()
    lease = pair.lease(name=name, prompt_digest=PROMPT)
    await task
    assert await ended(lease) is LeaseEnd.TAKEN
    await pair.puller.release_lease(ticket.model_copy(update={"lease": "0" * 32}), prompt_digest=PROMPT)
    await pair.one.datadist.notify(2, b"behind it")
    await anext(pair.two.datadist.notifications())
    assert pair.lease(name="0" * 32, prompt_digest=PROMPT).ended is LeaseEnd.RELEASED  # that of its true taker counts


async def test_a_refused_pull_that_is_cancelled_ends_no_lease(pair: Pair) -> None:
    """Its last word may cross the refusal: the owner knows that claim, and that it was refused."""
    lease, leases = pair.lease(prompt_digest=PROMPT), inside(pair.two.datadist).block_leases
    told: list[bool] = []
    peer = object()
    wrong = LeaseDigests(LeaseDigests.of(lease.ticket().cache_id, lease.blocks, None).blocks, ANOTHER.hex())
    for _ in range(2):  # it says so again if the answer is lost
        leases.claim(lease.name, PeerClaim(peer, 5, 10, told.append, digests=wrong), 0)
    leases.unclaim(peer, 5, lease.name, LeaseEnd.RELEASED, wrong)
    leases.unclaim(peer, 6, lease.name, LeaseEnd.TAKEN, wrong)
    assert told == [False, False]
    assert refused(pair) == {"another_prompt": 1}
    await is_taken(pair, lease, prompt_digest=PROMPT)


async def test_the_true_taker_may_release_it(pair: Pair) -> None:
    lease = pair.lease(prompt_digest=PROMPT)
    await pair.puller.release_lease(lease.ticket(), prompt_digest=PROMPT)
    assert await ended(lease) is LeaseEnd.RELEASED


# ---- peers of older versions, which say no digests ----


def speak_older(monkeypatch: pytest.MonkeyPatch, cluster_id: int) -> None:
    """Let this cluster speak version 4.1 from here on; its hello says so."""
    own = Engine.hello

    def made(self: Engine, has_key: bool, peer: int | None) -> Any:
        hello = own(self, has_key, peer)
        return hello.model_copy(update={"minor": 1}) if self.cluster_id == cluster_id else hello

    monkeypatch.setattr(Engine, "hello", made)


async def test_an_older_puller_is_accepted_with_one_warning_unless_a_prompt_is_to_be_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    speak_older(monkeypatch, 1)
    encode = frames.encode
    monkeypatch.setattr(
        "aiodatadist._link.control.wire.encode",
        lambda message, minor=messages.MINOR, sealer=None: encode(
            message, 1 if isinstance(message, (Claim, Unclaim)) else minor, sealer
        ),
    )
    async with pair_of() as pair:
        for _ in range(3):
            await is_taken(pair, pair.lease())
        lease = pair.lease(prompt_digest=PROMPT)
        for _ in range(2):
            with pytest.raises(CacheNotFound, match="keeps no blocks"):  # why is not said to it
                await pair.puller.pull_leased(lease.ticket(), pair.mine, TARGETS, prompt_digest=PROMPT)
            await pair.puller.release_lease(lease.ticket(), prompt_digest=PROMPT)
        assert (lease.ended, refused(pair)) == (None, {"no_digests": 2})
    warned = [r.getMessage() for r in caplog.records if "which blocks are kept is not compared" in r.getMessage()]
    assert warned == ["cluster 1 has version 4.1 of the protocol: which blocks are kept is not compared; update it"]


async def test_an_older_owner_is_believed_with_one_warning_unless_a_prompt_is_to_be_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Warn once of an owner that ignores what it does not know: a pull for a prompt would succeed, whatever it keeps."""
    speak_older(monkeypatch, 2)
    async with pair_of() as pair:
        for _ in range(3):
            await pair.puller.pull_leased(pair.lease().ticket(), pair.mine, TARGETS)
        with pytest.raises(FeatureNotEnabled, match=r"cluster 2 cannot compare prompts: its protocol has version 4\.1"):
            await pair.puller.pull_leased(pair.lease().ticket(), pair.mine, TARGETS, prompt_digest=PROMPT)
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and "is not compared" in r.getMessage()]
    assert len(warned) == 1
