"""A signal is set for good, or wakes those who wait now; it can be made and told in callbacks."""

from __future__ import annotations

import asyncio

import anyio

from aiodatadist._concurrency.signal import Signal


async def test_one_that_is_set_stays_set() -> None:
    signal = Signal()
    waiting = asyncio.create_task(signal.wait())
    await anyio.wait_all_tasks_blocked()
    asyncio.get_running_loop().call_soon(signal.set)
    await waiting
    signal.wake()
    signal.set()
    assert signal.is_set()
    await signal.wait()


async def test_a_wake_is_for_tasks_that_wait_now() -> None:
    signal = Signal()
    signal.wake()
    first = asyncio.create_task(signal.wait())
    await anyio.wait_all_tasks_blocked()
    signal.wake()
    second = asyncio.create_task(signal.wait())
    await first
    await anyio.wait_all_tasks_blocked()
    assert not second.done()
    assert not signal.is_set()
    signal.wake()
    await second


async def test_a_wait_that_is_cancelled_changes_nothing_for_others() -> None:
    signal = Signal()
    first, second = asyncio.create_task(signal.wait()), asyncio.create_task(signal.wait())
    await anyio.wait_all_tasks_blocked()
    first.cancel()
    await anyio.wait_all_tasks_blocked()
    assert (first.cancelled(), second.done()) == (True, False)
    signal.set()
    await second


async def test_a_wait_is_a_checkpoint_also_when_it_is_set() -> None:
    signal = Signal()
    signal.set()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await signal.wait()
    assert scope.cancelled_caught
