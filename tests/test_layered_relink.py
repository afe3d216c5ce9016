"""A layered transfer that is asked for while its link is being made again waits for it, as pulls and pushes do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheNotFound,
    CacheTask,
    EventLayerSynchronizer,
    FeatureNotEnabled,
    InternalError,
    LinkChanges,
    LinkClosed,
    LinkError,
    LinkPhase,
    LLMClusterInfo,
    LLMStatusCode,
    NotLinked,
    ParamInvalid,
    PeerLost,
    TransferTimeout,
    TransferWithCacheKeyConfig,
)
from aiodatadist._cluster.engine import Engine
from aiodatadist._layered.destination import Destination
from aiodatadist._link import AwaitedLink
from aiodatadist._testing.views import cut_link
from aiodatadist._wire.messages import Hello
from aiodatadist.testing import inside, open_cluster
from tests.clock import took
from tests.test_layered import BLOCKS, COMPUTED, LAYERS, OK, POOL, Blocking, Computing, Fan, Immediate, fan, modes
from tests.test_layered_checksums import layers
from tests.test_relink import QUICK, SUCCESS, Door, until

LINKED, LOST, GIVEN_UP = LinkPhase.LINKED, LinkPhase.LOST, LinkPhase.GIVEN_UP
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK

pytestmark = pytest.mark.timeout(60)


@dataclass
class Lost:
    """Cluster 1 has lost its link to cluster 2, which does not listen."""

    fan: Fan
    door: Door
    changes: LinkChanges

    @property
    def awaited(self) -> AwaitedLink:
        found = self.engine.relinker.awaited(2)
        assert found is not None
        return found

    @property
    def engine(self) -> Engine:
        return inside(self.fan.source.datadist)

    async def relink(self) -> None:
        await self.door.open()
        await until(self.changes, LINKED)
        await self.fan.targets[0].datadist.wait_linked(1)

    async def cut(self) -> None:
        await self.door.close()
        await cut_link(inside(self.fan.targets[0].datadist).links.any(1))
        await until(self.changes, LOST)

    def holds_nothing(self) -> bool:
        """Return True if no transfer waits here, none is under way, and the source is free."""
        return (
            len(self.awaited) == 0 and not self.engine.layered and self.fan.entry.leases == 0 and not tasks_of_layers()
        )


@asynccontextmanager
async def lost(one_sided: bool = True, count: int = 1, **options: Any) -> AsyncIterator[Lost]:
    relink = {**QUICK, "wait": 30, **options.pop("relink", {})}
    async with fan(count=count, one_sided=one_sided, relink=relink, **options) as made:
        state = Lost(made, Door(made.targets[0]), made.source.datadist.link_changes())
        await state.cut()
        yield state


def tasks_of_layers() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if "LayeredTransfer" in repr(task)]


def figures(made: Fan) -> Any:
    return made.source.datadist.figures().transfers["transfer_cache_async"].statuses


# ---- what waits ----


@modes
async def test_layers_go_out_when_the_link_is_there(one_sided: bool) -> None:
    """Send the layers that were ready before the link, and those that become ready then."""
    async with lost(one_sided) as state:
        made, synchronizer = state.fan, AwaitableLayerSynchronizer(LAYERS)
        before = made.held(0)
        task = made.blocks(synchronizer)
        for layer in range(2):
            made.compute(layer)
            synchronizer.ready(layer)
        await anyio.wait_all_tasks_blocked()
        assert (task.done(), task.peer, made.entry.leases, len(state.awaited)) == (False, 2, 1, 1)
        await state.door.open()
        news = task.progress()
        assert [(await anext(news)).layer_index for _ in range(2)] == [0, 1]
        assert made.held(0) == made.after_blocks(0, before, range(2))
        for layer in range(2, LAYERS):
            made.compute(layer)
            synchronizer.ready(layer)
        assert (await task).bytes == 3 * 2 * LAYERS * BLOCKS.stride
        assert made.held(0) == made.after_blocks(0, before)
        assert figures(made) == {"LLM_SUCCESS": 1}
        assert made.entry.layer_seconds is None  # nothing is known of how long layers took to be computed
        assert state.holds_nothing()
        await made.still_works()


@modes
@pytest.mark.parametrize("synchronizer", [Immediate, Computing, Blocking])
async def test_whatever_says_that_layers_are_ready(one_sided: bool, synchronizer: Any) -> None:
    async with lost(one_sided) as state:
        made, before = state.fan, state.fan.held(0)
        computed = synchronizer is not Immediate
        task = made.blocks(synchronizer(made) if computed else Immediate())
        await state.door.open()
        await task
        assert made.held(0) == made.after_blocks(0, before, owner=COMPUTED if computed else 1)
        assert state.holds_nothing()


@modes
async def test_layers_that_the_device_waits_for(one_sided: bool) -> None:
    async with lost(one_sided) as state:
        made, before = state.fan, state.fan.held(0)
        async with layers(made, is_gated=True) as each:
            task = made.blocks(each.synchronizer)
            for layer in range(2):
                each.ready(layer)
            await state.relink()
            for layer in range(2, LAYERS):
                each.ready(layer)
            await task
        assert made.held(0) == made.after_blocks(0, before)
        assert state.holds_nothing()


@modes
async def test_with_checksums(one_sided: bool) -> None:
    async with lost(one_sided, transfer_checksum=True) as state:
        made, before = state.fan, state.fan.held(0)
        task = made.blocks(Computing(made))
        await state.door.open()
        await task
        assert made.held(0) == made.after_blocks(0, before)
        assert state.holds_nothing()


@modes
async def test_a_destination_that_waits_does_not_hold_up_the_others(one_sided: bool) -> None:
    async with lost(one_sided, 2) as state:
        made, before = state.fan, [state.fan.held(i) for i in range(2)]
        task = made.blocks(Computing(made))
        news = task.progress()
        assert [(await anext(news)).cluster_id for _ in range(LAYERS)] == [3] * LAYERS
        assert (made.held(0), made.held(1)) == (before[0], made.after_blocks(1, before[1]))
        assert not task.done()
        await state.door.open()
        assert await task.get_results() == [OK, OK]
        assert made.held(0) == made.after_blocks(0, before[0])


@modes
async def test_any_number_begin_in_the_order_of_the_calls(one_sided: bool) -> None:
    async with lost(one_sided) as state:
        made, ended = state.fan, list[int]()
        synchronizers = [AwaitableLayerSynchronizer(LAYERS) for _ in range(20)]
        tasks = [made.blocks(each) for each in synchronizers]
        for number, task in enumerate(tasks):
            task.add_done_callback(partial(_note, ended, number))
        assert len(state.awaited) == made.entry.leases == 20
        for synchronizer in synchronizers:
            for layer in range(LAYERS):
                synchronizer.ready(layer)
        await state.door.open()
        for task in tasks:
            await task
        assert ended == sorted(ended)
        assert state.holds_nothing()


# ---- for how long ----


@pytest.mark.autojump
async def test_it_waits_no_longer_than_the_option_says() -> None:
    async with lost(count=2, relink={"first_delay": 6, "max_delay": 6, "wait": 20}) as state:
        made = state.fan
        with took(20):
            task = made.blocks(Immediate())
            assert await task.get_results() == [NOT_LINKED, OK]
        with pytest.raises(NotLinked, match=r"cluster 2 was not linked again within 20 s: no cluster") as failed:
            await task
        assert (failed.value.peer, failed.value.hint) == (2, "the link is still being re-established")
        assert state.holds_nothing()
        await state.relink()
        await made.still_works()


@pytest.mark.autojump
@modes
async def test_a_deadline_counts_from_the_call(one_sided: bool) -> None:
    async with lost(one_sided) as state:
        made, synchronizer = state.fan, AwaitableLayerSynchronizer(LAYERS)
        manager, configs = made.source.datadist.cache_manager, [made.config(0)]
        with (
            took(0.1),
            pytest.raises(TransferTimeout, match=r"0\.1 s from the call: the link to cluster 2 is not there yet"),
        ):
            await manager.transfer_cache_async(made.src, Immediate(), configs, [1], [4], deadline=0.1)
        with took(2):
            begun = manager.transfer_cache_async(made.src, synchronizer, configs, [1], [4], deadline=2)
            await state.relink()
            with pytest.raises(
                TransferTimeout,
                match=r"2 s from the call: 0 of \d+ layers have landed at cluster 2, layer 0 was not ready",
            ):
                await begun  # also when it has begun meanwhile
        assert state.holds_nothing()


async def test_without_the_option_it_does_not_wait() -> None:
    async with lost(relink={"wait": 0}) as state:
        with pytest.raises(
            NotLinked, match=r"the last link ended: .*the link is being re-established: await wait_linked\(\)"
        ):
            state.fan.blocks(Immediate())
        assert state.fan.entry.leases == 0


# ---- what does not wait ----


@modes
async def test_one_that_has_begun_fails_with_its_link(one_sided: bool) -> None:
    """Also where no layer was ready so far, and the same destination asked for once more waits."""
    async with lost(one_sided) as state:
        made, synchronizer = state.fan, AwaitableLayerSynchronizer(LAYERS)
        await state.relink()
        begun = made.blocks(synchronizer)
        await state.cut()
        with pytest.raises(PeerLost):
            await begun
        again = made.blocks(synchronizer)
        for layer in range(LAYERS):
            synchronizer.ready(layer)
        await state.door.open()
        await again
        assert state.holds_nothing()


@modes
async def test_arguments_are_checked_by_the_call(one_sided: bool) -> None:
    async with lost(one_sided) as state:
        made, config = state.fan, state.fan.config(0)
        with pytest.raises(ParamInvalid, match="src_layer_range"):
            made.blocks(Immediate(), [made.config(0, range(9), range(9))])
        with pytest.raises(ParamInvalid, match="layer_synchronizer has 1 layers"):
            made.blocks(AwaitableLayerSynchronizer(1))
        with pytest.raises(TypeError, match="synchronize_layer"):
            made.blocks(object())
        with pytest.raises(ParamInvalid, match="deadline"):
            made.source.datadist.cache_manager.transfer_cache_async(
                made.src, Immediate(), [config], [1], [4], deadline=-1
            )
        assert state.holds_nothing()


async def test_a_destination_that_is_not_linked_at_all_begins_none() -> None:
    async with lost() as state:
        stranger = TransferWithCacheKeyConfig(BlocksCacheKey(77))
        with pytest.raises(NotLinked, match="77"):
            state.fan.blocks(Immediate(), [state.fan.config(0), stranger])
        assert state.holds_nothing()


# ---- what ends it ----


class Never:
    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        await anyio.sleep_forever()
        return False


def synchronizer_of(kind: str, made: Fan) -> Any:
    if kind == "gated":
        return EventLayerSynchronizer(made.source.datadist.device, LAYERS)
    return AwaitableLayerSynchronizer(LAYERS) if kind == "told" else Never()


@modes
@pytest.mark.parametrize("kind", ["told", "gated", "walked"])
async def test_one_that_is_cancelled_leaves_nothing(one_sided: bool, kind: str) -> None:
    async with lost(one_sided) as state:
        made, before = state.fan, state.fan.held(0)
        task, other = (made.blocks(synchronizer_of(kind, made)) for _ in range(2))
        waiter = asyncio.create_task(_wait(other))
        await anyio.wait_all_tasks_blocked()
        assert bool(tasks_of_layers()) == (kind == "walked")
        assert task.cancel()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert other.cancelled()
        with pytest.raises(asyncio.CancelledError):
            await task
        await anyio.wait_all_tasks_blocked()
        assert state.holds_nothing()
        await state.relink()
        await anyio.wait_all_tasks_blocked()
        assert made.held(0) == before
        assert figures(made) == {"CANCELLED": 2}
        await made.still_works()


def _note(ended: list[int], number: int, _: CacheTask) -> None:
    ended.append(number)


async def _wait(task: CacheTask) -> None:
    await task


async def test_one_that_is_cancelled_while_it_begins_leaves_nothing() -> None:
    """Its destination is being looked for: in a task, which ends with it."""
    async with lost() as state:
        made, begun = state.fan, anyio.Event()
        task = made.blocks(AwaitableLayerSynchronizer(LAYERS))

        def cancel() -> None:
            task.cancel()
            begun.set()

        state.awaited.add(_Then(cancel))
        await state.door.open()
        await begun.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
        await anyio.wait_all_tasks_blocked()
        assert state.holds_nothing()
        await made.still_works()


class _Then:
    """Waits behind others, and says so when it is its turn."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def begin(self, link: object) -> None:
        self._call()

    def fail(self, error: Exception) -> None:
        raise AssertionError(error)


async def test_unlinking_ends_it() -> None:
    async with lost() as state:
        task = state.fan.blocks(Immediate())
        status, _ = await state.fan.source.datadist.unlink_clusters([LLMClusterInfo(2)])
        assert status is SUCCESS
        with pytest.raises(LinkClosed, match="was unlinked"):
            await task
        assert state.fan.entry.leases == 0


@pytest.mark.autojump
@pytest.mark.parametrize("kind", ["told", "gated", "walked"])
async def test_finalizing_ends_it(kind: str) -> None:
    async with lost() as state:
        task = state.fan.blocks(synchronizer_of(kind, state.fan))
        with took(0):
            await state.fan.source.datadist.finalize()
        with pytest.raises(LinkClosed, match="finalized"):
            await task
        assert not tasks_of_layers()


async def test_a_link_that_is_given_up_ends_it() -> None:
    async with lost(relink={"duration": 0.2}) as state:
        task = state.fan.blocks(Immediate())
        with pytest.raises(LinkError, match="no cluster can be reached"):
            await task
        await until(state.changes, GIVEN_UP)
        assert state.fan.entry.leases == 0


@modes
async def test_a_source_that_is_given_up_meanwhile(one_sided: bool) -> None:
    async with lost(one_sided, mem_pool_cfg=POOL) as state:
        made, manager = state.fan, state.fan.source.datadist.cache_manager
        allocated = await manager.allocate_blocks_cache(BLOCKS)
        task = manager.transfer_cache_async(allocated, Immediate(), [made.config(0)], [1], [4])
        giving_up = asyncio.create_task(manager.deallocate_blocks_cache(allocated))
        await anyio.wait_all_tasks_blocked()
        assert not giving_up.done()  # what waits leases its source
        before = made.held(0)
        await state.door.open()
        with pytest.raises(CacheNotFound, match="can no longer be used"):
            await task
        await giving_up
        assert made.held(0) == before


# ---- another peer than before ----


@modes
async def test_addresses_are_not_of_a_peer_that_was_started_again(one_sided: bool) -> None:
    """Fill the new peer's cache, if a key names it."""
    async with lost(one_sided) as state:
        made, address = state.fan, state.door._address
        task = made.blocks(Computing(made))
        await made.targets[0].datadist.finalize()
        assert address is not None
        where = f"{address[0]}:{address[1]}"
        async with open_cluster(
            2, device_id=3, listen_ip_info=where, enable_remote_cache_accessible=one_sided
        ) as fresh:
            made.targets[0], made.dsts[0] = fresh, await fresh.blocks(BLOCKS)
            before = made.held(0)
            if one_sided:
                await _filled_or_again(made, task)
                assert made.held(0) == made.after_blocks(0, before)
            else:
                with pytest.raises(CacheNotFound, match="is no longer the process that gave its dst_addrs"):
                    await task
                assert made.held(0) == before
            await made.still_works()
            await made.source.datadist.unlink_clusters([LLMClusterInfo(2)])


async def _filled_or_again(made: Fan, task: CacheTask) -> None:
    """Wait for the transfer, and repeat it if the peer was linked before it had its cache."""
    try:
        await task
    except CacheNotFound:
        await made.blocks(Computing(made))


async def test_a_peer_that_knows_no_checksums_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made_hello = Engine.hello

    def older(self: Engine, has_key: bool, peer: int | None) -> Hello:
        return made_hello(self, has_key, peer).model_copy(update={"minor": 0})

    async with lost() as state:
        made, manager = state.fan, state.fan.source.datadist.cache_manager
        task = manager.transfer_cache_async(made.src, Immediate(), [made.config(0)], [1], [4], checksum=True)
        monkeypatch.setattr(Engine, "hello", older)
        await state.relink()
        with pytest.raises(FeatureNotEnabled, match="knows no checksums"):
            await task
        assert state.holds_nothing()


async def test_one_that_cannot_begin_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lost() as state:
        made, begin, calls = state.fan, Destination.begin, iter(range(9))

        def begins(destination: Destination, link: Any) -> None:
            if next(calls) == 0:
                raise MemoryError("no room")
            begin(destination, link)

        first, second = made.blocks(Immediate()), made.blocks(Immediate())
        monkeypatch.setattr(Destination, "begin", begins)
        await state.door.open()
        with pytest.raises(InternalError, match="the transfer could not begin: MemoryError") as failed:
            await first
        assert failed.value.peer == 2
        assert isinstance(failed.value.__cause__, MemoryError)
        await second
        assert state.holds_nothing()


async def test_a_link_that_breaks_again_before_it_began() -> None:
    """The first one's beginning is the end of the link: the other waits on."""
    async with lost() as state:
        made, before = state.fan, state.fan.held(0)

        def breaks() -> None:
            state.engine.links.any(2).session.break_off(PeerLost("it broke"))

        state.awaited.add(_Then(breaks))
        task = made.blocks(Computing(made))
        await state.relink()
        await task
        assert made.held(0) == made.after_blocks(0, before)
        assert state.engine.links.peek(2).generation == 3  # type: ignore[union-attr]
        assert state.holds_nothing()
