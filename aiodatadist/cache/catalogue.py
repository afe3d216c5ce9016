"""What we know of a peer's caches: those that it told us of, until it takes them back."""

from __future__ import annotations

from array import array

import anyio

from aiodatadist.cache.names import Key, Name, name_of
from aiodatadist.concurrency.byte_budget import ByteBudget
from aiodatadist.values.descriptors import CacheKeyByIdAndIndex, Placement
from aiodatadist.values.peer_budget import CHECKSUM_CACHES
from aiodatadist.wire.messages import CacheEntry


class RemoteCache:
    """One of the peer's caches, which we hold: the peer does not give its memory on meanwhile.

    ``uses`` counts our transfers that touch it. ``summing``: bytes whose checksums the peer is asked for now. Beyond its
    limit questions would wait there, and keep others of this end waiting.
    """

    __slots__ = (
        "_idle",
        "addresses",
        "blocks",
        "cache_id",
        "data_type",
        "epoch",
        "is_of_other_type",
        "is_withdrawn",
        "names",
        "pieces",
        "placement",
        "stride",
        "summing",
        "uses",
    )

    def __init__(self, entry: CacheEntry) -> None:
        self.cache_id = entry.cache_id
        self.blocks = entry.blocks
        self.data_type = entry.data_type
        self.pieces = entry.pieces
        self.stride = entry.stride
        self.epoch = entry.epoch
        self.placement = Placement(entry.placement)
        self.addresses = array("Q", entry.addresses)
        self.summing = ByteBudget(CHECKSUM_CACHES * len(self.addresses) * self.pieces * self.stride)
        self.names: set[Name] = set()
        self.uses = 0
        self.is_withdrawn = False
        self.is_of_other_type = False  # than a cache of this end, and the caller knows
        self._idle: anyio.Event | None = None

    def room_at(self, address: int) -> int:
        """Bytes of a tensor that follow an address in it; 0 if it is in none."""
        nbytes = self.pieces * self.stride
        return max(
            (start + nbytes - address for start in self.addresses if start <= address < start + nbytes), default=0
        )

    def tensor_at(self, address: int) -> int:
        """The number of the tensor that an address lies in; 0 if it is in none."""
        nbytes = self.pieces * self.stride
        return next((i for i, start in enumerate(self.addresses) if start <= address < start + nbytes), 0)

    def use(self) -> None:
        self.uses += 1

    def release(self) -> None:
        self.uses -= 1
        if not self.uses and self._idle is not None:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Until no transfer of this end touches it. For one waiter."""
        if self.uses:
            self._idle = anyio.Event()
            await self._idle.wait()


class Catalogue:
    """The peer's caches that we hold, by what they are called."""

    def __init__(self) -> None:
        self._caches: dict[int, RemoteCache] = {}
        self._names: dict[Name, tuple[RemoteCache, int]] = {}

    def __len__(self) -> int:
        return len(self._caches)

    def find(self, key: Key) -> tuple[RemoteCache, int] | None:
        """The cache and the batch slot that a key names, as far as we know."""
        found = self._names.get(name_of(key))
        if found is None or not isinstance(key, CacheKeyByIdAndIndex):
            return found
        return found[0], key.batch_index

    def get(self, cache_id: int) -> RemoteCache | None:
        return self._caches.get(cache_id)

    def learn(self, entry: CacheEntry, name: Name | None = None, slot: int = 0) -> None:
        """The peer told us of a cache, perhaps once more."""
        cache = self._caches.get(entry.cache_id)
        if cache is None:
            cache = self._caches[entry.cache_id] = RemoteCache(entry)
        if name is not None:
            self._names[name] = (cache, slot)
            cache.names.add(name)

    def withdraw(self, cache_id: int) -> RemoteCache | None:
        """The peer takes it back: no new transfer of this end finds it."""
        cache = self._caches.pop(cache_id, None)
        if cache is not None:
            cache.is_withdrawn = True
            for name in cache.names:
                if self._names.get(name, (None, 0))[0] is cache:
                    del self._names[name]
        return cache
