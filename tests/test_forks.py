"""A forked child, and a thread without an event loop: what they are told, and what they leave alone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMException, LLMRole
from aiodatadist.testing import linked_pair
from tests import children

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)

CHILD = """
import asyncio, os, sys
from aiodatadist import BlocksCacheKey, CacheDesc, DataType, ForkError
from aiodatadist.testing import linked_pair

def child(decoder, manager, cache):
    for call in (
        lambda: manager.pull_blocks(BlocksCacheKey(1), cache, [1], [5]),
        lambda: manager.copy_blocks(cache, {1: [2]}),
        lambda: manager.pool_usage(),
        lambda: decoder.datadist.cache_manager,
        lambda: decoder.datadist.notify(1, b"x").send(None),
    ):
        try:
            call()
        except ForkError:
            continue
        os._exit(3)
    sys.exit(0)

async def main():
    async with linked_pair(CacheDesc(2, [8, 4096], DataType.DT_UINT8)) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        await manager.pull_blocks(BlocksCacheKey(1), cache, [1], [5])
        pid = os.fork()
        if not pid:
            child(decoder, manager, cache)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        # a child that runs libuv's loop once more does not find the memory that the parent shares with the kernel
        assert os.waitstatus_to_exitcode(status) in ([0] if "uvloop" not in sys.modules else [0, -11])
        await decoder.datadist.check_link_status(1)
        report = await manager.pull_blocks(BlocksCacheKey(1), cache, range(8), range(8))
        assert report.bytes == 16 * 4096, report
        print("the parent goes on")
"""


@pytest.mark.parametrize("run", ["asyncio.run(main())", "import uvloop; uvloop.run(main())"], ids=["asyncio", "uvloop"])
def test_child_that_leaves_through_exit_takes_nothing_of_the_parents(run: str) -> None:
    script = f"{CHILD}\n{run}"
    done = children.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "the parent goes on\n"), done.stderr
    assert "Traceback" not in done.stderr


SAYS = """
import asyncio, os, pathlib
from aiodatadist import CacheDesc, DataType
from aiodatadist.testing import linked_pair
from aiodatadist._wire.messages import Disconnect

def rings():
    return pathlib.Path("/proc/self/maps").read_text().count("anon_inode:[io_uring]")

async def main():
    async with linked_pair(CacheDesc(2, [8, 4096], DataType.DT_UINT8)) as (_, decoder, _, cache):
        link = decoder.datadist._engine.links.find(1)
        pid = os.fork()
        if not pid:
            link._wire.post(Disconnect(reason="the child says so"))
            os._exit(rings())
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        await decoder.datadist.check_link_status(1)
        print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("run", ["asyncio.run(main())", "import uvloop; uvloop.run(main())"], ids=["asyncio", "uvloop"])
def test_a_child_says_nothing_to_peers_and_has_no_memory_that_the_parents_loop_shares_with_the_kernel(run: str) -> None:
    script = f"{SAYS}\n{run}"
    done = children.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


async def test_calls_from_a_thread_without_a_loop_say_the_rule() -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        datadist, manager = decoder.datadist, decoder.datadist.cache_manager
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: manager.pull_blocks(BlocksCacheKey(1), cache, [1], [5]),
            lambda: manager.copy_blocks(cache, {1: [2]}),
            lambda: manager.unregister_cache(cache.cache_id),
            lambda: datadist.notify(1, b"x"),
            lambda: datadist.check_link_status(1),
            lambda: datadist.link_clusters([]),
            datadist.finalize,
            lambda: LLMDataDist(LLMRole.PROMPT, 7).init(),
        ]
        for call in calls:
            with pytest.raises(
                LLMException, match=r"no event loop runs in this thread: cluster . can be used only on the event"
            ):
                await asyncio.to_thread(lambda call=call: call().__await__().send(None))  # type: ignore[misc]
        assert (await manager.pull_blocks(BlocksCacheKey(1), cache, [1], [5])).bytes == 2 * 4096


WAITER = """
import asyncio, os, sys
from aiodatadist import BlocksCacheKey, CacheDesc, DataType
from aiodatadist.testing import linked_pair, soft_hold

async def main():
    desc = CacheDesc(2, [8, 4 << 20], DataType.DT_UINT8)
    async with linked_pair(desc, sync_kv_timeout=40_000) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        await manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        with soft_hold("HcclBatchGet", at="half") as hold:
            task = manager.pull_blocks(BlocksCacheKey(1), cache, range(8), range(8))
            waiter = asyncio.create_task(waits_for(task))
            await hold.arrived()
            pid = os.fork()
            if not pid:
                sys.exit(0)
            await asyncio.to_thread(os.waitpid, pid, 0)  # it does not wait for the transfer, which moves on after it
        print((await waiter).bytes)

async def waits_for(task):
    return await task
"""


@pytest.mark.parametrize("run", ["asyncio.run(main())", "import uvloop; uvloop.run(main())"], ids=["asyncio", "uvloop"])
def test_child_that_leaves_does_not_stop_a_transfer_that_is_waited_for(run: str) -> None:
    script = f"{WAITER}\n{run}"
    done = children.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, f"{64 << 20}\n"), done.stderr
    assert "Traceback" not in done.stderr
