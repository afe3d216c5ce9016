"""Questions to the peer while it withdraws caches: which answers are out of date, and what that costs."""

from __future__ import annotations

import tracemalloc

from aiodatadist._link.control import questions
from aiodatadist._link.control.questions import PendingQuestions, Question
from aiodatadist._wire.messages import Found, KeyName, Lookup, Message

NAME = KeyName(kind="blocks", id=0, model_id=0)
MIB = 2**20


def ask(asked: PendingQuestions) -> Question:
    return asked.start(lambda call: Lookup(call=call, name=NAME), Found, None, lambda: None)


def test_caches_that_a_peer_takes_back_cost_the_same_however_many_questions_are_open() -> None:
    sent: list[Message] = []
    asked = PendingQuestions(sent.append)
    for _ in range(100):
        ask(asked)
    tracemalloc.start()
    try:
        for number in range(1, 5001):
            asked.revoked(2**40 + number)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < MIB


def test_an_answer_is_out_of_date_if_its_cache_was_taken_back_since_the_question() -> None:
    sent: list[Message] = []
    asked = PendingQuestions(sent.append)
    before = ask(asked)
    asked.revoked(7)
    after = ask(asked)
    assert asked.is_revoked_since(before, 7)
    assert not asked.is_revoked_since(before, 8)
    assert not asked.is_revoked_since(after, 7)
    asked.revoked(7)
    assert asked.is_revoked_since(after, 7)


def test_a_cache_that_is_no_longer_remembered_may_have_been_taken_back() -> None:
    sent: list[Message] = []
    asked = PendingQuestions(sent.append)
    before = ask(asked)
    for number in range(1, questions.REVOKED_CACHES + 2):
        asked.revoked(number)
    after = ask(asked)
    assert asked.is_revoked_since(before, 1)
    assert asked.is_revoked_since(before, questions.REVOKED_CACHES + 1)
    assert not asked.is_revoked_since(after, 1)
