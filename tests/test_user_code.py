"""Whatever code of the caller's raises, wherever it runs, fails the call it was made for and nothing else."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

import anyio
import pytest

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMStatusCode,
    TransferError,
    TransferWithCacheKeyConfig,
)
from aiodatadist._counting import Call, Ended
from aiodatadist.context_caching import CcStatus, EmsException, MemoryPool
from aiodatadist.legacy import KvCache, ModelRunner
from aiodatadist.testing import linked_pair
from tests.blocking.pairs import linked_pair as blocking_pair
from tests.context_caching.kit import ROOM, Kv, by_slots, opened
from tests.legacy.pairs import models, options, pair
from tests.legacy.test_model import request, wrote
from tests.test_layered import LAYERS, fan

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
KEY = BlocksCacheKey(1)


class Unusual(BaseException):
    """An exception like those of pytest, pyo3 and gevent."""


class Shy(Exception):
    """Its own words raise."""

    def __repr__(self) -> str:
        raise Unusual("no words")

    __str__ = __repr__


WHAT: dict[str, Callable[[], BaseException]] = {
    "Exception": lambda: ZeroDivisionError("mine"),
    "BaseException": lambda: Unusual("mine"),
    "CancelledError": lambda: asyncio.CancelledError("mine"),
    "a future's CancelledError": lambda: concurrent.futures.CancelledError("mine"),
    "SystemExit": lambda: SystemExit("mine"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("mine"),
    "GeneratorExit": lambda: GeneratorExit("mine"),
    "StopIteration": lambda: StopIteration("mine"),
    "StopAsyncIteration": lambda: StopAsyncIteration("mine"),
    "a group": lambda: BaseExceptionGroup("mine", [Unusual("mine")]),
    "one without words": Shy,
}
whatever = pytest.mark.parametrize("what", WHAT.values(), ids=WHAT)


def each_of_them() -> Iterator[Callable[[], BaseException]]:
    """Yield what makes each, one after the other. The name of the last one is in the output of a test that fails."""
    for name, what in WHAT.items():
        print(f"raising {name}")
        yield what


# ---- layered transfers ----


class Raising:
    def __init__(self, what: Callable[[], BaseException]) -> None:
        self.what = what

    def fail(self) -> Any:
        raise self.what()


class Plain(Raising):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return layer_index == 0 or self.fail()


class Async(Raising):
    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        await asyncio.sleep(0)
        return layer_index == 0 or self.fail()


class AtOnce(Raising):
    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return layer_index == 0 or self.fail()


class Wrapped(Async):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Awaitable[bool]:  # type: ignore[override]
        return super().synchronize_layer(layer_index, timeout_in_millis)


class Own(Raising):
    """Returns an awaitable of its own class."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Awaitable[bool]:
        outer = self

        class Answer:
            def __await__(self) -> Generator[Any, None, bool]:
                if layer_index:
                    outer.fail()
                yield from ()
                return True

        return Answer()


class Attribute(Raising):
    """Its method is found once, when the transfer is asked for."""

    asked = 0

    @property
    def synchronize_layer(self) -> Any:
        self.asked += 1
        return self.fail() if self.asked > 1 else lambda layer_index, timeout_in_millis: True


class Subclass(AwaitableLayerSynchronizer):
    def __init__(self, what: Callable[[], BaseException]) -> None:
        super().__init__(LAYERS)
        self.what = what

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None = None) -> bool:
        raise self.what()


class OfEvents(Raising):
    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True

    def device_event(self, layer_index: int) -> int:
        return int(self.fail())


@pytest.mark.parametrize("kind", [Plain, Async, AtOnce, Wrapped, Own, Attribute, Subclass, OfEvents])
async def test_synchronizers(kind: Callable[..., Any]) -> None:
    words = r"^(synchronize_layer|device_event)\(\d\) (raised .*(mine|repr raises|raised StopIteration)|was cancelled)"
    async with fan(count=2) as made:
        for what in each_of_them():
            other = AwaitableLayerSynchronizer(LAYERS)
            beside = made.blocks(other, [made.config(1)])
            task = made.blocks(kind(what), [made.config(0)])
            with anyio.fail_after(10):
                assert await task.get_results() == [LLMStatusCode.LLM_FAILED]
            with pytest.raises(TransferError, match=words):
                await task
            assert not beside.done()
            for layer in range(LAYERS):
                other.ready(layer)
            with anyio.fail_after(10):
                await beside
            for i in range(2):
                await made.still_works(i)
            assert made.entry.leases == 0


def test_a_synchronizer_without_await() -> None:
    with blocking_pair() as both:
        manager, cache = both.target.manager, both.target.cache
        config = TransferWithCacheKeyConfig(KEY, range(1, 2), range(1, 2))
        for what in each_of_them():
            task = manager.transfer_cache_async(cache, Plain(what), [config], [0], [1], tensor_num_per_layer=1)
            assert task.synchronize(10_000) is LLMStatusCode.LLM_FAILED
            both.pull()


# ---- callbacks and observers ----


async def test_done_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    async with linked_pair(DESC) as (prompt, decoder, source, cache):
        for what in each_of_them():
            caplog.clear()
            manager, told = decoder.datadist.cache_manager, 0

            def fail(_: object, what: Callable[[], BaseException] = what) -> None:
                raise what()

            for _ in range(4):  # from the third on they end in the call that starts them
                task = manager.pull_blocks(KEY, cache, [1], [5])
                task.add_done_callback(fail)
                with anyio.fail_after(10):
                    assert (await task).bytes == 2 * 4096
                task.add_done_callback(fail)
                told += 2
            lease = prompt.datadist.cache_manager.lease_blocks(source, [1], 5)
            lease.add_done_callback(fail)
            with anyio.fail_after(10):
                await manager.pull_leased(lease.ticket(), cache, [2])
                await lease.wait_ended()
            lease.add_done_callback(fail)
            assert caplog.text.count("a done callback failed") == told + 2
            assert (await manager.pull_blocks(KEY, cache, [3], [3])).bytes == 2 * 4096


@pytest.mark.parametrize("when", ["beginning", "end"])
async def test_observers(when: str, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def __init__(self, what: Callable[[], BaseException]) -> None:
            self.what = what

        def began(self, call: Call) -> Callable[[Ended], None]:
            if when == "beginning":
                raise self.what()
            return self.ended

        def ended(self, _: Ended) -> None:
            raise self.what()

        def __repr__(self) -> str:
            raise Unusual("no words")

    async with linked_pair(DESC) as (_, decoder, _, cache):
        for what in each_of_them():
            caplog.clear()
            decoder.datadist.observer = Failing(what)
            for source in range(4):
                assert (await decoder.datadist.cache_manager.pull_blocks(KEY, cache, [source], [5])).bytes == 2 * 4096
            assert f"at the {when} of pull_blocks" in caplog.text


# ---- models ----


@whatever
@pytest.mark.parametrize("is_async", [True, False])
async def test_model_runners(is_async: bool, what: Callable[[], BaseException]) -> None:
    async with models() as m:
        free = m.pair.free()

        def fail() -> None:
            raise what()

        async def fail_awaited(*_: Any, **__: Any) -> None:
            fail()

        if is_async:
            m.writer.run_model = fail_awaited  # type: ignore[method-assign]
        else:
            m.writer.interrupt = fail
        came: type[BaseException] | None = None
        with anyio.fail_after(10):
            try:
                await m.prompt.predict(request(10), [])
            except BaseException as error:
                came = type(error)
        assert came is not None
        assert is_async or came is not asyncio.CancelledError, "a plain function cannot cancel"
        assert m.pair.free() == free
        m.writer.interrupt = lambda: None
        vars(m.writer).pop("run_model", None)
        assert await m.prompt.predict(request(10), [wrote(0, [1])]) == "done"


@whatever
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_model_runner_at_the_end(
    is_async: bool, what: Callable[[], BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    class Failing(ModelRunner):
        def on_cache_deallocated(self, kv_cache: KvCache) -> Any:
            told.append("plain")
            raise what()

    class FailingAsync(ModelRunner):
        async def on_cache_deallocated(self, kv_cache: KvCache) -> None:
            told.append("async")
            raise what()

    async with pair() as linked:
        for _ in range(2):
            await linked.decoder.add_model(options(), FailingAsync() if is_async else Failing())
        await linked.decoder.finalize()
        assert len(told) == 2, "the second one is told, too"
        assert caplog.text.count("on_cache_deallocated() failed") == 2


# ---- pools of context caches ----


@whatever
@pytest.mark.parametrize("question", ["exists_many", "get_many", "put_many", "stage", "keeps", "healthy"])
async def test_pools(question: str, what: Callable[[], BaseException]) -> None:
    is_failing = False

    class Failing(MemoryPool):
        def __getattribute__(self, name: str) -> Any:
            if name != question or not is_failing:
                return super().__getattribute__(name)

            async def fail(*_: Any, **__: Any) -> Any:
                raise what()

            def fail_at_once(*_: Any, **__: Any) -> Any:
                raise what()

            return fail_at_once if name == "keeps" else fail

    kv = Kv()
    async with opened(await Failing.open(ROOM), kv) as cache:
        await cache.save([1, 2], **by_slots([0, 1]))
        is_failing = True
        with anyio.fail_after(10):
            for call in (cache.start_save([3, 4], **by_slots([2, 3])), cache.start_load([1, 2], **by_slots([0, 1]))):
                try:
                    await call
                except EmsException as error:
                    assert error.__cause__ is not None  # noqa: PT017
            assert await cache.check_health() in {True, False}
        is_failing = False
        with anyio.fail_after(10):
            await cache.save([5, 6], **by_slots([0, 1]))
            assert (await cache.load([5, 6], **by_slots([2, 3]))).details == (CcStatus.OK, CcStatus.OK)
