"""Copies within one cluster: any memory to any, exactly the bytes that were named, and mistakes before anything starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheManager,
    CacheNotFound,
    CacheTask,
    DataType,
    LLMException,
    LLMStatusCode,
    ParamInvalid,
    Placement,
    TransferPriority,
    TransferTimeout,
)
from aiodatadist.testing import Cluster, cluster_info, open_cluster, soft_fault, soft_faults_cleared, soft_hold

HOST, DEVICE = Placement.HOST, Placement.DEVICE
POOL = '{"memory_size": 1048576, "page_shift": 10}'
MARGIN = 64
TENSORS = 3

KINDS: dict[str, tuple[Placement, bool | None]] = {
    "pool": (DEVICE, None),
    "host-pool": (HOST, None),
    "array": (DEVICE, True),
    "local-array": (DEVICE, False),
    "host-array": (HOST, False),
    "shared-host-array": (HOST, True),
}
"""Where a cache's memory is from, where it counts as being, and whether peers may reach it."""

CPU = "cpu-cache"


@dataclass
class Store:
    """A cache, its tensors, and what lies around them."""

    cache: Cache
    tensors: list[Any]
    around: list[Any]

    def contents(self) -> list[bytes]:
        return [tensor.tobytes() for tensor in self.tensors]

    def surroundings(self) -> list[bytes]:
        return [each.tobytes() for each in self.around]


def description(kind: str, shape: list[int]) -> CacheDesc:
    return CacheDesc(TENSORS, shape, DataType.DT_UINT8, HOST if kind == CPU else KINDS[kind][0])


async def make(manager: CacheManager, kind: str, shape: list[int], *, blocks: bool, seed: int) -> Store:
    """Make a cache full of noise, in the middle of more noise."""
    desc = description(kind, shape)
    random = np.random.default_rng(seed)
    if kind.endswith("pool"):
        allocate = manager.allocate_blocks_cache if blocks else manager.allocate_cache
        before, cache, after = [await allocate(desc) for _ in range(3)]
        tensors = manager.arrays(cache)
        around = [*manager.arrays(before), *manager.arrays(after)]
        for array in (*tensors, *around):
            array[...] = random.integers(0, 256, array.shape, np.uint8)
        return Store(cache, tensors, around)
    whole = [random.integers(0, 256, MARGIN + desc.size + MARGIN, np.uint8) for _ in range(TENSORS)]
    tensors = [each[MARGIN : MARGIN + desc.size].reshape(shape) for each in whole]
    around = [edge for each in whole for edge in (each[:MARGIN], each[-MARGIN:])]
    if kind == CPU:
        cache = Cache.create_cpu_cache(desc, [array.ctypes.data for array in tensors])
    else:
        register: Any = manager.register_blocks_cache if blocks else manager.register_cache
        cache = await register(desc, tensors, remote_accessible=KINDS[kind][1])
    return Store(cache, tensors, around)


@asynccontextmanager
async def one_cluster() -> AsyncIterator[tuple[Cluster, CacheManager]]:
    async with open_cluster(1, mem_pool_cfg=POOL, host_mem_pool_cfg=POOL) as cluster:
        yield cluster, cluster.datadist.cache_manager


# ---- what is copied ----


@pytest.mark.parametrize(("source", "target"), [*product(KINDS, KINDS)])
async def test_any_slot_is_copied_to_any_memory(source: str, target: str) -> None:
    async with one_cluster() as (_, manager):
        src = await make(manager, source, [3, 200], blocks=False, seed=1)
        dst = await make(manager, target, [4, 150], blocks=False, seed=2)
        others = src.contents(), src.surroundings(), dst.surroundings()
        for dst_slot, src_slot, offset, size in ((2, 1, 0, 150), (0, 2, 37, 101), (3, 0, 149, 1), (1, 2, 50, 100)):
            want = [array.copy() for array in dst.tensors]
            for mine, theirs in zip(want, src.tensors, strict=True):
                mine[dst_slot, offset : offset + size] = theirs[src_slot, offset : offset + size]
            report = await manager.copy_cache(dst.cache, src.cache, dst_slot, src_slot, offset, size, req_id=7)
            assert dst.contents() == [array.tobytes() for array in want]
            assert report.bytes == TENSORS * size
        assert (src.contents(), src.surroundings(), dst.surroundings()) == others
        del src, dst, want, mine, theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 60])
async def test_without_a_size_all_that_the_source_has_is_copied(kind: str, offset: int) -> None:
    async with one_cluster() as (_, manager):
        src = await make(manager, kind, [2, 100], blocks=False, seed=1)
        dst = await make(manager, kind, [1, 128], blocks=False, seed=2)
        want = [
            old[:offset] + new[100 + offset : 200] + old[100:]
            for old, new in zip(dst.contents(), src.contents(), strict=True)
        ]
        await manager.copy_cache(dst.cache, src.cache, src_batch_index=1, offset=offset)
        assert dst.contents() == want
        del src, dst


@pytest.mark.parametrize("kind", KINDS)
async def test_blocks_are_copied_within_their_cache(kind: str) -> None:
    async with one_cluster() as (_, manager):
        store = await make(manager, kind, [8, 4, 25], blocks=True, seed=3)
        around = store.surroundings()
        want = [array.copy() for array in store.tensors]
        pairs = {0: [5], 1: [6, 7], 3: (2,)}
        for array in want:
            for block, copies in pairs.items():
                array[list(copies)] = array[block]
        report = await manager.copy_blocks(store.cache, pairs)
        assert store.contents() == [array.tobytes() for array in want]
        assert store.surroundings() == around
        assert report.bytes == 4 * 100 * TENSORS
        await manager.copy_blocks(store.cache, {4: [4], 5: []})
        assert store.contents() == [array.tobytes() for array in want]
        del store


DEVICES = [kind for kind in KINDS if KINDS[kind][0] is DEVICE]
HOSTS = [CPU, *(kind for kind in KINDS if KINDS[kind][0] is HOST)]


@pytest.mark.parametrize(("source", "target"), [*product(DEVICES, HOSTS), *product(HOSTS, DEVICES)])
async def test_blocks_are_swapped_between_host_and_device(source: str, target: str) -> None:
    async with one_cluster() as (_, manager):
        src = await make(manager, source, [6, 96], blocks=True, seed=4)
        dst = await make(manager, target, [9, 96], blocks=True, seed=5)
        others = src.contents(), src.surroundings(), dst.surroundings()
        pairs = {0: 8, 1: 2, 2: 3, 5: 0}
        want = [array.copy() for array in dst.tensors]
        for mine, theirs in zip(want, src.tensors, strict=True):
            mine[list(pairs.values())] = theirs[list(pairs)]
        report = await manager.swap_blocks(src.cache, dst.cache, pairs)
        assert dst.contents() == [array.tobytes() for array in want]
        assert (src.contents(), src.surroundings(), dst.surroundings()) == others
        assert (report.bytes, report.ranges) == (4 * 96 * TENSORS, 3 * TENSORS)
        del src, dst, want, mine, theirs


async def test_what_was_swapped_out_comes_back_as_it_was() -> None:
    async with one_cluster() as (_, manager):
        device = await make(manager, "pool", [4, 64], blocks=True, seed=6)
        host = await make(manager, CPU, [4, 64], blocks=True, seed=7)
        before = device.contents()
        await manager.swap_blocks(device.cache, host.cache, {0: 3, 1: 2})
        for array in device.tensors:
            array[:2] = 0
        await manager.swap_blocks(host.cache, device.cache, {3: 0, 2: 1})
        assert device.contents() == before
        del device, host, array


async def test_a_slot_copied_onto_itself_is_as_it_was() -> None:
    async with one_cluster() as (_, manager):
        store = await make(manager, "host-pool", [2, 64], blocks=False, seed=8)
        before = store.contents()
        await manager.copy_cache(store.cache, store.cache, 1, 1)
        assert store.contents() == before
        del store


@pytest.mark.parametrize(
    ("source", "target"), [("array", "host-array"), ("host-array", "array"), ("array", "local-array")]
)
async def test_a_large_copy_is_as_exact_as_a_small_one(source: str, target: str) -> None:
    stride = (9 << 20) + 5
    async with one_cluster() as (_, manager):
        src = await make(manager, source, [1, stride], blocks=False, seed=9)
        dst = await make(manager, target, [1, stride], blocks=False, seed=10)
        around = dst.surroundings()
        want = [old[:3] + new[3:-2] + old[-2:] for old, new in zip(dst.contents(), src.contents(), strict=True)]
        await manager.copy_cache(dst.cache, src.cache, offset=3, size=stride - 5)
        assert dst.contents() == want
        assert dst.surroundings() == around


async def test_copies_run_in_the_order_of_their_calls() -> None:
    async with one_cluster() as (_, manager):
        store = await make(manager, "array", [4, 1 << 18], blocks=True, seed=11)
        want = [array[0].tobytes() for array in store.tensors]
        tasks = [manager.copy_blocks(store.cache, {block: [block + 1]}) for block in range(3)]
        for task in tasks:
            assert await task.synchronize() is LLMStatusCode.LLM_SUCCESS
        assert [array[3].tobytes() for array in store.tensors] == want


async def test_a_copy_that_the_device_refuses_says_so_and_the_next_one_works() -> None:
    async with one_cluster() as (_, manager):
        store = await make(manager, "array", [4, 64], blocks=True, seed=12)
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:exec=507053")
            with pytest.raises(LLMException, match="507053") as caught:
                await manager.copy_blocks(store.cache, {0: [1]})
        assert caught.value.status_code is LLMStatusCode.LLM_DEVICE_MEM_ERROR
        await manager.copy_blocks(store.cache, {0: [1]})
        assert all((array[1] == array[0]).all() for array in store.tensors)


# ---- what goes first, and until when ----

CRITICAL, NORMAL, BACKGROUND = TransferPriority

Copy = Callable[..., CacheTask]


@asynccontextmanager
async def three_copies() -> AsyncIterator[dict[str, Copy]]:
    """Make the three kinds of copies, which take a number of blocks (a slot has none) and further arguments."""
    async with one_cluster() as (_, manager):
        blocks = await make(manager, "array", [1024, 64], blocks=True, seed=13)
        host = await make(manager, "host-array", [1024, 64], blocks=True, seed=14)
        slots = await make(manager, "array", [1024, 64], blocks=False, seed=15)

        def copy_cache(count: int, **options: Any) -> CacheTask:
            return manager.copy_cache(slots.cache, slots.cache, 1, 0, **options)

        def copy_blocks(count: int, **options: Any) -> CacheTask:
            return manager.copy_blocks(blocks.cache, {2 * i: [2 * i + 1] for i in range(count)}, **options)

        def swap_blocks(count: int, **options: Any) -> CacheTask:
            return manager.swap_blocks(host.cache, blocks.cache, {2 * i: 2 * i for i in range(count)}, **options)

        yield {"copy_cache": copy_cache, "copy_blocks": copy_blocks, "swap_blocks": swap_blocks}


@pytest.mark.parametrize("priority", [CRITICAL, NORMAL])
@pytest.mark.parametrize("what", ["copy_cache", "copy_blocks", "swap_blocks"])
async def test_a_more_urgent_copy_passes(what: str, priority: TransferPriority) -> None:
    ended: list[str] = []
    async with three_copies() as calls:
        with soft_hold("aclrtMemcpyAsync") as copy:
            first = calls["copy_blocks"](300, priority=BACKGROUND)
            await copy.arrived()
            second = calls[what](1, priority=priority)
            first.add_done_callback(lambda _: ended.append("background"))
            second.add_done_callback(lambda _: ended.append("urgent"))
            if priority is CRITICAL:
                await second
                assert not first.done()
            copy.release()
            assert (await second).bytes == TENSORS * 64
            assert (await first).bytes == TENSORS * 64 * 300
    assert ended == ["urgent", "background"]


@pytest.mark.parametrize("what", ["copy_cache", "copy_blocks", "swap_blocks"])
async def test_a_copy_ends_at_its_deadline(what: str) -> None:
    async with three_copies() as calls:
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:hang")
            hangs = calls["copy_blocks"](1)
            for priority in TransferPriority:
                task = calls[what](1, priority=priority, deadline=0.05)
                if priority is CRITICAL:
                    assert (await task).bytes == TENSORS * 64, "beside the one that hangs"
                else:
                    with pytest.raises(TransferTimeout, match=r"0\.05 s from the call"):
                        await task
            hangs.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hangs
        assert (await calls[what](1, deadline=60.0)).bytes == TENSORS * 64


@pytest.mark.parametrize("what", ["copy_cache", "copy_blocks", "swap_blocks"])
async def test_a_priority_or_a_deadline_that_is_none_is_refused(what: str) -> None:
    async with three_copies() as calls:
        with pytest.raises(TypeError, match="priority is"):
            calls[what](1, priority=0)
        with pytest.raises(TypeError, match="deadline is"):
            calls[what](1, deadline="soon")
        with pytest.raises(ParamInvalid, match="deadline is 0"):
            calls[what](1, deadline=0)


# ---- what is refused ----


Refusal = tuple[Callable[[CacheManager, dict[str, Cache]], CacheTask], type[Exception], str]

REFUSALS: dict[str, Refusal] = {
    "a destination of blocks": (
        lambda m, c: m.copy_cache(c["blocks"], c["slots"]),
        ParamInvalid,
        "destination.* blocks",
    ),
    "a source of blocks": (lambda m, c: m.copy_cache(c["slots"], c["blocks"]), ParamInvalid, "source .* is a blocks"),
    "another number of tensors": (
        lambda m, c: m.copy_cache(c["slots"], c["two tensors"]),
        ParamInvalid,
        "2 source tensors for 3 destination tensors",
    ),
    "no such destination slot": (
        lambda m, c: m.copy_cache(c["slots"], c["slots"], 4),
        ParamInvalid,
        "index 4: the destination .* 4 slots",
    ),
    "no such source slot": (
        lambda m, c: m.copy_cache(c["slots"], c["slots"], 0, 4),
        ParamInvalid,
        "index 4: the source .* 4 slots",
    ),
    "a slot below 0": (lambda m, c: m.copy_cache(c["slots"], c["slots"], -1), ValueError, "dst_batch_index is -1"),
    "a slot above uint32": (
        lambda m, c: m.copy_cache(c["slots"], c["slots"], 0, 2**32),
        ValueError,
        "src_batch_index is 4294967296",
    ),
    "a slot that is no number": (
        lambda m, c: m.copy_cache(c["slots"], c["slots"], "0"),  # type: ignore[arg-type]
        TypeError,
        "dst_batch_index is '0'",
    ),
    "an offset at the end": (
        lambda m, c: m.copy_cache(c["slots"], c["slots"], 0, 1, 64),
        ParamInvalid,
        "offset is 64: .* has only 64 bytes",
    ),
    "an offset beyond the smaller slot": (
        lambda m, c: m.copy_cache(c["small slots"], c["slots"], 0, 1, 40, 1),
        ParamInvalid,
        "offset is 40: a slot of the destination",
    ),
    "an offset below 0": (lambda m, c: m.copy_cache(c["slots"], c["slots"], 0, 1, -1), ValueError, "offset is -1"),
    "an offset above uint64": (lambda m, c: m.copy_cache(c["slots"], c["slots"], 0, 1, 2**64), ValueError, "offset is"),
    "a size of 0": (lambda m, c: m.copy_cache(c["slots"], c["slots"], 0, 1, 0, 0), ParamInvalid, "size is 0"),
    "a size of -2": (lambda m, c: m.copy_cache(c["slots"], c["slots"], 0, 1, 0, -2), ParamInvalid, "size is -2"),
    "a size above int64": (lambda m, c: m.copy_cache(c["slots"], c["slots"], 0, 1, 0, 2**63), ValueError, "size is"),
    "more than the source has": (
        lambda m, c: m.copy_cache(c["slots"], c["small slots"], size=41),
        ParamInvalid,
        "41 bytes from 0 do not fit: a slot of the source cache has 40",
    ),
    "more than the destination has": (
        lambda m, c: m.copy_cache(c["small slots"], c["slots"], offset=1),
        ParamInvalid,
        "63 bytes from 1 do not fit: a slot of the destination cache has 40",
    ),
    "a request below 0": (lambda m, c: m.copy_cache(c["slots"], c["slots"], req_id=-1), ValueError, "req_id is -1"),
    "a cache that is none": (
        lambda m, c: m.copy_cache(c["slots"], None),  # type: ignore[arg-type]
        TypeError,
        "src is None",
    ),
    "a cache that was given up": (
        lambda m, c: m.copy_cache(c["slots"], c["gone"]),
        CacheNotFound,
        "src .* is unknown here",
    ),
    "blocks of a contiguous cache": (
        lambda m, c: m.copy_blocks(c["slots"], {0: [1]}),
        ParamInvalid,
        "is a contiguous cache",
    ),
    "blocks of a cpu cache": (
        lambda m, c: m.copy_blocks(c["cpu"], {0: [1]}),
        CacheNotFound,
        "cache -1 is unknown here",
    ),
    "no such source block": (
        lambda m, c: m.copy_blocks(c["blocks"], {4: [0]}),
        ParamInvalid,
        r"src_blocks\[0\] is 4: .* 4 blocks",
    ),
    "no such destination block": (
        lambda m, c: m.copy_blocks(c["blocks"], {0: [1, 4]}),
        ParamInvalid,
        r"dst_blocks\[1\] is 4: .* 4 blocks",
    ),
    "a source block below 0": (lambda m, c: m.copy_blocks(c["blocks"], {-1: [0]}), ValueError, "-1"),
    "a destination block below 0": (lambda m, c: m.copy_blocks(c["blocks"], {0: [-1]}), ValueError, "-1"),
    "a block that is no number": (
        lambda m, c: m.copy_blocks(c["blocks"], {0: ["1"]}),  # type: ignore[list-item]
        TypeError,
        "'1'",
    ),
    "one block instead of a list": (
        lambda m, c: m.copy_blocks(c["blocks"], {0: 1}),  # type: ignore[dict-item]
        TypeError,
        "list or tuple",
    ),
    "pairs that are no dict": (
        lambda m, c: m.copy_blocks(c["blocks"], [(0, [1])]),  # type: ignore[arg-type]
        TypeError,
        "copy_block_info is",
    ),
    "nothing to copy": (lambda m, c: m.copy_blocks(c["blocks"], {0: []}), ParamInvalid, "no pair"),
    "device to device": (lambda m, c: m.swap_blocks(c["blocks"], c["blocks"], {0: 1}), ParamInvalid, "both .*DEVICE"),
    "host to host": (lambda m, c: m.swap_blocks(c["host blocks"], c["cpu"], {0: 1}), ParamInvalid, "both .*HOST"),
    "a contiguous cache in a swap": (
        lambda m, c: m.swap_blocks(c["slots"], c["host blocks"], {0: 1}),
        ParamInvalid,
        "source .* is a contiguous cache",
    ),
    "blocks of another size": (
        lambda m, c: m.swap_blocks(c["blocks"], c["small host blocks"], {0: 1}),
        ParamInvalid,
        "a block has 64 bytes at the source and 40 at the destination",
    ),
    "another number of tensors in a swap": (
        lambda m, c: m.swap_blocks(c["two blocks tensors"], c["host blocks"], {0: 1}),
        ParamInvalid,
        "2 source tensors for 3 destination tensors",
    ),
    "no such block to swap out": (
        lambda m, c: m.swap_blocks(c["blocks"], c["host blocks"], {0: 0, 4: 1}),
        ParamInvalid,
        r"src_blocks\[1\] is 4",
    ),
    "no such block to swap into": (
        lambda m, c: m.swap_blocks(c["host blocks"], c["blocks"], {0: 4}),
        ParamInvalid,
        r"dst_blocks\[0\] is 4",
    ),
    "a block below 0 in a swap": (lambda m, c: m.swap_blocks(c["blocks"], c["cpu"], {0: -1}), ValueError, "-1"),
    "a list in a swap": (
        lambda m, c: m.swap_blocks(c["blocks"], c["cpu"], {0: [1]}),  # type: ignore[dict-item]
        TypeError,
        "src_to_dst",
    ),
    "nothing to swap": (lambda m, c: m.swap_blocks(c["blocks"], c["cpu"], {}), ParamInvalid, "no pair"),
    "a swap with nothing": (
        lambda m, c: m.swap_blocks(c["blocks"], None, {0: 1}),  # type: ignore[arg-type]
        TypeError,
        "dst_cache is None",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
async def test_a_mistake_is_said_by_the_call_itself_and_nothing_moves(what: str) -> None:
    call, kind, words = REFUSALS[what]
    async with one_cluster() as (_, manager):
        stores = {
            "slots": await make(manager, "array", [4, 64], blocks=False, seed=1),
            "small slots": await make(manager, "array", [4, 40], blocks=False, seed=2),
            "blocks": await make(manager, "array", [4, 64], blocks=True, seed=3),
            "host blocks": await make(manager, "host-array", [4, 64], blocks=True, seed=4),
            "small host blocks": await make(manager, "host-array", [4, 40], blocks=True, seed=5),
            "cpu": await make(manager, CPU, [4, 64], blocks=True, seed=6),
        }
        pair = CacheDesc(2, [4, 64], DataType.DT_UINT8)
        caches = {name: store.cache for name, store in stores.items()}
        caches["two tensors"] = await manager.allocate_cache(pair)
        caches["two blocks tensors"] = await manager.allocate_blocks_cache(pair)
        caches["gone"] = await manager.allocate_cache(pair)
        await manager.deallocate_cache(caches["gone"])
        before = {name: store.contents() for name, store in stores.items()}
        with pytest.raises(kind, match=words):
            call(manager, caches)
        assert {name: store.contents() for name, store in stores.items()} == before


@pytest.mark.parametrize(
    ("addresses", "placement", "kind", "words"),
    [
        ([64, 128], HOST, ParamInvalid, "2 addresses for 3 tensors"),
        ([64, 128, 256], DEVICE, ParamInvalid, "needs Placement.HOST"),
        ([64, 128, 0], HOST, ParamInvalid, r"addrs\[2\] is 0"),
        ([64, -1, 256], HOST, ValueError, r"addrs\[1\] is -1"),
        ([64, 2**64, 256], HOST, ValueError, r"addrs\[1\] is 18446744073709551616"),
        ([64, "128", 256], HOST, TypeError, "'128'"),
        (None, HOST, TypeError, "addrs"),
    ],
)
def test_a_cpu_cache_has_an_address_of_host_memory_for_each_tensor(
    addresses: Any, placement: Placement, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        Cache.create_cpu_cache(CacheDesc(TENSORS, [4, 64], DataType.DT_UINT8, placement), addresses)


async def test_a_cpu_cache_is_good_for_swaps_only() -> None:
    async with one_cluster() as (_, manager):
        cpu = (await make(manager, CPU, [4, 64], blocks=True, seed=1)).cache
        assert (cpu.cache_id, cpu.is_blocks_cache) == (-1, True)
        with pytest.raises(CacheNotFound):
            manager.pull_blocks(BlocksCacheKey(2), cpu, [0], [1])
        with pytest.raises(CacheNotFound):
            manager.push_blocks(BlocksCacheKey(2), cpu, [0], [1])
        await manager.unregister_cache(-1)


# ---- memory of the wrong kind ----


async def addresses_of(cluster: Cluster, kind: str) -> tuple[list[int], Placement, Any]:
    """Memory that softnpu knows, where it is, and what keeps it."""
    manager = cluster.datadist.cache_manager
    if kind in KINDS:
        store = await make(manager, kind, [4, 64], blocks=True, seed=1)
        return store.cache.tensor_addrs, KINDS[kind][0], store.cache
    placement = HOST if kind == "pinned memory" else DEVICE
    memory = cluster.datadist.device.allocate(TENSORS * 256, placement)
    return [memory.address + i * 256 for i in range(TENSORS)], placement, memory


@pytest.mark.parametrize("accessible", [None, True, False], ids=["by default", "for peers", "for ourselves"])
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "slots"])
@pytest.mark.parametrize("kind", [*KINDS, "pinned memory", "device memory"])
async def test_memory_is_not_registered_as_what_it_is_not(kind: str, blocks: bool, accessible: bool | None) -> None:
    async with one_cluster() as (cluster, manager):
        addresses, placement, keep = await addresses_of(cluster, kind)
        wrong = HOST if placement is DEVICE else DEVICE
        desc = CacheDesc(TENSORS, [4, 64], DataType.DT_UINT8, wrong)
        count = cluster.datadist.statistics().caches
        register: Any = manager.register_blocks_cache if blocks else manager.register_cache
        with pytest.raises(ParamInvalid):
            await register(desc, addresses, remote_accessible=accessible)
        assert cluster.datadist.statistics().caches == count
        del keep


async def test_the_refusal_says_what_the_memory_is() -> None:
    async with one_cluster() as (cluster, manager):
        for placement, wrong in ((HOST, DEVICE), (DEVICE, HOST)):
            addresses, _, _ = await addresses_of(cluster, "pinned memory" if placement is HOST else "device memory")
            desc = CacheDesc(TENSORS, [4, 64], DataType.DT_UINT8, wrong)
            with pytest.raises(ParamInvalid, match=rf"{addresses[0]:#x} cannot be {wrong}: they are {placement}"):
                await manager.register_blocks_cache(desc, addresses, remote_accessible=False)


@pytest.mark.parametrize("accessible", [True, False], ids=["for peers", "for ourselves"])
async def test_one_tensor_of_the_wrong_kind_leaves_the_others_unregistered(accessible: bool) -> None:
    async with one_cluster() as (cluster, manager):
        pinned, _, _ = await addresses_of(cluster, "pinned memory")
        arrays = [np.zeros((4, 64), np.uint8) for _ in range(2)]
        desc = CacheDesc(TENSORS, [4, 64], DataType.DT_UINT8)
        with pytest.raises(ParamInvalid):
            await manager.register_blocks_cache(desc, [*arrays, pinned[0]], remote_accessible=accessible)
        assert cluster.datadist.statistics().caches == 0
        host = CacheDesc(2, [4, 64], DataType.DT_UINT8, HOST)
        cache = await manager.register_blocks_cache(host, arrays, remote_accessible=accessible)
        await manager.unregister_cache(cache.cache_id)


@pytest.mark.parametrize("shared_first", [True, False])
@pytest.mark.parametrize("gone", ["the one for peers", "the one for ourselves"])
async def test_of_two_caches_over_one_array_each_can_be_given_up(shared_first: bool, gone: str) -> None:
    desc = CacheDesc(1, [4, 64], DataType.DT_UINT8)
    async with one_cluster() as (cluster, manager), open_cluster(2, device_id=1) as peer:
        tensors = [np.arange(256, dtype=np.uint8).reshape(4, 64)]
        caches = {}
        for shared in (shared_first, not shared_first):
            key = BlocksCacheKey(1) if shared else None
            caches[shared] = await manager.register_blocks_cache(desc, tensors, key, remote_accessible=shared)
        is_shared = gone == "the one for peers"
        await manager.unregister_cache(caches[is_shared].cache_id)
        left = caches[not is_shared]
        await manager.copy_blocks(left, {3: [0]})
        assert (tensors[0][0] == tensors[0][3]).all()
        if not is_shared:
            target = await peer.blocks(desc)
            await peer.datadist.link_clusters([cluster_info(cluster)])
            await peer.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), target, [2], [1])
            assert peer.memory(target).view()[64:128] == tensors[0][2].tobytes()


async def test_memory_of_no_process_is_not_registered() -> None:
    async with one_cluster() as (_, manager):
        for accessible in (True, False):
            with pytest.raises(ParamInvalid, match="not ordinary memory of this process"):
                await manager.register_blocks_cache(
                    CacheDesc(1, [4, 64], DataType.DT_UINT8), [4096], remote_accessible=accessible
                )


async def test_device_memory_behind_a_cpu_cache_is_noticed_by_the_swap() -> None:
    async with one_cluster() as (cluster, manager):
        store = await make(manager, "array", [4, 64], blocks=True, seed=1)
        addresses, _, _ = await addresses_of(cluster, "device memory")
        cpu = Cache.create_cpu_cache(CacheDesc(TENSORS, [4, 64], DataType.DT_UINT8, HOST), addresses)
        with pytest.raises(LLMException, match="is device memory, but the kind says host") as caught:
            await manager.swap_blocks(store.cache, cpu, {0: 1})
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
