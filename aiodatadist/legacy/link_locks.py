"""A v1 link does one thing at a time: who comes second is told that the link is busy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aiodatadist.legacy.statuses import busy


class LinkLocks:
    """What each link is used for now, by cluster id."""

    def __init__(self) -> None:
        self._uses: dict[int, str] = {}

    def take(self, cluster_ids: Sequence[int], what: str) -> None:
        """Raises LLMException: ``LLM_LINK_BUSY``: one of the links is in use. None was taken."""
        for cluster_id in cluster_ids:
            if cluster_id in self._uses:
                raise busy(what, self._uses[cluster_id], cluster_id)
        self._uses.update(dict.fromkeys(cluster_ids, what))

    def give_back(self, cluster_ids: Sequence[int]) -> None:
        for cluster_id in cluster_ids:
            self._uses.pop(cluster_id, None)

    @contextmanager
    def hold(self, cluster_id: int, what: str) -> Iterator[None]:
        self.take([cluster_id], what)
        try:
            yield
        finally:
            self.give_back([cluster_id])
