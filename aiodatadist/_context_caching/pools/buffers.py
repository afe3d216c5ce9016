"""Memory of the process's heap for values on their way, reused for values of the same size.

Fresh memory costs half as much as a transfer within one machine, because the kernel clears every page on first touch.
Memory that an abandoned call may still be reading is not reused; it is freed with its last reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from aiodatadist._concurrency.byte_budget import ByteBudget
from aiodatadist._context_caching.pools.turns import Turns

HEAD: Final = 256
BEHIND: Final = 16
"""Bytes in front of a value and behind it for the command around it, so that both are sent in one piece."""
TAIL: Final = 2
"""Bytes behind a value that are received with it: its end of line."""


class Buffer:
    """Memory for one value.

    Attributes:
        address, nbytes: its place and length.
        is_idle: True if only its user knows the memory, so that it can be reused. A sender sets it to False meanwhile.
    """

    def __init__(self, buffers: Buffers, memory: Any, nbytes: int) -> None:
        self._buffers: Buffers | None = buffers
        self._memory = memory
        self.address = ctypes.addressof(memory) + HEAD
        self.nbytes = nbytes
        self.is_idle = True

    def view(self) -> memoryview:
        """Return the bytes, writable. Raises ValueError if the buffer was released."""
        return self._from(0, self.nbytes)

    def with_tail(self) -> memoryview:
        """Return the bytes, and those of the end of line behind them."""
        return self._from(0, self.nbytes + TAIL)

    def framed(self, head: bytes, tail: bytes) -> memoryview | None:
        """Return head, value and tail in one piece, or None if there is no room for head or tail."""
        if len(head) > HEAD or len(tail) > BEHIND:
            return None
        whole = self._from(-len(head), self.nbytes + len(tail))
        whole[: len(head)], whole[len(head) + self.nbytes :] = head, tail
        return whole

    def _from(self, start: int, end: int) -> memoryview:
        if self._buffers is None:
            raise ValueError("this memory was put or released")
        return memoryview(self._memory).cast("B")[HEAD + start : HEAD + end]

    def release(self) -> None:
        """Release it. A second call has no effect."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            memory, self._memory = self._memory, None
            buffers.give(memory, self.nbytes, again=self.is_idle)


class Buffers:
    """Memory for at most ``capacity`` bytes of values, lent and kept together. Each costs 272 bytes of overhead."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._budget = ByteBudget(capacity)
        self._turns = Turns()
        self._kept: dict[int, list[Any]] = {}  # by size; no list is empty
        self._kept_bytes = 0

    async def lend(self, sizes: Sequence[int]) -> list[Buffer]:
        """Wait until all of them are available; return them. If cancelled, none is lent.

        Raises:
            ValueError: if they have more than ``capacity`` bytes together.
            MemoryError: if the process has no more memory, whatever ``capacity`` is. None is lent.
        """
        nbytes = sum(sizes)
        if nbytes > self.capacity:
            raise ValueError(f"{nbytes} bytes are wanted: there are only {self.capacity}")
        await self._budget.take(nbytes)
        lent: list[Buffer] = []
        try:
            await self._turns.make(lambda size: Buffer(self, self._memory(size), size), sizes, lent, at_once=1)
        except BaseException:
            self._budget.give(sum(sizes[len(lent) :]))
            for buffer in lent:
                buffer.release()
            raise
        self._trim()
        return lent

    def _memory(self, nbytes: int) -> Any:
        return self._take(nbytes) if nbytes in self._kept else (ctypes.c_char * (HEAD + nbytes + BEHIND))()

    def _take(self, nbytes: int) -> Any:
        """Return a kept buffer of this size."""
        kept = self._kept[nbytes]
        memory = kept.pop()
        if not kept:
            del self._kept[nbytes]
        self._kept_bytes -= nbytes
        return memory

    def give(self, memory: Any, nbytes: int, *, again: bool) -> None:
        """Take a buffer back, for reuse if ``again``."""
        if again:
            self._kept.setdefault(nbytes, []).append(memory)
            self._kept_bytes += nbytes
        self._budget.give(nbytes)
        self._trim()

    def _trim(self) -> None:
        """Free kept memory, the sizes unused for longest first, until lent and kept memory fit."""
        while self._kept_bytes > self._budget.free:
            self._take(next(iter(self._kept)))
