"""Priorities: the order of transfers on a link, and what neither of two takes from the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheTask,
    DataType,
    EventLayerSynchronizer,
    TransferPriority,
    TransferTimeout,
    TransferWithCacheKeyConfig,
)
from aiodatadist._wire.frames import Decoder, encode
from aiodatadist._wire.messages import KeyName, Pull
from aiodatadist.testing import (
    Cluster,
    SoftHold,
    cluster_info,
    linked_pair,
    open_cluster,
    soft_counters,
    soft_fault,
    soft_faults_cleared,
    soft_hold,
    verify,
)
from tests.held import there_and_back
from tests.strict.marks import STRICT

CRITICAL, NORMAL, BACKGROUND = TransferPriority
BLOCKS, BLOCK = 1024, 4096
DESC = CacheDesc(2, [BLOCKS, BLOCK], DataType.DT_UINT8)
MANY = list(range(0, BLOCKS, 2))
"""1024 ranges that are not merged: eight windows, of two calls of the device's library each."""


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    with soft_faults_cleared():
        yield


class Pair:
    """Cluster 2, which pulls from cluster 1 and pushes to it, and the order in which its transfers ended."""

    def __init__(
        self, prompt: Cluster, decoder: Cluster, source: Cache, target: Cache, is_one_sided: bool = True
    ) -> None:
        self.is_one_sided = is_one_sided
        self.prompt, self.decoder, self.source, self.target = prompt, decoder, source, target
        self.manager = decoder.datadist.cache_manager
        self.ended: list[str] = []

    def pull(self, name: str, blocks: list[int], priority: TransferPriority, **options: Any) -> CacheTask:
        key = BlocksCacheKey(1)
        task = self.manager.pull_blocks(key, self.target, blocks, blocks, priority=priority, **options)
        return self._watch(name, task)

    def push(self, name: str, blocks: list[int], priority: TransferPriority, **options: Any) -> CacheTask:
        key = BlocksCacheKey(1)
        task = self.manager.push_blocks(key, self.target, blocks, blocks, priority=priority, **options)
        return self._watch(name, task)

    def mover_held(self, nth: int = 1) -> AbstractContextManager[SoftHold]:
        """Hold a call that moves the bytes of a pull: in request/response mode the peer writes them."""
        return soft_hold("HcclBatchGet" if self.is_one_sided else "HcclBatchPut", nth=nth)

    async def all_arrived(self) -> None:
        """Wait until the peer knows of all that was started here."""
        await there_and_back(self.decoder, self.prompt)

    def _watch(self, name: str, task: CacheTask) -> CacheTask:
        task.add_done_callback(lambda _: self.ended.append(name))
        return task

    def check(self, pulled: set[int]) -> None:
        """Check that the peer's blocks are here, and nothing else was touched."""
        at = [(t, b, 1 if b in pulled else 2, b) for t in range(2) for b in range(BLOCKS)]
        verify(self.decoder.memory(self.target), self.target, at)

    @property
    def running(self) -> int:
        return self.decoder.datadist.statistics().links[0].running


@pytest.fixture(params=[True, False], ids=["one_sided", "requests"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with linked_pair(DESC, enable_remote_cache_accessible=request.param, sync_kv_timeout=60_000) as made:
        pair = Pair(*made, request.param)
        await pair.pull("first", [0], NORMAL)
        yield pair


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with linked_pair(DESC, sync_kv_timeout=60_000) as made:
        yield Pair(*made)


# ---- order ----


async def test_the_more_urgent_passes_and_all_bytes_arrive(either: Pair) -> None:
    either.ended.clear()
    with either.mover_held() as first, either.mover_held(nth=4) as second:
        background = either.pull("background", MANY, BACKGROUND)
        await first.arrived()
        began = monotonic()
        normal = either.pull("normal", [1, 5], NORMAL)
        critical = either.pull("critical", [3], CRITICAL)
        await (either.all_arrived() if STRICT == "roce" else critical)
        moved = monotonic()
        first.release()
        await second.arrived()
        passed = monotonic()
        await either.all_arrived()
        assert not background.done()
        waited = monotonic() - passed
        second.release()
        reports = await asyncio.gather(background, normal, critical)
    assert sorted(either.ended[:2]) == ["critical", "normal"]
    either.check({*MANY, 1, 3, 5})
    assert [report.bytes for report in reports] == [n * 2 * BLOCK for n in (len(MANY), 2, 1)]
    # In the one queue of RoCE the fourth window may be the background's own: how many it has depends on their speed.
    if STRICT != "roce":
        assert reports[0].queue_seconds >= waited, "it waited while the normal one ran"
    assert reports[0].transfer_seconds >= moved - began
    assert either.running == 0


async def test_equals_keep_their_order(either: Pair) -> None:
    either.ended.clear()
    with either.mover_held() as copy:
        names = [f"{priority}{i}" for priority in (BACKGROUND, CRITICAL, NORMAL) for i in range(3)]
        blocks = [MANY, *([i] for i in range(1, len(names)))]  # the first runs until all of them have arrived
        tasks = [either.pull(names[0], blocks[0], BACKGROUND)]
        await copy.arrived()  # what was submitted before is handed to the device with it, whatever its priority
        tasks += [
            either.pull(name, numbers, TransferPriority[name[:-1]])
            for name, numbers in zip(names[1:], blocks[1:], strict=True)
        ]
        await either.all_arrived()
        copy.release()
        await asyncio.gather(*tasks)
    critical, normal = names[3:6], names[6:]
    assert [name for name in either.ended if name in critical] == critical
    order = [name for name in either.ended if name not in {*critical, names[0]}]
    assert order == [*normal, *names[1:3]]


@pytest.mark.parametrize("priority", [CRITICAL, NORMAL])
async def test_the_more_urgent_does_not_wait_in_the_line_of_others(pair: Pair, priority: TransferPriority) -> None:
    """More are made than C takes at a time."""
    await pair.pull("first", [0], NORMAL)
    pair.ended.clear()
    with pair.mover_held() as copy:
        others = [pair.pull("background", [i % BLOCKS], BACKGROUND) for i in range(300)]
        await copy.arrived()
        urgent = pair.pull("urgent", [3], priority)
        copy.release()
        await urgent
        assert pair.ended.index("urgent") <= 1
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    assert pair.running == 0


@pytest.mark.parametrize("blocks", [MANY, MANY[:8]], ids=["large", "small"])
@pytest.mark.parametrize("lines", [2, 200])
async def test_what_is_passed_without_a_pause_ends_all_the_same(either: Pair, blocks: list[int], lines: int) -> None:
    """An eighth of the bytes that pass is left for it; its first window waits for more, as it could be larger."""
    others = [number + 1 for number in MANY]
    most = (8 * len(blocks) + 8 * len(MANY)) // len(others) + 2
    normal = [either.pull("normal", others, NORMAL) for _ in range(lines)]
    background = either.pull("background", blocks, BACKGROUND)
    passed = 0
    while not background.done():
        await normal[passed]
        passed += 1
        assert passed <= lines + most, "those before it, and those that pass it"
        normal.append(either.pull("normal", others, NORMAL))
    assert (await background).bytes == len(blocks) * 2 * BLOCK
    for task in normal:
        task.cancel()
    await asyncio.gather(*normal, return_exceptions=True)
    verify(either.decoder.memory(either.target), either.target, [(t, b, 1, b) for t in range(2) for b in blocks])
    assert either.running == 0


@pytest.mark.skipif(STRICT == "roce", reason="RoCE: all transfers take their turns in one stream")
async def test_a_link_has_a_stream_for_what_is_critical_when_it_needs_one(pair: Pair) -> None:
    await pair.pull("first", [0], NORMAL)
    before = soft_counters()["streams"]
    await pair.pull("background", MANY, BACKGROUND)
    assert soft_counters()["streams"] == before
    for _ in range(3):
        await pair.pull("critical", [3], CRITICAL)
        await pair.push("critical", [3], CRITICAL)
    assert soft_counters()["streams"] == before + 1


# ---- the end of the one is not that of the other ----


async def test_a_critical_transfer_that_hangs_takes_nothing_from_the_one_that_it_passed(pair: Pair) -> None:
    await pair.pull("first", [0], NORMAL)
    pair.ended.clear()
    soft_fault("HcclBatchGet:hang")
    with soft_hold("HcclBatchPut") as copy:
        background = pair.push("background", MANY, BACKGROUND)
        await copy.arrived()
        critical = pair.pull("critical", [3], CRITICAL, deadline=0.5)
        if STRICT == "roce":  # there it has its turn in the same stream
            copy.release()
        with pytest.raises(TransferTimeout, match=r"0\.5 s from the call"):
            await critical
    assert (await background).bytes == len(MANY) * 2 * BLOCK
    assert sorted(pair.ended) == ["background", "critical"]
    at = [(t, b, 2 if b in MANY and b else 1, b) for t in range(2) for b in range(BLOCKS)]
    verify(pair.prompt.memory(pair.source), pair.source, at)
    assert pair.running == 0
    await pair.pull("afterwards", [5], CRITICAL)
    pair.check({0, 5})


async def test_the_passed_one_can_be_cancelled_and_the_critical_one_ends_well(pair: Pair) -> None:
    await pair.pull("first", [0], NORMAL)
    with pair.mover_held() as first, pair.mover_held(nth=4) as second, soft_hold("aclrtStreamAbort") as abort:
        background = pair.pull("background", MANY, BACKGROUND)
        await first.arrived()
        critical = pair.pull("critical", [3], CRITICAL)
        critical.add_done_callback(lambda _: background.cancel())
        if STRICT == "roce":
            first.release()
        else:
            await critical
        await abort.arrived()
        for hold in (first, second, abort):
            hold.release()
        with pytest.raises(asyncio.CancelledError):
            await background
        assert (await critical).bytes == 2 * BLOCK
    failures = pair.decoder.datadist.statistics().links[0].failures
    assert failures == {"CANCELLED": 1}
    assert pair.running == 0


# ---- layers ----


async def test_layers_that_wait_for_the_device_do_not_hold_up_more_urgent_ones() -> None:
    async with linked_pair(DESC, sync_kv_timeout=60_000) as (prompt, _, source, _):
        manager, device = prompt.datadist.cache_manager, prompt.datadist.device
        stream = device.open_stream("compute")
        gated = EventLayerSynchronizer(device, 1)
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(1), range(1))
        await manager.push_blocks(BlocksCacheKey(2), source, [5], [5])  # so what follows is on the device at once
        waits = manager.transfer_cache_async(source, gated, [config], MANY, MANY, priority=BACKGROUND)
        ready = AwaitableLayerSynchronizer(1)
        ready.ready(0)
        await manager.transfer_cache_async(source, ready, [config], [1], [1], priority=CRITICAL)
        await manager.push_blocks(BlocksCacheKey(2), source, [3], [3], priority=CRITICAL)
        assert not waits.done()
        gated.record(0, stream)
        await waits
        await stream.aclose()


# ---- several links ----


async def test_a_link_with_many_transfers_does_not_starve_another() -> None:
    async with open_cluster(1) as one, open_cluster(2, device_id=1) as two, open_cluster(3, device_id=2) as three:
        target = await one.blocks(DESC)
        for peer in (two, three):
            await peer.blocks(DESC)
        await one.datadist.link_clusters([cluster_info(two), cluster_info(three)], 10_000)
        manager = one.datadist.cache_manager
        for cluster_id in (2, 3):
            await manager.pull_blocks(BlocksCacheKey(cluster_id), target, [0], [0])
        with soft_hold("HcclBatchGet") as copy:
            many = [manager.pull_blocks(BlocksCacheKey(2), target, [1], [1]) for _ in range(100)]
            await copy.arrived()
            await manager.pull_blocks(BlocksCacheKey(3), target, [2], [2])
            assert not any(task.done() for task in many)
            copy.release()
            for task in many:
                task.cancel()
            await asyncio.gather(*many, return_exceptions=True)


# ---- on the wire ----


def request(**options: Any) -> Pull:
    name = KeyName(kind="blocks", id=1, model_id=0)
    return Pull(
        call=1, name=name, slot=0, target=1, src_layers=None, dst_layers=None, tensors_per_layer=2, src_blocks=[1],
        dst_blocks=[1], dst_slot=0, nbytes=0, seconds=1.0, **options,
    )  # fmt: skip


@pytest.mark.parametrize("priority", TransferPriority)
def test_a_request_to_a_peer_that_knows_no_priorities_is_what_it_always_was(priority: TransferPriority) -> None:
    said = encode(request(priority=priority.value), 0)
    assert b"priority" not in said
    [message] = Decoder().feed(said)
    assert isinstance(message, Pull)
    assert message.priority == NORMAL.value


@pytest.mark.parametrize("priority", TransferPriority)
def test_a_priority_arrives(priority: TransferPriority) -> None:
    [message] = Decoder().feed(encode(request(priority=priority.value)))
    assert isinstance(message, Pull)
    assert TransferPriority(message.priority) is priority


# ---- what is refused ----


@pytest.mark.parametrize("wrong", [0, 1, None, "CRITICAL", True])
async def test_a_priority_is_one_of_three(pair: Pair, wrong: Any) -> None:
    for call in (pair.pull, pair.push):
        with pytest.raises(TypeError, match="priority is"):
            call("wrong", [1], wrong)
    synchronizer, config = AwaitableLayerSynchronizer(1), TransferWithCacheKeyConfig(BlocksCacheKey(1))
    with pytest.raises(TypeError, match="priority is"):
        pair.manager.transfer_cache_async(pair.target, synchronizer, [config], [1], [1], priority=wrong)
    assert pair.running == 0
