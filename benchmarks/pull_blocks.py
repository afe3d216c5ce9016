"""How fast do blocks travel between two processes?

128 MiB in scattered blocks of 16 KiB to 2 MiB are pulled by one process from another, every byte verified once. Beside it, in
the same run and in turns: a plain one-thread memcpy of the same ranges inside the pulling process, with the source's
memory mapped there (`memcpy`). Bar: the pull has at least 0.8 of memcpy at every size. A 1 ms ticker shows how late the
event loop is while blocks move at full speed, and when nothing moves; bar: at most 1 ms at the 99th percentile.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import random
from array import array
from multiprocessing.connection import Connection
from typing import Any

import anyio.to_thread

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole
from aiodatadist.cli.bench.lateness import ticking
from aiodatadist.device.plain_copy import plain_copy_seconds
from aiodatadist.testing import pattern
from benchmarks.common import Spread, arguments, now, percentile, report

KIB = 1024
TOTAL = 128 << 20
SIZES = [16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 2048 * KIB]
TENSORS = 8
WINDOWS = 9
"""Of about a third of a second each, idle and moving in turns: a virtual machine that loses its core spoils one or two."""


def shape(block: int) -> CacheDesc:
    """A pool of twice the blocks that travel, so that they can be scattered."""
    return CacheDesc(TENSORS, [2 * TOTAL // TENSORS // block, block], DataType.DT_UINT8)


def choose(block: int, seed: int) -> list[int]:
    """The blocks that travel: no two neighbours, in random order."""
    count = TOTAL // TENSORS // block
    chosen = [2 * i for i in range(count)]
    random.Random(seed).shuffle(chosen)
    return chosen


async def owner(pipe: Connection, block: int) -> None:
    """The process that has the blocks."""
    config = LLMConfig(listen_ip_info="127.0.0.1:0")
    async with LLMDataDist(LLMRole.PROMPT, 1, config) as datadist:
        desc = shape(block)
        memory = datadist.device.allocate(desc.size * TENSORS)
        view = memory.view()
        for tensor in range(TENSORS):
            for piece in range(desc.shape[0]):
                at = tensor * desc.size + piece * block
                view[at : at + block] = pattern(1, tensor, piece, block)
        addresses = [memory.address + i * desc.size for i in range(TENSORS)]
        await datadist.cache_manager.register_blocks_cache(desc, addresses, BlocksCacheKey(1))
        pipe.send(datadist.listen_address)
        await anyio.to_thread.run_sync(pipe.recv)
        del view


def serve(pipe: Connection, block: int) -> None:
    asyncio.run(owner(pipe, block))


async def measure(block: int, repeats: int, address: tuple[str, int]) -> dict[str, Any]:
    config = LLMConfig(sync_kv_timeout=60_000)
    async with LLMDataDist(LLMRole.DECODER, 2, config) as datadist:
        desc = shape(block)
        memory = datadist.device.allocate(desc.size * TENSORS)
        shadow = datadist.device.allocate(
            desc.size * TENSORS
        )  # the source of the plain memcpy: as many, as large, as mapped
        memory.view()[:] = bytes(memory.nbytes)
        shadow.view()[:] = bytes(shadow.nbytes)
        addresses = [memory.address + i * desc.size for i in range(TENSORS)]
        cache = await datadist.cache_manager.register_blocks_cache(desc, addresses)
        peer = LLMClusterInfo(1)
        peer.append_remote_ip_info(*address)
        status, _ = await datadist.link_clusters([peer], 10_000)
        assert status == 0, status
        src, dst = choose(block, 1), choose(block, 2)
        key = BlocksCacheKey(1)
        targets = array("Q", [base + target * block for base in addresses for target in dst])
        apart = shadow.address - memory.address
        sources = array("Q", [base + apart + source * block for base in addresses for source in src])
        pulls, copies = [], []
        for turn in range(repeats + 1):
            start = now()
            await datadist.cache_manager.pull_blocks(key, cache, src, dst)
            seconds = now() - start
            copied = await anyio.to_thread.run_sync(plain_copy_seconds, targets, sources, block)
            if turn:  # the first touches every page for the first time
                pulls.append(seconds)
                copies.append(copied)
        await datadist.cache_manager.pull_blocks(key, cache, src, dst)
        check(memory.view(), desc, block, src, dst)
        moving, idle = [], []
        for _ in range(WINDOWS):
            with ticking() as late:
                await asyncio.sleep(0.3)
            idle.append(percentile(late, 99) * 1e3)
            with ticking() as late:
                for _ in range(20):
                    await datadist.cache_manager.pull_blocks(key, cache, src, dst)
            moving.append(percentile(late, 99) * 1e3)
    ratio = Spread.of([c / p for c, p in zip(copies, pulls, strict=True)])
    return {
        "block": f"{block // KIB} KiB",
        "blocks": len(src) * TENSORS,
        "pull GB/s": f"{TOTAL / Spread.of(pulls).median / 1e9:.2f}",
        "memcpy GB/s": f"{TOTAL / Spread.of(copies).median / 1e9:.2f}",
        "pull/memcpy": f"{ratio}",
        "loop late p99 ms": f"{Spread.of(moving)}",
        "when idle": f"{Spread.of(idle)}",
    }


def check(view: memoryview, desc: CacheDesc, block: int, src: list[int], dst: list[int]) -> None:
    for tensor in range(TENSORS):
        for source, target in zip(src, dst, strict=True):
            at = tensor * desc.size + target * block
            if view[at : at + block] != pattern(1, tensor, source, block):
                raise SystemExit(f"tensor {tensor} block {target} does not hold what was pulled")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    context = mp.get_context("spawn")
    rows = []
    for block in SIZES:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, block))
        process.start()
        try:
            rows.append(asyncio.run(measure(block, args.repeats, ours.recv())))
        finally:
            ours.send("done")
            process.join()
    report("pull_blocks: 128 MiB between two processes", rows, args.json)


if __name__ == "__main__":
    main()
