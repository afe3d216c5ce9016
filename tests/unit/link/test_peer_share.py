"""Windows, room for notifications, and shares by peer: pure, with a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from typing import cast

import anyio.abc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import ProtocolError, Quotas
from aiodatadist._link.control.notifications import IncomingNotifications
from aiodatadist._link.control.peer_share import MAX_SHARES, CriticalShare, Floor, Inflow, NoteRoom, PeerShares, Window
from aiodatadist._link.control.served_requests import CriticalRequests
from aiodatadist._link.control.wire import Wire
from aiodatadist._values.peer_budget import Budget
from aiodatadist._wire.frames import encode
from aiodatadist._wire.messages import Message, Note, Ping, Pulled, Taken


class Clock:
    """A clock that stands still unless the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now


def test_a_window_that_is_full_ends_a_second_after_it_began() -> None:
    clock = Clock()
    window = Window(3, clock)
    clock.now += 0.25
    window.left -= 3
    assert window.wait() == 0.75
    clock.now += 0.75
    assert window.wait() == 0
    assert window.left == 3


def test_a_sender_within_the_limit_costs_no_look_at_the_clock() -> None:
    clock = Clock()
    window = Window(10, clock)
    for _ in range(9):
        window.left -= 1
        assert window.wait() == 0
    assert clock.looks == 1, "when it was made"


def test_what_came_beyond_the_limit_counts_to_the_next_windows() -> None:
    clock = Clock()
    window = Window(10, clock)
    window.left -= 25
    assert window.wait() == 1
    clock.now += 1
    assert window.wait() == 1, "five more are still owed"
    clock.now += 1
    assert window.wait() == 0
    assert window.left == 5


def test_a_silence_is_no_credit() -> None:
    clock = Clock()
    window = Window(10, clock)
    window.left -= 10
    clock.now += 3600
    assert window.wait() == 0
    assert window.left == 10


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 9)), max_size=60), st.integers(1, 40))
def test_no_sender_gets_more_than_the_limit_for_each_second_and_one_more(
    sent: list[tuple[float, int]], limit: int
) -> None:
    clock = Clock()
    window, began, total = Window(limit, clock), clock.now, 0
    for pause, amount in sent:
        clock.now += pause
        while (seconds := window.wait()) > 0:
            assert seconds <= 1
            clock.now += seconds
        window.left -= amount
        total += amount
        assert total <= limit * (clock.now - began + 2) + 9


@pytest.mark.parametrize("limit", [Budget.FRAMES, Budget.FRAME_BYTES, Budget.REVOCATIONS])
def test_each_limit_of_an_inflow_is_counted_under_its_name(limit: Budget) -> None:
    waits: Counter[str] = Counter()
    clock = Clock()
    inflow = Inflow(Quotas(frames=100, frame_bytes=1 << 20, revocations=2), clock, waits, Floor(clock))
    for _ in range(100 if limit is Budget.FRAMES else 2):
        if limit is Budget.FRAMES:
            inflow.heard()
        elif limit is Budget.REVOCATIONS:
            inflow.revoked()
        else:
            inflow.received(1 << 19)
    assert inflow.is_spent
    assert inflow.wait() == 1
    assert waits == {limit.value: 1}


def test_a_peer_that_takes_long_to_read_gives_others_their_turn() -> None:
    clock = Clock()
    floor = Floor(clock)
    one, other = (Inflow(Quotas(), clock, Counter(), floor) for _ in range(2))
    one.heard()
    one.worked(0.01)
    assert one.turn() == 0, "there is no other peer"
    other.heard()
    one.worked(0.0009)
    assert one.turn() == 0, "that was short"
    one.worked(0.0101)
    assert one.turn() == pytest.approx(0.033)
    assert one.turn() == 0, "it has waited for that"
    one.heard()
    one.worked(5)
    assert one.turn() == 0.1, "a processor was missing"
    clock.now += 0.2
    one.heard()
    one.worked(0.01)
    assert one.turn() == 0, "the other has nothing to say"


@pytest.mark.autojump
@pytest.mark.parametrize("has_others", [True, False])
async def test_a_wire_is_not_read_while_others_have_their_turn(
    has_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, ticks = asyncio.get_running_loop(), count(0, 0.01)
    monkeypatch.setattr("aiodatadist._link.control.wire.perf_counter", lambda: next(ticks))
    floor = Floor(loop.time)
    one, other = (Inflow(Quotas(), loop.time, Counter(), floor) for _ in range(2))
    wire = Wire(cast("anyio.abc.SocketStream", Pieces(*(encode(Ping(call=call)) for call in (1, 2, 3)))))
    wire.limit(one)
    if has_others:
        other.heard()
    began = loop.time()
    for call in (1, 2, 3):
        assert await wire.receive() == Ping(call=call)
    assert loop.time() - began == pytest.approx(0.06 if has_others else 0)


class Pieces:
    """A byte stream that has these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    async def receive(self, most: int) -> bytes:
        return self._pieces.pop(0)


def test_links_of_one_peer_share_what_they_send_and_other_peers_do_not() -> None:
    shares = PeerShares(Quotas(frames=100), Clock(), Counter())
    first = shares.of(7)
    for _ in range(100):
        first.inflow.heard()
    assert shares.of(7).inflow.is_spent, "another link of the same peer"
    assert not shares.of(8).inflow.is_spent


def test_few_peers_are_remembered() -> None:
    shares = PeerShares(Quotas(), Clock(), Counter())
    kept = shares.of(0)
    for number in range(1, MAX_SHARES):
        shares.of(number)
    assert shares.of(0) is kept, "it is now the one that was linked last"
    for number in range(MAX_SHARES, 2 * MAX_SHARES - 1):
        shares.of(number)
    assert len(shares) == MAX_SHARES
    assert shares.of(0) is kept
    assert len(shares) == MAX_SHARES


def test_every_limit_that_users_set_has_one_name() -> None:
    assert sorted(Quotas.model_fields) == sorted(limit.value for limit in Budget)


# ---- notifications ----


class Inbox:
    """The notifications of a peer that came over one link after the other."""

    def __init__(self, quotas: Quotas) -> None:
        self.waits: Counter[str] = Counter()
        self.room = NoteRoom(quotas, self.waits)
        self.notes: list[tuple[bytes, object]] = []
        self.said: list[Message] = []

    def link(self) -> IncomingNotifications:
        return IncomingNotifications(
            self.said.append, lambda payload, taken: self.notes.append((payload, taken)), lambda: self.room
        )

    def take(self) -> bytes:
        payload, taken = self.notes.pop(0)
        assert callable(taken)
        taken()
        return payload


def test_notifications_that_are_not_taken_are_bounded_over_all_links() -> None:
    inbox = Inbox(Quotas())
    for _ in range(20):
        link = inbox.link()
        for number in range(1, 65):
            link.on_note(Note(payload="AAAA", number=number))
        link.end()
    assert len(inbox.notes) == 64
    assert inbox.waits == {"notes": 19 * 64}


def test_their_bytes_are_bounded_too() -> None:
    inbox = Inbox(Quotas(notes=1000))
    largest = "A" * (65_536 // 3 * 4) + "AA=="
    for _ in range(3):
        link = inbox.link()
        for number in range(1, 65):
            link.on_note(Note(payload=largest, number=number))
    assert sum(len(payload) for payload, _ in inbox.notes) <= 4 << 20
    assert len(inbox.notes) == 64
    assert inbox.waits == {"note_bytes": 2 * 64}


def test_a_notification_without_room_is_delivered_when_its_sender_repeats_it() -> None:
    inbox = Inbox(Quotas())
    old, new = inbox.link(), inbox.link()
    for number in range(1, 65):
        old.on_note(Note(payload="AAAA", number=number))
    new.on_note(Note(payload="BBBB", number=1))
    assert inbox.said == [], "as if it had been lost"
    inbox.take()
    new.on_note(Note(payload="BBBB", number=1))
    assert len(inbox.notes) == 64
    while len(inbox.notes) > 1:
        inbox.take()
    inbox.take()
    assert inbox.said[-1] == Taken(count=1, heard=1)
    assert (inbox.room.notes, inbox.room.nbytes) == (0, 0)


def test_what_waits_for_an_earlier_one_has_room_until_its_link_ends() -> None:
    inbox = Inbox(Quotas())
    link = inbox.link()
    for number in range(2, 65):
        link.on_note(Note(payload="AAAA", number=number))
    assert inbox.room.notes == 63
    link.on_note(Note(payload="AAAA", number=64))
    assert inbox.room.notes == 63, "a repeated one"
    link.end()
    assert (inbox.room.notes, inbox.room.nbytes) == (0, 0)


def test_a_peer_that_repeats_none_loses_its_link_instead() -> None:
    inbox = Inbox(Quotas())
    old, new = inbox.link(), inbox.link()
    for _ in range(64):
        old.on_note(Note(payload="AAAA"))
    with pytest.raises(ProtocolError, match="over one link after the other"):
        new.on_note(Note(payload="AAAA"))


# ---- critical requests ----


def test_critical_requests_are_limited_in_number_and_in_time_over_all_links() -> None:
    clock, waits = Clock(), Counter[str]()
    share = CriticalShare(Quotas(critical_requests=2, critical_share=0.25), clock, waits)
    old, new = CriticalRequests(lambda: share), CriticalRequests(lambda: share)
    assert [old.begin(1), new.begin(1), new.begin(2)] == [True, True, False]
    assert waits == {"critical_requests": 1}
    new.answered(pulled(1, 0.2))
    assert new.begin(3), "0.2 s of 0.25"
    new.answered(pulled(3, 0.2))
    assert not new.begin(4)
    assert waits == {"critical_requests": 1, "critical_share": 1}
    clock.now += 1
    assert new.begin(5), "0.15 s of the next second have gone"
    old.end()
    assert share.requests == 1
    new.answered(pulled(4, 9.0))
    assert share.requests == 1, "it was a normal one"


def pulled(call: int, seconds: float) -> Pulled:
    return Pulled(call=call, status=0, reason="", nbytes=1, ranges=1, queue_seconds=0.0, transfer_seconds=seconds)
