"""Every public call from where its event loop is not: a forked child, a thread, another loop. It is refused, or does no harm.

Each public name of each class is in a table here, with what is to become of it elsewhere: a new one that is not fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlockLease,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheManager,
    CacheTask,
    DataType,
    ForkError,
    LayerReceiver,
    LLMDataDist,
    LLMException,
    LLMRole,
    Placement,
    TransferWithCacheKeyConfig,
    blocking,
)
from aiodatadist._blocking.layers import LayersHandle
from aiodatadist.context_caching import (
    ContextCache,
    EmsException,
    EmsForkError,
    EmsInvalidArgument,
    MemoryPool,
    Transfer,
)
from aiodatadist.testing import cluster_info, inside, linked_pair
from tests.blocking import pairs as blocking_pairs
from tests.context_caching.fakes import Foreign
from tests.context_caching.kit import ROOM, Kv, by_slots, opened
from tests.off_loop import Raised, in_child, in_thread

POOL = {"memory_size": 1 << 20, "page_shift": 12}
DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
SMALL = CacheDesc(2, [2, 64], DataType.DT_UINT8)
PEERS, THEIRS = BlocksCacheKey(1), CacheKeyByIdAndIndex(1, 1)
SLOTS = by_slots([0])

Call = Callable[[], Any]
Table = Mapping[str, Callable[..., Any]]
"""A public name, and a call of it with arguments that are right."""


class Scene:
    """A scene for calls: two linked clusters, of which this is the second, and the results of some calls."""

    def __init__(
        self, datadist: LLMDataDist, peer: Any, blocks: Cache, lease: BlockLease, receiver: LayerReceiver
    ) -> None:
        self.datadist = datadist
        self.manager = datadist.cache_manager
        self.peer = peer
        self.blocks = blocks
        self.lease = lease
        self.receiver = receiver
        self.slots: Cache
        self.host: Cache
        self.task: CacheTask
        self.ticket = lease.ticket()


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    options: dict[str, Any] = {"mem_pool_cfg": POOL, "host_mem_pool_cfg": POOL, "sync_kv_timeout": 20_000}
    async with linked_pair(DESC, **options) as (prompt, decoder, _, blocks), AsyncExitStack() as stack:
        manager = decoder.datadist.cache_manager
        receiver = await stack.enter_async_context(manager.receive_layers(1, blocks))
        lease = manager.lease_blocks(blocks, [1], 60)
        made = Scene(decoder.datadist, cluster_info(prompt), blocks, lease, receiver)
        made.slots = await manager.allocate_cache(SMALL, [CacheKey(2, 5)])
        host = CacheDesc(2, [8, 4096], DataType.DT_UINT8, Placement.HOST)
        made.host = await manager.allocate_blocks_cache(host)
        theirs = prompt.datadist.cache_manager.lease_blocks(prompt_cache(prompt), [1], 60)
        made.ticket = theirs.ticket()
        made.task = manager.pull_blocks(
            BlocksCacheKey(1, 77), blocks, [1], [5]
        )  # the peer is asked for what it has not
        yield made
        with contextlib.suppress(LLMException):
            await made.task
        assert (await manager.pull_blocks(PEERS, blocks, [1], [5])).bytes == 2 * 4096, "it goes on"
        assert [link.state for link in made.datadist.statistics().links] == ["ready"]


def prompt_cache(prompt: Any) -> Cache:
    (cache_id,) = prompt.memories
    entry = inside(prompt.datadist).registry.table.find(cache_id)
    assert entry is not None
    return entry.cache


def config() -> TransferWithCacheKeyConfig:
    return TransferWithCacheKeyConfig(PEERS, range(1), range(1))


ON_THE_LOOP: dict[type, Table] = {
    LLMDataDist: {
        "init": lambda s: s.datadist.init(),
        "finalize": lambda s: s.datadist.finalize(),
        "switch_role": lambda s: s.datadist.switch_role(LLMRole.PROMPT),
        "notify": lambda s: s.datadist.notify(1, b"x"),
        "notifications": lambda s: s.datadist.notifications(),
        "link_changes": lambda s: s.datadist.link_changes(),
        "link": lambda s: s.datadist.link("name", {1: 0, 2: 1}, "{}"),
        "wait_register_mem_status": lambda s: s.datadist.wait_register_mem_status(1),
        "unlink": lambda s: s.datadist.unlink(1),
        "check_link_status": lambda s: s.datadist.check_link_status(1),
        "link_clusters": lambda s: s.datadist.link_clusters([s.peer]),
        "link_to": lambda s: s.datadist.link_to(s.peer),
        "unlink_from": lambda s: s.datadist.unlink_from(1),
        "unlink_clusters": lambda s: s.datadist.unlink_clusters([s.peer]),
        "wait_linked": lambda s: s.datadist.wait_linked(1),
        "wait_link_closed": lambda s: s.datadist.wait_link_closed(1),
    },
    CacheManager: {
        "allocate_cache": lambda s: s.manager.allocate_cache(SMALL, timeout=60),
        "allocate_blocks_cache": lambda s: s.manager.allocate_blocks_cache(SMALL),
        "register_cache": lambda s: s.manager.register_cache(SMALL, arrays()),
        "register_blocks_cache": lambda s: s.manager.register_blocks_cache(SMALL, arrays()),
        "deallocate_cache": lambda s: s.manager.deallocate_cache(s.slots),
        "deallocate_blocks_cache": lambda s: s.manager.deallocate_blocks_cache(s.host),
        "remove_cache_key": lambda s: s.manager.remove_cache_key(CacheKey(2, 5)),
        "unregister_cache": lambda s: s.manager.unregister_cache(s.blocks.cache_id),
        "pull_blocks": lambda s: s.manager.pull_blocks(PEERS, s.blocks, [1], [5]),
        "pull_cache": lambda s: s.manager.pull_cache(CacheKey(1, 1), s.slots),
        "pull_leased": lambda s: s.manager.pull_leased(s.ticket, s.blocks, [3]),
        "lease_blocks": lambda s: s.manager.lease_blocks(s.blocks, [2], 1),
        "release_lease": lambda s: s.manager.release_lease(s.ticket),
        "push_blocks": lambda s: s.manager.push_blocks(PEERS, s.blocks, [1], [5]),
        "push_cache": lambda s: s.manager.push_cache(THEIRS, s.slots),
        "transfer_cache_async": lambda s: s.manager.transfer_cache_async(
            s.blocks, AwaitableLayerSynchronizer(1), [config()], [0], [0]
        ),
        "receive_layers": lambda s: s.manager.receive_layers(1, s.slots).__aenter__(),
        "wait_usable": lambda s: s.manager.wait_usable(s.blocks),
        "copy_cache": lambda s: s.manager.copy_cache(s.slots, s.slots, 0, 1),
        "copy_blocks": lambda s: s.manager.copy_blocks(s.blocks, {0: [1]}),
        "swap_blocks": lambda s: s.manager.swap_blocks(s.host, s.blocks, {0: 1}),
    },
    CacheTask: {
        "add_done_callback": lambda s: s.task.add_done_callback(lambda _: None),
        "cancel": lambda s: s.task.cancel(),
        "synchronize": lambda s: s.task.synchronize(1000),
        "get_results": lambda s: s.task.get_results(),
        "progress": lambda s: s.task.progress(),
        "__await__": lambda s: s.task,
    },
    BlockLease: {
        "ticket": lambda s: s.lease.ticket(),
        "wait_ended": lambda s: s.lease.wait_ended(),
        "withdraw": lambda s: s.lease.withdraw(),
        "renew": lambda s: s.lease.renew(1),
        "add_done_callback": lambda s: s.lease.add_done_callback(lambda _: None),
    },
    LayerReceiver: {"layer": lambda s: s.receiver.layer(0)},
}
"""What only the event loop of the cluster may do."""

ANY_THREAD: dict[type, Table] = {
    LLMDataDist: {
        "cache_manager": lambda s: s.datadist.cache_manager,
        "device": lambda s: s.datadist.device,
        "runtime": lambda s: s.datadist.runtime,
        "listen_address": lambda s: s.datadist.listen_address,
        "statistics": lambda s: s.datadist.statistics(),
    },
    CacheManager: {
        "arrays": lambda s: s.manager.arrays(s.host),
        "tensors": lambda s: s.manager.pool_usage(),  # as arrays, where torch is installed
        "pool_usage": lambda s: s.manager.pool_usage(),
    },
}
"""What may be asked from any thread, but not in a forked child."""

ANYWHERE: dict[type, frozenset[str]] = {
    LLMDataDist: frozenset({"cluster_id", "role", "instance", "config", "totals", "figures", "observer",
                            "query_register_mem_status"}),
    CacheManager: frozenset({"remap_registered_memory", "check_cache_key"}),
    CacheTask: frozenset({"peer", "done", "cancelled", "exception", "result", "send", "throw", "close"}),
    BlockLease: frozenset({"name", "blocks", "ended"}),
    LayerReceiver: frozenset({"landed"}),
}  # fmt: skip
"""Facts that the object has, functions of their arguments alone, and what is not for callers."""


def arrays() -> list[Any]:
    return [np.zeros((2, 64), np.uint8) for _ in range(2)]


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", ON_THE_LOOP, ids=lambda kind: kind.__name__)
def test_each_public_name_is_in_a_table(kind: type) -> None:
    listed = {*ON_THE_LOOP[kind], *ANY_THREAD.get(kind, ()), *ANYWHERE[kind]} - {"__await__"}
    assert public(kind) - listed == set(), "say what is to become of it in a forked child, and off its event loop"


async def in_another_loop(calls: Sequence[Call]) -> list[Raised]:
    """Return what each call raises in another event loop than the caller's. None may wait for what never comes."""

    async def here(call: Call) -> None:
        async with asyncio.timeout(10):
            made = call()
            if isinstance(made, Awaitable):
                await made
            elif hasattr(made, "__anext__"):
                await anext(made)

    return await in_thread([lambda call=call: asyncio.run(here(call)) for call in calls])  # type: ignore[misc]


async def in_forked_child(calls: Sequence[Call]) -> list[Raised]:
    return in_child(calls)


def check_refused(calls: Mapping[str, Call], errors: list[Raised], kind: type[Exception], words: str) -> None:
    for name, error in zip(calls, errors, strict=True):
        assert error, f"{name} was carried out"
        assert issubclass(error[0], kind), (name, error)
        assert words in error[1], (name, error)


def calls_of(table: Table, made: Any) -> dict[str, Call]:
    return {name: lambda call=call: call(made) for name, call in table.items()}  # type: ignore[misc]


ELSEWHERE = [
    pytest.param(in_thread, LLMException, "no event loop runs in this thread: cluster", id="a thread"),
    pytest.param(in_another_loop, LLMException, "belongs to another event loop", id="another loop"),
    pytest.param(in_forked_child, ForkError, "initialised before a fork", id="a forked child"),
]
fork = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@fork
@pytest.mark.parametrize("kind", ON_THE_LOOP, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("elsewhere", "error", "words"), ELSEWHERE)
async def test_what_only_the_event_loop_may_do_is_refused_elsewhere(
    kind: type, elsewhere: Callable[[Sequence[Call]], Awaitable[list[Raised]]], error: type[LLMException], words: str
) -> None:
    async with scene() as made:
        calls = calls_of(ON_THE_LOOP[kind], made)
        if elsewhere is in_forked_child and "finalize" in calls:
            assert in_child([calls.pop("finalize")]) == [None], "the cluster is the parent's"
        before = made.manager.pool_usage()
        check_refused(calls, await elsewhere(list(calls.values())), error, words)
        assert made.manager.pool_usage() == before


@fork
@pytest.mark.parametrize("kind", ANY_THREAD, ids=lambda kind: kind.__name__)
async def test_what_any_thread_may_ask_is_refused_in_a_forked_child_alone(kind: type) -> None:
    async with scene() as made:
        calls = calls_of(ANY_THREAD[kind], made)
        assert await in_thread(list(calls.values())) == [None] * len(calls)
        check_refused(
            calls, in_child(list(calls.values())), ForkError, f"initialised before a fork, in process {os.getpid()}"
        )


async def test_a_wait_that_began_on_its_loop_is_not_continued_on_another() -> None:
    async with scene() as made:
        notes = made.datadist.notifications()
        (error,) = await in_another_loop([lambda: notes])
        assert error
        assert issubclass(error[0], LLMException)
        assert "belongs to another event loop" in error[1]


# ---- a context cache ----

CONTEXT_CACHE: Table = {
    "aclose": lambda s: s.cache.aclose(),
    "register_kvcache": lambda s: s.cache.register_kvcache(s.kv.layers),
    "unregister_kvcache": lambda s: s.cache.unregister_kvcache(),
    "check_registered": lambda s: s.cache.check_registered(),
    "save": lambda s: s.cache.save([1], **SLOTS),
    "start_save": lambda s: s.cache.start_save([1], **SLOTS),
    "load": lambda s: s.cache.load([1], **SLOTS),
    "start_load": lambda s: s.cache.start_load([1], **SLOTS),
    "save_values": lambda s: s.cache.save_values(["a"], [[np.zeros(64, np.uint8)]]),
    "start_save_values": lambda s: s.cache.start_save_values(["a"], [[np.zeros(64, np.uint8)]]),
    "load_values": lambda s: s.cache.load_values(["a"], [[np.zeros(64, np.uint8)]]),
    "start_load_values": lambda s: s.cache.start_load_values(["a"], [[np.zeros(64, np.uint8)]]),
    "exists": lambda s: s.cache.exists([1]),
    "exists_values": lambda s: s.cache.exists_values(["a"]),
    "match_prefix": lambda s: s.cache.match_prefix([1]),
    "remove": lambda s: s.cache.remove([1]),
    "remove_values": lambda s: s.cache.remove_values(["a"]),
    "check_health": lambda s: s.cache.check_health(),
}
TRANSFER: Table = {
    "__await__": lambda s: s.transfer,
    "cancel": lambda s: s.transfer.cancel(),
    "quiesced": lambda s: s.transfer.quiesced(),
}
FACTS: dict[type, frozenset[str]] = {
    ContextCache: frozenset({"open", "observer", "figures", "statistics"}),
    Transfer: frozenset(
        {"add_done_callback", "done", "cancelled", "error", "outcome", "result", "what", "state",
         "is_done", "is_cancelled", "quiesce_seconds", "join", "started", "late", "send", "throw", "close"}
    ),
}  # fmt: skip


class ContextScene:
    def __init__(self, cache: ContextCache, kv: Kv, transfer: Transfer) -> None:
        self.cache, self.kv, self.transfer = cache, kv, transfer


def test_each_public_name_of_a_context_cache_is_in_a_table() -> None:
    assert public(ContextCache) - {*CONTEXT_CACHE, *FACTS[ContextCache]} == set()
    assert public(Transfer) - {*TRANSFER, *FACTS[Transfer]} == set()


@fork
@pytest.mark.parametrize(
    ("elsewhere", "error"),
    [
        pytest.param(in_thread, EmsInvalidArgument, id="a thread"),
        pytest.param(in_another_loop, EmsInvalidArgument, id="another loop"),
        pytest.param(in_forked_child, EmsForkError, id="a forked child"),
    ],
)
async def test_a_context_cache_is_used_on_its_loop_alone(
    elsewhere: Callable[[Sequence[Call]], Awaitable[list[Raised]]], error: type[EmsException]
) -> None:
    kv, go_on = Kv(), asyncio.Event()
    async with await MemoryPool.open(ROOM) as memory, opened(pool := Foreign(memory), kv) as cache:
        pool.misdeeds["exists_many"] = go_on.wait  # the transfer is under way
        made = ContextScene(cache, kv, cache.start_save([1], **SLOTS))
        calls = calls_of({**CONTEXT_CACHE, **TRANSFER}, made)
        if elsewhere is in_forked_child:
            calls.pop("aclose")
        words = "before a fork" if elsewhere is in_forked_child else "event loop"
        check_refused(calls, await elsewhere(list(calls.values())), error, words)
        go_on.set()
        assert (await made.transfer).success == 1
        assert (await cache.load([1], **SLOTS)).success == 1


# ---- without await: any thread may, and no forked child ----

PEER_KEY = blocking_pairs.KEY


class BlockingScene:
    def __init__(self, pair: blocking_pairs.Pair) -> None:
        self.source, self.target = pair.source, pair.target
        self.datadist, self.manager, self.cache = pair.target.datadist, pair.target.manager, pair.target.cache
        theirs = blocking.BlocksCacheKey(1)
        whole = blocking.TransferWithCacheKeyConfig(theirs, range(2), range(2))
        self.layers: LayersHandle = self.manager.submit_layers(self.cache, [whole], [3], [0])
        self.lease = self.manager.lease_blocks(self.cache, [1], 60)
        self.ticket = pair.source.manager.lease_blocks(pair.source.cache, [1], 60).ticket()
        self.whole = whole
        self.slots = self.manager.register_cache(SMALL, arrays())


BLOCKING: dict[type, Table] = {
    blocking.LLMDataDist: {
        "init": lambda s: s.datadist.init(blocking_pairs.options()),
        "cache_manager": lambda s: s.datadist.cache_manager,
        "kv_cache_manager": lambda s: s.datadist.kv_cache_manager,
        "link_clusters": lambda s: s.datadist.link_clusters([]),
        "unlink_clusters": lambda s: s.datadist.unlink_clusters([s.source.info]),
        "link_to": lambda s: s.datadist.link_to(s.source.info),
        "unlink_from": lambda s: s.datadist.unlink_from(1),
        "switch_role": lambda s: s.datadist.switch_role(LLMRole.PROMPT),
        "link": lambda s: s.datadist.link("name", {1: 0, 2: 1}, "{}"),
        "unlink": lambda s: s.datadist.unlink(1),
        "query_register_mem_status": lambda s: s.datadist.query_register_mem_status(1),
        "check_link_status": lambda s: s.datadist.check_link_status(1),
        "complete_request": lambda s: s.datadist.complete_request(blocking.LLMReq()),
        "check_capacity": lambda s: s.datadist.check_capacity(1),
        "add_model": lambda s: s.datadist.add_model({}, None),
        "statistics": lambda s: s.datadist.statistics(),
        "wait_register_mem_status": lambda s: s.datadist.wait_register_mem_status(1),
        "wait_linked": lambda s: s.datadist.wait_linked(1),
        "wait_link_closed": lambda s: s.datadist.wait_link_closed(1),
        "notify": lambda s: s.datadist.notify(1, b"x"),
        "next_notification": lambda s: s.datadist.next_notification(0.1),
        "listen_address": lambda s: s.datadist.listen_address,
    },
    blocking.CacheManager: {
        "allocate_cache": lambda s: s.manager.allocate_cache(SMALL, timeout=60),
        "allocate_blocks_cache": lambda s: s.manager.allocate_blocks_cache(SMALL),
        "register_cache": lambda s: s.manager.register_cache(SMALL, arrays()),
        "register_blocks_cache": lambda s: s.manager.register_blocks_cache(SMALL, arrays()),
        "deallocate_cache": lambda s: s.manager.deallocate_cache(s.cache),
        "deallocate_blocks_cache": lambda s: s.manager.deallocate_blocks_cache(s.cache),
        "remove_cache_key": lambda s: s.manager.remove_cache_key(CacheKey(2, 5)),
        "unregister_cache": lambda s: s.manager.unregister_cache(s.cache.cache_id),
        "pull_blocks": lambda s: s.manager.pull_blocks(PEER_KEY, s.cache, [1], [1]),
        "pull_cache": lambda s: s.manager.pull_cache(CacheKey(1, 1), s.slots),
        "push_blocks": lambda s: s.manager.push_blocks(PEER_KEY, s.cache, [1], [1]),
        "push_cache": lambda s: s.manager.push_cache(THEIRS, s.slots),
        "copy_cache": lambda s: s.manager.copy_cache(s.slots, s.slots, 0, 1),
        "copy_blocks": lambda s: s.manager.copy_blocks(s.cache, {0: [1]}),
        "swap_blocks": lambda s: s.manager.swap_blocks(s.cache, s.cache, {0: 1}),
        "remap_registered_memory": lambda s: s.manager.remap_registered_memory([]),
        "transfer_cache_async": lambda s: s.manager.transfer_cache_async(s.cache, Ready(), [s.whole], [3], [0]),
        "arrays": lambda s: s.manager.arrays(s.cache),
        "tensors": lambda s: s.manager.tensors(s.cache),
        "pool_usage": lambda s: s.manager.pool_usage(),
        "pull_leased": lambda s: s.manager.pull_leased(s.ticket, s.cache, [3]),
        "release_lease": lambda s: s.manager.release_lease(s.ticket),
        "lease_blocks": lambda s: s.manager.lease_blocks(s.cache, [2], 1),
        "receive_layers": lambda s: s.manager.receive_layers(1, s.cache).__enter__(),
        "submit_pull_blocks": lambda s: s.manager.submit_pull_blocks(PEER_KEY, s.cache, [1], [1]),
        "submit_pull_cache": lambda s: s.manager.submit_pull_cache(CacheKey(1, 1), s.slots),
        "submit_push_blocks": lambda s: s.manager.submit_push_blocks(PEER_KEY, s.cache, [1], [1]),
        "submit_push_cache": lambda s: s.manager.submit_push_cache(THEIRS, s.slots),
        "submit_layers": lambda s: s.manager.submit_layers(s.cache, [s.whole], [3], [0]),
        "drain": lambda s: s.manager.drain(),
    },
    LayersHandle: {
        "cancel": lambda s: s.layers.cancel(),
        "wait": lambda s: s.layers.wait(),
        "layer_ready": lambda s: s.layers.layer_ready(0),
        "layer_failed": lambda s: s.layers.layer_failed(0),
    },
    blocking.BlockLease: {
        "ticket": lambda s: s.lease.ticket(),
        "wait_ended": lambda s: s.lease.wait_ended(1),
        "withdraw": lambda s: s.lease.withdraw(),
        "renew": lambda s: s.lease.renew(1),
    },
}
BLOCKING_FACTS: dict[type, frozenset[str]] = {
    blocking.LLMDataDist: frozenset({"finalize", "close", "cluster_id", "stats", "figures", "observer"}),
    blocking.CacheManager: frozenset({"check_cache_key", "max_submitted", "set_is_call_linked"}),
    LayersHandle: frozenset(
        {"poll", "done", "exception", "failed_blocks", "report", "operation", "tag", "start_with", "begin"}
    ),
    blocking.BlockLease: frozenset({"ended", "name"}),
}


class Ready(blocking.LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


@pytest.fixture
def blocking_scene() -> Iterator[BlockingScene]:
    with blocking_pairs.linked_pair() as pair:
        made = BlockingScene(pair)
        yield made
        made.layers.cancel()
        assert made.layers.wait(10)
        pair.pull()
        pair.target.check({b: (0, b) for b in blocking_pairs.EVERYTHING})


@pytest.mark.parametrize("kind", BLOCKING, ids=lambda kind: kind.__name__)
def test_each_public_name_without_await_is_in_a_table(kind: type) -> None:
    assert public(kind) - {*BLOCKING[kind], *BLOCKING_FACTS[kind]} == set()


@fork
@pytest.mark.parametrize("kind", BLOCKING, ids=lambda kind: kind.__name__)
def test_in_a_forked_child_a_call_without_await_is_refused(blocking_scene: BlockingScene, kind: type) -> None:
    calls = calls_of(BLOCKING[kind], blocking_scene)
    check_refused(calls, in_child(list(calls.values())), ForkError, f"before a fork, in process {os.getpid()}")
