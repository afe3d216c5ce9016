"""Dials of one worker that are under way: how many there are, and which one gives way to the next.

What a router or a client carries decides which places a worker dials. A place that does not answer costs a socket for as long
as a link may take, and a true one milliseconds. So there are few dials at a time, and when there is no room the one gives way
that has waited longest: no number of silent places keeps a true one out.

Nothing is remembered of a place that failed. Offers that name it at the same time share one dial, which bounds what it costs;
and an engine that starts again is linked by the first offer after it listens.
"""

from __future__ import annotations

import asyncio
from typing import Final

import anyio

from aiodatadist.concurrency.fair_queue import FairQueue
from aiodatadist.concurrency.scope import Scope

DIALS = 64
"""Dials of a worker at a time. Each has a socket."""
UNDISTURBED_SECONDS: Final = 0.05
"""Seconds that a dial has before it gives way: many round trips of a true one, also behind a thousand offers of one step."""


class Dial:
    """One dial. It ends when the peer is met, or the dial failed.

    Attributes:
        scope: of what dials. It is cancelled when the dial gives way.
    """

    def __init__(self, dials: Dials) -> None:
        self.scope = Scope()
        self.began = 0.0
        self._dials = dials

    def ended(self) -> None:
        """Make room for another one. May be called more than once."""
        self._dials._leave(self)


class Dials:
    """Those of one worker, on its event loop."""

    def __init__(self) -> None:
        self._under_way: dict[Dial, None] = {}  # in the order in which they began
        self._line = FairQueue()

    async def begin(self, dial: Dial) -> None:
        """Wait until there is room for a dial. Those that wait take turns in the order in which they came."""
        await self._line.take(lambda: self._place(dial))

    def _place(self, dial: Dial) -> bool | None:
        now = anyio.current_time()
        if len(self._under_way) < DIALS:
            dial.began = now
            self._under_way[dial] = None
            return True
        oldest = next(iter(self._under_way), None)
        if oldest is not None and not oldest.scope.cancel_called:
            undisturbed = oldest.began + UNDISTURBED_SECONDS - now
            if undisturbed > 0:
                asyncio.get_running_loop().call_later(undisturbed, self._line.call)
            else:
                oldest.scope.cancel()  # its end calls the next in the line
        return None

    def _leave(self, dial: Dial) -> None:
        if self._under_way.pop(dial, dial) is None:
            self._line.call()
