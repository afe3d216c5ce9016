"""Cancelled at any await, its own or one of the link's behind it, an operation gives everything back and harms nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheNotFound,
    DataType,
    LinkError,
    LLMRole,
    LLMStatusCode,
    Placement,
    RegisterMemStatus,
    TransferTimeout,
)
from aiodatadist._cache import digester
from aiodatadist._cache.digester import Digester
from aiodatadist._cache.table import Entry
from aiodatadist._link import Link
from aiodatadist._link.data.channels import Channels
from aiodatadist._link.reactions import Reactions
from aiodatadist._link.transfers.asked_checksums import AskedChecksums
from aiodatadist._link.transfers.pull_requests import PullRequests
from aiodatadist._link.transfers.requester import Requester
from aiodatadist._link.transfers.responder import Responder
from aiodatadist._testing.cancelling import CancelAt
from aiodatadist._testing.views import registry_of, transfers_of
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    inside,
    linked_pair,
    open_cluster,
    soft_counters,
    soft_fault,
    soft_faults_cleared,
    soft_hold,
    verify,
)
from tests.stopwatch import lasting
from tests.strict.marks import any_memory

BLOCKS = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
SLOTS = CacheDesc(2, [4, 1000], DataType.DT_UINT8)
POOL = '{"memory_size": 4194304}'
MOST = 200
"""Awaits of one operation: none of them has as many."""
SHORT = 0.2
"""Seconds after which a transfer that hangs is stopped; of no other one, because a busy machine may take as long."""
END = 3.0
"""Seconds that finalize() may take."""

hows = pytest.mark.parametrize("how", ["task", "scope"])
Operation = Callable[[], Coroutine[Any, Any, Any]]


# ---- cancelling ----


@dataclass(frozen=True)
class Spot:
    """A place whose awaits are counted: the operation itself, or a method that works for it in another task."""

    owner: Any = None
    method: str = ""

    def __str__(self) -> str:
        return self.method or "caller"


CALLER = Spot()


class Struck:
    """A run of an operation that is cancelled when the spot suspends for the k-th time."""

    def __init__(self, spot: Spot, k: int, how: str) -> None:
        self._spot = spot
        self._k = k
        self._how = how
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[None] | None = None
        self.was_struck = False

    def strike(self) -> None:
        if self.was_struck or self._task is None:
            return
        self.was_struck = True
        if self._how == "scope":
            self._scope.cancel()
        else:
            self._task.cancel()

    async def run(self, operation: Operation, patch: pytest.MonkeyPatch) -> bool:
        """Run the operation; return False if it ended before the cancellation. Errors raised then are raised."""
        spot = self._spot
        if spot.owner is not None:
            original = getattr(spot.owner, spot.method)

            async def watched(*args: Any) -> Any:
                return await CancelAt(self._k, original(*args), self.strike)

            patch.setattr(spot.owner, spot.method, watched)

        async def body() -> None:
            with self._scope:
                await (CancelAt(self._k, operation(), self.strike) if spot.owner is None else operation())

        self._task = asyncio.create_task(body())
        await asyncio.wait([self._task], timeout=20)
        assert self._task.done(), f"it hangs when cancelled at await {self._k} of {spot}"
        if not self.was_struck:
            self._task.result()
        elif not self._task.cancelled():
            assert self._task.exception() is None, self._task.exception()
        else:
            assert self._how == "task", "a scope's cancellation left its scope"
        return self.was_struck


async def at_every_await(
    spot: Spot, how: str, operation: Operation, oracle: Operation, prepare: Operation | None = None
) -> None:
    """Cancel it at its first await, its second, ..., until it ends undisturbed. The oracle speaks after each."""
    for k in range(1, MOST):
        if prepare is not None:
            await prepare()
        with pytest.MonkeyPatch.context() as patch, soft_faults_cleared():
            was_struck = await Struck(spot, k, how).run(operation, patch)
        try:
            await oracle()
        except Exception as error:
            error.add_note(f"after await {k} of {spot}, struck: {was_struck}")
            raise
        if not was_struck:
            assert k > 1, f"{spot} never waited: nothing was tested"
            return
    raise AssertionError(f"{spot} waited {MOST} times")


# ---- what has to hold afterwards ----


async def until(condition: Callable[[], bool], what: str, seconds: float = 2.0) -> None:
    """Poll for a condition that no event reports."""
    with anyio.move_on_after(seconds):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.001)
    assert condition(), what


def entry_of(cluster: Cluster, cache: Cache) -> Entry:
    entry = inside(cluster.datadist).registry.table.find(cache.cache_id)
    assert entry is not None
    return entry


class Scene:
    """Two linked clusters, and what they have when nothing happens."""

    def __init__(self, prompt: Cluster, decoder: Cluster, source: Cache, target: Cache) -> None:
        self.prompt, self.decoder, self.source, self.target = prompt, decoder, source, target
        self.tasks = 0

    @property
    def manager(self) -> Any:
        return self.decoder.datadist.cache_manager

    def link(self, cluster: Cluster) -> Link:
        return inside(cluster.datadist).links.find(3 - cluster.datadist.cluster_id)

    async def pull(self, source: int = 3, target: int = 4) -> None:
        await self.manager.pull_blocks(BlocksCacheKey(1), self.target, [source], [target])

    async def all_is_back(self) -> None:
        """Check that no lease, no transfer and no task is left, but for the tasks that a link always has."""
        for cluster, cache in ((self.prompt, self.source), (self.decoder, self.target)):
            link, entry = self.link(cluster), entry_of(cluster, cache)
            operations = link.transfers.running.operations
            await until(lambda link=link, o=operations: not transfers_of(link) and not o, f"{link} is busy")  # type: ignore[misc]
            await until(lambda entry=entry: entry.leases == 0, f"{entry.leases} leases")  # type: ignore[misc]
            assert entry.holders <= {link.session}
            assert not link.session.questions
            assert not any(operation.is_doubtful for operation in link.transfers.running.operations)
            assert all(s.running == 0 for s in cluster.datadist.statistics().links)
        await until(lambda: len(asyncio.all_tasks()) <= self.tasks, f"stray tasks: {asyncio.all_tasks()}")

    async def no_byte_lands(self, cluster: Cluster, cache: Cache, control: Callable[[], Awaitable[None]]) -> None:
        """Check that only the control transfer writes. It brings block 3 to 4, behind everything still under way."""
        memory = cluster.memory(cache)
        memory.view()[:] = bytes(memory.nbytes)
        await control()
        owner = 3 - cluster.datadist.cluster_id
        verify(memory, cache, [(t, 4, owner, 3) for t in range(BLOCKS.num_tensors)])
        view = memory.view()
        for at in range(BLOCKS.num_tensors * 8):
            if at % 8 != 4:
                assert not any(view[at << 12 : (at + 1) << 12]), f"block {at % 8} of tensor {at // 8} changed"


@asynccontextmanager
async def scene(**options: Any) -> AsyncIterator[Scene]:
    """Open a linked pair that must end in time and leave nothing."""
    names = ("device_bytes", "pinned_bytes", "adopted", "imported", "streams", "events", "comms")
    before, tasks = soft_counters(), len(asyncio.all_tasks())
    with ExitStack() as ending:
        async with linked_pair(BLOCKS, **{"mem_pool_cfg": POOL, "sync_kv_timeout": 30_000, **options}) as parts:
            found = Scene(*parts)
            await found.pull()
            await until(lambda: not found.link(found.decoder).session.questions, "the first pull does not end")
            found.tasks = len(asyncio.all_tasks())
            yield found
            ending.enter_context(lasting(END))
    after = soft_counters()
    assert {n: after[n] for n in names} == {n: before[n] for n in names}
    await until(lambda: len(asyncio.all_tasks()) <= tasks, f"stray tasks: {asyncio.all_tasks()}")


# ---- pulls ----

first_pulls = pytest.mark.parametrize(
    ("one_sided", "spot"),
    [
        (True, CALLER),  # which alone awaits: the answer's callback goes on
        (False, CALLER),
    ],
    ids=lambda value: str(value) if isinstance(value, Spot) else ("one_sided", "request")[not value],
)


@hows
@first_pulls
async def test_a_first_pull(one_sided: bool, spot: Spot, how: str, no_leaks: None) -> None:
    async with scene(enable_remote_cache_accessible=one_sided) as all_of:

        async def pull() -> None:
            forget(all_of.link(all_of.decoder))
            await all_of.manager.pull_blocks(BlocksCacheKey(1), all_of.target, range(8), range(8))

        async def oracle() -> None:
            await all_of.no_byte_lands(all_of.decoder, all_of.target, all_of.pull)
            await all_of.all_is_back()

        await at_every_await(spot, how, pull, oracle)


@any_memory
@hows
@pytest.mark.parametrize("spot", [CALLER, Spot(PullRequests, "_wait_and_line_up")], ids=str)
async def test_a_request_for_memory_that_is_made_known_first(spot: Spot, how: str, no_leaks: None) -> None:
    async with scene(enable_remote_cache_accessible=False) as all_of:
        desc = CacheDesc(2, [8, 4096], DataType.DT_UINT8, Placement.HOST)
        manager, caches = all_of.decoder.datadist.cache_manager, list[Cache]()

        async def prepare() -> None:
            addresses = np.zeros((2, 8, 4096), np.uint8)
            caches.append(await manager.register_blocks_cache(desc, [each.ctypes.data for each in addresses]))
            kept.append(addresses)

        async def pull() -> None:
            await manager.pull_blocks(BlocksCacheKey(1), caches[-1], range(8), range(8))

        async def oracle() -> None:
            kept[-1][:] = 0
            await manager.pull_blocks(BlocksCacheKey(1), caches[-1], [3], [4])
            assert all(each[4].any() and not each[:4].any() and not each[5:].any() for each in kept[-1])
            await all_of.all_is_back()

        kept = list[Any]()
        await at_every_await(spot, how, pull, oracle, prepare)


def forget(link: Link) -> None:
    """Make the next pull a first one: the peer has to be asked."""
    for cache in list(link.session.catalogue._caches.values()):
        link.session.catalogue.withdraw(cache.cache_id)


@hows
@pytest.mark.parametrize("first", ["cancellation", "answer"])
async def test_a_pull_cancelled_in_the_tick_in_which_the_answer_comes(
    how: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = Struck(CALLER, MOST, how)
    original = Reactions.on_answer

    def answer(here: Reactions, message: Any) -> None:
        if first == "cancellation":
            struck.strike()
        original(here, message)
        struck.strike()

    monkeypatch.setattr(Reactions, "on_answer", answer)
    async with scene() as all_of:

        async def pull() -> None:
            forget(all_of.link(all_of.decoder))
            await all_of.manager.pull_blocks(BlocksCacheKey(1), all_of.target, range(8), range(8))

        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")  # if it is started all the same, it has to be stopped
            with lasting(2):
                assert await struck.run(pull, monkeypatch)
        await all_of.no_byte_lands(all_of.decoder, all_of.target, all_of.pull)
        await all_of.all_is_back()


@contextmanager
def stopped_by_the_puller() -> Iterator[None]:
    """Let the owner, whose time is up at the same moment, stop writing only when the puller waits for that."""
    with pytest.MonkeyPatch.context() as patch, soft_hold("aclrtStreamAbort") as abort:
        stop = PullRequests._stop

        async def and_release(*given: Any) -> None:
            asyncio.get_running_loop().call_soon(abort.release)
            await stop(*given)

        patch.setattr(PullRequests, "_stop", and_release)
        yield


@hows
@pytest.mark.parametrize("spot", [CALLER, Spot(PullRequests, "_stop"), Spot(Responder, "_write")], ids=str)
async def test_a_request_while_its_owner_hangs(spot: Spot, how: str, no_leaks: None) -> None:
    has_task = spot.owner is Responder  # there it has none without a reason
    async with scene(enable_remote_cache_accessible=False) as all_of:

        async def pull() -> None:
            soft_fault("HcclBatchPut:hang")
            with stopped_by_the_puller(), contextlib.suppress(TransferTimeout):
                await all_of.manager.pull_blocks(
                    BlocksCacheKey(1), all_of.target, range(8), range(8), checksum=has_task, deadline=SHORT
                )

        async def oracle() -> None:
            await all_of.no_byte_lands(all_of.decoder, all_of.target, all_of.pull)
            await all_of.all_is_back()

        await at_every_await(spot, how, pull, oracle)


@hows
@pytest.mark.parametrize("whose", ["client", "server"])
@pytest.mark.parametrize("spot", [CALLER, Spot(Requester, "_arrange"), Spot(Channels, "_open_further")], ids=str)
async def test_a_pull_that_needs_a_further_channel(spot: Spot, whose: str, how: str, no_leaks: None) -> None:
    async with scene() as all_of:
        one, other = all_of.decoder, all_of.prompt
        mine = all_of.target
        if whose == "server":
            one, other, mine = other, one, all_of.source
        owner, number = other.datadist.cluster_id, 10
        manager = one.datadist.cache_manager

        async def prepare() -> None:
            nonlocal number
            number += 1
            await other.blocks(BLOCKS, number)

        async def pull() -> None:
            await manager.pull_blocks(BlocksCacheKey(owner, number), mine, range(8), range(8))

        async def control() -> None:
            with anyio.fail_after(20):
                await manager.pull_blocks(BlocksCacheKey(owner, number), mine, [3], [4])

        async def oracle() -> None:
            await all_of.no_byte_lands(one, mine, control)

        await at_every_await(spot, how, pull, oracle, prepare)


async def test_any_number_of_cancelled_renewals_leave_the_link_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene() as all_of:
        for number in range(1, 71):
            await all_of.prompt.blocks(BLOCKS, number)
            key = BlocksCacheKey(1, number)

            async def pull(key: BlocksCacheKey = key) -> None:
                await all_of.manager.pull_blocks(key, all_of.target, [1], [1])

            with monkeypatch.context() as patch:
                await Struck(Spot(Channels, "_hear"), 1, "task").run(pull, patch)
        with anyio.fail_after(20):
            await pull()
        for cluster in (all_of.prompt, all_of.decoder):
            old = all_of.link(cluster).session.channels._old
            await until(lambda old=old: len(old) < 8, f"{len(old)} outdated channels are open")  # type: ignore[misc]


@hows
@pytest.mark.parametrize(
    ("one_sided", "spot"),
    [
        (True, CALLER),
        (True, Spot(Requester, "_check")),
        (True, Spot(AskedChecksums, "_digests")),
        (True, Spot(Digester, "digests")),
        (False, Spot(PullRequests, "_compare")),
        (False, Spot(Responder, "_write")),
    ],
    ids=str,
)
async def test_a_pull_whose_checksums_are_compared(
    one_sided: bool, spot: Spot, how: str, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digester, "SMALL_BYTES", 0)  # what is small has no task
    async with scene(enable_remote_cache_accessible=one_sided) as all_of:

        async def pull() -> None:
            await all_of.manager.pull_blocks(BlocksCacheKey(1), all_of.target, range(8), range(8), checksum=True)

        async def oracle() -> None:
            await all_of.no_byte_lands(all_of.decoder, all_of.target, all_of.pull)
            await all_of.all_is_back()

        await at_every_await(spot, how, pull, oracle)


# ---- pushes and notifications ----


async def heard(cluster: Cluster, last: bytes) -> list[bytes]:
    """Return all notifications up to this one."""
    found: list[bytes] = []
    with anyio.fail_after(20):
        async for note in cluster.datadist.notifications():
            found.append(note.payload)
            if note.payload == last:
                break
    return found


@hows
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "known"])
async def test_a_push_with_a_notification(is_first: bool, how: str, no_leaks: None) -> None:
    big = CacheDesc(2, [8, 1 << 20], DataType.DT_UINT8)  # too much to be done at once
    async with scene() as all_of:
        mine = await all_of.decoder.blocks(big, 1)
        await all_of.prompt.blocks(big, 1)
        key = BlocksCacheKey(1, 1)
        await all_of.manager.pull_blocks(key, mine, [0], [0])
        number = 0

        async def push() -> None:
            nonlocal number
            number += 1
            if is_first:
                forget(all_of.link(all_of.decoder))
            await all_of.manager.push_blocks(key, mine, range(8), range(8), notify=b"pushed %d" % number)

        async def oracle() -> None:
            end = b"end %d" % number
            await all_of.manager.push_blocks(key, mine, [1], [2], notify=end)
            assert await heard(all_of.prompt, end) in ([end], [b"pushed %d" % number, end])
            await all_of.all_is_back()
            assert entry_of(all_of.decoder, mine).leases == 0

        await at_every_await(CALLER, how, push, oracle)


@hows
async def test_a_notification_that_waits_for_the_window(how: str) -> None:
    async with scene() as all_of:
        notify = all_of.decoder.datadist.notify
        filling = [b"%d" % i for i in range(64)]
        for k in range(1, MOST):
            for payload in filling:
                await notify(1, payload)
            struck = Struck(CALLER, k, how)
            with pytest.MonkeyPatch.context() as patch:
                late = asyncio.create_task(struck.run(lambda: notify(1, b"late"), patch))
                await anyio.wait_all_tasks_blocked()
                end = asyncio.create_task(notify(1, b"end"))
                found = await heard(all_of.prompt, b"end")
                was_struck = await late
            await end
            assert [payload for payload in found if payload != b"late"] == [*filling, b"end"]
            assert found.count(b"late") <= 1
            assert was_struck or found[-2] == b"late"
            await all_of.pull()
            await all_of.all_is_back()
            if not was_struck:
                assert k > 1
                return


# ---- caches ----


@hows
async def test_a_copy(how: str, no_leaks: None) -> None:
    slot = 8 << 20  # more than is copied in the submitting call
    big = CacheDesc(2, [4, slot], DataType.DT_UINT8)
    async with scene() as all_of:
        one, other = [await all_of.decoder.contiguous(big) for _ in range(2)]

        async def copy() -> None:
            await all_of.manager.copy_cache(one, other, 1, 2)

        async def oracle() -> None:
            memory = all_of.decoder.memory(one)
            memory.view()[:] = bytes(memory.nbytes)
            await all_of.manager.copy_cache(one, other, 3, 0)
            view = memory.view()
            assert not any(view[at] for at in (slot, 2 * slot - 1, 5 * slot, 6 * slot - 1))
            assert all(entry_of(all_of.decoder, cache).leases == 0 for cache in (one, other))
            await all_of.all_is_back()

        await at_every_await(CALLER, how, copy, oracle)


@hows
@pytest.mark.parametrize("who", ["ours", "the peer's"])
async def test_a_deallocation_that_waits_for_a_transfer(who: str, how: str, no_leaks: None) -> None:
    async with scene() as all_of:
        whole = all_of.manager.pool_usage()[Placement.DEVICE].free
        cache = all_of.target

        async def prepare() -> None:
            nonlocal cache
            cache = await all_of.manager.allocate_blocks_cache(BLOCKS, BlocksCacheKey(2, 5))
            await all_of.prompt.datadist.cache_manager.pull_blocks(BlocksCacheKey(2, 5), all_of.source, [0], [0])

        async def deallocate() -> None:
            if who == "ours":
                manager, key, into = all_of.manager, BlocksCacheKey(1), cache
            else:
                manager, key, into = all_of.prompt.datadist.cache_manager, BlocksCacheKey(2, 5), all_of.source
            soft_fault("HcclBatchGet:hang")
            task = manager.pull_blocks(key, into, [0], [1], deadline=SHORT)
            stopped = TransferTimeout if who == "ours" else (TransferTimeout, CacheNotFound)  # the owner takes it back
            assert not task.done()
            try:
                with lasting(1):
                    await all_of.manager.deallocate_blocks_cache(cache)
            finally:
                await task.synchronize()
                assert task.exception() is None or isinstance(task.exception(), stopped), task.exception()

        async def oracle() -> None:
            usage = all_of.manager.pool_usage
            await until(lambda: bool(usage()[Placement.DEVICE].free == whole), "the memory did not come back")
            await all_of.pull()
            await all_of.all_is_back()

        await at_every_await(CALLER, how, deallocate, oracle, prepare)


@hows
async def test_a_key_that_is_removed(how: str, no_leaks: None) -> None:
    async with scene() as all_of:
        owner, puller = all_of.manager, all_of.prompt.datadist.cache_manager
        into = await all_of.prompt.contiguous(SLOTS)
        key, cache = CacheKey(2, 0), into

        async def prepare() -> None:
            nonlocal key, cache
            key = CacheKey(2, key.req_id + 1)
            cache = await owner.allocate_cache(SLOTS, [key])
            await puller.pull_cache(key, into, 0)

        async def remove() -> None:
            soft_fault("HcclBatchGet:hang")
            task = puller.pull_cache(key, into, 1, deadline=SHORT)
            try:
                await owner.remove_cache_key(key)
            finally:
                await task.synchronize()
                await owner.deallocate_cache(cache)

        async def oracle() -> None:
            await owner.remove_cache_key(key)
            with pytest.raises(CacheNotFound):
                await puller.pull_cache(key, into, 0)
            await all_of.pull()
            await all_of.all_is_back()

        await at_every_await(CALLER, how, remove, oracle, prepare)


@hows
@any_memory
async def test_a_registration_after_linking(how: str, no_leaks: None) -> None:
    async with scene() as all_of:
        arrays = [np.full((8, 4096), i, np.uint8) for i in range(2)]
        adopted = soft_counters()["adopted"]
        registered = all_of.prompt.datadist.cache_manager

        async def register() -> None:
            cache = await registered.register_cache(SLOTS, [a.reshape(-1)[:4000] for a in arrays], [CacheKey(1, 7)])
            await registry_of(registered).unregister(cache.cache_id, False)

        async def oracle() -> None:
            for table_entry in list(registry_of(registered).table):
                if table_entry.cache_id != all_of.source.cache_id:
                    await registry_of(registered).unregister(table_entry.cache_id, False)
            assert soft_counters()["adopted"] == adopted
            await all_of.pull()
            await all_of.all_is_back()

        await at_every_await(CALLER, how, register, oracle)


# ---- links and roles ----


@hows
async def test_a_link_is_checked(how: str, no_leaks: None) -> None:
    async with scene() as all_of:

        async def check() -> None:
            await all_of.decoder.datadist.check_link_status(1)

        async def oracle() -> None:
            await check()
            await all_of.pull()
            await all_of.all_is_back()

        await at_every_await(CALLER, how, check, oracle)


@hows
async def test_a_role_is_switched(how: str, no_leaks: None) -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        await prompt.blocks(BLOCKS)
        cache = await decoder.blocks(BLOCKS)

        async def switch() -> None:
            await prompt.datadist.switch_role(LLMRole.MIX, {"llm.listenIpInfo": "127.0.0.1:0"})

        async def oracle() -> None:
            info = cluster_info(prompt)  # wherever it listens now, it says so, and can be linked
            assert (await decoder.datadist.link_clusters([info]))[0] is LLMStatusCode.LLM_SUCCESS
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [4])
            assert (await decoder.datadist.unlink_clusters([info]))[0] is LLMStatusCode.LLM_SUCCESS
            await until(lambda: not inside(prompt.datadist).links.has_any, "the link does not end")

        await at_every_await(CALLER, how, switch, oracle)


TABLE = json.dumps(
    {
        "version": "1.0",
        "server_count": "1",
        "status": "completed",
        "server_list": [
            {
                "server_id": "127.0.0.1",
                "device": [{"device_id": str(i), "device_ip": f"127.0.0.{i + 1}", "rank_id": str(i)} for i in range(2)],
            }
        ],
    }
)


@asynccontextmanager
async def two_members(link_total_time: int = 1) -> AsyncIterator[tuple[Cluster, Cluster, Cache]]:
    options: dict[str, Any] = {"listen_ip_info": None, "link_total_time": link_total_time}
    with ExitStack() as ending:
        async with open_cluster(1, **options) as prompt, open_cluster(2, device_id=1, **options) as decoder:
            await prompt.blocks(BLOCKS)
            yield prompt, decoder, await decoder.blocks(BLOCKS)
            ending.enter_context(lasting(END))


def pd() -> str:
    """Return the name of this process's communicator. Names count on the whole machine, where other tests run as well."""
    return f"pd {os.getpid()}"


async def linked_by_table(*members: Cluster, name: str = "") -> list[int]:
    return list(await asyncio.gather(*(member.datadist.link(name or pd(), {1: 0, 2: 1}, TABLE) for member in members)))


@hows
async def test_a_link_by_rank_table(how: str, no_leaks: None) -> None:
    before = soft_counters()
    async with two_members() as (prompt, decoder, cache):

        async def link() -> None:
            other = asyncio.create_task(prompt.datadist.link(pd(), {1: 0, 2: 1}, TABLE))
            mine = 0
            try:
                mine = await decoder.datadist.link(pd(), {1: 0, 2: 1}, TABLE)
            finally:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([other], timeout=10)
                    assert other.done(), "the other member waits on"
                    if other.exception() is None:
                        await prompt.datadist.unlink(other.result())
                    else:
                        assert isinstance(other.exception(), LinkError)
                    if mine:
                        await decoder.datadist.unlink(mine)

        async def oracle() -> None:
            clusters = (prompt, decoder)
            await until(lambda: not any(inside(c.datadist).links.has_any for c in clusters), "a link was left")
            numbers = await linked_by_table(*clusters, name=f"{pd()} again")
            with anyio.fail_after(20):
                await decoder.datadist.wait_linked(1)
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [4])
            for cluster, number in zip(clusters, numbers, strict=True):
                await cluster.datadist.unlink(number)

        await at_every_await(CALLER, how, link, oracle)
    after = soft_counters()
    for counter in ("device_bytes", "streams", "comms", "imported", "adopted"):
        assert after[counter] == before[counter], counter


@hows
async def test_an_unlink_by_number(how: str, no_leaks: None) -> None:
    async with two_members(20) as (prompt, decoder, _):
        numbers: list[int] = []

        async def prepare() -> None:
            numbers[:] = await linked_by_table(prompt, decoder)
            await asyncio.gather(decoder.datadist.wait_linked(1), prompt.datadist.wait_linked(2))

        async def unlink() -> None:
            await decoder.datadist.unlink(numbers[1])

        async def oracle() -> None:
            for cluster in (decoder, prompt):
                for comm_id in list(cluster.datadist._rank_groups._all):
                    await cluster.datadist.unlink(comm_id)
            clusters = (prompt, decoder)
            await until(lambda: not any(inside(c.datadist).links.has_any for c in clusters), "a link was left")

        await at_every_await(CALLER, how, unlink, oracle, prepare)


async def test_an_unlink_before_the_links_are_made_leaves_none() -> None:
    async with two_members() as (prompt, decoder, _):
        for _ in range(10):
            numbers = await linked_by_table(prompt, decoder)
            assert prompt.datadist.query_register_mem_status(numbers[0]) is RegisterMemStatus.PREPARING
            await asyncio.gather(prompt.datadist.unlink(numbers[0]), decoder.datadist.unlink(numbers[1]))
            engines = [inside(c.datadist) for c in (prompt, decoder)]
            await until(lambda engines=engines: not any(e.links.opening for e in engines), "a link is being made")  # type: ignore[misc]
            assert not any(engine.links.current for engine in engines), "unlinked, and linked afterwards"
