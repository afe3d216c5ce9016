"""Layered transfers: behind gates of the device, and as the event loop says."""

from __future__ import annotations

from contextlib import aclosing

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheTask,
    EventLayerSynchronizer,
    TransferWithCacheKeyConfig,
)
from tests.hardware.conftest import Pair

LAYERS = 4
TENSORS = range(2 * LAYERS)
BLOCKS = [1, 6, 11]
CONFIG = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(LAYERS), range(LAYERS))


async def until_landed(task: CacheTask, count: int) -> None:
    landed = 0
    async for _ in task.progress():
        landed += 1
        if landed == count:
            return


async def assert_landed(pair: Pair, layers: int) -> None:
    """Check that the first layers have come, and nothing else."""
    expected = [[(2 if n in BLOCKS and t < 2 * layers else 1, t, n) for n in range(16)] for t in TENSORS]
    assert await pair.there.whose() == expected


async def test_layers_that_the_event_loop_hands_over(pair: Pair) -> None:
    layers = AwaitableLayerSynchronizer(LAYERS)
    task = pair.here.manager.transfer_cache_async(pair.here.cache, layers, [CONFIG], BLOCKS, BLOCKS)
    await assert_landed(pair, 0)
    for layer in range(LAYERS):
        layers.ready(layer)
    await task
    await assert_landed(pair, LAYERS)


async def test_layers_behind_gates(pair: Pair) -> None:
    device = pair.here.datadist.device
    gates = EventLayerSynchronizer(device, LAYERS)
    async with aclosing(device.open_stream("compute")) as compute:
        task = pair.here.manager.transfer_cache_async(pair.here.cache, gates, [CONFIG], BLOCKS, BLOCKS)
        for layer in range(LAYERS):
            await assert_landed(pair, layer)
            gates.record(layer, compute)
            await until_landed(task, layer + 1)
        await task
        await assert_landed(pair, LAYERS)


async def test_other_transfers_pass_one_that_waits_at_its_gates(pair: Pair) -> None:
    device = pair.here.datadist.device
    gates = EventLayerSynchronizer(device, LAYERS)
    async with aclosing(device.open_stream("compute")) as compute:
        task = pair.here.manager.transfer_cache_async(pair.here.cache, gates, [CONFIG], BLOCKS, BLOCKS)
        for number in range(20):
            await pair.here.push(1, [0], [0])
            await pair.here.pull(1, [number % 16], [15])
        found = await pair.there.whose()
        assert [tensor[:2] for tensor in found] == [[(2, t, 0), (1, t, 1)] for t in TENSORS], "a gate was passed"
        for layer in range(LAYERS):
            gates.record(layer, compute)
        await task
        found = await pair.there.whose()
        assert [tensor[1] for tensor in found] == [(2, t, 1) for t in TENSORS]


async def test_a_layer_holds_what_compute_wrote_before_its_gate(pair: Pair) -> None:
    """The contents change after the transfer was started, and the gates open after the copy that changes them."""
    here, device = pair.here, pair.here.datadist.device
    gates = EventLayerSynchronizer(device, LAYERS)
    async with aclosing(device.open_stream("compute")) as compute:
        task = here.manager.transfer_cache_async(here.cache, gates, [CONFIG], [0], [0])
        await here.manager.copy_blocks(here.cache, {7: [0]})
        for layer in range(LAYERS):
            gates.record(layer, compute)
        await task
        assert [tensor[0] for tensor in await pair.there.whose()] == [(2, t, 7) for t in TENSORS]
