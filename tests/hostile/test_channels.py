"""A peer that says what is not true of the channels of its link."""

from __future__ import annotations

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, Placement
from aiodatadist._wire.messages import Broken, Retire
from aiodatadist.testing import inside, linked_pair, verify
from tests.held import held_transfer, there_and_back

DESC = CacheDesc(2, (64, 4096), DataType.DT_UINT8, Placement.HOST)


async def test_transfers_stay_on_a_channel_of_many_queues_that_the_peer_calls_broken() -> None:
    """Keep the channel open until the last transfer has ended: each may start at any moment."""
    async with linked_pair(DESC) as (prompt, decoder, _, target):
        link, liars = (inside(each.datadist).links.current[0] for each in (decoder, prompt))
        if link.session.channels.has_one_queue:
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
