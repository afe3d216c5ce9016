"""The caches of this cluster: what they are called, who refers to them, who uses them."""

from __future__ import annotations

import itertools
import time
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from aiodatadist.cache.names import Name, name_of
from aiodatadist.cache.pool import PagePool
from aiodatadist.concurrency.signal import Signal
from aiodatadist.errors import LLMException, ParamInvalid
from aiodatadist.transport import Region
from aiodatadist.values.descriptors import BlocksCacheKey, Cache, CacheDesc, CacheHome, CacheKey, Placement
from aiodatadist.wire.messages import MAX_TENSORS, CacheEntry


class LeaseHolder(Protocol):
    """A peer that may reach a cache at any moment, because it was told where it is."""

    @property
    def failure(self) -> LLMException | None:
        """Why its link is over or ends. What it reaches, it reaches until its channels are closed. None: the link lasts."""

    def revoke(self, entry: Entry) -> Signal:
        """Take it back. When nothing of the peer's can touch it any more, it is taken out of ``entry.holders``, and the
        event is set."""


class Entry:
    """One cache.

    ``stride`` and ``pieces`` of its tensors and their ``addresses`` are what they were when the cache was made: the
    description is its caller's, who may change it.

    Attributes:
        names: what it is called, with the batch slot that each name stands for. Not its id.
        pool: what its memory is from; None for memory of the caller's.
        references: of a contiguous cache from a pool: its id, while the caller has it, and its names.
        leases: this cluster's transfers that use it.
        holders: peers that may.
        writers: of links that are gone: peers that were stopped while they wrote, and may still do so.
        is_poisoned: the device would not let go of it; for good.
        is_live: transfers may start.
        has_id: its id was not deallocated.
        epoch: how young a channel has to be to reach it.
        keep: what keeps the caller's memory alive.
        pinned_at: when it was last pinned by a transfer or a peer, which it had not been before; by the monotonic clock.
        layer_seconds: that a layer took to be computed the last time layers were sent as they came, or None.
        views: gives something that is alive as long as an array over the cache's memory is, or None.
    """

    __slots__ = (
        "_change",
        "addresses",
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
        "views",
        "writers",
    )  # fmt: skip

    def __init__(self, cache: Cache, remote_accessible: bool, names: dict[Name, int], pool: PagePool | None) -> None:
        desc = cache.cache_desc
        self.cache = cache
        self.cache_id = cache.cache_id
        self.blocks = cache.is_blocks_cache
        self.remote_accessible = remote_accessible
        self.may_receive = remote_accessible  # it may be the destination of this cluster's own pulls
        self.is_known = pool is not None  # to the transport
        self.names = names
        self.pool = pool
        self.data_type = desc.data_type.value
        self.addresses = array("Q", cache.tensor_addrs)
        self.nbytes, self.stride, self.pieces, self.placement = desc.size, desc.stride, desc.shape[0], desc.placement
        self.epoch = 0
        self.leases = 0
        self.holders: set[LeaseHolder] = set()
        self.writers: set[LeaseHolder] = set()
        self.coverage: dict[Name, int] = {}  # tensors that were pulled by this name, a bit each
        self.is_poisoned = False
        self.is_live = False
        self.has_id = True
        self.keep: list[object] = []
        self.layer_seconds: float | None = None
        self.views: Callable[[], object] = lambda: None
        self.pinned_at = 0.0
        self._change: Signal | None = None

    @property
    def references(self) -> int:
        if self.blocks or self.pool is None:
            return int(self.has_id)
        return int(self.has_id) + len(self.names)

    def regions(self) -> list[Region]:
        """Each distinct tensor once."""
        return [Region(address, self.nbytes, self.placement) for address in dict.fromkeys(self.addresses)]

    # ---- who uses it ----

    def lease(self) -> None:
        if not self.leases and not self.holders and not self.writers:
            self.pinned_at = time.monotonic()
        self.leases += 1

    def release(self) -> None:
        self.leases -= 1
        if self.leases == 0:
            self._changed()

    def hold(self, holder: LeaseHolder) -> None:
        """The peer is told of it, and may reach it from now on."""
        if self.is_quiet:
            self.pinned_at = time.monotonic()
        self.holders.add(holder)

    def drop_holder(self, holder: LeaseHolder) -> None:
        """The peer cannot reach it any more."""
        self.holders.discard(holder)
        self.writers.discard(holder)
        self._changed()

    def withhold(self, holder: LeaseHolder) -> None:
        """The link to a peer is gone, but the peer may still write: until it is dropped, the memory is not used."""
        self.holders.discard(holder)
        self.writers.add(holder)
        self._changed()

    def poison(self) -> None:
        """The device did not let go of it: its lease never ends."""
        self.is_poisoned = True
        self._changed()

    def _changed(self) -> None:
        if self._change is not None:
            self._change.set()
            self._change = None

    @property
    def is_withheld(self) -> bool:
        """A peer that is lost may still write into it: it is not used, and its memory is not given on."""
        return bool(self.writers)

    @property
    def is_left(self) -> bool:
        """A peer may still write into it whose link is over: it was stopped meanwhile, or its channels are being closed."""
        return self.is_withheld or any(holder.failure is not None for holder in self.holders)

    @property
    def is_usable(self) -> bool:
        """Its owner may use it: it has an id, is registered, and no device or lost peer holds it."""
        return self.is_live and self.has_id and not self.is_poisoned and not self.writers

    @property
    def is_released(self) -> bool:
        """No transfer uses it, and no link reaches it."""
        return not self.leases and not self.holders

    @property
    def is_quiet(self) -> bool:
        """No transfer uses it, and no peer may reach it."""
        return self.is_released and not self.is_withheld

    def told_pins(self) -> str:
        """What pins it, and for how long, in words."""
        peers = sorted(repr(peer) for peer in self.holders | self.writers)
        users = [f"{self.leases} transfers"] if self.leases else []
        users += peers[:1] + ([f"{len(peers) - 1} more peers"] if len(peers) > 1 else [])
        return f"cache {self.cache_id}, for {time.monotonic() - self.pinned_at:.3g} s, by {', '.join(users)}"

    async def wait_change(self) -> None:
        """Wait until the last lease, a holder or a writer is gone, a holder became a writer, or the cache is poisoned."""
        if self._change is None:
            self._change = Signal()
        await self._change.wait()

    # ---- what others see ----

    def message(self) -> CacheEntry:
        """As a peer is told."""
        return CacheEntry(
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
        """These tensors were pulled by this name; whether all of them have been by now."""
        mask = self.coverage.get(name, 0) | ((1 << len(tensors)) - 1) << tensors.start
        self.coverage[name] = mask
        return mask == (1 << len(self.addresses)) - 1


class CacheTable:
    """Ids and names. Ids start at 1 and are never used again."""

    def __init__(self, home: CacheHome | None = None) -> None:
        self._home = home
        self._ids = itertools.count(1)
        self._entries: dict[int, Entry] = {}
        self._names: dict[Name, tuple[Entry, int]] = {}
        self._starts: list[tuple[int, int]] = []  # of all tensors: address and cache id, sorted

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def entries(self) -> list[Entry]:
        """All as they are now. From any thread: this is one step of the interpreter, which ``list(table)`` is not."""
        return list(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, cache_id: int) -> Entry | None:
        return self._entries.get(cache_id)

    def resolve(self, name: Name) -> tuple[Entry, int] | None:
        """The cache and the batch slot that a name stands for; slot 0 for ids and blocks."""
        if name.kind == "id":
            entry = self._entries.get(name.id)
            return None if entry is None else (entry, 0)
        if name.kind == "address":
            return self._around(name.id)
        return self._names.get(name)

    def _around(self, address: int) -> tuple[Entry, int] | None:
        """The cache with a tensor that this address lies in; the youngest of those that share it."""
        at = bisect_right(self._starts, (address, 2**63)) - 1
        if at < 0:
            return None
        start, cache_id = self._starts[at]
        entry = self._entries[cache_id]
        return (entry, 0) if address < start + entry.nbytes else None

    def is_bound(self, key: CacheKey) -> bool:
        """The key names a slot of some cache."""
        return name_of(key) in self._names

    def check_blocks(self, key: BlocksCacheKey | None) -> dict[Name, int]:
        """The name that a new blocks cache may have.

        Raises:
            ParamInvalid: another blocks cache has it.
        """
        if key is None:
            return {}
        name = name_of(key)
        if name in self._names:
            raise ParamInvalid(f"a blocks cache with model_id {name.model_id} exists already: one per model id")
        return {name: 0}

    def check_slots(self, desc: CacheDesc, keys: Sequence[CacheKey]) -> dict[Name, int]:
        """The names that a new contiguous cache may have: the i-th key is slot i; placeholders name nothing.

        Raises:
            ParamInvalid: more keys than slots, or a key that is bound already, or twice.
        """
        if len(keys) > desc.shape[0]:
            raise ParamInvalid(f"{len(keys)} keys for {desc.shape[0]} batch slots: the limit is one each")
        names: dict[Name, int] = {}
        for slot, key in enumerate(keys):
            if key.is_placeholder:
                continue
            name = name_of(key)
            if name in self._names or name in names:
                raise ParamInvalid(f"{key} is bound to a slot already")
            names[name] = slot
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
        """A new cache; its names were checked without anything awaited since. It is not live yet."""
        entry = Entry(Cache(next(self._ids), desc, addresses, blocks, self._home), accessible, names, pool)
        self._entries[entry.cache_id] = entry
        for start in set(addresses):
            insort(self._starts, (start, entry.cache_id))
        self.bind(entry, names)
        return entry

    def bind(self, entry: Entry, names: dict[Name, int]) -> None:
        """More names for slots of a cache; they were checked without anything awaited since."""
        entry.names.update(names)
        for name, slot in names.items():
            self._names[name] = (entry, slot)

    def unbind(self, name: Name) -> Entry | None:
        """The name stands for nothing any more; the cache that had it."""
        entry, _ = self._names.pop(name, (None, 0))
        if entry is not None:
            entry.names.pop(name, None)
            entry.coverage.pop(name, None)
        return entry

    def forget_names(self, entry: Entry) -> None:
        for name in list(entry.names):
            self.unbind(name)

    def remove(self, entry: Entry) -> None:
        self.forget_names(entry)
        if self._entries.pop(entry.cache_id, None) is not None:
            for start in set(entry.addresses):
                del self._starts[bisect_left(self._starts, (start, entry.cache_id))]


def check_desc(desc: CacheDesc) -> None:
    """Rules of a cache whose tensors are to move.

    Raises:
        ParamInvalid: no tensor, too many, or not cut along dimension 0.
    """
    if not 1 <= desc.num_tensors <= MAX_TENSORS:
        raise ParamInvalid(f"num_tensors is {desc.num_tensors}: a cache has 1 to {MAX_TENSORS}")
    if desc.batch_dim != 0:
        raise ParamInvalid(f"batch_dim_index is {desc.batch_dim}: tensors that move are cut along dimension 0")
    _ = desc.size
