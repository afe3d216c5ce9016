"""A call of the vendor's library that does not return: the caller is told in time, and the memory stays the device's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import anyio.to_thread
import pytest

from aiodatadist._device import Device, Stream, StreamLimits, TransferState
from aiodatadist._native.library import ffi
from aiodatadist.errors import DeviceError, StuckError
from tests.unit.test_stream import LARGE, copy

SOON = 20.0
"""Seconds that a slow machine may take for what is due in some tenths of one."""


@contextmanager
def hung_copies(
    device: Device, monkeypatch: pytest.MonkeyPatch, begun: threading.Semaphore, returns: threading.Semaphore
) -> Iterator[None]:
    """Make copies hang on streams that are opened and closed inside. Each reports its begin, then waits."""

    def hang(*_: object) -> None:
        begun.release()
        returns.acquire()

    driver = ffi.new("ring_driver *", device.runtime.ring_driver[0])
    driver.copy = callback = ffi.callback(ffi.typeof(driver.copy), hang)
    monkeypatch.setitem(device.runtime.__dict__, "ring_driver", driver)
    yield
    del callback


@asynccontextmanager
async def hung_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Stream, threading.Semaphore, threading.Semaphore]]:
    """Yield a stream, and semaphores for how many of its copies were begun, and how many return."""
    begun, returns = threading.Semaphore(0), threading.Semaphore(0)

    async with await Device.open(0, StreamLimits(grace=0.1, patience=0.05)) as device:
        with hung_copies(device, monkeypatch, begun, returns):
            stream = device.open_stream("hung")
            try:
                yield stream, begun, returns
            finally:
                returns.release(8)
                with pytest.raises(StuckError):
                    await stream.aclose()


def number(semaphore: threading.Semaphore) -> int:
    """Take what a semaphore has, and return how much that was."""
    return sum(1 for _ in iter(lambda: semaphore.acquire(blocking=False), False))


async def test_time_limit_is_told_although_a_call_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = bytearray(LARGE), bytearray(LARGE)
    async with hung_stream(monkeypatch) as (stream, _, _):
        with anyio.fail_after(SOON):
            hung = stream.submit(copy(target, source, LARGE), 0.1)
            behind = stream.submit(copy(target, source, LARGE), 60)
            with pytest.raises(StuckError, match="has not returned"):
                await hung.wait()
            with pytest.raises(DeviceError, match="not begun"):
                await behind.wait()
        assert hung.state is TransferState.STUCK


async def test_cancellation_is_told_although_a_call_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = bytearray(LARGE), bytearray(LARGE)
    async with hung_stream(monkeypatch) as (stream, begun, _):
        with anyio.fail_after(SOON):
            hung = stream.submit(copy(target, source, LARGE), 3600)
            await anyio.to_thread.run_sync(begun.acquire)
            assert hung.cancel()
            await hung.join()
        assert hung.state is TransferState.STUCK


async def test_short_limit_behind_a_long_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = bytearray(LARGE), bytearray(LARGE)
    async with hung_stream(monkeypatch) as (stream, begun, returns):
        with anyio.fail_after(SOON):
            returns.release(64)
            await stream.submit(copy(target, source, LARGE), 3600).wait()
            calls = number(begun)  # of one copy, which moves in windows
            number(returns)
            long = stream.submit(copy(target, source, LARGE), 3600)
            hung = stream.submit(copy(target, source, LARGE), 0.1)
            returns.release(calls)
            await long.wait()
            await hung.join()
        assert hung.state is TransferState.STUCK


async def test_a_transfer_that_is_cancelled_while_its_stream_closes_leaves_no_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leave no timer: it would look into a ring that is gone."""
    source, target = bytearray(LARGE), bytearray(LARGE)
    begun, returns = threading.Semaphore(0), threading.Semaphore(0)
    async with await Device.open(0) as device:
        with hung_copies(device, monkeypatch, begun, returns):
            stream = device.open_stream("closing")
            hung = stream.submit(copy(target, source, LARGE), 60)
            await anyio.to_thread.run_sync(begun.acquire)
            closing = asyncio.create_task(stream.aclose())
            await anyio.wait_all_tasks_blocked()
            assert not closing.done()
            hung.cancel()
            returns.release(8)
            await closing
        assert hung.is_done
        assert stream._alarm is None
