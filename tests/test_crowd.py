"""Many transfers of one link at a time: what they share, and what must not depend on how many they are."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator
from typing import Any

import anyio.lowlevel
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheNotFound,
    CacheTask,
    DataType,
    LinkError,
    NotLinked,
    ParamInvalid,
    ProtocolError,
    TransferPriority,
    TransferTimeout,
)
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._link.control.questions import PendingQuestions, Question
from aiodatadist._link.data import remote_operation
from aiodatadist._link.transfers import pull_requests, requester
from aiodatadist._link.transfers.pull_requests import WINDOW
from aiodatadist._link.transfers.responder import MAX_SERVED, Responder
from aiodatadist._wire.messages import MAX_TOGETHER, Lookup, Pull, Pulled, Unsupported
from aiodatadist.testing import Cluster, inside, linked_pair
from tests.held import PUSH, held_transfer, there_and_back

DESC = CacheDesc(1, [16, 64], DataType.DT_UINT8)
MANY = 100


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Cluster, Cluster, Cache, Cache]]:
    async with linked_pair(DESC, sync_kv_timeout=20_000) as made:
        yield made


class Held:
    """Look-ups as they come to their owner, which answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came: list[Lookup] = []
        self._waiting: list[tuple[Any, Lookup]] = []
        self._find = Responder.find
        self.is_held = True
        held = self

        def find(responder: Responder, message: Lookup) -> None:
            held.came.append(message)
            if held.is_held:
                held._waiting.append((responder, message))
            else:
                held._find(responder, message)

        monkeypatch.setattr(Responder, "find", find)

    def answer(self, *, is_held: bool = False) -> None:
        self.is_held = is_held
        waiting, self._waiting = self._waiting, []
        for responder, message in waiting:
            self._find(responder, message)


async def test_one_look_up_starts_all_that_wait_for_it(
    pair: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, decoder, _, cache = pair
    held, pull = Held(monkeypatch), decoder.datadist.cache_manager.pull_blocks
    tasks = [pull(BlocksCacheKey(1), cache, [i % 16], [i % 16]) for i in range(MANY)]
    tasks[0].cancel()
    await there_and_back(decoder, prompt)
    assert len(held.came) == 1
    held.answer()
    for task in tasks[1:]:
        await task
    assert [task.cancelled() for task in tasks] == [True] + [False] * (MANY - 1)
    assert len(held.came) == 1


class Rounds:
    """Counts of tasks that were done in each round of the event loop, until all are."""

    def __init__(self, tasks: list[CacheTask]) -> None:
        self.done = list[int]()
        self._tasks = tasks
        self._tick()

    def _tick(self) -> None:
        self.done.append(sum(task.done() for task in self._tasks))
        if self.done[-1] < len(self._tasks):
            asyncio.get_running_loop().call_soon(self._tick)


async def test_the_loop_goes_round_while_one_answer_is_told_to_many(
    pair: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder, _, cache = pair
    monkeypatch.setattr(requester, "SLICE", 0.0)
    tasks = pulls(decoder, cache, MANY)
    tasks[-1].cancel()
    rounds = Rounds(tasks)
    for task in tasks[:-1]:
        await task
    assert len(set(rounds.done)) > MANY // 2


async def test_a_look_up_that_is_cancelled_behind_its_answer_is_not_carried_out(
    pair: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder, _, cache = pair
    monkeypatch.setattr(requester, "SLICE", 0.0)
    tasks = pulls(decoder, cache, 10)
    tasks[0].add_done_callback(lambda _: tasks[-1].cancel())
    for task in tasks[:-1]:
        await task
    assert tasks[-1].cancelled()
    assert decoder.datadist.statistics().links[0].transfers == 9
    link = inside(decoder.datadist).links.find(1)
    assert (len(link.session.questions), len(link.transfers.running.operations)) == (0, 0)


async def test_a_look_up_is_forgotten_when_nothing_waits_for_it(
    pair: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, decoder, _, cache = pair
    held, pull = Held(monkeypatch), decoder.datadist.cache_manager.pull_blocks
    tasks = [pull(BlocksCacheKey(1), cache, [0], [0]) for _ in range(3)]
    for task in tasks:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    link = inside(decoder.datadist).links.find(1)
    assert len(link.session.questions) == 0
    held.answer()
    await pull(BlocksCacheKey(1), cache, [0], [0])
    await there_and_back(decoder, prompt)
    assert len(link.session.questions) == 0


async def test_who_comes_behind_a_question_is_not_told_that_there_was_nothing_before(
    pair: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache was made behind the answer, and before the call: all of those ask once more, with one question."""
    prompt, decoder, _, cache = pair
    held, pull = Held(monkeypatch), decoder.datadist.cache_manager.pull_blocks
    first = pull(BlocksCacheKey(1, 5), cache, [0], [0])
    await there_and_back(decoder, prompt)
    held.answer(is_held=True)  # its answer is on its way
    await prompt.blocks(DESC, 5)
    late = [pull(BlocksCacheKey(1, 5), cache, [i], [i]) for i in range(1, 16)]
    with pytest.raises(CacheNotFound):
        await first
    held.answer()
    for task in late:
        await task
    assert len(held.came) == 2


@pytest.mark.parametrize("answers", [True, False], ids=["answers others", "answers nothing"])
async def test_a_peer_that_answers_others_is_not_taken_for_one_that_does_not_stop(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time for one stop counts from its last answer, to whatever question. Without any it loses its link."""
    waits = list[float]()
    async with linked_pair(DESC, enable_remote_cache_accessible=False, sync_kv_timeout=20_000) as (
        _,
        decoder,
        _,
        cache,
    ):
        link = inside(decoder.datadist).links.find(1)

        async def insist(questions: PendingQuestions, question: Question, seconds: float) -> None:
            waits.append(seconds)
            questions.heard += answers
            if len(waits) == 3 * pull_requests.STOPS:
                question.settle(Pulled(call=question.number, status=1, reason="it was stopped", stopped=True))

        monkeypatch.setattr(PendingQuestions, "insist", insist)
        monkeypatch.setattr(Responder, "begin", lambda *_: None)  # it never comes to it
        task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        while len(link.session.questions) == 0:
            await anyio.lowlevel.checkpoint()
        task.cancel()
        with pytest.raises(asyncio.CancelledError if answers else LinkError):
            await task
        assert link.session.is_ready is answers
        assert len(waits) == (3 if answers else 1) * pull_requests.STOPS


async def test_a_pull_that_is_cancelled_before_it_is_asked_for_is_never_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came = list[Pull]()
    begin = Responder.begin

    def note(self: Responder, message: Pull) -> None:
        came.append(message)
        begin(self, message)

    monkeypatch.setattr(Responder, "begin", note)
    async with linked_pair(DESC, enable_remote_cache_accessible=False, sync_kv_timeout=20_000) as (
        _,
        decoder,
        _,
        cache,
    ):
        tasks = [decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [i], [i]) for i in range(16)]
        for task in tasks[::2]:
            task.cancel()
        for task in tasks[1::2]:
            await task
        assert all(task.cancelled() for task in tasks[::2])
    assert [message.src_blocks for message in came] == [[i] for i in range(1, 16, 2)]


# ---- request/response: few requests at a time ----


@pytest.fixture
async def requesting() -> AsyncIterator[tuple[Cluster, Cluster, Cache, Cache]]:
    """Link a pair in which the second cluster asks the first one to write, and has been told of the destination."""
    async with linked_pair(DESC, enable_remote_cache_accessible=False, sync_kv_timeout=20_000) as made:
        await made[1].datadist.cache_manager.pull_blocks(BlocksCacheKey(1), made[3], [0], [0])
        yield made


class HeldRequests:
    """Requests as they come to their owner, which serves them when it is told to, and hears stops unless told not to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came = list[Pull]()
        self.stops = list[tuple[Responder, int]]()
        self.hears_stops = True
        self._waiting: list[tuple[Responder, Pull]] | None = []
        self._begin, self._stop = Responder.begin, Responder.stop
        held = self

        def begin(responder: Responder, message: Pull) -> None:
            held.begin(responder, message)

        def stop(responder: Responder, call: int) -> None:
            held.stop(responder, call)

        monkeypatch.setattr(Responder, "begin", begin)
        monkeypatch.setattr(Responder, "stop", stop)

    def begin(self, responder: Responder, message: Pull) -> None:
        self.came.append(message)
        if self._waiting is None:
            self._begin(responder, message)
        else:
            self._waiting.append((responder, message))

    async def have_come(self, count: int) -> None:
        while len(self.came) < count:
            await anyio.lowlevel.checkpoint()

    def stop(self, responder: Responder, call: int) -> None:
        self.stops.append((responder, call))
        if self.hears_stops:
            self._stop(responder, call)

    def hear_stops(self) -> None:
        for responder, call in self.stops:
            self._stop(responder, call)

    def serve(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for responder, message in waiting:
            self._begin(responder, message)


def pulls(decoder: Cluster, cache: Cache, count: int, **options: Any) -> list[CacheTask]:
    pull = decoder.datadist.cache_manager.pull_blocks
    return [pull(BlocksCacheKey(1), cache, [i % 16], [i % 16], **options) for i in range(count)]


async def test_neither_end_has_a_task_for_a_request(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder, _, cache = requesting
    started = list[object]()
    start_soon = Spawner.start_soon

    def counted(self: Spawner, function: Any, *args: Any, **options: Any) -> None:
        started.append(function)
        start_soon(self, function, *args, **options)

    monkeypatch.setattr(Spawner, "start_soon", counted)
    for task in pulls(decoder, cache, MANY):
        await task
    assert started == []


async def test_a_request_in_line_is_few_objects_to_the_garbage_collector(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection looks at all of them, and holds the loop meanwhile. The key and the list of tasks are the caller's."""
    _, decoder, _, cache = requesting
    held, count = HeldRequests(monkeypatch), 2 * WINDOW
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        tasks = pulls(decoder, cache, count)
        each = (len(gc.get_objects()) - before) / count
    finally:
        gc.enable()
    assert each < 13
    held.serve()
    for task in tasks:
        await task


async def test_requests_leave_nothing_to_the_garbage_collector(
    requesting: tuple[Cluster, Cluster, Cache, Cache],
) -> None:
    """Leave no reference cycles: they wait for a collection of everything, and make it long."""
    _, decoder, _, cache = requesting
    gc.collect()
    gc.disable()
    try:
        for task in pulls(decoder, cache, 10):
            await task
        del task
        assert gc.collect() < 10
    finally:
        gc.enable()


async def test_the_loop_goes_round_while_many_are_asked_for(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder, _, cache = requesting
    monkeypatch.setattr(pull_requests, "SLICE", -1.0)
    asked = list[int]()
    ask = pull_requests.PullRequests._ask_some

    def counted(self: pull_requests.PullRequests, until: float) -> None:
        before = sum(map(len, self._lines))
        ask(self, until)
        asked.append(before - sum(map(len, self._lines)))

    monkeypatch.setattr(pull_requests.PullRequests, "_ask_some", counted)
    for task in pulls(decoder, cache, MANY):
        await task
    assert sum(asked) == MANY
    assert max(asked) == 1


async def test_the_peer_is_asked_for_few_requests_at_a_time(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, decoder, _, cache = requesting
    held = HeldRequests(monkeypatch)
    tasks = pulls(decoder, cache, 3 * WINDOW)
    await held.have_come(WINDOW)
    await there_and_back(decoder, prompt)
    assert len(held.came) == WINDOW
    held.serve()
    for task in tasks:
        await task
    assert [message.src_blocks for message in held.came] == [[i % 16] for i in range(3 * WINDOW)]
    assert held.stops == []


async def test_what_is_cancelled_in_line_ends_at_once_and_is_neither_asked_for_nor_stopped(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, decoder, _, cache = requesting
    held = HeldRequests(monkeypatch)
    tasks = pulls(decoder, cache, 3 * WINDOW)
    await held.have_come(WINDOW)
    await there_and_back(decoder, prompt)
    for task in tasks[WINDOW::2]:
        task.cancel()
        assert task.cancelled()
    asked = tasks[0]
    asked.cancel()
    assert not asked.done()
    with pytest.raises(asyncio.CancelledError):
        await asked
    held.serve()
    for task in tasks:
        if not task.cancelled():
            await task
    assert len(held.came) == 2 * WINDOW
    assert len(held.stops) == 1


async def test_a_refused_request_whose_callback_empties_another_line_does_not_hold_up_the_rest(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder, _, cache = requesting
    monkeypatch.setattr(remote_operation, "MAX_INDEXES", 4)
    pull = decoder.datadist.cache_manager.pull_blocks
    refused = pull(BlocksCacheKey(1), cache, range(8), range(8), priority=TransferPriority.CRITICAL)
    (cancelled,) = pulls(decoder, cache, 1)
    (asked,) = pulls(decoder, cache, 1, priority=TransferPriority.BACKGROUND)
    refused.add_done_callback(lambda _: cancelled.cancel())
    with pytest.raises(ParamInvalid, match="the limit of one request is 4"):
        await refused
    assert cancelled.cancelled()
    await asked


async def test_a_request_that_is_late_in_line_is_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=False, sync_kv_timeout=300) as (_, decoder, _, cache):
        held = HeldRequests(monkeypatch)
        held.hears_stops = False
        tasks = pulls(decoder, cache, WINDOW + 10)
        for task in tasks[WINDOW:]:
            with pytest.raises(TransferTimeout, match=r"not done within 0\.3 s"):
                await task
        assert not any(task.done() for task in tasks[:WINDOW])
        assert len(held.came) == WINDOW
        held.hears_stops = True
        held.hear_stops()
        for task in tasks[:WINDOW]:
            with pytest.raises(TransferTimeout, match=r"not done within 0\.3 s"):
                await task


async def test_an_urgent_request_stands_in_a_line_of_its_own(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, decoder, _, cache = requesting
    held = HeldRequests(monkeypatch)
    tasks = pulls(decoder, cache, 2 * WINDOW, priority=TransferPriority.BACKGROUND)
    await held.have_come(WINDOW)
    tasks += pulls(decoder, cache, 1) + pulls(decoder, cache, 1, priority=TransferPriority.CRITICAL)
    await held.have_come(WINDOW + 2)
    await there_and_back(decoder, prompt)
    assert [message.priority for message in held.came[WINDOW:]] == [0, 1]
    held.serve()
    for task in tasks:
        await task


async def test_a_line_is_asked_for_beside_a_long_one_of_more_urgent_requests(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else how much passes a background request would be decided here, and not where its bytes are moved."""
    monkeypatch.setattr(
        pull_requests, "SLICE", math.inf
    )  # all are asked for in one turn of the loop, however slow it is
    _, decoder, _, cache = requesting
    held = HeldRequests(monkeypatch)
    tasks = pulls(decoder, cache, MANY)
    tasks += pulls(decoder, cache, 1, priority=TransferPriority.BACKGROUND)
    await held.have_come(MANY + 1)
    assert [message.priority for message in held.came].index(TransferPriority.BACKGROUND.value) == MAX_TOGETHER
    held.serve()
    for task in tasks:
        await task


async def test_a_peer_that_says_that_it_knows_no_requests_loses_its_link(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lose the link: the peer may have begun to write all the same, and only the end of the channel makes sure."""
    _, decoder, _, cache = requesting

    def deny(responder: Responder, message: Pull) -> None:
        responder._session.post(Unsupported(kind="pull", call=message.call))

    monkeypatch.setattr(Responder, "begin", deny)
    monkeypatch.setattr(Responder, "stop", lambda *_: None)
    for task in pulls(decoder, cache, 3):
        with pytest.raises(ProtocolError, match="knows no 'pull'"):
            await task
    with pytest.raises(NotLinked):
        await decoder.datadist.check_link_status(1)


async def test_more_requests_than_a_peer_serves_wait_here_and_cost_no_link(
    requesting: tuple[Cluster, Cluster, Cache, Cache],
) -> None:
    """Its device stands still, and it ends a link with more requests than that."""
    prompt, decoder, _, cache = requesting
    with held_transfer(PUSH) as held:
        tasks = pulls(decoder, cache, 16) + pulls(decoder, cache, 16, priority=TransferPriority.CRITICAL)
        tasks += pulls(decoder, cache, MAX_SERVED + 1)
        await held.arrived()
        await there_and_back(decoder, prompt)
        for task in tasks[1::2]:
            task.cancel()
        held.release()
        for task in tasks[::2]:
            await task
    for task in tasks[1::2]:
        await task.synchronize()
    assert inside(decoder.datadist).links.find(1).session.is_ready


async def test_a_request_that_is_stopped_at_its_owner_before_its_turn_is_answered_at_once() -> None:
    """Stop a request that waits behind others for the owner's stream, which has not begun it."""
    large = CacheDesc(2, [16, 1 << 18], DataType.DT_UINT8)
    async with linked_pair(large, enable_remote_cache_accessible=False, sync_kv_timeout=20_000) as (
        prompt,
        decoder,
        _,
        cache,
    ):
        pull = decoder.datadist.cache_manager.pull_blocks
        with held_transfer(PUSH) as held:
            first = pull(BlocksCacheKey(1), cache, range(16), range(16))
            await held.arrived()
            second = pull(BlocksCacheKey(1), cache, [0], [0])
            await there_and_back(decoder, prompt)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            assert not first.done()
            held.release()
            await first
