"""The figures of a cluster over all its links, which come and go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from aiodatadist._counting.flow import Flow
from aiodatadist._counting.incidents import Incidents

MAX_PEERS = 4096
"""The number of peers that are remembered after their links have ended: those that were linked last.

Each takes some hundred bytes.
"""


class Running(Protocol):
    """A transfer under way."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call it on the event loop when it has ended; at once if it has."""


def forget_oldest(by_peer: dict[int, Any]) -> None:
    """Drop the oldest entries of a dictionary in which peers are in the order in which they were linked or lost."""
    while len(by_peer) > MAX_PEERS:
        del by_peer[next(iter(by_peer))]


class Totals:
    """The counters of a cluster, which outlive its links and engines.

    They are counted on the event loop, and read by :meth:`aiodatadist.LLMDataDist.figures`.

    Attributes: those of :class:`~aiodatadist._counting.Figures`, and:
        generations: the number of times that the link to each peer was made; 0 once ``MAX_PEERS`` others have been
        linked since.
    """

    def __init__(self) -> None:
        self.transfers: defaultdict[str, Flow] = defaultdict(Flow)
        self.failure_causes: Counter[str] = Counter()
        self.linking: Flow = Flow()
        self.links_made: int = 0
        self.links_ended: Counter[str] = Counter()
        self.generations: Counter[int] = Counter()
        self.relinking: Flow = Flow()
        self.relinks_given_up = 0
        self.link_changes_dropped = 0
        self.messages_repeated = 0
        self.answers_late = 0
        self.leases_opened = 0
        self.leases_ended: Counter[str] = Counter()
        self.claims_refused: Counter[str] = Counter()
        self.budget_refusals: Counter[str] = Counter()
        self.budget_waits: Counter[str] = Counter()
        self.incidents: Incidents = Incidents()

    def linked(self, cluster_id: int) -> int:
        """Count a link to this peer; return how many times it has been made by now."""
        self.links_made += 1
        times = self.generations.pop(cluster_id, 0) + 1
        self.generations[cluster_id] = times
        forget_oldest(self.generations)
        return times

    def begun(self, operation: str, transfer: Running) -> None:
        """Count a transfer as running, and its result once it has ended."""
        flow = self.transfers[operation]
        flow.running += 1
        transfer.add_done_callback(flow.when_ended)
