"""The news of a :class:`~aiodatadist._adapters.block_service.BlockService`: what ended since it was last asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_SAMPLES = 1024
"""Most durations that are kept until they are taken; further ones are only counted."""


@dataclass
class Ended:
    """The orders that ended since the last call.

    Attributes:
        sent: requests whose blocks no peer needs any longer.
        received: requests whose blocks have landed, or will not come.
        failed: blocks that have not landed, by request; these requests are in ``received``, too.
        outcomes: how each request in ``sent`` and ``received`` ended.
        wanted: transfers for which a peer has said where they belong, and which it still wants.
        unwanted: transfers of an earlier ``wanted`` that no peer wants now.
        counters: pulls, pushes and leases by how they ended, blocks, bytes.
        pull_seconds: durations of pulls that succeeded.
        incidents: counts of what others caused, by :class:`~aiodatadist._counting.Incident`.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)
    unwanted: set[str] = field(default_factory=set)
    counters: Counter[str] = field(default_factory=Counter)
    pull_seconds: list[float] = field(default_factory=list)
    incidents: Counter[str] = field(default_factory=Counter)
    # reported in an earlier ``wanted``, and in no ``unwanted`` since
    _told: set[str] = field(default_factory=set, repr=False)

    def after(self) -> Ended:
        """Return the object for the next news; this one has been taken."""
        told = self._told
        told |= self.wanted
        told -= self.unwanted
        return Ended(_told=told)

    def begins_to_want(self, transfer: str) -> None:
        """Note that a peer wants a transfer which none wanted. Only the difference to the last news is kept."""
        if transfer in self._told:
            self.unwanted.discard(transfer)
        else:
            self.wanted.add(transfer)

    def wants_no_more(self, transfer: str) -> None:
        """Note that no peer wants a transfer any longer."""
        if transfer in self._told:
            self.unwanted.add(transfer)
        else:
            self.wanted.discard(transfer)

    def let_go(self, request: str, how: str) -> None:
        """Note that no peer needs a request's blocks."""
        self.sent.add(request)
        self.outcomes[request] = how
        self.counters[how] += 1

    def came(self, request: str, how: str, missing: tuple[int, ...] = ()) -> None:
        """Note that a request's blocks have landed, or that some will not come."""
        self.received.add(request)
        self.outcomes[request] = how
        self.counters[how] += 1
        if missing:
            self.failed[request] = missing

    def took(self, seconds: float) -> None:
        """Note the duration of a pull."""
        if len(self.pull_seconds) < MAX_SAMPLES:
            self.pull_seconds.append(seconds)


Tell = Callable[[Callable[[Ended], object]], None]
"""Changes the :class:`Ended` that will be taken next."""
