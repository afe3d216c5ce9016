"""A channel over TCP from the moment at which its closing begins: nothing reaches its handle, which a thread is freeing."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from aiodatadist import LinkClosed
from aiodatadist._device import Device
from aiodatadist._native.library import ring
from aiodatadist._transport import Access, DataConnection, Region, TcpConfig, tcp
from aiodatadist._transport.tcp import TcpChannel
from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import LinkError

DEVICE = cast(Device, SimpleNamespace(runtime=SimpleNamespace(is_soft=True)))
REGIONS = [Region(4096, 64, Placement.HOST)]


@pytest.fixture
async def channel() -> AsyncIterator[TcpChannel]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        channel = TcpChannel(DEVICE, [DataConnection(ours, None)], TcpConfig())
        yield channel
        await channel.aclose()


async def test_a_channel_that_is_being_closed_lends_nothing(
    channel: TcpChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = anyio.Event(), anyio.Event()

    async def held(free: Callable[..., object], *handle: object, **_: object) -> None:
        begun.set()
        await go_on.wait()
        free(*handle)

    monkeypatch.setattr(tcp, "in_thread", held)
    channel.lend(REGIONS, Access.ALL)
    async with anyio.create_task_group() as group:
        group.start_soon(channel.aclose)
        await begun.wait()
        for use in (lambda: channel.lend(REGIONS, Access.ALL), lambda: channel.open_stream("late")):
            with pytest.raises(LinkClosed, match="the channel is closed"):
                use()
        channel.take_back(REGIONS, Access.ALL)
        await channel.aclose()
        go_on.set()


async def test_a_connection_is_lost_when_what_was_sent_stays_unacknowledged_as_long_as_heartbeats_may_be_missing() -> (
    None
):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        kept = ours.dup()
        ours.setblocking(False)
        with kept, listener.accept()[0]:
            channel = TcpChannel(DEVICE, [DataConnection(ours, None)], TcpConfig(silence=1.25))
            assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1250
            await channel.aclose()


class Unsealing:
    """The calls of the library, where it cannot seal."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ring, name)

    def net_channel_add(self, *_: object) -> int:
        return -errno.ENOTSUP


async def test_a_connection_that_cannot_be_sealed_is_refused_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "ring", Unsealing())
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(LinkError, match="cannot be sealed here") as caught:
        TcpChannel(DEVICE, [DataConnection(ours, None)], TcpConfig())
    assert "tcp_plain_networks" in str(caught.value)
    assert ours.fileno() == -1
