"""Synchronizers, which say when a layer is final."""

from __future__ import annotations

import asyncio

import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    EventLayerSynchronizer,
    LayerSynchronizer,
    ParamInvalid,
    TorchNpuLayerSynchronizer,
)
from aiodatadist._device import Device
from aiodatadist._layered.synchronizers import GatedByEvent


def test_the_contract_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        LayerSynchronizer()  # type: ignore[abstract]


async def test_layers_are_said_before_and_after_a_task_waits() -> None:
    synchronizer = AwaitableLayerSynchronizer(3)
    synchronizer.ready(1)
    assert await synchronizer.synchronize_layer(1, None)
    waiting = asyncio.ensure_future(synchronizer.synchronize_layer(0, None))
    await asyncio.sleep(0)
    assert not waiting.done()
    synchronizer.ready(0)
    assert await waiting
    synchronizer.fail(2)
    assert not await synchronizer.synchronize_layer(2)


async def test_several_wait_for_one_layer() -> None:
    synchronizer = AwaitableLayerSynchronizer(1)
    waiting = [asyncio.ensure_future(synchronizer.synchronize_layer(0, None)) for _ in range(3)]
    await asyncio.sleep(0)
    synchronizer.ready(0)
    assert await asyncio.gather(*waiting) == [True] * 3


async def test_the_first_word_counts() -> None:
    synchronizer = AwaitableLayerSynchronizer(2)
    synchronizer.ready(0)
    synchronizer.fail(0)
    synchronizer.fail(1)
    synchronizer.ready(1)
    assert await synchronizer.synchronize_layer(0)
    assert not await synchronizer.synchronize_layer(1)


async def test_a_time_limit_gives_the_layer_up() -> None:
    synchronizer = AwaitableLayerSynchronizer(1)
    assert not await synchronizer.synchronize_layer(0, 5)
    synchronizer.ready(0)
    assert await synchronizer.synchronize_layer(0, 5)


@pytest.mark.parametrize("layer", [-1, 2, 100])
def test_a_layer_that_there_is_not(layer: int) -> None:
    synchronizer = AwaitableLayerSynchronizer(2)
    for say in (synchronizer.ready, synchronizer.fail):
        with pytest.raises(ParamInvalid, match=f"layer_index is {layer}: there are 2 layers"):
            say(layer)


@pytest.mark.parametrize(
    ("count", "kind"), [(-1, ValueError), (2**32, ValueError), ("2", TypeError), (None, TypeError)]
)
def test_a_number_of_layers_that_is_none(count: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="num_layers is"):
        AwaitableLayerSynchronizer(count)


async def test_torch_events_are_handed_on_as_numbers() -> None:
    class Event:
        def __init__(self, number: int) -> None:
            self.npu_event = number

    synchronizer = TorchNpuLayerSynchronizer([Event(5), Event(2**63)])
    assert isinstance(synchronizer, GatedByEvent)
    assert not isinstance(AwaitableLayerSynchronizer(1), GatedByEvent)
    assert [synchronizer.device_event(i) for i in range(2)] == [5, 2**63]
    synchronizer.ready(1)
    assert await synchronizer.synchronize_layer(1, None)


async def test_gates_of_the_device() -> None:
    async with await Device.open(0) as device:
        synchronizer = EventLayerSynchronizer(device, 2, 1.5)
        assert (synchronizer.num_layers, synchronizer.seconds) == (2, 1.5)
        stream = device.open_stream("compute")
        for layer in (-1, 2):
            with pytest.raises(ParamInvalid, match=f"layer_index is {layer}: there are 2 layers"):
                synchronizer.record(layer, stream)
        with pytest.raises(ParamInvalid, match="the device waits for an EventLayerSynchronizer"):
            await synchronizer.synchronize_layer(0, None)
        synchronizer.record(0, stream)
        gate = synchronizer.gate(range(2))
        first, second = gate.notifies
        assert first != second
        assert not gate.is_shut_at(0), "what was recorded opens at once"
        assert gate.is_shut_at(1)
        synchronizer.record(1, stream)
        assert not gate.is_shut
        gate.close(1)
        synchronizer.record(1, stream)  # no task waits any more
        later = synchronizer.gate(range(1, 2))
        assert later.notifies == [first], "only a gate that was waited for is used again"
        later.close(0)
        await stream.aclose()


async def test_what_gates_are_refused() -> None:
    async with await Device.open(0) as device:
        with pytest.raises(ValueError, match="num_layers is -1"):
            EventLayerSynchronizer(device, -1)
        with pytest.raises(TypeError, match="timeout is None"):
            EventLayerSynchronizer(device, 1, None)  # type: ignore[arg-type]
