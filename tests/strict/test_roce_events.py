"""Layers whose ends the host waits for, because on RoCE a request is not posted before its layer is final."""

from __future__ import annotations

import anyio

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheDesc,
    DataType,
    EventLayerSynchronizer,
    TransferWithCacheKeyConfig,
)
from aiodatadist._device import Device, Program
from aiodatadist._native.library import ffi
from aiodatadist.testing import verify
from tests.strict import runner

LAYERS = range(4)
DESC = CacheDesc(8, [16, 1024], DataType.DT_UINT8)
ALL = TransferWithCacheKeyConfig(BlocksCacheKey(2), LAYERS, LAYERS)
SOON = 10.0
"""Seconds that a slow machine may take for what is over in milliseconds, or else never."""


class Events(AwaitableLayerSynchronizer):
    """Events like those of torch_npu: one event, recorded already, stands for all layers."""

    def __init__(self, device: Device) -> None:
        super().__init__(len(LAYERS))
        self.made = ffi.new("aclrtEvent *")
        with device.current():
            assert device.runtime.acl.aclrtCreateEventWithFlag(self.made, 1) == 0

    def device_event(self, _: int) -> int:
        return int(ffi.cast("uintptr_t", self.made[0]))


async def events_pass_gates() -> None:
    async with runner.pair(DESC) as (one, two, mine, theirs):
        manager, device = one.datadist.cache_manager, one.datadist.device
        events, gates = Events(device), EventLayerSynchronizer(device, len(LAYERS))
        stream = device.open_stream("compute")
        await stream.submit(Program().record(events.made[0]), 1).wait()
        first = manager.transfer_cache_async(mine, events, [ALL], [1], [1])
        events.ready(0)
        async for _ in first.progress():
            break
        second = manager.transfer_cache_async(mine, gates, [ALL], [2], [2])
        for layer in LAYERS[1:]:
            events.ready(layer)
        with anyio.fail_after(SOON):
            await first
        verify(two.memory(theirs), theirs, [(t, 1, 1, 1) for t in range(8)])
        second.cancel()
        await second.synchronize()
        await stream.aclose()


def test_layers_behind_events_do_not_wait_for_the_gates_of_another_transfer() -> None:
    runner.run("roce", events_pass_gates)
