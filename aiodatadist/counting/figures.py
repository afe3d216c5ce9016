"""What was counted, as it was at one moment: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from aiodatadist.errors import LLMStatusCode

Pool = TypeVar("Pool")

SUCCESS = LLMStatusCode.LLM_SUCCESS.name


@dataclass(frozen=True, slots=True)
class FlowFigures:
    """Calls of one kind.

    Attributes:
        running: under way now.
        statuses: of those that ended, how many by status: ``LLM_SUCCESS``, ``CANCELLED``, or why they failed.
        bytes, ranges, seconds, queue_seconds: of those that succeeded, in all; running, and waiting before.
        failed_bytes: that landed for those that did not.
        by_seconds, by_queue_seconds: of those that succeeded, how many took at most each of ``SECONDS``, and no less than the
            one before; the last is of those that took longer than all.
        by_bytes: of those that succeeded, how many had at most ``2 ** index`` bytes, and more than the power before.
    """

    running: int
    statuses: Mapping[str, int]
    bytes: int
    ranges: int
    seconds: float
    queue_seconds: float
    failed_bytes: int
    by_seconds: tuple[int, ...]
    by_queue_seconds: tuple[int, ...]
    by_bytes: tuple[int, ...]

    @property
    def succeeded(self) -> int:
        return self.statuses.get(SUCCESS, 0)

    @property
    def ended(self) -> int:
        return sum(self.statuses.values())


@dataclass(frozen=True)
class Figures(Generic[Pool]):
    """A cluster since it was made, over all its links and all its lives.

    Attributes:
        cluster_id: whose.
        transfers: by operation, for instance ``"pull_blocks"``; ``"served"`` has what peers asked this cluster to write, in
            request/response mode. A layered transfer to several peers is one.
        linking: attempts of this cluster's to make a link.
        links: links that there are now, by state.
        links_made: whichever end asked for them.
        links_ended: of those, why: ``"unlinked"``, ``"connection_lost"``, ``"heartbeats_missed"``, ``"device_error"``,
            ``"protocol_error"``, ``"other"``.
        relinking: attempts to make links again that broke (``relink``); ``running`` is links that are being made again now,
            ``seconds`` how long those were gone that were.
        relinks_given_up: links that were not made again in time.
        link_changes_dropped: that readers of ``link_changes()`` were too slow for, over all readers.
        messages_repeated: that this cluster said again to peers, since no answer had come within a second or more: they, or
            their answers, may have been lost.
        answers_late: of peers, that came when nothing waited for them any more, for instance the end of a transfer that had
            its deadline before.
        leases: leases of blocks that are kept for peers now.
        leases_opened, leases_ended: how many there were; and why they ended, as
            :class:`~aiodatadist.LeaseEnd` has it.
        claims_refused: pulls of leases that this cluster refused, by the reason: ``"other_blocks"``, ``"another_prompt"``, or
            ``"no_digests"`` where the peer's version has none. The leases continued.
        budget_refusals: requests of peers that were refused because the peer had too much under way, by the limit, as
            ``aiodatadist.values.peer_budget`` names it.
        incidents: what others caused and is logged at most once a second, as :class:`~aiodatadist.counting.Incident` names
            it. Those that were not logged count, too.
        caches: caches that are registered or allocated now.
        pools: the memory pools by placement, :class:`~aiodatadist.PoolUsage` each.
        failure_causes: transfers that failed for a reason that their status does not tell: ``"checksum"``, bytes changed on
            their way. In a ``pull_leased`` each portion counts.
    """

    cluster_id: int
    transfers: Mapping[str, FlowFigures]
    linking: FlowFigures
    links: Mapping[str, int]
    links_made: int
    links_ended: Mapping[str, int]
    relinking: FlowFigures
    relinks_given_up: int
    link_changes_dropped: int
    leases: int
    leases_opened: int
    leases_ended: Mapping[str, int]
    caches: int
    pools: Mapping[str, Pool] = field(default_factory=dict)
    failure_causes: Mapping[str, int] = field(default_factory=dict)
    messages_repeated: int = 0
    answers_late: int = 0
    claims_refused: Mapping[str, int] = field(default_factory=dict)
    budget_refusals: Mapping[str, int] = field(default_factory=dict)
    incidents: Mapping[str, int] = field(default_factory=dict)
