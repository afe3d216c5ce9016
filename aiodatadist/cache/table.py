"""The caches of this cluster."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence

import anyio

from aiodatadist.descriptors import Cache, CacheDesc, CacheKey
from aiodatadist.errors import ParamInvalid
from aiodatadist.transport import Region
from aiodatadist.wire.messages import MAX_CACHES, MAX_KEYS, MAX_TENSORS, CacheEntry, SlotKey


class Entry:
    """One cache.

    ``nbytes`` of each tensor, the ``stride`` of its ``pieces`` and their ``addresses`` are what they were when the cache was
    made: the description is its caller's, who may change it.

    ``leases`` counts the transfers that use it. A cache whose memory the device would not let go of is poisoned, for good.
    """

    __slots__ = ("_idle", "addresses", "cache", "is_poisoned", "is_registered", "leases", "model_id", "nbytes",
                 "pieces", "remote_accessible", "slots", "stride")  # fmt: skip

    def __init__(self, cache: Cache, remote_accessible: bool, model_id: int | None, slots: dict[int, CacheKey]) -> None:
        self.cache = cache
        self.remote_accessible = remote_accessible
        self.model_id = model_id
        self.slots = slots
        self.addresses = array("Q", cache.tensor_addrs)
        self.nbytes, self.stride, self.pieces = self.desc.size, self.desc.stride, self.desc.shape[0]
        self.leases = 0
        self.is_poisoned = False
        self.is_registered = False
        self._idle: anyio.Event | None = None

    @property
    def desc(self) -> CacheDesc:
        return self.cache.cache_desc

    def regions(self) -> set[Region]:
        """What a peer may reach: each distinct tensor once."""
        if not self.remote_accessible:
            return set()
        return {Region(address, self.nbytes, self.desc.placement) for address in self.addresses}

    def lease(self) -> None:
        self.leases += 1

    def release(self) -> None:
        self.leases -= 1
        if self.leases == 0:
            self._wake()

    def poison(self) -> None:
        """The device did not let go of it: its lease never ends."""
        self.is_poisoned = True
        self._wake()

    def _wake(self) -> None:
        if self._idle is not None:
            self._idle.set()
            self._idle = None

    async def wait_idle(self) -> None:
        """Until no transfer uses it, or it is poisoned."""
        while self.leases and not self.is_poisoned:
            if self._idle is None:
                self._idle = anyio.Event()
            await self._idle.wait()

    def published(self) -> CacheEntry:
        return CacheEntry(
            cache_id=self.cache.cache_id,
            blocks=self.cache.is_blocks_cache,
            placement=self.desc.placement.value,
            data_type=self.desc.data_type.value,
            pieces=self.pieces,
            stride=self.stride,
            addresses=list(self.addresses),
            model_id=self.model_id,
            keys=[
                SlotKey(
                    kind="prefix" if key.is_prefix else "request",
                    id=key.prefix_id if key.is_prefix else key.req_id,
                    model_id=key.model_id,
                    batch_index=slot,
                )
                for slot, key in self.slots.items()
            ],
        )


class CacheTable:
    """Ids and keys. Ids start at 1 and are never used again.

    What is added can be told to a peer: ``wire.messages`` has the limits.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._entries: dict[int, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, cache_id: int) -> Entry | None:
        return self._entries.get(cache_id)

    def published(self) -> list[CacheEntry]:
        """What peers may reach."""
        return [
            entry.published() for entry in self._entries.values() if entry.is_registered and entry.remote_accessible
        ]

    def add_blocks(self, desc: CacheDesc, addrs: Sequence[int], model_id: int | None, accessible: bool) -> Entry:
        """Raises ParamInvalid: another blocks cache has this model id, or a limit is passed."""
        if model_id is not None and any(e.model_id == model_id for e in self._entries.values()):
            raise ParamInvalid(f"a blocks cache with model_id {model_id} is registered already: one per model id")
        return self._add(desc, addrs, True, accessible, model_id, {})

    def add_contiguous(
        self, desc: CacheDesc, addrs: Sequence[int], keys: Sequence[CacheKey], accessible: bool
    ) -> Entry:
        """Bind the i-th key to slot i; placeholders bind nothing.

        Raises:
            ParamInvalid: more keys than slots, a key that is bound already, or a limit is passed.
        """
        if len(keys) > min(desc.shape[0], MAX_KEYS):
            raise ParamInvalid(
                f"{len(keys)} keys for {desc.shape[0]} batch slots: the limit is one each, and {MAX_KEYS}"
            )
        slots = {slot: key for slot, key in enumerate(keys) if not key.is_placeholder}
        bound = {self._name(key) for entry in self._entries.values() for key in entry.slots.values()}
        for key in slots.values():
            if self._name(key) in bound:
                raise ParamInvalid(f"{key} is bound to a slot already")
            bound.add(self._name(key))
        return self._add(desc, addrs, False, accessible, None, slots)

    @staticmethod
    def _name(key: CacheKey) -> tuple[bool, int, int]:
        return (key.is_prefix, key.prefix_id if key.is_prefix else key.req_id, key.model_id)

    def _add(
        self,
        desc: CacheDesc,
        addrs: Sequence[int],
        blocks: bool,
        accessible: bool,
        model_id: int | None,
        slots: dict[int, CacheKey],
    ) -> Entry:
        if desc.batch_dim != 0:
            raise ParamInvalid(f"batch_dim_index is {desc.batch_dim}: tensors that move are cut along dimension 0")
        if not 1 <= len(addrs) <= MAX_TENSORS:
            raise ParamInvalid(f"a cache of {len(addrs)} tensors: it has 1 to {MAX_TENSORS}")
        if len(self._entries) >= MAX_CACHES:
            raise ParamInvalid(f"{len(self._entries)} caches: that is the limit, unregister one first")
        entry = Entry(Cache(next(self._ids), desc, addrs, blocks), accessible, model_id, slots)
        self._entries[entry.cache.cache_id] = entry
        return entry

    def remove(self, cache_id: int) -> Entry | None:
        return self._entries.pop(cache_id, None)
