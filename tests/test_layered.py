"""Layered transfer: bytes arrive where they should, as their layers are computed; and what becomes of failures."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import anyio
import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    CacheNotFound,
    CacheTask,
    DataType,
    EventLayerSynchronizer,
    LayerDone,
    LinkError,
    LLMException,
    LLMStatusCode,
    NotLinked,
    ParamInvalid,
    Placement,
    TransferConfig,
    TransferError,
    TransferTimeout,
    TransferWithCacheKeyConfig,
)
from aiodatadist._cache.table import Entry
from aiodatadist._device import Program
from aiodatadist._layered import destination
from aiodatadist._native.library import ffi
from aiodatadist._values.grid import Grid
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    inside,
    open_cluster,
    pattern,
    soft_fault,
    soft_faults_cleared,
    soft_hold,
)
from tests.held import there_and_back, turns
from tests.strict.marks import any_memory, told_of_failures

LAYERS = 4
BLOCKS = CacheDesc(2 * LAYERS, [16, 1024], DataType.DT_UINT8)
SLOTS = CacheDesc(2 * LAYERS, [3, 2500], DataType.DT_UINT8)
POOL = '{"memory_size": 4194304, "page_shift": 12}'
COMPUTED = 77
"""Owner of the pattern that a computed layer holds; before that it holds the cluster's own."""
OK = LLMStatusCode.LLM_SUCCESS

modes = pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "request-response"])
Config = TransferConfig | TransferWithCacheKeyConfig
Maker = Callable[[Cluster], Coroutine[Any, Any, Cache]]


@dataclass
class Fan:
    """Cluster 1 has the source; clusters 2, 3, ... have a destination each."""

    one_sided: bool
    source: Cluster
    src: Cache
    targets: list[Cluster] = field(default_factory=list)
    dsts: list[Cache] = field(default_factory=list)

    def config(
        self, i: int, src: range | None = None, dst: range | None = None, src_slot: int = 0, dst_slot: int = 0
    ) -> Config:
        cluster_id, cache = i + 2, self.dsts[i]
        src = src or range(LAYERS)
        dst = dst or src
        if not self.one_sided:
            addresses = [
                address + dst_slot * cache.cache_desc.stride
                for address in cache.tensor_addrs[2 * dst.start : 2 * dst.stop]
            ]
            return TransferConfig(cluster_id, addresses, src, src_slot)
        key: BlocksCacheKey | CacheKeyByIdAndIndex = CacheKeyByIdAndIndex(cluster_id, cache.cache_id, dst_slot)
        if cache.is_blocks_cache and not src_slot:
            key = BlocksCacheKey(cluster_id)
        return TransferWithCacheKeyConfig(key, src, dst, src_slot)

    def start(self, synchronizer: object, configs: list[Config], *words: Any) -> CacheTask:
        return self.source.datadist.cache_manager.transfer_cache_async(self.src, synchronizer, configs, *words)

    def blocks(self, synchronizer: object, configs: list[Config] | None = None) -> CacheTask:
        """Send blocks 1, 2 and 9 to 4, 5 and 0."""
        return self.start(
            synchronizer, configs or [self.config(i) for i in range(len(self.dsts))], [1, 2, 9], [4, 5, 0]
        )

    def after_blocks(self, i: int, before: bytes, layers: range = range(LAYERS), owner: int = COMPUTED) -> bytes:
        """Return the contents that a destination then has."""
        image, stride = bytearray(before), self.src.cache_desc.stride
        for tensor in range(2 * layers.start, 2 * layers.stop):
            for a, b in ((1, 4), (2, 5), (9, 0)):
                at = tensor * self.dsts[i].cache_desc.size + b * stride
                image[at : at + stride] = pattern(owner, tensor, a, stride)
        return bytes(image)

    def compute(self, layer: int) -> None:
        """Fill the layer with its contents."""
        desc, view = self.src.cache_desc, self.source.memory(self.src).view()
        for tensor in (2 * layer, 2 * layer + 1):
            for piece in range(desc.shape[0]):
                at = tensor * desc.size + piece * desc.stride
                view[at : at + desc.stride] = pattern(COMPUTED, tensor, piece, desc.stride)

    def held(self, i: int) -> bytes:
        return bytes(self.targets[i].memory(self.dsts[i]).view())

    @property
    def entry(self) -> Entry:
        entry = inside(self.source.datadist).registry.table.find(self.src.cache_id)
        assert entry is not None
        return entry

    async def still_works(self, i: int = 0) -> None:
        """Check that the link and both caches are as good as new."""
        for layer in range(LAYERS):
            self.compute(layer)
        before = self.held(i)
        await self.blocks(Immediate(), [self.config(i)])
        assert self.held(i) == self.after_blocks(i, before)
        assert self.entry.leases == 0


def registered(desc: CacheDesc) -> Maker:
    async def make(cluster: Cluster) -> Cache:
        return await (cluster.contiguous(desc) if desc is SLOTS else cluster.blocks(desc))

    return make


@asynccontextmanager
async def fan(
    source: CacheDesc = BLOCKS, target: CacheDesc = BLOCKS, count: int = 1, one_sided: bool = True, **options: Any
) -> AsyncIterator[Fan]:
    async with AsyncExitStack() as stack:
        options["enable_remote_cache_accessible"] = one_sided
        first = await stack.enter_async_context(open_cluster(1, **options))
        made = Fan(one_sided, first, await registered(source)(first))
        for i in range(count):
            cluster = await stack.enter_async_context(open_cluster(2 + i, device_id=1 + i, **options))
            made.targets.append(cluster)
            made.dsts.append(await registered(target)(cluster))
        status, each = await first.datadist.link_clusters([cluster_info(c) for c in made.targets], 5000)
        assert status is OK, each
        for cluster in made.targets:
            await cluster.datadist.wait_linked(1)
        yield made


class Immediate:
    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


class Computing:
    """Computes each layer when it is asked for: an object without a base class."""

    def __init__(self, made: Fan) -> None:
        self.made = made
        self.asked: list[tuple[int, int | None]] = []

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.asked.append((layer_index, timeout_in_millis))
        await turns(3)
        self.made.compute(layer_index)
        return True


class Blocking:
    """The same as a plain function, which blocks."""

    def __init__(self, made: Fan) -> None:
        self.made = made
        self.threads: set[int] = set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.threads.add(threading.get_ident())
        threading.Event().wait(0.001)
        self.made.compute(layer_index)
        return True


async def arrived(task: CacheTask) -> list[LayerDone]:
    return [done async for done in task.progress()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# ---- every byte ----


@modes
@pytest.mark.parametrize("transport", ["auto", "hccl", "loopback", "tcp"])
async def test_blocks_to_blocks(one_sided: bool, transport: str) -> None:
    async with fan(count=2, one_sided=one_sided, transport=transport) as made:
        before, source = [made.held(i) for i in range(2)], Computing(made)
        wanted = [(range(1, 3), range(2, 4)), (range(2, 4), range(2))]
        task = made.blocks(source, [made.config(i, src, dst) for i, (src, dst) in enumerate(wanted)])
        report = await task
        assert source.asked == [(1, None), (2, None), (3, None)]
        assert await task.get_results() == [OK, OK]
        assert await task.synchronize() is OK
        assert report.bytes == 2 * 2 * 2 * 3 * BLOCKS.stride
        for i, (src, dst) in enumerate(wanted):
            image = bytearray(before[i])
            for a, b in zip(range(2 * src.start, 2 * src.stop), range(2 * dst.start, 2 * dst.stop), strict=True):
                for p, q in ((1, 4), (2, 5), (9, 0)):
                    at = b * BLOCKS.size + q * BLOCKS.stride
                    image[at : at + BLOCKS.stride] = pattern(COMPUTED, a, p, BLOCKS.stride)
            assert made.held(i) == image
        assert made.entry.leases == 0


@modes
@any_memory
async def test_slots_to_slots(one_sided: bool) -> None:
    async with fan(SLOTS, SLOTS, 2, one_sided) as made:
        before = [made.held(i) for i in range(2)]
        configs = [made.config(0, range(1, 4), range(3), 2, 1), made.config(1, range(2), range(1, 3), 1, 2)]
        await made.start(Computing(made), configs)
        for i, (src, dst, p, q) in enumerate([(range(2, 8), range(6), 2, 1), (range(4), range(2, 6), 1, 2)]):
            image = bytearray(before[i])
            for a, b in zip(src, dst, strict=True):
                at = b * SLOTS.size + q * SLOTS.stride
                image[at : at + SLOTS.stride] = pattern(COMPUTED, a, p, SLOTS.stride)
            assert made.held(i) == image


@modes
@any_memory
async def test_slots_to_blocks(one_sided: bool) -> None:
    async with fan(SLOTS, BLOCKS, 2, one_sided) as made:
        before = [made.held(i) for i in range(2)]
        configs = [made.config(0, range(1, 3), range(2), 2), made.config(1, range(4), range(4), 0)]
        await made.start(Computing(made), configs, None, [7, 0, 3], 1024)
        for i, (src, dst, slot) in enumerate([(range(2, 6), range(4), 2), (range(8), range(8), 0)]):
            image = bytearray(before[i])
            for a, b in zip(src, dst, strict=True):
                whole = pattern(COMPUTED, a, slot, SLOTS.stride)
                for chunk, block in enumerate([7, 0, 3]):
                    piece = whole[chunk * 1024 : (chunk + 1) * 1024]
                    at = b * BLOCKS.size + block * 1024
                    image[at : at + len(piece)] = piece
            assert made.held(i) == image


@modes
async def test_two_destinations_in_one_cluster_have_their_own_results(one_sided: bool) -> None:
    async with fan(one_sided=one_sided) as made:
        before = made.held(0)
        bad: Config = TransferWithCacheKeyConfig(BlocksCacheKey(2, 9), range(1), range(1))
        if not one_sided:
            bad = TransferConfig(2, [4096, 65536], range(1))
        task = made.blocks(Computing(made), [bad, made.config(0, range(0, 1)), made.config(0, range(2, 4))])
        assert await task.get_results() == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, OK, OK]
        assert await task.synchronize() is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        with pytest.raises(CacheNotFound):
            await task
        assert made.held(0) == made.after_blocks(0, made.after_blocks(0, before, range(0, 1)), range(2, 4))


@modes
async def test_a_destination_layer_that_two_configs_name_is_refused(one_sided: bool) -> None:
    async with fan(count=2, one_sided=one_sided) as made:
        before, source = [made.held(i) for i in range(2)], Computing(made)
        configs = [made.config(1), made.config(0, range(2)), made.config(0, range(2, 4), range(1, 3))]
        what = r"layer 1 of .*" if one_sided else r"the address 0x[0-9a-f]+ of cluster 2: .*"
        with pytest.raises(ParamInvalid, match=rf"transfer_configs\[2\] and \[1\] both name {what}once in a call"):
            made.blocks(source, configs)
        assert not source.asked
        assert made.entry.leases == 0
        assert [made.held(i) for i in range(2)] == before


@pytest.mark.parametrize("is_known", [False, True], ids=["looked-up", "known"])
async def test_two_keys_of_one_cache_are_one_destination(is_known: bool) -> None:
    async with fan() as made:
        whole, by_id = made.config(0), CacheKeyByIdAndIndex(2, made.dsts[0].cache_id, 0)
        if is_known:
            await made.blocks(Immediate(), [whole])
            await made.blocks(Immediate(), [TransferWithCacheKeyConfig(by_id, range(1), range(1))])
        same = TransferWithCacheKeyConfig(by_id, range(2), range(1, 3))
        task = made.blocks(Computing(made), [whole, same])
        assert set(await task.get_results()) == {OK, LLMStatusCode.LLM_PARAM_INVALID}
        with pytest.raises(ParamInvalid, match=r"name the same memory.*can be named only once in a call"):
            await task
        before = made.held(0)
        apart = TransferWithCacheKeyConfig(by_id, range(2, 4), range(2, 4))
        await made.blocks(Computing(made), [made.config(0, range(2)), apart])
        assert made.held(0) == made.after_blocks(0, before)


async def test_two_caches_in_the_same_memory_are_one_destination() -> None:
    async with fan() as made:
        target = made.targets[0].datadist.cache_manager
        again = await target.register_blocks_cache(BLOCKS, made.dsts[0].tensor_addrs, BlocksCacheKey(2, 5))
        assert again.cache_id != made.dsts[0].cache_id
        same = TransferWithCacheKeyConfig(BlocksCacheKey(2, 5), range(1), range(3, 4))
        task = made.blocks(Computing(made), [made.config(0), same])
        assert set(await task.get_results()) == {OK, LLMStatusCode.LLM_PARAM_INVALID}


async def test_slots_of_two_caches_in_the_same_memory_are_one_destination() -> None:
    async with fan(SLOTS, SLOTS) as made:
        first = made.dsts[0]
        again = await made.targets[0].datadist.cache_manager.register_cache(SLOTS, first.tensor_addrs)
        for slot, is_same in ((1, True), (2, False)):
            keys = CacheKeyByIdAndIndex(2, first.cache_id, slot), CacheKeyByIdAndIndex(2, again.cache_id, 1)
            configs: list[Config] = [TransferWithCacheKeyConfig(key, range(2), range(2)) for key in keys]
            expected = {OK, LLMStatusCode.LLM_PARAM_INVALID if is_same else OK}
            assert set(await made.start(Computing(made), configs).get_results()) == expected


@pytest.mark.parametrize(
    ("apart", "is_refused"),
    [(1, True), (512, True), (1024, True), (1536, True), (2048, False), (4096, True), (5120, True)],
)
async def test_addresses_whose_bytes_overlap_are_refused(apart: int, is_refused: bool) -> None:
    """The blocks 4, 5 and 0 are written: those of one address must not be those of another one."""
    async with fan(one_sided=False) as made:
        before, to = made.held(0), made.dsts[0].tensor_addrs[0]
        configs: Sequence[Config]
        for configs in (
            [TransferConfig(2, [to, to + apart], range(1))],
            [
                TransferConfig(2, [to + apart, to + 7 * 16384], range(1)),
                TransferConfig(2, [to + 6 * 16384, to], range(1)),
            ],
        ):
            if is_refused:
                with pytest.raises(ParamInvalid, match=f"are {apart} bytes apart: what is written there would overlap"):
                    made.blocks(Computing(made), [*configs])
                assert made.held(0) == before
                assert made.entry.leases == 0
            else:
                await made.blocks(Computing(made), [*configs])


async def test_slots_whose_bytes_overlap_are_refused() -> None:
    async with fan(SLOTS, SLOTS, one_sided=False) as made:
        to = made.dsts[0].tensor_addrs[0]
        for apart in (1, 2499):
            with pytest.raises(ParamInvalid, match=f"are {apart} bytes apart"):
                made.start(Computing(made), [TransferConfig(2, [to + apart, to], range(1))])
        await made.start(Computing(made), [TransferConfig(2, [to + 2500, to], range(1))])


async def test_all_layers_if_no_range_is_given() -> None:
    async with fan(one_sided=False) as made:
        before = made.held(0)
        await made.blocks(Computing(made), [TransferConfig(2, made.dsts[0].tensor_addrs)])
        assert made.held(0) == made.after_blocks(0, before)


# ---- who says that a layer is ready ----


@modes
async def test_model_code_on_the_loop(one_sided: bool) -> None:
    async with fan(count=2, one_sided=one_sided) as made:
        before = [made.held(i) for i in range(2)]
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        task = made.blocks(synchronizer)
        seen: list[LayerDone] = []
        news = task.progress()
        for layer in range(LAYERS):
            first = asyncio.ensure_future(anext(news))
            await anyio.wait_all_tasks_blocked()
            assert not first.done()
            made.compute(layer)
            synchronizer.ready(layer)
            seen += [await first, await anext(news)]
            for i in range(2):
                assert made.held(i) == made.after_blocks(i, before[i], range(layer + 1))
        with pytest.raises(StopAsyncIteration):
            await anext(news)
        assert [(d.config_index, d.cluster_id, d.layer_index) for d in sorted(seen, key=lambda d: d.config_index)] == [
            (i, i + 2, layer) for i in range(2) for layer in range(LAYERS)
        ]
        assert [d.seconds for d in seen] == sorted(d.seconds for d in seen)
        await task
        assert await arrived(task) == seen


async def test_layers_ready_in_any_order_travel_in_theirs() -> None:
    async with fan() as made:
        before, synchronizer = made.held(0), AwaitableLayerSynchronizer(LAYERS)
        for layer in (3, 2, 1):
            made.compute(layer)
            synchronizer.ready(layer)
        task = made.blocks(synchronizer)
        await anyio.wait_all_tasks_blocked()
        assert made.held(0) == before
        made.compute(0)
        synchronizer.ready(0)
        await task
        assert [d.layer_index for d in await arrived(task)] == [0, 1, 2, 3]
        assert made.held(0) == made.after_blocks(0, before)


async def test_a_plain_function_may_block() -> None:
    async with fan() as made:
        before, synchronizer = made.held(0), Blocking(made)
        await made.blocks(synchronizer)
        assert made.held(0) == made.after_blocks(0, before)
        assert threading.get_ident() not in synchronizer.threads


async def test_a_plain_function_may_return_an_awaitable() -> None:
    async with fan() as made:
        before, inner = made.held(0), Computing(made)

        class Wrapped:
            def synchronize_layer(self, layer_index: int, timeout: int | None) -> Coroutine[Any, Any, bool]:
                return inner.synchronize_layer(layer_index, timeout)

        await made.blocks(Wrapped())
        assert made.held(0) == made.after_blocks(0, before)


@asynccontextmanager
async def computing_stream(made: Fan) -> AsyncIterator[Callable[[int], None]]:
    """Yield a function that computes a layer on a stream of the device: it copies results that lie ready elsewhere."""
    device, desc = made.source.datadist.device, made.src.cache_desc
    results = device.allocate(desc.size * desc.num_tensors)
    memory = made.source.memory(made.src)
    old = bytes(memory.view())
    for layer in range(LAYERS):
        made.compute(layer)
    results.view()[:] = memory.view()
    memory.view()[:] = old
    stream = device.open_stream("compute")

    def compute(layer: int) -> None:
        at, nbytes = 2 * layer * desc.size, 2 * desc.size
        to, fro = array("Q", [memory.address + at]), array("Q", [results.address + at])
        grid = Grid(to, fro, array("Q", [0]), array("Q", [0]), nbytes, nbytes, nbytes, nbytes)
        stream.submit(Program().copy(3, grid), 10)  # type: ignore[arg-type]

    compute.stream = stream  # type: ignore[attr-defined]
    try:
        yield compute
    finally:
        await stream.aclose()


@modes
async def test_gates_on_the_device(one_sided: bool) -> None:
    """Layers recorded before and after it was asked for; each is told when it is there."""
    async with fan(count=2, one_sided=one_sided) as made, computing_stream(made) as compute:
        before = [made.held(i) for i in range(2)]
        synchronizer = EventLayerSynchronizer(made.source.datadist.device, LAYERS)
        stream = compute.stream  # type: ignore[attr-defined]
        for layer in (0, 1):
            compute(layer)
            synchronizer.record(layer, stream)
        task = made.blocks(synchronizer)
        news, seen = task.progress(), []
        seen += [await anext(news) for _ in range(4)]
        for target in made.targets:
            await there_and_back(made.source, target)
        assert not task.done()
        assert [made.held(i) for i in range(2)] == [made.after_blocks(i, before[i], range(2)) for i in range(2)]
        for layer in (2, 3):
            compute(layer)
            synchronizer.record(layer, stream)
            seen += [await anext(news), await anext(news)]
            for i in range(2):
                assert made.held(i) == made.after_blocks(i, before[i], range(layer + 1))
        assert await task.get_results() == [OK, OK]
        assert sorted((d.config_index, d.layer_index) for d in seen) == [
            (i, n) for i in range(2) for n in range(LAYERS)
        ]
        statistics = made.source.datadist.statistics()
        assert [link.failures for link in statistics.links] == [{}, {}]


async def test_gates_wait_for_what_was_computed_before() -> None:
    """All records at once, behind slow work."""
    async with fan() as made, computing_stream(made) as compute:
        before = made.held(0)
        synchronizer = EventLayerSynchronizer(made.source.datadist.device, LAYERS)
        task = made.blocks(synchronizer)
        compute(0)
        synchronizer.record(0, compute.stream)  # type: ignore[attr-defined]
        await anext(task.progress())  # it waits for layer 1 now
        with soft_hold("aclrtMemcpyAsync") as computing:
            for layer in range(1, LAYERS):
                compute(layer)
                synchronizer.record(layer, compute.stream)  # type: ignore[attr-defined]
            await computing.arrived()
            await there_and_back(made.source, made.targets[0])
            assert made.held(0) == made.after_blocks(0, before, range(1))
            computing.release()
            await task
        assert made.held(0) == made.after_blocks(0, before)


async def test_gates_of_a_layer_range() -> None:
    async with fan() as made, computing_stream(made) as compute:
        before = made.held(0)
        synchronizer = EventLayerSynchronizer(made.source.datadist.device, LAYERS)
        task = made.blocks(synchronizer, [made.config(0, range(1, 3))])
        for layer in (1, 2):
            compute(layer)
            synchronizer.record(layer, compute.stream)  # type: ignore[attr-defined]
        await task
        assert [d.layer_index for d in await arrived(task)] == [1, 2]
        assert made.held(0) == made.after_blocks(0, before, range(1, 3))


@pytest.mark.parametrize("group", [1, 2, LAYERS])
@pytest.mark.parametrize("opened", [0, 1, LAYERS - 1])
async def test_a_gate_that_stays_closed_is_a_timeout_of_its_own(
    opened: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the transfer may take, and however many layers travel together; the layer is named."""
    monkeypatch.setattr(destination, "group_size", lambda *_: group)
    async with fan(sync_kv_timeout=3_600_000) as made, computing_stream(made) as compute:
        synchronizer = EventLayerSynchronizer(made.source.datadist.device, LAYERS, 0.1)
        task = made.blocks(synchronizer)
        for layer in range(opened):
            compute(layer)
            synchronizer.record(layer, compute.stream)  # type: ignore[attr-defined]
        with anyio.fail_after(60):
            assert await task.synchronize() is LLMStatusCode.LLM_TIMEOUT
        words = rf"layer {opened} was not recorded, .* within 0.1 s, the timeout of its EventLayerSynchronizer"
        with pytest.raises(TransferTimeout, match=words) as caught:
            await task
        assert caught.value.peer == 2
        assert made.entry.leases == 0
        await made.still_works()


async def test_compute_may_take_longer_than_its_transfer() -> None:
    async with fan(sync_kv_timeout=200) as made, computing_stream(made) as compute:
        before = made.held(0)
        synchronizer = EventLayerSynchronizer(made.source.datadist.device, LAYERS, 60)
        task = made.blocks(synchronizer)
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:hang")
            with pytest.raises(TransferTimeout):  # it began later, and had more time
                await made.source.datadist.cache_manager.copy_blocks(made.src, {0: [1]}, deadline=0.25)
        for layer in range(LAYERS):
            compute(layer)
            synchronizer.record(layer, compute.stream)  # type: ignore[attr-defined]
        await task
        assert made.held(0) == made.after_blocks(0, before)


async def test_a_synchronizer_of_fewer_layers_is_a_wrong_argument() -> None:
    async with fan() as made:
        gates = EventLayerSynchronizer(made.source.datadist.device, LAYERS - 1)
        for synchronizer in (gates, AwaitableLayerSynchronizer(LAYERS - 1)):
            with pytest.raises(ParamInvalid, match="layer_synchronizer has 3 layers: must have at least 4"):
                made.blocks(synchronizer)


@contextmanager
def raw_events(made: Fan) -> Iterator[Any]:
    """Record the runtime's events on their own stream, as another framework would."""
    device = made.source.datadist.device
    runtime, acl = device.runtime, device.runtime.acl
    with device.current():
        stream, event = ffi.new("aclrtStream *"), ffi.new("aclrtEvent *")
        runtime.check("aclrtCreateStream", acl.aclrtCreateStream(stream))
        events = []
        for _ in range(LAYERS):
            runtime.check("aclrtCreateEvent", acl.aclrtCreateEvent(event))
            events.append(event[0])

    def record(layer: int) -> int:
        with device.current():
            runtime.check("aclrtRecordEvent", acl.aclrtRecordEvent(events[layer], stream[0]))
        return int(ffi.cast("uintptr_t", events[layer]))

    try:
        yield record
    finally:
        with device.current():
            acl.aclrtSynchronizeStream(stream[0])
            for each in events:
                acl.aclrtDestroyEvent(each)
            acl.aclrtDestroyStream(stream[0])


async def test_events_of_another_framework() -> None:
    async with fan() as made:
        before = made.held(0)
        with raw_events(made) as record, soft_hold("aclrtRecordEvent", nth=3) as event:

            class Recorded:
                def __init__(self) -> None:
                    self.events: dict[int, int] = {}

                async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
                    made.compute(layer_index)
                    self.events[layer_index] = record(layer_index)
                    return True

                def device_event(self, layer_index: int) -> int:
                    return self.events[layer_index]

            task = made.blocks(Recorded())
            await event.arrived()
            start = monotonic()
            news = task.progress()
            assert [(await anext(news)).layer_index for _ in range(2)] == [0, 1]
            await there_and_back(made.source, made.targets[0])
            assert made.held(0) == made.after_blocks(0, before, range(2))
            seconds_held = monotonic() - start
            event.release()
            await task
            seconds = {done.layer_index: done.seconds for done in await arrived(task)}
            assert seconds[2] >= seconds_held
        assert made.held(0) == made.after_blocks(0, before)


# ---- failures ----


@modes
async def test_a_layer_that_is_given_up(one_sided: bool) -> None:
    """Give up a layer: only the destinations that want it fail."""
    async with fan(count=2, one_sided=one_sided) as made:
        before = [made.held(i) for i in range(2)]
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        for layer in range(LAYERS):
            made.compute(layer)
            if layer == 2:
                synchronizer.fail(layer)
            synchronizer.ready(layer)
        task = made.blocks(synchronizer, [made.config(0), made.config(1, range(2))])
        assert await task.get_results() == [LLMStatusCode.LLM_PARAM_INVALID, OK]
        with pytest.raises(ParamInvalid, match=r"synchronize_layer\(2\) gave the layer up"):
            await task
        assert made.held(1) == made.after_blocks(1, before[1], range(2))
        await made.still_works()


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_synchronizer_that_raises(blocking: bool) -> None:
    async with fan(count=2) as made:

        class Raising:
            def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
                if layer_index == 1:
                    raise ZeroDivisionError("two")
                return True

        class RaisingAsync(Raising):
            async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:  # type: ignore[override]
                return super().synchronize_layer(layer_index, timeout_in_millis)

        task = made.blocks(Raising() if blocking else RaisingAsync())
        assert await task.get_results() == [LLMStatusCode.LLM_FAILED] * 2
        with pytest.raises(TransferError, match=r"synchronize_layer\(1\) raised ZeroDivisionError\('two'\)") as caught:
            await task
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        await made.still_works()


async def test_each_destination_has_an_error_of_its_own() -> None:
    async with fan(count=2) as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        synchronizer.fail(0)
        task = made.blocks(synchronizer)
        with pytest.raises(ParamInvalid) as caught:
            await task
        assert caught.value.peer == 2


@pytest.mark.parametrize("how", ["task", "waiter"])
@pytest.mark.parametrize("what", ["awaited", "blocking", "gated", "hanging"])
async def test_cancelling(how: str, what: str) -> None:  # noqa: PLR0912
    """Wherever it is: no byte lands any more, and everything is given back."""
    over = threading.Event()

    class Stuck:
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return layer_index < 2 or over.wait()

    async with fan(count=2) as made:
        with soft_faults_cleared():
            synchronizer: Any = AwaitableLayerSynchronizer(LAYERS)
            if what == "blocking":
                synchronizer = Stuck()
            elif what == "gated":
                synchronizer = EventLayerSynchronizer(made.source.datadist.device, LAYERS)
                stream = made.source.datadist.device.open_stream("compute")
                for layer in (0, 1):
                    synchronizer.record(layer, stream)
            else:
                for layer in range(LAYERS if what == "hanging" else 2):
                    synchronizer.ready(layer)
            if what == "hanging":
                soft_fault("HcclBatchPut:hang@3")
            task = made.blocks(synchronizer)
            news = task.progress()
            for _ in range(2):
                await anext(news)
            if what == "gated":
                await stream.aclose()
            if how == "task":
                assert task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:

                async def wait() -> None:
                    await task

                waiter = asyncio.ensure_future(wait())
                await asyncio.sleep(0)  # it waits
                waiter.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiter
            assert task.done()
            assert task.cancelled()
            assert not task.cancel()
            held = [made.held(i) for i in range(2)]
            assert made.entry.leases == 0
            if isinstance(synchronizer, AwaitableLayerSynchronizer):
                for layer in range(LAYERS):
                    synchronizer.ready(layer)
            over.set()
            for target in made.targets:
                await there_and_back(made.source, target)
            assert [made.held(i) for i in range(2)] == held
        for i in range(2):
            await made.still_works(i)


async def test_cancelling_before_it_ran() -> None:
    async with fan() as made:
        before = made.held(0)
        task = made.blocks(Immediate())
        assert task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.held(0) == before
        await made.still_works()


@modes
async def test_results_tell_a_cancelled_destination_from_a_failed_one_and_a_complete_one(one_sided: bool) -> None:
    async with fan(count=3, one_sided=one_sided) as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        configs = [made.config(0, range(1)), made.config(1), made.config(2, range(1, 2))]
        task = made.blocks(synchronizer, configs)
        synchronizer.ready(0)
        await anext(done async for done in task.progress() if done.config_index == 0)
        synchronizer.fail(1)
        assert await task.get_results() == [OK, LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_PARAM_INVALID]
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        task = made.blocks(synchronizer, configs[:2])
        synchronizer.ready(0)
        await anext(done async for done in task.progress() if done.config_index == 0)
        task.cancel()
        assert await task.get_results() == [OK, None]
        assert task.cancelled()
        assert task.exception() is None
        assert await task.synchronize() is LLMStatusCode.LLM_FAILED
        await made.still_works(1)


async def test_a_cancelled_wait_for_results_leaves_it_alone() -> None:
    async with fan() as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        task = made.blocks(synchronizer)
        assert await task.synchronize(5) is LLMStatusCode.LLM_TIMEOUT
        assert await task.get_results(0) == [LLMStatusCode.LLM_TIMEOUT]
        assert not task.done()
        for layer in range(LAYERS):
            synchronizer.ready(layer)
        assert await task.synchronize(5000) is OK


async def test_what_a_destination_refuses_is_its_own_affair() -> None:
    small = CacheDesc(2 * LAYERS, [5, 1024], DataType.DT_UINT8)
    async with fan(count=3) as made:
        made.dsts[1] = await made.targets[1].blocks(small, 1)
        before = [made.held(i) for i in range(3)]
        unknown = TransferWithCacheKeyConfig(BlocksCacheKey(2, 9), range(1), range(1))
        too_small = TransferWithCacheKeyConfig(BlocksCacheKey(3, 1), range(LAYERS), range(LAYERS))
        too_few = TransferWithCacheKeyConfig(BlocksCacheKey(3), range(LAYERS), range(2, 2 + LAYERS))
        task = made.blocks(Computing(made), [unknown, too_small, made.config(2), too_few])
        invalid = LLMStatusCode.LLM_PARAM_INVALID
        assert await task.get_results() == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, invalid, OK, invalid]
        assert [made.held(i) for i in range(3)] == [before[0], before[1], made.after_blocks(2, before[2])]


async def test_all_layers_where_none_are_named() -> None:
    """Move all layers if none are named. Both ends must have the same number."""
    async with fan(count=2) as made:
        made.dsts[1] = await made.targets[1].blocks(CacheDesc(2 * LAYERS + 2, [16, 1024], DataType.DT_UINT8), 1)
        before = [made.held(i) for i in range(2)]
        whole = TransferWithCacheKeyConfig(BlocksCacheKey(2))
        one_layer_more = TransferWithCacheKeyConfig(BlocksCacheKey(3, 1))
        source_alone = TransferWithCacheKeyConfig(BlocksCacheKey(3, 1), None, range(1, 1 + LAYERS))
        task = made.blocks(Computing(made), [whole, one_layer_more])
        assert await task.get_results() == [OK, LLMStatusCode.LLM_PARAM_INVALID]
        assert [made.held(i) for i in range(2)] == [made.after_blocks(0, before[0]), before[1]]
        assert await made.blocks(Computing(made), [source_alone]).get_results() == [OK]
        with pytest.raises(
            ParamInvalid, match=r"src_layer_range range\(0, 4\) and dst_layer_range range\(0, 2\): .*the same length"
        ):
            made.blocks(Computing(made), [TransferWithCacheKeyConfig(BlocksCacheKey(2), None, range(2))])


@modes
async def test_a_destination_unlinked_in_the_middle(one_sided: bool) -> None:
    async with fan(count=2, one_sided=one_sided) as made:
        before, synchronizer = made.held(1), AwaitableLayerSynchronizer(LAYERS)
        task = made.blocks(synchronizer)
        made.compute(0)
        synchronizer.ready(0)
        news = task.progress()
        for _ in range(2):
            await anext(news)
        status, _ = await made.source.datadist.unlink_clusters([cluster_info(made.targets[0])])
        assert status is OK
        held = made.held(0)
        for layer in range(1, LAYERS):
            made.compute(layer)
            synchronizer.ready(layer)
        results = await task.get_results()
        assert results[1] is OK
        assert results[0] is not OK
        with pytest.raises(LinkError) as caught:
            await task
        assert caught.value.peer == 2
        assert made.held(0) == held
        assert made.held(1) == made.after_blocks(1, before)
        await made.still_works(1)


async def test_a_gated_destination_unlinked_in_the_middle() -> None:
    async with fan(count=2) as made:
        device, before = made.source.datadist.device, made.held(1)
        synchronizer, stream = EventLayerSynchronizer(device, LAYERS), device.open_stream("compute")
        task = made.blocks(synchronizer)
        await until(lambda: len(synchronizer._gates) == 2)
        await made.source.datadist.unlink_clusters([cluster_info(made.targets[0])], 100)
        for layer in range(LAYERS):
            made.compute(layer)
            synchronizer.record(layer, stream)
        results = await task.get_results()
        assert results[1] is OK
        with pytest.raises(LinkError):
            await task
        assert made.held(1) == made.after_blocks(1, before)
        await stream.aclose()
        await made.still_works(1)


@modes
@pytest.mark.parametrize(
    "gated",
    [
        pytest.param(False, id="awaited"),
        pytest.param(True, id="gated"),
    ],
)
async def test_a_destination_deallocated_in_the_middle(one_sided: bool, gated: bool) -> None:
    async with fan(count=2, one_sided=one_sided, mem_pool_cfg=POOL, sync_kv_timeout=300) as made:
        before, manager = made.held(1), made.targets[0].datadist.cache_manager
        cache = await manager.allocate_blocks_cache(BLOCKS, BlocksCacheKey(2, 5))
        first: Config = TransferWithCacheKeyConfig(BlocksCacheKey(2, 5), range(LAYERS), range(LAYERS))
        if not one_sided:
            first = TransferConfig(2, cache.tensor_addrs)
        device = made.source.datadist.device
        stream = device.open_stream("compute")
        awaited = AwaitableLayerSynchronizer(LAYERS)
        waited = EventLayerSynchronizer(device, LAYERS)

        def ready(layer: int) -> None:
            made.compute(layer)
            if gated:
                waited.record(layer, stream)
            else:
                awaited.ready(layer)

        ready(0)
        task = made.blocks(waited if gated else awaited, [first, made.config(1)])
        news = task.progress()
        for _ in range(2):
            await anext(news)
        await manager.deallocate_blocks_cache(cache)
        for layer in range(1, LAYERS):
            ready(layer)
        results = await task.get_results()
        assert results[1] is OK
        assert results[0] is not OK
        assert made.held(1) == made.after_blocks(1, before)
        assert made.entry.leases == 0
        assert manager.pool_usage()[Placement.DEVICE].free == manager.pool_usage()[Placement.DEVICE].total
        await stream.aclose()
        assert not task.cancelled()
        with pytest.raises(LLMException):
            await task


@pytest.mark.parametrize("gated", [False, True], ids=["awaited", "gated"])
@pytest.mark.parametrize("layer", range(LAYERS))
@told_of_failures
async def test_a_device_fault_at_each_layer(gated: bool, layer: int) -> None:
    async with fan() as made:
        before, device = made.held(0), made.source.datadist.device
        stream = device.open_stream("compute")
        for each in range(LAYERS):
            made.compute(each)
        with soft_faults_cleared():
            soft_fault(f"HcclBatchPut:exec=507053@{layer + 1}")
            synchronizer: Any = EventLayerSynchronizer(device, LAYERS) if gated else AwaitableLayerSynchronizer(LAYERS)
            task = made.blocks(synchronizer)
            progress: Any = task.progress()
            async with aclosing(progress):
                for each in range(LAYERS):
                    synchronizer.record(each, stream) if gated else synchronizer.ready(each)
                    if each < layer:
                        await anext(progress)  # so that no two travel together
            assert await task.get_results() == [LLMStatusCode.LLM_DEVICE_MEM_ERROR]
        with pytest.raises(LLMException) as caught:
            await task
        assert caught.value.peer == 2
        assert [done.layer_index for done in await arrived(task)] == list(range(layer))
        whole, size = made.after_blocks(0, before), 2 * made.dsts[0].cache_desc.size
        assert made.held(0)[: layer * size] == whole[: layer * size]
        await stream.aclose()
        await made.still_works()


@pytest.mark.parametrize("what", ["awaited", "blocking", "gated"])
@pytest.mark.parametrize("whose", ["source", "target"])
async def test_finalized_in_the_middle(what: str, whose: str, no_leaks: None) -> None:
    over = threading.Event()

    class Stuck:
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return layer_index < 1 or over.wait()

    async with fan() as made:
        device = made.source.datadist.device
        synchronizer: Any = AwaitableLayerSynchronizer(LAYERS)
        if what == "blocking":
            synchronizer = Stuck()
        elif what == "gated":
            synchronizer = EventLayerSynchronizer(device, LAYERS)
            stream = device.open_stream("compute")
            synchronizer.record(0, stream)
        else:
            synchronizer.ready(0)
        task, entry = made.blocks(synchronizer), made.entry
        await anext(task.progress())
        if what == "gated":
            await stream.aclose()
        async with asyncio.timeout(10):
            await (made.source if whose == "source" else made.targets[0]).datadist.finalize()
            if whose == "target" and what != "gated":
                over.set()
                if isinstance(synchronizer, AwaitableLayerSynchronizer):
                    synchronizer.ready(1)
            with pytest.raises(LinkError if whose == "target" else (LinkError, asyncio.CancelledError)):
                await task
        over.set()
        assert entry.leases == 0


# ---- receiving ----


@modes
async def test_each_layer_is_complete_when_it_is_told(one_sided: bool) -> None:
    async with fan(one_sided=one_sided) as made:
        before, synchronizer = made.held(0), AwaitableLayerSynchronizer(LAYERS)
        async with made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver:
            task = made.blocks(synchronizer)
            for layer in range(LAYERS):
                made.compute(layer)
                synchronizer.ready(layer)
                await receiver.layer(layer)
                size = 2 * BLOCKS.size
                here = slice(layer * size, (layer + 1) * size)
                assert made.held(0)[here] == made.after_blocks(0, before)[here]
                assert receiver.landed == list(range(layer + 1))
            await task
            for layer in (-1, LAYERS):
                with pytest.raises(ParamInvalid, match=f"layer_index is {layer}: the cache has {LAYERS} layers"):
                    await receiver.layer(layer)


@modes
@pytest.mark.parametrize("is_gated", [False, True], ids=["said", "gated"])
async def test_a_layer_of_one_tensor(one_sided: bool, is_gated: bool) -> None:
    """Keys and values of a layer are packed in one."""
    async with fan(one_sided=one_sided) as made, computing_stream(made) as compute:
        before, manager = made.held(0), made.source.datadist.cache_manager
        said = AwaitableLayerSynchronizer(2 * LAYERS)
        gated = EventLayerSynchronizer(made.source.datadist.device, 2 * LAYERS)
        config: Config
        if one_sided:
            config = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(2 * LAYERS), range(2 * LAYERS))
        else:
            config = TransferConfig(2, made.dsts[0].tensor_addrs)
        receiving = made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0], tensor_num_per_layer=1)
        async with receiving as receiver:
            synchronizer = gated if is_gated else said
            task = manager.transfer_cache_async(
                made.src, synchronizer, [config], [1, 2, 9], [4, 5, 0], tensor_num_per_layer=1
            )
            for layer in range(2 * LAYERS):
                assert receiver.landed == list(range(layer))
                if is_gated:
                    compute(layer // 2)
                    gated.record(layer, compute.stream)  # type: ignore[attr-defined]
                else:
                    made.compute(layer // 2)
                    said.ready(layer)
                await receiver.layer(layer)
            await task
        assert made.held(0) == made.after_blocks(0, before)
        with pytest.raises(ParamInvalid, match=f"{2 * LAYERS} tensors: must be a multiple of tensor_num_per_layer, 3"):
            manager.transfer_cache_async(made.src, said, [config], [1], [4], tensor_num_per_layer=3)
        with pytest.raises(ParamInvalid, match="tensor_num_per_layer is 0"):
            manager.transfer_cache_async(made.src, said, [config], [1], [4], tensor_num_per_layer=0)


@modes
@pytest.mark.parametrize("each", [2, 4])
async def test_a_receiver_counts_in_its_own_layers(one_sided: bool, each: int) -> None:
    """The sender has 8 layers of one tensor; the receiver counts pairs of them, or four together."""
    async with fan(one_sided=one_sided) as made:
        config: Config = TransferConfig(2, made.dsts[0].tensor_addrs)
        if one_sided:
            config = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(2 * LAYERS), range(2 * LAYERS))
        synchronizer, manager = AwaitableLayerSynchronizer(2 * LAYERS), made.targets[0].datadist.cache_manager
        async with manager.receive_layers(1, made.dsts[0], tensor_num_per_layer=each) as receiver:
            task = made.source.datadist.cache_manager.transfer_cache_async(
                made.src, synchronizer, [config], [1, 2, 9], [4, 5, 0], tensor_num_per_layer=1
            )
            news = task.progress()
            for tensor in range(2 * LAYERS):
                synchronizer.ready(tensor)
                await anext(news)
                await there_and_back(made.source, made.targets[0])
                assert receiver.landed == list(range((tensor + 1) // each))
            await task


@modes
async def test_a_receiver_of_single_tensors_hears_of_each(one_sided: bool) -> None:
    async with fan(one_sided=one_sided) as made:
        synchronizer, manager = AwaitableLayerSynchronizer(LAYERS), made.targets[0].datadist.cache_manager
        async with manager.receive_layers(1, made.dsts[0], tensor_num_per_layer=1) as receiver:
            task = made.blocks(synchronizer, [made.config(0, range(2), range(2, 4))])
            for layer in range(2):
                synchronizer.ready(layer)
                async with asyncio.timeout(20):
                    await receiver.layer(5 + 2 * layer)
                assert receiver.landed == [*range(4, 6 + 2 * layer)]
            await task


async def test_gated_layers_are_told_too() -> None:
    async with fan() as made, computing_stream(made) as compute:
        before = made.held(0)
        synchronizer = EventLayerSynchronizer(made.source.datadist.device, LAYERS)
        async with made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver:
            task = made.blocks(synchronizer)
            for layer in range(LAYERS):
                assert receiver.landed == list(range(layer))
                compute(layer)
                synchronizer.record(layer, compute.stream)  # type: ignore[attr-defined]
                await receiver.layer(layer)
                assert made.held(0) == made.after_blocks(0, before, range(layer + 1))
            await task


async def test_layers_are_numbered_as_at_the_destination() -> None:
    async with fan() as made, made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver:
        await made.blocks(Computing(made), [made.config(0, range(0, 2), range(2, 4))])
        await receiver.layer(3)
        assert receiver.landed == [2, 3]


async def test_layers_by_address_are_numbered_as_at_the_destination() -> None:
    async with (
        fan(one_sided=False) as made,
        made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver,
    ):
        await made.blocks(Computing(made), [made.config(0, range(0, 2), range(2, 4))])
        await until(lambda: len(receiver.landed) == 2)
        assert receiver.landed == [2, 3]


async def test_layers_by_address_may_come_in_any_order_at_the_destination() -> None:
    async with (
        fan(one_sided=False) as made,
        made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver,
    ):
        to, synchronizer = made.dsts[0].tensor_addrs, AwaitableLayerSynchronizer(LAYERS)
        config = TransferConfig(2, [*to[6:8], *to[0:2], *to[2:4]], range(3))
        task = made.blocks(synchronizer, [config])
        for layer, landed in enumerate(([3], [0, 3], [0, 1, 3])):
            synchronizer.ready(layer)
            await until(lambda: len(receiver.landed) == layer + 1)  # noqa: B023
            assert receiver.landed == landed
        await task


async def test_layer_by_address_is_told_when_the_last_of_its_tensors_has_landed() -> None:
    async with (
        fan(one_sided=False) as made,
        made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver,
    ):
        to, synchronizer = made.dsts[0].tensor_addrs, AwaitableLayerSynchronizer(LAYERS)
        config = TransferConfig(2, [to[0], to[2], to[1], to[5]], range(2))
        task = made.blocks(synchronizer, [config])
        synchronizer.ready(0)
        await anext(task.progress())
        await there_and_back(made.source, made.targets[0])
        assert receiver.landed == []
        synchronizer.ready(1)
        await task
        await there_and_back(made.source, made.targets[0])
        assert receiver.landed == [0], "of the layers 1 and 2, each has one tensor only"


@modes
async def test_opened_late(one_sided: bool) -> None:
    async with fan(one_sided=one_sided) as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        for layer in (0, 1):
            synchronizer.ready(layer)
        task = made.blocks(synchronizer)
        news = task.progress()
        for _ in range(2):
            await anext(news)
        async with made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver:
            async with asyncio.timeout(20):
                await receiver.layer(1)
                assert receiver.landed == [0, 1]
                for layer in (2, 3):
                    synchronizer.ready(layer)
                    await receiver.layer(layer)
        await task


async def test_the_receiver_hears_of_failures() -> None:
    async with fan() as made:
        manager = made.targets[0].datadist.cache_manager
        async with manager.receive_layers(1, made.dsts[0]) as receiver:
            synchronizer = AwaitableLayerSynchronizer(LAYERS)
            synchronizer.ready(0)
            task = made.blocks(synchronizer)
            await receiver.layer(0)
            synchronizer.fail(1)
            for _ in range(2):
                with pytest.raises(TransferError, match=r"synchronize_layer\(1\) gave the layer up") as caught:
                    await receiver.layer(1)
                assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
            await receiver.layer(0)
            assert await task.synchronize() is LLMStatusCode.LLM_PARAM_INVALID
        async with manager.receive_layers(1, made.dsts[0]) as receiver:  # anew
            task = made.blocks(AwaitableLayerSynchronizer(LAYERS))
            waiting = asyncio.ensure_future(receiver.layer(0))
            await there_and_back(made.source, made.targets[0])
            assert not waiting.done()
            task.cancel()
            with pytest.raises(TransferError, match="cancelled"):
                await waiting


async def test_the_receiver_hears_that_the_caches_do_not_fit() -> None:
    async with fan() as made, made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver:
        task = made.start(Immediate(), [made.config(0)], [0], [99])
        assert await task.synchronize() is LLMStatusCode.LLM_PARAM_INVALID
        async with asyncio.timeout(20):
            with pytest.raises(TransferError):
                await receiver.layer(0)


@pytest.mark.parametrize("force", [True, False])
async def test_the_receiver_hears_of_the_end_of_the_link(force: bool) -> None:
    async with fan() as made, made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver:
        waiting = asyncio.ensure_future(receiver.layer(0))
        await anyio.wait_all_tasks_blocked()
        assert not waiting.done()
        await made.source.datadist.unlink_clusters([cluster_info(made.targets[0])], force=force)
        async with asyncio.timeout(20):
            with pytest.raises(LinkError):
                await waiting


async def test_who_can_receive() -> None:
    async with fan() as made:
        manager, cache = made.targets[0].datadist.cache_manager, made.dsts[0]
        async with manager.receive_layers(1, cache):
            with pytest.raises(ParamInvalid, match=f"layers of cache {cache.cache_id} are being received already"):
                async with manager.receive_layers(1, cache):
                    pass
        async with manager.receive_layers(1, cache):
            pass
        with pytest.raises(NotLinked):
            async with manager.receive_layers(7, cache):
                pass
        with pytest.raises(ValueError, match="cluster_id is -1"):
            async with manager.receive_layers(-1, cache):
                pass


async def test_a_cancelled_wait_for_a_layer_leaves_the_others() -> None:
    async with fan() as made, made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver:
        waiting = asyncio.ensure_future(receiver.layer(0))
        await turns()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await made.blocks(Immediate())
        await receiver.layer(3)


# ---- arguments ----


class Never:
    """A synchronizer that must not be asked for anything."""

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        raise AssertionError("it was started")


@asynccontextmanager
async def nothing_started(made: Fan) -> AsyncIterator[None]:
    before = [made.held(i) for i in range(len(made.dsts))]
    yield
    await asyncio.sleep(0)
    assert made.entry.leases == 0
    assert not inside(made.source.datadist).layered
    assert [made.held(i) for i in range(len(made.dsts))] == before


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (((1, 2), None), ParamInvalid, "src_block_indices has 2 entries, dst_block_indices has 0"),
        ((None, [1]), ParamInvalid, "src_block_indices has 0 entries, dst_block_indices has 1"),
        (([1, 2], [1]), ParamInvalid, "dst_block_indices has 1: they must have the same length, at least 1"),
        (([1, 16], [1, 2]), ParamInvalid, r"src_block_indices\[1\] is 16: the source cache has 16 blocks"),
        (([-1], [1]), ValueError, r"src_block_indices.*-1"),
        (([1], [2**64]), ValueError, r"dst_block_indices.*18446744073709551616"),
        ((["1"], [1]), TypeError, "src_block_indices"),
        (({1}, [1]), TypeError, "src_block_indices"),
        (([1], 1), TypeError, "dst_block_indices"),
        (
            ([1], [1], 512),
            ParamInvalid,
            "dst_block_memory_size is 512: must be 1024, the bytes of a block of the source",
        ),
        (([1], [1], -1), ValueError, "dst_block_memory_size is -1"),
        (([1], [1], "1"), TypeError, "dst_block_memory_size is '1'"),
    ],
)
async def test_block_lists_of_a_blocks_source(words: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    async with fan() as made, nothing_started(made):
        with pytest.raises(kind, match=message):
            made.start(Never(), [made.config(0)], *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (([1], [1], 1024), "src_block_indices has 1 entries: a contiguous source has no blocks"),
        ((None, [1, 2, 3]), "dst_block_memory_size is missing"),
        ((None, [1, 2, 3], 0), "dst_block_memory_size is missing"),
        ((None, None, 1024), "dst_block_memory_size is 1024, but there are no dst_block_indices"),
        ((None, [], 1024), "dst_block_memory_size is 1024, but there are no dst_block_indices"),
    ],
)
async def test_block_lists_of_a_contiguous_source(words: tuple[Any, ...], message: str) -> None:
    async with fan(SLOTS, SLOTS) as made, nothing_started(made):
        with pytest.raises(ParamInvalid, match=message):
            made.start(Never(), [made.config(0)], *words)


async def test_sources_that_cannot_be() -> None:
    async with fan() as made, nothing_started(made):
        start = made.source.datadist.cache_manager.transfer_cache_async
        host = await made.source.blocks(CacheDesc(2, [4, 64], DataType.DT_UINT8, Placement.HOST), None)
        odd = await made.source.blocks(CacheDesc(3, [4, 64], DataType.DT_UINT8), None)
        config = [made.config(0)]
        with pytest.raises(TypeError, match="src_cache is None"):
            start(None, Never(), config, [0], [0])  # type: ignore[arg-type]
        with pytest.raises(ParamInvalid, match="src_cache is in host memory"):
            start(host, Never(), config, [0], [0])
        with pytest.raises(
            ParamInvalid, match="src_cache has 3 tensors: must be a multiple of tensor_num_per_layer, 2"
        ):
            start(odd, Never(), config, [0], [0])
        with pytest.raises(CacheNotFound, match="src_cache"):
            start(Cache(99, BLOCKS, [1] * 8, True), Never(), config, [0], [0])


@modes
async def test_synchronizers_and_configs_of_the_right_kind(one_sided: bool) -> None:
    async with fan(one_sided=one_sided) as made, nothing_started(made):
        right = made.config(0)
        wrong: Config = (
            TransferConfig(2, [1, 2])
            if one_sided
            else TransferWithCacheKeyConfig(BlocksCacheKey(2), range(1), range(1))
        )
        for synchronizer in (None, object(), Immediate):
            if synchronizer is not Immediate:
                with pytest.raises(TypeError, match=r"layer_synchronizer is .*must have synchronize_layer\(\)"):
                    made.blocks(synchronizer, [right])
        name = type(right).__name__
        with pytest.raises(TypeError, match=rf"transfer_configs\[1\] is .* not {name}"):
            made.blocks(Never(), [right, wrong])
        for nothing in (None, right):
            with pytest.raises(TypeError, match=f"transfer_configs is of type .*list or tuple of {name}"):
                made.start(Never(), nothing, [0], [0])  # type: ignore[arg-type]
        with pytest.raises(ParamInvalid, match="transfer_configs is empty"):
            made.start(Never(), [], [0], [0])


@modes
async def test_configs_that_do_not_fit_the_source(one_sided: bool) -> None:
    async with fan(one_sided=one_sided) as made, nothing_started(made):
        right = made.config(0)
        too_far = made.config(0, range(3, 5), range(2))
        with pytest.raises(ParamInvalid, match=r"src_layer_range is range\(3, 5\), but the cache has 4 layers"):
            made.blocks(Never(), [right, too_far])
        slot = made.config(0, src_slot=1)
        with pytest.raises(ParamInvalid, match="src_batch_index is 1"):
            made.blocks(Never(), [slot])
        if one_sided:
            uneven = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(2), range(2))
            uneven.src_layer_range = range(3)
            with pytest.raises(ParamInvalid, match="the same length"):
                made.blocks(Never(), [uneven])
            own = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(2), range(2))
            away = TransferWithCacheKeyConfig(BlocksCacheKey(9), range(2), range(2))
        else:
            with pytest.raises(ParamInvalid, match="3 dst_addrs for 1 layers: there must be 2 for each layer"):
                made.blocks(Never(), [TransferConfig(2, [1, 2, 3], range(1))])
            own, away = TransferConfig(1, [1, 2], range(1)), TransferConfig(9, [1, 2], range(1))  # type: ignore[assignment]
        with pytest.raises(ParamInvalid, match="names this cluster itself"):
            made.blocks(Never(), [right, own])
        with pytest.raises(NotLinked, match="cluster 9"):
            made.blocks(Never(), [right, away])


async def test_slots_that_there_are_not() -> None:
    async with fan(SLOTS, SLOTS) as made, nothing_started(made):
        with pytest.raises(ParamInvalid, match="src_batch_index is 3: the source has 3"):
            made.start(Never(), [made.config(0, src_slot=3)])
    async with fan(SLOTS, SLOTS) as made:
        task = made.start(Immediate(), [made.config(0, dst_slot=3)])
        with pytest.raises(LLMException, match="3"):
            await task


async def test_a_blocks_destination_has_no_batch_slots() -> None:
    async with fan() as made:
        key = CacheKeyByIdAndIndex(2, made.dsts[0].cache_id, 3)
        with pytest.raises(LLMException, match="batch index 3"):
            await made.blocks(Immediate(), [TransferWithCacheKeyConfig(key, range(LAYERS), range(LAYERS))])


async def test_contiguous_sources_need_exactly_as_many_blocks() -> None:
    async with fan(SLOTS, BLOCKS) as made:
        for wrong in ([0, 1], [0, 1, 2, 3]):
            task = made.start(Immediate(), [made.config(0)], None, wrong, 1024)
            with pytest.raises(ParamInvalid, match="exactly 3 blocks"):
                await task
        with pytest.raises(ParamInvalid, match="the peer's blocks have 1024 bytes, not 512"):
            await made.start(Immediate(), [made.config(0)], None, [0, 1, 2, 3, 4], 512)


async def test_a_layer_of_one_is_a_whole_transfer() -> None:
    async with fan() as made:
        before, source = made.held(0), Computing(made)
        report = await made.blocks(source, [made.config(0, range(2, 3))])
        assert source.asked == [(2, None)]
        assert report.bytes == 2 * 3 * BLOCKS.stride
        assert made.held(0) == made.after_blocks(0, before, range(2, 3))


@any_memory
async def test_eighty_layers_to_four() -> None:
    """Send the most layers, gated and all recorded by the compute stream."""
    count = 80
    desc = CacheDesc(2 * count, [16, 1024], DataType.DT_UINT8)
    async with fan(desc, desc, 4) as made:
        before = [made.held(i) for i in range(4)]
        device = made.source.datadist.device
        synchronizer, stream = EventLayerSynchronizer(device, count), device.open_stream("compute")
        task = made.blocks(synchronizer, [made.config(i, range(count)) for i in range(4)])
        for layer in range(count):
            made.compute(layer)
            synchronizer.record(layer, stream)
            await asyncio.sleep(0)
        assert await task.get_results() == [OK] * 4
        for i in range(4):
            assert made.held(i) == made.after_blocks(i, before[i], range(count))
        assert sorted((d.config_index, d.layer_index) for d in await arrived(task)) == [
            (i, layer) for i in range(4) for layer in range(count)
        ]
        await stream.aclose()


async def test_a_transfer_that_begins_when_its_receiver_is_open_is_told_whole() -> None:
    async with fan() as made:
        await made.blocks(Immediate())  # from here on the peer knows the destination, and begins at once
        async with made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0]) as receiver:
            synchronizer = AwaitableLayerSynchronizer(LAYERS)
            for layer in range(LAYERS):
                synchronizer.ready(layer)
            task = made.blocks(synchronizer)
            with anyio.fail_after(20):
                await receiver.layer(LAYERS - 1)
            await task
