"""Blocking calls in threads: a cancelled one is over, or never begins."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from aiodatadist._concurrency.blocking_calls import in_thread


async def test_a_cancelled_call_that_waits_for_a_thread_never_begins() -> None:
    begun, over = threading.Event(), threading.Event()
    ran: list[int] = []

    def hold() -> None:
        begun.set()
        over.wait(10)

    with ThreadPoolExecutor(1) as threads:
        first = asyncio.create_task(in_thread(hold, threads=threads))
        await in_thread(begun.wait, 10)
        second = asyncio.create_task(in_thread(ran.append, 1, threads=threads))
        await anyio.wait_all_tasks_blocked()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not first.done()
        over.set()
        await first
    assert not ran


async def test_a_cancelled_call_that_has_begun_is_over() -> None:
    begun, over = threading.Event(), threading.Event()
    ended: list[bool] = []

    def hold() -> None:
        begun.set()
        ended.append(over.wait(10))

    with ThreadPoolExecutor(1) as threads:
        call = asyncio.create_task(in_thread(hold, threads=threads))
        await in_thread(begun.wait, 10)
        call.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not call.done()
        over.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ended == [True]
