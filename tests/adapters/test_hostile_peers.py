"""Peers of a block service that lie, and names of peers that are not found any more."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from aiodatadist._adapters import push_out
from aiodatadist._adapters.push_messages import Drop, More, Want
from aiodatadist._testing.views import call_on_loop, life_of, links_of, post_as
from aiodatadist._values import peer_budget
from aiodatadist.testing import inside
from tests.adapters.test_pushes import WORDS, End


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """Prefill and decode."""
    with ExitStack() as stack:
        made = End(0), End(1)
        for each in made:
            stack.enter_context(closing(each.service))
        yield made


def outgoing(end: End) -> push_out.OutgoingPushes:
    found: push_out.OutgoingPushes = life_of(end.service).outgoing
    return found


def test_wants_that_never_become_whole_are_bounded_and_end_with_their_link(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_budget, "WANTS", 10)
    prefill, decode = ends
    pushes = outgoing(prefill)
    begun = pushes._begun

    async def lie() -> None:
        peer = await links_of(decode.service).link(prefill.address, "r")
        for number in range(30):
            await post_as(decode.service, peer, More(transfer=f"{number}", into=()))
        await post_as(decode.service, peer, Want(transfer="0", first=0, into=(0, 1), count=2, caches=0, layout=WORDS))

    call_on_loop(decode.service, lie)
    prefill.until(lambda ended: "0" in ended.wanted)
    assert len(begun) == 9  # of the others
    decode.service.close()
    prefill.until(lambda _: not begun and not pushes._pushes)
    assert not pushes._shares


def test_a_link_whose_only_words_were_of_a_want_that_does_not_come(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    pushes = outgoing(prefill)
    begun = pushes._begun

    async def begin() -> None:
        await post_as(
            decode.service, await links_of(decode.service).link(prefill.address, "r"), More(transfer="t", into=(1, 2))
        )

    call_on_loop(decode.service, begin)
    prefill.until(lambda _: bool(begun))
    decode.service.close()
    prefill.until(lambda _: not begun)


def test_numbers_of_whole_wants_are_bounded(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_budget, "WANT_BLOCKS", 3)
    prefill, decode = ends
    decode.expect("first", prefill.address, (0, 1))
    prefill.until(lambda ended: "first" in ended.wanted)
    prefill.step("first")  # it is known, and gives way to none
    decode.expect("second", prefill.address, (2, 3))
    assert decode.received("second").outcomes == {"second": "push_missed"}
    prefill.service.pushed("first", "r")
    assert decode.received("first").outcomes["first"] == "push_arrived"
    decode.expect("third", prefill.address, (2, 3))
    prefill.step("third")
    prefill.service.pushed("third", "s")
    assert decode.received("third").outcomes["third"] == "push_arrived"


def test_a_link_is_ended_also_where_its_peers_name_is_not_found_any_more(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a request comes out into whose blocks a prefill engine that does not answer may still write."""
    prefill, decode = ends
    peer = call_on_loop(decode.service, lambda: links_of(decode.service).link(prefill.address, "r"))
    engine = inside(decode.service)
    assert engine.links.has_any

    def not_found(*words: Any, **options: Any) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr("aiodatadist._cluster.host_names.getaddrinfo", not_found)
    call_on_loop(decode.service, lambda: links_of(decode.service).end(peer))
    assert not engine.links.has_any


def test_a_peer_that_takes_no_answers_is_told_no_more(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_budget, "ANSWERS", 100)
    prefill, decode = ends
    monkeypatch.setattr(inside(decode.service), "heard", lambda *words: None)  # and says that it took nothing

    async def ask() -> int:
        to = await links_of(decode.service).link(prefill.address, "r")
        before = len(asyncio.all_tasks())
        for number in range(1000):
            await post_as(decode.service, to, Drop(transfer=f"{number}"))
        await post_as(decode.service, to, Want(transfer="last", first=0, into=(), count=0, caches=0, layout=WORDS))
        return before

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    before = call_on_loop(decode.service, ask)
    prefill.until(lambda ended: "last" in ended.wanted)
    assert call_on_loop(decode.service, tasks) - before < 50
    decode.service.close()
    prefill.until(lambda _: not outgoing(prefill)._answers)
