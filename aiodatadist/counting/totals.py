"""What a cluster has done over all its links, which come and go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from aiodatadist.counting.flow import Flow
from aiodatadist.counting.incidents import Incidents

MAX_PEERS = 4096
"""Peers that are remembered beyond their links, which is some hundred bytes each: those that were linked last."""


class Running(Protocol):
    """A transfer under way."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call it on the event loop when it has ended; at once if it has."""


def forget_oldest(by_peer: dict[int, Any]) -> None:
    """Of what is remembered in the order in which peers were linked or lost."""
    while len(by_peer) > MAX_PEERS:
        del by_peer[next(iter(by_peer))]


class Totals:
    """Counted on the event loop, and read by :meth:`aiodatadist.LLMDataDist.figures`. Outlives links and engines.

    Attributes: as :class:`~aiodatadist.counting.Figures` has them, and:
        generations: how many times the link to each peer was made; of a peer that ``MAX_PEERS`` others were linked since, 0.
    """

    def __init__(self) -> None:
        self.transfers: defaultdict[str, Flow] = defaultdict(Flow)
        self.failure_causes: Counter[str] = Counter()
        self.linking = Flow()
        self.links_made = 0
        self.links_ended: Counter[str] = Counter()
        self.generations: Counter[int] = Counter()
        self.relinking = Flow()
        self.relinks_given_up = 0
        self.link_changes_dropped = 0
        self.messages_repeated = 0
        self.answers_late = 0
        self.leases_opened = 0
        self.leases_ended: Counter[str] = Counter()
        self.claims_refused: Counter[str] = Counter()
        self.budget_refusals: Counter[str] = Counter()
        self.incidents = Incidents()

    def linked(self, cluster_id: int) -> int:
        """The link to this peer was made once more: how many times by now."""
        self.links_made += 1
        times = self.generations.pop(cluster_id, 0) + 1
        self.generations[cluster_id] = times
        forget_oldest(self.generations)
        return times

    def begun(self, operation: str, transfer: Running) -> None:
        """Count one when it has ended."""
        flow = self.transfers[operation]
        flow.running += 1
        transfer.add_done_callback(flow.when_ended)
