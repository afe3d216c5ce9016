"""A peer that takes back caches which its own requests here still use."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, Placement
from aiodatadist._cache.names import Name
from aiodatadist._concurrency import loop_time
from aiodatadist._link.control import wire
from aiodatadist._link.transfers.responder import MAX_ASKED_EARLY
from aiodatadist._values.peer_budget import REQUEST_TASKS
from aiodatadist._wire.messages import CacheEntry, Grant, KeyName, Lookup, Owned, Pull, Pulled, Revoke, Stop
from aiodatadist.testing import Cluster, inside, linked_pair
from tests.held import there_and_back, turns

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry
    from aiodatadist._link import Link

DESC = CacheDesc(2, (8, 64), DataType.DT_UINT8, Placement.HOST)
MANY = 500


def grant(cache_id: int) -> Grant:
    """Return what tells of a cache that no channel reaches."""
    addresses = [2**40, 2**41]
    return Grant(
        cache=CacheEntry(
            cache_id=cache_id,
            blocks=True,
            placement=0,
            data_type=0,
            pieces=8,
            stride=64,
            addresses=addresses,
            epoch=2**31,
        )
    )


def pull(call: int, cache_id: int) -> Pull:
    return Pull(
        call=call, name=KeyName(kind="blocks", id=0, model_id=0), slot=0, target=cache_id, src_layers=None, dst_layers=None,
        tensors_per_layer=1, src_blocks=[0], dst_blocks=[0], dst_slot=0, nbytes=0, seconds=1000,
    )  # fmt: skip


@pytest.mark.parametrize("seconds", [1000.0, 0.001])
async def test_a_cache_that_is_taken_back_while_requests_use_it_needs_no_task(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        link, liars = (inside(each.datadist).links.current[0] for each in (prompt, decoder))
        given_back: list[int] = []
        nothing: Any = lambda _: None  # noqa: E731
        monkeypatch.setattr(liars.session.channels, "on_outdated", nothing)
        monkeypatch.setattr(liars.session.peer_leases, "on_revoked", lambda cache_id, _: given_back.append(cache_id))
        before = len(asyncio.all_tasks())
        caches = range(1, MANY + 1)
        for number in caches:
            for message in (
                grant(number),
                pull(number, number),
                Revoke(cache_id=number, seconds=seconds, number=number),
            ):
                liars.session.post(message)
            if not number % 50:
                await there_and_back(decoder, prompt)
        assert len(asyncio.all_tasks()) <= before + REQUEST_TASKS + 2
        await turns()
        assert given_back == [], "the requests still use them"
        for number in caches:
            liars.session.post(Stop(call=number))
        await there_and_back(decoder, prompt)
        await turns()
        await there_and_back(decoder, prompt)
        assert sorted(given_back) == list(caches)
        assert link.session.is_ready
        assert len(link.session.catalogue) == 0


@asynccontextmanager
async def being_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Cluster, Cluster, Link, Link, Entry]]:
    """Link two clusters of which the first is revoking a cache that the second knows.

    Yield both, their links, and the cache. The revocation ends when the first learns that the second has let go.
    """
    async with linked_pair(DESC) as (prompt, decoder, _, target):
        link, liars = (inside(each.datadist).links.current[0] for each in (prompt, decoder))
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), target, [0], [0])
        found = inside(prompt.datadist).registry.offered(Name("blocks", 0, 0))
        assert found is not None
        nothing: Any = lambda *_: None  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(link.session.peer_leases, "on_revoked", nothing)
            link.session.peer_leases.revoke(found[0])
            await there_and_back(decoder, prompt)
        yield prompt, decoder, link, liars, found[0]


async def test_questions_about_a_cache_that_is_being_taken_back_have_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async with being_taken_back(monkeypatch) as (prompt, decoder, link, liars, entry):
        before, late = len(asyncio.all_tasks()), inside(decoder.datadist).totals.answers_late
        many = MAX_ASKED_EARLY + 100
        for number in range(many):
            liars.session.post(Lookup(call=2**40 + number, name=KeyName(kind="blocks", id=0, model_id=0)))
            if not number % 500:
                await there_and_back(decoder, prompt)
        await there_and_back(decoder, prompt)
        assert len(asyncio.all_tasks()) <= before + 2
        assert inside(decoder.datadist).totals.answers_late == late + 100, "for which there is no room"
        link.session.peer_leases.on_revoked(entry.cache_id)
        while inside(decoder.datadist).totals.answers_late < late + many:
            await turns()


@pytest.mark.parametrize(
    ("module", "limit"),
    [(loop_time, "HELD"), (wire, "MAX_BACKLOG")],
    ids=["the loop", "memory for answers"],
)
async def test_questions_about_a_cache_that_was_taken_back_are_answered_a_few_at_a_time(
    module: Any, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their answers hold the event loop no longer than other calls may, and no more of them wait than of other messages."""
    async with being_taken_back(monkeypatch) as (prompt, decoder, link, liars, entry):
        many, answered = 500, Counter[int]()
        for number in range(many):
            liars.session.post(Lookup(call=2**40 + number, name=KeyName(kind="blocks", id=0, model_id=0)))
        await there_and_back(decoder, prompt)
        loop, rounds, find = asyncio.get_running_loop(), 0, link.transfers.responder.find

        def go_round() -> None:
            nonlocal rounds
            rounds += 1
            if answered.total() < many:
                loop.call_soon(go_round)

        def counted(message: Lookup) -> None:
            answered[rounds] += 1
            find(message)

        monkeypatch.setattr(link.transfers.responder, "find", counted)
        monkeypatch.setattr(module, limit, 0)
        go_round()
        link.session.peer_leases.on_revoked(entry.cache_id)
        while answered.total() < many:
            await turns()
        assert max(answered.values()) <= 50


async def test_requests_for_caches_that_this_end_does_not_know_are_answered_without_a_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        link, liars = (inside(each.datadist).links.current[0] for each in (prompt, decoder))
        answers, tasks = list[Pulled](), list[object]()
        monkeypatch.setattr(liars.session.questions, "find", answers.append)
        monkeypatch.setattr(link.session, "spawn", tasks.append)
        for number in range(1, MANY + 1):
            liars.session.post(pull(number, number))
        await there_and_back(decoder, prompt)
        assert [answer.call for answer in answers] == list(range(1, MANY + 1))
        assert all(answer.is_unknown for answer in answers)
        assert tasks == []


async def test_a_link_that_belongs_to_no_end_is_ended_once_however_often_the_peer_says_so() -> None:
    async with linked_pair(DESC, transfer_backend="hixl") as (prompt, decoder, _, _):
        link, liars = (inside(each.datadist).links.current[0] for each in (prompt, decoder))
        ends = 0

        async def disconnect(reason: str) -> None:
            nonlocal ends
            ends += 1
            await true(reason)

        true, link.owners.disconnect = link.owners.disconnect, disconnect
        for number in range(2**40, 2**40 + 1000):
            liars.session.post(Owned(call=number, on=False))
        await link.wait_closed()
        assert 1 <= ends <= 2
