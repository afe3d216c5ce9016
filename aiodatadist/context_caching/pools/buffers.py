"""Memory of the process's own heap for values on their way. What was used is used again for a value of the same size.

Fresh memory costs half as much as a transfer on one machine: the kernel clears every page when it is first touched. But what
an abandoned call may still be reading is not used again; it goes with its last reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from aiodatadist.concurrency.byte_budget import ByteBudget
from aiodatadist.context_caching.pools.turns import Turns

HEAD: Final = 256
BEHIND: Final = 16
"""Bytes in front of a value and behind it, for what is sent around it: so it leaves in one piece."""
TAIL: Final = 2
"""Bytes behind a value that come in with it: its end of line."""


class Buffer:
    """Memory for one value.

    Attributes:
        address, nbytes: where it is, and how long.
        is_idle: nothing but its user knows it, so that it can be used again. What sends from it says when that is not so.
    """

    def __init__(self, buffers: Buffers, memory: Any, nbytes: int) -> None:
        self._buffers: Buffers | None = buffers
        self._memory = memory
        self.address = ctypes.addressof(memory) + HEAD
        self.nbytes = nbytes
        self.is_idle = True

    def view(self) -> memoryview:
        """The bytes, writable. Raises ValueError: it was given back."""
        return self._from(0, self.nbytes)

    def with_tail(self) -> memoryview:
        """The bytes and those behind them."""
        return self._from(0, self.nbytes + TAIL)

    def framed(self, head: bytes, tail: bytes) -> memoryview | None:
        """The bytes between these others, all in one piece; None: they have no room."""
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
        """Give it back; a second call does nothing."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            memory, self._memory = self._memory, None
            buffers.give(memory, self.nbytes, again=self.is_idle)


class Buffers:
    """As many bytes of values as ``capacity``, lent and kept together, and no more; each takes 272 bytes beside its own."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._budget = ByteBudget(capacity)
        self._turns = Turns()
        self._kept: dict[int, list[Any]] = {}  # by size; no list is empty
        self._kept_bytes = 0

    async def lend(self, sizes: Sequence[int]) -> list[Buffer]:
        """All of them, when they are to be had. Cancelled: none.

        Raises:
            ValueError: they are more than ``capacity``.
            MemoryError: the process has no more, whatever ``capacity`` says. None is lent.
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
        """Some of what is kept of this size."""
        kept = self._kept[nbytes]
        memory = kept.pop()
        if not kept:
            del self._kept[nbytes]
        self._kept_bytes -= nbytes
        return memory

    def give(self, memory: Any, nbytes: int, *, again: bool) -> None:
        if again:
            self._kept.setdefault(nbytes, []).append(memory)
            self._kept_bytes += nbytes
        self._budget.give(nbytes)
        self._trim()

    def _trim(self) -> None:
        """Memory of sizes that were not asked for lately makes room for others."""
        while self._kept_bytes > self._budget.free:
            self._take(next(iter(self._kept)))
