"""A pull between known caches takes few calls, and the first one not many more: what one costs is mostly its calls."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import pytest
from anyio import wait_all_tasks_blocked

import aiodatadist
from aiodatadist import BlocksCacheKey, CacheDesc, DataType
from aiodatadist._cluster.heartbeat_thread import HeartbeatThread, HeartbeatWatch
from aiodatadist._concurrency import loop_time
from aiodatadist.testing import linked_pair
from tests.strict.marks import STRICT

DESC = CacheDesc(4, [16, 1024], DataType.DT_UINT8)
OWN = aiodatadist.__path__[0]

FIRST = 220
"""A pull that asks the peer where its cache is. Both ends are in this process, so the peer's calls count, too."""
KNOWN = 110
"""A pull that finds all at hand, and learns a shortcut."""
SHORT = 20
"""A pull by a shortcut."""


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


@pytest.mark.skipif(STRICT == "roce", reason="RoCE: every transfer takes its turn in one stream")
async def test_pulls_take_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # What depends on time would be counted on a slow machine: heartbeats, and giving way after a millisecond.
    monkeypatch.setattr(loop_time, "HELD", 3600 * 10**9)
    came = first_beats(monkeypatch)
    async with linked_pair(DESC, heartbeat_interval=600.0) as (_, decoder, _, target):
        for _ in range(2):
            await came.acquire()
        await wait_all_tasks_blocked()  # they react to it
        manager, key = decoder.datadist.cache_manager, BlocksCacheKey(1)

        async def pull() -> None:
            assert (await manager.pull_blocks(key, target, [3, 1, 2], [0, 1, 2])).bytes == 3 * 4 * 1024

        first, known, short = await calls_of(pull), await calls_of(pull), await calls_of(pull)
        assert short.total() < known.total() < first.total()
        assert first.total() <= FIRST, first
        assert known.total() <= KNOWN, known
        assert short.total() <= SHORT, short
