"""The KvCacheManager mode without await: it does what the awaitable one does, fails as it does, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from inspect import isawaitable
from typing import Any

import numpy as np
import pytest

from aiodatadist._testing.views import call_on_loop, inner_of, shared_thread, thread_of
from aiodatadist.blocking import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheManager,
    CacheTask,
    DataType,
    KvCache,
    KvCacheManager,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMModel,
    LLMReq,
    LLMRole,
    LLMStatusCode,
    ModelRunner,
    Placement,
    TransferConfig,
)
from aiodatadist.errors import ForkError
from aiodatadist.testing import inside, soft_fault, soft_faults_cleared
from tests.blocking.v1_pairs import OK, Models, Writer, cluster, fill, filled, free, held, info_of, linked_pair, models
from tests.blocking.v1_pairs import request as req
from tests.legacy import pairs as awaitable_pairs
from tests.legacy.pairs import BLOCKS, SLOTS, UNSET, options, value
from tests.off_loop import in_child

S = LLMStatusCode
IDLE = LLMReq()


def status_of(call: Callable[[], Any], words: str = ".") -> LLMStatusCode:
    with pytest.raises(LLMException, match=words) as caught:
        call()
    return caught.value.status_code


# ---- modes ----


@pytest.mark.parametrize("extra", [{}, {"llm.EnableCacheManager": "0"}, {"llm.EnableRemoteCacheAccessible": "1"}])
def test_without_its_option_there_is_a_kv_cache_manager_and_no_other(extra: dict[str, str]) -> None:
    datadist = LLMDataDist(LLMRole.DECODER, 2)
    with pytest.raises(RuntimeError, match="not initialised"):
        _ = datadist.kv_cache_manager
    datadist.init({"ge.flowGraphMemMaxSize": "1048576", **extra})
    try:
        assert isinstance(datadist.kv_cache_manager, KvCacheManager)
        calls: dict[str, Callable[[], Any]] = {
            "cache_manager": lambda: datadist.cache_manager,
            "link": lambda: datadist.link("x", {1: 0, 2: 1}, "{}"),
            "unlink": lambda: datadist.unlink(1),
            "query_register_mem_status": lambda: datadist.query_register_mem_status(1),
            "wait_register_mem_status": lambda: datadist.wait_register_mem_status(1),
        }
        for what, call in calls.items():
            assert (
                status_of(call, f"{what} belongs to the CacheManager mode.*; set enable_cache_manager=True before init")
                is S.LLM_PARAM_INVALID
            )
    finally:
        datadist.finalize()


def test_one_object_may_have_another_mode_in_its_next_life() -> None:
    datadist = LLMDataDist(LLMRole.DECODER, 2)
    datadist.init({"llm.EnableCacheManager": "1"})
    assert isinstance(datadist.cache_manager, CacheManager)
    calls: dict[str, Callable[[], Any]] = {
        "kv_cache_manager": lambda: datadist.kv_cache_manager,
        "add_model": lambda: datadist.add_model({}, ModelRunner()),
        "complete_request": lambda: datadist.complete_request(req(1)),
        "check_capacity": lambda: datadist.check_capacity(1),
    }
    for what, call in calls.items():
        assert status_of(call, f"{what} belongs to the KvCacheManager mode") is S.LLM_PARAM_INVALID
    datadist.finalize()
    datadist.init({})
    first = datadist.kv_cache_manager
    assert first.is_initialized()
    datadist.finalize()
    datadist.init({})
    assert not first.is_initialized()
    assert datadist.kv_cache_manager.is_initialized()
    datadist.finalize()
    assert not first.is_initialized()
    assert status_of(lambda: first.allocate_cache(SLOTS)) is S.LLM_ENGINE_FINALIZED


# ---- caches ----


def test_slots_are_pulled_by_their_keys_copied_and_given_back() -> None:
    with linked_pair() as p:
        before = p.free()
        source = filled(p.owner, [CacheKey(1, 100), CacheKey(1, 101)])
        target = p.puller.allocate_cache(SLOTS)
        fill(p.puller, target)
        assert p.puller.pull_cache(CacheKey(1, 101), target, batch_index=2) is None
        assert held(p.puller, target) == [[value(t, 0), value(t, 1), value(t, 1)] for t in range(4)]
        assert status_of(lambda: p.puller.pull_cache(CacheKey(1, 101), target)) is S.LLM_KV_CACHE_NOT_EXIST
        assert p.puller.copy_cache(target, target, 0, 2) is None
        assert held(p.puller, target) == [[value(t, 1)] * 3 for t in range(4)]
        assert p.decoder.check_link_status(1) is None
        p.owner.remove_cache_key(CacheKey(1, 100))
        p.owner.deallocate_cache(source)
        p.puller.deallocate_cache(target)
        assert source.per_device_tensor_addrs == []
        assert p.free() == before
        done = p.decoder.stats()
        assert (done.succeeded, done.failed, done.failures) == (2, 1, {"LLM_KV_CACHE_NOT_EXIST": 1})
        assert done.bytes == 2 * 4 * 512
        assert p.decoder.close() == []
        assert p.decoder.stats() == done


def test_blocks_are_pulled_copied_and_swapped() -> None:
    with linked_pair() as p:
        source = p.owner.allocate_blocks_cache(BLOCKS, BlocksCacheKey(1, 3))
        target = p.puller.allocate_blocks_cache(BLOCKS)
        fill(p.owner, source)
        p.puller.pull_blocks(BlocksCacheKey(1, 3), target, [5, 9], [0, 1])
        p.puller.copy_blocks(target, {1: [2, 3]})
        rows = [np.zeros(BLOCKS.shape, np.uint8) for _ in range(4)]
        host_desc = CacheDesc(4, BLOCKS.shape, DataType.DT_UINT8, Placement.HOST)
        host = KvCache.create_cpu_cache(host_desc, [row.ctypes.data for row in rows])
        p.puller.swap_blocks(target, host, {0: 7, 3: 8})
        assert [(int(row[7, 0]), int(row[8, 255])) for row in rows] == [(value(t, 5), value(t, 9)) for t in range(4)]
        p.puller.swap_blocks(host, target, {7: 4})
        assert [row[:5] for row in held(p.puller, target)] == [[value(t, b) for b in (5, 9, 9, 9, 5)] for t in range(4)]


class InThread(LayerSynchronizer):
    def __init__(self) -> None:
        self.threads: set[str] = set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.threads.add(threading.current_thread().name)
        return True


def test_a_cache_is_written_to_the_peer_layer_by_layer() -> None:
    with linked_pair() as p:
        source, target = p.owner.allocate_blocks_cache(BLOCKS), p.puller.allocate_blocks_cache(BLOCKS)
        fill(p.owner, source)
        config = TransferConfig(2, target.per_device_tensor_addrs[0])
        synchronizer = InThread()
        task = p.owner.transfer_cache_async(source, synchronizer, [config], [3, 4], [0, 1])
        assert isinstance(task, CacheTask)
        assert task.synchronize(10_000) is OK
        assert task.get_results() == [OK]
        assert "aiodatadist loop" not in synchronizer.threads
        assert [array[:2, 0].tolist() for array in p.puller.arrays(target)] == [
            [value(t, 3), value(t, 4)] for t in range(4)
        ]
        assert p.prompt.stats().succeeded == 1


@pytest.mark.parametrize("where", ["this thread", "another", "the loop's"])
def test_a_cache_without_a_reference_left_is_given_back_in_whatever_thread_it_is_collected(where: str) -> None:
    with cluster(LLMRole.DECODER, 2) as datadist:
        manager = datadist.kv_cache_manager
        before = free(datadist)
        caches = [manager.allocate_cache(SLOTS)]
        caches.append(KvCache(caches[0].cache_id, SLOTS, [caches[0].tensor_addrs], manager))
        registry, cache_id = inside(datadist).registry, caches[0].cache_id
        assert free(datadist) < before
        cycle: dict[str, Any] = {"caches": caches}
        cycle["self"] = cycle
        gc.disable()
        try:
            del caches, cycle
            if where == "this thread":
                gc.collect()
            elif where == "another":
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(gc.collect).result()
            else:

                async def collect() -> None:
                    gc.collect()

                call_on_loop(datadist, collect)
        finally:
            gc.enable()
        call_on_loop(datadist, lambda: registry.wait_given_back(cache_id))
        assert free(datadist) == before


def test_caches_that_outlive_their_cluster_and_its_loop_are_dropped_quietly() -> None:
    with linked_pair() as p:
        source, target = filled(p.owner, [CacheKey(1, 7)]), p.puller.allocate_cache(SLOTS)
        model = p.prompt.add_model(options(), Writer(p.prompt))
        manager = p.owner
    assert shared_thread() is None
    assert status_of(partial(model.predict, req(1), [])) is S.LLM_ENGINE_FINALIZED
    assert not manager.is_initialized()
    dead = [weakref.ref(cache) for cache in (source, target)]
    del source, target, model
    gc.collect()
    assert [cache() for cache in dead] == [None, None]


# ---- links ----


def test_roles_are_switched_when_nothing_is_linked() -> None:
    with linked_pair(enable_switch_role=True) as p:
        assert status_of(lambda: p.decoder.switch_role(LLMRole.PROMPT, {})) is S.LLM_PARAM_INVALID
        listen = {"llm.listenIpInfo": "127.0.0.1:0"}
        assert status_of(lambda: p.decoder.switch_role(LLMRole.PROMPT, listen)) is S.LLM_EXIST_LINK
        assert p.decoder.unlink_clusters([info_of(p.prompt)], 5000) == (OK, [OK])
        p.decoder.switch_role(LLMRole.PROMPT, listen)
        p.prompt.switch_role(LLMRole.DECODER)
        source = filled(p.puller, [CacheKey(2, 9)])
        target = p.owner.allocate_cache(SLOTS)
        assert p.prompt.link_clusters([info_of(p.decoder)], 5000) == (OK, [OK])
        p.owner.pull_cache(CacheKey(2, 9), target, 1)
        assert [row[1] for row in held(p.owner, target)] == [value(t, 0) for t in range(4)]
        p.puller.deallocate_cache(source)


def test_a_link_does_one_thing_at_a_time_and_works_after_a_timeout(begun: threading.Event) -> None:
    with linked_pair(sync_kv_timeout=500) as p, ThreadPoolExecutor(1) as pool:
        source = filled(p.owner, [CacheKey(1, 7)])
        target = p.puller.allocate_cache(SLOTS)
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:hang")
            stuck = pool.submit(p.puller.pull_cache, CacheKey(1, 7), target)
            assert begun.wait(10)
            assert status_of(lambda: p.decoder.check_link_status(1)) is S.LLM_LINK_BUSY
            assert status_of(stuck.result) is S.LLM_WAIT_PROCESS_TIMEOUT
        p.puller.pull_cache(CacheKey(1, 7), target)
        assert p.decoder.stats().failures == {"LLM_WAIT_PROCESS_TIMEOUT": 1}
        p.owner.deallocate_cache(source)


# ---- failures ----

Wrong = Callable[[Any, Any, Any], Any]


WRONG: dict[str, Wrong] = {
    "keys of another role": lambda _, d, __: d.kv_cache_manager.allocate_cache(SLOTS, [CacheKey(2, 1)]),
    "a key that is bound": lambda p, _, __: p.kv_cache_manager.allocate_cache(SLOTS, [CacheKey(1, 7)]),
    "on the host": lambda p, _, __: p.kv_cache_manager.allocate_cache(
        CacheDesc(1, [1, 1], DataType.DT_UINT8, Placement.HOST)
    ),
    "more than there is": lambda p, _, __: p.kv_cache_manager.allocate_cache(
        CacheDesc(1, [1, 1 << 23], DataType.DT_UINT8)
    ),
    "no description": lambda p, _, __: p.kv_cache_manager.allocate_cache(None),
    "a PROMPT pulls": lambda p, _, c: p.kv_cache_manager.pull_cache(CacheKey(2, 1), c),
    "no such key": lambda _, d, c: d.kv_cache_manager.pull_cache(CacheKey(1, 99), c),
    "not linked": lambda _, d, c: d.kv_cache_manager.pull_cache(CacheKey(8, 1), c),
    "offset": lambda _, d, c: d.kv_cache_manager.pull_cache(CacheKey(1, 7), c, src_cache_offset=-1),
    "no blocks": lambda _, d, c: d.kv_cache_manager.pull_blocks(BlocksCacheKey(1), c, [], []),
    "a tuple of blocks": lambda _, d, c: d.kv_cache_manager.pull_blocks(BlocksCacheKey(1), c, (1,), [1]),
    "a DECODER removes keys": lambda _, d, __: d.kv_cache_manager.remove_cache_key(CacheKey(2, 1)),
    "a DECODER transfers": lambda _, d, c: d.kv_cache_manager.transfer_cache_async(c, None, []),
    "no such slot": lambda _, d, c: d.kv_cache_manager.copy_cache(c, c, 3),
    "no such tensor": lambda _, d, c: d.kv_cache_manager.get_cache_tensors(c, 4),
    "no such cache": lambda _, d, __: d.kv_cache_manager.get_cache_tensors(KvCache(99, SLOTS, [[1] * 4], None)),
    "no cache": lambda _, d, __: d.kv_cache_manager.deallocate_cache(None),
    "cache_key": lambda p, _, __: p.kv_cache_manager.check_cache_key(CacheKey(1, UNSET)),
    "a PROMPT links": lambda p, _, __: p.link_clusters([]),
    "no timeout": lambda _, d, __: d.link_clusters([LLMClusterInfo(8)], 0),
    "a PROMPT asks": lambda p, _, __: p.check_link_status(2),
    "no peer to ask": lambda _, d, __: d.check_link_status(9),
    "switching is off": lambda p, _, __: p.switch_role(LLMRole.DECODER),
    "no options": lambda p, _, __: p.add_model({}, ModelRunner()),
    "no runner": lambda p, _, __: p.add_model(options()),
    "not a runner": lambda p, _, __: p.add_model(options(), print),
    "no model": lambda p, _, __: p.check_capacity(1),
    "capacity of a DECODER": lambda _, d, __: d.check_capacity(1),
    "no request": lambda p, _, __: p.complete_request(None),
}

WRONG_MODELS: dict[str, Wrong] = {
    "empty": lambda p, _, __: p.predict([], []),
    "no request": lambda p, _, __: p.predict(None, []),
    "idle": lambda p, _, __: p.predict([IDLE], []),
    "twice": lambda p, _, __: p.predict([req(1), req(1)], []),
    "too many": lambda p, _, __: p.predict([req(1), req(2), req(3)], []),
    "no such prefix": lambda p, _, __: p.predict([req(1, 1, 5)], []),
    "not a batch": lambda _, d, __: d.predict([IDLE], []),
    "not merged": lambda _, d, __: d.predict([req(5), IDLE], []),
    "a PROMPT pulls": lambda p, _, __: p.pull_kv(req(1)),
    "no peer has it": lambda _, d, __: d.pull_kv(req(99)),
    "nothing is staged": lambda _, d, __: d.merge_kv(req(1), 0),
    "no such slot": lambda _, d, __: d.merge_kv(req(1), 2),
    "no pages": lambda _, d, __: d.pull_blocks(req(1), [1], [1]),
    "a DECODER loads": lambda _, d, __: d.preload_prompt_prefix(req(1, 0, 5), []),
    "no prefix": lambda p, _, __: p.preload_prompt_prefix(req(1), []),
    "nothing to release": lambda p, _, __: p.release_prompt_prefix(req(1, 0, 5)),
}

Failure = tuple[type[BaseException], object, str]


def failure(error: Exception) -> Failure:
    return type(error), getattr(error, "status_code", None), str(error)


async def awaited(wrong: Wrong, *subjects: Any) -> Failure | None:
    try:
        result = wrong(*subjects)
        if isawaitable(result):
            await result
    except Exception as error:
        return failure(error)
    return None


async def awaitable_failures() -> tuple[dict[str, Failure | None], dict[str, Failure | None]]:
    async with awaitable_pairs.pair() as p:
        source = await p.owner.allocate_cache(SLOTS, [CacheKey(1, 7)])
        target = await p.puller.allocate_cache(SLOTS)
        calls = {name: await awaited(wrong, p.prompt, p.decoder, target) for name, wrong in WRONG.items()}
        await p.owner.deallocate_cache(source)
    async with awaitable_pairs.models() as m:
        of_models = {name: await awaited(wrong, m.prompt, m.decoder, None) for name, wrong in WRONG_MODELS.items()}
    return calls, of_models


def raised(wrong: Wrong, *subjects: Any) -> Failure | None:
    try:
        wrong(*subjects)
    except Exception as error:
        return failure(error)
    return None


def test_every_failure_is_the_awaitable_one() -> None:
    calls, of_models = asyncio.run(awaitable_failures())
    assert None not in {*calls.values(), *of_models.values()}
    with linked_pair() as p:
        source, target = filled(p.owner, [CacheKey(1, 7)]), p.puller.allocate_cache(SLOTS)
        before = p.free()
        assert {name: raised(wrong, p.prompt, p.decoder, target) for name, wrong in WRONG.items()} == calls
        assert p.free() == before
        p.puller.pull_cache(CacheKey(1, 7), target)
        p.owner.deallocate_cache(source)
    with models() as m:
        assert {name: raised(wrong, m.prompt, m.decoder, None) for name, wrong in WRONG_MODELS.items()} == of_models


# ---- models ----


def test_a_request_goes_from_predict_to_its_slot_of_the_batch() -> None:
    with models() as m:
        before = m.pair.free()
        assert m.pair.prompt.check_capacity(4).is_available
        inputs = [(0, 0, [1, 2, 3]), (1, 0, [7])]
        assert m.prompt.predict([req(10), req(11)], inputs, answer=("logits", 5)) == ("logits", 5)
        for req_id, length, slot in ((11, 32, 0), (10, 3, 1)):
            assert m.decoder.pull_kv(req(req_id, length)) is None
            assert m.decoder.merge_kv(req(req_id), slot) is None
        assert m.pair.free() == before
        assert m.slot(0)[:2] == [7, 0]
        m.decoder.predict([req(11), req(10)], [(1, 3, [4])])
        assert m.slot(1)[:5] == [1, 2, 3, 4, 0]
        assert m.slot(1, tensor=3)[:5] == [3001, 3002, 3003, 3004, 0]
        assert m.pair.decoder.stats().succeeded == 4, "what models move is counted"
        m.prompt.predict(req(12), [])
        m.pair.prompt.complete_request(req(12))
        m.pair.decoder.complete_request(req(10))
        assert m.pair.free() == before
        assert status_of(lambda: m.decoder.predict([IDLE, req(10)], [])) is S.LLM_PARAM_INVALID
        assert m.reader.told == ["allocated"]
        m.pair.decoder.finalize()
        assert m.reader.told == ["allocated", "deallocated"]
        assert m.writer.told == []


def test_a_shared_prefix_is_in_the_slot_before_the_model_runs() -> None:
    with models() as m:
        before = m.pair.free()
        m.prompt.preload_prompt_prefix(req(UNSET, 3, 5), [(0, 0, [1, 2, 3])])
        m.prompt.predict(req(10, 5, 5), [(0, 3, [8, 9])])
        m.decoder.pull_kv(req(10, 5))
        m.decoder.merge_kv(req(10), 1)
        assert m.slot(1)[:6] == [1, 2, 3, 8, 9, 0]
        m.prompt.release_prompt_prefix(req(UNSET, 0, 5))
        assert m.pair.free() == before


def test_blocks_of_paged_attention_are_pulled() -> None:
    with linked_pair() as pair:
        paged = options("8,4,8", enable_page_attention=True, kv_tensor_format=None)
        writer, reader = Writer(pair.prompt), Writer(pair.decoder)
        m = Models(pair, pair.prompt.add_model(paged, writer), pair.decoder.add_model(paged, reader), writer, reader)
        m.prompt.predict(req(10), [(3, 0, [5, 6, 7, 8])])
        assert m.decoder.pull_blocks(req(10), [3], [1]) is None
        assert m.slot(1) == [5, 6, 7, 8]


word: ContextVar[str] = ContextVar("word", default="nothing")


def test_a_model_runs_in_a_worker_thread_with_the_callers_context_and_may_call_back() -> None:
    with models() as m:
        threads = set()

        def look() -> tuple[str, LLMStatusCode]:
            threads.add(threading.current_thread())
            extra = m.pair.owner.allocate_cache(SLOTS)
            fill(m.pair.owner, extra)
            m.pair.owner.copy_cache(extra, extra, 0, 1)
            m.pair.owner.deallocate_cache(extra)
            m.pair.prompt.init({"nonsense": "is not looked at"})
            closing = [status_of(call, "would wait for it") for call in (m.pair.prompt.finalize, m.pair.prompt.close)]
            return word.get(), closing[0]

        m.writer.meanwhile = look
        token = word.set("the caller's")
        try:
            assert m.prompt.predict(req(10), []) == ("the caller's", S.LLM_FAILED)
        finally:
            word.reset(token)
        loop_thread = thread_of(thread_of(m.pair.prompt))
        assert threads
        assert not threads & {threading.current_thread(), loop_thread}
        m.decoder.pull_kv(req(10))


def test_nothing_that_a_model_returns_is_awaited() -> None:
    with models() as m:

        async def later() -> int:
            return 7

        m.writer.meanwhile = later
        answer = m.prompt.predict(req(10), [])
        assert asyncio.run(answer) == 7
        m.writer.meanwhile = lambda: None
        assert m.prompt.predict(req(11), [], answer=StopIteration) is StopIteration


class AsyncRunner(ModelRunner):
    async def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Any:
        """Run as a coroutine, which a caller would have to await."""


class TakesAnything(ModelRunner):
    def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Any:
        return kwargs


def test_a_runner_is_plain_and_its_arguments_may_have_any_name() -> None:
    with cluster(LLMRole.PROMPT, 1) as prompt:
        with pytest.raises(TypeError, match="run_model is async def"):
            prompt.add_model(options(), AsyncRunner())
        model = prompt.add_model(options(), TakesAnything())
        words = {"function": 1, "args": 2, "context": 3, "method": 4}
        assert model.predict(req(1), [], **words) == words
        assert model.model_id == 0


@pytest.mark.parametrize("error", [ZeroDivisionError("its own"), SystemExit(3), asyncio.CancelledError("its own")])
def test_what_a_model_raises_is_raised_as_it_is_and_nothing_is_left(error: BaseException) -> None:
    with models() as m:
        before = m.pair.free()

        def fail() -> None:
            raise error

        m.writer.meanwhile = fail
        for call in (lambda: m.prompt.predict(req(10), []), lambda: m.prompt.preload_prompt_prefix(req(1, 0, 5), [])):
            with pytest.raises(type(error)) as caught:
                call()
            assert caught.value is error
        m.writer.meanwhile = lambda: None
        assert m.pair.free() == before
        m.prompt.predict(req(10), [])
        m.decoder.pull_kv(req(10))


class Refuses(Writer):
    """Does not want the cache, and tries what would never return."""

    def on_cache_allocated(self, kv_cache: KvCache) -> None:
        self.found = status_of(lambda: self.datadist.add_model(options(), self), "would wait for it")
        raise SystemExit(4)


def test_a_runner_that_does_not_want_the_cache_ends_add_model() -> None:
    with cluster(LLMRole.DECODER, 2) as decoder:
        before, refuses = free(decoder), Refuses(decoder)
        with pytest.raises(SystemExit):
            decoder.add_model(options(), refuses)
        assert refuses.found is S.LLM_FAILED
        assert free(decoder) == before
        assert decoder.add_model(options(), Writer(decoder)).model_id == 0


class Closes(Writer):
    """Finalizes while it is being finalized."""

    def on_cache_deallocated(self, kv_cache: KvCache) -> None:
        self.told.append(status_of(self.datadist.finalize, "would wait for it").name)
        self.datadist.init({})  # it is initialised still: nothing happens, and no call waits


def test_a_runner_that_is_told_of_finalize_cannot_wait_for_it() -> None:
    with cluster(LLMRole.DECODER, 2) as decoder:
        closes = Closes(decoder)
        decoder.add_model(options(), closes)
    assert closes.told == ["allocated", "LLM_FAILED"]


# ---- threads and interrupts ----


def test_many_threads_share_one_prompt_and_one_decoder() -> None:
    """Each has requests of its own, and finds their bytes where it wanted them; on the link they take turns, as v1 needs."""
    seed = 20250301
    print("seed", seed)
    with linked_pair() as p, ThreadPoolExecutor(4) as pool:
        before, turn = p.free(), threading.Lock()

        def work(number: int) -> int:
            choose, done = random.Random(seed + number), 0
            target = p.puller.allocate_cache(SLOTS)
            for i in range(10):
                keys = [CacheKey(1, 1000 * number + 3 * i + k) for k in range(3)]
                source = filled(p.owner, keys)
                there, here = choose.randrange(3), choose.randrange(3)
                with turn:
                    p.puller.pull_cache(keys[there], target, here)
                done += [row[here] for row in held(p.puller, target)] == [value(t, there) for t in range(4)]
                for key in keys:
                    p.owner.remove_cache_key(key)
                p.owner.deallocate_cache(source)
            p.puller.deallocate_cache(target)
            return done

        assert list(pool.map(work, range(4))) == [10] * 4
        assert p.free() == before


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupted_predict_has_ended_when_the_interrupt_is_raised(times: int) -> None:
    with models() as m:
        before, interrupted = m.pair.free(), threading.Event()
        former, done = signal.getsignal(signal.SIGINT), list[bool]()

        def interrupt(number: int, frame: Any) -> None:
            interrupted.set()
            signal.default_int_handler(number, frame)

        def run() -> None:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            assert interrupted.wait(10)
            m.pair.prompt.complete_request(req(11))  # calls of its own still work
            done.append(free(m.pair.prompt) < before[0])

        m.writer.meanwhile = run
        signal.signal(signal.SIGINT, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                m.prompt.predict(req(10), [(0, 0, [1])])
        finally:
            signal.signal(signal.SIGINT, former)
        assert done == [True], "it was outlasted"
        assert m.pair.free() == before
        m.writer.meanwhile = lambda: None
        m.prompt.predict(req(10), [(0, 0, [2])])
        m.decoder.pull_kv(req(10))
        m.decoder.merge_kv(req(10), 0)
        assert m.slot(0)[0] == 2


def test_finalize_waits_for_a_model_that_runs_and_its_caller_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with models() as m, ThreadPoolExecutor(2) as pool:
        began, ending, go = threading.Event(), threading.Event(), threading.Event()
        calls = inner_of(m.pair.prompt)._calls
        end = calls.end

        async def watched() -> bool:
            ending.set()
            found: bool = await end()
            return found

        def run() -> int:
            began.set()
            assert go.wait(20)
            return free(m.pair.prompt)  # what is there is there until the model is over

        m.writer.meanwhile = run
        monkeypatch.setattr(calls, "end", watched)
        running = pool.submit(m.prompt.predict, req(10), [])
        assert began.wait(10)
        finalizing = pool.submit(m.pair.prompt.finalize)
        assert ending.wait(10)
        assert status_of(lambda: m.prompt.predict(req(11), [])) is S.LLM_ENGINE_FINALIZED
        assert not finalizing.done()
        go.set()
        finalizing.result(20)
        assert status_of(running.result) is S.LLM_ENGINE_FINALIZED


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_child_of_the_process_a_clear_error_is_raised() -> None:
    with models() as m:
        manager, target = m.pair.puller, m.pair.puller.allocate_cache(SLOTS)
        model: LLMModel = m.prompt
        errors = in_child(
            [
                lambda: manager.deallocate_cache(target),
                lambda: m.pair.decoder.kv_cache_manager,
                lambda: model.predict(req(1), []),
                lambda: m.pair.prompt.add_model(options(), ModelRunner()),
            ]
        )
        assert [error and error[0] for error in errors] == [ForkError] * 4

        def tell() -> None:
            raise ValueError(manager.is_initialized())

        assert in_child([tell]) == [(ValueError, "False")]
        m.prompt.predict(req(1), [])
