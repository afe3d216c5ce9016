"""Two requests of one name, and one name used again and again: every order of their words gives each its own blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import permutations
from typing import Any

import anyio
import pytest

from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.sendings import Portion
from aiodatadist.testing import soft_faults_cleared, soft_hold
from tests.adapters.test_pushes import End
from tests.hostile.test_transfer_names import MINE, THEIRS, heard, push


@pytest.fixture
def make_end() -> Iterator[Callable[..., End]]:
    with ExitStack() as stack:

        def make(number: int, **settings: Any) -> End:
            end = End(number, **settings)
            stack.callback(end.service.close)
            return end

        yield make


@pytest.mark.parametrize("engines", [1, 2])
def test_each_of_two_requests_of_a_name_has_its_own_blocks_in_every_order(
    make_end: Callable[..., End], engines: int
) -> None:
    prefill, decodes = make_end(0), [make_end(1 + number) for number in range(engines)]
    mine, theirs = decodes[0], decodes[-1]
    for number, order in enumerate(permutations(["my push", "their push", "my want", "their want"])):
        name = f"transfer {number}"
        for end in decodes:
            for array in end.arrays:
                array[:] = 0
        for word in order:
            match word:
                case "my push":
                    push(prefill, name, f"p{name}", MINE, (3, 9))
                case "their push":
                    push(prefill, name, f"q{name}", THEIRS, (5, 6))
                case "my want":
                    mine.service.expect(ExpectOrder(f"d{name}", prefill.address, name, 0, (0, 1), prompt=MINE))
                case "their want":
                    theirs.service.expect(ExpectOrder(f"e{name}", prefill.address, name, 0, (2, 4), prompt=THEIRS))
            for end in decodes:
                heard(prefill, end)
        assert mine.received(f"d{name}").outcomes[f"d{name}"] == "push_arrived", order
        assert theirs.received(f"e{name}").outcomes[f"e{name}"] == "push_arrived", order
        ended = prefill.sent(f"p{name}", f"q{name}").outcomes
        assert (ended[f"p{name}"], ended[f"q{name}"]) == ("push_done", "push_done"), order
        assert [mine.holds(block) for block in (0, 1)] == [{3}, {9}], order
        assert [theirs.holds(block) for block in (2, 4)] == [{5}, {6}], order
        assert mine.holds(7) == theirs.holds(7) == {0}, order  # no request's


def test_a_want_waits_for_its_own_request_and_not_for_ever(make_end: Callable[..., End]) -> None:
    prefill, decode = make_end(0, pull_seconds=0.1), make_end(1)
    prefill.service.push("t", Portion(0, (3,)), request="p", prompt=MINE)
    for name, prompt in (("t", THEIRS), ("u", MINE)):
        decode.service.expect(ExpectOrder(name, prefill.address, name, 0, (0, 1), prompt=prompt))
    assert decode.received("t", "u").outcomes == {"t": "push_missed", "u": "push_missed"}
    assert prefill.take().counters["push_another_prompt"] == 1


# ---- names that are used again ----


def use(prefill: End, decode: End, number: int, prompt: bytes | None, is_wanted_first: bool) -> None:
    """Use the name ``t`` once, with success. The blocks tell which use it is."""
    blocks = (number % 8, number % 8 + 8)
    order = ExpectOrder(f"d{number}", prefill.address, "t", 0, (0, 1), prompt=prompt)
    if is_wanted_first:
        decode.service.expect(order)
        heard(prefill, decode)
    push(prefill, "t", f"p{number}", prompt, blocks)
    if not is_wanted_first:
        heard(prefill, decode)
        decode.service.expect(order)
    assert decode.received(f"d{number}").outcomes[f"d{number}"] == "push_arrived", number
    assert prefill.sent(f"p{number}").outcomes[f"p{number}"] == "push_done", number
    assert [decode.holds(0), decode.holds(1)] == [{blocks[0]}, {blocks[1]}], number


@pytest.mark.parametrize("prompt", [MINE, None], ids=["prompt", "no prompt"])
@pytest.mark.parametrize("orders", [(True,), (False,), (True, False), (False, True)])
@pytest.mark.parametrize("has_begun", [True, False])
def test_name_that_was_given_up_before_any_want_may_be_used_again_and_again(
    make_end: Callable[..., End], prompt: bytes | None, orders: tuple[bool, ...], has_begun: bool
) -> None:
    """Also at another decode engine."""
    prefill, decodes = make_end(0, patience_seconds=30), (make_end(1), make_end(2))
    number = 0
    for _ in range(3):
        for is_wanted_first in orders:
            number += 1
            if has_begun:
                prefill.service.push("t", Portion(0, (3,)), request=f"a{number}", prompt=prompt)
            prefill.service.abandon("t", request=f"a{number}", prompt=prompt)
            heard(prefill, decodes[number % 2])
            use(prefill, decodes[number % 2], number, prompt, is_wanted_first)
    assert prefill.take().outcomes.keys() == {f"p{number + 1}" for number in range(number)}


@pytest.mark.parametrize("prompt", [MINE, None], ids=["prompt", "no prompt"])
def test_name_is_free_as_soon_as_its_request_was_given_up(make_end: Callable[..., End], prompt: bytes | None) -> None:
    prefill, decode = make_end(0), make_end(1)
    for number in range(10):
        prefill.service.push("t", Portion(0, (3,)), request=f"a{number}", prompt=prompt)
        prefill.service.abandon("t", request=f"a{number}", prompt=prompt)
        use(prefill, decode, number, prompt, False)


@pytest.mark.parametrize("prompt", [MINE, None], ids=["prompt", "no prompt"])
@pytest.mark.parametrize("is_wanted_first", [True, False])
def test_name_that_was_dropped_before_its_request_came_may_be_used_again(
    make_end: Callable[..., End], prompt: bytes | None, is_wanted_first: bool
) -> None:
    prefill, decode = make_end(0, patience_seconds=30), make_end(1)
    for number in range(4):
        if number % 2:
            decode.service.decline(prefill.address, "t", prompt)
        else:
            decode.service.expect(ExpectOrder(f"c{number}", prefill.address, "t", 0, (4, 5), prompt=prompt))
            heard(prefill, decode)
            decode.service.cancel(f"c{number}")
            decode.received(f"c{number}")
        heard(prefill, decode)
        use(prefill, decode, number, prompt, is_wanted_first)


@pytest.mark.parametrize("prompt", [MINE, None], ids=["prompt", "no prompt"])
def test_decline_ends_nothing_that_a_decode_engine_wants_in_time(
    make_end: Callable[..., End], prompt: bytes | None
) -> None:
    """SGLang's engines do not know the prompt: anyone who has the key may name a room."""
    prefill, decode, stranger = make_end(0, patience_seconds=30), make_end(1), make_end(2)
    for number, when in enumerate(("before", "while", "behind")):
        if when == "before":
            stranger.service.decline(prefill.address, "t", prompt)
            heard(prefill, stranger)
        prefill.service.push("t", Portion(0, (3, 9)), request=f"p{number}", prompt=prompt)
        if when == "while":
            stranger.service.decline(prefill.address, "t", prompt)
            heard(prefill, stranger)
        prefill.service.pushed("t", f"p{number}", prompt=prompt)
        if when == "behind":
            stranger.service.decline(prefill.address, "t", prompt)
            heard(prefill, stranger)
        decode.service.expect(ExpectOrder(f"d{number}", prefill.address, "t", 0, (0, 1), prompt=prompt))
        assert decode.received(f"d{number}").outcomes[f"d{number}"] == "push_arrived", when
        assert prefill.sent(f"p{number}").outcomes[f"p{number}"] == "push_done", when


def test_request_that_never_began_ends_no_other_request_s_want(make_end: Callable[..., End]) -> None:
    """A second sender of a room that is aborted before it has sent anything."""
    prefill, decode = make_end(0, patience_seconds=30), make_end(1)
    decode.service.expect(ExpectOrder("d", prefill.address, "t", 0, (0, 1)))
    heard(prefill, decode)
    prefill.service.abandon("t", request="second")
    heard(prefill, decode)
    push(prefill, "t", "first", None)
    assert decode.received("d").outcomes["d"] == "push_arrived"
    assert prefill.sent("first").outcomes["first"] == "push_done"


def test_request_that_was_given_up_when_it_was_computed_does_not_come_out(make_end: Callable[..., End]) -> None:
    prefill, decode = make_end(0, lease_seconds=0.05), make_end(1)
    push(prefill, "t", "p", None)
    prefill.service.abandon("t", request="p")
    push(prefill, "behind", "q", None)
    prefill.sent("q")
    heard(prefill, decode)
    assert prefill.take().outcomes.keys() == {"q"}


def test_engine_that_drops_a_transfer_which_was_given_up_is_answered_when_no_byte_of_it_lands(
    make_end: Callable[..., End],
) -> None:
    prefill, decode = make_end(0), make_end(1)
    decode.service.expect(ExpectOrder("d", prefill.address, "t", 0, (0, 1)))
    heard(prefill, decode)
    with soft_faults_cleared(), soft_hold("HcclBatchPut", at="half") as put:
        push(prefill, "t", "p", None)
        anyio.run(put.arrived)
        prefill.service.abandon("t", request="p")
        decode.service.cancel("d")
        heard(prefill, decode)
        assert "d" not in decode.take().received
        put.release()
        decode.received("d")
    use(prefill, decode, 1, None, False)
