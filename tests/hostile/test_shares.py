"""Shares of peers: what one peer sent, or keeps waiting, costs no other peer its turn.

Everything is counted: steps of the interpreter, claims, bytes and turns. Nothing is timed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from aiodatadist.counting import Totals
from aiodatadist.link.block_leases import BlockLeases, LeaseEnd
from aiodatadist.link.peer_claim import PeerClaim
from aiodatadist.values import peer_budget
from aiodatadist.values.lease_ticket import new_lease_name

if TYPE_CHECKING:
    from aiodatadist.cache.table import Entry

# ---- claims of leases that do not exist ----


def steps_of(call: Callable[[], object]) -> int:
    """How many instructions of Python a call takes: the same number each time, on any machine."""
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


async def test_a_peer_has_so_many_early_claims_and_further_ones_are_refused_and_counted() -> None:
    totals = Totals()
    leases, liar, honest = leases_of(totals), object(), object()
    liars, others = list[bool](), list[bool]()
    for call in range(4096):
        early(leases, liar, call, liars)()
    early(leases, honest, 0, others)()
    assert liars == [False] * (4096 - 256)
    assert others == []
    assert totals.budget_refusals == {"early_claims": 4096 - 256}
    leases.end()


async def test_an_early_claim_waits_as_long_as_its_owner_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(PeerClaim, "within", lambda self, seconds, then: waits.append(seconds))
    leases = leases_of(Totals())
    leases.claim(new_lease_name(), PeerClaim(object(), 0, 10, lambda _: None), 864_000)
    leases.claim(new_lease_name(), PeerClaim(object(), 0, 10, lambda _: None), 5)
    assert waits == [peer_budget.EARLY_CLAIM_SECONDS, 5]
    leases.end()


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
