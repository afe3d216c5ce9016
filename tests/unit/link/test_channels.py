"""The channels of a link, with a peer that speaks at the worst moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from aiodatadist._concurrency import loop_time
from aiodatadist._concurrency.signal import Signal
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._counting import Incidents
from aiodatadist._link.control.questions import PendingQuestions
from aiodatadist._link.data.channels import MAX_OLD, MAX_OUTDATED, Channels
from aiodatadist._link.data.link_channel import LinkChannel
from aiodatadist._transport import Channel, ChannelOffer, Endpoint
from aiodatadist._values.descriptors import Placement
from aiodatadist._wire.messages import Broken, Message, Outdated, Pong, Renew, Renewed, Retire
from aiodatadist.errors import ParamInvalid, ProtocolError
from tests.held import turns

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
    """Messages that this end sent."""

    def __init__(self) -> None:
        self.all: list[Message] = []
        self._more = Signal()

    def post(self, message: Message) -> None:
        self.all.append(message)
        self._more.wake()

    async def wait_for(self, message: Message) -> None:
        looked_at = 0
        while message not in self.all[looked_at:]:
            looked_at = len(self.all)
            await self._more.wait()


@asynccontextmanager
async def client(
    rank: int = 0, out_of_use: Callable[[LinkChannel], object] = lambda _: None
) -> AsyncIterator[tuple[Channels, FakeTransport, Said]]:
    """Open a client's channels, or a server's with rank 1. The first one is open. Yield them and what they say."""
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
            Incidents(),
        )
        channels.out_of_use = out_of_use
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


async def test_a_peer_that_asks_for_a_channel_all_the_time_has_one_task() -> None:
    async with client() as (channels, _, said):
        before = len(asyncio.all_tasks())
        for call in range(1, MAX_OUTDATED + 1):
            channels.on_outdated(Outdated(call=call, mine=2, yours=1))
        with pytest.raises(ProtocolError, match="65536 times at once"):
            channels.on_outdated(Outdated(call=MAX_OUTDATED + 1, mine=2, yours=1))
        await said.wait_for(Renewed(channel="channel_2", epoch=1))
        assert len(asyncio.all_tasks()) <= before + 2, "one for the peer, and one for the channel"
        channels.on_renewed(Renewed(channel="channel_2", epoch=2))
        await said.wait_for(Pong(call=MAX_OUTDATED))
        assert [message.call for message in said.all if isinstance(message, Pong)] == list(range(1, MAX_OUTDATED + 1))
        assert sum(isinstance(message, Renew) for message in said.all) == 1


async def test_a_peer_that_asked_for_a_channel_all_the_time_is_answered_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers to thousands of questions hold the event loop no longer than other calls may. What comes meanwhile waits."""
    async with client() as (channels, transport, said):
        many, answered, rounds = 500, Counter[int](), 0
        post, loop, before = said.post, asyncio.get_running_loop(), len(asyncio.all_tasks())

        def go_round() -> None:
            nonlocal rounds
            rounds += 1
            if answered.total() < many + 1:
                loop.call_soon(go_round)

        def counted(message: Message) -> None:
            if isinstance(message, Pong):
                answered[rounds] += 1
                if message.call == many:  # the last one: the answers to all others are out
                    channels.on_outdated(Outdated(call=many + 1, mine=2, yours=1))
                    assert len(asyncio.all_tasks()) <= before + 2
            post(message)

        monkeypatch.setattr(channels, "_post", counted)
        monkeypatch.setattr(loop_time, "HELD", 0)
        for call in range(1, many + 1):
            channels.on_outdated(Outdated(call=call, mine=2, yours=1))
        await said.wait_for(Renewed(channel="channel_2", epoch=1))
        go_round()
        channels.on_renewed(Renewed(channel="channel_2", epoch=2))
        await said.wait_for(Pong(call=many + 1))
        assert max(answered.values()) <= 10
        assert len(transport.opened) == 2


async def test_a_channel_that_cannot_be_opened_is_tried_once_for_all_who_asked_for_it() -> None:
    async with client() as (channels, transport, said):
        channels.on_outdated(Outdated(call=1, mine=2, yours=1))
        channels.on_outdated(Outdated(call=2, mine=3, yours=2**31))  # which nothing that is registered here has
        await said.wait_for(Renewed(channel="channel_2", epoch=1))
        channels.on_outdated(Outdated(call=3, mine=2, yours=0))
        transport.epoch = 2
        channels.on_outdated(Outdated(call=4, mine=1, yours=2))  # needs more than the attempt can reach
        channels.on_renewed(Renewed(channel="channel_2", epoch=0, reason="no memory"))
        await said.wait_for(Renewed(channel="channel_3", epoch=2))
        assert [message.call for message in said.all if isinstance(message, Pong)] == [1, 2, 3]
        channels.on_renewed(Renewed(channel="channel_3", epoch=1))
        await said.wait_for(Pong(call=4))
        assert channels.find(2, 1) is not None


async def test_a_channel_that_the_peer_calls_broken_goes_out_of_use_once() -> None:
    out_of_use: list[str] = []
    async with client(out_of_use=lambda channel: out_of_use.append(channel.name)) as (channels, _, said):
        for _ in range(100):
            channels.on_broken(Broken(channel="channel_1"))
        assert out_of_use == ["channel_1"]
        assert said.all == [Retire(channel="channel_1")]


async def test_a_peer_that_leaves_no_channel_gets_no_further_one_until_it_does() -> None:
    async with client(rank=1) as (channels, transport, said):

        async def renew(number: int) -> None:
            channels.on_renew(Renew(channel=f"channel_{number}", seconds=20))
            channels.on_renewed(Renewed(channel=f"channel_{number}", epoch=number))
            await channels.wait_opened()

        for number in range(2, MAX_OLD + 2):
            await renew(number)
        assert channels.current.name == f"channel_{MAX_OLD + 1}"
        await renew(1000)
        assert channels.current.name == f"channel_{MAX_OLD + 1}"
        (refusal,) = [message for message in said.all if isinstance(message, Renewed) and message.reason]
        assert refusal.channel == "channel_1000"
        assert "64 channels that were replaced are still open: the limit is 64" in refusal.reason
        assert len(transport.opened) == MAX_OLD + 1
        channels.on_retire(Retire(channel="channel_1"))
        await turns()
        assert transport.opened[0].is_closed
        await renew(1001)
        assert channels.current.name == "channel_1001"


# ---- channels over data connections ----


class Connected(Fake):
    """A channel like those over TCP, of an NPU or of softnpu."""

    needs_loans = has_connections = True
    has_one_queue = False

    def __init__(self, name: str, reaches_device: bool) -> None:
        super().__init__(name)
        self.reaches_device = reaches_device


@asynccontextmanager
async def connected(here: str, there: str) -> AsyncIterator[tuple[Channels, FakeTransport, Said]]:
    """Open a server's channels over data connections, between ends of these runtimes."""
    async with client(rank=1) as (channels, transport, said):

        async def open_channel(offer: ChannelOffer, _: float) -> Channel:
            transport.opened.append(Connected(offer.name, here == "soft"))
            return transport.opened[-1]

        transport.open_channel = open_channel  # type: ignore[method-assign]
        ends = replace(THERE, runtime=there), replace(HERE, runtime=here)
        await channels.open("connected", 1, ends, 1)
        yield channels, transport, said


async def test_a_channel_over_data_connections_reaches_what_is_registered_later() -> None:
    async with connected("soft", "soft") as (channels, transport, _):
        channels.on_first(channels.current.mine)
        transport.epoch = 1000
        assert channels.find(1000, 1000) is channels.current


async def test_a_peer_gets_no_further_channel_beside_data_connections() -> None:
    """Refuse it: it would be over HCCL, and this link is over TCP."""
    async with connected("soft", "soft") as (channels, transport, said):
        opened = len(transport.opened)
        channels.on_renew(Renew(channel="further", seconds=20))
        reason = "a channel with data connections is never replaced"
        await said.wait_for(Renewed(channel="further", epoch=0, reason=reason))
        assert len(transport.opened) == opened


def cache(placement: Placement) -> Any:
    return SimpleNamespace(cache_id=7, placement=placement)


@pytest.mark.parametrize("here", ["soft", "ascend"])
@pytest.mark.parametrize("there", ["soft", "ascend"])
async def test_no_byte_of_an_npus_memory_travels_over_tcp(here: str, there: str) -> None:
    async with connected(here, there) as (channels, _, _):
        for own, remote in product(Placement, Placement):
            refused = []
            if here == "ascend" and own is Placement.DEVICE:
                refused.append("cache 7 of this cluster is in DEVICE memory of an NPU")
            if there == "ascend" and remote is Placement.DEVICE:
                refused.append("cache 7 of cluster 2 is in DEVICE memory of an NPU")
            with pytest.raises(ParamInvalid, match=refused[0]) if refused else nullcontext():
                channels.traits.check_reaches(cache(remote), "cluster 2", cache(own))
            filled = cache(own)
            mine = here == "ascend" and own is Placement.DEVICE
            with pytest.raises(ParamInvalid, match="cache 7 of this cluster") if mine else nullcontext():
                channels.traits.check_reaches(filled, "this cluster, which the peer is asked to fill,", filled)
