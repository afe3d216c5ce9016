"""Rows of transfers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import anyio

from aiodatadist import BlocksCacheKey, CacheDesc, CacheManager, DataType, LLMException
from aiodatadist._link.control.wire import Wire
from aiodatadist._wire.frames import Unknown
from aiodatadist._wire.messages import Message
from aiodatadist.errors import DataCorrupted, LLMStatusCode
from aiodatadist.testing import (
    BlockLedger,
    MisplacedError,
    cluster_info,
    linked_pair,
    open_cluster,
    soft_fault,
    soft_faults_cleared,
)
from benchmarks.common import now
from benchmarks.reliability_links import answered
from benchmarks.reliability_rows import MIB, Figure, figure, resident, usual, worst

DESC = CacheDesc(4, [64, 16 << 10], DataType.DT_UINT8)
KEY, HALF = BlocksCacheKey(1), 32
POOL = {"memory_size": 32 << 20}
SILENT = {"ping", "pong"}
BEYOND = (64, 65, 2**31, 2**32, 2**32 + 1, 2**48, 2**62, 2**63, 2**64 - 1)
"""Numbers of blocks that a cache of 64 does not have."""


async def garbage(short: bool) -> Figure:
    """Measure row R5."""
    count, chance = (50 if short else 2000), random.Random(1)
    async with open_cluster(1) as cluster, open_cluster(2, device_id=1) as friend:
        address = cluster.datadist.listen_address
        assert address is not None
        await answered(address, b"GET / HTTP/1.1\r\n\r\n")
        before = resident()
        seconds = [await answered(address, chance.randbytes(chance.randint(16, 4096))) for _ in range(count)]
        more = max(0, resident() - before) / MIB
        linked = (await friend.datadist.link_clusters([cluster_info(cluster)], 5000))[0]
    return figure(
        "R5",
        "100 ms, 10 MiB",
        max(seconds) <= 0.1 and more <= 10 and linked is LLMStatusCode.LLM_SUCCESS,
        count,
        usual(seconds),
        worst(seconds),
        f"{more:.1f}",
    )


async def damaged(short: bool) -> Figure:
    """Measure row R6."""
    count, chance = (20 if short else 500), random.Random(1)
    found, wrong = 0, 0
    async with linked_pair(DESC, transfer_checksum=True) as (_, decoder, source, cache):
        BlockLedger(source, 1).write(range(64))
        ledger = BlockLedger(cache, 2)
        for _ in range(count):
            block = chance.randrange(64)
            with soft_faults_cleared():
                soft_fault(f"HcclBatchGet:flip={chance.randrange(DESC.num_tensors * (16 << 10))}@1")
                try:
                    await decoder.datadist.cache_manager.pull_blocks(KEY, cache, [block], [block])
                except DataCorrupted:
                    found += 1
                else:
                    wrong += not _is_right(ledger, block)
    return figure("R6", "all, 0", found == count and wrong == 0, found, count, wrong)


def _is_right(ledger: BlockLedger, block: int) -> bool:
    try:
        ledger.landed([block], 1, [block])
    except MisplacedError:
        return False
    return True


async def cancelled(short: bool) -> Figure:
    """Measure row R7: cancel pulls at random moments in both modes, overwrite their destinations, and watch these."""
    count, chance = (50 if short else 1000), random.Random(1)
    strays = compared = 0
    seconds: list[float] = []
    for one_sided in (True, False):
        async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as (prompt, decoder, source, cache):
            BlockLedger(source, 1).write(range(64))
            ledger, manager = BlockLedger(cache, 2), decoder.datadist.cache_manager
            ledger.reclaim(range(64))
            for _ in range(count):
                first = chance.choice((0, HALF))
                blocks = list(range(first, first + HALF))
                strays += len(ledger.strays(blocks))
                task = manager.pull_blocks(KEY, cache, blocks, blocks)
                await anyio.sleep(chance.choice((0, 0, 0.0002, 0.001)))
                began = now()
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                seconds.append(now() - began)
                ledger.reclaim(blocks)
            strays += len(ledger.strays())
            compared += ledger.checked
            await decoder.datadist.check_link_status(1)
            pinned = sum(figures.leases for figures in (prompt.datadist.figures(), decoder.datadist.figures()))
            assert pinned == 0
    return figure("R7", "0 blocks", strays == 0, count, usual(seconds), worst(seconds), compared // MIB, strays)


async def reused(short: bool) -> Figure:
    """Measure row R13: abort transfers, hanging or at their end, and give their cache's memory to another one."""
    count, chance = (10 if short else 150), random.Random(1)
    strays = compared = 0
    async with linked_pair(DESC, mem_pool_cfg=POOL, sync_kv_timeout=1000) as (_, decoder, source, _cache):
        BlockLedger(source, 1).write(range(64))
        manager = decoder.datadist.cache_manager
        for number in range(count):
            cache = await manager.allocate_blocks_cache(DESC)
            with soft_faults_cleared():
                soft_fault(chance.choice(("HcclBatchGet:hang@1", "HcclBatchGet:delay=2@1")))
                task = manager.pull_blocks(KEY, cache, range(64), range(64), deadline=chance.choice((None, 0.001)))
                await anyio.sleep(chance.choice((0, 0.001, 0.002)))
                task.cancel()
                await manager.deallocate_blocks_cache(cache)
                other = await manager.allocate_blocks_cache(DESC)
                ledger = BlockLedger(other, 2, number)
                ledger.reclaim(range(64))
                with suppress(asyncio.CancelledError, LLMException):
                    await task
            await anyio.sleep(0.002)
            strays += len(ledger.strays())
            compared += ledger.checked
            await manager.deallocate_blocks_cache(other)
    return figure("R13", "0 blocks", strays == 0, count, compared // MIB, strays)


@contextmanager
def mishaps(chance: random.Random, share: float) -> Iterator[list[int]]:
    """Lose this share of the messages that this process receives and repeat as many. Yield how often that happened."""
    receive, happened, again = Wire.receive, [0], dict[Wire, Message | Unknown]()

    async def heard(self: Wire) -> Message | Unknown:
        if (twice := again.pop(self, None)) is not None:
            return twice
        while True:
            message, fate = await receive(self), chance.random()
            if fate >= 2 * share or message.type in SILENT:
                return message
            happened[0] += 1
            if fate >= share:
                again[self] = message
                return message

    Wire.receive = heard  # type: ignore[method-assign]
    try:
        yield happened
    finally:
        Wire.receive = receive  # type: ignore[method-assign]


async def lost_messages(short: bool) -> Figure:
    """Measure row R14."""
    count, wrong, failed = (40 if short else 600), 0, 0
    seconds: list[float] = []
    async with linked_pair(DESC, enable_remote_cache_accessible=False, sync_kv_timeout=300) as (
        _,
        decoder,
        source,
        cache,
    ):
        BlockLedger(source, 1).write(range(64))
        ledger, manager = BlockLedger(cache, 2), decoder.datadist.cache_manager
        with mishaps(random.Random(1), 0.03) as happened:
            for number in range(count):
                began = now()
                try:
                    await manager.pull_blocks(KEY, cache, [number % 64], [number % 64])
                    wrong += not _is_right(ledger, number % 64)
                except LLMException:
                    failed += 1
                seconds.append(now() - began)
        await decoder.datadist.check_link_status(1)
    return figure(
        "R14", "2 s, 0 wrong", wrong == 0 and max(seconds) <= 2, happened[0], count, failed, worst(seconds), wrong
    )


async def outlived(short: bool) -> Figure:
    """Measure row R15: the owner overwrites its blocks when a lease ends; readers come before, after, or just then."""
    count, chance = (20 if short else 400), random.Random(1)
    good = refused = wrong = 0
    async with linked_pair(DESC) as (prompt, decoder, source, cache):
        books, owner = BlockLedger(source, 1), prompt.datadist.cache_manager
        books.write(range(64))
        ledger = BlockLedger(cache, 2)
        for number in range(1, count + 1):
            lease = owner.lease_blocks(source, range(HALF), 0.03)
            lease.add_done_callback(lambda _, number=number: books.write(range(HALF), number))  # type: ignore[misc]
            await anyio.sleep(chance.uniform(0.015, 0.035))
            try:
                await decoder.datadist.cache_manager.pull_leased(lease.ticket(), cache, range(HALF))
            except LLMException:
                refused += 1
            else:
                versions = [stamp.version for stamp in ledger.landed(range(HALF), 1, range(HALF))]
                good, wrong = good + 1, wrong + (versions != [number - 1] * HALF)
            await lease.wait_ended()
    return figure("R15", "0 other", wrong == 0 and good + refused == count, count, good, refused, wrong)


async def out_of_range(short: bool) -> Figure:
    """Measure row R18."""
    count, chance, refused = (100 if short else 5000), random.Random(1), 0
    seconds: list[float] = []
    for one_sided in (True, False):
        async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as (_, decoder, source, cache):
            books, ledger = BlockLedger(source, 1), BlockLedger(cache, 2)
            books.write(range(64))
            ledger.write(range(64))
            for _ in range(count):
                block = chance.choice((*BEYOND, chance.randrange(64, 2**64)))
                began = now()
                try:
                    await decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0, block], [1, 2])
                except (LLMException, ValueError):
                    refused += 1
                seconds.append(now() - began)
            assert books.wrong() == ledger.wrong() == [], "memory was touched"
    return figure("R18", "all", refused == 2 * count, refused, 2 * count, usual(seconds), worst(seconds))


async def storm(short: bool) -> Figure:
    """Measure row R8."""
    late: list[str] = []
    holds = True
    for count, limit in ((100, 0.1),) if short else ((1000, 0.1), (10_000, 0.5)):
        async with linked_pair(DESC, sync_kv_timeout=60_000) as (_, decoder, _source, cache):
            await decoder.datadist.cache_manager.pull_blocks(KEY, cache, [0], [0])
            with soft_faults_cleared():
                seconds = await _storm(decoder.datadist.cache_manager, cache, count)
        late.append(f"{count}: {seconds * 1e3:.0f} ms")
        holds &= seconds <= limit
    return figure("R8", "1000: 100 ms, 10000: 500 ms", holds, ", ".join(late))


async def _storm(manager: CacheManager, cache: object, count: int) -> float:
    """Return the seconds after the common deadline until the last transfer has ended."""
    soft_fault("HcclBatchGet:hang@*")
    began, seconds = now(), 2 + count / 1000
    tasks = []
    for _ in range(count):
        late = seconds - (now() - began)
        tasks.append(manager.pull_blocks(KEY, cache, [1, 3], [1, 3], deadline=late))  # type: ignore[arg-type]
    left, all_told = len(tasks), asyncio.Event()

    def told(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            all_told.set()

    for task in tasks:
        task.add_done_callback(told)
    await all_told.wait()
    return now() - began - seconds


Measure = Callable[[bool], Awaitable[Figure]]
MEASURES: dict[str, Measure] = {
    "R5": garbage, "R6": damaged, "R7": cancelled, "R8": storm, "R13": reused, "R14": lost_messages, "R15": outlived,
    "R18": out_of_range,
}  # fmt: skip
