"""Dials of one worker: how many run at a time, which place is next, and which dial gives way to the next one.

What a router or a client carries decides which places a worker dials. A place that does not answer costs a socket for
as long as a link may take, and a true one milliseconds. So few dials run at a time, and those that have had their time
give way.

**Who is next.** Each request has a line, and the lines take turns: the places of one request delay no other request by
more than one dial. A place that several requests name has one dial, and stands in the lines of all of them. Places that
were silent when they were last dialled share one line. At most ``WAITING`` places wait; beyond that the longest line
loses its last place, so that the newest request always has a place in the line.

**What a waiting dial costs.** A few objects. Its task starts when there is room, because hundreds of tasks would make
every garbage collection block the event loop. Only a dial that must wait for something else first, such as the look-up
of a name, waits here in its task.

**How long a dial is left alone.** Until it has lived through a number of ticks of a timer, which runs only while a
place waits. A late event loop ticks less often, and so costs no place its answer. A peer that accepted the connection
has more time than a silent one.

Nothing else is remembered of a place that failed: an engine that starts again is linked by the first offer after it
listens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Final

from aiodatadist._cluster.dial import Steps
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.signal import Signal

DIALS = 64
"""Dials of a worker at a time. Each has a socket."""
WAITING = 1024
"""Most places that wait for a dial: twice as many as a worker may have links."""
SILENT_PLACES = 4096
"""Most places that are remembered because they were silent when they were last dialled."""
TICK_SECONDS: Final = 0.02
"""Seconds between two ticks, if the event loop is not late."""
SILENT_TICKS = 5
"""Ticks that a dial may take to connect before it gives way: many round trips, even behind a thousand offers."""
CONNECTED_TICKS = 50
"""Ticks in which a peer must prove itself once it accepted the connection: a second, as a true peer may be busy."""

_SILENT: Final = object()
"""The line of places that were silent."""


class Stage(Enum):
    """The stage of a dial."""

    NAMED = "its host is looked up"
    WAITING = "too many places were being dialled"
    CONNECTING = "it did not answer, and later dials took its place"
    CONNECTED = "it accepted the connection but did not prove itself, and later dials took its place"
    FREE = "it needs no room among the dials, because it is known, is spare or has proved itself"


class Dial(Steps):
    """A dial. It ends when the peer is met, or the dial failed.

    Args:
        share: the share of look-ups among which the host's name counts.
        is_free: if true, it waits for no other dial, and gives way to none.

    Attributes:
        scope: of what dials. It is cancelled when the dial gives way, and when no request waits for a place in the
            line.
    """

    are_limited = True

    def __init__(self, dials: Dials, place: str, share: Hashable, *, is_free: bool = False) -> None:
        super().__init__(share)
        self.place = place
        self.scope = Scope()
        self.stage = Stage.FREE if is_free else Stage.NAMED
        self.ticks = 0
        self.requests: Counter[str] = Counter()  # how many times each waits
        self._dials = dials
        self._turn: tuple[Callable[[], object], Callable[[], object]] | None = None  # while it waits

    @property
    def is_due(self) -> bool:
        """True if the dial has had its time."""
        return self.ticks >= (SILENT_TICKS if self.stage is Stage.CONNECTING else CONNECTED_TICKS)

    def join(self, request: str | None) -> None:
        """Note a request that waits for the dial. A caller with None waits, too, but gets no place in the line."""
        if request is not None:
            self.requests[request] += 1
            self._dials._joined(self, request)

    def part(self, request: str | None) -> None:
        """Note that a request no longer waits. A dial that none waits for, and that has no socket yet, ends."""
        if request is None:
            return
        self.requests[request] -= 1
        if not self.requests[request]:
            del self.requests[request]
            self._dials._parted(self, request)
        if not self.requests and self.stage in {Stage.NAMED, Stage.WAITING}:
            self.give_way()

    def wait_for_turn(self, begin: Callable[[], object], leave: Callable[[], object] = lambda: None) -> None:
        """Stand in line, and call ``begin`` when there is room, or ``leave`` if the dial gives way before that.

        Either may be called before this returns.
        """
        self._turn = begin, leave
        self._dials._line_up(self)

    def begin(self) -> None:
        """Leave the line, because there is room."""
        self.stage = Stage.CONNECTING
        turn, self._turn = self._turn, None
        if turn is not None:
            turn[0]()

    def give_way(self) -> None:
        """Stop, or leave the line."""
        self.scope.cancel()
        turn, self._turn = self._turn, None
        if turn is not None:
            turn[1]()

    async def before_connecting(self) -> None:
        """Wait until there is room for the dial, unless there was before its task started."""
        if self.stage is Stage.NAMED:
            begun = Signal()
            self.wait_for_turn(begun.set)
            await begun.wait()

    def connected(self) -> None:
        """Note that the peer accepted the connection."""
        if self.stage is Stage.CONNECTING:
            self.stage, self.ticks = Stage.CONNECTED, 0

    def met(self) -> None:
        """Note that the peer has proved itself, and make room for another dial."""
        self.stage = Stage.FREE
        self.ended()

    def ended(self) -> None:
        """Make room for another dial. May be called more than once."""
        self._dials._leave(self)


class _Lines:
    """Dials that wait for room. ``len()`` counts each once, in however many lines it stands."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, dict[Dial, None]] = {}  # the next dial is the first of the first line
        self._of: dict[Dial, dict[Hashable, None]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, dial: Dial, line: Hashable) -> None:
        """Add a dial to a line."""
        self._lines.setdefault(line, {})[dial] = None
        self._of.setdefault(dial, {})[line] = None

    def remove(self, dial: Dial) -> None:
        """Remove a dial from all lines. Does nothing if it does not wait."""
        for line in self._of.pop(dial, {}):
            self._remove_from(line, dial)

    def part(self, dial: Dial, line: Hashable) -> None:
        """Remove a dial from one of its lines, if it stands in another one, too."""
        lines = self._of.get(dial, {})
        if line in lines and len(lines) > 1:
            del lines[line]
            self._remove_from(line, dial)

    def _remove_from(self, line: Hashable, dial: Dial) -> None:
        waiting = self._lines[line]
        del waiting[dial]
        if not waiting:
            del self._lines[line]

    def next(self) -> Dial:
        """Remove the next dial and return it. Its line goes behind the others."""
        line, waiting = next(iter(self._lines.items()))
        dial = next(iter(waiting))
        self.remove(dial)
        if line in self._lines:
            self._lines[line] = self._lines.pop(line)
        return dial

    def last_of_the_longest(self) -> Dial:
        """Return the last dial of the longest line."""
        longest: dict[Dial, None] = max(self._lines.values(), key=len)
        return next(reversed(longest))


class Dials:
    """The dials of one worker, on its event loop."""

    def __init__(self) -> None:
        self._under_way: dict[Dial, None] = {}  # in the order in which they began
        self._lines = _Lines()
        self._silent: dict[str, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def was_silent(self, place: str) -> bool:
        """Return True if a place did not answer when it was last dialled."""
        return place in self._silent

    def learn(self, dial: Dial, *, answered: bool) -> None:
        """Note whether a place that was dialled answered, a refusal included."""
        self._silent.pop(dial.place, None)
        if not answered and dial.stage not in {Stage.NAMED, Stage.WAITING}:
            self._silent[dial.place] = None
            if len(self._silent) > SILENT_PLACES:
                del self._silent[next(iter(self._silent))]

    def _line_up(self, dial: Dial) -> None:
        dial.stage = Stage.WAITING
        for request in dial.requests:
            self._joined(dial, request)
        if len(self._lines) > WAITING:
            crowded_out = self._lines.last_of_the_longest()
            self._lines.remove(crowded_out)
            crowded_out.give_way()
        self._begin_next()

    def _joined(self, dial: Dial, request: str) -> None:
        if dial.stage is Stage.WAITING:
            self._lines.add(dial, _SILENT if self.was_silent(dial.place) else request)

    def _parted(self, dial: Dial, request: str) -> None:
        self._lines.part(dial, request)

    def _begin_next(self) -> None:
        while len(self._lines) and len(self._under_way) < DIALS:
            dial = self._lines.next()
            self._under_way[dial] = None
            dial.begin()
        if len(self._lines) and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self.tick)

    def tick(self) -> None:
        """Let dials that have had their time give way, the oldest first, but only as many as wait."""
        self._timer = None
        for dial in self._under_way:
            dial.ticks += 1
        leaving = sum(dial.scope.cancel_called for dial in self._under_way)
        due = [dial for dial in self._under_way if dial.is_due and not dial.scope.cancel_called]
        for dial in due[: max(0, len(self._lines) - leaving)]:
            dial.give_way()  # its end begins the next one
        self._begin_next()

    def _leave(self, dial: Dial) -> None:
        self._lines.remove(dial)
        self._under_way.pop(dial, None)
        self._begin_next()
