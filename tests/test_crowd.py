"""Many transfers of one link at a time: what they share, and what must not depend on how many they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio.lowlevel
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, CacheNotFound, DataType, LinkError
from aiodatadist.link import requester
from aiodatadist.link.questions import PendingQuestions, Question
from aiodatadist.link.responder import Responder
from aiodatadist.testing import Cluster, linked_pair
from aiodatadist.wire.messages import Lookup, Pull, Pulled
from tests.held import there_and_back

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
    session = decoder.datadist._running().links.find(1)
    assert len(session.questions) == 0
    held.answer()
    await pull(BlocksCacheKey(1), cache, [0], [0])
    await there_and_back(decoder, prompt)
    assert len(session.questions) == 0


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
        session = decoder.datadist._running().links.find(1)

        async def insist(questions: PendingQuestions, question: Question, seconds: float) -> None:
            waits.append(seconds)
            questions.heard += answers
            if len(waits) == 3 * requester.STOPS:
                question.settle(Pulled(call=question.number, status=1, reason="it was stopped", stopped=True))

        monkeypatch.setattr(PendingQuestions, "insist", insist)
        monkeypatch.setattr(Responder, "begin", lambda *_: None)  # it never comes to it
        task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        while len(session.questions) == 0:
            await anyio.lowlevel.checkpoint()
        task.cancel()
        with pytest.raises(asyncio.CancelledError if answers else LinkError):
            await task
        assert session.is_ready is answers
        assert len(waits) == (3 if answers else 1) * requester.STOPS


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
