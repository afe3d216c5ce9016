"""A transfer under way, handed to where its event loop is not: it says the rule, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, CacheNotFound, CacheTask, DataType, ForkError, LLMException
from aiodatadist.testing import linked_pair
from tests.off_loop import Raised, in_child, in_thread

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
Call = Callable[[], Any]


async def in_another_loop(calls: Sequence[Call]) -> list[Raised]:
    """Return what each call raises in another event loop than the caller's."""

    async def here(call: Call) -> None:
        made = call()
        if isinstance(made, Awaitable):
            await made
        elif made is not None:
            await anext(made)

    return await in_thread([lambda call=call: asyncio.run(here(call)) for call in calls])  # type: ignore[misc]


async def in_forked_child(calls: Sequence[Call]) -> list[Raised]:
    return in_child(calls)


@pytest.mark.parametrize(
    ("elsewhere", "kind", "rule"),
    [
        (in_thread, LLMException, "no event loop runs in this thread: cluster 2 can be used only on the event loop"),
        (in_another_loop, LLMException, "cluster 2 belongs to another event loop"),
        (in_forked_child, ForkError, "initialised before a fork"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_only_its_event_loop_waits_for_a_transfer_or_stops_it(
    elsewhere: Callable[[Sequence[Call]], Awaitable[list[Raised]]], kind: type[LLMException], rule: str
) -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1, 77), cache, [1], [5])
        assert not task.done(), "the peer is asked for a cache that it does not have"
        calls: dict[str, Call] = {
            "await": lambda: task,
            "cancel": task.cancel,
            "add_done_callback": lambda: task.add_done_callback(lambda _: None),
            "synchronize": lambda: task.synchronize(1000),
            "get_results": task.get_results,
            "progress": lambda: aiter(task.progress()),
        }
        for name, error in zip(calls, await elsewhere(list(calls.values())), strict=True):
            assert error, f"{name} was carried out"
            assert issubclass(error[0], kind), (name, error)
            assert rule in error[1], (name, error)
        with pytest.raises(CacheNotFound):
            await task


async def test_a_transfer_can_be_asked_how_it_is_from_anywhere() -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        task: CacheTask = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [5])
        await task
        questions: list[Call] = [task.done, task.cancelled, task.exception, task.result]
        assert await in_thread(questions) == [None] * 4
