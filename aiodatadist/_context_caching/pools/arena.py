"""Memory that an engine may write to at any time: one registered buffer, lent in pieces."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any, Final

from aiodatadist._cache.pool import PagePool, PoolConfig
from aiodatadist._concurrency.fair_queue import FairQueue
from aiodatadist._context_caching.pools.lending import fitting
from aiodatadist.errors import OutOfMemory

PAGE_SHIFT: Final = 12


class Piece:
    """Memory for one value.

    Attributes:
        address, nbytes: its place and length.
    """

    def __init__(self, arena: Arena, address: int, nbytes: int) -> None:
        self._arena: Arena | None = arena
        self.address = address
        self.nbytes = nbytes

    def view(self) -> memoryview:
        """Return the bytes, writable. Raises ValueError if the piece was released."""
        if self._arena is None:
            raise ValueError("this memory was put or released")
        return self._arena.view(self.address, self.nbytes)

    def release(self) -> None:
        """Release it. A second call has no effect."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.free(self.address)

    def taken(self, arena: Arena) -> Piece:
        """Return the same memory under another owner. For its present owner it counts as released.

        Raises:
            ValueError: if it was released before, or belongs to another pool.
        """
        if self._arena is not arena:
            raise ValueError("this stage is of another pool, or was put or released before")
        self._arena = None
        return Piece(arena, self.address, self.nbytes)


class Arena:
    """Anonymous memory of a fixed size. Pages that were never lent cost nothing.

    Attributes:
        address, nbytes: the whole memory.
        scratch: address of the first page, which is never lent: a read that only tests if a value can be read goes
            there.
    """

    def __init__(self, nbytes: int) -> None:
        config = PoolConfig(memory_size=nbytes, page_shift=PAGE_SHIFT)
        self._memory = mmap.mmap(-1, nbytes)
        self._start: Any = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._start)
        self.nbytes = nbytes
        self._pages = PagePool("Mooncake stages", self.address, config)
        self.scratch = self._pages.allocate(1)
        self._line = FairQueue()

    @property
    def room(self) -> int:
        """Bytes that it lends."""
        return self.nbytes - (1 << PAGE_SHIFT)

    def fitting(self, sizes: Sequence[int]) -> list[bool]:
        """Return for each size True if it would fit, beside those before it, into the empty arena."""
        return fitting(sizes, self.room, self.room, 1 << PAGE_SHIFT)

    async def lend(self, sizes: Sequence[int]) -> list[Piece]:
        """Wait until all of them are available; return them. If cancelled, none is lent."""

        def attempt() -> list[Piece] | None:
            pieces: list[Piece] = []
            try:
                for size in sizes:
                    pieces.append(Piece(self, self._pages.allocate(size), size))
            except OutOfMemory:
                for piece in pieces:
                    self._pages.free(piece.address)
                return None
            return pieces

        return await self._line.take(attempt)

    def view(self, address: int, nbytes: int) -> memoryview:
        """Return the bytes of a range, writable."""
        at = address - self.address
        return memoryview(self._memory)[at : at + nbytes]

    def free(self, address: int) -> None:
        """Take a range back."""
        self._pages.free(address)
        self._line.call()
