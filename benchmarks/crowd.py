"""Measure how many small pulls end in a second when 10,000 are outstanding, and how late the event loop is meanwhile.

Two clusters in this process, linked: one event loop does the work of both ends. Pulls of 4 KiB are called for at once, then
awaited:

- `request/response`: the peer writes, each pull is a request and an answer;
- `one-sided`: towards a cache that is known;
- `one-sided, not looked up yet`: the first pull of the link asks where the cache is, and so do all others.

With `--cancel`, every other pull is cancelled when all are outstanding. `late` is the most that a timer of 1 ms came late
from then on, the runs of Python's garbage collector included. The calls themselves, and the cancellations, are a loop of the
caller's without an await, which holds the event loop: `calls` is how long. `CPU` is processor time per pull, of both ends
and all threads; unlike the rest it depends little on what else the machine does. `--busy` runs so many processes that only
count.

Bars: 10,000 pulls per second and 20 ms on a quiet machine; with `--cancel --busy 4` no link is lost, and no pull fails that
was not cancelled.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
from collections import Counter
from contextlib import suppress
from time import perf_counter, process_time

from aiodatadist import BlocksCacheKey, CacheDesc, DataType
from aiodatadist._cli.bench.lateness import ticking
from aiodatadist.testing import linked_pair

BLOCKS, BLOCK = 256, 4096
DESC = CacheDesc(1, [BLOCKS, BLOCK], DataType.DT_UINT8)


def count_for_ever() -> None:
    """Keep a core busy."""
    number = 0
    while True:
        number += 1


async def crowd(count: int, is_one_sided: bool, is_known: bool, has_cancelled: bool) -> str:
    async with linked_pair(DESC, enable_remote_cache_accessible=is_one_sided, sync_kv_timeout=60_000) as pair:
        _, decoder, _, cache = pair
        pull = decoder.datadist.cache_manager.pull_blocks
        if is_known:
            await pull(BlocksCacheKey(1), cache, [0], [0])
        start, used = perf_counter(), process_time()
        tasks = [pull(BlocksCacheKey(1), cache, [i % BLOCKS], [i % BLOCKS]) for i in range(count)]
        if has_cancelled:
            for task in tasks[::2]:
                task.cancel()
        called = perf_counter() - start
        ends: Counter[str] = Counter()
        with ticking() as late:
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task.synchronize()
                error = None if task.cancelled() else task.exception()
                ends["cancelled" if task.cancelled() else "done" if error is None else type(error).__name__] += 1
        seconds, used = perf_counter() - start, process_time() - used
        is_lost = not decoder.datadist._running().links.find(1).session.is_ready
        outcome = ", ".join(f"{many} {how}" for how, many in sorted(ends.items()))
        return (
            f"{count / seconds:8.0f} pulls/s, late {1000 * max(late, default=0.0):6.1f} ms, calls {1000 * called:5.0f} ms, "
            f"CPU {1e6 * used / count:4.0f} us; {outcome}; link {'LOST' if is_lost else 'kept'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of many outstanding pulls.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cancel", action="store_true")
    parser.add_argument("--busy", type=int, default=0)
    wanted = parser.parse_args()
    loops = [multiprocessing.Process(target=count_for_ever, daemon=True) for _ in range(wanted.busy)]
    for each in loops:
        each.start()
    try:
        for name, is_one_sided, is_known in (
            ("request/response", False, False),
            ("one-sided", True, True),
            ("one-sided, not looked up yet", True, False),
        ):
            for _ in range(wanted.repeats):
                print(f"{name:30}", asyncio.run(crowd(wanted.count, is_one_sided, is_known, wanted.cancel)), flush=True)
    finally:
        for each in loops:
            each.terminate()


if __name__ == "__main__":
    main()
