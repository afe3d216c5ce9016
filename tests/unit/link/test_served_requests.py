"""A request of a peer is served once, however often it comes, and whatever was said of it may be said again."""

from __future__ import annotations

import random

from aiodatadist._link.control.served_requests import ANSWERS, KNOWN, ServedRequests
from aiodatadist._wire.messages import Pulled


def test_each_number_is_new_once_in_any_order_that_is_no_older_than_is_kept() -> None:
    served, numbers = ServedRequests(), list(range(1, KNOWN + 1))
    random.Random(1).shuffle(numbers)
    assert all(served.is_new(number) for number in numbers)
    assert not any(served.is_new(number) for number in numbers)


def test_a_number_that_is_forgotten_is_not_new_nor_is_an_older_one_that_never_came() -> None:
    served = ServedRequests()
    for number in range(10, 10 + KNOWN + 5):
        assert served.is_new(number)
    assert not any(served.is_new(number) for number in range(1, 10 + KNOWN + 5))
    assert served.is_new(2**62)


def test_a_gap_that_is_young_enough_is_filled() -> None:
    served = ServedRequests()
    assert all(served.is_new(number) for number in range(2, 2 * KNOWN, 2))
    assert served.is_new(2 * KNOWN - 3)
    assert not served.is_new(2 * KNOWN - 3)


def test_the_last_answers_are_kept() -> None:
    served = ServedRequests()
    answers = [Pulled(call=number, status=0, reason="") for number in range(1, ANSWERS + 3)]
    for answer in answers:
        served.answered(answer)
    assert [served.answer(answer.call) for answer in answers] == [None, None, *answers[2:]]
    assert served.answer(ANSWERS + 3) is None
