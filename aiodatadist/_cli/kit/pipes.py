"""A child's end of the two pipes to its parent, and the messages that travel on them."""

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
from pydantic import BaseModel, ConfigDict, TypeAdapter

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_READ_BYTES = 65536


class Message(BaseModel):
    """An order or a report: one JSON object per line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


OrderT = TypeVar("OrderT", bound=Message)


class Parent(Protocol):
    """The process that started this one: it sends orders and receives reports."""

    async def order(self, kind: type[OrderT]) -> OrderT:
        """Wait for the next order, and return it. Raises TypeError if it is of another kind."""

    async def report(self, message: Message) -> None:
        """Send a report. Reports of several tasks do not interleave."""


class PipeParent:
    """The parent at the other end of stdin and stdout."""

    def __init__(self, orders: MemoryObjectReceiveStream[Message]) -> None:
        self._orders = orders
        self._line = anyio.Lock()

    async def order(self, kind: type[OrderT]) -> OrderT:
        order = await self._orders.receive()
        if not isinstance(order, kind):
            raise TypeError(f"expected {kind.__name__}, the parent sent {type(order).__name__}")
        return order

    async def report(self, message: Message) -> None:
        stdout = sys.stdout.fileno()
        rest = message.line()
        async with self._line:
            while rest:
                await anyio.wait_writable(stdout)
                # A pipe that is ready takes PIPE_BUF bytes without blocking, and promises no more.
                rest = rest[os.write(stdout, rest[: select.PIPE_BUF]) :]


@asynccontextmanager
async def open_parent(adapter: TypeAdapter[OrderT]) -> AsyncIterator[PipeParent]:
    """Open the pipes to the parent. If the parent dies, or closes our stdin, the body is cancelled.

    If the body ends first, this waits for the parent to close: others may still need what this process has.
    """
    send, receive = anyio.create_memory_object_stream[Message](8)
    with send, receive:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_listen, adapter, send, tasks.cancel_scope)
            yield PipeParent(receive)


async def _listen(
    adapter: TypeAdapter[OrderT], orders: MemoryObjectSendStream[Message], scope: anyio.CancelScope
) -> None:
    """Pass on all orders, and cancel ``scope`` at the end of stdin."""
    async for order in read_orders(adapter):
        await orders.send(order)
    scope.cancel()


async def read_orders(adapter: TypeAdapter[OrderT]) -> AsyncIterator[OrderT]:
    """Yield the orders that come on stdin, until it closes."""
    rest = b""
    async for data in _stdin():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield adapter.validate_json(line)


async def until_stdin_closes() -> None:
    """Wait until the parent closes this process's stdin."""
    async for _ in _stdin():
        pass


async def _stdin() -> AsyncIterator[bytes]:
    """Yield the input on stdin. Reading a readable pipe does not block."""
    stdin = sys.stdin.fileno()
    while True:
        await anyio.wait_readable(stdin)
        data = os.read(stdin, _READ_BYTES)
        if not data:
            return
        yield data


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, for the times when stdin is not read."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
