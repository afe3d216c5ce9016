"""The transport ``loopback`` with data connections beside each channel. Nothing travels over them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from aiodatadist._device import Layering, Program
from aiodatadist._transport import Channel, ChannelOffer, DataConnection, Endpoint, loopback
from aiodatadist._transport.loopback import LoopbackTransport
from aiodatadist._values.grid import Grid
from aiodatadist.testing import Cluster, inside

STREAMS = 4
"""Data connections of a channel."""


class ConnectedChannel(Channel):
    """A channel of ``loopback`` that is broken when one of its data connections ends."""

    def __init__(self, inner: Channel, connections: list[DataConnection]) -> None:
        super().__init__(inner.device)
        self._inner = inner
        self._connections = connections

    def add_get(self, program: Program, grid: Grid) -> None:
        self._inner.add_get(program, grid)

    def add_put(self, program: Program, grid: Grid, layering: Layering | None = None) -> None:
        self._inner.add_put(program, grid, layering)

    def when_broken(self, call: Callable[[str], object]) -> None:
        loop = asyncio.get_running_loop()

        def look(number: int, sock: socket.socket) -> None:
            if not sock.recv(1, socket.MSG_PEEK):
                self._stop_looking()
                call(f"data connection {number} was closed")

        for number, each in enumerate(self._connections):
            loop.add_reader(each.sock.fileno(), look, number, each.sock)

    def _stop_looking(self) -> None:
        for each in self._connections:
            asyncio.get_running_loop().remove_reader(each.sock.fileno())

    async def aclose(self) -> None:
        self._stop_looking()
        for each in self._connections:
            each.sock.close()
        self._connections.clear()
        await self._inner.aclose()

    async def wait_let_go(self) -> None:
        await self._inner.wait_let_go()

    def abandon(self) -> None:
        self._inner.abandon()


class ConnectedLoopback(LoopbackTransport):
    """A transport whose channels have data connections.

    Attributes:
        streams: what this end says in its hello.
        connections: those of its channels, by name.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.streams = STREAMS
        self.connections: dict[str, list[DataConnection]] = {}

    @property
    def endpoint(self) -> Endpoint:
        return replace(super().endpoint, streams=self.streams)

    async def open_channel(self, offer: ChannelOffer, timeout: float) -> Channel:
        if offer.sockets is None:
            return await super().open_channel(offer, timeout)
        connections = self.connections[offer.name] = await offer.sockets(offer.streams, timeout)
        try:
            return ConnectedChannel(await super().open_channel(offer, timeout), connections)
        except BaseException:
            for each in connections:
                each.sock.close()
            raise


@contextmanager
def connected_loopback() -> Iterator[dict[str, Any]]:
    """Let ``loopback`` have data connections inside this context. Its value is the options of a cluster that uses it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loopback, "LoopbackTransport", ConnectedLoopback)
        yield {"transport": "loopback"}


def transport_of(cluster: Cluster) -> ConnectedLoopback:
    transport = inside(cluster.datadist).transport
    assert isinstance(transport, ConnectedLoopback)
    return transport
