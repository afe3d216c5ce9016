"""Refusals: each is counted, and one line a second is logged of each kind and address."""

from __future__ import annotations

import logging

import pytest

from aiodatadist.counting.refusals import MAX_PLACES, Refusals

logger = logging.getLogger("aiodatadist.tests.refusals")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_line_a_second_says_how_many_there_were(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals(logger, clock)
    for number in range(10):
        refusals.add("frame", "10.0.0.1", f"refused {number}")
    clock.now += 0.999
    refusals.add("frame", "10.0.0.1", "refused 10")
    clock.now += 0.001
    refusals.add("frame", "10.0.0.1", "refused 11")
    clock.now += 5
    refusals.add("frame", "10.0.0.1", "refused 12")
    assert caplog.messages == ["refused 0", "refused 11 (10 more like this since the last line)", "refused 12"]
    assert refusals.counts == {"frame": 13}


def test_kinds_and_addresses_have_their_own_lines(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(logger, Clock())
    for kind in ("frame", "offer"):
        for address in ("10.0.0.1", "10.0.0.2"):
            for _ in range(3):
                refusals.add(kind, address, f"{kind} {address}")
    assert caplog.messages == ["frame 10.0.0.1", "frame 10.0.0.2", "offer 10.0.0.1", "offer 10.0.0.2"]


def test_addresses_are_forgotten_oldest_first() -> None:
    refusals = Refusals(logger, Clock())
    for number in range(10 * MAX_PLACES):
        refusals.add("frame", f"{number}", "refused")
    assert len(refusals._told) == MAX_PLACES
    assert refusals.counts == {"frame": 10 * MAX_PLACES}
