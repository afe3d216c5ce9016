"""Leases of caches: a peer may reach each cache that it was told of at any moment, until it has released it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from aiodatadist._cache.table import Entry, LeaseHolder
from aiodatadist._concurrency.signal import Signal
from aiodatadist._link.control.loans import Loans
from aiodatadist._wire.messages import MAX_SECONDS, Message, Revoke

SLACK_SECONDS = 5.0
"""Seconds that a peer has for releasing a cache, beyond the time limit of its transfers. Then it loses its link.

When half of them have passed, the peer is asked again: the message or its answer may have been lost.
"""


class PeerLeases:
    """The peer's leases on our caches.

    Attributes:
        held_bytes: the size of those caches.

    Args:
        holder: stands for the peer in ``Entry.holders``.
        seconds: how long transfers of the peer's may continue after a cache is revoked.
        post: sends a message to the peer.
        spawn: starts a task that ends with the link.
        give_up: called with the reason if the peer does not release a cache.
        post_again: repeats a message; ``post`` if it is None.
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
        self._holder = holder
        self._seconds = min(seconds, MAX_SECONDS)
        self._post = post
        self._post_again = post_again or post
        self._spawn = spawn
        self._give_up = give_up
        self._held: dict[int, Entry] = {}
        self.held_bytes: int = 0
        self._loans: Loans | None = None
        self._revoked: dict[int, tuple[Signal, int]] = {}
        self._numbers = itertools.count(1)

    def lend_by(self, loans: Loans) -> None:
        """Lend the peer each cache that it is told of from now on. Otherwise it reaches what it may without a loan."""
        self._loans = loans

    def is_settled(self, entry: Entry) -> bool:
        """Return True if the peer may be told of a cache now, because it is not being revoked."""
        return entry.cache_id not in self._revoked

    async def wait_settled(self, entry: Entry) -> None:
        """Wait until a cache is not being revoked."""
        while (revocation := self._revoked.get(entry.cache_id)) is not None:
            await revocation[0].wait()

    def held(self, cache_id: int) -> Entry | None:
        """Return a cache that the peer was told of and has not released; None if there is none with this number."""
        return self._held.get(cache_id)

    def told(self, entry: Entry) -> bool:
        """Note that the peer is told where a cache is. Return True if it did not know."""
        is_new = entry.cache_id not in self._held
        if is_new and self._loans is not None:
            self._loans.lend(entry)
        self.held_bytes += _size(entry) if is_new else 0
        self._held[entry.cache_id] = entry
        entry.hold(self._holder)
        return is_new

    def revoke(self, entry: Entry) -> Signal:
        """Ask the peer to release a cache, in bounded time.

        Return an event that is set when the peer has released it, or when the link ends.
        """
        if entry.cache_id in self._revoked:
            return self._revoked[entry.cache_id][0]
        event, number = self._revoked[entry.cache_id] = Signal(), next(self._numbers)
        self._post(Revoke(cache_id=entry.cache_id, seconds=self._seconds, number=number))

        async def watch() -> None:
            with anyio.move_on_after(self._seconds + SLACK_SECONDS / 2):
                await event.wait()
            if not event.is_set():
                # with little time, because the limit for the transfers of the peer has passed
                self._post_again(Revoke(cache_id=entry.cache_id, seconds=SLACK_SECONDS / 4, number=number))
                with anyio.move_on_after(SLACK_SECONDS / 2):
                    await event.wait()
            if not event.is_set():
                self._give_up(f"did not release cache {entry.cache_id} within {self._seconds + SLACK_SECONDS:g} s")

        self._spawn(watch)
        return event

    def on_revoked(self, cache_id: int, number: int = 0) -> None:
        """Note that the peer has released a cache.

        An answer that was not asked for is ignored, and so is the answer to an earlier revocation: the peer may have been
        told of the cache again since.

        Args:
            number: the number of the revocation; 0 from a peer that knows no such numbers.
        """
        event, asked = self._revoked.get(cache_id, (None, 0))
        if event is not None and number in (0, asked):
            del self._revoked[cache_id]
            entry = self._held.pop(cache_id)
            self.held_bytes -= _size(entry)
            if self._loans is not None:
                self._loans.take_back(entry)
            event.set()
            entry.drop_holder(self._holder)

    def end(self, settle: Callable[[Entry], object] | None = None) -> None:
        """End all leases, because the link has ended.

        Args:
            settle: called with each cache that the peer held. If None, the channels are closed, so that the peer reaches
                nothing, and the caches are released.
        """
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
