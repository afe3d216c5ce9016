"""The known caches of a peer: those that it has announced and not withdrawn."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from aiodatadist._cache.names import Key, Name, name_of
from aiodatadist._concurrency.byte_budget import ByteBudget
from aiodatadist._transport import Access
from aiodatadist._values import peer_budget
from aiodatadist._values.descriptors import BlocksCacheKey, CacheKeyByIdAndIndex, Placement
from aiodatadist._values.peer_budget import CHECKSUM_CACHES
from aiodatadist._wire.messages import CacheEntry
from aiodatadist.errors import ParamInvalid, ProtocolError


class RemoteCache:
    """A cache of the peer's that we hold: the peer does not reuse its memory meanwhile.

    ``uses`` counts our transfers that touch it. A peer may announce thousands, so one that no transfer of this end has
    touched is two objects to the garbage collector: itself and its addresses.
    """

    __slots__ = (
        "_access",
        "_ascending",
        "_summing",
        "_when_idle",
        "_when_left",
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
        "uses",
    )

    def __init__(self, entry: CacheEntry, access: int = Access.ALL) -> None:
        self._access: int = access
        self.cache_id: int = entry.cache_id
        self.blocks: bool = entry.blocks
        self.data_type: int = entry.data_type
        self.pieces: int = entry.pieces
        self.stride: int = entry.stride
        self.epoch: int = entry.epoch
        self.placement: Placement = Placement(entry.placement)
        self.addresses: array[int] = array("Q", entry.addresses)
        self.names: set[Name] | None = None
        self.uses: int = 0
        self.is_withdrawn: bool = False
        self.is_of_other_type: bool = False  # True once it was reported that a cache of another data type is here
        self._when_idle: Callable[[], object] | None = None
        self._when_left: Callable[[RemoteCache], object] | None = None
        self._summing: ByteBudget | None = None
        self._ascending: tuple[list[int], list[int]] | None = None  # tensors' addresses, and their numbers

    @property
    def summing(self) -> ByteBudget:
        """The bytes for whose checksums the peer may be asked now: further questions would wait there, and delay others."""
        if self._summing is None:
            self._summing = ByteBudget(CHECKSUM_CACHES * len(self.addresses) * self.pieces * self.stride)
        return self._summing

    def room_at(self, address: int) -> int:
        """Return the bytes of a tensor from an address in it on; 0 if no tensor contains the address."""
        start, _ = self._tensor_before(address)
        return max(0, start + self.pieces * self.stride - address)

    def tensor_at(self, address: int) -> int:
        """Return the number of the tensor that contains an address; 0 if none does."""
        start, number = self._tensor_before(address)
        return number if address < start + self.pieces * self.stride else 0

    def _tensor_before(self, address: int) -> tuple[int, int]:
        """Return the address and the number of the last tensor that starts at or before an address.

        If no tensor starts there, return an address at which no tensor reaches the given one. The peer chooses the number
        of tensors, so this is a binary search.
        """
        if self._ascending is None:
            numbers = sorted(range(len(self.addresses)), key=self.addresses.__getitem__)
            self._ascending = [self.addresses[number] for number in numbers], numbers
        starts, numbers = self._ascending
        after = bisect_right(starts, address)
        if after == 0:
            return -(1 << 64), 0
        first = bisect_left(starts, starts[after - 1], 0, after)  # of tensors at the same address
        return starts[first], numbers[first]

    def check_access(self, direction: str) -> None:
        """Raise ParamInvalid if this end may not read the cache ("get"), or not write into it ("put")."""
        if not self._access & (Access.READ if direction == "get" else Access.WRITE):
            what = "read" if direction == "get" else "write into"
            raise ParamInvalid(
                f"this cluster may not {what} cache {self.cache_id} of its peer",
                hint="the peer's policy.json, or the cache's readers and writers, must allow it",
            )

    def use(self) -> None:
        """Count a transfer that starts to use it."""
        self.uses += 1

    def release(self) -> None:
        """Count a transfer that no longer uses it."""
        self.uses -= 1
        if self.uses:
            return
        if self._when_left is not None:
            call_left, self._when_left = self._when_left, None
            call_left(self)
        if self._when_idle is not None:
            call, self._when_idle = self._when_idle, None
            asyncio.get_running_loop().call_soon(call)  # first what the end of the last transfer says to the peer

    def withdraw(self, when_left: Callable[[RemoteCache], object]) -> None:
        """Note that the peer withdraws the cache, and call back once no transfer uses it: now, if none does."""
        self.is_withdrawn = True
        if self.uses:
            self._when_left = when_left
        else:
            when_left(self)

    def when_idle(self, call: Callable[[], object]) -> None:
        """Call back in a later turn of the loop, once no transfer of this end uses it. For one caller, while it is used."""
        self._when_idle = call


class Catalogue:
    """The caches of the peer that we hold, by name.

    A cache that the peer withdrew counts towards the limits until no transfer uses it: requests that wait in line may use
    thousands of them.

    Args:
        most_caches: the largest number of caches.
        most_tensors: the largest number of tensors in all of them.
    """

    def __init__(
        self, most_caches: int = peer_budget.HELD_CACHES, most_tensors: int = peer_budget.HELD_TENSORS
    ) -> None:
        self._most_caches = most_caches
        self._most_tensors = most_tensors
        self._caches: dict[int, RemoteCache] = {}
        self._names: dict[Name, tuple[RemoteCache, int]] = {}
        self._addresses = 0  # of all of them, and of withdrawn ones that are used
        self._withdrawn = 0  # caches that are still used

    def __len__(self) -> int:
        return len(self._caches)

    def find(self, key: Key) -> tuple[RemoteCache, int] | None:
        """Return the cache and the batch slot that a key names, as far as we know."""
        # not made into a Name, because each transfer comes here, most with such a key
        name: Any = ("blocks", 0, key.model_id) if type(key) is BlocksCacheKey else name_of(key)
        found = self._names.get(name)
        if found is None or not isinstance(key, CacheKeyByIdAndIndex):
            return found
        return found[0], key.batch_index

    def get(self, cache_id: int) -> RemoteCache | None:
        """Return the cache with this id, or None."""
        return self._caches.get(cache_id)

    def learn(self, entry: CacheEntry, name: Name | None = None, slot: int = 0, access: int = Access.ALL) -> None:
        """Add a cache that the peer has announced, or another name of a known cache.

        Raises ProtocolError if the peer announces too many caches, or too many tensors in them.
        """
        cache = self._caches.get(entry.cache_id)
        if cache is None:
            self._check_room(len(entry.addresses))
            cache = self._caches[entry.cache_id] = RemoteCache(entry, access)
            self._addresses += len(cache.addresses)
        if name is not None:
            self._names[name] = (cache, slot)
            if cache.names is None:
                cache.names = set()
            cache.names.add(name)

    def _check_room(self, tensors: int) -> None:
        if len(self._caches) + self._withdrawn >= self._most_caches:
            raise ProtocolError(f"the peer announced more than {self._most_caches} caches")
        if self._addresses + tensors > self._most_tensors:
            raise ProtocolError(f"the peer announced caches with more than {self._most_tensors} tensors in all")

    def withdraw(self, cache_id: int) -> RemoteCache | None:
        """Remove a cache that the peer withdraws, so that no new transfer of this end finds it; return it, or None."""
        cache = self._caches.pop(cache_id, None)
        if cache is not None:
            self._withdrawn += 1
            cache.withdraw(self._forget)
            for name in cache.names or ():
                # otherwise the peer has given the name to another cache
                if self._names.get(name, (None, 0))[0] is cache:
                    del self._names[name]
        return cache

    def _forget(self, cache: RemoteCache) -> None:
        self._withdrawn -= 1
        self._addresses -= len(cache.addresses)
