"""What each block of a cache has to hold: every byte says whose it is, and a ledger says what is expected."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from aiodatadist.values.descriptors import Cache

_UNIT = struct.Struct("<4sIQIIII")
_MAGIC = b"KVst"


@dataclass(frozen=True, slots=True)
class BlockStamp:
    """Whose a block is, to the byte: its content is made of it alone.

    Attributes:
        owner: the cluster that wrote it.
        generation: of its cache, which may be made anew under the same key.
        tensor, block: where it was written.
        version: how often the block was written before, in this generation.
    """

    owner: int
    generation: int
    tensor: int
    block: int
    version: int = 0

    def content(self, nbytes: int) -> bytes:
        """All of a block of so many bytes."""
        check = zlib.crc32(struct.pack("<QIIII", *self._fields))
        owner, generation, tensor, block, version = self._fields
        unit = _UNIT.pack(_MAGIC, check, owner, generation, tensor, block, version)
        return (unit * (nbytes // len(unit) + 1))[:nbytes]

    @property
    def _fields(self) -> tuple[int, int, int, int, int]:
        return self.owner, self.generation, self.tensor, self.block, self.version

    @classmethod
    def read(cls, content: bytes | bytearray | memoryview) -> Self | None:
        """The stamp of a whole block, of at least 32 bytes. None: it has none, or any byte of it is not of that stamp."""
        if len(content) < _UNIT.size:
            return None
        magic, _, *fields = _UNIT.unpack_from(content)
        stamp = cls(*fields)
        is_whole = magic == _MAGIC and bytes(content) == stamp.content(len(content))  # bytes compare faster
        return stamp if is_whole else None

    def __str__(self) -> str:
        return (
            f"cluster {self.owner}'s block {self.block} of tensor {self.tensor},"
            f" generation {self.generation}, version {self.version}"
        )


class MisplacedError(AssertionError):
    """A block holds what it must not. The message says which, what it should hold, and what it does."""


RECLAIMED = 2**32 - 1
"""The generation of what :meth:`BlockLedger.reclaim` writes: no cache has it."""

Expected = BlockStamp | int
"""A stamp, or the checksum of bytes that may be anything and have to stay."""


class BlockLedger:
    """The blocks of one cache, and what each has to hold.

    Every block is in one of four states: *open*, since :meth:`begin`, when a transfer may write there and nothing is
    expected; *stamped*, since :meth:`write` or :meth:`landed`; *settled*, since :meth:`settle`: a transfer failed and left
    anything there, and from then on no byte changes; or *reclaimed*, since :meth:`reclaim`: the same, but its caller has
    written there since, so that a late byte shows also where it is the same as one that came in time. :meth:`wrong` says
    which blocks are not as they have to be, :meth:`strays` which of the reclaimed ones.

    Args:
        cache: of memory that this process can address, and as long as it has it.
        views: writable, over each tensor. By default made of the cache's addresses, which is for softnpu and for host memory.
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
        self.blocks = range(cache.cache_desc.shape[0])
        self.tensors = range(cache.cache_desc.num_tensors)
        self.checked = 0
        """Bytes that were compared so far."""

    def piece(self, tensor: int, block: int) -> memoryview:
        """The bytes of a block in one tensor."""
        return self._views[tensor][block * self._stride : (block + 1) * self._stride]

    def write(self, blocks: Iterable[int], version: int = 0) -> None:
        """Stamp blocks as this cluster's own. No transfer may read or write them meanwhile."""
        for block in blocks:
            self.write_as(block, self._owner, block, version)

    def write_as(self, block: int, owner: int, source: int, version: int = 0) -> None:
        """Stamp a block as another one's: what is computed again holds the same bytes."""
        for tensor in self.tensors:
            self._write((tensor, block), BlockStamp(owner, self._generation, tensor, source, version))

    def _write(self, place: tuple[int, int], stamp: BlockStamp) -> None:
        self.piece(*place)[:] = stamp.content(self._stride)
        self._expect(place, stamp)

    def _expect(self, place: tuple[int, int], expected: Expected) -> None:
        self._reclaimed.pop(place, None)
        self._expected[place] = expected

    def begin(self, blocks: Iterable[int], tensors: range | None = None) -> None:
        """A transfer may write into these blocks from now on."""
        for place in self._places(blocks, tensors):
            self._expected.pop(place, None)
            self._reclaimed.pop(place, None)

    def landed(
        self, blocks: Sequence[int], owner: int, sources: Sequence[int], tensors: range | None = None
    ) -> list[BlockStamp]:
        """A transfer of ``sources[i]`` to ``blocks[i]`` succeeded: look at every byte.

        Returns:
            The stamp of each block, as it is in the first of the tensors.

        Raises:
            MisplacedError: a block is not whole, is another one's, or its tensors are of different versions; or blocks are of
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
        """A transfer into these blocks ended without success: whatever they hold stays from now on."""
        for place in self._places(blocks, tensors):
            self._expect(place, zlib.crc32(self.piece(*place)))

    def reclaim(self, blocks: Iterable[int], tensors: range | None = None) -> None:
        """These blocks are their caller's again, whatever became of a transfer into them: write them over, each time with
        another content, and from then on no byte changes."""
        self._reclaims += 1
        for place in self._places(blocks, tensors):
            tensor, block = place
            self._write(place, BlockStamp(self._owner, RECLAIMED, tensor, block, self._reclaims))
            self._reclaimed[place] = None

    def strays(self, blocks: Iterable[int] | None = None) -> list[str]:
        """Reclaimed blocks into which something was written, in words."""
        places = self._reclaimed if blocks is None else self._places(blocks, None)
        return self._told(place for place in places if place in self._reclaimed)

    def settle_open(self) -> None:
        """The same of all blocks that are open: nothing is under way, and no byte changes."""
        for place in self._places(self.blocks, None):
            if place not in self._expected:
                self._expect(place, zlib.crc32(self.piece(*place)))

    def wrong(self, blocks: Iterable[int] | None = None) -> list[str]:
        """Blocks that do not hold what they have to, in words. Open ones are left out."""
        return self._told(self._places(self.blocks if blocks is None else blocks, None))

    def _told(self, places: Iterable[tuple[int, int]]) -> list[str]:
        found = []
        for place in places:
            expected = self._expected.get(place)
            if expected is not None and (words := self._unlike(place, expected)):
                given_back = "it was given back, and written into: " if place in self._reclaimed else ""
                found.append(f"block {place[1]} of tensor {place[0]}: {given_back}{words}")
        return found

    def _unlike(self, place: tuple[int, int], expected: Expected) -> str:
        piece = self.piece(*place)
        self.checked += len(piece)
        if isinstance(expected, int):
            return "" if zlib.crc32(piece) == expected else f"it was settled, and has changed: it {_pieces(piece)}"
        return "" if bytes(piece) == expected.content(len(piece)) else f"expected {expected}, but it {_pieces(piece)}"

    def _places(self, blocks: Iterable[int], tensors: range | None) -> Iterable[tuple[int, int]]:
        return ((tensor, block) for block in blocks for tensor in (self.tensors if tensors is None else tensors))


def _pieces(piece: memoryview) -> str:
    """What a block holds that is not whole: runs of units of the same stamp."""
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
