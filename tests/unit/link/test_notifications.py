"""Notifications leave in the order in which they were asked for, and a taker gets each once."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiodatadist import ParamInvalid, ProtocolError
from aiodatadist._link.control.notifications import (
    WINDOW,
    Notification,
    NotificationInbox,
    NotificationQueue,
    PendingNotification,
    check_payload,
    decode,
)
from aiodatadist._wire.messages import MAX_NOTE, Message, Note, Taken
from tests.profiles import examples


class Sent:
    """Payloads that a queue posted."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def post(self, message: Message) -> None:
        assert isinstance(message, Note)
        self.payloads.append(decode(message))


def notification_queue() -> tuple[NotificationQueue, list[bytes]]:
    sent = Sent()
    return NotificationQueue(sent.post), sent.payloads


def nothing() -> None:
    pass


# ---- payloads ----


def test_payload_has_at_most_sixty_four_kibibytes() -> None:
    assert check_payload(b"") == b""
    assert check_payload(bytes(MAX_NOTE)) == bytes(MAX_NOTE)
    with pytest.raises(ParamInvalid, match=f"a notification of {MAX_NOTE + 1} bytes: the limit is {MAX_NOTE}"):
        check_payload(bytes(MAX_NOTE + 1))


@pytest.mark.parametrize("payload", ["text", None, bytearray(b"x"), 1])
def test_payload_is_bytes(payload: bytes) -> None:
    with pytest.raises(TypeError, match="notify"):
        check_payload(payload)


@pytest.mark.parametrize("payload", [b"", b"a", b"\0\xff", bytes(range(256)) * 256])
def test_payload_comes_out_as_it_went_in(payload: bytes) -> None:
    box, sent = notification_queue()
    box.reserve(payload).ready()
    assert sent == [payload]


@pytest.mark.parametrize("payload", ["A", "AAAAA", "AA=", "="])
def test_what_is_not_base64_is_the_peers_fault(payload: str) -> None:
    with pytest.raises(ProtocolError, match="is not base64"):
        decode(Note(payload=payload))


# ---- going out ----


def test_later_one_that_is_ready_waits_for_an_earlier_one() -> None:
    box, sent = notification_queue()
    first, second, third = (box.reserve(payload) for payload in (b"1", b"2", b"3"))
    third.ready()
    second.ready()
    assert sent == []
    assert not second.sent.is_set()
    first.ready()
    assert sent == [b"1", b"2", b"3"]
    assert first.sent.is_set()
    assert third.sent.is_set()


def test_dropped_one_holds_up_no_other_and_is_never_sent() -> None:
    box, sent = notification_queue()
    first, second, third = (box.reserve(payload) for payload in (b"1", b"2", b"3"))
    second.drop()
    third.ready()
    assert sent == []
    first.drop()
    assert sent == [b"3"]
    first.ready()
    assert sent == [b"3"]
    assert not first.sent.is_set()


def test_what_is_out_cannot_be_dropped_or_sent_again() -> None:
    box, sent = notification_queue()
    pending = box.reserve(b"1")
    pending.ready()
    pending.drop()
    pending.ready()
    box.reserve(b"2").ready()
    assert sent == [b"1", b"2"]


def test_peer_that_takes_none_gets_sixty_four() -> None:
    box, sent = notification_queue()
    for i in range(WINDOW + 3):
        box.reserve(b"%d" % i).ready()
    assert len(sent) == WINDOW == 64
    box.on_taken(Taken())
    assert len(sent) == WINDOW + 1
    box.on_taken(Taken())
    box.on_taken(Taken())
    box.on_taken(Taken())
    assert sent == [b"%d" % i for i in range(WINDOW + 3)]


def test_dropped_ones_need_no_room_at_the_peer() -> None:
    box, sent = notification_queue()
    for _ in range(WINDOW):
        box.reserve(b"").ready()
    waiting = box.reserve(b"dropped"), box.reserve(b"last")
    waiting[0].drop()
    waiting[1].ready()
    box.on_taken(Taken())
    assert sent[WINDOW:] == [b"last"]


def test_peer_cannot_take_what_it_was_not_sent() -> None:
    box, _ = notification_queue()
    with pytest.raises(ProtocolError, match="that it was never sent"):
        box.on_taken(Taken())
    box.reserve(b"").ready()
    box.on_taken(Taken())
    with pytest.raises(ProtocolError):
        box.on_taken(Taken())


class Sending(RuleBasedStateMachine):
    """Against a list of what is to go out, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.box, self.sent = notification_queue()
        self.slips: list[PendingNotification] = []
        self.waiting: deque[PendingNotification] = deque()
        self.expected: list[bytes] = []
        self.window = WINDOW

    def advance(self) -> None:
        while self.waiting and (self.waiting[0].is_dropped or (self.waiting[0].is_ready and self.window)):
            pending = self.waiting.popleft()
            if not pending.is_dropped:
                self.window -= 1
                self.expected.append(pending.payload)

    @rule(count=st.integers(1, 40))
    def reserve(self, count: int) -> None:
        for _ in range(count):
            pending = self.box.reserve(b"%d" % len(self.slips))
            self.slips.append(pending)
            self.waiting.append(pending)

    @precondition(lambda self: self.slips)
    @rule(data=st.data(), drop=st.booleans())
    def settle(self, data: st.DataObject, drop: bool) -> None:
        first = data.draw(st.integers(0, len(self.slips) - 1))
        for pending in self.slips[first : first + 40]:
            pending.drop() if drop else pending.ready()
            self.advance()

    @precondition(lambda self: self.window < WINDOW)
    @rule()
    def taken(self) -> None:
        self.box.on_taken(Taken())
        self.window += 1
        self.advance()

    @invariant()
    def agrees(self) -> None:
        assert self.sent == self.expected
        assert [pending.payload for pending in self.slips if pending.sent.is_set()] == self.expected


Sending.TestCase.settings = settings(max_examples=examples(50), deadline=None)
TestSending = Sending.TestCase


async def test_queue_is_empty_when_all_are_out_or_dropped() -> None:
    box, _ = notification_queue()
    await box.wait_empty()
    slips = [box.reserve(b"") for _ in range(3)]
    order = []

    async def wait() -> None:
        await box.wait_empty()
        order.append("empty")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        group.start_soon(wait)
        for act in (slips[1].ready, slips[0].drop, slips[2].ready):
            await anyio.wait_all_tasks_blocked()
            order.append("act")
            act()
    assert order == ["act"] * 3 + ["empty"] * 2


async def test_queue_that_is_filled_again_before_the_waiter_ran_is_not_empty() -> None:
    box, _ = notification_queue()
    pending = box.reserve(b"")
    async with anyio.create_task_group() as group:
        group.start_soon(box.wait_empty)
        await anyio.wait_all_tasks_blocked()
        pending.ready()
        again = box.reserve(b"")
        with anyio.move_on_after(0) as given_up:
            await box.wait_empty()
        assert given_up.cancelled_caught
        again.ready()


# ---- coming in ----


async def collect(inbox: NotificationInbox, into: list[bytes]) -> None:
    async for note in inbox.take():
        into.append(note.payload)


def put(inbox: NotificationInbox, *payloads: bytes, taken: Callable[[], None] = nothing) -> None:
    for payload in payloads:
        inbox.put(Notification(7, payload), taken)


async def test_notifications_come_in_order_with_the_cluster_that_sent_them() -> None:
    inbox = NotificationInbox()
    inbox.put(Notification(7, b"1"), nothing)
    inbox.put(Notification(8, b"2"), nothing)
    inbox.close()
    assert [note async for note in inbox.take()] == [Notification(7, b"1"), Notification(8, b"2")]


async def test_peer_is_told_of_each_that_was_taken_and_of_no_other() -> None:
    inbox, count = NotificationInbox(), [0]

    def taken() -> None:
        count[0] += 1

    put(inbox, b"1", b"2", b"3", taken=taken)
    seen = []
    async for _ in inbox.take():
        seen.append(count[0])
        if len(seen) == 2:
            break
    assert seen == [1, 2]
    assert count == [2]
    assert (await anext(inbox.take())).payload == b"3"


async def test_takers_share_what_comes() -> None:
    inbox = NotificationInbox()
    got: list[list[bytes]] = [[], [], []]
    async with anyio.create_task_group() as group:
        for mine in got:
            group.start_soon(collect, inbox, mine)
        await anyio.wait_all_tasks_blocked()
        put(inbox, b"1", b"2")
        await anyio.wait_all_tasks_blocked()
        put(inbox, b"3")
        await anyio.wait_all_tasks_blocked()
        inbox.close()
    assert sorted(payload for mine in got for payload in mine) == [b"1", b"2", b"3"]


async def test_all_takers_end_when_nothing_can_come_and_what_is_there_is_still_taken() -> None:
    inbox = NotificationInbox()
    early: list[bytes] = []
    late: list[bytes] = []
    async with anyio.create_task_group() as group:
        group.start_soon(collect, inbox, early)
        await anyio.wait_all_tasks_blocked()
        put(inbox, b"1")
        inbox.close()
    put(inbox, b"2")
    await collect(inbox, late)
    await collect(inbox, late)
    assert (early, late) == ([b"1"], [b"2"])


async def test_taker_that_is_cancelled_takes_nothing_with_it() -> None:
    inbox = NotificationInbox()
    with anyio.move_on_after(0):
        await collect(inbox, [])
    put(inbox, b"1")
    inbox.close()
    got: list[bytes] = []
    await collect(inbox, got)
    assert got == [b"1"]


def test_note_is_base64_on_the_wire() -> None:
    said: list[Message] = []
    NotificationQueue(said.append).reserve(b"\xfb\xff").ready()
    assert said == [Note(payload=base64.b64encode(b"\xfb\xff").decode(), number=1)]
