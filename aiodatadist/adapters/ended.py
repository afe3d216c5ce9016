"""What ended at a :class:`~aiodatadist.adapters.block_service.BlockService` since it was asked the last time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_SAMPLES = 1024
"""Durations that are kept until they are taken; further ones are counted only."""


@dataclass
class Ended:
    """What ended since the last time.

    Attributes:
        sent: requests whose blocks no peer needs any more.
        received: requests whose blocks are here, or are not to come.
        failed: blocks that are not here, by request; those requests are in ``received``, too.
        outcomes: of requests in ``sent`` and ``received``, how each ended.
        wanted: transfers for which a peer has said where they belong, and still wants them.
        unwanted: those of an earlier ``wanted`` that no peer wants now.
        counters: pulls, pushes and leases by how they ended, blocks, bytes.
        pull_seconds: of pulls that succeeded.
        incidents: what others caused, by kind: :class:`~aiodatadist.counting.Incident`.
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
    _told: set[str] = field(default_factory=set, repr=False)  # in an earlier ``wanted``, and in no ``unwanted`` since

    def after(self) -> Ended:
        """This one was taken: the one that follows it."""
        told = self._told
        told |= self.wanted
        told -= self.unwanted
        return Ended(_told=told)

    def begins_to_want(self, transfer: str) -> None:
        """A peer wants it, and none did. Of what peers want and drop, only the difference to the last time is kept."""
        if transfer in self._told:
            self.unwanted.discard(transfer)
        else:
            self.wanted.add(transfer)

    def wants_no_more(self, transfer: str) -> None:
        if transfer in self._told:
            self.unwanted.add(transfer)
        else:
            self.wanted.discard(transfer)

    def let_go(self, request: str, how: str) -> None:
        """No peer needs its blocks."""
        self.sent.add(request)
        self.outcomes[request] = how
        self.counters[how] += 1

    def came(self, request: str, how: str, missing: tuple[int, ...] = ()) -> None:
        """Its blocks are here, or some are not to come."""
        self.received.add(request)
        self.outcomes[request] = how
        self.counters[how] += 1
        if missing:
            self.failed[request] = missing

    def took(self, seconds: float) -> None:
        if len(self.pull_seconds) < MAX_SAMPLES:
            self.pull_seconds.append(seconds)


Tell = Callable[[Callable[[Ended], object]], None]
"""Changes the :class:`Ended` that will be taken next."""
