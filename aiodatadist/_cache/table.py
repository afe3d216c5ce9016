"""The caches of this cluster: their names, references and users."""

from __future__ import annotations

import itertools
import time
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from aiodatadist._cache.names import WHOLE_CACHE, Name, name_of
from aiodatadist._cache.pool import PagePool
from aiodatadist._concurrency.signal import Signal
from aiodatadist._transport import Region
from aiodatadist._values.audience import EVERY_CLUSTER, Audience
from aiodatadist._values.descriptors import BlocksCacheKey, Cache, CacheDesc, CacheHome, CacheKey, Placement
from aiodatadist._wire.messages import MAX_TENSORS, CacheEntry
from aiodatadist.errors import LLMException, ParamInvalid


class LeaseHolder(Protocol):
    """A peer that may reach a cache at any moment, because it knows its place."""

    @property
    def failure(self) -> LLMException | None:
        """The reason why its link has ended or is ending; None while the link lasts.

        The peer can reach the cache until its channels are closed.
        """

    def revoke(self, entry: Entry) -> Signal:
        """Withdraw the cache from the peer; return a signal.

        Once nothing of the peer's can touch the cache, the peer is removed from ``entry.holders``, and the signal is
        set.
        """


class SlotNames(dict[Name, int]):
    """The names of slots of a new cache, and the only cluster that may use each, if it is for one cluster."""

    def __init__(self) -> None:
        super().__init__()
        self.takers: dict[Name, int] = {}


class Entry:
    """A cache, its references and its users.

    ``stride``, ``pieces`` and ``addresses`` of its tensors are those of the moment when the cache was made: its caller
    may change the description.

    Attributes:
        names: its names, each with its batch slot. Its id is not among them.
        takers: the only cluster that may use a name, for names that are for one cluster.
        is_private: True if a peer can reach it only together with all memory of this process.
        audience: the clusters that may read it, and that may write into it.
        pool: the pool of its memory; None for the caller's own memory.
        references: number of references to a contiguous cache from a pool: its id, until that is deallocated, and its
            names.
        leases: number of this cluster's transfers that use it.
        holders: peers that may use it.
        writers: peers whose link has ended, and who were stopped while they wrote and may continue.
        is_poisoned: True if the device did not release it; for good.
        is_live: True if transfers may start.
        has_id: True until its id is deallocated.
        epoch: lowest epoch of a channel that can reach it.
        keep: objects that keep the caller's memory alive.
        pinned_at: time of the monotonic clock at which a transfer or a peer began to use it while no other did.
        layer_seconds: seconds in which a layer was computed the last time layers were sent one by one, or None.
        views: returns an object that lives as long as an array over the cache's memory, or None.
    """

    __slots__ = (
        "_change",
        "addresses",
        "audience",
        "blocks",
        "cache",
        "cache_id",
        "coverage",
        "data_type",
        "epoch",
        "has_id",
        "holders",
        "is_known",
        "is_live",
        "is_poisoned",
        "is_private",
        "keep",
        "layer_seconds",
        "leases",
        "may_receive",
        "names",
        "nbytes",
        "pieces",
        "pinned_at",
        "placement",
        "pool",
        "remote_accessible",
        "stride",
        "takers",
        "views",
        "writers",
    )  # fmt: skip

    def __init__(self, cache: Cache, remote_accessible: bool, names: dict[Name, int], pool: PagePool | None) -> None:
        desc = cache.cache_desc
        self.cache: Cache = cache
        self.cache_id: int = cache.cache_id
        self.blocks: bool = cache.is_blocks_cache
        self.remote_accessible: bool = remote_accessible
        self.may_receive: bool = remote_accessible  # as the destination of this cluster's own pulls
        self.is_known: bool = pool is not None  # registered with the transport
        self.names: dict[Name, int] = names
        self.takers: dict[Name, int] = {}
        self.audience: Audience = EVERY_CLUSTER
        self.is_private: bool = False
        self.pool: PagePool | None = pool
        self.data_type = desc.data_type.value
        self.addresses: array[int] = array("Q", cache.tensor_addrs)
        self.nbytes: int = desc.size
        self.stride: int = desc.stride
        self.pieces: int = desc.shape[0]
        self.placement: Placement = desc.placement
        self.epoch: int = 0
        self.leases: int = 0
        self.holders: set[LeaseHolder] = set()
        self.writers: set[LeaseHolder] = set()
        self.coverage: dict[Name, int] = {}  # tensors pulled by this name, a bit each
        self.is_poisoned: bool = False
        self.is_live: bool = False
        self.has_id: bool = True
        self.keep: list[object] = []
        self.layer_seconds: float | None = None
        self.views: Callable[[], object] = lambda: None
        self.pinned_at: float = 0.0
        self._change: Signal | None = None

    @property
    def references(self) -> int:
        """Number of references; see the class."""
        if self.blocks or self.pool is None:
            return int(self.has_id)
        return int(self.has_id) + len(self.names)

    @property
    def may_have_keys(self) -> bool:
        """True if its slots may have keys that pulls consume, now or later."""
        return not self.blocks and self.pool is not None

    def regions(self) -> list[Region]:
        """Return the memory of each distinct tensor once."""
        return [Region(address, self.nbytes, self.placement) for address in dict.fromkeys(self.addresses)]

    def is_for(self, cluster_id: int, name: Name, slot: int) -> bool:
        """Return True if a cluster may use a slot by a name.

        By the cache's id, or an address in it, it may not if a key of the slot is for another cluster.
        """
        if not self.takers:
            return True
        if name.kind in WHOLE_CACHE:
            return slot not in self.slots_of_others(cluster_id)
        return self.takers.get(name, cluster_id) == cluster_id

    def slots_of_others(self, cluster_id: int) -> set[int]:
        """Return the slots that are for other clusters, by one of their keys."""
        return {self.names[name] for name, taker in self.takers.items() if taker != cluster_id}

    # ---- users ----

    def lease(self) -> None:
        """Count a transfer that starts to use it."""
        if not self.leases and not self.holders and not self.writers:
            self.pinned_at = time.monotonic()
        self.leases += 1

    def release(self) -> None:
        """Count a transfer that no longer uses it."""
        self.leases -= 1
        if self.leases == 0:
            self._changed()

    def hold(self, holder: LeaseHolder) -> None:
        """Note that a peer knows its place, and may reach it from now on."""
        if self.is_quiet:
            self.pinned_at = time.monotonic()
        self.holders.add(holder)

    def drop_holder(self, holder: LeaseHolder) -> None:
        """Note that the peer can no longer reach it."""
        self.holders.discard(holder)
        self.writers.discard(holder)
        self._changed()

    def withhold(self, holder: LeaseHolder) -> None:
        """Note that a peer without a link may still write: until it is dropped, the memory is not used."""
        self.holders.discard(holder)
        self.writers.add(holder)
        self._changed()

    def poison(self) -> None:
        """Mark it as never released by the device: its lease never ends."""
        self.is_poisoned = True
        self._changed()

    def _changed(self) -> None:
        if self._change is not None:
            self._change.set()
            self._change = None

    @property
    def is_withheld(self) -> bool:
        """True if a lost peer may still write into it: it is not used, and its memory is not reused."""
        return bool(self.writers)

    @property
    def is_left(self) -> bool:
        """True if a peer whose link has ended may still write into it.

        The peer was stopped while it wrote, or its channels are still being closed.
        """
        return self.is_withheld or any(holder.failure is not None for holder in self.holders)

    @property
    def is_usable(self) -> bool:
        """True if its owner may use it: it has an id, is registered, and no device or lost peer holds it."""
        return self.is_live and self.has_id and not self.is_poisoned and not self.writers

    @property
    def is_released(self) -> bool:
        """True if no transfer uses it, and no link reaches it."""
        return not self.leases and not self.holders

    @property
    def is_quiet(self) -> bool:
        """True if no transfer uses it, and no peer may reach it."""
        return not self.leases and not self.holders and not self.writers

    def told_pins(self) -> str:
        """Return what pins it, and for how long, in words."""
        peers = sorted(repr(peer) for peer in self.holders | self.writers)
        users = [f"{self.leases} transfers"] if self.leases else []
        users += peers[:1] + ([f"{len(peers) - 1} more peers"] if len(peers) > 1 else [])
        return f"cache {self.cache_id}, for {time.monotonic() - self.pinned_at:.3g} s, by {', '.join(users)}"

    async def wait_change(self) -> None:
        """Wait until its last lease, a holder or a writer is gone, a holder became a writer, or it is poisoned."""
        if self._change is None:
            self._change = Signal()
        await self._change.wait()

    # ---- what others see ----

    def message(self) -> CacheEntry:
        """Return the message that announces it to a peer, which checks it: nothing here is a peer's."""
        return CacheEntry.model_construct(
            cache_id=self.cache_id,
            blocks=self.blocks,
            placement=1 if self.placement is Placement.DEVICE else 0,
            data_type=self.data_type,
            pieces=self.pieces,
            stride=self.stride,
            addresses=list(self.addresses),
            epoch=self.epoch,
        )

    def cover(self, name: Name, tensors: range) -> bool:
        """Note that these tensors were pulled by this name; return True if all tensors have been by now."""
        mask = self.coverage.get(name, 0) | ((1 << len(tensors)) - 1) << tensors.start
        self.coverage[name] = mask
        return mask == (1 << len(self.addresses)) - 1


class CacheTable:
    """The caches by id and name. Ids start at 1 and are never used again."""

    def __init__(self, home: CacheHome | None = None) -> None:
        self._home = home
        self._ids = itertools.count(1)
        self._entries: dict[int, Entry] = {}
        self._names: dict[Name, tuple[Entry, int]] = {}
        self._starts: list[tuple[int, int]] = []  # (address, cache id) of all tensors, sorted

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def entries(self) -> list[Entry]:
        """Return all entries. Callable from any thread: unlike ``list(table)`` this is one step of the interpreter."""
        return list(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, cache_id: int) -> Entry | None:
        """Return the entry with this id, or None."""
        return self._entries.get(cache_id)

    def resolve(self, name: Name) -> tuple[Entry, int] | None:
        """Return the cache and the batch slot of a name; the slot of ids and blocks is 0."""
        if name.kind == "id":
            entry = self._entries.get(name.id)
            return None if entry is None else (entry, 0)
        if name.kind == "address":
            return self._around(name.id)
        return self._names.get(name)

    def _around(self, address: int) -> tuple[Entry, int] | None:
        """Return the cache with a tensor that contains this address; the youngest of those that share it."""
        # behind every tensor that starts at this address, whatever its cache's id
        at = bisect_right(self._starts, (address, 2**63)) - 1
        if at < 0:
            return None
        start, cache_id = self._starts[at]
        entry = self._entries[cache_id]
        return (entry, 0) if address < start + entry.nbytes else None

    def is_bound(self, key: CacheKey) -> bool:
        """Return True if the key names a slot of a cache."""
        return name_of(key) in self._names

    def check_blocks(self, key: BlocksCacheKey | None) -> dict[Name, int]:
        """Return the name for a new blocks cache.

        Raises:
            ParamInvalid: if another blocks cache has it.
        """
        if key is None:
            return {}
        name = name_of(key)
        if name in self._names:
            raise ParamInvalid(f"a blocks cache with model_id {name.model_id} exists already: one per model id")
        return {name: 0}

    def check_slots(self, desc: CacheDesc, keys: Sequence[CacheKey]) -> SlotNames:
        """Return the names for a new contiguous cache: the i-th key names slot i; placeholders name nothing.

        Raises:
            ParamInvalid: if there are more keys than slots, or a key is bound already or occurs twice.
        """
        if len(keys) > desc.shape[0]:
            raise ParamInvalid(f"{len(keys)} keys for {desc.shape[0]} batch slots: the limit is one each")
        names = SlotNames()
        for slot, key in enumerate(keys):
            if key.is_placeholder:
                continue
            name = name_of(key)
            if name in self._names or name in names:
                raise ParamInvalid(f"{key} is bound to a slot already")
            names[name] = slot
            if key.for_cluster is not None:
                names.takers[name] = key.for_cluster
        return names

    def add(
        self,
        desc: CacheDesc,
        addresses: Sequence[int],
        blocks: bool,
        names: dict[Name, int],
        accessible: bool,
        pool: PagePool | None = None,
    ) -> Entry:
        """Add a cache, which is not live yet. No await may lie between the check of its names and this."""
        entry = Entry(Cache(next(self._ids), desc, addresses, blocks, self._home), accessible, names, pool)
        self._entries[entry.cache_id] = entry
        for start in set(addresses):
            insort(self._starts, (start, entry.cache_id))
        self.bind(entry, names)
        return entry

    def bind(self, entry: Entry, names: dict[Name, int]) -> None:
        """Add names for slots of a cache. No await may lie between their check and this."""
        entry.names.update(names)
        if isinstance(names, SlotNames):
            entry.takers.update(names.takers)
        for name, slot in names.items():
            self._names[name] = (entry, slot)

    def unbind(self, name: Name) -> Entry | None:
        """Remove a name; return the cache that had it, or None."""
        entry, _ = self._names.pop(name, (None, 0))
        if entry is not None:
            entry.names.pop(name, None)
            entry.takers.pop(name, None)
            entry.coverage.pop(name, None)
        return entry

    def forget_names(self, entry: Entry) -> None:
        """Remove all names of a cache."""
        for name in list(entry.names):
            self.unbind(name)

    def remove(self, entry: Entry) -> None:
        """Remove a cache and its names."""
        self.forget_names(entry)
        if self._entries.pop(entry.cache_id, None) is not None:
            for start in set(entry.addresses):
                del self._starts[bisect_left(self._starts, (start, entry.cache_id))]


def check_desc(desc: CacheDesc) -> None:
    """Check a cache whose tensors are to move.

    Raises:
        ParamInvalid: if it has no tensor or too many, or is not cut along dimension 0.
    """
    if not 1 <= desc.num_tensors <= MAX_TENSORS:
        raise ParamInvalid(f"num_tensors is {desc.num_tensors}: a cache has 1 to {MAX_TENSORS}")
    if desc.batch_dim != 0:
        raise ParamInvalid(
            f"batch_dim_index is {desc.batch_dim}: must be 0, because tensors that move are cut along dimension 0"
        )
    _ = desc.size
