"""Sealed data connections, whose other end is played here with another AES-GCM: each record has its own nonce."""

from __future__ import annotations

import asyncio
import socket
import struct
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from aiodatadist._device import Program, StreamTransfer
from aiodatadist._native.library import ffi
from aiodatadist._transport import Access, DataConnection, Region, TcpConfig
from aiodatadist._transport.tcp import TcpChannel
from aiodatadist._values.descriptors import Placement
from aiodatadist._values.grid import Grid

aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
invalid = pytest.importorskip("cryptography.exceptions").InvalidTag

DEVICE = cast(Any, SimpleNamespace(runtime=SimpleNamespace(is_soft=True)))
TO_US, FROM_US = bytes(range(32)), bytes(range(1, 33))
FRAME, RANGE, LENGTH = struct.Struct("<BBHIQQQ"), struct.Struct("<QQ"), struct.Struct("<I")
READ, DATA, WRITE, ENDED = range(1, 5)
TAG, BYTES = 16, 4096


class Peer:
    """The other end: it has the memory of the channel's end, and a socket that blocks."""

    def __init__(self, sock: socket.socket, memory: bytearray, address: int, said: list[str]) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.memory, self.address, self.said = memory, address, said
        self.sent = 0

    def record(self, text: bytes, number: int | None = None, key: bytes = TO_US) -> bytes:
        """Return a record; the next one of this end if it has no number."""
        if number is None:
            number, self.sent = self.sent, self.sent + 1
        head = LENGTH.pack(len(text))
        return head + bytes(aead.AESGCM(key).encrypt(nonce(number), text, head))

    def read_request(self, part: int) -> bytes:
        """Return what asks for all of the memory."""
        return FRAME.pack(READ, 0, 1, 0, part, BYTES, 0) + RANGE.pack(self.address, BYTES)

    async def say(self, *records: bytes) -> None:
        await self._loop.sock_sendall(self._sock, b"".join(records))

    async def hear(self) -> tuple[bytes, bytes]:
        """Return the head of the next record, and what is sealed in it."""
        head = await self._heard(LENGTH.size)
        return head, await self._heard(LENGTH.unpack(head)[0] + TAG)

    async def _heard(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            came = await self._loop.sock_recv(self._sock, count - len(data))
            assert came, "the channel has broken"
            data += came
        return data

    async def refused(self) -> None:
        """Wait until the channel has broken because of a wrong seal. Raises AssertionError if it answers instead."""
        with suppress(ConnectionResetError):
            assert not await self._loop.sock_recv(self._sock, 1), "what was changed was believed"
        while not self.said:
            await anyio.lowlevel.checkpoint()
        assert "has a wrong seal" in self.said[0]


def nonce(number: int) -> bytes:
    return bytes(4) + number.to_bytes(8, "little")


def opened(key: bytes, number: int, head: bytes, sealed: bytes) -> bytes:
    return bytes(aead.AESGCM(key).decrypt(nonce(number), sealed, head))


@asynccontextmanager
async def facing() -> AsyncIterator[tuple[Peer, TcpChannel]]:
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    memory, said = bytearray(range(256)) * (BYTES // 256), list[str]()
    address = int(ffi.cast("intptr_t", ffi.from_buffer(memory)))
    with theirs:
        connection = DataConnection(ours, (FROM_US, TO_US))
        channel = TcpChannel(DEVICE, [connection], TcpConfig())
        channel.when_broken(said.append)
        channel.lend([Region(address, BYTES, Placement.HOST)], Access.ALL)
        yield Peer(theirs, memory, address, said), channel
        await channel.aclose()


async def test_each_record_is_sealed_with_its_own_number_and_its_length() -> None:
    async with facing() as (peer, _):
        for number in range(4):
            await peer.say(peer.record(peer.read_request(number + 1)))
            head, sealed = await peer.hear()
            text = opened(FROM_US, number, head, sealed)
            assert FRAME.unpack(text[: FRAME.size])[:1] == (DATA,)
            assert text[FRAME.size :] == peer.memory
            for other in {0, 1, 2, 3, 4} - {number}:
                with pytest.raises(invalid):
                    opened(FROM_US, other, head, sealed)
            with pytest.raises(invalid):
                opened(TO_US, number, head, sealed)
            with pytest.raises(invalid):
                opened(FROM_US, number, LENGTH.pack(len(text) + 1), sealed)


@pytest.mark.parametrize(
    "what", ["tag", "text", "length", "other_key", "own_key", "number", "swapped", "twice", "left_out"]
)
async def test_no_record_counts_but_the_next_one_of_the_peer(what: str) -> None:
    async with facing() as (peer, _):
        await peer.say(peer.record(peer.read_request(1)))
        await peer.hear()
        ask = peer.read_request(2)
        first, second = peer.record(ask), peer.record(peer.read_request(3))
        wrong = {
            "tag": first[:-1] + bytes([first[-1] ^ 1]),
            "text": first[:8] + bytes([first[8] ^ 0x80]) + first[9:],
            "length": LENGTH.pack(len(ask) - 1) + first[LENGTH.size : -1],
            "other_key": peer.record(ask, 1, key=bytes(32)),
            "own_key": peer.record(ask, 1, key=FROM_US),
            "number": peer.record(ask, 0),
            "swapped": second + first,
            "twice": first + first,
            "left_out": second,
        }[what]
        await peer.say(wrong)
        await peer.refused()


@pytest.mark.parametrize("byte", [0, BYTES - 1])
async def test_no_byte_of_a_record_with_a_wrong_seal_reaches_memory(byte: int) -> None:
    """An answer, and what a peer writes: both have a head in a record before, so a change is in nothing but bytes."""
    async with facing() as (peer, channel):
        before = bytes(peer.memory)
        write = FRAME.pack(WRITE, 0, 1, 0, 1, BYTES, 0) + RANGE.pack(peer.address, BYTES)
        payload = bytearray(peer.record(bytes(BYTES), 1))
        payload[LENGTH.size + byte] ^= 1
        await peer.say(peer.record(write), bytes(payload))
        await peer.refused()
        assert peer.memory == before
    async with facing() as (peer, channel):
        before = bytes(peer.memory)
        stream = channel.open_stream("a pull")
        transfer = pull(channel, stream, peer)
        head, sealed = await peer.hear()
        part = FRAME.unpack(opened(FROM_US, 0, head, sealed)[: FRAME.size])[4]
        payload = bytearray(peer.record(bytes(BYTES), 1))
        payload[LENGTH.size + byte] ^= 1
        await peer.say(peer.record(FRAME.pack(DATA, 0, 0, 0, part, BYTES, 0)), bytes(payload))
        await peer.refused()
        while not transfer.is_done:
            await anyio.lowlevel.checkpoint()
        assert transfer.error is not None
        assert peer.memory == before
        await stream.aclose()


def pull(channel: TcpChannel, stream: Any, peer: Peer) -> StreamTransfer:
    """Pull into the memory."""
    place, index = array("Q", [peer.address]), array("Q", [0])
    program = Program()
    channel.add_get(program, Grid(place, array("Q", [BYTES]), index, index, BYTES, BYTES, BYTES, BYTES))
    return cast(StreamTransfer, stream.submit(program, 60.0))
