"""Submitted transfers: a handle at once, every end reported once, bounded, and nothing lost when the cluster closes."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from aiodatadist._testing.views import shared_thread, submissions_of, thread_of
from aiodatadist.blocking import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    Handle,
    HandleState,
    LLMException,
    LLMStatusCode,
    QueueFull,
    Stats,
    TransferWithCacheKeyConfig,
)
from aiodatadist.errors import CacheNotFound, LinkClosed, NotLinked, ParamInvalid, TransferError, TransferTimeout
from aiodatadist.testing import soft_fault, soft_faults_cleared
from tests.blocking.pairs import EVERYTHING, KEY, Pair, linked_pair

POOL = '{"memory_size": 1048576, "page_shift": 12}'
SLOTS = CacheDesc(2, [3, 2048], DataType.DT_UINT8)


def submit(pair: Pair, src: list[int] = EVERYTHING, dst: list[int] = EVERYTHING, **words: Any) -> Handle:
    return pair.target.manager.submit_pull_blocks(KEY, pair.target.cache, src, dst, **words)


def test_a_pull_and_a_push_end_and_are_drained_once(pair: Pair) -> None:
    pull = submit(pair, [3, 4], [0, 1], tag="request 7")
    assert pull.wait(10)
    push = pair.target.manager.submit_push_blocks(BlocksCacheKey(1), pair.target.cache, [9], [2], tag="request 8")
    assert push.wait(10)
    for handle, nbytes in ((pull, 8 * 32768), (push, 4 * 32768)):
        assert (handle.poll(), handle.done(), handle.exception()) == (HandleState.DONE, True, None)
        assert handle.failed_blocks() == []
        report = handle.report()
        assert report is not None
        assert report.bytes == nbytes
    assert pull.poll() == "done"
    pair.target.check({0: (0, 3), 1: (0, 4)})
    pair.source.check({2: (100, 9)})
    assert [handle.tag for handle in pair.target.manager.drain()] == ["request 7", "request 8"]
    assert pair.target.manager.drain() == []


def test_slots_are_submitted_too() -> None:
    with linked_pair(mem_pool_cfg=POOL) as pair:
        theirs = pair.source.manager.allocate_cache(SLOTS, [CacheKey(1, 5), CacheKey(1, 6)])
        mine = pair.target.manager.allocate_cache(SLOTS)
        for array in pair.source.manager.arrays(theirs):
            array[0], array[1], array[2] = 1, 2, 3
        for i, array in enumerate(pair.target.manager.arrays(mine)):
            array[:] = 50 + i
        del array
        key = CacheKeyByIdAndIndex(1, theirs.cache_id, 2)
        pull = pair.target.manager.submit_pull_cache(CacheKey(1, 6), mine, 1)
        assert pull.wait(10)
        push = pair.target.manager.submit_push_cache(key, mine, 0)
        assert push.wait(10)
        assert (pull.poll(), push.poll()) == ("done", "done")
        here, there = pair.target.manager.arrays(mine), pair.source.manager.arrays(theirs)
        assert [array[:, 0].tolist() for array in here] == [[50, 2, 50], [51, 2, 51]]
        assert [array[:, 0].tolist() for array in there] == [[1, 2, 50], [1, 2, 51]]
        del here, there
        missing = pair.target.manager.submit_pull_cache(CacheKey(1, 77), mine, 2)
        assert missing.wait(10)
        assert missing.failed_blocks() == [2]


def test_drain_takes_the_oldest_and_not_more_than_asked_for(pair: Pair) -> None:
    handles = [submit(pair, [block], [block], tag=block) for block in range(5)]
    assert handles[-1].wait(10)
    assert [handle.tag for handle in pair.target.manager.drain(2)] == [0, 1]
    assert [handle.tag for handle in pair.target.manager.drain(0)] == []
    assert [handle.tag for handle in pair.target.manager.drain(100)] == [2, 3, 4]


# ---- failures ----


def test_what_certainly_is_wrong_is_refused_and_nothing_is_submitted(pair: Pair) -> None:
    manager, cache = pair.target.manager, pair.target.cache
    key = CacheKeyByIdAndIndex(1, 1)
    wrong: list[tuple[Callable[[], Any], type[Exception]]] = [
        (lambda: manager.submit_pull_blocks(None, cache, [1], [1]), TypeError),  # type: ignore[arg-type]
        (lambda: manager.submit_pull_blocks(KEY, None, [1], [1]), TypeError),  # type: ignore[arg-type]
        (lambda: manager.submit_pull_blocks(KEY, cache, [1.5], [1]), TypeError),  # type: ignore[list-item]
        (lambda: manager.submit_pull_blocks(KEY, cache, [-1], [1]), ValueError),
        (lambda: manager.submit_pull_blocks(KEY, cache, [1, 2], [1]), ParamInvalid),
        (lambda: manager.submit_pull_blocks(KEY, cache, [1], [16]), ParamInvalid),
        (lambda: manager.submit_pull_blocks(KEY, cache, [], [1]), ParamInvalid),
        (lambda: manager.submit_pull_blocks(KEY, cache, [1], [1], src_layer_range=range(0)), ParamInvalid),
        (lambda: manager.submit_pull_blocks(KEY, cache, [1], [1], notify="text"), TypeError),  # type: ignore[arg-type]
        (lambda: manager.submit_pull_cache(CacheKey(1, 1), cache), ParamInvalid),
        (lambda: manager.submit_push_blocks(BlocksCacheKey(1), cache, [16], [1]), ParamInvalid),
        (lambda: manager.submit_push_blocks(BlocksCacheKey(1), cache, [1], []), ParamInvalid),
        (lambda: manager.submit_push_cache(key, cache), ParamInvalid),
        (lambda: manager.submit_layers(cache, [None]), TypeError),  # type: ignore[list-item]
        (lambda: manager.submit_layers(None, []), TypeError),  # type: ignore[arg-type]
    ]
    for call, kind in wrong:
        with pytest.raises(kind):
            call()
    assert pair.target.datadist.stats() == Stats()
    assert submissions_of(manager)._undrained == 0


def test_every_other_failure_is_in_the_handle_and_comes_out_of_drain(pair: Pair) -> None:
    manager, cache = pair.target.manager, pair.target.cache
    handles = {
        manager.submit_pull_blocks(BlocksCacheKey(3), cache, [1, 2], [4, 5]): (NotLinked, [4, 5]),
        manager.submit_pull_blocks(BlocksCacheKey(1, 9), cache, [1], [6]): (CacheNotFound, [6]),
        manager.submit_pull_blocks(BlocksCacheKey(2), cache, [1], [7]): (ParamInvalid, [7]),
        manager.submit_pull_blocks(KEY, cache, [99], [8]): (ParamInvalid, [8]),
        manager.submit_push_blocks(BlocksCacheKey(1), cache, [1], [99]): (ParamInvalid, [99]),
    }
    with soft_faults_cleared():
        for handle in handles:
            assert handle.wait(10)
        soft_fault("HcclBatchGet:exec=507011")
        handle = submit(pair)
        assert handle.wait(10)
        handles[handle] = (LLMException, EVERYTHING)
    for handle, (kind, blocks) in handles.items():
        assert isinstance(handle.exception(), kind), handle
        assert (handle.poll(), handle.failed_blocks(), handle.report()) == ("failed", blocks, None)
    assert set(manager.drain()) == set(handles)
    stats = pair.target.datadist.stats()
    assert (stats.started, stats.failed, stats.running) == (6, 6, 0)
    assert sum(stats.failures.values()) == 6
    assert stats.failures["LLM_NOT_YET_LINK"] == 1


def test_a_timeout_fails_the_transfer_and_not_the_link() -> None:
    with linked_pair(sync_kv_timeout=50) as pair:
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            handle = submit(pair)
            assert handle.wait(10)
        error = handle.exception()
        assert isinstance(error, TransferTimeout)
        assert error.status_code is LLMStatusCode.LLM_TIMEOUT
        assert handle.failed_blocks() == EVERYTHING
        again = submit(pair, deadline=10)
        assert again.wait(10)
        assert again.poll() is HandleState.DONE


# ---- waiting, cancelling, bounds ----


@pytest.fixture
def hung(pair: Pair, begun: threading.Event) -> Any:
    """Submit a pull that does not end by itself."""
    with soft_faults_cleared():
        soft_fault("HcclBatchGet:hang")
        handle = submit(pair, tag="hung")
        assert begun.wait(10)
        yield handle


def test_one_that_runs_says_so_and_can_be_cancelled(pair: Pair, hung: Handle) -> None:
    assert (hung.poll(), hung.done(), hung.exception(), hung.failed_blocks()) == ("running", False, None, [])
    assert not hung.wait(0.01)
    assert pair.target.manager.drain() == []
    hung.cancel()
    assert hung.wait(10)
    assert (hung.poll(), hung.exception(), hung.failed_blocks()) == ("cancelled", None, EVERYTHING)
    assert pair.target.manager.drain() == [hung]
    assert pair.target.datadist.stats().cancelled == 1
    hung.cancel()
    assert pair.target.manager.drain() == []


def test_submitting_waits_for_nothing_not_even_for_the_loop(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the loop is kept busy: all are pending, are bounded, and one wake-up begins them all."""
    occupied, release = threading.Event(), threading.Event()
    manager = pair.target.manager
    manager.max_submitted = 20
    loop_thread = thread_of(pair.target.datadist)
    rings: list[int] = []

    def occupy() -> None:
        occupied.set()
        release.wait(20)

    loop_thread.post(occupy)
    assert occupied.wait(10)
    read = os.eventfd_read
    monkeypatch.setattr(os, "eventfd_read", lambda bell: rings.append(read(bell)))
    try:
        handles = [submit(pair, [i % 16], [i % 16], tag=i) for i in range(20)]
        assert {handle.poll() for handle in handles} == {HandleState.PENDING}
        with pytest.raises(QueueFull, match="20 handles") as caught:
            submit(pair)
        assert caught.value.retryable
        assert manager.drain() == []
    finally:
        release.set()
    assert handles[-1].wait(10)
    assert max(rings) >= 20, "in one read of this loop's bell; that of another loop may be read before"
    with pytest.raises(QueueFull):  # they have ended, and the caller has not seen it yet
        submit(pair)
    assert [handle.tag for handle in manager.drain()] == list(range(20))
    assert submit(pair).wait(10)


def test_one_that_is_cancelled_before_it_begins_never_does(pair: Pair) -> None:
    occupied, release = threading.Event(), threading.Event()

    def occupy() -> None:
        occupied.set()
        release.wait(20)

    thread_of(pair.target.datadist).post(occupy)
    assert occupied.wait(10)
    handles = [submit(pair, [3], [block]) for block in range(12)]
    handles[11].cancel()
    release.set()
    assert all(handle.wait(10) for handle in handles)
    assert [handle.poll() for handle in handles] == ["done"] * 11 + ["cancelled"]
    pair.target.check(dict.fromkeys(range(11), (0, 3)))
    assert submissions_of(pair.target.manager)._under_way == set()
    assert len(pair.target.manager.drain()) == 12


def test_what_is_submitted_may_be_changed_by_the_caller_at_once(pair: Pair) -> None:
    src, dst = [3], [0]
    handle = submit(pair, src, dst)
    src[0], dst[0] = 9, 1
    assert handle.wait(10)
    pair.target.check({0: (0, 3)})


def test_many_threads_submit_and_drain_and_nothing_is_lost_or_seen_twice(pair: Pair) -> None:
    manager, count = pair.target.manager, 60
    manager.max_submitted = 64
    drained: list[Handle] = []

    def work(number: int) -> None:
        for i in range(count):
            while True:
                try:
                    handle = submit(pair, [number], [number], tag=(number, i))
                    break
                except QueueFull:
                    drained.extend(manager.drain(5))
            if i % 7 == 0:
                assert handle.wait(20)
            drained.extend(manager.drain(3))

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, number) for number in range(6)]:
            done.result()
    drained.extend(pair.target.datadist.close(drain=10))
    assert sorted(handle.tag for handle in drained) == [(number, i) for number in range(6) for i in range(count)]  # type: ignore[type-var]
    assert {handle.poll() for handle in drained} == {HandleState.DONE}


# ---- closing ----


def test_close_lets_what_is_under_way_finish(pair: Pair) -> None:
    handles = [submit(pair, [block], [block], tag=block) for block in range(16)]
    ended = pair.target.datadist.close(drain=10)
    assert ended == handles
    assert {handle.poll() for handle in handles} == {HandleState.DONE}
    pair.target.check({block: (0, block) for block in range(16)})
    assert pair.target.datadist.stats().succeeded == 16
    pair.source.datadist.finalize()
    assert shared_thread() is None


@pytest.mark.parametrize("how", ["close", "finalize"])
def test_close_stops_and_reports_what_does_not_finish(pair: Pair, hung: Handle, how: str) -> None:
    behind = [submit(pair, [1], [1], tag=i) for i in range(20)]
    manager = pair.target.manager
    if how == "close":
        ended = pair.target.datadist.close(drain=0.05)
    else:
        pair.target.datadist.finalize()
        ended = manager.drain()
    assert set(ended) == {hung, *behind}
    assert hung.poll() == "cancelled"
    assert all(handle.done() for handle in behind)
    for tensor in pair.target.tensors:
        tensor[:] = 77
    with pytest.raises(LLMException) as caught:
        manager.submit_pull_blocks(KEY, pair.target.cache, [1], [1])
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    assert pair.target.datadist.close() == []
    pair.source.manager.copy_blocks(pair.source.cache, {1: [2]})
    assert all((tensor == 77).all() for tensor in pair.target.tensors)


@pytest.mark.parametrize(("drain", "kind"), [("1", TypeError), (-1, ValueError), (float("nan"), ValueError)])
def test_close_wants_seconds(pair: Pair, drain: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        pair.target.datadist.close(drain)
    pair.pull()


class Told:
    """In the place of a signal: remembers in which thread it was told."""

    def __init__(self) -> None:
        self.by: list[str] = []

    def set(self) -> None:
        self.by.append(threading.current_thread().name)

    def wake(self) -> None:
        self.set()


def test_those_who_wait_are_told_on_the_loop_of_what_is_abandoned(pair: Pair, hung: Handle) -> None:
    """Neither an event nor the loop itself may be touched by another thread."""
    submissions, waiter, news = submissions_of(pair.target.manager), Told(), Told()
    hung._waiters = [waiter]  # type: ignore[list-item]
    submissions._news = news
    submissions.abandon()
    assert hung.poll() == "failed"
    assert waiter.by == news.by == ["aiodatadist loop"]
    assert isinstance(hung.exception(), LinkClosed)
    assert pair.target.manager.drain() == [hung]
    with pytest.raises(LLMException, match="finalized"):
        submit(pair)


def test_a_submission_makes_few_objects_that_the_garbage_collector_looks_after(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each thirtieth waits for a collection. The loop does not take these up, so that it makes none meanwhile."""
    submissions, posted = submissions_of(pair.target.manager), list[object]()
    monkeypatch.setattr(submissions, "post", posted.append)
    handles = [submit(pair) for _ in range(2)]
    gc.collect()
    gc.disable()
    try:
        before, _, _ = gc.get_count()
        handles += [submit(pair) for _ in range(50)]
        after, _, _ = gc.get_count()
    finally:
        gc.enable()
    monkeypatch.undo()
    for begin in posted:
        submissions.post(cast("Any", begin))
    assert all(handle.wait(10) for handle in handles)
    assert after - before <= 50 * 10
    pair.target.manager.drain()


# ---- figures ----


def test_stats_can_be_sent_and_added_up(pair: Pair) -> None:
    pair.pull(src=[1, 2], dst=[1, 2])
    assert submit(pair, [5], [5]).wait(10)
    with pytest.raises(LLMException):
        pair.target.manager.pull_blocks(BlocksCacheKey(1, 9), pair.target.cache, [1], [1])
    mine = pair.target.datadist.stats()
    assert (mine.started, mine.succeeded, mine.failed, mine.running) == (3, 2, 1, 0)
    assert (mine.bytes, mine.ranges) == (12 * 32768, 8)
    assert mine.failures == {"LLM_KV_CACHE_NOT_EXIST": 1}
    assert 0 < mine.longest_seconds <= mine.transfer_seconds
    both = sum([pickle.loads(pickle.dumps(mine)), mine], Stats())
    assert (both.started, both.bytes, both.failures) == (6, 24 * 32768, {"LLM_KV_CACHE_NOT_EXIST": 2})
    assert both.longest_seconds == mine.longest_seconds
    assert pair.source.datadist.stats() == Stats()
    pair.target.datadist.finalize()
    assert pair.target.datadist.stats() == mine


# ---- layers ----


class Recorded:
    """An event of a device, as torch has them: recorded, and waited for by who needs it."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.waited_in: list[str] = []

    def synchronize(self) -> None:
        self.waited_in.append(threading.current_thread().name)
        assert self.happened.wait(20)


def config() -> TransferWithCacheKeyConfig:
    return TransferWithCacheKeyConfig(BlocksCacheKey(2), range(2), range(2))


def test_layers_go_out_as_attention_says_and_come_in_as_attention_waits(pair: Pair) -> None:
    manager, event = pair.source.manager, Recorded()
    with pair.target.manager.receive_layers(1, pair.target.cache) as receiver:
        handle = manager.submit_layers(pair.source.cache, [config()], [3, 4], [0, 1], tag="request 9")
        assert receiver.landed == []
        with pytest.raises(TransferTimeout):
            receiver.wait_layer(0, 0.01)
        handle.layer_ready(0)
        receiver.wait_layer(0, 10)
        for t in (0, 1):
            assert (pair.target.tensors[t][0] == 12 + t).all()
        handle.layer_ready(1, event)
        with pytest.raises(TransferTimeout):
            receiver.wait_layer(1, 0.01)
        assert handle.poll() == "running"
        event.happened.set()
        receiver.wait_layer(1, 10)
        assert receiver.landed == [0, 1]
        receiver.wait_layer(1, 0)
        with pytest.raises(ParamInvalid):
            receiver.wait_layer(2, 10)
    assert handle.wait(10)
    assert handle.poll() == "done"
    pair.target.check({0: (0, 3), 1: (0, 4)})
    assert event.waited_in
    assert "aiodatadist loop" not in event.waited_in
    assert [each.tag for each in manager.drain()] == ["request 9"]


def test_layers_may_be_ready_before_the_transfer_begins_and_fail(pair: Pair) -> None:
    manager = pair.source.manager
    handle, event = manager.submit_layers(pair.source.cache, [config()], [3], [0]), threading.Event()
    handle.layer_ready(0, event)
    handle.layer_failed(1)
    with pytest.raises(ParamInvalid, match="layer_index is 2"):
        handle.layer_ready(2)
    with pytest.raises(TypeError, match="synchronize"):
        handle.layer_ready(1, object())
    with pair.target.manager.receive_layers(1, pair.target.cache) as receiver:
        handle.cancel()
        assert handle.wait(10)
        assert handle.failed_blocks() == [0]
        event.set()  # or a worker thread would wait for it for ever
        other = manager.submit_layers(pair.source.cache, [config()], [3], [0])
        other.layer_ready(0)
        other.layer_failed(1)
        with pytest.raises(TransferError):
            receiver.wait_layer(1, 10)
    assert other.wait(10)
    error = other.exception()
    assert isinstance(error, LLMException)
    assert error.status_code is LLMStatusCode.LLM_PARAM_INVALID
    other.layer_ready(1)


def test_layers_of_one_tensor_go_out_and_come_in(pair: Pair) -> None:
    """Keys and values of a layer are packed in one tensor."""
    to = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(3), range(1, 4))
    with pair.target.manager.receive_layers(1, pair.target.cache, tensor_num_per_layer=1) as receiver:
        handle = pair.source.manager.submit_layers(pair.source.cache, [to], [3], [0], tensor_num_per_layer=1)
        for layer in range(3):
            handle.layer_ready(layer)
            receiver.wait_layer(1 + layer, 10)
        with pytest.raises(ParamInvalid, match="layer_index is 4"):
            handle.layer_ready(4)
        assert receiver.landed == [1, 2, 3]
    assert handle.wait(10)
    for t in range(1, 4):
        assert (pair.target.tensors[t][0] == 12 + t - 1).all()
    with pytest.raises(ParamInvalid, match="tensor_num_per_layer is 0"):
        pair.source.manager.submit_layers(pair.source.cache, [to], [3], [0], tensor_num_per_layer=0)


class Leaving:
    """An event whose code wants to end the task that waits for it."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def synchronize(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
def test_what_an_event_raises_ends_its_transfer_and_not_the_loop_thread(pair: Pair, error: BaseException) -> None:
    handle = pair.source.manager.submit_layers(pair.source.cache, [config()], [3], [0])
    handle.layer_ready(0, Leaving(error))
    assert handle.wait(10)
    reason = handle.exception()
    assert isinstance(reason, TransferError)
    assert type(error).__name__ in str(reason)
    assert handle.failed_blocks() == [0]
    pair.pull()
