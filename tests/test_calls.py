"""A pull between known caches takes few calls, and the first one not many more: what one costs is mostly its calls."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import pytest
from anyio import wait_all_tasks_blocked

import aiodatadist
from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    DataType,
    Placement,
    TransferPriority,
)
from aiodatadist._cluster.heartbeat_thread import HeartbeatThread, HeartbeatWatch
from aiodatadist._concurrency import loop_time
from aiodatadist.testing import Cluster, linked_pair
from tests.strict.marks import STRICT

DESC = CacheDesc(4, [16, 1024], DataType.DT_UINT8)
OWN = aiodatadist.__path__[0]

FIRST = 220
"""A pull that asks the peer where its cache is. Both ends are in this process, so the peer's calls count, too."""
KNOWN = 110
"""A pull that finds all at hand, and learns a shortcut."""
SHORT = 20
"""A pull by a shortcut."""
SHORT_CHECKSUM = 170
"""The same with a checksum: the peer is asked for its own, and has no task for that either."""
SHORT_NOTE = SHORT + 17
"""The same with a notification. It is sent in the call, and that is most of the rest."""
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "pull_blocks": (SHORT, {}),
    "pull_blocks, deadline": (SHORT + 2, {"deadline": 5.0}),
    "pull_blocks, notification": (SHORT_NOTE, {"notify": b"request 7"}),
    "pull_blocks, checksum": (SHORT_CHECKSUM, {"checksum": True}),
    "pull_blocks, one layer": (SHORT, {}),
    "pull_blocks, packed layers": (SHORT, {"tensor_num_per_layer": 1}),
    "pull_blocks, critical": (SHORT, {"priority": TransferPriority.CRITICAL}),
    "pull_blocks by id": (SHORT, {}),
    "pull_blocks of a slot": (SHORT, {}),
    "push_blocks": (SHORT, {}),
    "push_blocks, notification": (SHORT_NOTE, {"notify": b"request 7"}),
    "push_blocks, checksum": (SHORT_CHECKSUM, {"checksum": True}),
    "push_blocks, one layer": (SHORT, {}),
    "push_blocks, packed layers": (SHORT, {"tensor_num_per_layer": 1}),
    "pull_cache": (SHORT, {}),
    "pull_cache, part": (SHORT, {"size": 1024, "src_cache_offset": 0}),
    "pull_cache, one layer": (SHORT, {}),
    "pull_cache, notification": (SHORT_NOTE, {"notify": b"request 7"}),
    "push_cache": (SHORT, {}),
    "copy_blocks": (SHORT, {}),
    "copy_cache": (SHORT, {}),
    "swap_blocks": (SHORT, {}),
}
"""The forms of a transfer: the most calls of a later one, and its words. Both ends' calls count, until it is awaited."""
short = pytest.mark.skipif(STRICT == "roce", reason="RoCE: every transfer takes its turn in one stream")


async def calls_of(operation: Callable[[], Awaitable[object]]) -> Counter[str]:
    """Count how often functions of the package were entered, or continued after an await, until the operation ended."""
    calls = Counter[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            calls[frame.f_code.co_qualname] += 1

    gc.collect()
    gc.disable()  # what another test left is not finalized here
    sys.setprofile(note)
    try:
        await operation()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def first_beats(monkeypatch: pytest.MonkeyPatch) -> asyncio.Semaphore:
    """Return a semaphore that is released when the first beat of a peer has come, once for each end of a link."""
    came, watch = asyncio.Semaphore(0), HeartbeatThread.watch

    def noting(
        thread: HeartbeatThread,
        sock: Any,
        silence: float,
        lost: Callable[[str], object],
        begun: Callable[[], object],
        *more: Any,
    ) -> HeartbeatWatch:
        def note() -> None:
            begun()
            came.release()

        return watch(thread, sock, silence, lost, note, *more)

    monkeypatch.setattr(HeartbeatThread, "watch", noting)
    return came


@asynccontextmanager
async def quiet_pair(
    monkeypatch: pytest.MonkeyPatch, desc: CacheDesc = DESC, **options: Any
) -> AsyncIterator[tuple[Cluster, Cluster, Cache, Cache]]:
    """Link two clusters in which nothing else goes on. What depends on time would be counted on a slow machine."""
    monkeypatch.setattr(loop_time, "HELD", 3600 * 10**9)  # never give way after a millisecond
    came = first_beats(monkeypatch)
    async with linked_pair(desc, heartbeat_interval=600.0, **options) as pair:
        for _ in range(2):
            await came.acquire()
        await wait_all_tasks_blocked()  # they react to it
        yield pair


@short
async def test_pulls_take_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async with quiet_pair(monkeypatch) as (_, decoder, _, target):
        manager, key = decoder.datadist.cache_manager, BlocksCacheKey(1)

        async def pull() -> None:
            assert (await manager.pull_blocks(key, target, [3, 1, 2], [0, 1, 2])).bytes == 3 * 4 * 1024

        first, known, short = await calls_of(pull), await calls_of(pull), await calls_of(pull)
        assert short.total() < known.total() < first.total()
        assert first.total() <= FIRST, first
        assert known.total() <= KNOWN, known
        assert short.total() <= SHORT, short


@short
@pytest.mark.parametrize("form", FORMS)
async def test_each_form_takes_the_short_way(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_of_slots, most, options = "cache" in form or form == "pull_blocks of a slot", *FORMS[form]
    desc = CacheDesc(4, [4, 1024], DataType.DT_UINT8)
    pools = dict.fromkeys(("mem_pool_cfg", "host_mem_pool_cfg"), '{"memory_size": 4194304}')
    async with quiet_pair(monkeypatch, desc, slots=is_of_slots, **pools) as (_, decoder, source, target):
        manager, moved = decoder.datadist.cache_manager, 4096
        key: Any = CacheKey(1, 3) if is_of_slots else BlocksCacheKey(1)
        host = await manager.allocate_blocks_cache(CacheDesc(4, [4, 1024], DataType.DT_UINT8, Placement.HOST))
        blocks = await manager.allocate_blocks_cache(desc)
        last: dict[str, Any] = {}
        whole, slot = (CacheKeyByIdAndIndex(1, source.cache_id, index) for index in (0, 3))
        if "one layer" in form:
            last = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2)}
            moved = 2048
        calls: dict[str, Callable[[], CacheTask]] = {
            "pull_blocks": lambda: manager.pull_blocks(key, target, [3], [1], **options, **last),
            "pull_blocks by id": lambda: manager.pull_blocks(whole, target, [3], [1]),
            "pull_blocks of a slot": lambda: manager.pull_blocks(key, blocks, [], [1]),
            "push_blocks": lambda: manager.push_blocks(key, target, [3], [1], **options, **last),
            "pull_cache": lambda: manager.pull_cache(key, target, 1, **options, **last),
            "push_cache": lambda: manager.push_cache(slot, target, 1, **options, **last),
            "copy_blocks": lambda: manager.copy_blocks(target, {3: [1]}),
            "copy_cache": lambda: manager.copy_cache(target, target, 1, 3),
            "swap_blocks": lambda: manager.swap_blocks(host, target, {3: 1}),
        }

        async def move() -> None:
            assert (await calls[form.partition(",")[0]]()).bytes == moved

        for _ in range(3 if "part" in form else 2):
            await move()
            await wait_all_tasks_blocked()
        found = await calls_of(move)
        assert found.total() <= most, found
