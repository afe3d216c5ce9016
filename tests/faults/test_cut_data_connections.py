"""Transfers over TCP that are cancelled, or lose their network, when some of their bytes are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheKeyByIdAndIndex, DataType, LLMClusterInfo, PeerLost
from aiodatadist.testing import ChaosProxy, Cluster, Timeout, inside, open_cluster
from tests.held import there_and_back

BLOCKS = 17
DESC = CacheDesc(2, [BLOCKS, 1 << 20], DataType.DT_UINT8)
MANY, LAST = list(range(BLOCKS - 1)), [BLOCKS - 1]
"""The blocks that are moved, and one that is moved behind them on the same connection."""


class Far(NamedTuple):
    """Two linked clusters with a cache each, and the network in between."""

    prompt: Cluster
    decoder: Cluster
    source: Cache
    cache: Cache
    network: ChaosProxy

    def move(self, way: str, blocks: list[int]) -> asyncio.Future[object]:
        """Start a pull, or a push, of the decoder's."""
        manager = self.decoder.datadist.cache_manager
        if way == "pull":
            return asyncio.ensure_future(manager.pull_blocks(BlocksCacheKey(1, 0), self.cache, blocks, blocks))
        key = CacheKeyByIdAndIndex(1, self.source.cache_id)
        return asyncio.ensure_future(manager.push_blocks(key, self.cache, blocks, blocks))

    async def stalled(self, way: str) -> tuple[asyncio.Future[object], Timeout]:
        """Start to move blocks, and stall the network when a part of their bytes has passed."""
        moving, before = self.move(way, MANY), self.network.passed
        while self.network.passed < before + (4 << 20):
            await anyio.lowlevel.checkpoint()
        stall = Timeout()
        self.network.add(stall)
        return moving, stall

    def landed(self, way: str) -> bytes:
        """Return what is in the memory that the blocks are moved to, except for the last one of each tensor."""
        whole = self.decoder.memory(self.cache) if way == "pull" else self.prompt.memory(self.source)
        tensors = [whole.view()[t * BLOCKS << 20 : (t * BLOCKS + len(MANY)) << 20] for t in range(2)]
        return b"".join(bytes(each) for each in tensors)


@asynccontextmanager
async def far_apart() -> AsyncIterator[Far]:
    options: dict[str, Any] = {"transport": "tcp", "trust": "none", "tcp_streams": 1}
    async with (
        open_cluster(1, device_id=0, **options) as prompt,
        open_cluster(2, device_id=1, **options) as decoder,
    ):
        source, cache = await prompt.blocks(DESC), await decoder.blocks(DESC)
        address = prompt.datadist.listen_address
        assert address is not None
        async with ChaosProxy(address) as network:
            info = LLMClusterInfo(1)
            info.append_remote_ip_info(*network.address)
            linked = await decoder.datadist.link_clusters([info], 5000)
            assert not linked.errors[0], linked.errors
            await there_and_back(prompt, decoder)
            yield Far(prompt, decoder, source, cache, network)


@pytest.mark.parametrize("way", ["pull", "push"])
async def test_no_byte_lands_once_a_cancellation_was_delivered(way: str) -> None:
    async with far_apart() as far:
        untouched = far.landed(way)
        moving, stall = await far.stalled(way)
        moving.cancel()
        if way == "push":  # it waits for the peer to confirm what is on its way
            await anyio.lowlevel.checkpoint()
            assert not moving.done()
            far.network.remove(stall)
        with pytest.raises(asyncio.CancelledError):
            await moving
        copy = far.landed(way)
        assert copy != untouched, "nothing was under way"
        if way == "pull":
            far.network.remove(stall)
        await far.move(way, LAST)  # behind what was under way, on the same connection
        await there_and_back(far.prompt, far.decoder)
        assert far.landed(way) == copy


async def test_a_cancelled_push_that_the_peer_never_confirms_loses_the_link() -> None:
    async with far_apart() as far:
        (link,) = inside(far.decoder.datadist).links.current
        moving, _ = await far.stalled("push")
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        await link.wait_closed()
        assert far.decoder.datadist.figures().links_ended == {"data_connection_lost": 1}


@pytest.mark.parametrize("way", ["pull", "push"])
async def test_a_transfer_whose_network_is_cut_says_that_a_connection_was_lost(way: str) -> None:
    async with far_apart() as far:
        (link,) = inside(far.decoder.datadist).links.current
        moving, _ = await far.stalled(way)
        far.network.reset()
        with pytest.raises(PeerLost, match="connection"):
            await moving
        await link.wait_closed()
        (cause,) = far.decoder.datadist.figures().links_ended
        assert cause in ("data_connection_lost", "connection_lost"), "all of them are cut, and any may be noticed first"
