"""The memory of this cluster that a channel to one peer shows, by the rights of the peer and the audiences of the caches."""

from __future__ import annotations

from collections.abc import Iterable

from aiodatadist._cache.table import Entry
from aiodatadist._transport import Access, Reach, Region
from aiodatadist._values.peer_rights import PeerRights


class PeerReach(Reach):
    """The regions that a channel shows to one peer, as they are when it is opened.

    Several caches may be over one region. Then the peer may do what any of them allows. A pool is one region, and
    no cache in it has a separate audience.

    Args:
        one_sided: True if the end that wants bytes moves them. Otherwise the peer only writes what this end pulls.
    """

    def __init__(self, entries: Iterable[Entry], cluster_id: int, rights: PeerRights, one_sided: bool) -> None:
        self._pools = _access(rights.read, rights.write)
        self._shows_read = one_sided
        self._own: dict[Region, tuple[Access, bool]] = {}  # what the peer may do, and True if neither end uses it
        for entry in entries:
            if entry.pool is not None:
                continue
            is_open = rights.private or not entry.is_private
            reads, writes = entry.audience.lets(cluster_id)
            may = _access(is_open and rights.read and reads, is_open and rights.write and writes)
            is_destination = entry.may_receive and not entry.remote_accessible
            shown = may if entry.remote_accessible else Access.NONE if one_sided else may & Access.WRITE
            is_unused = not may and not (is_destination and one_sided)
            for region in entry.regions():
                before, was_unused = self._own.get(region, (shown, True))
                # a union of flags takes longer than all the rest, and is seldom needed
                both = shown if before is shown else before | shown
                self._own[region] = both, was_unused and is_unused

    def access(self, region: Region) -> Access:
        may, _ = self._own.get(region, (self._pools, False))
        return may if self._shows_read else may & Access.WRITE

    def is_used(self, region: Region) -> bool:
        _, is_unused = self._own.get(region, (self._pools, not self._pools))
        return not is_unused


def _access(may_read: bool, may_write: bool) -> Access:
    return (Access.READ if may_read else Access.NONE) | (Access.WRITE if may_write else Access.NONE)
