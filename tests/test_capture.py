"""Layers whose events or gates are recorded while the caller's stream is captured into a graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheDesc,
    DataType,
    EventLayerSynchronizer,
    LLMStatusCode,
    ParamInvalid,
    TorchNpuLayerSynchronizer,
    TransferWithCacheKeyConfig,
)
from aiodatadist._device import Device
from aiodatadist._layered.synchronizers import marks_of
from aiodatadist._native.library import Handle, ffi, ring
from aiodatadist.errors import DeviceError
from aiodatadist.testing import linked_pair, verify
from tests.strict import runner

LAYERS = range(4)
DESC = CacheDesc(2 * len(LAYERS), [8, 1024], DataType.DT_UINT8)
ALL = TransferWithCacheKeyConfig(BlocksCacheKey(1), LAYERS, LAYERS)
OUTSIDE = "record and transfer outside the captured region"


class Compute:
    """A stream of the caller's, as torch_npu has them."""

    def __init__(self, device: Device) -> None:
        self.device, self.acl = device, device.runtime.acl
        made = ffi.new("aclrtStream *")
        with device.current():
            assert self.acl.aclrtCreateStream(made) == 0
        self.handle: Handle = made[0]
        self.number = int(ffi.cast("uintptr_t", made[0]))
        self.ended_with = -1

    @contextmanager
    def captured(self, mode: int = ring.ACL_MODEL_RI_CAPTURE_MODE_GLOBAL) -> Iterator[None]:
        with self.device.current():
            assert self.acl.aclmdlRICaptureBegin(self.handle, mode) == 0
        try:
            yield
        finally:
            graph = ffi.new("aclmdlRI *")
            with self.device.current():
                self.ended_with = self.acl.aclmdlRICaptureEnd(self.handle, graph)
                if self.ended_with == 0:
                    assert self.acl.aclmdlRIDestroy(graph[0]) == 0

    def close(self) -> None:
        with self.device.current():
            assert self.acl.aclrtDestroyStream(self.handle) == 0


class Events(AwaitableLayerSynchronizer):
    """A synchronizer whose one event stands for all layers."""

    def __init__(self, compute: Compute) -> None:
        super().__init__(len(LAYERS))
        self.compute = compute
        self.made = ffi.new("aclrtEvent *")
        with compute.device.current():
            assert compute.acl.aclrtCreateEventExWithFlag(self.made, ring.ACL_EVENT_SYNC) == 0

    def record(self) -> None:
        with self.compute.device.current():
            assert self.compute.acl.aclrtRecordEvent(self.made[0], self.compute.handle) == 0

    def device_event(self, _: int) -> int:
        return int(ffi.cast("uintptr_t", self.made[0]))

    def close(self) -> None:
        with self.compute.device.current():
            assert self.compute.acl.aclrtDestroyEvent(self.made[0]) == 0


async def test_a_gate_is_not_recorded_on_a_stream_that_is_captured() -> None:
    async with linked_pair(DESC) as (prompt, decoder, theirs, mine):
        compute = Compute(decoder.datadist.device)
        gates = EventLayerSynchronizer(decoder.datadist.device, len(LAYERS))
        task = decoder.datadist.cache_manager.transfer_cache_async(mine, gates, [ALL], [1], [2])
        with compute.captured(), pytest.raises(ParamInvalid, match="is being captured into a graph") as refused:
            gates.record(0, compute.number)
        assert OUTSIDE in str(refused.value.hint)
        for layer in LAYERS:
            gates.record(layer, compute.number)
        await task
        verify(prompt.memory(theirs), theirs, [(t, 2, 2, 1) for t in range(8)])
        compute.close()


async def test_nor_before_a_transfer_has_begun() -> None:
    """The record would be made up for when the transfer begins, which may be after the capture."""
    async with linked_pair(DESC) as (_, decoder, _theirs, _mine):
        compute = Compute(decoder.datadist.device)
        gates = EventLayerSynchronizer(decoder.datadist.device, len(LAYERS))
        with compute.captured(), pytest.raises(ParamInvalid, match="is being captured into a graph"):
            gates.record(0, compute.number)
        compute.close()


async def test_an_event_of_a_graph_fails_its_transfer_and_leaves_the_graph_alone() -> None:
    async with linked_pair(DESC) as (prompt, decoder, theirs, mine):
        manager = decoder.datadist.cache_manager
        compute = Compute(decoder.datadist.device)
        events = Events(compute)
        with compute.captured():
            events.record()
            task = manager.transfer_cache_async(mine, events, [ALL], [1], [2])
            events.ready(0)
            with pytest.raises(DeviceError) as failed:
                await task
        assert compute.ended_with == 0, "no stream of the link was pulled in"
        assert (failed.value.code, failed.value.hint) == (ring.ACL_ERROR_RT_EVENT_CAPTURED, failed.value.hint)
        assert OUTSIDE in str(failed.value.hint)
        verify(prompt.memory(theirs), theirs, [(t, 2, 1, 2) for t in range(8)])
        again = Events(compute)
        again.record()
        task = manager.transfer_cache_async(mine, again, [ALL], [1], [2])
        for layer in LAYERS:
            again.ready(layer)
        assert await task.synchronize() is LLMStatusCode.LLM_SUCCESS
        verify(prompt.memory(theirs), theirs, [(t, 2, 2, 1) for t in range(8)])
        for each in (events, again):
            each.close()
        compute.close()


@pytest.mark.parametrize("capturing", [True, False])
def test_a_layer_of_torch_npu_is_not_ready_while_its_stream_is_captured(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu = SimpleNamespace(is_current_stream_capturing=lambda: capturing)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(npu=npu))
    events: list[Any] = [SimpleNamespace(npu_event=5)]
    synchronizer = TorchNpuLayerSynchronizer(events)
    if capturing:
        with pytest.raises(ParamInvalid, match="current stream is being captured"):
            synchronizer.ready(0)
    else:
        synchronizer.ready(0)
    marks = marks_of(synchronizer)
    assert marks is not None
    assert marks.said(0) is (None if capturing else True)


async def transfers_go_on() -> None:
    async with runner.pair(DESC) as (one, two, mine, theirs):
        compute = Compute(one.datadist.device)
        with compute.captured():
            await one.datadist.cache_manager.pull_blocks(BlocksCacheKey(2), mine, [1], [2])
            await one.datadist.cache_manager.push_blocks(BlocksCacheKey(2), mine, [3], [4])
        verify(one.memory(mine), mine, [(t, 2, 2, 1) for t in range(8)])
        verify(two.memory(theirs), theirs, [(t, 4, 1, 3) for t in range(8)])
        compute.close()


@pytest.mark.parametrize("kind", ["hccs", "roce", "aicpu"])
def test_transfers_go_on_under_a_global_capture(kind: str) -> None:
    """Transfer without a synchronous copy, which the capture would refuse.

    HCCL would make one, if it unfolded batches on the device.
    """
    runner.run(kind, transfers_go_on)
