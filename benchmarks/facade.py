"""Measure what a call costs in a busy loop that does not await.

Two clusters in this process, linked; the calls are made by the main thread, the event loop runs in its own. Every row has its
budget, for a machine of two cores: a submission at most 50 us plus 1 us per 16 blocks, a drain of nothing at most 20 us.
`idle`: one submission after the other has ended, so that each wakes the loop. `burst`: 32 in a row, which share wake-ups.
`beside`: each while 64 MiB are being pulled. `after work`: the first one after 10 ms in which this thread went over 8 MiB of
its own, which the processor's caches are full of then. For scale, the blocking call of the same transfer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep
from typing import Any

import numpy as np

from aiodatadist.blocking import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheManager,
    DataType,
    Handle,
    HandleState,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from benchmarks.common import Spread, arguments, now, percentile, report

SMALL = CacheDesc(2, [2048, 64], DataType.DT_UINT8)
LARGE = CacheDesc(2, [32, 1 << 20], DataType.DT_UINT8)
BURST = 32
BESIDE = 8
"""Submissions, which are over before 64 MiB are."""
WORK = 0.01
"""Seconds between two turns of a busy caller."""
LAYERS = 64
LAYERED = CacheDesc(2 * LAYERS, [4, 64], DataType.DT_UINT8)
NEVER = 10.0
"""Seconds: longer than anything here takes."""
PERCENTILES = {"median": 50, "p90": 90, "p99": 99}


@dataclass
class Ends:
    """Caches of cluster 2, which pulls by keys of the same model id from cluster 1."""

    datadist: LLMDataDist
    source: LLMDataDist
    caches: list[Cache]
    source_caches: list[Cache]

    @property
    def manager(self) -> CacheManager:
        return self.datadist.cache_manager

    def submit(self, blocks: list[int], model: int = 0) -> Handle:
        return self.manager.submit_pull_blocks(BlocksCacheKey(1, model), self.caches[model], blocks, blocks)


def initialised(cluster_id: int) -> LLMDataDist:
    config = LLMConfig(enable_cache_manager=True, enable_remote_cache_accessible=True, sync_kv_timeout=10_000)
    config.device_id = cluster_id - 1
    config.listen_ip_info = "127.0.0.1:0"
    datadist = LLMDataDist(LLMRole.MIX, cluster_id)
    datadist.init(config.generate_options())
    return datadist


@contextmanager
def linked() -> Iterator[Ends]:
    datadists = [initialised(1), initialised(2)]
    try:
        caches: list[list[Cache]] = [[], []]
        for datadist, made in zip(datadists, caches, strict=True):
            for model, desc in enumerate((SMALL, LARGE, LAYERED)):
                tensors = [np.zeros(desc.shape, np.uint8) for _ in range(desc.num_tensors)]
                key = BlocksCacheKey(datadist.cluster_id, model)
                made.append(datadist.cache_manager.register_blocks_cache(desc, tensors, key))
        info = LLMClusterInfo(1)
        info.append_remote_ip_info(*(datadists[0].listen_address or ("", 0)))
        status, _ = datadists[1].link_clusters([info])
        if status is not LLMStatusCode.LLM_SUCCESS:
            raise SystemExit(f"the clusters could not be linked: {status.name}")
        yield Ends(datadists[1], datadists[0], caches[1], caches[0])
    finally:
        for datadist in datadists:
            datadist.finalize()


def row(name: str, seconds: list[float], budget: float | None = None) -> dict[str, Any]:
    percentiles = {f"{word} us": percentile(seconds, at) * 1e6 for word, at in PERCENTILES.items()}
    return {"what": name, **percentiles, "budget us": budget}


def spread_of(rounds: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the rows of several rounds into one table: median and quartiles of the rounds' percentiles."""
    return [
        {**same[0], **{f"{word} us": Spread.of([row[f"{word} us"] for row in same]) for word in PERCENTILES}}
        for same in zip(*rounds, strict=True)
    ]


def timed(call: Callable[[], object], count: int, between: Callable[[], object] | None = None) -> list[float]:
    seconds = []
    for _ in range(count):
        start = now()
        call()
        seconds.append(now() - start)
        if between is not None:
            between()
    return seconds


def submissions(ends: Ends, count: int) -> Iterator[dict[str, Any]]:
    for blocks in (1, 64, 1024):
        numbers = list(range(0, 2 * blocks, 2))
        budget = 50 + blocks // 16
        last: list[Handle] = []

        def submit(numbers: list[int] = numbers, last: list[Handle] = last) -> None:
            last[:] = [ends.submit(numbers)]

        def settle(last: list[Handle] = last) -> None:
            last[0].wait(NEVER)
            ends.manager.drain()

        timed(submit, count // 10, settle)
        gc.collect()  # not within a row: what comes next would find the processor's caches without what it needs
        yield row(f"submit a pull of {blocks} blocks, idle", timed(submit, count, settle), budget)
        bursts: list[float] = []
        for _ in range(max(1, count // BURST)):
            bursts += timed(submit, BURST)
            settle()
        yield row(f"submit a pull of {blocks} blocks, burst", bursts, budget)
        yield row(f"submit a pull of {blocks} blocks, beside", beside(ends, submit, settle, count), budget)
        firsts: list[float] = []
        for _ in range(max(1, count // 10)):
            work(WORK)
            firsts += timed(submit, 1)
            settle()
        yield row(f"submit a pull of {blocks} blocks, after work", firsts, budget)

    def call() -> None:
        ends.manager.pull_blocks(BlocksCacheKey(1), ends.caches[0], [0], [0])

    yield row("call pull_blocks of 1 block, and wait", timed(call, count))


def beside(ends: Ends, submit: Callable[[], object], settle: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of the submissions that began while a pull of 64 MiB was under way. All count as submitted."""
    seconds: list[float] = []
    for _ in range(max(1, count // BESIDE)):
        large = ends.submit(list(range(32)), 1)
        while large.poll() is HandleState.PENDING:
            sleep(0)  # the loop's thread gets the interpreter's lock
        for _ in range(BESIDE):
            if large.poll() is HandleState.RUNNING:
                seconds += timed(submit, 1)
        large.wait(NEVER)
        settle()
    if not seconds:
        raise SystemExit("each pull of 64 MiB was over before the submissions beside it")
    return seconds


def work(seconds: float) -> None:
    """Compute for at least this time."""
    own, end = np.ones(8 << 20, np.uint8), now() + seconds
    while now() < end:
        own.sum()


def questions(ends: Ends, count: int) -> Iterator[dict[str, Any]]:
    handle = ends.submit([0])
    handle.wait(NEVER)
    yield row("handle.done()", timed(handle.done, count))
    yield row("handle.poll()", timed(handle.poll, count))
    ends.manager.drain()
    yield row("drain() of nothing", timed(ends.manager.drain, count), 20)
    each: list[float] = []
    for _ in range(max(1, count // 100)):
        handles = [ends.submit([i]) for i in range(100)]
        handles[-1].wait(NEVER)
        start = now()
        drained = ends.manager.drain()
        each.append((now() - start) / len(drained))
    yield row("drain(), for each of 100", each)
    yield row("stats()", timed(ends.datadist.stats, count))


def layers(ends: Ends, count: int) -> Iterator[dict[str, Any]]:
    everything = range(LAYERS)
    ready: list[float] = []
    here: list[float] = []
    for _ in range(max(1, count // LAYERS // 4)):
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2, 2), everything, everything)
        with ends.manager.receive_layers(1, ends.caches[2]) as receiver:
            handle = ends.source.cache_manager.submit_layers(ends.source_caches[2], [config], [0, 1], [1, 0])
            for layer in everything:
                start = now()
                handle.layer_ready(layer)
                ready.append(now() - start)
            receiver.wait_layer(LAYERS - 1, NEVER)
            here += [timed(lambda layer=layer: receiver.wait_layer(layer, NEVER), 1)[0] for layer in everything]  # type: ignore[misc]
        handle.wait(NEVER)
        ends.source.cache_manager.drain()
    yield row("layer_ready()", ready, 50)
    yield row("wait_layer() of one that is here", here)


def closing() -> list[float]:
    with linked() as ends:
        for i in range(100):
            ends.submit([i])
        return timed(lambda: ends.datadist.close(drain=NEVER), 1)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--count", type=int, default=2000, help="of each call, in a round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with linked() as ends:
        rounds = [
            [row for part in (submissions, questions, layers) for row in part(ends, args.count)]
            for _ in range(args.rounds)
        ]
    closings = [[row("close(), 100 submitted", closing())] for _ in range(args.rounds)]
    rows = [*spread_of(rounds), *spread_of(closings)]
    report("facade: calls of a loop that does not await, each round's percentiles", rows, args.json)


if __name__ == "__main__":
    main()
