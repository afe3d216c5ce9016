"""A transfer that fails is raised where it is asked for, or else logged once: never both, never neither."""

from __future__ import annotations

import asyncio
import gc
import logging

import anyio
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheNotFound, CacheTask, DataType, TransferWithCacheKeyConfig
from aiodatadist._testing.views import transfer_of
from aiodatadist.testing import Cluster, linked_pair

DESC = CacheDesc(2, [4, 64], DataType.DT_UINT8)
MISSING = BlocksCacheKey(1, 77)


def failing(cluster: Cluster, cache: Cache) -> CacheTask:
    """Pull from a cache that the peer does not have, which it must be asked for."""
    return cluster.datadist.cache_manager.pull_blocks(MISSING, cache, [0], [0])


FAILING_LINE = failing.__code__.co_firstlineno + 2


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("aiodatadist")
    ]


async def ended(task: CacheTask) -> None:
    """Wait for the end of a task without asking how it ended."""
    over = anyio.Event()
    task.add_done_callback(lambda _: over.set())
    await over.wait()


async def test_what_is_awaited_is_raised_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        with pytest.raises(CacheNotFound):
            await failing(decoder, cache)
        assert told(caplog) == []


@pytest.mark.parametrize("ask", ["exception", "result", "get_results", "synchronize", "callback"])
async def test_what_is_asked_for_is_not_logged(ask: str, caplog: pytest.LogCaptureFixture) -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        task = failing(decoder, cache)
        if ask == "callback":
            task.add_done_callback(lambda done: done.exception())
            await ended(task)
        elif ask in {"get_results", "synchronize"}:
            await getattr(task, ask)()
        else:
            await ended(task)
            with pytest.raises(CacheNotFound):
                raise getattr(task, ask)()
        del task
        assert told(caplog) == []


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_is_dropped_is_logged_once(when: str, caplog: pytest.LogCaptureFixture) -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        task = failing(decoder, cache)
        over = anyio.Event()
        if when == "after":
            await ended(task)
            over.set()
        else:
            transfer_of(task).add_done_callback(lambda _: over.set())  # a callback of the task's would keep it alive
        del task
        await over.wait()
        (line,) = told(caplog)
        assert line.startswith(
            "pull_blocks with cluster 1 failed, and its exception was never retrieved: CacheNotFound: "
        )
        assert "offers no cache for" in line  # why it failed
        assert "[LLM_KV_CACHE_NOT_EXIST]" in line
        assert line.endswith(f"; it was started at {__file__}:{FAILING_LINE}, in failing")


async def test_in_asyncios_debug_mode_all_lines_that_led_there_are_told(caplog: pytest.LogCaptureFixture) -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        asyncio.get_running_loop().set_debug(True)
        task = failing(decoder, cache)
        await ended(task)
        del task
        (line,) = told(caplog)
        _, _, lines = line.partition("; it was started at (most recent call last):\n")
        assert lines.splitlines()[-1].strip().startswith("return cluster.datadist.cache_manager.pull_blocks(")
        assert "task = failing(decoder, cache)" in lines


async def test_what_caused_a_failure_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """A synchronizer that raises is the caller's own code: the log shows where it did."""

    class Broken:
        async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            raise ZeroDivisionError("no such layer")

    async with linked_pair(DESC) as (_, decoder, _, cache):
        config = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(1))
        task = decoder.datadist.cache_manager.transfer_cache_async(cache, Broken(), [config], [0], [0])
        await ended(task)
        del task
        (line,) = told(caplog)
        assert "its exception was never retrieved: TransferError: " in line
        assert f"; it was started at {__file__}:" in line
        assert "in synchronize_layer" in caplog.text
        assert "ZeroDivisionError: no such layer" in caplog.text


async def test_a_transfer_that_a_callback_of_the_loop_started_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        over = anyio.Event()

        def begin() -> None:
            transfer_of(failing(decoder, cache)).add_done_callback(lambda _: over.set())

        asyncio.get_running_loop().call_soon(begin)
        await over.wait()
        (line,) = told(caplog)
        assert line.endswith(f":{FAILING_LINE}, in failing")


async def test_a_cancelled_one_that_is_dropped_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        task = failing(decoder, cache)
        task.cancel()
        await ended(task)
        assert task.cancelled()
        del task
        assert told(caplog) == []
