"""Served requests of a peer, by number: each is served once, even if messages are lost or repeated.

A request that comes twice is served once: the second time would write into memory that the first answer released. A request
that comes after it was stopped is not served. A lost answer is repeated when the peer stops the request.
"""

from __future__ import annotations

from collections.abc import Callable

from aiodatadist._link.control.peer_share import CriticalShare
from aiodatadist._wire.messages import Pulled

KNOWN = 256
"""The number of requests that are remembered one by one.

A peer's numbers grow, so of older requests the largest number is enough. A request that comes after so many younger ones is
not served.
"""
ANSWERS = 64
"""The number of answers that can be repeated."""


class ServedRequests:
    """The requests that were served on one link."""

    def __init__(self) -> None:
        self._known: dict[int, None] = {}  # in the order in which they came
        self._older = 0
        self._answers: dict[int, Pulled] = {}

    def is_new(self, call: int) -> bool:
        """Return True if a request was neither served nor stopped before, and count it as served from now on."""
        if call <= self._older or call in self._known:
            return False
        self._known[call] = None
        if len(self._known) > KNOWN:
            self._older = max(self._older, _take_first(self._known))
        return True

    def answered(self, answer: Pulled) -> None:
        """Remember an answer that is being sent."""
        for call in (answer.call, *(other[0] for other in answer.also)):
            self._answers[call] = answer
            if len(self._answers) > ANSWERS:
                _take_first(self._answers)

    def answer(self, call: int) -> Pulled | None:
        """Return the answer to a request; None if it has not been answered, or long ago."""
        said = self._answers.get(call)
        return said and next(each for each in said.each() if each.call == call)


class CriticalRequests:
    """The critical requests of one link that have no answer yet.

    Args:
        share: returns the peer's share of them, over all its links.
    """

    def __init__(self, share: Callable[[], CriticalShare]) -> None:
        self._share = share
        self._calls: set[int] = set()

    def begin(self, call: int) -> bool:
        """Return True if a request may be critical, and count it then."""
        may = self._share().begin()
        if may:
            self._calls.add(call)
        return may

    def answered(self, answer: Pulled) -> None:
        """Note an answer that is being sent."""
        for each in answer.each() if self._calls else ():
            if each.call in self._calls:
                self._calls.discard(each.call)
                self._share().end(each.transfer_seconds)

    def end(self) -> None:
        """Forget the requests that get no answer, because the link has ended."""
        for _ in range(len(self._calls)):
            self._share().end()
        self._calls.clear()


def _take_first(numbers: dict[int, Pulled] | dict[int, None]) -> int:
    first = next(iter(numbers))
    del numbers[first]
    return first
