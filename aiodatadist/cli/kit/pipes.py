"""A worker's end of the two pipes to its parent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from aiodatadist.cli.demo.messages import ORDER, Order, Report

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

OrderT = TypeVar("OrderT", bound=Order)


class Parent(Protocol):
    """The process that started the worker: gives it orders, and takes its reports."""

    async def order(self, kind: type[OrderT]) -> OrderT:
        """The next order, which has to be of this kind."""

    async def report(self, message: Report) -> None:
        """Tell the parent; lines of several tasks do not mix."""


class PipeParent:
    """The parent at the other end of stdin and stdout."""

    def __init__(self, orders: MemoryObjectReceiveStream[Order]) -> None:
        self._orders = orders
        self._line = anyio.Lock()

    async def order(self, kind: type[OrderT]) -> OrderT:
        order = await self._orders.receive()
        if not isinstance(order, kind):
            raise TypeError(f"expected {kind.__name__}, the parent sent {order.kind}")
        return order

    async def report(self, message: Report) -> None:
        stdout = sys.stdout.fileno()
        rest = message.line()
        async with self._line:
            while rest:
                await anyio.wait_writable(stdout)
                # A pipe that is ready takes PIPE_BUF bytes without blocking, and promises no more.
                rest = rest[os.write(stdout, rest[: select.PIPE_BUF]) :]


@asynccontextmanager
async def open_parent() -> AsyncIterator[PipeParent]:
    """The parent, for as long as it lives: when it closes our stdin, or dies, the body is cancelled and that is all.

    The body may end first; then this waits for the parent to close, because decode still needs a prefill that is done.
    """
    send, receive = anyio.create_memory_object_stream[Order](8)
    with send, receive:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_listen, send, tasks.cancel_scope)
            yield PipeParent(receive)


async def _listen(orders: MemoryObjectSendStream[Order], scope: anyio.CancelScope) -> None:
    """Read stdin to its end, and cancel ``scope`` then."""
    stdin = sys.stdin.fileno()
    rest = b""
    while True:
        await anyio.wait_readable(stdin)
        data = os.read(stdin, 65536)
        if not data:
            scope.cancel()
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            await orders.send(ORDER.validate_json(line))


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, for the times when stdin is not read."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
