"""Waiting for what was begun, whatever is cancelled meanwhile, in bounded time."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aiodatadist._concurrency.outlast import outlast


async def test_cancellations_that_come_meanwhile_do_not_end_the_wait() -> None:
    over, begun = asyncio.Event(), asyncio.Queue[None]()

    async def wait() -> None:
        begun.put_nowait(None)
        await over.wait()

    task = asyncio.create_task(outlast(over.is_set, wait))
    for _ in range(3):
        await begun.get()
        task.cancel()
    await begun.get()
    over.set()
    assert await task


async def test_a_scope_that_is_cancelled_does_not_end_it_either() -> None:
    over = anyio.Event()
    with anyio.CancelScope() as scope:
        scope.cancel()
        asyncio.get_running_loop().call_soon(over.set)
        assert await outlast(over.is_set, over.wait)


async def test_after_the_seconds_it_says_that_it_is_not_over() -> None:
    began = anyio.current_time()
    assert not await outlast(lambda: False, asyncio.Event().wait, 0.05)
    assert anyio.current_time() - began >= 0.05


async def test_what_is_over_is_not_waited_for() -> None:
    async def wait() -> None:
        pytest.fail("it was waited for")

    assert await outlast(lambda: True, wait)
