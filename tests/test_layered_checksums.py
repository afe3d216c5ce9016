"""Checksums of layered transfers: a layer counts as there when it is what was sent, and one that is not is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheTask,
    DataCorrupted,
    EventLayerSynchronizer,
    FeatureNotEnabled,
    LinkError,
    LLMException,
    LLMStatusCode,
    TransferConfig,
    TransferTimeout,
    TransferWithCacheKeyConfig,
)
from aiodatadist._cache.digester import Digester
from aiodatadist._cluster.engine import Engine
from aiodatadist._testing.views import cut_link
from aiodatadist._wire.messages import Hello
from aiodatadist.testing import inside, soft_fault, soft_faults_cleared
from tests.test_layered import BLOCKS, LAYERS, Fan, fan, modes

NAMED = r"layer {}: 1 of 3 pieces are not what was sent: block 4 \(CRC-32C"
DAMAGED = LLMStatusCode.LLM_FAILED


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    with soft_faults_cleared():
        yield


def start(made: Fan, synchronizer: object, checksum: bool | None = True, **options: Any) -> CacheTask:
    configs = options.pop("configs", None) or [made.config(i) for i in range(len(made.dsts))]
    manager = made.source.datadist.cache_manager
    return manager.transfer_cache_async(
        made.src, synchronizer, configs, [1, 2, 9], [4, 5, 0], checksum=checksum, **options
    )


class Layers:
    """Layers that the caller, or the device, reports as ready."""

    def __init__(self, made: Fan, is_gated: bool) -> None:
        self._made = made
        self._said = AwaitableLayerSynchronizer(LAYERS)
        self._gated = EventLayerSynchronizer(made.source.datadist.device, LAYERS) if is_gated else None
        self._stream = made.source.datadist.device.open_stream("compute")
        self.synchronizer: object = self._gated or self._said

    def ready(self, layer: int) -> None:
        self._made.compute(layer)
        if self._gated is None:
            self._said.ready(layer)
        else:
            self._gated.record(layer, self._stream)

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def layers(made: Fan, is_gated: bool) -> AsyncIterator[Layers]:
    each = Layers(made, is_gated)
    try:
        yield each
    finally:
        await each.aclose()


gates = pytest.mark.parametrize("is_gated", [False, True], ids=["told", "gated"])


@modes
@gates
async def test_layers_that_are_what_was_sent_are_told_as_ever(one_sided: bool, is_gated: bool) -> None:
    async with fan(one_sided=one_sided) as made, layers(made, is_gated) as each:
        before = made.held(0)
        receiving = made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0])
        async with receiving as receiver:
            task = start(made, each.synchronizer)
            progress = aiter(task.progress())
            for layer in range(LAYERS):
                each.ready(layer)
                assert (await anext(progress)).layer_index == layer
                await receiver.layer(layer)
            assert (await task).bytes == 3 * 2 * LAYERS * made.src.cache_desc.stride
        assert made.held(0) == made.after_blocks(0, before)
        assert made.entry.leases == 0


@modes
@gates
async def test_a_layer_with_a_flipped_bit_is_named_and_not_told(one_sided: bool, is_gated: bool) -> None:
    async with fan(one_sided=one_sided) as made, layers(made, is_gated) as each:
        receiving = made.targets[0].datadist.cache_manager.receive_layers(1, made.dsts[0])
        soft_fault("HcclBatchPut:flip=7@3")  # of the third layer, which is behind its gate before it is ready
        async with receiving as receiver:
            task = start(made, each.synchronizer)
            progress = aiter(task.progress())
            for layer in range(2):
                each.ready(layer)
                assert (await anext(progress)).layer_index == layer
                await receiver.layer(layer)
            each.ready(2)
            with pytest.raises(DataCorrupted, match=NAMED.format(2)) as caught:
                await task
            assert [done.layer_index async for done in progress] == []
            with pytest.raises(LLMException, match="not what was sent"):
                await receiver.layer(2)
        [(at_source, at_target)] = caught.value.digests
        assert caught.value.blocks == (4,)
        assert at_source != at_target
        assert caught.value.peer == 2
        figures = made.source.datadist.figures()
        assert figures.failure_causes["checksum"] == 1
        assert figures.transfers["transfer_cache_async"].statuses == {"LLM_FAILED": 1}
        assert made.entry.leases == 0
    async with fan(one_sided=one_sided) as made:
        await made.still_works()


@pytest.mark.parametrize("call", [1, 2, 3])
async def test_of_layers_that_travel_together_the_first_damaged_one_is_named(call: int) -> None:
    async with fan() as made:
        before, synchronizer = made.held(0), AwaitableLayerSynchronizer(LAYERS)
        soft_fault(f"HcclBatchPut:flip=-1@{call}")
        task = start(made, synchronizer)
        for layer in range(LAYERS):
            made.compute(layer)
            synchronizer.ready(layer)
        with pytest.raises(DataCorrupted) as caught:
            await task
        named = next(n for n in range(LAYERS) if f"layer {n}: 1 of 3 pieces" in str(caught.value))
        nbytes, wanted = 2 * BLOCKS.size, made.after_blocks(0, before)
        for layer in range(named + 1):
            place = slice(layer * nbytes, (layer + 1) * nbytes)
            assert (made.held(0)[place] == wanted[place]) is (layer < named)
        await made.still_works()


@modes
async def test_of_two_destinations_the_other_one_succeeds(one_sided: bool) -> None:
    async with fan(count=2, one_sided=one_sided) as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        before = made.held(1)
        for layer in range(LAYERS):
            made.compute(layer)
            synchronizer.ready(layer)
        soft_fault("HcclBatchPut:flip=0")
        results = await start(made, synchronizer).get_results()
        assert set(results) == {LLMStatusCode.LLM_SUCCESS, DAMAGED}
        assert (made.held(1) == made.after_blocks(1, before)) or results[1] is DAMAGED


async def test_addresses_may_name_tensors_in_any_order() -> None:
    async with fan(one_sided=False) as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        for layer in range(LAYERS):
            made.compute(layer)
            synchronizer.ready(layer)
        addresses = list(reversed(made.dsts[0].tensor_addrs))
        await start(made, synchronizer, configs=[TransferConfig(2, addresses)])
        soft_fault("HcclBatchPut:flip=0")
        with pytest.raises(DataCorrupted, match="layer 0: 1 of 6 pieces are not what was sent: block 4"):
            await start(made, synchronizer, configs=[TransferConfig(2, addresses)])


@pytest.mark.parametrize("checksum", [None, False])
@pytest.mark.parametrize("by_option", [False, True])
async def test_the_option_checks_all_but_what_says_otherwise(checksum: bool | None, by_option: bool) -> None:
    async with fan(transfer_checksum=by_option) as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        for layer in range(LAYERS):
            synchronizer.ready(layer)
        soft_fault("HcclBatchPut:flip=7")
        task = start(made, synchronizer, checksum)
        assert await task.synchronize() is (DAMAGED if by_option and checksum is None else LLMStatusCode.LLM_SUCCESS)


# ---- the end of it, while checksums are compared ----


class Held:
    """The peer's checksums come when they may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.may_go_on = anyio.Event(), anyio.Event()
        digests = Digester.digests

        async def later(digester: Digester, *which: Any) -> Any:
            self.asked.set()
            await self.may_go_on.wait()
            return await digests(digester, *which)

        monkeypatch.setattr(Digester, "digests", later)


@modes
@gates
async def test_one_that_is_cancelled_ends_at_once(
    one_sided: bool, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    async with fan(one_sided=one_sided) as made, layers(made, is_gated) as each:
        task = start(made, each.synchronizer)
        for layer in range(LAYERS):
            each.ready(layer)
        await held.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.entry.leases == 0
        held.may_go_on.set()
        await made.still_works()


async def test_one_whose_deadline_passes_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    Held(monkeypatch)
    async with fan() as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        task = start(made, synchronizer, deadline=0.2)
        for layer in range(LAYERS):
            synchronizer.ready(layer)
        with pytest.raises(TransferTimeout, match=r"0\.2 s from the call"):
            await task
        assert made.entry.leases == 0


async def test_comparing_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Held(monkeypatch)
    async with fan(sync_kv_timeout=200) as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        synchronizer.ready(0)
        with pytest.raises(TransferTimeout, match=r"checksums were not compared within 0\.2 s"):
            await start(made, synchronizer)
        assert made.entry.leases == 0


@pytest.mark.parametrize("is_soft", [True, False], ids=["unlinked", "broken"])
async def test_it_ends_with_its_link(is_soft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    async with fan() as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        task = start(made, synchronizer)
        for layer in range(LAYERS):
            synchronizer.ready(layer)
        await held.asked.wait()
        if is_soft:
            await made.targets[0].datadist.finalize()
        else:
            await cut_link(inside(made.source.datadist).links.any(2))
        with pytest.raises(LinkError):
            await task
        assert made.entry.leases == 0


async def test_a_destination_that_the_peer_takes_back_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the cache back at the peer, which waits until the transfer has ended."""
    held = Held(monkeypatch)
    pool = '{"memory_size": 4194304, "page_shift": 12}'
    async with fan(mem_pool_cfg=pool, sync_kv_timeout=300) as made:
        manager = made.targets[0].datadist.cache_manager
        cache = await manager.allocate_blocks_cache(BLOCKS, BlocksCacheKey(2, 5))
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2, 5), range(LAYERS), range(LAYERS))
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        task = start(made, synchronizer, configs=[config])
        for layer in range(LAYERS):
            synchronizer.ready(layer)
        await held.asked.wait()
        await manager.deallocate_blocks_cache(cache)
        assert task.done()
        assert task.exception() is not None
        assert made.entry.leases == 0


# ---- what is refused ----


async def test_a_peer_that_knows_no_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    made_hello = Engine.hello

    def older(self: Engine, has_key: bool, peer: int | None) -> Hello:
        return made_hello(self, has_key, peer).model_copy(update={"minor": 0})

    monkeypatch.setattr(Engine, "hello", older)
    async with fan() as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        with pytest.raises(FeatureNotEnabled, match="knows no checksums"):
            start(made, synchronizer)
        assert made.entry.leases == 0


async def test_wrong_arguments() -> None:
    async with fan() as made:
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        with pytest.raises(TypeError, match="checksum is"):
            start(made, synchronizer, 1)  # type: ignore[arg-type]
        assert made.entry.leases == 0
