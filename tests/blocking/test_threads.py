"""The loop thread that all clusters of the process share: who may call it, from where, and how it ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiodatadist._blocking import shared_loop, stats
from aiodatadist._cache import task as awaitable
from aiodatadist._concurrency import loop_thread as thread
from aiodatadist._testing.views import call_on_loop, shared_thread
from aiodatadist.blocking import (
    BlocksCacheKey,
    CacheTask,
    LayerSynchronizer,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from aiodatadist.errors import ForkError, LinkError, NotLinked
from aiodatadist.testing import soft_fault, soft_faults_cleared
from tests import children
from tests.blocking.pairs import EVERYTHING, KEY, Pair, cluster, linked_pair, options
from tests.off_loop import in_child


def running_thread() -> thread.LoopThread | None:
    return shared_thread()


def test_the_first_starts_the_thread_and_the_last_ends_it() -> None:
    first, second = LLMDataDist(LLMRole.PROMPT, 1), LLMDataDist(LLMRole.DECODER, 2)
    assert running_thread() is None
    first.init(options())
    running = running_thread()
    assert running is not None
    second.init(options(device_id=1))
    assert running_thread() is running
    first.finalize()
    assert second.statistics().caches == 0
    second.finalize()
    assert running_thread() is None
    assert not running._thread.is_alive()
    second.init(options())
    assert running_thread() not in {None, running}
    second.finalize()


def test_many_threads_share_one_cluster(pair: Pair) -> None:
    """Each has a block of its own, into which it pulls all sorts of others, and finds what it asked for."""
    seed = 20240607
    print("seed", seed)

    def work(block: int) -> int:
        choose, done = random.Random(seed + block), 0
        for _ in range(25):
            source = choose.choice(EVERYTHING)
            if choose.random() < 0.5:
                pair.pull(src=[source], dst=[block])
            else:
                submitted = pair.target.manager.submit_pull_blocks(KEY, pair.target.cache, [source], [block])
                assert submitted.wait(20)
                assert submitted.exception() is None
            done += all((t[block] == 4 * source + i).all() for i, t in enumerate(pair.target.tensors))
        return done

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [25] * 8
    assert pair.target.datadist.stats().succeeded == 200
    handles = pair.target.manager.drain()
    assert len(set(handles)) == len(handles)
    assert 0 < len(handles) < 200
    assert pair.target.manager.drain() == []


def test_init_and_finalize_are_safe_from_any_thread() -> None:
    datadist = LLMDataDist(LLMRole.PROMPT, 1)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for start in [pool.submit(datadist.init, options()) for _ in range(8)]:
                start.result()
            assert datadist.statistics().links == ()
            for end in [pool.submit(datadist.finalize) for _ in range(8)]:
                end.result()
            assert running_thread() is None


@contextmanager
def hung_get() -> Iterator[None]:
    with soft_faults_cleared():
        soft_fault("HcclBatchGet:hang")
        yield


def test_a_waiting_call_keeps_no_other_waiting(pair: Pair, begun: threading.Event) -> None:
    """Hang one transfer: everything that does not need it goes on, and finalizing ends it."""
    with hung_get(), ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(pair.pull)
        assert begun.wait(10)
        assert pair.target.datadist.check_link_status(1) is None
        assert pair.target.datadist.statistics().links[0].running == 1
        pair.source.manager.push_blocks(BlocksCacheKey(2), pair.source.cache, [5], [5])
        assert not stuck.done()
        pair.target.datadist.finalize()
        with pytest.raises((LinkError, LLMException)) as caught:
            stuck.result(10)
        assert caught.value.status_code is not LLMStatusCode.LLM_SUCCESS


def test_calls_after_finalize_say_so(pair: Pair) -> None:
    manager = pair.target.manager
    pair.target.datadist.finalize()
    with pytest.raises(LLMException) as caught:
        manager.pull_blocks(KEY, pair.target.cache, [1], [1])
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    pair.source.datadist.finalize()
    for call in (manager.pull_blocks, manager.submit_pull_blocks):
        with pytest.raises(LLMException) as caught:
            call(KEY, pair.target.cache, [1], [1])
        assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    with pytest.raises(RuntimeError, match="not initialised"):
        _ = pair.target.datadist.cache_manager


# ---- event loops ----


async def test_on_a_running_event_loop_it_works_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_loop.Warned, "once", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with linked_pair() as pair:
            pair.pull()
            pair.target.check({b: (0, b) for b in EVERYTHING})
    told = [each for each in caught if issubclass(each.category, RuntimeWarning)]
    assert [str(each.message)[:15] for each in told] == ["a blocking call"]
    assert asyncio.get_running_loop().is_running()


def test_on_the_loop_thread_itself_it_raises(pair: Pair) -> None:
    async def both() -> list[str]:
        found = []
        for call in (pair.pull, pair.target.datadist.finalize, lambda: pair.target.datadist.init({})):
            with pytest.raises(LLMException) as caught:
                call()
            found.append(str(caught.value))
        return found

    messages = call_on_loop(pair.target.datadist, both)
    assert all("carry it out" in message for message in messages)
    pair.pull()


# ---- interrupts ----


@contextmanager
def interrupt_at_begin(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> Iterator[None]:
    """Press Ctrl-C as soon as a transfer has begun, which is when this thread waits for it."""
    watch = stats.Counters.watch

    def watched(self: stats.Counters, task: awaitable.CacheTask) -> None:
        watch(self, task)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(stats.Counters, "watch", watched)
        yield


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupted_pull_has_ended_when_the_interrupt_is_raised(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    with hung_get(), interrupt_at_begin(monkeypatch, times), pytest.raises(KeyboardInterrupt):
        pair.pull()
    ended = pair.target.datadist.stats()
    assert (ended.cancelled, ended.running) == (1, 0)
    assert pair.target.datadist.statistics().links[0].running == 0
    for tensor in pair.target.tensors:
        tensor[:] = 99  # it is ours again: nothing lands here any more
    pair.pull(src=[3], dst=[0])
    for t, tensor in enumerate(pair.target.tensors):
        assert (tensor[0] == 12 + t).all()
        assert (tensor[1:] == 99).all()


def test_an_interrupted_request_has_ended_at_the_peer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with linked_pair(enable_remote_cache_accessible=False) as pair:
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:hang")
            with interrupt_at_begin(monkeypatch), pytest.raises(KeyboardInterrupt):
                pair.pull()
        assert pair.source.datadist.statistics().links[0].running == 0
        pair.pull(src=[3], dst=[0])
        pair.target.check({0: (0, 3)})


def test_an_interrupted_init_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    datadist = LLMDataDist(LLMRole.PROMPT, 1)
    opened = datadist._open

    async def interrupted(*args: Any) -> Any:
        manager = await opened(*args)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
        return manager

    with monkeypatch.context() as patched:
        patched.setattr(datadist, "_open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            datadist.init(options(listen_ip_info="127.0.0.1:0"))
    assert running_thread() is None
    datadist.init(options(listen_ip_info="127.0.0.1:0"))
    datadist.finalize()


class Hanging(LayerSynchronizer):
    """Never says that layer 1 is ready; interrupts who waits for the transfer when it is asked."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return layer_index == 0 or self.let_go.wait(20)


def layered(pair: Pair, synchronizer: LayerSynchronizer) -> CacheTask:
    layers = range(2)
    config = TransferWithCacheKeyConfig(BlocksCacheKey(2), layers, layers)
    return pair.source.manager.transfer_cache_async(pair.source.cache, synchronizer, [config], [1], [4])


def test_an_interrupted_wait_for_a_layered_transfer_stops_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging()
    task = layered(pair, hanging)
    assert task.synchronize(10) is LLMStatusCode.LLM_TIMEOUT
    assert not task.done()
    wait = CacheTask._wait

    async def interrupted(self: CacheTask, timeout_in_millis: int | None) -> list[LLMStatusCode | None]:
        os.kill(os.getpid(), signal.SIGINT)
        return await wait(self, timeout_in_millis)

    monkeypatch.setattr(CacheTask, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        task.synchronize()
    hanging.let_go.set()
    assert task.done()
    assert task.cancelled()
    assert pair.source.datadist.stats().cancelled == 1


def test_an_interrupt_that_comes_when_a_layered_transfer_has_begun_stops_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has no task of it yet, and gets the interrupt instead."""
    hanging, call = Hanging(), thread.LoopThread.call

    def interrupted(self: thread.LoopThread, function: Callable[[], Any]) -> Any:
        result = call(self, function)
        if isinstance(result, awaitable.CacheTask):
            signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(thread.LoopThread, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            layered(pair, hanging)
    hanging.let_go.set()
    ended = pair.source.datadist.stats()
    assert (ended.started, ended.cancelled, ended.running) == (1, 1, 0)
    untouched = pair.target.start + 4 * 4  # layer 0, tensors 0 and 1, was ready, and may have landed; layer 1 never was
    assert all((pair.target.tensors[i][4] == untouched + i).all() for i in (2, 3))


# ---- layered transfers ----


class InThread(LayerSynchronizer):
    """A synchronizer as a user writes it: plain and blocking."""

    def __init__(self, answers: dict[int, Any]) -> None:
        self._answers = answers
        self.threads: list[str] = []

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.threads.append(threading.current_thread().name)
        answer = self._answers.get(layer_index, True)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)


def test_a_plain_synchronizer_works_and_its_failures_have_a_status(pair: Pair) -> None:
    good = InThread({})
    task = layered(pair, good)
    assert task.synchronize() is LLMStatusCode.LLM_SUCCESS
    assert task.exception() is None
    pair.target.check({4: (0, 1)})
    assert "aiodatadist loop" not in good.threads
    assert layered(pair, InThread({1: False})).get_results() == [LLMStatusCode.LLM_PARAM_INVALID]
    broken = layered(pair, InThread({0: OSError("no such layer")}))
    assert broken.synchronize(10_000) is LLMStatusCode.LLM_FAILED
    assert isinstance(broken.exception(), LLMException)


# ---- fork ----


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_child_of_the_process_a_clear_error_is_raised(pair: Pair) -> None:
    datadist, manager, cache = pair.target.datadist, pair.target.manager, pair.target.cache
    errors = in_child(
        [
            lambda: manager.pull_blocks(KEY, cache, [1], [1]),
            lambda: manager.submit_pull_blocks(KEY, cache, [1], [1]),
            lambda: datadist.link_clusters([]),
            lambda: datadist.cache_manager,
            lambda: datadist.init(options()),
            datadist.finalize,
        ]
    )
    assert [error and error[0] for error in errors] == [ForkError] * 5 + [None]
    assert all("before a fork" in text and "spawn" in text for _, text in filter(None, errors))
    pair.pull()
    pair.target.check({b: (0, b) for b in EVERYTHING})


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_child_of_the_process_what_is_under_way_can_be_asked_and_not_told(pair: Pair) -> None:
    config = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(2), range(2))
    handle = pair.source.manager.submit_layers(pair.source.cache, [config], np.array([3]), np.array([0]))
    other = pair.source.manager.submit_layers(pair.source.cache, [config], [3], [1])
    hanging = Hanging()
    task = layered(pair, hanging)
    errors = in_child(
        [
            handle.cancel,
            handle.wait,
            lambda: handle.layer_ready(0),
            lambda: handle.layer_failed(0),
            task.cancel,
            task.synchronize,
            lambda: task.done() or handle.poll(),
        ]
    )
    assert [error and error[0] for error in errors] == [ForkError] * 6 + [None]
    assert all("before a fork" in text and "spawn" in text for _, text in filter(None, errors))
    other.cancel()
    assert other.wait(10)
    task.cancel()
    assert task.synchronize(10_000) is LLMStatusCode.LLM_FAILED
    assert task.get_results() == [None]
    hanging.let_go.set()
    for layer in range(2):
        handle.layer_ready(layer)
    assert handle.wait(10)
    assert (handle.poll(), other.poll()) == ("done", "cancelled")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_who_forks_first_may_initialise_in_the_child() -> None:
    """Servers import everything, and then fork their workers."""
    text = (
        "import os, sys\n"
        "from aiodatadist.blocking import *\n"
        "if os.fork() == 0:\n"
        "    datadist = LLMDataDist(LLMRole.PROMPT, 1)\n"
        "    datadist.init(LLMConfig(enable_cache_manager=True).generate_options())\n"
        "    datadist.finalize()\n"
        "    print('initialised', flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    done = children.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "initialised\n", done.stderr


# ---- what scripts do ----


def run_script(text: str, path: Path) -> str:
    path.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "aiodatadist.blocking", "run", str(path)]
    return children.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_modules_of_upstreams_are_found_however_they_are_imported_also_in_spawned_processes(tmp_path: Path) -> None:
    assert (
        run_script(
            """
            import multiprocessing
            import llm_datadist.v2.llm_types as types
            from llm_datadist import v2
            from llm_datadist.v2.cache_manager import CacheManager
            import llm_datadist
            assert types.Cache is v2.llm_types.Cache is llm_datadist.Cache
            assert CacheManager is llm_datadist.CacheManager
            from llm_datadist.v2.llm_datadist import LLMDataDist, _shutdown_handler
            import llm_datadist.utils.utils, llm_datadist.v2.config, llm_datadist.v2.llm_utils, llm_datadist.v2_list
            _shutdown_handler()  # there is none to finalize

            def child():
                from llm_datadist import LLMRole
                print(LLMRole.PROMPT.name, flush=True)

            if __name__ == "__main__":
                process = multiprocessing.get_context("spawn").Process(target=child)
                process.start()
                process.join()
                assert process.exitcode == 0
            """,
            tmp_path / "script.py",
        )
        == "PROMPT\n"
    )


def test_a_timeout_error_of_a_signal_handler_ends_the_call(tmp_path: Path) -> None:
    told = run_script(
        """
        import signal
        from aiodatadist.blocking import LLMConfig, LLMDataDist, LLMRole

        class TooSlow(TimeoutError):
            pass

        def alarm(*_):
            raise TooSlow

        datadist = LLMDataDist(LLMRole.PROMPT, 1)
        datadist.init(LLMConfig(enable_cache_manager=True).generate_options())
        signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            datadist.next_notification(30)
        except TooSlow:
            print("too slow")
        datadist.finalize()
        """,
        tmp_path / "script.py",
    )
    assert told == "too slow\n"


# ---- two in one process, both ways ----


def test_several_clusters_pull_from_each_other_at_once() -> None:
    with cluster(1, 0) as one, cluster(2, 60) as two, cluster(3, 120) as three, ThreadPoolExecutor(6) as pool:
        clusters = [one, two, three]
        for a, b in ((one, two), (two, three), (three, one)):
            assert a.datadist.link_clusters([b.info], 5000)[0] is LLMStatusCode.LLM_SUCCESS
            b.datadist.wait_linked(a.cluster_id)
        pulls = [
            pool.submit(
                a.manager.pull_blocks, BlocksCacheKey(b.cluster_id), a.cache, [b.cluster_id], [8 + b.cluster_id]
            )
            for a in clusters
            for b in clusters
            if a is not b
        ]
        for pull in pulls:
            pull.result()
        for a in clusters:
            a.check({8 + b.cluster_id: (b.start, b.cluster_id) for b in clusters if b is not a})
        two.datadist.finalize()
        with pytest.raises((NotLinked, LinkError)):
            one.manager.pull_blocks(BlocksCacheKey(2), one.cache, [1], [1])


def test_what_a_posted_function_raises_settles_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ZeroDivisionError("no task can be started")

    running = shared_loop.acquire()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(thread._Call, "start", refused)
            with pytest.raises(ZeroDivisionError, match="no task can be started"):
                running.call(lambda: asyncio.sleep(0))
        assert running.call(lambda: asyncio.sleep(0, "it goes on")) == "it goes on"
    finally:
        shared_loop.release(running)
