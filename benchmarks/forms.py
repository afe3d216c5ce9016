"""Measure every form of a transfer: with a limit, of some layers, with a notification, with a checksum, and so on.

Each moves one block, or one slot, of 64 bytes and of 16 KiB in four tensors (two layers). The peer is another process. The
forms take turns, each round in another order. A row has the wall-clock time of one transfer, from the call until it was
awaited, and the CPU time of this end: median, and the quartiles of the rounds. `calls` are the functions of the package that
one transfer enters at this end; unlike the times, they are the same on each machine. The first transfers of a form take the
long way, and are not measured.

Bars: at most 10 us for 64 bytes and 12 us for 16 KiB; 60 us with a checksum.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import Any

import aiodatadist
from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
)
from benchmarks.common import arguments, in_turns, percentile, report
from benchmarks.peers import info_of, link_to, process_of

OWN = aiodatadist.__path__[0]
TENSORS = 4
PIECES = 16
POOL = '{"memory_size": 16777216}'
HOST_POOL = '{"memory_size": 4194304}'

Form = Callable[[], CacheTask]


def desc_of(nbytes: int, placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(TENSORS, [PIECES, nbytes // TENSORS], DataType.DT_UINT8, placement)


@asynccontextmanager
async def cluster(cluster_id: int) -> AsyncIterator[LLMDataDist]:
    role = LLMRole.PROMPT if cluster_id == 1 else LLMRole.DECODER
    config = LLMConfig(
        listen_ip_info="127.0.0.1:0", mem_pool_cfg=POOL, host_mem_pool_cfg=HOST_POOL, device_id=cluster_id - 1
    )
    async with LLMDataDist(role, cluster_id, config) as datadist:
        yield datadist


@asynccontextmanager
async def peer(nbytes: int) -> AsyncIterator[tuple[tuple[str, int], int, int]]:
    """Open the other cluster. Yield its address and the ids of its two caches."""
    async with cluster(1) as prompt, asyncio.TaskGroup() as group:

        async def take() -> None:
            async for _ in prompt.notifications():
                pass

        taking = group.create_task(take())
        manager = prompt.cache_manager
        blocks = await manager.allocate_blocks_cache(desc_of(nbytes), BlocksCacheKey(1))
        slots = await manager.allocate_cache(desc_of(nbytes), [CacheKey(1, i) for i in range(PIECES)])
        yield prompt.listen_address or ("", 0), blocks.cache_id, slots.cache_id
        taking.cancel()


def forms_of(datadist: LLMDataDist, ids: tuple[int, int], ours: dict[str, Cache]) -> dict[str, Form]:
    """Return the forms by name. ``ids`` are the peer's blocks cache and contiguous cache."""
    m, key, first = datadist.cache_manager, BlocksCacheKey(1), range(1)
    by_id, slot_by_id = CacheKeyByIdAndIndex(1, ids[0], 0), CacheKeyByIdAndIndex(1, ids[1], 3)
    blocks, slots, host, request = ours["blocks"], ours["slots"], ours["host"], CacheKey(1, 3)
    forms: dict[str, Form] = {
        "pull_blocks": lambda: m.pull_blocks(key, blocks, [3], [5]),
        "pull_blocks, deadline": lambda: m.pull_blocks(key, blocks, [3], [5], deadline=5.0),
        "pull_blocks, one layer": lambda: m.pull_blocks(
            key, blocks, [3], [5], src_layer_range=first, dst_layer_range=first
        ),
        "pull_blocks, packed layers": lambda: m.pull_blocks(key, blocks, [3], [5], tensor_num_per_layer=1),
        "pull_blocks, array": lambda: m.pull_blocks(key, blocks, numbers[0], numbers[1]),
        "pull_blocks, by id": lambda: m.pull_blocks(by_id, blocks, [3], [5]),
        "pull_blocks, of a slot": lambda: m.pull_blocks(request, blocks, [], [5]),
        "pull_blocks, notify": lambda: m.pull_blocks(key, blocks, [3], [5], notify=b"request 7 is here"),
        "pull_blocks, checksum": lambda: m.pull_blocks(key, blocks, [3], [5], checksum=True),
        "pull_cache": lambda: m.pull_cache(request, slots, 5),
        "pull_cache, part": lambda: m.pull_cache(request, slots, 5, 8, src_cache_offset=0, dst_cache_offset=8),
        "push_blocks": lambda: m.push_blocks(key, blocks, [3], [5]),
        "push_blocks, one layer": lambda: m.push_blocks(key, blocks, [3], [5], first, first),
        "push_blocks, packed layers": lambda: m.push_blocks(key, blocks, [3], [5], tensor_num_per_layer=1),
        "push_blocks, notify": lambda: m.push_blocks(key, blocks, [3], [5], notify=b"request 7 is here"),
        "push_blocks, checksum": lambda: m.push_blocks(key, blocks, [3], [5], checksum=True),
        "push_cache": lambda: m.push_cache(slot_by_id, slots, 5),
        "copy_blocks": lambda: m.copy_blocks(blocks, {3: [5]}),
        "copy_cache": lambda: m.copy_cache(slots, slots, 5, 3),
        "swap_blocks": lambda: m.swap_blocks(host, blocks, {3: 5}),
    }
    numbers: Any = array("Q", [3]), array("Q", [5])
    if find_spec("numpy"):
        numpy = import_module("numpy")
        numbers = numpy.array([3]), numpy.array([5])
        forms["pull_blocks, numpy"] = forms.pop("pull_blocks, array")
    return forms


async def calls_of(form: Form) -> int:
    """Count the calls of the package's functions until the transfer has ended, the continuations after awaits included."""
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(OWN)

    sys.setprofile(note)
    try:
        await form()
    finally:
        sys.setprofile(None)
    return calls


def batch(datadist: LLMDataDist, form: Form, count: int) -> Callable[[], Awaitable[tuple[float, float]]]:
    """Return a function that runs a form several times, and returns the seconds of one, and its seconds of CPU."""

    async def run() -> tuple[float, float]:
        await datadist.notify(1, b"")  # sent, when all before it are
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(count):
            await form()
        return (time.perf_counter() - wall) / count, (time.thread_time() - cpu) / count

    return run


async def measure(nbytes: int, rounds: int, count: int) -> list[dict[str, Any]]:
    async with process_of(peer, nbytes) as (_, (address, *ids)), cluster(2) as decoder:
        manager = decoder.cache_manager
        ours = {
            "blocks": await manager.allocate_blocks_cache(desc_of(nbytes), BlocksCacheKey(2)),
            "slots": await manager.allocate_cache(desc_of(nbytes)),
            "host": await manager.allocate_blocks_cache(desc_of(nbytes, Placement.HOST)),
        }
        await link_to(decoder, info_of(1, address))
        forms = forms_of(decoder, (ids[0], ids[1]), ours)
        calls = {}
        for name, form in forms.items():
            for _ in range(3):
                await form()
            await asyncio.sleep(0.01)
            calls[name] = min([await calls_of(form) for _ in range(5)])  # without heartbeats and timers
        found = await in_turns({name: batch(decoder, form, count) for name, form in forms.items()}, rounds, 1)
    return [_row(f"{name}, {nbytes} B", calls[name], found[name]) for name in forms]


def _row(name: str, calls: int, found: list[tuple[float, float]]) -> dict[str, Any]:
    wall, cpu = ([each * 1e6 for each in column] for column in zip(*found, strict=True))
    return {
        "what": name,
        "calls": calls,
        "us": percentile(wall, 50),
        "from": percentile(wall, 25),
        "to": percentile(wall, 75),
        "CPU us": percentile(cpu, 50),
    }


async def measure_all(rounds: int, count: int) -> list[dict[str, Any]]:
    return [row for nbytes in (64, 16 << 10) for row in await measure(nbytes, rounds, count)]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--count", type=int, default=100, help="transfers of a form in each round")
    args = parser.parse_args()
    report("forms: call to awaited", asyncio.run(measure_all(args.rounds, args.count)), args.json)


if __name__ == "__main__":
    main()
