"""The contents that each block of a cache must have: every byte names its owner, and a ledger has what is expected."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from aiodatadist._values.descriptors import Cache

_UNIT = struct.Struct("<4sIQIIII")
_MAGIC = b"KVst"


@dataclass(frozen=True, slots=True)
class BlockStamp:
    """The origin of a block, from which all of its bytes are made.

    Attributes:
        owner: the cluster that wrote it.
        generation: of its cache, which may be made again under the same key.
        tensor, block: the place where it was written.
        version: how often the block was written before, in this generation.
    """

    owner: int
    generation: int
    tensor: int
    block: int
    version: int = 0

    def content(self, nbytes: int) -> bytes:
        """Return the contents of a block of this size."""
        check = zlib.crc32(struct.pack("<QIIII", *self._fields))
        owner, generation, tensor, block, version = self._fields
        unit = _UNIT.pack(_MAGIC, check, owner, generation, tensor, block, version)
        return (unit * (nbytes // len(unit) + 1))[:nbytes]

    @property
    def _fields(self) -> tuple[int, int, int, int, int]:
        return self.owner, self.generation, self.tensor, self.block, self.version

    @classmethod
    def read(cls, content: bytes | bytearray | memoryview) -> Self | None:
        """Return the stamp of a whole block of at least 32 bytes, or None if any byte does not belong to that stamp."""
        if len(content) < _UNIT.size:
            return None
        magic, _, *fields = _UNIT.unpack_from(content)
        stamp = cls(*fields)
        is_whole = magic == _MAGIC and bytes(content) == stamp.content(len(content))  # as bytes, which compare faster
        return stamp if is_whole else None

    def __str__(self) -> str:
        return (
            f"cluster {self.owner}'s block {self.block} of tensor {self.tensor},"
            f" generation {self.generation}, version {self.version}"
        )


class MisplacedError(AssertionError):
    """A block has wrong contents. The message names the block, what it should contain, and what it does contain."""


RECLAIMED = 2**32 - 1
"""The generation of what :meth:`BlockLedger.reclaim` writes: no cache has it."""

Expected = BlockStamp | int
"""A stamp, or the checksum of arbitrary bytes that must not change."""


class BlockLedger:
    """The blocks of one cache, and their expected contents.

    Every block is in one of four states. *Open*, since :meth:`begin`: a transfer may write there, and nothing is
    expected. *Stamped*, since :meth:`write` or :meth:`landed`. *Settled*, since :meth:`settle`: a transfer failed and
    left arbitrary bytes, and from then on no byte changes. *Reclaimed*, since :meth:`reclaim`: the same, but its caller
    has written there since, so that a late byte shows even if it equals one that came in time. :meth:`wrong` lists
    blocks with wrong contents, :meth:`strays` those among the reclaimed ones.

    Args:
        cache: of memory that this process can address, for as long as it has the ledger.
        views: writable views of each tensor. By default they are made of the cache's addresses, which works for softnpu
            and for host memory.

    Attributes:
        blocks: the numbers of the blocks.
        tensors: the numbers of the tensors.
        checked: bytes that were compared so far.
    """

    def __init__(
        self, cache: Cache, owner: int, generation: int = 0, views: Sequence[memoryview] | None = None
    ) -> None:
        self._stride = cache.cache_desc.stride
        self._owner, self._generation = owner, generation
        self._views = [*(views if views is not None else _views(cache))]
        self._expected: dict[tuple[int, int], Expected] = {}
        self._reclaimed: dict[tuple[int, int], None] = {}
        self._reclaims = 0
        self.blocks: range = range(cache.cache_desc.shape[0])
        self.tensors: range = range(cache.cache_desc.num_tensors)
        self.checked: int = 0
        """Bytes compared so far."""

    def piece(self, tensor: int, block: int) -> memoryview:
        """Return the bytes of a block in one tensor."""
        return self._views[tensor][block * self._stride : (block + 1) * self._stride]

    def write(self, blocks: Iterable[int], version: int = 0) -> None:
        """Stamp blocks as this cluster's own. No transfer may read or write them meanwhile."""
        for block in blocks:
            self.write_as(block, self._owner, block, version)

    def write_as(self, block: int, owner: int, source: int, version: int = 0) -> None:
        """Stamp a block as another cluster's: a block that is computed again has the same bytes."""
        for tensor in self.tensors:
            self._write((tensor, block), BlockStamp(owner, self._generation, tensor, source, version))

    def _write(self, place: tuple[int, int], stamp: BlockStamp) -> None:
        self.piece(*place)[:] = stamp.content(self._stride)
        self._expect(place, stamp)

    def _expect(self, place: tuple[int, int], expected: Expected) -> None:
        self._reclaimed.pop(place, None)
        self._expected[place] = expected

    def begin(self, blocks: Iterable[int], tensors: range | None = None) -> None:
        """Open these blocks: a transfer may write into them from now on."""
        for place in self._places(blocks, tensors):
            self._expected.pop(place, None)
            self._reclaimed.pop(place, None)

    def landed(
        self, blocks: Sequence[int], owner: int, sources: Sequence[int], tensors: range | None = None
    ) -> list[BlockStamp]:
        """Check every byte after a successful transfer of ``sources[i]`` to ``blocks[i]``.

        Returns:
            The stamp of each block, as it is in the first of the tensors.

        Raises:
            MisplacedError: if a block is damaged or another one's, its tensors have different versions, or blocks have
                different generations.
        """
        return [self._landed(*pair, owner, tensors) for pair in zip(blocks, sources, strict=True)]

    def _landed(self, block: int, source: int, owner: int, tensors: range | None) -> BlockStamp:
        first: BlockStamp | None = None
        for place in self._places([block], tensors):
            tensor, _ = place
            stamp = self._read(place)
            wanted = replace(first or stamp, owner=owner, tensor=tensor, block=source)
            if stamp != wanted:
                raise MisplacedError(f"block {block} of tensor {tensor}: expected {wanted}, found {stamp}")
            self._expect(place, stamp)
            first = first or stamp
        assert first is not None, "a cache has a tensor"
        return first

    def _read(self, place: tuple[int, int]) -> BlockStamp:
        piece = self.piece(*place)
        self.checked += len(piece)
        stamp = BlockStamp.read(piece)
        if stamp is None:
            raise MisplacedError(f"block {place[1]} of tensor {place[0]} {_pieces(piece)}")
        return stamp

    def settle(self, blocks: Iterable[int], tensors: range | None = None) -> None:
        """Settle these blocks after an unsuccessful transfer into them: their bytes must not change from now on."""
        for place in self._places(blocks, tensors):
            self._expect(place, zlib.crc32(self.piece(*place)))

    def reclaim(self, blocks: Iterable[int], tensors: range | None = None) -> None:
        """Give these blocks back to their caller, whatever the outcome of a transfer into them.

        They are overwritten, each time with other contents, and from then on no byte changes.
        """
        self._reclaims += 1
        for place in self._places(blocks, tensors):
            tensor, block = place
            self._write(place, BlockStamp(self._owner, RECLAIMED, tensor, block, self._reclaims))
            self._reclaimed[place] = None

    def strays(self, blocks: Iterable[int] | None = None) -> list[str]:
        """Describe the reclaimed blocks into which something was written."""
        places = self._reclaimed if blocks is None else self._places(blocks, None)
        return self._told(place for place in places if place in self._reclaimed)

    def settle_open(self) -> None:
        """Settle all blocks that are open: nothing is running, and no byte changes."""
        for place in self._places(self.blocks, None):
            if place not in self._expected:
                self._expect(place, zlib.crc32(self.piece(*place)))

    def wrong(self, blocks: Iterable[int] | None = None) -> list[str]:
        """Describe the blocks that have wrong contents. Open ones are left out."""
        return self._told(self._places(self.blocks if blocks is None else blocks, None))

    def _told(self, places: Iterable[tuple[int, int]]) -> list[str]:
        found = []
        for place in places:
            expected = self._expected.get(place)
            if expected is not None and (words := self._unlike(place, expected)):
                given_back = "it was reclaimed, and then written into: " if place in self._reclaimed else ""
                found.append(f"block {place[1]} of tensor {place[0]}: {given_back}{words}")
        return found

    def _unlike(self, place: tuple[int, int], expected: Expected) -> str:
        piece = self.piece(*place)
        self.checked += len(piece)
        if isinstance(expected, int):
            return "" if zlib.crc32(piece) == expected else f"it was settled, and then changed: it {_pieces(piece)}"
        return "" if bytes(piece) == expected.content(len(piece)) else f"expected {expected}, but it {_pieces(piece)}"

    def _places(self, blocks: Iterable[int], tensors: range | None) -> Iterable[tuple[int, int]]:
        return ((tensor, block) for block in blocks for tensor in (self.tensors if tensors is None else tensors))


def _pieces(piece: memoryview) -> str:
    """Describe the contents of a damaged block: runs of units of the same stamp."""
    runs: list[list[str | int]] = []
    for at in range(0, len(piece) - _UNIT.size + 1, _UNIT.size):
        magic, _, *fields = _UNIT.unpack_from(piece, at)
        stamp = str(BlockStamp(*fields)) if magic == _MAGIC else "bytes without a stamp"
        if runs and runs[-1][0] == stamp:
            runs[-1][1] = at + _UNIT.size
        else:
            runs.append([stamp, at + _UNIT.size])
    told = [f"{stamp} up to byte {end}" for stamp, end in runs[:4]]
    return "holds " + ", ".join(told) + (f", and {len(runs) - 4} further runs" if len(runs) > 4 else "")


def _views(cache: Cache) -> list[memoryview]:
    size = cache.cache_desc.size
    return [memoryview((ctypes.c_char * size).from_address(address)).cast("B") for address in cache.tensor_addrs]
