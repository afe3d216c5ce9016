"""Locks of v1 links, which do one thing at a time: a second use is refused as busy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aiodatadist._legacy.statuses import busy


class LinkLocks:
    """The links that are in use.

    Attributes:
        uses: the current use of each of them, by cluster id.
    """

    def __init__(self) -> None:
        self.uses: dict[int, str] = {}

    def take(self, cluster_ids: Sequence[int], what: str) -> None:
        """Lock the links. Raises LLMException with ``LLM_LINK_BUSY`` if one of them is in use; then none is locked."""
        for cluster_id in cluster_ids:
            if cluster_id in self.uses:
                raise busy(what, self.uses[cluster_id], cluster_id)
        self.uses.update(dict.fromkeys(cluster_ids, what))

    def give_back(self, cluster_ids: Sequence[int]) -> None:
        """Unlock the links."""
        for cluster_id in cluster_ids:
            self.uses.pop(cluster_id, None)

    @contextmanager
    def hold(self, cluster_id: int, what: str) -> Iterator[None]:
        """Lock a link inside the context."""
        self.take([cluster_id], what)
        try:
            yield
        finally:
            self.give_back([cluster_id])
