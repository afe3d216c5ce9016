"""Models compute in threads, and say there that a layer is ready: the transfer hears of it, as if the loop had said so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import anyio
import pytest

from aiodatadist import AwaitableLayerSynchronizer, EventLayerSynchronizer, LLMStatusCode, ParamInvalid
from aiodatadist._layered.synchronizers import marks_of
from tests.test_layered import LAYERS, OK, computing_stream, fan, modes


def ready_in_a_row(synchronizer: AwaitableLayerSynchronizer) -> None:
    for layer in range(LAYERS):
        synchronizer.ready(layer)


@modes
@pytest.mark.parametrize("waits", [False, True], ids=["before it was found", "when it waits"])
async def test_layers_that_a_thread_says_arrive(one_sided: bool, waits: bool) -> None:
    async with fan(count=2, one_sided=one_sided) as made:
        before = [made.held(i) for i in range(2)]
        for _ in range(20):
            synchronizer = AwaitableLayerSynchronizer(LAYERS)
            for layer in range(LAYERS):
                made.compute(layer)
            task = made.blocks(synchronizer)
            if waits:
                await anyio.wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(ready_in_a_row, synchronizer)
            with anyio.fail_after(20):
                assert await task.get_results() == [OK, OK]
            assert [made.held(i) for i in range(2)] == [made.after_blocks(i, before[i]) for i in range(2)]


async def test_a_thread_that_goes_on_while_transfers_begin_is_never_missed() -> None:
    """Report layers while the loop begins the transfer, looks for layers already reported, and listens."""
    async with fan() as made:
        for _ in range(200):
            synchronizer = AwaitableLayerSynchronizer(LAYERS)
            thread = threading.Thread(target=ready_in_a_row, args=(synchronizer,))
            thread.start()
            task = made.blocks(synchronizer)
            with anyio.fail_after(20):
                await task
            thread.join()


@modes
async def test_a_layer_that_a_thread_gives_up_ends_the_transfer(one_sided: bool) -> None:
    async with fan(one_sided=one_sided) as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        task = made.blocks(synchronizer)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(synchronizer.fail, 0)
        with anyio.fail_after(20):
            assert await task.get_results() == [LLMStatusCode.LLM_PARAM_INVALID]


async def test_a_task_that_waits_for_a_layer_hears_a_thread() -> None:
    synchronizer = AwaitableLayerSynchronizer(LAYERS)
    waiting = asyncio.create_task(synchronizer.synchronize_layer(2))
    await asyncio.sleep(0)
    await anyio.to_thread.run_sync(synchronizer.ready, 2)
    with anyio.fail_after(20):
        assert await waiting


async def test_what_a_thread_says_wrongly_is_refused_there() -> None:
    synchronizer = AwaitableLayerSynchronizer(LAYERS)
    with pytest.raises(ParamInvalid, match=f"layer_index is {LAYERS}: there are {LAYERS} layers"):
        await anyio.to_thread.run_sync(synchronizer.ready, LAYERS)


def test_after_the_end_of_the_loop_a_thread_is_not_disturbed() -> None:
    synchronizer = AwaitableLayerSynchronizer(LAYERS)
    marks = marks_of(synchronizer)
    assert marks is not None

    async def listen() -> None:
        marks.listen(lambda: None)

    asyncio.run(listen())
    synchronizer.ready(1)
    assert marks.said(1)


async def test_gates_are_opened_by_the_loop_alone() -> None:
    async with fan() as made, computing_stream(made) as compute:
        before = made.held(0)
        synchronizer = EventLayerSynchronizer(made.source.datadist.device, LAYERS)
        task, stream = made.blocks(synchronizer), compute.stream  # type: ignore[attr-defined]
        for layer in range(LAYERS):
            compute(layer)
        with pytest.raises(ParamInvalid, match=r"record was called in another thread.*call_soon_threadsafe"):
            await anyio.to_thread.run_sync(synchronizer.record, 0, stream)

        def record_all(post: Callable[..., object]) -> None:
            for layer in range(LAYERS):
                post(synchronizer.record, layer, stream)

        await anyio.to_thread.run_sync(record_all, asyncio.get_running_loop().call_soon_threadsafe)
        with anyio.fail_after(20):
            await task
        assert made.held(0) == made.after_blocks(0, before)
