"""Suites that every implementation of a contract must pass. Subclass one in a test module, with a way to make yours."""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from aiodatadist._device import Device, Memory, Program, StreamTransfer
from aiodatadist._transport import Access, Channel, ChannelOffer, DataConnection, OpenSockets, Region, Transport
from aiodatadist._values.descriptors import Placement
from aiodatadist._values.grid import Grid
from aiodatadist.errors import LinkError, LinkTimeout, LLMException, ParamInvalid, TransferError

SIZE = 1 << 20


class End:
    """An end of a channel, with a megabyte of registered device memory."""

    def __init__(self, device: Device, transport: Transport) -> None:
        self.device = device
        self.transport = transport
        self.memory: Memory = device.allocate(SIZE)
        self.region: Region = Region(self.memory.address, SIZE, Placement.DEVICE)

    def fill(self, byte: int) -> None:
        """Fill the memory with a byte."""
        self.memory.view()[:] = bytes([byte]) * SIZE


class SocketPairs:
    """The data connections of a channel: pairs of sockets, made when both ends ask for them."""

    def __init__(self) -> None:
        self._asking: set[int] = set()
        self._made = anyio.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []

    def of(self, rank: int) -> OpenSockets:
        """Return the function by which an end opens its sockets."""

        async def open_sockets(count: int, seconds: float) -> list[DataConnection]:
            self._asking.add(rank)
            try:
                if len(self._asking) == 2:
                    self._pairs = [socket.socketpair() for _ in range(count)]
                    self._made.set()
                with anyio.move_on_after(seconds):
                    await self._made.wait()
            finally:
                self._asking.discard(rank)
            if not self._made.is_set():
                raise LinkTimeout(f"the peer did not ask for its data connections within {seconds:g} s")
            for pair in self._pairs:
                pair[rank].setblocking(False)
            return [DataConnection(pair[rank], None) for pair in self._pairs]

        return open_sockets


def offers(name: str, ends: tuple[End, End]) -> tuple[ChannelOffer, ChannelOffer]:
    """Return the offers of both ends, under a name with this process's id: names are valid on the whole machine."""
    both, title = (ends[0].transport.endpoint, ends[1].transport.endpoint), f"{name}-{os.getpid()}"
    first, second = ChannelOffer(title, 0, both), ChannelOffer(title, 1, both)
    if not first.streams:
        return first, second
    pairs = SocketPairs()
    return replace(first, sockets=pairs.of(0)), replace(second, sockets=pairs.of(1))


def grid(local: End, remote: End, pairs: list[tuple[int, int]], nbytes: int) -> Grid:
    """Return pieces of ``nbytes`` at (local, remote) piece numbers of the two memories."""
    index = array("Q", [a for a, _ in pairs]), array("Q", [b for _, b in pairs])
    bases = array("Q", [local.memory.address]), array("Q", [remote.memory.address])
    return Grid(*bases, *index, nbytes, nbytes, nbytes, nbytes)


class TransportContract:
    """The promises of a :class:`~aiodatadist._transport.Transport`."""

    @abstractmethod
    def transport(self, device: Device) -> Transport:
        """Return the transport under test."""

    @staticmethod
    def can_call_off(device: Device) -> bool:
        """Return True if the runtime stops waiting for a peer when told to. Neither an NPU nor strict softnpu does."""
        return device.runtime.is_soft and device.runtime.soft_strictness == 0

    @asynccontextmanager
    async def ends(self) -> AsyncIterator[tuple[End, End]]:
        """Open two devices, with a transport and registered memory each."""
        async with await Device.open(0) as first, await Device.open(1) as second:
            pair = End(first, self.transport(first)), End(second, self.transport(second))
            for byte, end in enumerate(pair, 1):
                end.fill(byte)
                await end.transport.register([end.region])
            try:
                yield pair
            finally:
                for end in pair:
                    await end.transport.aclose()

    @asynccontextmanager
    async def channels(self, name: str) -> AsyncIterator[tuple[End, End, Channel, Channel]]:
        """Open two ends and a channel between them."""
        async with self.ends() as pair:
            opened: dict[int, Channel] = {}

            async def open_one(offer: ChannelOffer) -> None:
                opened[offer.rank] = await pair[offer.rank].transport.open_channel(offer, 10)

            async with anyio.create_task_group() as group:
                for offer in offers(name, pair):
                    group.start_soon(open_one, offer)
            for end, channel in zip(pair, (opened[0], opened[1]), strict=True):
                channel.lend([end.region], Access.ALL)
            try:
                yield (*pair, opened[0], opened[1])
            finally:
                await opened[0].aclose()
                await opened[1].aclose()

    @staticmethod
    async def run(channel: Channel, program: Program) -> Any:
        """Run a program on a new stream of the channel, and return its transfer."""
        stream = channel.open_stream("contract")
        try:
            transfer = stream.submit(program, 10)
            await transfer.wait()
            return transfer
        finally:
            await stream.aclose()

    async def test_get_moves_the_asked_ranges_and_no_others(self) -> None:
        async with self.channels("contract-get") as (mine, theirs, channel, _):
            for piece in range(SIZE // 4096):
                theirs.memory.view()[piece * 4096 : (piece + 1) * 4096] = bytes([piece % 251]) * 4096
            program = Program()
            channel.add_get(program, grid(mine, theirs, [(0, 9), (7, 3), (8, 4)], 4096))
            transfer = await self.run(channel, program)
            view = mine.memory.view()
            moved = {0: 9, 7: 3, 8: 4}
            for piece in range(SIZE // 4096):
                byte = moved[piece] % 251 if piece in moved else 1
                assert view[piece * 4096 : (piece + 1) * 4096] == bytes([byte]) * 4096, piece
            assert transfer.nbytes == 3 * 4096
            assert transfer.ranges == 2  # 7 and 8 are neighbours on both sides

    async def test_put_writes_the_peer(self) -> None:
        async with self.channels("contract-put") as (mine, theirs, channel, _):
            program = Program()
            channel.add_put(program, grid(mine, theirs, [(2, 5)], 1000))
            await self.run(channel, program)
            view = theirs.memory.view()
            assert view[5000:6000] == b"\x01" * 1000
            assert view[:5000] == b"\x02" * 5000
            assert view[6000:] == b"\x02" * (SIZE - 6000)

    async def test_both_ends_can_initiate(self) -> None:
        async with self.channels("contract-both") as (mine, theirs, channel, back):
            first, second = Program(), Program()
            channel.add_get(first, grid(mine, theirs, [(0, 0)], 64))
            back.add_get(second, grid(theirs, mine, [(1, 1)], 64))
            await self.run(channel, first)
            await self.run(back, second)
            assert mine.memory.view()[:64] == b"\x02" * 64
            assert theirs.memory.view()[64:128] == b"\x01" * 64

    @pytest.mark.parametrize("piece", [SIZE // 4096, 2**40])
    async def test_a_range_outside_the_peers_regions_is_refused(self, piece: int) -> None:
        async with self.channels(f"contract-bounds-{piece}") as (mine, theirs, channel, _):

            async def get() -> None:
                program = Program()
                channel.add_get(program, grid(mine, theirs, [(0, piece)], 4096))
                await self.run(channel, program)

            with pytest.raises(LLMException):
                await get()
            assert mine.memory.view()[:] == b"\x01" * SIZE

    async def test_what_was_taken_back_is_lent_no_longer(self) -> None:
        """A channel that needs no loans goes on: what it shows ends with the channel."""
        async with self.channels("contract-loans") as (mine, theirs, channel, back):
            back.lend([theirs.region], Access.READ)
            back.take_back([theirs.region], Access.ALL)
            program = Program()
            channel.add_get(program, grid(mine, theirs, [(0, 0)], 64))
            await self.run(channel, program)
            assert mine.memory.view()[:64] == b"\x02" * 64
            back.take_back([theirs.region], Access.READ)

            async def move(ways: str, piece: int) -> None:
                program = Program()
                add = channel.add_get if ways == "get" else channel.add_put
                add(program, grid(mine, theirs, [(piece, piece)], 64))
                await self.run(channel, program)

            if not channel.needs_loans:
                await move("get", 1)
                return
            for ways in ("get", "put"):
                with pytest.raises(TransferError):
                    await move(ways, 1)
            back.lend([theirs.region], Access.WRITE)
            with pytest.raises(TransferError):
                await move("get", 2)
            await move("put", 3)
            assert mine.memory.view()[64:256] == b"\x01" * 192
            assert theirs.memory.view()[:256] == b"\x02" * 192 + b"\x01" * 64

    async def test_transfers_of_an_ordered_stream_end_in_order(self) -> None:
        async with self.channels("contract-ordered") as (mine, theirs, channel, _):
            stream = channel.open_stream("contract", is_ordered=True)
            ended: list[StreamTransfer] = []
            try:
                transfers = []
                for number in range(16):
                    program = Program()
                    size = SIZE // 2 if number % 2 else 64
                    channel.add_put(program, grid(mine, theirs, [(0, 1)], size))
                    transfers.append(stream.submit(program, 10))
                    transfers[-1].add_done_callback(ended.append)
                for transfer in transfers:
                    await transfer.wait()
                assert ended == transfers
            finally:
                await stream.aclose()

    async def test_a_channel_is_broken_by_the_end_of_its_connections_and_not_by_its_own_close(self) -> None:
        async with self.channels("contract-broken") as (mine, theirs, channel, back):
            reasons: list[str] = []
            others: list[str] = []
            told = anyio.Event()

            def note(why: str) -> None:
                reasons.append(why)
                told.set()

            channel.when_broken(note)
            back.when_broken(others.append)
            await back.aclose()
            connections = min(mine.transport.endpoint.streams, theirs.transport.endpoint.streams)
            if connections:
                await told.wait()
            await channel.aclose()
            assert len(reasons) == bool(connections)  # once, however many connections have ended
            assert others == []

    async def test_a_peer_that_does_not_come_is_a_timeout(self) -> None:
        async with self.ends() as pair:
            offer, _ = offers("contract-alone", pair)
            with pytest.raises(LinkError):
                await pair[0].transport.open_channel(offer, 1)

    @pytest.mark.parametrize("rank", [0, 1])
    async def test_opening_can_be_cancelled_and_begun_again(self, rank: int) -> None:
        async with self.ends() as pair:
            both = offers("contract-cancelled", pair)
            seconds = 60 if self.can_call_off(pair[rank].device) else 1
            # without the cancellation the wait takes a minute
            with anyio.fail_after(20), anyio.move_on_after(0.1) as scope:
                await pair[rank].transport.open_channel(both[rank], seconds)
            assert scope.cancelled_caught
            opened: list[Channel] = []

            async def open_one(offer: ChannelOffer) -> None:
                opened.append(await pair[offer.rank].transport.open_channel(offer, 10))

            async with anyio.create_task_group() as group:
                for offer in both:
                    group.start_soon(open_one, offer)
            for channel in opened:
                await channel.aclose()

    async def test_a_region_is_counted(self) -> None:
        async with self.ends() as (mine, _):
            await mine.transport.register([mine.region])
            await mine.transport.unregister([mine.region])
            with pytest.raises(ParamInvalid):
                await mine.transport.register([Region(mine.region.address + 4096, 128, Placement.DEVICE)])
            await mine.transport.unregister([mine.region])
            await mine.transport.register([Region(mine.region.address + 4096, 128, Placement.DEVICE)])
