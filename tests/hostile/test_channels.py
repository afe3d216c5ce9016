"""A peer that says what is not true of the channels of its link."""

from __future__ import annotations

import asyncio
import gc
import itertools

import anyio
import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LinkTimeout, Placement
from aiodatadist._link.data import channels
from aiodatadist._link.data.channels import MAX_FOLLOWING, RENEWAL_TIMEOUT
from aiodatadist._transport import Channel, ChannelOffer
from aiodatadist._values import peer_budget
from aiodatadist._values.peer_budget import OPENING_CHANNELS
from aiodatadist._wire.messages import Broken, Outdated, Pong, Renew, Renewed, Retire, Watch
from aiodatadist.testing import Cluster, inside, linked_pair, verify
from tests.held import held_transfer, there_and_back, turns

DESC = CacheDesc(2, (64, 4096), DataType.DT_UINT8, Placement.HOST)


async def test_transfers_stay_on_a_channel_of_many_queues_that_the_peer_calls_broken() -> None:
    """Keep the channel open until the last transfer has ended: each may start at any moment."""
    async with linked_pair(DESC) as (prompt, decoder, _, target):
        link, liars = (inside(each.datadist).links.current[0] for each in (decoder, prompt))
        if link.session.channels.traits.has_one_queue:
            pytest.skip("what waits for a channel with one queue takes the next one")
        channel, manager = link.session.channels.current, decoder.datadist.cache_manager
        blocks = list(range(64))
        with held_transfer() as held:
            pulls = [manager.pull_blocks(BlocksCacheKey(1), target, blocks, blocks)]
            await held.arrived()
            pulls += [manager.pull_blocks(BlocksCacheKey(1), target, blocks, blocks) for _ in range(400)]
            assert any(transfer.is_waiting for transfer in link.transfers.running.transfers), "for room in the ring"
            liars.session.post(Broken(channel=channel.name))
            liars.session.post(Retire(channel=channel.name))
            await there_and_back(prompt, decoder)
            assert channel.is_broken
            assert {each.link_channel for each in link.transfers.running.transfers.values()} == {channel}
            assert channel.uses == len(pulls)
            assert not channel.is_closing
            held.release()
            for pull in pulls:
                await pull
        verify(decoder.memory(target), target, [(tensor, block, 1, block) for tensor in range(2) for block in blocks])
        assert link.session.is_ready


class Openings:
    """The further channels that a cluster opens: each waits until a test ends it, as if the peer did not come.

    Attributes:
        names: those that are being opened, in the order in which they began.
        seconds: the limits that were set for them.
    """

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.seconds: set[float] = set()
        self._ends: dict[str, anyio.Event] = {}
        monkeypatch.setattr(inside(cluster.datadist).transport, "open_channel", self._open)

    async def _open(self, offer: ChannelOffer, seconds: float) -> Channel:
        self.names.append(offer.name)
        self.seconds.add(seconds)
        self._ends[offer.name] = anyio.Event()
        try:
            await self._ends[offer.name].wait()
        finally:
            self.names.remove(offer.name)
        raise LinkTimeout("the peer did not come")

    def end(self, name: str) -> None:
        self._ends[name].set()


async def test_channels_that_the_peer_asks_for_are_opened_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread and a socket until the peer comes, or its time is over."""
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        liars, openings = inside(decoder.datadist).links.current[0], Openings(prompt, monkeypatch)
        monkeypatch.setattr(channels, "MOST_PAUSE", 0.0)
        told = list[str]()
        monkeypatch.setattr(liars.session.channels, "on_renewed", lambda message: told.append(message.channel))
        names = [f"channel{number}" for number in range(20)]
        for name in names:
            liars.session.post(Renew(channel=name, seconds=800_000.0))
        await there_and_back(decoder, prompt)
        assert openings.names == names[:OPENING_CHANNELS]
        liars.session.post(Renewed(channel=names[OPENING_CHANNELS], epoch=0, reason="it failed here"))
        await there_and_back(decoder, prompt)
        for name in names[:2]:
            openings.end(name)
        while len(told) < 3:
            await turns()
        assert openings.names == [*names[2:OPENING_CHANNELS], *names[OPENING_CHANNELS + 1 : OPENING_CHANNELS + 3]]
        assert set(told) == {*names[:2], names[OPENING_CHANNELS]}, "one was given up before its turn"
        assert openings.seconds == {RENEWAL_TIMEOUT}
        for name in names[2:]:
            while name in names[OPENING_CHANNELS + 1 :] and name not in openings.names:
                await turns()
            if name in openings.names:
                openings.end(name)


async def test_a_cache_that_the_peer_watches_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        link, liars = (inside(each.datadist).links.current[0] for each in (prompt, decoder))
        monkeypatch.setattr(peer_budget, "WATCHED_CACHES", 500)
        gc.collect()
        before = len(gc.get_objects())
        for number in range(1, 501):
            liars.session.post(Watch(cache_id=number, on=True))
            if not number % 50:
                await there_and_back(decoder, prompt)
        gc.collect()
        assert len(gc.get_objects()) <= before + 500 + 100
        liars.session.post(Watch(cache_id=500, on=True))  # once more
        await there_and_back(decoder, prompt)
        liars.session.post(Watch(cache_id=501, on=True))
        assert "watches more than 500 caches" in str(await link.wait_closed())


@pytest.mark.autojump
async def test_a_server_that_asks_for_what_no_channel_reaches_is_served_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        liar, loop = inside(prompt.datadist).links.current[0], asyncio.get_running_loop()
        times = list[float]()

        async def refuse(offer: ChannelOffer, seconds: float) -> Channel:
            times.append(loop.time())
            raise LinkTimeout("it cannot be opened")

        monkeypatch.setattr(inside(decoder.datadist).transport, "open_channel", refuse)
        for _ in range(8):
            await liar.session.questions.ask(lambda call: Outdated(call=call, mine=2**32 - 1, yours=0), Pong)
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0], abs=0.04)
        assert liar.session.is_ready


async def test_a_client_that_gives_up_what_it_asks_for_costs_few_openings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening is a thread and a socket. A client that gives up waits for no pause, however many it has earned."""
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        liar, opened, given_up, told = inside(decoder.datadist).links.current[0], 0, 0, list[str]()

        async def wait_for_the_peer(offer: ChannelOffer, seconds: float) -> Channel:
            nonlocal opened, given_up
            opened += 1
            try:
                await anyio.sleep_forever()
            finally:
                given_up += 1
            raise AssertionError

        monkeypatch.setattr(inside(prompt.datadist).transport, "open_channel", wait_for_the_peer)
        monkeypatch.setattr(liar.session.channels, "on_renewed", lambda message: told.append(message.channel))
        monkeypatch.setattr(channels, "FIRST_PAUSE", 3600.0)
        monkeypatch.setattr(channels, "MOST_PAUSE", 3600.0)
        for number in range(2 * MAX_FOLLOWING):
            liar.session.post(Renew(channel=f"channel{number}", seconds=20.0))
            await there_and_back(decoder, prompt)
            liar.session.post(Renewed(channel=f"channel{number}", epoch=0, reason="it failed here"))
            while len(told) <= number:
                await turns()
        assert (opened, given_up) == (1, 1)
        assert liar.session.is_ready
