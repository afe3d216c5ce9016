"""Alarms whose callbacks raise: the others are told all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aiodatadist._concurrency.alarms import Alarms
from tests.held import turns

RAISED = ValueError("a bug of the callback's")


def report_to(found: list[BaseException]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context["exception"]))


def raising_at(number: int, told: list[int]) -> Callable[[int], None]:
    def call(what: int) -> None:
        told.append(what)
        if what == number:
            raise RAISED

    return call


@pytest.mark.parametrize("error_at", [0, 2, 4])
async def test_an_alarm_that_raises_keeps_no_other_from_being_told(error_at: int) -> None:
    told, found = list[int](), list[BaseException]()
    report_to(found)
    alarms = Alarms(raising_at(error_at, told))
    now = asyncio.get_running_loop().time()
    for number in range(5):
        alarms.set(now, number)
    await turns()
    assert told == [0, 1, 2, 3, 4]
    assert found == [RAISED]
    alarms.set(now, 5)
    await turns()
    assert told[-1] == 5


async def test_a_mark_that_raises_keeps_no_alarm_from_being_told() -> None:
    told, marked, found = list[Any](), list[int](), list[BaseException]()
    report_to(found)
    alarms = Alarms(told.append, raising_at(1, marked))
    now = asyncio.get_running_loop().time()
    for number in range(3):
        alarms.set(now, number)
    await turns()
    assert marked == told == [0, 1, 2]
    assert found == [RAISED]
