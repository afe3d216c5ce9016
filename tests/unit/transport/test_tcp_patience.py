"""A cancelled push over TCP waits for its peer while bytes move. If none do, the channel breaks, and the push has failed."""

from __future__ import annotations

import asyncio
import socket
import struct
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import anyio
import anyio.lowlevel
import pytest

from aiodatadist._concurrency.completion import TransferState
from aiodatadist._device import Device, Program, StreamTransfer
from aiodatadist._native.library import ffi
from aiodatadist._transport import DataConnection, TcpConfig, tcp
from aiodatadist._transport.tcp import TcpChannel
from aiodatadist._values.grid import Grid
from aiodatadist.errors import LLMException

DEVICE = cast(Device, SimpleNamespace(runtime=SimpleNamespace(is_soft=True)))
MIB = 1 << 20
HEAD, RANGE = struct.Struct("<BBHIQQQ"), 16
ENDED = 4
PATIENCE = 0.2
PIECES = 40
"""A push is read in this number of pieces, each after a tenth of the patience: in four times the patience."""


@asynccontextmanager
async def pushing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[StreamTransfer, list[str], socket.socket]]:
    """Push 1 MiB to a peer that is played by hand. What the channel says when it breaks goes into a list."""
    monkeypatch.setattr(tcp, "PATIENCE", PATIENCE)
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    memory, said = bytearray(MIB), list[str]()
    with theirs:
        channel = TcpChannel(DEVICE, [DataConnection(ours, None)], TcpConfig())
        channel.when_broken(said.append)
        stream = channel.open_stream("a push")
        here, there, index = array("Q", [int(ffi.cast("intptr_t", ffi.from_buffer(memory)))]), array("Q", [MIB]), [0]
        program = Program()
        channel.add_put(program, Grid(here, there, array("Q", index), array("Q", index), MIB, MIB, MIB, MIB))
        yield stream.submit(program, 60.0), said, theirs
        await stream.aclose()
        await channel.aclose()


async def hear(theirs: socket.socket, nbytes: int) -> bytes:
    """Return this number of bytes."""
    heard = b""
    while len(heard) < nbytes:
        came = await asyncio.get_running_loop().sock_recv(theirs, nbytes - len(heard))
        assert came, "the channel has broken"
        heard += came
    return heard


async def test_a_cancelled_push_is_confirmed_late_by_a_peer_that_reads_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pushing(monkeypatch) as (transfer, said, theirs):
        _, _, _, _, part, nbytes, _ = HEAD.unpack(await hear(theirs, HEAD.size))
        assert nbytes == MIB
        waiter = asyncio.ensure_future(transfer.wait())
        await anyio.wait_all_tasks_blocked()
        waiter.cancel()
        await hear(theirs, RANGE)
        left = MIB
        while left:
            await anyio.sleep(PATIENCE / 10)
            left -= len(await hear(theirs, min(left, MIB // PIECES)))
        assert not transfer.is_done
        await asyncio.get_running_loop().sock_sendall(theirs, HEAD.pack(ENDED, 0, 0, 0, part, 0, 0))
        with pytest.raises(asyncio.CancelledError) as caught:
            await waiter
        assert caught.value.__cause__ is None
        assert transfer.state is TransferState.CANCELLED
        assert not said


async def test_a_cancelled_push_that_is_never_confirmed_has_failed_and_says_so_in_the_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pushing(monkeypatch) as (transfer, said, _):
        waiter = asyncio.ensure_future(transfer.wait())
        await anyio.wait_all_tasks_blocked()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await waiter
        assert transfer.state is TransferState.FAILED
        assert isinstance(transfer.error, LLMException)
        assert caught.value.__cause__ is transfer.error
        with pytest.raises(LLMException):
            await transfer.wait()
        while not said:
            await anyio.lowlevel.checkpoint()
        assert said == ["the peer did not end a part of a transfer in time"]
