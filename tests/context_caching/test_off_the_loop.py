"""A context cache from where no event loop is: every call says the rule, and the cache goes on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiodatadist.context_caching import (
    ContextCache,
    EmsException,
    EmsForkError,
    EmsInvalidArgument,
    MemoryPool,
    open_pool,
)
from tests import children
from tests.context_caching.fakes import Foreign
from tests.context_caching.kit import ROOM, Kv, by_slots, opened, rank
from tests.off_loop import Raised, in_child, in_thread

SLOTS = by_slots([0])
Call = Callable[[], Any]


def calls_of(cache: ContextCache, kv: Kv) -> dict[str, Call]:
    """Return the calls that only the event loop may make, with valid arguments."""
    buffers = [[np.zeros(64, np.uint8)]]
    return {
        "register_kvcache": lambda: cache.register_kvcache(kv.layers),
        "unregister_kvcache": cache.unregister_kvcache,
        "check_registered": cache.check_registered,
        "save": lambda: cache.save([1], **SLOTS),
        "start_save": lambda: cache.start_save([1], **SLOTS),
        "load": lambda: cache.load([1], **SLOTS),
        "start_load": lambda: cache.start_load([1], **SLOTS),
        "save_values": lambda: cache.save_values(["a"], buffers),
        "start_save_values": lambda: cache.start_save_values(["a"], buffers),
        "load_values": lambda: cache.load_values(["a"], buffers),
        "start_load_values": lambda: cache.start_load_values(["a"], buffers),
        "exists": lambda: cache.exists([1]),
        "match_prefix": lambda: cache.match_prefix([1]),
        "remove": lambda: cache.remove([1]),
        "remove_values": lambda: cache.remove_values(["a"]),
        "check_health": cache.check_health,
    }


def check(calls: dict[str, Call], errors: list[Raised], kind: type[EmsException], words: str) -> None:
    for name, error in zip(calls, errors, strict=True):
        assert error, f"{name} was carried out"
        assert error[0] is kind, (name, error)
        assert words in error[1], (name, error)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_calls_of_a_cache_off_its_loop_are_told_the_rule() -> None:
    kv = Kv()
    async with opened("memory:", kv) as cache:
        calls = calls_of(cache, kv)
        check(
            calls,
            in_child(list(calls.values())),
            EmsForkError,
            f"opened before a fork, in process {os.getpid()}: this is",
        )
        calls["aclose"] = cache.aclose
        check(calls, await in_thread(list(calls.values())), EmsInvalidArgument, "there is no event loop here")
        assert (await cache.save([1], **SLOTS)).success == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_transfer_under_way_off_its_loop_is_told_the_rule() -> None:
    go_on = asyncio.Event()
    async with await MemoryPool.open(ROOM) as memory:
        pool = Foreign(memory)
        pool.misdeeds["exists_many"] = go_on.wait
        async with opened(pool, Kv()) as cache:
            transfer = cache.start_save([1], **SLOTS)
            calls: dict[str, Call] = {
                "await": lambda: transfer,
                "cancel": transfer.cancel,
                "quiesced": transfer.quiesced,
            }
            check(
                calls,
                in_child(list(calls.values())),
                EmsForkError,
                f"started before a fork, in process {os.getpid()}: this is its child, process ",
            )
            check(calls, await in_thread(list(calls.values())), EmsInvalidArgument, "there is no event loop here")
            go_on.set()
            assert (await transfer).success == 1


async def test_nothing_is_opened_where_no_loop_is() -> None:
    calls: dict[str, Call] = {
        "ContextCache.open": lambda: ContextCache.open(rank(), "memory:"),
        "open_pool": lambda: open_pool("memory:"),
        "MemoryPool.open": lambda: MemoryPool.open(ROOM),
    }
    check(calls, await in_thread(list(calls.values())), EmsInvalidArgument, "no event loop runs in this thread")


CHILD = """
import asyncio, os, sys
from tests.context_caching.fakes import Foreign, never
from tests.context_caching.kit import ROOM, Kv, by_slots, opened
from aiodatadist.context_caching import MemoryPool

async def main():
    async with await MemoryPool.open(ROOM) as inner:
        pool = Foreign(inner)
        async with opened(pool, Kv()) as cache:
            pool.misdeeds["put_many"] = never
            transfer = cache.start_save([1], **by_slots([0]))
            waiter = asyncio.create_task(waits_for(transfer))
            await asyncio.sleep(0)
            pid = os.fork()
            if not pid:
                sys.exit(0)
            await asyncio.to_thread(os.waitpid, pid, 0)
            assert not transfer.done()
            transfer.cancel()
            await asyncio.wait([waiter])

async def waits_for(transfer):
    return await transfer

asyncio.run(main())
"""


def test_a_child_that_leaves_is_cancelled_where_it_waits_for_a_save() -> None:
    done = children.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert "EmsForkError" not in done.stderr, done.stderr
