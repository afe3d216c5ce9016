"""The name of a pushed request is a router's, or a client's: who only knows the name gets nothing, and ends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.push_messages import Drop, Refused, Sent
from aiodatadist._adapters.sendings import Portion
from aiodatadist._testing.views import call_on_loop, links_of, post_as
from aiodatadist._values.digests import prompt_digest
from tests.adapters.test_pushes import End, until

MINE, THEIRS = prompt_digest([1, 2, 3]), prompt_digest([4, 5, 6])
_WORDS = count()


@pytest.fixture
def make_end() -> Iterator[Callable[..., End]]:
    with ExitStack() as stack:

        def make(number: int) -> End:
            end = End(number)
            stack.callback(end.service.close)
            return end

        yield make


@pytest.fixture
def ends(make_end: Callable[..., End]) -> tuple[End, End, End]:
    """Make a prefill engine, the decode engine that a request is for, and one that a stranger's request is at."""
    return make_end(0), make_end(1), make_end(2)


def push(prefill: End, transfer: str, request: str, prompt: bytes | None, blocks: tuple[int, ...] = (3, 9)) -> None:
    """Compute a request and push it."""
    prefill.service.push(transfer, Portion(0, blocks), request=request, prompt=prompt)
    prefill.service.pushed(transfer, request, prompt=prompt)


def expect(decode: End, prefill: End, transfer: str, request: str, prompt: bytes | None) -> None:
    decode.service.expect(ExpectOrder(request, prefill.address, transfer, 0, (0, 1), prompt=prompt))


def heard(prefill: End, decode: End) -> None:
    """Wait until the prefill engine has acted on what the decode engine said before."""
    name = f"behind {next(_WORDS)}"
    expect(decode, prefill, name, name, None)
    prefill.until(lambda ended: name in ended.wanted)
    decode.service.cancel(name)
    decode.received(name)


def test_who_names_a_transfer_without_its_prompt_gets_nothing_of_it(ends: tuple[End, End, End]) -> None:
    prefill, decode, stranger = ends
    prefill.service.push("t", Portion(0, (3, 9)), request="p", prompt=MINE)
    expect(stranger, prefill, "t", "s", THEIRS)
    heard(prefill, stranger)
    prefill.service.pushed("t", "p", prompt=MINE)
    expect(decode, prefill, "t", "d", MINE)
    assert decode.received("d").outcomes["d"] == "push_arrived"
    assert prefill.sent("p").outcomes["p"] == "push_done"
    stranger.service.cancel("s")
    assert stranger.received("s").failed["s"] == (0, 1)
    assert (stranger.holds(0), stranger.holds(1)) == ({32}, {33})


def test_who_names_it_first_gets_nothing_of_it(ends: tuple[End, End, End]) -> None:
    prefill, decode, stranger = ends
    expect(stranger, prefill, "t", "s", THEIRS)
    prefill.until(lambda ended: "t" in ended.wanted)
    expect(decode, prefill, "t", "d", MINE)
    push(prefill, "t", "p", MINE)
    assert decode.received("d").outcomes["d"] == "push_arrived"
    assert prefill.sent("p").outcomes["p"] == "push_done"
    stranger.service.cancel("s")
    assert stranger.received("s").failed == {"s": (0, 1)}


def test_name_that_a_stranger_takes_at_the_prefill_engine_is_free_for_others(ends: tuple[End, End, End]) -> None:
    prefill, decode, _ = ends
    prefill.service.push("t", Portion(0, (5, 6)), request="squatter", prompt=THEIRS)
    push(prefill, "t", "p", MINE)
    expect(decode, prefill, "t", "d", MINE)
    assert decode.received("d").outcomes["d"] == "push_arrived"
    assert prefill.sent("p").outcomes["p"] == "push_done"


@pytest.mark.parametrize("is_early", [True, False])
def test_decline_without_the_prompt_ends_nothing(ends: tuple[End, End, End], is_early: bool) -> None:
    prefill, decode, stranger = ends
    if not is_early:
        prefill.service.push("t", Portion(0, (3, 9)), request="p", prompt=MINE)
    for prompt in (THEIRS, None):
        stranger.service.decline(prefill.address, "t", prompt)
    heard(prefill, stranger)
    if is_early:
        prefill.service.push("t", Portion(0, (3, 9)), request="p", prompt=MINE)
    prefill.service.pushed("t", "p", prompt=MINE)
    expect(decode, prefill, "t", "d", MINE)
    assert decode.received("d").outcomes["d"] == "push_arrived"
    assert prefill.sent("p").outcomes["p"] == "push_done"


@pytest.mark.parametrize("is_early", [True, False])
def test_decline_with_the_prompt_frees_the_blocks(ends: tuple[End, End, End], is_early: bool) -> None:
    prefill, decode, _ = ends
    if is_early:
        decode.service.decline(prefill.address, "t", MINE)
        heard(prefill, decode)
    push(prefill, "t", "p", MINE)
    if not is_early:
        decode.service.decline(prefill.address, "t", MINE)
    assert prefill.sent("p").outcomes["p"] == "push_stopped"


@pytest.mark.parametrize("prompt", [MINE, None])
def test_second_request_of_a_name_fails_at_its_own_end_and_its_pages_go_nowhere(
    ends: tuple[End, End, End], prompt: bytes | None
) -> None:
    prefill, decode, _ = ends
    prefill.service.push("t", Portion(0, (3,)), request="first", prompt=prompt)
    prefill.service.push("t", Portion(0, (5,)), request="second", prompt=prompt)
    prefill.until(lambda ended: ended.outcomes.get("second") == "push_refused")
    prefill.service.push("t", Portion(1, (9,)), request="first", prompt=prompt)
    prefill.service.push("t", Portion(1, (6,)), request="second", prompt=prompt)
    prefill.service.pushed("t", "second", prompt=prompt)
    prefill.service.pushed("t", "first", prompt=prompt)
    assert prefill.sent("second").outcomes["second"] == "push_refused"
    expect(decode, prefill, "t", "d", prompt)
    assert decode.received("d").outcomes["d"] == "push_arrived"
    assert prefill.sent("first").outcomes["first"] == "push_done"
    assert (decode.holds(0), decode.holds(1)) == ({3}, {9}), "pages of the first request, and of it alone"


def test_second_receiver_of_a_name_fails_and_the_first_has_its_pages(ends: tuple[End, End, End]) -> None:
    prefill, decode, _ = ends
    expect(decode, prefill, "t", "first", None)
    decode.service.expect(ExpectOrder("second", prefill.address, "t", 0, (6, 7)))
    assert decode.received("second").failed == {"second": (6, 7)}
    push(prefill, "t", "p", None)
    assert decode.received("first").outcomes["first"] == "push_arrived"
    assert (decode.holds(0), decode.holds(1)) == ({3}, {9})


@pytest.mark.parametrize("wanted_first", [True, False])
def test_finished_name_may_be_used_again_at_once(ends: tuple[End, End, End], wanted_first: bool) -> None:
    prefill, decode, _ = ends
    for number in range(3):
        for array in decode.arrays:
            array[:] = 0
        blocks = (number + 3, number + 9)
        if not wanted_first:
            push(prefill, "t", f"p{number}", None, blocks)
        expect(decode, prefill, "t", f"d{number}", None)
        if wanted_first:
            prefill.until(lambda ended: "t" in ended.wanted)
            push(prefill, "t", f"p{number}", None, blocks)
        assert decode.received(f"d{number}").outcomes[f"d{number}"] == "push_arrived"
        assert prefill.sent(f"p{number}").outcomes[f"p{number}"] == "push_done"
        assert (decode.holds(0), decode.holds(1)) == tuple({block} for block in blocks)


def test_late_words_of_an_earlier_use_end_nothing_of_the_next(ends: tuple[End, End, End]) -> None:
    prefill, decode, _ = ends
    push(prefill, "t", "p1", None)
    expect(decode, prefill, "t", "d1", None)
    decode.received("d1")
    prefill.sent("p1")
    expect(decode, prefill, "t", "d2", None)
    prefill.until(lambda ended: "t" in ended.wanted)

    async def repeat() -> None:  # what was on its way when the first use ended
        peer = await links_of(decode.service).link(prefill.address, "r")
        await post_as(decode.service, peer, Drop(transfer="t", number=1))
        back = await links_of(prefill.service).link(decode.address, "r")
        await post_as(prefill.service, back, Refused(transfer="t", number=1, reason="it was dropped"))
        await post_as(prefill.service, back, Sent(transfer="t", number=1))

    call_on_loop(decode.service, repeat)
    heard(prefill, decode)
    assert "d2" not in decode.take().received
    push(prefill, "t", "p2", None)
    assert decode.received("d2").outcomes["d2"] == "push_arrived"
    assert prefill.sent("p2").outcomes["p2"] == "push_done"


def test_want_that_was_dropped_early_costs_no_later_request_of_the_name(ends: tuple[End, End, End]) -> None:
    prefill, decode, _ = ends
    expect(decode, prefill, "t", "d1", MINE)
    prefill.until(lambda ended: "t" in ended.wanted)
    decode.service.cancel("d1")
    decode.received("d1")
    expect(decode, prefill, "t", "d2", MINE)
    heard(prefill, decode)
    for number in (2, 3):
        if number == 3:
            push(prefill, "t", "p3", MINE)
            expect(decode, prefill, "t", "d3", MINE)
        else:
            push(prefill, "t", "p2", MINE)
        assert decode.received(f"d{number}").outcomes[f"d{number}"] == "push_arrived"
        assert prefill.sent(f"p{number}").outcomes[f"p{number}"] == "push_done"


def test_peer_of_a_request_that_was_declined_early_is_not_kept_waiting(ends: tuple[End, End, End]) -> None:
    prefill, decode, _ = ends
    decode.service.decline(prefill.address, "t", MINE)
    heard(prefill, decode)
    push(prefill, "t", "p", MINE)
    assert prefill.sent("p").outcomes["p"] == "push_stopped"
    expect(decode, prefill, "t", "d", MINE)
    assert decode.received("d").failed["d"] == (0, 1)


def test_request_whose_transfer_ended_before_it_was_computed_is_told_so(ends: tuple[End, End, End]) -> None:
    """And not that its blocks went out, as they would for another use of the name."""
    prefill, decode, _ = ends
    prefill.service.push("t", Portion(0, (3,)), request="p", prompt=MINE)
    expect(decode, prefill, "t", "d", MINE)
    until(lambda: decode.holds(0) == {3})
    decode.service.cancel("d")
    decode.received("d")
    prefill.service.push("t", Portion(1, (9,)), request="p", prompt=MINE)
    prefill.service.pushed("t", "p", prompt=MINE)
    assert prefill.sent("p").outcomes["p"] == "push_stopped"
