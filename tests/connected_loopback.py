"""The transport ``loopback`` with data connections beside each channel. Nothing travels over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from aiodatadist._transport import Channel, ChannelOffer, DataConnection, Endpoint, loopback
from aiodatadist._transport.loopback import LoopbackTransport
from aiodatadist.testing import Cluster, inside

STREAMS = 4
"""Data connections of a channel."""


class ConnectedLoopback(LoopbackTransport):
    """A transport whose channels have data connections.

    Attributes:
        streams: what this end says in its hello.
        connections: those of its channels, by name. They are closed with the transport.
        asks: how many connections it asks for; None for as many as both ends can use.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.streams = STREAMS
        self.asks: int | None = None
        self.connections: dict[str, list[DataConnection]] = {}

    @property
    def endpoint(self) -> Endpoint:
        return replace(super().endpoint, streams=self.streams)

    async def open_channel(self, offer: ChannelOffer, timeout: float) -> Channel:
        if offer.sockets is not None:
            self.connections[offer.name] = await offer.sockets(self.asks or offer.streams, timeout)
        return await super().open_channel(offer, timeout)

    async def aclose(self) -> None:
        for each in self.of_all():
            each.sock.close()
        await super().aclose()

    def of_all(self) -> Iterator[DataConnection]:
        for connections in self.connections.values():
            yield from connections


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
