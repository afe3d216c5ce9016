"""What a peer offers: its caches, found by the names that callers use."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from aiodatadist.descriptors import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from aiodatadist.errors import CacheNotFound
from aiodatadist.wire.messages import CacheEntry


class RemoteCache:
    """One of the peer's caches; ``slot`` is the batch slot that a key named, 0 for a blocks cache."""

    __slots__ = ("addresses", "blocks", "cache_id", "pieces", "slot", "stride")

    def __init__(self, entry: CacheEntry, addresses: array[int], slot: int) -> None:
        self.cache_id = entry.cache_id
        self.blocks = entry.blocks
        self.pieces = entry.pieces
        self.stride = entry.stride
        self.addresses = addresses
        self.slot = slot


class Catalogue:
    """The peer's caches at the moment when the link was made."""

    def __init__(self, cluster_id: int, entries: Iterable[CacheEntry]) -> None:
        self.cluster_id = cluster_id
        self._by_id: dict[int, tuple[CacheEntry, array[int]]] = {}
        self._by_model: dict[int, RemoteCache] = {}
        self._by_key: dict[tuple[str, int, int], RemoteCache] = {}
        for entry in entries:
            addresses = array("Q", entry.addresses)
            self._by_id[entry.cache_id] = (entry, addresses)
            if entry.model_id is not None:
                self._by_model[entry.model_id] = RemoteCache(entry, addresses, 0)
            for key in entry.keys:
                self._by_key[key.kind, key.id, key.model_id] = RemoteCache(entry, addresses, key.batch_index)

    def find(self, key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex) -> RemoteCache:
        """The cache, and the slot in it, that a key names.

        Raises:
            CacheNotFound: the peer has no such cache, or the slot does not exist.
        """
        found: RemoteCache | None = None
        if isinstance(key, BlocksCacheKey):
            found = self._by_model.get(key.model_id)
        elif isinstance(key, CacheKey):
            kind = "prefix" if key.is_prefix else "request"
            found = self._by_key.get((kind, key.prefix_id if key.is_prefix else key.req_id, key.model_id))
        elif key.cache_id in self._by_id:
            entry, addresses = self._by_id[key.cache_id]
            slots = 1 if entry.blocks else entry.pieces
            if key.batch_index < slots:
                found = RemoteCache(entry, addresses, key.batch_index)
        if found is None:
            raise CacheNotFound(
                f"cluster {self.cluster_id} offers no cache for {key}",
                peer=self.cluster_id,
                hint="it has to be registered there before the link is made, host memory with remote_accessible=True",
            )
        return found
