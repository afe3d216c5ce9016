"""The registered ranks of one prefill engine, and the registrations that contradict each other. No I/O."""

from __future__ import annotations

from aiodatadist._adapters.rendezvous_lines import FRESH_SECONDS, Ranks, Registered
from aiodatadist._values.foreign import printable, shown


class EngineRanks:
    """The registrations at a bootstrap server. Ranks agree on their number and on one layout."""

    def __init__(self) -> None:
        self._known: dict[int, Registered] = {}
        self._said_at: dict[int, float] = {}

    def why_stale(self, rank: int | None, at: float, now: float) -> str:
        """Return why a message of this time does not count, or an empty text. ``rank`` is the rank that registers."""
        if abs(at - now) > FRESH_SECONDS:
            return (
                f"it was sent {abs(at - now):.0f} s {'ago' if at < now else 'ahead'}: the limit is {FRESH_SECONDS:g} s"
            )
        last = None if rank is None else self._said_at.get(rank)
        if last is not None and at <= last <= now + FRESH_SECONDS:
            return f"rank {rank} has sent something newer"
        return ""

    def contradicting(self, worker: Registered) -> list[Registered]:
        """Return the ranks that must be gone before this one can register."""
        agreed = worker.ranks, worker.layout
        return [
            other
            for other in self._known.values()
            if (
                other.address.cluster_id != worker.address.cluster_id
                if other.rank == worker.rank
                else (other.ranks, other.layout) != agreed
            )
        ]

    def forget_ended(self, worker: Registered) -> None:
        """Forget ended ranks if this rank listens at an address that another one had: a port has one listener.

        Another cluster with the same rank, number of ranks and layout took the place of one rank. Any other
        registration there belongs to another engine, started with other options, of which no rank is left: each would
        seem to answer if a rank of the new engine listens at its address.
        """
        place = worker.address.host, worker.address.port
        for other in list(self._known.values()):
            if (other.address.host, other.address.port) != place:
                continue
            if (other.rank, other.ranks, other.layout) != (worker.rank, worker.ranks, worker.layout):
                self._known.clear()
                return
            if other.address.cluster_id != worker.address.cluster_id:
                self.forget(other)

    def forget(self, gone: Registered) -> None:
        """Forget a rank whose address no longer answers."""
        if self._known.get(gone.rank) == gone:
            del self._known[gone.rank]

    def add(self, worker: Registered, at: float) -> None:
        """Replace what this rank registered before. Nothing contradicts it."""
        self._known[worker.rank] = worker
        self._said_at[worker.rank] = at

    def told(self) -> Ranks:
        """Return the ranks for a decode engine: all of them, or none."""
        some = next(iter(self._known.values()), None)
        if some is None or len(self._known) != some.ranks:
            return Ranks()
        return Ranks(layout=some.layout, addresses=[self._known[rank].address for rank in range(some.ranks)])


def contradiction(worker: Registered, other: Registered) -> str:
    """Return why the two cannot both be ranks of one engine, with both values."""
    if worker.rank == other.rank:
        return f"rank {worker.rank} is cluster {other.address.cluster_id}, whose address still answers"
    if worker.ranks != other.ranks:
        return f"ranks is {worker.ranks} at rank {worker.rank} and {other.ranks} at rank {other.rank}"
    differs = next(
        name for name in sorted({*worker.layout, *other.layout}) if worker.layout.get(name) != other.layout.get(name)
    )
    ours, theirs = shown(worker.layout.get(differs)), shown(other.layout.get(differs))
    return f"{printable(differs)} is {ours} at rank {worker.rank} and {theirs} at rank {other.rank}"
