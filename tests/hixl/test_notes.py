"""Unread notifications: a peer may leave some of them here, and keeps the others."""

from __future__ import annotations

import sys

import pytest

from aiodatadist._hixl.notes import MOST_BYTES, MOST_UNREAD, NOTE_BYTES, Notes
from aiodatadist._hixl.values import MAX_NOTE
from aiodatadist._link import Notification
from aiodatadist.hixl import NotifyDesc
from tests.hixl.pairs import connected


class Inbox:
    """An inbox, and the number of notifications whose peer may send on."""

    def __init__(self) -> None:
        self.notes = Notes(lambda: None)
        self.taken = 0

    def put(self, peer: int, payload: bytes) -> None:
        self.notes.put(Notification(peer, payload), self._take)

    def _take(self) -> None:
        self.taken += 1


LARGEST = MAX_NOTE.to_bytes(2, "big") + bytes(2 * MAX_NOTE)
"""The longest notification."""


@pytest.mark.parametrize(
    "payload",
    [bytes(65536), b"", b"\0", b"\0\5abc", b"\xff\xff", LARGEST + b"\0", b"\4\1" + bytes(1025), bytes(2 + 1025)],
    ids=["64 KiB", "empty", "half a length", "a short name", "no name", "too long", "a long name", "a long message"],
)
def test_a_payload_that_is_no_notification_is_dropped_at_once(payload: bytes) -> None:
    """Otherwise a peer leaves 256 MiB here under each of its names, for a reader that may never come."""
    inbox = Inbox()
    before = sys.getrefcount(payload)
    for _ in range(10):
        inbox.put(1, payload)
    assert sys.getrefcount(payload) == before
    assert inbox.taken == 10
    assert inbox.notes.take_all() == []


@pytest.mark.parametrize("payload", [LARGEST, b"\0\0"], ids=["the longest", "the shortest"])
def test_peers_leave_bytes_up_to_a_limit_under_whatever_names_they_come(payload: bytes) -> None:
    """Names are free, and a notification stays when the link has ended over which it came. Others wait at the peer."""
    inbox = Inbox()
    most = MOST_BYTES // (NOTE_BYTES + len(payload))
    for turn in range(2):  # once all was read, there is room again
        for number in range(most + 64):  # under one name after the other
            inbox.put(number // 1000, payload)
        assert inbox.taken == turn * (most + 64) + most
        assert len(inbox.notes.take_all()) == most + 64
        assert inbox.taken == (turn + 1) * (most + 64)


async def test_one_peer_leaves_notifications_up_to_a_number() -> None:
    inbox = Inbox()
    for _ in range(MOST_UNREAD + 3):
        inbox.put(1, b"\0\1n")
    assert inbox.taken == MOST_UNREAD
    inbox.put(2, b"\0\1n")
    assert inbox.taken == MOST_UNREAD + 1
    reader = inbox.notes.read()
    for _ in range(MOST_UNREAD + 3):
        assert (await anext(reader)).name == "n"
    assert inbox.taken == MOST_UNREAD + 4


async def test_unreadable_notifications_delay_no_others() -> None:
    async with connected() as (server, client):
        for _ in range(200):  # more than a link holds back
            await client.engine.cluster.notify(server.engine.cluster.cluster_id, bytes(65536))
        await client.engine.send_notify(server.name, NotifyDesc("good", ""), 20_000)
        assert [note.name for note in server.engine.get_notifies()] == ["good"]
