"""A small transfer that is repeated, each time with other blocks: one call of C, which usually completes it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from aiodatadist._concurrency.completion import TransferCompletion, TransferReport, TransferState
from aiodatadist._concurrency.loop_time import LoopTime
from aiodatadist._device.program import Program
from aiodatadist._device.stream import Stream, StreamTransfer
from aiodatadist._native.library import ffi, ring

MOST_BLOCKS: Final = 4096
"""The largest number of blocks that C accepts in one call. For more, the long way costs no more."""
FEW_BLOCKS: Final = 256
"""Calls with at most this number of blocks find everything prepared."""

_LISTS: Final = frozenset({list, tuple, range})
"""Types whose numbers are read one by one. All others must be buffers: an ``array.array`` or a numpy array, for instance."""
_NATIVE: Final = frozenset("lqLQ")
"""Formats of integers of 64 bits, as C reads them."""
_SHORTER: Final = frozenset("hHiI")

_read = struct.Struct("=i20xQQ8xqqq").unpack_from
"""Reads state, bytes, ranges, and the three times of a completion in one call, where each field would be one."""
_STATE_AT: Final = ffi.offsetof("ring_blocks", "ran", "state")
_new = tuple.__new__


def _packer(count: int) -> Callable[..., bytes]:
    """Return a function that returns this number of integers as C reads them.

    It raises struct.error if one of them is not an integer of 64 bits.
    """
    return struct.Struct(f"={count}Q").pack


_one_side: Final = [_packer(count) for count in range(2 * FEW_BLOCKS + 1)]
_packers: Final = _one_side[::2]
_packer_of_many = lru_cache(maxsize=256)(_packer)


def packed(local: Any, remote: Any) -> tuple[bytes, int] | None:
    """Return the numbers of blocks at either side as C reads them, and how many blocks each side has.

    Return None if they are too many, none, or not numbers of blocks in lists or buffers that this can read. Numbers may be
    objects that run their caller's code, which may begin another transfer: whatever that could change must be looked at
    afterwards.
    """
    if type(local) not in _LISTS or type(remote) not in _LISTS:
        return _joined(local, remote)
    count = len(local)
    if not 0 < count <= MOST_BLOCKS or count != len(remote):
        return None
    try:
        return (_packers[count] if count <= FEW_BLOCKS else _packer_of_many(2 * count))(*local, *remote), count
    except struct.error:
        return None


def _joined(local: Any, remote: Any) -> tuple[bytes, int] | None:
    """Do the same if one of the two is a buffer. A number below 0 becomes one that no cache has."""
    mine, theirs = _read_numbers(local), _read_numbers(remote)
    count = len(mine) // 8
    if not mine or len(mine) != len(theirs) or count > MOST_BLOCKS:
        return None
    return mine + theirs, count


def _read_numbers(values: Any) -> bytes:
    """Return the numbers of one side, or nothing."""
    if type(values) not in _LISTS:
        try:
            view = memoryview(values)
        except (TypeError, ValueError, BufferError):
            return b""
        if view.ndim != 1 or view.nbytes > 8 * MOST_BLOCKS:
            return b""
        if view.format in _NATIVE:
            return view.tobytes()
        values = view.tolist() if view.format in _SHORTER else ()
    if len(values) > MOST_BLOCKS:
        return b""
    try:
        return (_one_side[count] if (count := len(values)) <= FEW_BLOCKS else _packer_of_many(count))(*values)
    except struct.error:
        return b""


class BlockRun:
    """A repeated transfer of blocks on a stream. It reuses what C reads.

    It runs only on the event loop, and cannot be used again after a run that did not succeed at once.

    Args:
        program: has one step, whose blocks are replaced.
        local, remote: the number of blocks that there are at either side.
    """

    __slots__ = (
        "_blocks",
        "_is_spent",
        "_loop_time",
        "_memory",
        "_numbers",
        "_room",
        "_run",
        "_stream",
        "_timeout_ms",
        "program",
    )

    def __init__(self, stream: Stream, program: Program, local: int, remote: int, timeout_ms: int) -> None:
        steps, _ = program.assemble()
        numbers, blocks = ffi.new("uint64_t[]", 2 * FEW_BLOCKS), ffi.new("ring_blocks *")
        blocks.on, blocks.step, blocks.numbers = stream.ring, steps, numbers
        blocks.local_limit, blocks.remote_limit = local, remote
        blocks.id, blocks.timeout_ms = stream.new_number(), timeout_ms
        program.keep(numbers, blocks)
        self.program: Program = program
        self._blocks = blocks
        self._is_spent = False
        self._loop_time = stream.loop_time
        self._memory = ffi.buffer(blocks)
        self._numbers = ffi.buffer(numbers)
        self._room = FEW_BLOCKS
        self._run = ring.ring_run_blocks
        self._stream = stream
        self._timeout_ms = timeout_ms

    def run(self, numbers: bytes, count: int) -> TransferReport | StreamTransfer | None:
        """Run it with ``count`` blocks at either side, whose numbers :func:`packed` has returned.

        Returns:
            The report of a success; or a transfer that is under way or has failed; or None if nothing was done, because
                it cannot run at once, or there are no such blocks.
        """
        if self._is_spent or not self._stream.may_run_at_once:
            return None
        if count > self._room:
            self._grow(count)
        # a copy, because C reads it later if it queues the program
        self._numbers[: len(numbers)] = numbers
        status = self._run(self._blocks, count)
        if status != ring.RING_RAN:
            return self._take_up(False) if status == ring.RING_QUEUED else None
        state, nbytes, ranges, submitted, started, finished = _read(self._memory, _STATE_AT)
        if finished > self._loop_time.limit:
            self._loop_time.passed(submitted, finished)
        if state:
            return self._take_up(True)
        return _new(TransferReport, (nbytes, ranges, (started - submitted) / 1e9, (finished - started) / 1e9))

    def _grow(self, count: int) -> None:
        """Make room for twice this number of blocks, or as many as there can be."""
        self._room = min(2 * count, MOST_BLOCKS)
        numbers = ffi.new("uint64_t[]", 2 * self._room)
        self._blocks.numbers, self._numbers = numbers, ffi.buffer(numbers)
        self.program.keep(numbers)

    def _take_up(self, has_ended: bool) -> StreamTransfer:
        """Return the transfer. From now on this cannot run again, because C may still read everything that it has."""
        self._is_spent = True
        ran = self._blocks.ran if has_ended else None
        return self._stream.take_up(self.program, self._blocks.id, self._timeout_ms, ran)


class RanAtOnce(TransferCompletion):
    """A program that had ended before its caller had it."""

    __slots__ = ("_loop_time",)

    def __init__(self, report: TransferReport, loop_time: LoopTime) -> None:
        self.state = TransferState.DONE  # instead of the base's __init__: no task waits for it
        self.error = None
        self.nbytes, self.ranges, self.queue_seconds, self.transfer_seconds = report
        self._loop_time = loop_time

    def _holds_loop(self) -> bool:
        return self._loop_time.is_over

    @property
    def quiesce_seconds(self) -> float:
        return 0.0

    def _cancel(self) -> bool:
        return False

    def _let_go(self) -> None:
        """Have no effect, because it kept nothing."""

    def _what(self) -> str:
        return "Transfer"
