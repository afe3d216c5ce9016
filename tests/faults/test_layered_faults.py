"""Layered transfers when a destination dies, a link ends or a caller cancels: each ends as it should, and harms nothing."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    Cache,
    EventLayerSynchronizer,
    LinkClosed,
    LinkError,
    LLMStatusCode,
    NotLinked,
    PeerLost,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from aiodatadist._device import Stream
from aiodatadist._layered import Destination, LayeredTransfer
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster, verify
from tests.faults.peer import LAYERED
from tests.faults.test_cancellation_whole import (
    CALLER,
    Operation,
    Scene,
    Spot,
    at_every_await,
    entry_of,
    forget,
    hows,
    scene,
)
from tests.faults.test_peer_killed import peer_process
from tests.profiles import at_night
from tests.stopwatch import lasting

LAYERS = 4
TOLD = 1.0
"""Seconds after which a caller that waits for a dead peer has been told."""


class Opened:
    """Layers become ready when the test says so, in one of the ways there are."""

    def __init__(self, way: str, cluster: Cluster, layers: int = LAYERS) -> None:
        self.synchronizer: Any = None
        self._stream: Stream | None = None
        if way == "gates":
            device = cluster.datadist.device
            self._stream = device.open_stream("compute")
            self.synchronizer = EventLayerSynchronizer(device, layers)
        elif way == "awaitable":
            self.synchronizer = AwaitableLayerSynchronizer(layers)
        else:
            self.synchronizer = Foreign(layers, way == "blocking")

    def open(self, layer: int) -> None:
        if self._stream is not None:
            self.synchronizer.record(layer, self._stream)
        else:
            self.synchronizer.ready(layer)

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
        if isinstance(self.synchronizer, Foreign):
            self.synchronizer.end()


class Foreign:
    """The user's own: a function that blocks, or a coroutine."""

    def __init__(self, layers: int, is_blocking: bool) -> None:
        self._ready = [threading.Event() for _ in range(layers)]
        self._inner = AwaitableLayerSynchronizer(layers)
        self.synchronize_layer: Callable[..., Any] = self._block if is_blocking else self._wait

    def ready(self, layer: int) -> None:
        self._ready[layer].set()
        self._inner.ready(layer)

    def end(self) -> None:
        for event in self._ready:
            event.set()

    def _block(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self._ready[layer_index].wait(20)

    async def _wait(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return await self._inner.synchronize_layer(layer_index, timeout_in_millis)


WAYS = ("gates", "awaitable", "coroutine", "blocking")
ways = pytest.mark.parametrize("way", WAYS)


# ---- a destination dies ----


@asynccontextmanager
async def prefill(*peers: Any) -> AsyncIterator[tuple[Cluster, Cache]]:
    async with open_cluster(2, device_id=1, sync_kv_timeout=30_000) as cluster:
        cache = await cluster.blocks(LAYERED)
        status, each = await cluster.datadist.link_clusters(list(peers), 10_000)
        assert status is LLMStatusCode.LLM_SUCCESS, each
        yield cluster, cache


def to(*cluster_ids: int) -> list[TransferWithCacheKeyConfig]:
    layers = range(LAYERS)
    return [TransferWithCacheKeyConfig(BlocksCacheKey(cluster_id), layers, layers) for cluster_id in cluster_ids]


@pytest.mark.parametrize(
    ("way", "k"),
    [
        (way, k) if k == 0 or (way, k) == ("gates", LAYERS - 1) else at_night(way, k)  # the last one is no special one
        for way in WAYS
        for k in range(LAYERS)
    ],
)
async def test_a_destination_killed_at_a_layer_costs_its_own_transfer_only(way: str, k: int) -> None:
    blocks = list(range(16))
    async with AsyncExitStack() as stack:
        (dies, first), (_, second) = [
            await stack.enter_async_context(peer_process(cluster_id, 1)) for cluster_id in (1, 3)
        ]
        cluster, cache = await stack.enter_async_context(prefill(first, second))
        manager = cluster.datadist.cache_manager
        opened = Opened(way, cluster)
        stack.push_async_callback(opened.aclose)
        task = manager.transfer_cache_async(cache, opened.synchronizer, to(1, 3), blocks, blocks)
        progress: Any = await stack.enter_async_context(aclosing(task.progress()))
        for layer in range(k):
            opened.open(layer)
            for _ in range(2):
                await anext(progress)
        dies.send_signal(signal.SIGKILL)
        with lasting(TOLD), suppress(NotLinked):
            await cluster.datadist.wait_link_closed(1)
        for layer in range(k, LAYERS):
            opened.open(layer)
        async with asyncio.timeout(10):
            with pytest.raises(PeerLost) as caught:
                await task
            assert await task.get_results() == [caught.value.status_code, LLMStatusCode.LLM_SUCCESS]
        assert caught.value.peer == 1
        await manager.pull_blocks(BlocksCacheKey(3), cache, [5], [6])
        verify(cluster.memory(cache), cache, [(t, 6, 2, 5) for t in range(2 * LAYERS)])
        assert entry_of(cluster, cache).leases == 0


@ways
async def test_who_waits_for_a_layer_hears_of_the_death_of_the_only_destination_at_once(way: str) -> None:
    async with peer_process(1, 1) as (dies, info), prefill(info) as (cluster, cache):
        opened = Opened(way, cluster)
        task = cluster.datadist.cache_manager.transfer_cache_async(cache, opened.synchronizer, to(1), [0], [0])
        opened.open(0)
        await anext(task.progress())
        dies.send_signal(signal.SIGKILL)
        with lasting(TOLD), pytest.raises(PeerLost):
            await task
        await opened.aclose()


# ---- the link ends, the cluster is finalized ----


@ways
@pytest.mark.parametrize("how", ["unlink", "finalize"])
async def test_the_end_of_the_link_is_the_end_of_a_transfer_that_waits_for_a_layer(way: str, how: str) -> None:
    async with scene() as all_of:
        source = all_of.decoder.datadist
        opened = Opened(way, all_of.decoder, 1)
        task = all_of.manager.transfer_cache_async(all_of.target, opened.synchronizer, config(all_of), [1], [2])
        async with asyncio.timeout(10):
            if how == "unlink":
                await source.unlink_clusters([cluster_info(all_of.prompt)], 100)
            else:
                await opened.aclose()
                await source.finalize()
            with pytest.raises(LinkError) as caught:
                await task
        assert isinstance(caught.value, LinkClosed)
        await opened.aclose()


# ---- cancelled ----


def config(all_of: Scene) -> list[TransferConfig | TransferWithCacheKeyConfig]:
    if inside(all_of.manager).one_sided:
        return [TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(1))]
    return [TransferConfig(1, all_of.source.tensor_addrs, range(1))]


@dataclass(frozen=True)
class Send:
    """A layer sent to the peer, which may have to be asked first."""

    all_of: Scene
    way: str
    is_first: bool

    async def __call__(self) -> None:
        if self.is_first:
            forget(self.all_of.link(self.all_of.decoder))
        opened = Opened(self.way, self.all_of.decoder, 1)
        try:
            task = self.all_of.manager.transfer_cache_async(
                self.all_of.target, opened.synchronizer, config(self.all_of), range(8), range(8)
            )
            opened.open(0)
            await task
        finally:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 5):
                await opened.aclose()


spots = pytest.mark.parametrize(
    ("way", "is_first", "spot"),
    [
        ("awaitable", True, CALLER),
        ("awaitable", True, Spot(Destination, "prepare")),
        ("gates", False, CALLER),
        ("gates", True, Spot(LayeredTransfer, "_run")),
        ("coroutine", False, Spot(LayeredTransfer, "_walk")),
        ("blocking", True, Spot(LayeredTransfer, "_run")),
    ],
    ids=str,
)


@hows
@spots
@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])
async def test_cancelled_at_every_await(
    one_sided: bool, way: str, is_first: bool, spot: Spot, how: str, no_leaks: None
) -> None:
    async with scene(enable_remote_cache_accessible=one_sided) as all_of:

        async def control() -> None:
            synchronizer = AwaitableLayerSynchronizer(1)
            synchronizer.ready(0)
            await all_of.manager.transfer_cache_async(all_of.target, synchronizer, config(all_of), [3], [4])

        async def oracle() -> None:
            await all_of.no_byte_lands(all_of.prompt, all_of.source, control)
            await all_of.all_is_back()

        send: Operation = Send(all_of, way, is_first)
        await at_every_await(spot, how, send, oracle)


# ---- one transfer does not stand in another's way ----


async def test_gates_of_one_transfer_do_not_hold_up_the_next_on_the_same_link() -> None:
    async with scene() as all_of:
        first, second = (Opened("gates", all_of.decoder, 1) for _ in range(2))
        tasks = [
            all_of.manager.transfer_cache_async(all_of.target, opened.synchronizer, config(all_of), [block], [block])
            for opened, block in ((first, 1), (second, 2))
        ]
        second.open(0)
        async with asyncio.timeout(20):
            assert (await tasks[1]).bytes == 2 * 4096
        assert not tasks[0].done()
        first.open(0)
        await tasks[0]
        for opened in (first, second):
            await opened.aclose()


@pytest.mark.parametrize("who", ["source", "target"])
async def test_an_unlink_in_good_order_does_not_wait_for_gates_that_stay_shut(who: str) -> None:
    async with scene() as all_of:
        opened = Opened("gates", all_of.decoder, 1)
        task = all_of.manager.transfer_cache_async(all_of.target, opened.synchronizer, config(all_of), [1], [2])
        mine, theirs = all_of.decoder, all_of.prompt
        if who == "target":
            mine, theirs = theirs, mine
        with lasting(TOLD):
            await inside(mine.datadist).links.find(theirs.datadist.cluster_id).disconnect("over", 5)
            with pytest.raises(LinkClosed):
                await task
        await opened.aclose()


async def test_gates_of_cancelled_transfers_are_given_back() -> None:
    async with scene() as all_of:
        device = all_of.decoder.datadist.device
        for turn in range(6):
            opened = Opened("gates", all_of.decoder, 1)
            task = all_of.manager.transfer_cache_async(all_of.target, opened.synchronizer, config(all_of), [1], [2])
            if turn % 2:
                opened.open(0)
            task.cancel()
            await task.get_results()
            await opened.aclose()
        assert device._notifies == []
        assert len(device._spare_notifies) <= 1


async def test_an_event_of_the_users_that_raises_fails_its_own_transfer() -> None:
    class Raising(AwaitableLayerSynchronizer):
        def device_event(self, layer_index: int) -> int:
            raise IndexError("no such event")

    async with scene() as all_of:
        for is_ready_before in (True, False):
            synchronizer = Raising(1)
            if is_ready_before:
                synchronizer.ready(0)
            task = all_of.manager.transfer_cache_async(all_of.target, synchronizer, config(all_of), [1], [2])
            synchronizer.ready(0)
            assert await task.get_results() == [LLMStatusCode.LLM_FAILED]
            assert "no such event" in str(task.exception())
        await all_of.all_is_back()
