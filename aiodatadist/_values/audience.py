"""The clusters that may use one cache: its readers and its writers. By default, each cluster that the policy allows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple, Self

from aiodatadist._values import checks

MAX_CLUSTERS: Final = 4096
"""The most cluster ids in a set of readers, or of writers."""


class Audience(NamedTuple):
    """The clusters that may use a cache.

    Attributes:
        readers: cluster ids; None if each peer that may read caches may read this one.
        writers: the same for writing.
    """

    readers: frozenset[int] | None = None
    writers: frozenset[int] | None = None

    @classmethod
    def of(cls, readers: Collection[int] | None, writers: Collection[int] | None) -> Self:
        """Return an audience of these clusters. Raises TypeError or ValueError if one of them is not a cluster id."""
        return cls(_ids(readers, "readers"), _ids(writers, "writers"))

    @property
    def is_every_cluster(self) -> bool:
        return self.readers is None and self.writers is None

    def lets(self, cluster_id: int) -> tuple[bool, bool]:
        """Return whether the cluster is among the readers, and whether it is among the writers."""
        readers, writers = self
        return readers is None or cluster_id in readers, writers is None or cluster_id in writers


EVERY_CLUSTER: Final = Audience()
"""The audience of a cache for which no readers or writers were given."""


def _ids(given: Collection[int] | None, name: str) -> frozenset[int] | None:
    if given is None:
        return None
    checks.instance(given, name, (set, frozenset, list, tuple))
    if len(given) > MAX_CLUSTERS:
        raise ValueError(f"{name} has {len(given)} cluster ids: must have at most {MAX_CLUSTERS}")
    return frozenset(checks.integer(each, name, checks.UINT64) for each in given)
