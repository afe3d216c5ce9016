"""Rows of memory and processes."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import threading
import warnings
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheManager,
    DataType,
    ForkError,
    LLMException,
    OutOfMemory,
)
from aiodatadist.context_caching import CcConfig_v1, ContextCache
from aiodatadist.testing import BlockLedger, Cluster, MisplacedError, cluster_info, linked_pair, open_cluster
from benchmarks.common import now
from benchmarks.reliability_rows import (
    MIB,
    Figure,
    descriptors,
    figure,
    resident,
    threads,
    usual,
    worst,
)

DESC = CacheDesc(4, [64, 16 << 10], DataType.DT_UINT8)
POOL = {"memory_size": 8 << 20}
KEY, BLOCKS = BlocksCacheKey(1), list(range(64))


async def full_pool(short: bool) -> Figure:
    """Measure row R10: a pool has room for two caches; further ones wait until caches are given back, in turn."""
    waiters, told = (10 if short else 100), list[float]()
    async with open_cluster(1, mem_pool_cfg=POOL) as cluster:
        manager = cluster.datadist.cache_manager
        caches = [await manager.allocate_blocks_cache(DESC) for _ in range(2)]
        for _ in range(waiters):
            began = now()
            with suppress(OutOfMemory):
                await manager.allocate_blocks_cache(DESC)
                raise AssertionError("a full pool has room")
            told.append(now() - began)
        order: list[int] = []
        waits: list[float] = []
        given_back = 0.0

        async def wait(number: int) -> None:
            nonlocal given_back
            cache = await manager.allocate_blocks_cache(DESC, timeout=60)
            waits.append(now() - given_back)
            order.append(number)
            given_back = now()
            await manager.deallocate_blocks_cache(cache)

        async with anyio.create_task_group() as group:
            for number in range(waiters):
                group.start_soon(wait, number)
                await asyncio.sleep(0)
            given_back = now()
            await manager.deallocate_blocks_cache(caches.pop())
        free = {usage.total - usage.free for usage in manager.pool_usage().values()}
    in_order = order == list(range(waiters))
    return figure(
        "R10", "in order, 100 ms", in_order and max(waits) <= 0.1 and free == {DESC.size * DESC.num_tensors},
        usual(told), waiters, sum(1 for number, each in enumerate(order) if number == each), usual(waits), worst(waits),
    )  # fmt: skip


async def misuse(short: bool) -> Figure:
    """Measure row R11."""
    rounds, refused, tried = (2 if short else 50), 0, 0
    async with open_cluster(1, mem_pool_cfg=POOL) as cluster, open_cluster(2, device_id=1, mem_pool_cfg=POOL) as other:
        manager = cluster.datadist.cache_manager
        before = manager.pool_usage()
        for _ in range(rounds):
            managers = (manager, other.datadist.cache_manager)
            cache, theirs = [await each.allocate_blocks_cache(DESC) for each in managers]
            copy = Cache(cache.cache_id, DESC, list(cache.tensor_addrs), True)
            ledger = BlockLedger(copy, 1)
            ledger.write(range(64))
            moved = Cache(cache.cache_id, DESC, [1, 2, 3, 4], True)
            calls: list[Callable[[], Any]] = [
                partial(manager.copy_blocks, theirs, {0: [1]}),
                partial(manager.deallocate_blocks_cache, theirs),
                partial(manager.deallocate_cache, cache),
                partial(manager.copy_blocks, cache, {0: [64]}),
                partial(manager.copy_blocks, moved, {0: [1]}),
            ]
            refused += sum([await _is_refused(call) for call in calls])
            tried += len(calls)
            assert ledger.wrong() == [], "misuse has changed a byte"
            await manager.deallocate_blocks_cache(cache)
            await manager.deallocate_blocks_cache(cache)  # twice: it is left alone
            calls = [partial(manager.copy_blocks, copy, {0: [1]}), partial(manager.arrays, cache)]
            refused += sum([await _is_refused(call) for call in calls])
            tried += len(calls)
            await other.datadist.cache_manager.deallocate_blocks_cache(theirs)
        is_same = manager.pool_usage() == before
    return figure("R11", "all", refused == tried and is_same, refused, tried)


async def _is_refused(call: Callable[[], Any]) -> bool:
    try:
        made = call()
        if isinstance(made, Awaitable):
            await made
    except (LLMException, TypeError, ValueError):
        return True
    return False


async def key_races(short: bool) -> Figure:
    """Measure row R12: tasks save, remove and load the same eight keys, each time with another version."""
    turns, tokens, row = (20 if short else 300), 16, 1024
    whole = missed = mixed = 0
    desc = CacheDesc(2, [64, tokens * row], DataType.DT_UINT8)
    memory = [memoryview(bytearray(desc.size)) for _ in range(2)]
    ledger = BlockLedger(Cache(1, desc, [0, 0], True), 1, views=memory)
    config = CcConfig_v1(rank_id=0, device_id=0, model_id="races")
    async with await ContextCache.open(config, "memory:") as cache:
        await cache.register_kvcache([[each.cast("B", [64, tokens, row]) for each in memory]])

        async def turn(mine: int) -> None:
            nonlocal whole, missed, mixed
            chance, versions = random.Random(mine), 0
            for _ in range(turns):
                key, way = 1 + chance.randrange(8), chance.random()
                chunks = [[(tokens * mine, tokens)]]
                if way < 0.4:
                    versions += 1
                    ledger.write_as(mine, mine, key, versions)
                    await cache.save([key], chunks=chunks)
                elif way < 0.5:
                    await cache.remove([key])
                elif (await cache.load([key], chunks=chunks)).success:
                    try:
                        _want_whole(ledger, mine, key)
                        whole += 1
                    except MisplacedError:
                        mixed += 1
                else:
                    missed += 1

        async with anyio.create_task_group() as group:
            for mine in range(16):
                group.start_soon(turn, mine)
    return figure("R12", "0 mixes", mixed == 0 and whole > 0, whole + missed + mixed, whole, missed, mixed)


def _want_whole(ledger: BlockLedger, block: int, key: int) -> None:
    """Check that the block was written by one writer in one version, whichever they are."""
    writer = int.from_bytes(ledger.piece(0, block)[8:12], "little")
    ledger.landed([block], writer, [key])


def _child(cluster: Cluster, manager: CacheManager, cache: Cache) -> int:
    calls: list[Callable[[], object]] = [
        lambda: manager.pull_blocks(KEY, cache, [1], [5]),
        lambda: manager.copy_blocks(cache, {1: [2]}),
        manager.pool_usage,
        lambda: cluster.datadist.cache_manager,
        lambda: cluster.datadist.notify(1, b"x").send(None),
    ]
    told = 0
    for call in calls:
        with suppress(ForkError):
            call()
            continue
        told += 1
    return told


async def forked(short: bool) -> Figure:
    """Measure row R20."""
    children, told, moved = (2 if short else 20), 0, 0
    async with linked_pair(DESC) as (_, decoder, source, cache):
        manager, ledger = decoder.datadist.cache_manager, BlockLedger(cache, 2)
        BlockLedger(source, 1).write(range(64))
        for _ in range(children):
            under_way = manager.pull_blocks(KEY, cache, BLOCKS, BLOCKS)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                os._exit(_child(decoder, manager, cache))
            _, status = await anyio.to_thread.run_sync(os.waitpid, pid, 0)
            told += os.waitstatus_to_exitcode(status)
            moved += (await under_way).bytes
            ledger.landed(BLOCKS, 1, BLOCKS)
    return figure(
        "R20", "all", told == 5 * children and moved == children * 4 * DESC.size, told, 5 * children, children
    )


async def ten_thousand(short: bool) -> Figure:
    """Measure row R21."""
    links, pulls = (20, 500) if short else (300, 50_000)
    async with open_cluster(1) as owner, open_cluster(2, device_id=1) as puller:
        await owner.blocks(DESC)
        cache, info = await puller.blocks(DESC), cluster_info(owner)
        datadist, manager = puller.datadist, puller.datadist.cache_manager

        async def once() -> None:
            await datadist.link_clusters([info], 10_000)
            await manager.pull_blocks(KEY, cache, [3], [5])
            await datadist.unlink_clusters([info], 10_000)

        for _ in range(20):
            await once()
        gc.collect()
        files, more, tasks = descriptors(), threads(), len(asyncio.all_tasks())
        memory = resident()
        for _ in range(links):
            await once()
        await datadist.link_clusters([info], 10_000)
        for number in range(pulls):
            await manager.pull_blocks(KEY, cache, [number % 64], [5])
        await datadist.unlink_clusters([info], 10_000)
        gc.collect()
        left = descriptors() - files, threads() - more, len(asyncio.all_tasks()) - tasks
        grown = max(0, resident() - memory) / MIB
    return figure(
        "R21", "0 left, 5 MiB", max(left) <= 0 and grown <= 5, links, pulls, *left, f"{grown:.1f}",
    )  # fmt: skip


async def elsewhere(short: bool) -> Figure:
    """Measure row R23: from a thread without a loop, and from another loop."""
    count, told = (10 if short else 1000), 0
    seconds: list[float] = []
    async with linked_pair(DESC) as (_, decoder, _source, cache):
        manager = decoder.datadist.cache_manager

        def plain() -> None:
            nonlocal told
            for _ in range(count):
                began = now()
                with suppress(LLMException, RuntimeError):
                    manager.pull_blocks(KEY, cache, [1], [2])
                    continue
                told += 1
                seconds.append(now() - began)

        async def on_a_loop() -> None:
            plain()

        for target in (plain, lambda: asyncio.run(on_a_loop())):
            thread = threading.Thread(target=target)
            thread.start()
            await anyio.to_thread.run_sync(thread.join)
        await manager.pull_blocks(KEY, cache, [1], [2])
    return figure("R23", "all", told == 2 * count, told, 2 * count, usual(seconds), worst(seconds))


def _filled(hard: int) -> list[int]:
    """Descriptors that take all that there may be."""
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
    filling: list[int] = []
    with suppress(OSError):
        while True:
            filling.append(os.open("/dev/null", os.O_RDONLY))
    return filling


async def no_descriptors(short: bool) -> Figure:
    """Measure row R25: a transfer goes on without, and opening reports the error."""
    rounds, told = (2 if short else 20), 0
    seconds: list[float] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with linked_pair(DESC) as (_, decoder, _source, cache):
        manager = decoder.datadist.cache_manager
        async with open_cluster(3, device_id=2):
            await manager.pull_blocks(KEY, cache, BLOCKS, BLOCKS)
        files = descriptors()
        for _ in range(rounds):
            filling = _filled(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            try:
                async with open_cluster(3, device_id=2):
                    pass
            except LLMException:
                told += 1
            finally:
                await manager.pull_blocks(KEY, cache, BLOCKS, BLOCKS)
                for number in filling:
                    os.close(number)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            began = now()
            async with open_cluster(3, device_id=2):
                seconds.append(now() - began)
        left = descriptors() - files
    return figure("R25", "all, 0 left", told == rounds and left <= 0, told, rounds, left, usual(seconds))


Measure = Callable[[bool], Awaitable[Figure]]
MEASURES: dict[str, Measure] = {
    "R10": full_pool, "R11": misuse, "R12": key_races, "R20": forked, "R21": ten_thousand, "R23": elsewhere,
    "R25": no_descriptors,
}  # fmt: skip
