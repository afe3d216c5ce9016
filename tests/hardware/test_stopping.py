"""Cancelled, timed out, aborted: no byte lands afterwards, and the link goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from time import monotonic

import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheTask,
    EventLayerSynchronizer,
    LLMException,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from tests.hardware.conftest import Pair, linked
from tests.hardware.place import Place
from tests.hardware.remote import Remote

PIECES, PIECE = 64, 512 << 10
"""64 MiB in windows of 8: some milliseconds of a link."""
ATTEMPTS = 20
LAYERS = 4
TENSORS = range(2 * LAYERS)


@pytest.fixture
async def large(mine: Place, peer: Remote) -> AsyncIterator[Pair]:
    async with linked(mine, peer, pool=128 << 20) as found:
        await found.allocate(2, PIECES, PIECE)
        yield found


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
async def test_after_a_cancelled_pull_no_byte_lands(large: Pair, share: float) -> None:
    here, everything = large.here, list(range(PIECES))
    backwards = everything[::-1]  # no two neighbours: each block is a request

    def pull() -> CacheTask:
        return here.manager.pull_blocks(BlocksCacheKey(1), here.cache, everything, backwards)

    await cancelled(pull, share)
    await here.fill()
    for block in range(8):  # what was posted before, if anything, would move with these
        await here.pull(1, [block], [0])
        assert await here.whose() == [[(1, t, block), *((2, t, n) for n in range(1, PIECES))] for t in range(2)]


async def test_after_a_cancelled_push_no_byte_lands(large: Pair) -> None:
    here, everything = large.here, list(range(PIECES))
    await here.push(1, [0], [0])
    await cancelled(lambda: here.manager.push_blocks(BlocksCacheKey(1), here.cache, everything, everything[::-1]), 0)
    await large.there.ask("fill", cluster_id=1)
    for block in range(8):
        await here.push(1, [block], [0])
        assert await large.there.whose() == [[(2, t, block), *((1, t, n) for n in range(1, PIECES))] for t in range(2)]


async def cancelled(start: Callable[[], CacheTask], share: float) -> None:
    """Cancel transfers after a share of their time, until one is stopped. A quick device may end one before."""
    seconds = min([(await start()).transfer_seconds for _ in range(3)])
    for _ in range(ATTEMPTS):
        task, end = start(), monotonic() + share * seconds
        while monotonic() < end:  # noqa: ASYNC110 - a loop's timers are as coarse as a millisecond, in which a device is done
            await asyncio.sleep(0)
        was_cancelled = task.cancel()
        try:
            seconds = min(seconds, (await task).transfer_seconds)
        except asyncio.CancelledError:
            assert was_cancelled
            return
    pytest.fail(f"each of {ATTEMPTS} transfers was over before it was cancelled, after {share} of {seconds} s")


async def test_a_transfer_behind_a_gate_that_never_opens_is_cancelled(pair: Pair) -> None:
    """The stream waits: only an abort ends that."""
    for number in range(3):
        gates = EventLayerSynchronizer(pair.here.datadist.device, LAYERS)
        task = layered(pair, gates)
        await pair.here.push(1, [4], [4])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pair.here.push(1, [number], [5])
    found = await pair.there.whose()
    assert found == [[(1, t, n) if n not in {4, 5} else (2, t, {4: 4, 5: 2}[n]) for n in range(16)] for t in TENSORS]


async def test_a_transfer_is_cancelled_between_its_layers(pair: Pair) -> None:
    here = pair.here
    gates = EventLayerSynchronizer(here.datadist.device, LAYERS)
    async with aclosing(here.datadist.device.open_stream("compute")) as compute:
        task = layered(pair, gates)
        for layer in range(2):
            gates.record(layer, compute)
        landed = 0
        async for _ in task.progress():
            landed += 1
            if landed == 2:
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for layer in range(2, LAYERS):
            gates.record(layer, compute)  # opens nothing any more
        await here.push(1, [9], [9])
        found = await pair.there.whose()
        assert [tensor[1] for tensor in found] == [(2 if t < 4 else 1, t, 1) for t in TENSORS]
        assert [tensor[9] for tensor in found] == [(2, t, 9) for t in TENSORS]


async def test_a_layer_that_is_not_computed_in_time_ends_its_transfer_only(mine: Place, peer: Remote) -> None:
    async with linked(mine, peer, sync_kv_timeout=1000) as pair:
        await pair.allocate(len(TENSORS), 16, 64 << 10)
        await time_out(pair)


async def time_out(pair: Pair) -> None:
    task = layered(pair, EventLayerSynchronizer(pair.here.datadist.device, LAYERS, 0.3))
    with pytest.raises(LLMException) as caught:
        await task
    assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
    await pair.here.push(1, [9], [9])
    found = await pair.there.whose()
    assert [tensor[1] for tensor in found] == [(1, t, 1) for t in TENSORS]
    assert [tensor[9] for tensor in found] == [(2, t, 9) for t in TENSORS]


def layered(pair: Pair, gates: EventLayerSynchronizer) -> CacheTask:
    """Block 1 of each tensor, layer by layer."""
    config = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(LAYERS), range(LAYERS))
    return pair.here.manager.transfer_cache_async(pair.here.cache, gates, [config], [1], [1])
