"""Which requests of a peer were served, by their numbers: each once, whatever became of its messages on the way.

A request that comes twice is served once; its second time would write into memory that its first answer gave back. So is one
that comes after its own end. An answer that was lost is said again when the peer asks it to stop.
"""

from __future__ import annotations

from aiodatadist.wire.messages import Pulled

KNOWN = 256
"""Numbers that are kept one by one. A peer's numbers grow: of older ones the largest is enough, and a request that comes
later than so many younger ones is not served."""
ANSWERS = 64
"""Answers that may be said again."""


class ServedRequests:
    """Those of one link."""

    def __init__(self) -> None:
        self._known: dict[int, None] = {}  # in the order in which they came
        self._older = 0
        self._answers: dict[int, Pulled] = {}

    def is_new(self, call: int) -> bool:
        """It was neither served nor stopped. It counts as served from now on."""
        if call <= self._older or call in self._known:
            return False
        self._known[call] = None
        if len(self._known) > KNOWN:
            self._older = max(self._older, _take_first(self._known))
        return True

    def answered(self, answer: Pulled) -> None:
        """This is being said."""
        for call in (answer.call, *(other[0] for other in answer.also)):
            self._answers[call] = answer
            if len(self._answers) > ANSWERS:
                _take_first(self._answers)

    def answer(self, call: int) -> Pulled | None:
        """What was said about it, unless that was long ago."""
        said = self._answers.get(call)
        return said and next(each for each in said.each() if each.call == call)


def _take_first(numbers: dict[int, Pulled] | dict[int, None]) -> int:
    first = next(iter(numbers))
    del numbers[first]
    return first
