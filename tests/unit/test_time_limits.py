"""The thread that keeps the time limits of tests."""

from __future__ import annotations

import threading

from tests.time_limits import Watchdog

HOUR = 3600.0


def test_a_shorter_limit_is_kept_while_a_longer_one_is_waited_for() -> None:
    watchdog, late, over = Watchdog(), threading.Event(), threading.Event()
    watchdog.set(HOUR, late.set)
    watchdog.set(0, over.set)
    assert over.wait(50)
    watchdog.set(HOUR, late.set)
    assert not late.is_set()


def test_a_limit_that_was_cleared_or_put_off_is_none() -> None:
    watchdog, cleared, put_off, over = Watchdog(), threading.Event(), threading.Event(), threading.Event()
    with watchdog.held():
        watchdog.set(0, cleared.set)
        watchdog.clear()
        watchdog.set(0, put_off.set)
        watchdog.set(HOUR, put_off.set)
    watchdog.set(0, over.set)
    assert over.wait(50)
    assert not cleared.is_set()
    assert not put_off.is_set()


def test_one_thread_keeps_all_limits() -> None:
    watchdog, over = Watchdog(), threading.Event()
    before = set(threading.enumerate())
    for _ in range(10):
        watchdog.set(HOUR, over.set)
        watchdog.clear()
    assert [each.name for each in set(threading.enumerate()) - before] == ["time limits of tests"]


def test_a_crowded_machine_has_longer_as_long_as_it_is_crowded() -> None:
    crowdings, over = [500.0, 1.0], threading.Event()
    asked: list[bool] = []

    def crowding() -> float:
        asked.append(over.is_set())
        return crowdings.pop(0)

    watchdog = Watchdog(crowding)
    watchdog.set(0.001, over.set)  # looked at again after half a second
    assert over.wait(50)
    assert asked == [False, False]
