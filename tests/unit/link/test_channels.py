"""The channels of a link, with a peer that speaks at the worst moment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from aiodatadist.concurrency.signal import Signal
from aiodatadist.concurrency.spawner import Spawner
from aiodatadist.counting import Incidents
from aiodatadist.link.channels import Channels
from aiodatadist.link.questions import PendingQuestions
from aiodatadist.transport import Channel, ChannelOffer, Endpoint
from aiodatadist.wire.messages import Broken, Message, Renew, Renewed, Retire

HERE = Endpoint("fake", "fake", "host", "server", "0", "10.0.0.1", 1)
THERE = Endpoint("fake", "fake", "host", "server", "1", "10.0.0.2", 2)


class Fake(Channel):
    has_one_queue = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False

    def add_get(self, *_: Any) -> None: ...

    def add_put(self, *_: Any) -> None: ...

    async def aclose(self) -> None:
        self.is_closed = True


class FakeTransport:
    """Opens every channel at once."""

    epoch = 1

    def __init__(self) -> None:
        self.opened: list[Fake] = []

    async def open_channel(self, offer: ChannelOffer, _: float) -> Channel:
        self.opened.append(Fake(offer.name))
        return self.opened[-1]


class Said:
    """What this end said."""

    def __init__(self) -> None:
        self.all: list[Message] = []
        self._more = Signal()

    def post(self, message: Message) -> None:
        self.all.append(message)
        self._more.wake()

    async def wait_for(self, message: Message) -> None:
        while message not in self.all:
            await self._more.wait()


@asynccontextmanager
async def client(rank: int = 0) -> AsyncIterator[tuple[Channels, FakeTransport, Said]]:
    """A client's channels, or with rank 1 a server's, of which the first is open, and what it says."""
    said = Said()
    names = (f"channel_{number}" for number in range(2, 100))
    transport = FakeTransport()
    async with anyio.create_task_group() as group:
        channels = Channels(
            transport,  # type: ignore[arg-type]
            said.post,
            PendingQuestions(said.post),
            Spawner(group).start_soon,
            lambda: next(names),
            lambda _: None,
            Incidents(),
        )
        await channels.open("channel_1", rank, (HERE, THERE), 1)
        channels.on_first(1)
        yield channels, transport, said
        group.cancel_scope.cancel()


async def test_peer_may_break_a_channel_before_this_end_has_taken_it_into_use() -> None:
    async with client() as (channels, transport, said), anyio.create_task_group() as group:
        transport.epoch = 2
        group.start_soon(channels.reach, 2, 1)
        await said.wait_for(Renewed(channel="channel_2", epoch=2))
        channels.on_renewed(Renewed(channel="channel_2", epoch=1))
        channels.on_broken(Broken(channel="channel_2"))  # in the same piece
        channels.on_retire(Retire(channel="channel_2"))
        assert channels.current.name == "channel_1"
        await said.wait_for(Renew(channel="channel_3", seconds=20))
        assert channels.find(1, 1) is None
        assert Retire(channel="channel_2") in said.all
        await said.wait_for(Renewed(channel="channel_3", epoch=2))
        channels.on_renewed(Renewed(channel="channel_3", epoch=1))
        reached = await channels.reach(2, 1)
        assert reached.name == "channel_3"
        assert [channel.is_closed for channel in transport.opened] == [False, True, False]


async def test_a_renewal_that_the_peer_says_more_than_once_is_one() -> None:
    async with client(rank=1) as (channels, transport, said):
        transport.epoch = 2
        renew = Renew(channel="channel_2", seconds=20)
        for _ in range(2):
            channels.on_renew(renew)
        await said.wait_for(Renewed(channel="channel_2", epoch=2))
        channels.on_renew(renew)
        channels.on_renewed(Renewed(channel="channel_2", epoch=2))
        await channels.wait_opened()
        channels.on_renew(renew)
        channels.on_renew(Renew(channel="channel_1", seconds=20))
        await channels.wait_opened()
        assert channels.current.name == "channel_2"
        assert len(transport.opened) == 2
        assert said.all.count(Renewed(channel="channel_2", epoch=2)) == 1
