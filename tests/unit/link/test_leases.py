"""A cache that a peer was told of is its to reach until it gave it back, or its link is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist._cache.table import CacheTable, Entry
from aiodatadist._concurrency.signal import Signal
from aiodatadist._link.control.peer_leases import PeerLeases
from aiodatadist._wire.messages import Message, Revoke
from aiodatadist.errors import LLMException
from tests.unit.cache.examples import local, quiet

LONG = 3600.0


class Link:
    """A link as leases need it: a holder, a connection, and a place for complaints."""

    failure: LLMException | None = None

    def __init__(self, spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None], seconds: float) -> None:
        self.said: list[Message] = []
        self.complaints: list[str] = []
        self.complained = Signal()
        self.peer_leases = PeerLeases(self, seconds, self.said.append, spawn, self.give_up)

    def revoke(self, entry: Entry) -> Signal:
        return self.peer_leases.revoke(entry)

    def give_up(self, why: str) -> None:
        self.complaints.append(why)
        self.complained.set()


@asynccontextmanager
async def linked(seconds: float = LONG) -> AsyncIterator[Link]:
    async with anyio.create_task_group() as group:

        def spawn(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
            group.start_soon(call)

        yield Link(spawn, seconds)
        group.cancel_scope.cancel()


def caches(count: int) -> list[Entry]:
    table = CacheTable()
    return [local(1, 1, 64, blocks=True, in_=table) for _ in range(count)]


async def test_peer_that_is_told_holds_the_cache_and_is_told_once() -> None:
    (entry,) = caches(1)
    async with linked() as link:
        assert link.peer_leases.told(entry)
        assert not link.peer_leases.told(entry)
        assert entry.holders == {link}
        assert link.said == []


async def test_cache_is_free_when_the_peer_gave_it_back() -> None:
    (entry,) = caches(1)
    async with linked() as link:
        link.peer_leases.told(entry)
        link.peer_leases.revoke(entry)
        assert link.said == [Revoke(cache_id=entry.cache_id, seconds=LONG, number=1)]
        assert entry.holders == {link}, "it may still reach it"
        link.peer_leases.on_revoked(entry.cache_id)
        await quiet(entry)
        assert entry.holders == set()
        assert link.peer_leases.told(entry), "it has forgotten"


async def test_cache_is_asked_for_once_however_many_want_it_back() -> None:
    (entry,) = caches(1)
    async with linked() as link:
        link.peer_leases.told(entry)
        for _ in range(3):
            link.peer_leases.revoke(entry)
        assert len(link.said) == 1
        link.peer_leases.on_revoked(entry.cache_id)
        link.peer_leases.told(entry)
        link.peer_leases.revoke(entry)
        assert len(link.said) == 2


async def test_what_is_not_asked_for_stays_held() -> None:
    entry, other = caches(2)
    async with linked() as link:
        link.peer_leases.told(entry)
        link.peer_leases.told(other)
        link.peer_leases.revoke(other)
        link.peer_leases.on_revoked(entry.cache_id)
        link.peer_leases.on_revoked(99)
        assert (entry.holders, other.holders) == ({link}, {link})
        link.peer_leases.on_revoked(other.cache_id)
        link.peer_leases.on_revoked(other.cache_id)
        assert (entry.holders, other.holders) == ({link}, set())


async def test_peer_is_not_told_of_a_cache_again_before_it_gave_it_back() -> None:
    entry, other = caches(2)
    settled: list[str] = []

    async def wait() -> None:
        await link.peer_leases.wait_settled(entry)
        settled.append("settled")

    async with linked() as link, anyio.create_task_group() as group:
        link.peer_leases.told(entry)
        await link.peer_leases.wait_settled(entry)
        link.peer_leases.revoke(entry)
        assert not link.peer_leases.is_settled(entry)
        assert link.peer_leases.is_settled(other)
        group.start_soon(wait)
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert settled == []
        link.peer_leases.on_revoked(entry.cache_id)
        assert link.peer_leases.is_settled(entry)
    assert settled == ["settled"] * 2


async def test_two_peers_hold_a_cache_independently() -> None:
    (entry,) = caches(1)
    async with linked() as one, linked() as other:
        one.peer_leases.told(entry)
        other.peer_leases.told(entry)
        one.peer_leases.revoke(entry)
        one.peer_leases.on_revoked(entry.cache_id)
        assert entry.holders == {other}
        assert other.said == []


async def test_peer_that_does_not_give_a_cache_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodatadist._link.control.peer_leases.SLACK_SECONDS", 0.02)
    (entry,) = caches(1)
    async with linked(0.03) as link:
        link.peer_leases.told(entry)
        before = anyio.current_time()
        link.peer_leases.revoke(entry)
        await link.complained.wait()
        assert anyio.current_time() - before >= 0.049  # uvloop counts in milliseconds
        assert link.complaints == [f"did not release cache {entry.cache_id} within 0.05 s"]
        assert entry.holders == {link}, "what the peer does is not known"
        link.peer_leases.end()
        assert entry.holders == set()


async def test_peer_that_gives_it_back_in_time_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodatadist._link.control.peer_leases.SLACK_SECONDS", 0.02)
    in_time, late = caches(2)
    async with linked(0.01) as link:
        for entry in (in_time, late):
            link.peer_leases.told(entry)
            link.peer_leases.revoke(entry)
        link.peer_leases.on_revoked(in_time.cache_id)
        await link.complained.wait()
        assert [f"cache {late.cache_id} " in why for why in link.complaints] == [True]


async def test_end_of_the_link_frees_all_and_wakes_all_waiters() -> None:
    held, revoked = caches(2)
    async with anyio.create_task_group() as group:

        def spawn(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
            group.start_soon(call)

        link = Link(spawn, LONG)
        link.peer_leases.told(held)
        link.peer_leases.told(revoked)
        link.peer_leases.revoke(revoked)
        group.start_soon(quiet, held)
        group.start_soon(quiet, revoked)
        group.start_soon(link.peer_leases.wait_settled, revoked)
        await anyio.wait_all_tasks_blocked()
        link.peer_leases.end()
    assert (held.holders, revoked.holders, link.complaints) == (set(), set(), [])
    assert link.peer_leases.is_settled(revoked)


async def test_cache_is_lost_when_the_channels_of_a_link_could_not_be_closed() -> None:
    held, apart = caches(2)
    async with linked() as link, anyio.create_task_group() as group:
        link.peer_leases.told(held)
        link.peer_leases.revoke(held)
        group.start_soon(quiet, held)
        group.start_soon(link.peer_leases.wait_settled, held)
        await anyio.wait_all_tasks_blocked()
        link.peer_leases.end(lambda entry: entry.poison())
    assert (held.is_poisoned, apart.is_poisoned, link.complaints) == (True, False, [])


async def test_end_of_one_link_frees_nothing_of_another() -> None:
    (entry,) = caches(1)
    async with linked() as one, linked() as other:
        one.peer_leases.told(entry)
        other.peer_leases.told(entry)
        one.peer_leases.end()
        assert entry.holders == {other}


async def test_the_longest_timeout_that_can_be_set_can_be_said() -> None:
    (entry,) = caches(1)
    async with linked((2**31 - 1) / 1000) as link:
        link.peer_leases.told(entry)
        link.peer_leases.revoke(entry)
