"""The v1 interface with ``relink``: pulls wait for the link, and unlinking ends the attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import anyio.lowlevel
import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    CacheKey,
    LinkClosed,
    LinkPhase,
    LLMClusterInfo,
    LLMStatusCode,
    NotLinked,
    TransferConfig,
)
from aiodatadist._testing.views import cut_link
from aiodatadist.testing import inside
from tests.legacy.pairs import OK, SLOTS, Pair, filled, held, pair, value
from tests.test_relink import until

POLICY = {"first_delay": 0.005, "max_delay": 0.05, "wait": 30}
KEY = CacheKey(1, 9)


async def lose(p: Pair) -> None:
    """Lose the link, and the peer's listener."""
    changes, engine = p.decoder.link_changes(), inside(p.prompt)
    await engine.listen_elsewhere(None)
    await cut_link(engine.links.find(2))
    await until(changes, LinkPhase.LOST)
    await engine.links.wait_parted()


async def test_a_pull_waits_for_the_link() -> None:
    async with pair(relink=POLICY) as p:
        source, target = await filled(p.owner, [KEY]), await p.puller.allocate_cache(SLOTS)
        address = p.prompt.listen_address
        await lose(p)
        pull = asyncio.ensure_future(p.puller.pull_cache(KEY, target))
        await anyio.lowlevel.checkpoint()
        assert not pull.done()
        await inside(p.prompt).listen_elsewhere(address)
        await pull
        assert all((a[0] == b[0]).all() for a, b in zip(held(p.puller, target), held(p.owner, source), strict=True))


async def test_unlinking_ends_the_attempts() -> None:
    async with pair(relink=POLICY) as p:
        target = await p.puller.allocate_cache(SLOTS)
        await lose(p)
        pull = asyncio.ensure_future(p.puller.pull_cache(KEY, target))
        await anyio.lowlevel.checkpoint()
        status, (each,) = await p.decoder.unlink_clusters([LLMClusterInfo(1)])
        assert (status, each) == (OK, LLMStatusCode.LLM_NOT_YET_LINK)
        with pytest.raises(LinkClosed, match="was unlinked"):
            await pull
        assert p.decoder.figures().relinking.running == 0
        assert not inside(p.decoder).links.has_any


async def test_a_layered_transfer_of_the_prompt_does_not_wait_for_the_decoders_link() -> None:
    """The link is made again by the end that made it, and waited for there."""
    async with pair(relink=POLICY) as p:
        source, target = await filled(p.owner, []), await p.puller.allocate_cache(SLOTS)
        address, synchronizer = p.prompt.listen_address, AwaitableLayerSynchronizer(2)
        await lose(p)

        def transfer() -> Awaitable[object]:
            return p.owner.transfer_cache_async(source, synchronizer, [TransferConfig(2, target.tensor_addrs)])

        with pytest.raises(NotLinked):
            await transfer()
        changes = p.decoder.link_changes()
        await inside(p.prompt).listen_elsewhere(address)
        await until(changes, LinkPhase.LINKED)
        await p.prompt.wait_linked(2)
        for layer in range(2):
            synchronizer.ready(layer)
        await transfer()
        assert [int(array[0, 0]) for array in held(p.puller, target)] == [value(t, 0) for t in range(4)]
