"""The bytes of the caller's memory that make up each value.

They are checked before anything starts, and turned into grids when they move. A call's values are those that have
bytes: one per hash and layer group, or one per key of the caller's.
"""

from __future__ import annotations

import ctypes
import reprlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Self

from aiodatadist._context_caching import checks as rules
from aiodatadist._context_caching.errors import EmsInvalidArgument
from aiodatadist._context_caching.memory.copy_list import CopyList, PlacementsOf, at_addresses
from aiodatadist._context_caching.memory.kv_layout import Group, Layout
from aiodatadist._context_caching.memory.slots import Pieces, Runs, pieces
from aiodatadist._device import first_unusable
from aiodatadist._values.descriptors import Placement
from aiodatadist._values.grid import Grid


class Memory(ABC):
    """The caller's side of one call.

    Attributes:
        sizes: bytes of each value.
        owners: index of the call's key that each value belongs to; ascending.
    """

    sizes: list[int]
    owners: list[int]

    @abstractmethod
    def look(self, values: range, placements_of: PlacementsOf) -> None:
        """Find the places of these values' bytes; once, before anything starts.

        Raises:
            EmsInvalidArgument: if they are not memory of this process.
        """

    @abstractmethod
    def copy_lists(self, addresses: Mapping[int, int]) -> list[CopyList]:
        """Return the places of these values' bytes; ``addresses`` maps each value to the address of its first byte."""

    @abstractmethod
    def take(self, *, writes: bool) -> None:
        """Reserve the memory for this call. Raises EmsInvalidArgument if another call uses it."""

    @abstractmethod
    def give(self) -> None:
        """Release the memory: this call no longer touches it."""


# ---- hashes and slots ----


@dataclass(frozen=True, slots=True)
class _Share:
    """A layer group's part of a call: the number of tokens of each hash, and its first entry in ``runs``."""

    group: Group
    runs: Runs
    tokens: list[int]
    entries: list[int]
    name: str


class SlotMemory(Memory):
    """Tokens in slots of the registered cache.

    Attributes:
        groups: the layer group of each value.
    """

    def __init__(self, shares: Sequence[_Share], count: int) -> None:
        self._shares = shares
        self.sizes, self.owners, self.groups = [], [], []
        for i in range(count):
            for g, share in enumerate(shares):
                if share.tokens[i]:
                    self.sizes.append(share.tokens[i] * share.group.token_bytes)
                    self.owners.append(i)
                    self.groups.append(g)

    @classmethod
    def of(cls, layout: Layout, slots: Any, offsets: Any, chunks: Any, count: int) -> Self:
        """Return the memory that is given as slots with offsets, or as chunks.

        Raises:
            EmsInvalidArgument: if both or neither are given, or a rule is broken.
        """
        if chunks is not None:
            if slots is not None or offsets is not None:
                raise EmsInvalidArgument("chunks are given together with slots or offsets: pass one of the two")
            return cls.chunked(layout, chunks, count)
        if slots is None or offsets is None:
            raise EmsInvalidArgument("slots or offsets are missing: give both, or chunks instead")
        return cls.mapped(layout, slots, offsets, count)

    @classmethod
    def mapped(cls, layout: Layout, slots: Any, offsets: Any, count: int) -> Self:
        """Return the memory for a slot per token and a number of tokens per hash.

        Raises:
            EmsInvalidArgument: if a rule is broken.
        """
        if len(layout.groups) != 1:
            raise EmsInvalidArgument(
                f"slots are given, but there are {len(layout.groups)} layer groups: use chunks, one list per group"
            )
        starts = rules.whole_numbers(rules.some(slots, "slots"), "slots")
        tokens = rules.whole_numbers(rules.some(offsets, "offsets"), "offsets").tolist()
        if len(tokens) != count:
            raise EmsInvalidArgument(f"{len(tokens)} offsets for {count} hashes: they must have the same length")
        for i, number in enumerate(tokens):
            if number < 1:
                raise EmsInvalidArgument(f"offsets[{i}] is {number}: a hash has at least 1 token")
        if sum(tokens) != len(starts):
            raise EmsInvalidArgument(f"offsets add up to {sum(tokens)} tokens, but slots has {len(starts)} entries")
        runs, group = Runs(starts), layout.groups[0]
        runs.check(group.slots, "slots")
        entries = list(accumulate(tokens, initial=0))[:-1]
        return cls([_Share(group, runs, tokens, entries, "slots")], count)

    @classmethod
    def chunked(cls, layout: Layout, chunks: Any, count: int) -> Self:
        """Return the memory for one run of slots per hash and layer group.

        A group that stores nothing for a hash has a run of length 0.

        Raises:
            EmsInvalidArgument: if a rule is broken.
        """
        given = rules.some(chunks, "chunks")
        if len(given) != len(layout.groups):
            raise EmsInvalidArgument(
                f"chunks has {len(given)} lists for {len(layout.groups)} layer groups: must have one list of "
                "(start_slot, length) pairs for each, even if there is only one group"
            )
        shares = []
        for g, (group, pairs) in enumerate(zip(layout.groups, given, strict=True)):
            name = f"chunks[{g}]"
            runs = _runs_of(rules.some(pairs, name), count, name)
            runs.check(group.slots, name)
            tokens = runs.lengths.tolist() if runs.lengths is not None else []
            shares.append(_Share(group, runs, tokens, list(range(count)), name))
        return cls(shares, count)

    def look(self, values: range, placements_of: PlacementsOf) -> None:
        """Do nothing: the places are known since the cache was registered."""

    def copy_lists(self, addresses: Mapping[int, int]) -> list[CopyList]:
        found: list[CopyList] = []
        for g, share in enumerate(self._shares):
            wanted = {self.owners[v]: address for v, address in addresses.items() if self.groups[v] == g}
            if wanted:
                found.extend(_copy_lists_of(share, wanted))
        return found

    def take(self, *, writes: bool) -> None:
        taken: list[_Share] = []
        try:
            for share in self._shares:
                share.group.users.take(share.runs, share.name, writes=writes)
                taken.append(share)
        except EmsInvalidArgument:
            for share in taken:
                share.group.users.give(share.runs)
            raise

    def give(self) -> None:
        for share in self._shares:
            share.group.users.give(share.runs)


def _runs_of(pairs: Sequence[Any], count: int, name: str) -> Runs:
    rule = "must be a list of (start_slot, length) pairs, one for each hash"
    if not any(isinstance(pair, (tuple, list)) for pair in pairs):
        raise EmsInvalidArgument(f"{name} is {reprlib.repr(pairs)} of type {type(pairs).__name__}: {rule}")
    if len(pairs) != count:
        raise EmsInvalidArgument(f"{name} has {len(pairs)} pairs for {count} hashes: {rule}")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise EmsInvalidArgument(f"{name}[{i}] is {pair!r}: must be (start_slot, length)")
    starts = rules.whole_numbers([pair[0] for pair in pairs], f"start slots of {name}")
    lengths = rules.whole_numbers([pair[1] for pair in pairs], f"lengths of {name}")
    for i, length in enumerate(lengths):
        if length < 0:
            raise EmsInvalidArgument(f"{name}[{i}] has the length {length}: must be at least 0")
    return Runs(starts, lengths)


def _copy_lists_of(share: _Share, wanted: Mapping[int, int]) -> list[CopyList]:
    """Return the grids of one layer group; ``wanted`` has the address of each hash's value."""
    first, last = min(wanted), max(wanted)
    tokens = share.tokens[first : last + 1]
    addresses = [wanted.get(i, 0) for i in range(first, last + 1)]
    cut: dict[int, list[Pieces]] = {}
    found = []
    for alike in share.group.alike:
        nbytes = alike.token_bytes
        if nbytes not in cut:
            cut[nbytes] = pieces(share.runs, share.entries[first], tokens, addresses, nbytes)
        for part in cut[nbytes]:
            inside = array("Q", [part.tokens * before for before in alike.before])
            size = part.run * nbytes
            found.append(
                CopyList(
                    alike.placement, Grid(alike.addresses, inside, part.starts, part.places, nbytes, 1, size, size)
                )
            )
    return found


# ---- keys and buffers ----


@dataclass(frozen=True)
class KvBufferWrapper:
    """A contiguous region of memory. A caller that gives an address keeps its memory alive until the call has ended.

    An address that is not mapped when the call starts is an error. Memory that is freed during the call may end the
    process.

    Raises:
        EmsInvalidArgument: if the address or the length is not an int above 0.
    """

    data_ptr: int
    length: int

    def __post_init__(self) -> None:
        if callable(self.data_ptr):
            raise EmsInvalidArgument("data_ptr is a function: call it, tensor.data_ptr()")
        rules.integer(self.data_ptr, "data_ptr", 1)
        rules.integer(self.length, "length", 1)
        if self.data_ptr + self.length > 2**64:
            raise EmsInvalidArgument(f"{self.length} bytes from {self.data_ptr:#x} leave the address space")

    @classmethod
    def from_buffer(cls, owner: Any) -> Self:
        """Return the region of a writable buffer, which is kept alive as long as the region.

        Raises:
            EmsInvalidArgument: if it is no buffer, read-only, empty or not contiguous, or its items are references.
        """
        address, length, keep = _bytes_of(owner, "the buffer")
        made = cls(address, length)
        object.__setattr__(made, "_keep", keep)
        return made


def _bytes_of(owner: Any, name: str) -> tuple[int, int, object]:
    if hasattr(owner, "dtype"):
        rules.plain(owner, name)  # first, because numpy exports no buffer for some of these dtypes
    try:
        view = memoryview(owner)
    except TypeError:
        raise EmsInvalidArgument(
            f"{name} is of type {type(owner).__name__}: must be a KvBufferWrapper or a writable buffer"
        ) from None
    rules.plain(view, name)
    for is_wrong, what in (
        (view.readonly, "read-only"),
        (not view.c_contiguous, "not contiguous"),
        (not view.nbytes, "empty"),
    ):
        if is_wrong:
            raise EmsInvalidArgument(f"{name} is {what}: must be writable, contiguous and not empty")
    return ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B"))), view.nbytes, view


class _Region(NamedTuple):
    """A region of the caller's. The owner is kept alive; it is None if only an address was given."""

    start: int
    length: int
    owner: object | None


class BufferMemory(Memory):
    """Regions of the caller's, one after the other in the value. Only the caller knows what else uses them."""

    def __init__(self, buffers: Any, count: int) -> None:
        """Read the regions. Raises EmsInvalidArgument if a rule is broken."""
        given = rules.some(buffers, "buffers")
        if len(given) != count:
            raise EmsInvalidArgument(f"buffers has {len(given)} lists for {count} keys: it must have one for each")
        self._regions = [self._read(inner, f"buffers[{i}]") for i, inner in enumerate(given)]
        self._placements: list[list[Placement]] = []
        self._writes = False
        self.sizes = [sum(region.length for region in regions) for regions in self._regions]
        self.owners = list(range(count))

    def _read(self, inner: Any, name: str) -> list[_Region]:
        regions = []
        if not isinstance(inner, (list, tuple)):
            raise EmsInvalidArgument(f"{name} is of type {type(inner).__name__}: must be a list of buffers")
        for k, buffer in enumerate(rules.some(inner, name)):
            if isinstance(buffer, KvBufferWrapper):
                regions.append(_Region(buffer.data_ptr, buffer.length, getattr(buffer, "_keep", None)))
            else:
                regions.append(_Region(*_bytes_of(buffer, f"{name}[{k}]")))
        return regions

    def take(self, *, writes: bool) -> None:
        """Note the direction. Other users of the regions are unknown, so nothing is refused."""
        self._writes = writes

    def give(self) -> None:
        """Do nothing: nothing was reserved."""

    def look(self, values: range, placements_of: PlacementsOf) -> None:
        regions = [(v, k, region) for v in values for k, region in enumerate(self._regions[v])]
        placements = placements_of(region.start for _, _, region in regions)
        found = iter(placements)
        self._placements += [[next(found) or Placement.HOST for _ in self._regions[v]] for v in values]
        doubtful = [
            (v, k, region)
            for (v, k, region), placement in zip(regions, placements, strict=True)
            if placement is not Placement.DEVICE and region.owner is None
        ]
        starts, lengths = ([getattr(region, part) for _, _, region in doubtful] for part in ("start", "length"))
        at = first_unusable(starts, lengths, writes=self._writes)
        if at < len(doubtful):
            v, k, region = doubtful[at]
            raise EmsInvalidArgument(
                f"buffers[{v}][{k}] is {region.length} bytes from {region.start:#x}: they must be memory of this process "
                f"that can be {'written' if self._writes else 'read'}"
            )

    def copy_lists(self, addresses: Mapping[int, int]) -> list[CopyList]:
        alike: dict[tuple[Placement, int], tuple[list[int], list[int]]] = {}
        for v, address in addresses.items():
            inside = address
            for (start, length, _), placement in zip(self._regions[v], self._placements[v], strict=True):
                local, remote = alike.setdefault((placement, length), ([], []))
                local.append(start)
                remote.append(inside)
                inside += length
        return [
            CopyList(placement, at_addresses(local, remote, length))
            for (placement, length), (local, remote) in alike.items()
        ]
