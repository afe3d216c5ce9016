"""Which of our caches a peer was told of: it may reach them at any moment, until it gave them back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from aiodatadist.cache.table import Entry, LeaseHolder
from aiodatadist.concurrency.signal import Signal
from aiodatadist.wire.messages import MAX_SECONDS, Message, Revoke

SLACK_SECONDS = 5.0
"""Seconds beyond the time that its transfers have, after which a peer that gives nothing back loses its link. Half of them
before, it is asked once more: what was said, or its answer, may have been lost."""


class PeerLeases:
    """The peer's leases on our caches.

    Attributes:
        held_bytes: the size of those caches.

    Args:
        holder: stands for the peer in ``Entry.holders``.
        seconds: how long transfers of the peer's may go on after a cache is revoked.
        give_up: called with what happened when the peer does not give a cache back.
    """

    def __init__(
        self,
        holder: LeaseHolder,
        seconds: float,
        post: Callable[[Message], None],
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        give_up: Callable[[str], None],
        post_again: Callable[[Message], None] | None = None,
    ) -> None:
        """``post_again``: says what was said before; None: as ``post`` does."""
        self._holder = holder
        self._seconds = min(seconds, MAX_SECONDS)
        self._post = post
        self._post_again = post_again or post
        self._spawn = spawn
        self._give_up = give_up
        self._held: dict[int, Entry] = {}
        self.held_bytes = 0
        self._revoked: dict[int, tuple[Signal, int]] = {}
        self._numbers = itertools.count(1)

    def is_settled(self, entry: Entry) -> bool:
        """It may be told of now: it is not being taken back."""
        return entry.cache_id not in self._revoked

    async def wait_settled(self, entry: Entry) -> None:
        while (revocation := self._revoked.get(entry.cache_id)) is not None:
            await revocation[0].wait()

    def held(self, cache_id: int) -> Entry | None:
        """A cache that the peer was told of and has not given back."""
        return self._held.get(cache_id)

    def told(self, entry: Entry) -> bool:
        """The peer is being told where it is; True if it did not know."""
        is_new = entry.cache_id not in self._held
        self.held_bytes += _size(entry) if is_new else 0
        self._held[entry.cache_id] = entry
        entry.hold(self._holder)
        return is_new

    def revoke(self, entry: Entry) -> Signal:
        """Take it back, in bounded time; the event is set when that is done, or the link over."""
        if entry.cache_id in self._revoked:
            return self._revoked[entry.cache_id][0]
        event, number = self._revoked[entry.cache_id] = Signal(), next(self._numbers)
        self._post(Revoke(cache_id=entry.cache_id, seconds=self._seconds, number=number))

        async def watch() -> None:
            with anyio.move_on_after(self._seconds + SLACK_SECONDS / 2):
                await event.wait()
            if not event.is_set():
                self._post_again(Revoke(cache_id=entry.cache_id, seconds=SLACK_SECONDS / 4, number=number))
                with anyio.move_on_after(SLACK_SECONDS / 2):
                    await event.wait()
            if not event.is_set():
                self._give_up(f"did not give cache {entry.cache_id} back within {self._seconds + SLACK_SECONDS:g} s")

        self._spawn(watch)
        return event

    def on_revoked(self, cache_id: int, number: int = 0) -> None:
        """The peer gave it back. What it was not asked for is ignored, and so is what it said of an earlier time: it may
        have been told of the cache since. ``number``: 0 from an end that knows none."""
        event, asked = self._revoked.get(cache_id, (None, 0))
        if event is not None and number in (0, asked):
            del self._revoked[cache_id]
            entry = self._held.pop(cache_id)
            self.held_bytes -= _size(entry)
            event.set()
            entry.drop_holder(self._holder)

    def end(self, settle: Callable[[Entry], object] | None = None) -> None:
        """The link is gone. Its channels, too: the peer reaches nothing any more. Else ``settle`` what it held."""
        for entry in self._held.values():
            if settle is None:
                entry.drop_holder(self._holder)
            else:
                settle(entry)
        self._held.clear()
        self.held_bytes = 0
        for event, _ in self._revoked.values():
            event.set()
        self._revoked.clear()


def _size(entry: Entry) -> int:
    return entry.nbytes * len(entry.addresses)
