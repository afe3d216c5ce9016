"""Work of many calls, one call after another, with turns for other tasks in between.

Calls that start at the same moment would all prepare their requests in one round of the loop. No timer runs during a
round: with some hundred calls each would notice its deadline seconds late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import anyio

from aiodatadist._concurrency.loop_time import give_way

T = TypeVar("T")
S = TypeVar("S")

AT_ONCE: Final = 32
"""Items that are made between two looks at the clock."""


class Turns:
    """A queue of calls. The first makes its items, and gives way once it has held the loop for a millisecond."""

    def __init__(self) -> None:
        self._line = anyio.Lock(fast_acquire=True)

    async def make(self, function: Callable[[S], T], items: Iterable[S], into: list[T], at_once: int = AT_ONCE) -> None:
        """Append ``function(item)`` for each item, in order. If cancelled, ``into`` has what was made until then."""
        async with self._line:
            for number, item in enumerate(items):
                if number % at_once == 0:
                    await give_way()
                into.append(function(item))
