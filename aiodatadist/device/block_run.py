"""A small transfer that is made again and again, each time of other blocks: one call of C, which mostly ends it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final

from aiodatadist._native.library import ffi, ring
from aiodatadist.concurrency.completion import TransferCompletion, TransferReport, TransferState
from aiodatadist.concurrency.loop_time import LoopTime
from aiodatadist.device.program import Program
from aiodatadist.device.stream import Stream, StreamTransfer

MOST_BLOCKS: Final = 256
"""Of a transfer; what has more is no dearer the long way."""

_read = struct.Struct("=i20xQQ8xqqq").unpack_from
"""State, bytes, ranges, and the three times of a completion, from its state on, in one call; each field would be one."""
_STATE_AT: Final = ffi.offsetof("ring_blocks", "ran", "state")
_new = tuple.__new__


def _packer(count: int) -> Callable[..., None]:
    """Writes so many numbers as C reads them. Raises struct.error: one of them is no integer, or none of 64 bits."""
    return struct.Struct(f"={count}Q").pack_into


_packers: Final = [_packer(2 * count) for count in range(MOST_BLOCKS + 1)]


class BlockRun:
    """Belongs to a stream, and reuses what C reads: it runs on the event loop alone, and once it did not succeed it is spent.

    Args:
        program: has one step, of one block.
        local, remote: how many blocks there are at either side.
    """

    __slots__ = (
        "_blocks",
        "_is_spent",
        "_loop_time",
        "_memory",
        "_numbers",
        "_run",
        "_stream",
        "_timeout_ms",
        "program",
    )

    def __init__(self, stream: Stream, program: Program, local: int, remote: int, timeout_ms: int) -> None:
        steps, _ = program.assemble()
        numbers, blocks = ffi.new("uint64_t[]", 2 * MOST_BLOCKS), ffi.new("ring_blocks *")
        blocks.on, blocks.step, blocks.numbers = stream.ring, steps, numbers
        blocks.local_limit, blocks.remote_limit = local, remote
        blocks.id, blocks.timeout_ms = stream.new_number(), timeout_ms
        program.keep(numbers, blocks)
        self.program = program
        self._blocks = blocks
        self._is_spent = False
        self._loop_time = stream.loop_time
        self._memory = ffi.buffer(blocks)
        self._numbers = ffi.buffer(numbers)
        self._run = ring.ring_run_blocks
        self._stream = stream
        self._timeout_ms = timeout_ms

    def run(self, local: Sequence[int], remote: Sequence[int], count: int) -> TransferReport | StreamTransfer | None:
        """Run it with these ``count`` blocks at either side.

        Returns:
            What it did; or a transfer under way, or one that failed; or None: it cannot run at once, or there are no such
            blocks, and nothing was done.
        """
        if self._is_spent or count > MOST_BLOCKS or not self._stream.may_run_at_once:
            return None
        try:
            _packers[count](self._numbers, 0, *local, *remote)
        except struct.error:
            return None
        status = self._run(self._blocks, count)
        if status != ring.RING_RAN:
            return self._take_up(False) if status == ring.RING_QUEUED else None
        state, nbytes, ranges, submitted, started, finished = _read(self._memory, _STATE_AT)
        if finished > self._loop_time.limit:
            self._loop_time.passed(submitted, finished)
        if state:
            return self._take_up(True)
        return _new(TransferReport, (nbytes, ranges, (started - submitted) / 1e9, (finished - started) / 1e9))

    def _take_up(self, has_ended: bool) -> StreamTransfer:
        """C may still read everything that this has."""
        self._is_spent = True
        ran = self._blocks.ran if has_ended else None
        return self._stream.take_up(self.program, self._blocks.id, self._timeout_ms, ran)


class RanAtOnce(TransferCompletion):
    """A program that was over before its caller had it."""

    __slots__ = ("_loop_time",)

    def __init__(self, report: TransferReport, loop_time: LoopTime) -> None:
        self.state = TransferState.DONE  # and not the base's: no task waits for it
        self.error = None
        self.nbytes, self.ranges, self.queue_seconds, self.transfer_seconds = report
        self._loop_time = loop_time

    def holds_loop(self) -> bool:
        return self._loop_time.is_over

    @property
    def quiesce_seconds(self) -> float:
        return 0.0

    def _cancel(self) -> bool:
        return False

    def _let_go(self) -> None:
        """It kept nothing."""

    def _what(self) -> str:
        return "Transfer"
