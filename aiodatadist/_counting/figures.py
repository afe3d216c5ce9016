"""The figures of a cluster at one moment, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from aiodatadist.errors import LLMStatusCode

Pool = TypeVar("Pool")

SUCCESS = LLMStatusCode.LLM_SUCCESS.name


@dataclass(frozen=True, slots=True)
class FlowFigures:
    """The figures of calls of one kind.

    Attributes:
        running: calls under way now.
        statuses: the number of ended calls by status: ``LLM_SUCCESS``, ``CANCELLED``, or the reason of the failure.
        bytes, ranges: totals of the calls that succeeded.
        seconds, queue_seconds: total time of the calls that succeeded: running, and waiting before that.
        failed_bytes: bytes that landed for calls that did not succeed.
        by_seconds, by_queue_seconds: of the calls that succeeded, the number that took at most each of ``SECONDS`` and
            more than the one before; the last entry counts those that took longer than all.
        by_bytes: of the calls that succeeded, the number that had at most ``2 ** index`` bytes and more than the power
            before.
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
    """The figures of a cluster since its object was made, over all its links and all times it was initialised.

    Attributes:
        cluster_id: the cluster.
        transfers: by operation, for instance ``"pull_blocks"``; ``"served"`` is what peers asked this cluster to write,
            in request/response mode. A layered transfer to several peers counts once.
        linking: this cluster's attempts to make a link.
        links: links that exist now, by state.
        links_made: links that were made, by either end.
        links_ended: links that ended, by reason: ``"unlinked"``, ``"connection_lost"``, ``"heartbeats_missed"``,
            ``"data_connection_lost"``, ``"device_error"``, ``"protocol_error"``, ``"other"``.
        relinking: attempts to re-establish broken links (``relink``). ``running`` counts those that are under way now,
            ``seconds`` sums up how long links were gone before they were ready again.
        relinks_given_up: links that were not re-established in time.
        link_changes_dropped: changes for which readers of ``link_changes()`` were too slow, over all readers.
        messages_repeated: messages that this cluster sent again, because no answer had come within at least a second:
            they, or their answers, may have been lost.
        answers_late: answers from peers that came when nothing waited for them any longer, for instance the end of a
            transfer after its deadline.
        leases: leases of blocks that are kept for peers now.
        leases_opened: leases that were opened.
        leases_ended: leases that ended, by reason as :class:`~aiodatadist.LeaseEnd` has it.
        claims_refused: pulls of leases that this cluster refused, by reason: ``"other_blocks"``, ``"another_prompt"``,
            or ``"no_digests"`` if the peer's version has none. The leases continued.
        budget_refusals: requests of peers that were refused because the peer had too much under way, by the limit as
            :class:`~aiodatadist.Quotas` names it.
        budget_waits: times that a peer was not read, or its notification not received, because the peer had reached a
            limit, by its name in :class:`~aiodatadist.Quotas`.
        quotas: the limits for each peer, by name, as :class:`~aiodatadist.Quotas` has them.
        incidents: incidents that others caused, by kind as :class:`~aiodatadist._counting.Incident` names it. Each kind
            is logged at most once a second; those that were not logged count, too.
        caches: caches that are registered or allocated now.
        pools: the memory pools by placement, one :class:`~aiodatadist.PoolUsage` each.
        failure_causes: transfers that failed for a reason that their status does not name: ``"checksum"``, bytes
            changed in transit. Each portion of a ``pull_leased`` counts.
        credentials: links that exist now, by the name of the key that both ends proved, as
            :class:`~aiodatadist.LinkStatistics` has it. After a rotation, links of an old key are those that were made
            before.
        certificates: seconds until the certificates of linked peers expire, by the name in ``credentials``; negative for
            one that has expired since its link was made.
        own_certificate: seconds until this cluster's own certificate expires, negative if it has; None if it proves none, or
            has a context of TLS, which does not show it.
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
    credentials: Mapping[str, int] = field(default_factory=dict)
    budget_waits: Mapping[str, int] = field(default_factory=dict)
    quotas: Mapping[str, float] = field(default_factory=dict)
    certificates: Mapping[str, float] = field(default_factory=dict)
    own_certificate: float | None = None
