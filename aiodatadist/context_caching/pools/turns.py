"""Work of many calls, one call after another, between which the event loop goes round.

Calls that begin at the same moment would all prepare themselves in one round of the loop. No timer runs in a round: with some
hundred calls each learnt of its deadline seconds late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import anyio

from aiodatadist.concurrency.loop_time import give_way

T = TypeVar("T")
S = TypeVar("S")

AT_ONCE: Final = 32
"""Items that are made before the clock is looked at."""


class Turns:
    """A line of calls. The first of it makes what it needs, and gives way whenever the loop was held for a millisecond."""

    def __init__(self) -> None:
        self._line = anyio.Lock(fast_acquire=True)

    async def make(self, function: Callable[[S], T], items: Iterable[S], into: list[T], at_once: int = AT_ONCE) -> None:
        """Append ``function(item)`` for each item, in their order. Cancelled, ``into`` has what was made until then."""
        async with self._line:
            for number, item in enumerate(items):
                if number % at_once == 0:
                    await give_way()
                into.append(function(item))
