"""Layers that the device waits for by a caller's events, whatever the caller's ``device_event`` does meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import anyio
import pytest

from aiodatadist import AwaitableLayerSynchronizer, CacheTask, LayerDone
from aiodatadist._device import Program
from aiodatadist._native.library import Handle, ffi
from aiodatadist.testing import soft_hold
from tests.held import there_and_back
from tests.strict import runner
from tests.test_layered import LAYERS, OK, Fan, fan

KINDS = pytest.mark.parametrize("kind", ["hccs", "roce"])
"""RoCE's channels have one queue, where the host waits for events; HCCS's have several, where the device does."""
SOON = 20.0


class Events(AwaitableLayerSynchronizer):
    """Events, one for each layer. The test says what ``device_event`` does besides returning one."""

    def __init__(self, made: Fan) -> None:
        super().__init__(LAYERS)
        self._device = made.source.datadist.device
        self._made: list[Handle] = []
        self.also: dict[int, Callable[[], object]] = {}
        self.asked: list[tuple[str, int]] = []
        event = ffi.new("aclrtEvent *")
        with self._device.current():
            for _ in range(LAYERS):
                self._device.runtime.check("aclrtCreateEvent", self._device.runtime.acl.aclrtCreateEvent(event))
                self._made.append(event[0])

    def device_event(self, layer_index: int) -> int:
        self.asked.append(("asked", layer_index))
        self.also.pop(layer_index, lambda: None)()
        self.asked.append(("answered", layer_index))
        return int(ffi.cast("uintptr_t", self._made[layer_index]))

    async def record(self, layer: int) -> None:
        """Record a layer's event, and wait until it is complete."""
        async with aclosing(self._device.open_stream(f"compute {layer}")) as stream:
            await stream.submit(Program().record(self._made[layer]), SOON).wait()

    @asynccontextmanager
    async def recording(self, layer: int) -> AsyncIterator[Callable[[], None]]:
        """Record a layer's event, which completes when the function is called."""
        async with AsyncExitStack() as stack:
            stream = await stack.enter_async_context(aclosing(self._device.open_stream(f"compute {layer}")))
            hold = stack.enter_context(soft_hold("aclrtRecordEvent"))
            transfer = stream.submit(Program().record(self._made[layer]), SOON)
            await hold.arrived()
            yield hold.release
            await transfer.wait()


async def a_later_layer_is_marked_meanwhile() -> None:
    async with fan() as made:
        before, events = made.held(0), Events(made)
        for layer in range(1, LAYERS):
            made.compute(layer)
            await events.record(layer)
        events.also[0] = lambda: events.ready(1)
        async with events.recording(0) as complete:
            task = made.blocks(events)
            events.ready(0)
            await there_and_back(made.source, made.targets[0])
            assert made.held(0) == before
            made.compute(0)
            complete()
            landed = [done.layer_index async for done in _first(task, 2)]
        for layer in range(2, LAYERS):
            events.ready(layer)
        await task
        assert landed == [0, 1]
        assert made.held(0) == made.after_blocks(0, before)


async def _first(task: CacheTask, count: int) -> AsyncIterator[LayerDone]:
    news = task.progress()
    for _ in range(count):
        yield await anext(news)


async def later_layers_are_marked_while_one_is_taken() -> None:
    """Mark each layer in the question for the one before: they travel in order, and success means that all are there."""
    async with fan() as made:
        before, events, at_end = made.held(0), Events(made), list[bytes]()
        for layer in range(LAYERS):
            made.compute(layer)
            await events.record(layer)
            if layer:
                events.also[layer - 1] = lambda layer=layer: events.ready(layer)  # type: ignore[misc]
        task = made.blocks(events)
        task.add_done_callback(lambda _: at_end.append(made.held(0)))
        events.ready(0)
        with anyio.fail_after(SOON):
            await task
            assert [done.layer_index async for done in task.progress()] == list(range(LAYERS))
        assert events.asked == [(what, layer) for layer in range(LAYERS) for what in ("asked", "answered")]
        assert at_end == [made.after_blocks(0, before)]


async def _ended_meanwhile(end: Callable[[Events, CacheTask], object]) -> None:
    async with fan() as made:
        before, events = made.held(0), Events(made)
        for layer in range(LAYERS):
            made.compute(layer)
            await events.record(layer)
        task = made.blocks(events)
        events.also[0] = lambda: end(events, task)
        events.ready(0)
        with anyio.fail_after(SOON):
            results = await task.get_results()
        assert results != [OK]
        await there_and_back(made.source, made.targets[0])
        assert made.held(0) == before
        assert made.entry.leases == 0
        await made.still_works()


async def the_transfer_is_cancelled_meanwhile() -> None:
    await _ended_meanwhile(lambda _, task: task.cancel())


async def a_later_layer_is_given_up_meanwhile() -> None:
    await _ended_meanwhile(lambda events, _: events.fail(1))


async def layers_are_computed_on_streams_of_their_own() -> None:
    """Layers that travel together wait for all of their events, which may complete in any order."""
    async with fan() as made:
        before, events = made.held(0), Events(made)
        for layer in (1, 3):
            made.compute(layer)
            await events.record(layer)
        made.compute(0)
        async with events.recording(2) as complete:
            async with events.recording(0) as first:
                task = made.blocks(events)
                for layer in range(LAYERS):
                    events.ready(layer)
                first()
                landed = [done.layer_index async for done in _first(task, 2)]
            await there_and_back(made.source, made.targets[0])
            made.compute(2)
            complete()
            await task
        assert landed == [0, 1]
        assert made.held(0) == made.after_blocks(0, before)


@KINDS
@pytest.mark.parametrize(
    "program",
    [
        a_later_layer_is_marked_meanwhile,
        later_layers_are_marked_while_one_is_taken,
        the_transfer_is_cancelled_meanwhile,
        a_later_layer_is_given_up_meanwhile,
        layers_are_computed_on_streams_of_their_own,
    ],
)
def test_events(kind: str, program: Callable[[], Coroutine[None, None, None]]) -> None:
    runner.run(kind, program)
