"""The proof proves something: both workers in one process, with a parent that may meddle with what they say."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
import pytest

from aiodatadist import LLMConfig, LLMException
from aiodatadist._cli.demo import worker
from aiodatadist._cli.demo.decode import decode
from aiodatadist._cli.demo.figures import portions_of
from aiodatadist._cli.demo.kv import open_kv
from aiodatadist._cli.demo.messages import Failed, Finished, Job, Order, Prefilled, Progress, Report
from aiodatadist._cli.demo.prefill import prefill
from aiodatadist._cli.kit.pipes import Message, OrderT
from aiodatadist.testing import open_cluster, soft_counters

PROMPT = ("It was a dark and stormy night; the rain fell in torrents. " * 12)[:200]
BLOCKS = 13  # of 16 tokens
JOB = Job(prompt=PROMPT, tokens=12, seed=3, port=0)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes travel inside this process; between processes they do in ``test_real_demo``."""
    monkeypatch.setattr(worker, "LLMConfig", partial(LLMConfig, transport="loopback"))


ReportT = TypeVar("ReportT", bound=Report)
Meddle = Callable[[Prefilled], Prefilled]


class Parent:
    """The parent of one worker, in memory."""

    def __init__(self) -> None:
        self._give, self._orders = anyio.create_memory_object_stream[Order](4)
        self._report, self._reports = anyio.create_memory_object_stream[Report](1000)

    async def order(self, kind: type[OrderT]) -> OrderT:
        order = await self._orders.receive()
        assert isinstance(order, kind)
        return order

    async def report(self, message: Message) -> None:
        assert isinstance(message, Report)
        await self._report.send(message)

    async def give(self, order: Order) -> None:
        await self._give.send(order)

    async def report_of(self, kind: type[ReportT]) -> ReportT:
        """Return the next report of this kind."""
        async for report in self._reports:
            if isinstance(report, kind):
                return report
        raise AssertionError(f"no {kind} came")

    def __enter__(self) -> Parent:
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in (self._give, self._orders, self._report, self._reports):
            stream.close()


async def run_both(meddle: Meddle = lambda ready: ready) -> Finished:
    """Run a demo without processes."""
    with Parent() as of_prefill, Parent() as of_decode:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prefill, of_prefill)
            tasks.start_soon(decode, of_decode)
            await of_prefill.give(JOB)
            await of_decode.give(JOB)
            await of_decode.give(meddle(await of_prefill.report_of(Prefilled)))
            finished = await of_decode.report_of(Finished)
            tasks.cancel_scope.cancel()
    return finished


async def test_moved_cache_gives_the_same_tokens_and_bytes_and_every_byte_is_pulled_once_in_several_pulls() -> None:
    seen: list[list[int]] = []

    def look(ready: Prefilled) -> Prefilled:
        seen.append(ready.blocks)
        return ready

    finished = await run_both(look)
    assert finished.text == finished.reference
    assert len(finished.text) == JOB.tokens
    assert finished.kv_equal
    assert sorted(seen[0]) != seen[0], "both sides scatter the sequence differently"
    assert [pull.blocks for pull in finished.pulls] == [len(portion) for portion in portions_of(BLOCKS)]
    assert sum(pull.bytes for pull in finished.pulls) == BLOCKS * 16 * 16384
    assert all(pull.seconds > 0 and pull.memcpy_seconds > 0 for pull in finished.pulls)


async def test_block_that_was_not_pulled_is_noticed_in_text_and_bytes() -> None:
    def stray(ready: Prefilled) -> Prefilled:
        foreign = next(block for block in range(BLOCKS + 1) if block not in ready.blocks)
        return ready.model_copy(update={"blocks": [*ready.blocks[:-2], foreign, ready.blocks[-1]]})

    finished = await run_both(stray)
    assert not finished.kv_equal
    assert finished.text != finished.reference


async def test_exchanged_blocks_are_noticed_in_the_bytes() -> None:
    finished = await run_both(
        lambda ready: ready.model_copy(update={"blocks": [ready.blocks[1], ready.blocks[0], *ready.blocks[2:]]})
    )
    assert not finished.kv_equal


async def test_the_cache_is_not_adopted_and_given_back_with_its_last_array() -> None:
    gc.collect()
    before = soft_counters()
    async with open_cluster(1) as cluster, open_kv(cluster.datadist, 1, len(PROMPT), JOB.seed) as kv:
        assert soft_counters()["adopted"] == before["adopted"]
    assert not any(tensor.any() for tensor in kv.tensors)
    del kv, cluster  # which keeps what was registered
    await anyio.to_thread.run_sync(gc.collect)  # the thread that allocated may have kept its arguments until now
    assert soft_counters()["device_bytes"] == before["device_bytes"]


async def test_block_beyond_the_cache_is_refused() -> None:
    with pytest.RaisesGroup(LLMException, flatten_subgroups=True, allow_unwrapped=True):
        await run_both(lambda ready: ready.model_copy(update={"blocks": [*ready.blocks[:-1], 10_000]}))


def test_messages_survive_the_pipe() -> None:
    for message in (JOB, Progress(phase="pull", done=1, total=2), Failed(message="no", exit_code=2)):
        assert type(message).model_validate_json(message.line()) == message
        assert message.line().count(b"\n") == 1
