"""Streams, which are executors, and the transfers on them, which are futures."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from aiodatadist._concurrency import forks
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._concurrency.completion import TransferCompletion, TransferState
from aiodatadist._concurrency.loop_time import LoopTime, loop_time
from aiodatadist._concurrency.threads import DaemonThread
from aiodatadist._device.program import Program
from aiodatadist._device.ring_calls import DEVICE_RING, RingCalls, StreamLimits
from aiodatadist._native.library import Handle, ffi, ring
from aiodatadist._native.runtime import completion_error
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist.errors import DeviceError, ForkError, InternalError, LLMException, ParamInvalid, StuckError

logger = logging.getLogger(__name__)

STATES = {
    ring.RING_DONE: TransferState.DONE, ring.RING_FAILED: TransferState.FAILED,
    ring.RING_TIMED_OUT: TransferState.FAILED, ring.RING_CANCELLED: TransferState.CANCELLED,
    ring.RING_STUCK: TransferState.STUCK, ring.RING_REFUSED: TransferState.FAILED,
}  # fmt: skip


WITHOUT_LIMIT = -1
"""A limit in milliseconds with which closing a ring waits for what is stuck, too."""

CLEAN_SECONDS = 60.0
"""Seconds that the owner of a communicator has to remove the requests that a transfer left in it."""

_stuck: dict[Stream, list[StreamTransfer]] = {}
"""Transfers, by stream, whose memory the device has not let go of. What C reads for them must live until then."""


Clean = Callable[["StreamTransfer", LLMException | None, Callable[[], None]], object]
"""Removes the requests that a failed transfer left in its communicator, then calls the function, which ends the transfer."""


class StreamTransfer(TransferCompletion):
    """A program under way on a stream.

    Dropping it leaks nothing: the stream holds it, and what it uses, until the device has let go.

    Attributes:
        is_failing: True if it did not succeed, and ends once the requests that it left in its communicator have been
            removed.
        priority: its rank among the stream's programs.
        shut_gate: the layer, counted from its first, whose gate stayed shut until the time was over; None if that was
            not the reason.
    """

    __slots__ = (
        "_asked_ns",
        "_clean",
        "_id",
        "_program",
        "_stream",
        "_timeout_ms",
        "_watcher",
        "is_failing",
        "priority",
        "shut_gate",
    )

    def __init__(
        self,
        stream: Stream,
        number: int,
        program: Program,
        clean: Clean | None,
        timeout_ms: int = 0,
        priority: TransferPriority = TransferPriority.NORMAL,
    ) -> None:
        super().__init__()
        self._watcher: Callable[[int], object] | None = None
        self._clean = clean
        self.is_failing: bool = False
        self.priority: TransferPriority = priority
        self.shut_gate: int | None = None
        self._stream = stream
        self._id = number
        self._program: Program | None = program
        self._timeout_ms = timeout_ms
        self._asked_ns = 0

    @property
    def quiesce_seconds(self) -> float:
        return self._stream.limits.quiesce + (0.0 if self._clean is None else CLEAN_SECONDS)

    def _holds_loop(self) -> bool:
        return self._stream.loop_time.is_over

    def _cancel(self) -> bool:
        return self._stream._cancel(self)

    @property
    def is_waiting(self) -> bool:
        """True if it has not been handed to C so far."""
        return not self.is_done and not self.is_failing and self._id not in self._stream._pending

    def fail(self, error: LLMException) -> None:
        """Fail a transfer that waits and cannot be carried out."""
        self._end_waiting(TransferState.FAILED, error)

    def _end_waiting(self, state: TransferState, error: LLMException | None) -> None:
        """End a transfer that was not handed to C."""
        if self._asked_ns and not self.is_done:
            self.queue_seconds: float = (time.monotonic_ns() - self._asked_ns) / 1e9
        self._finish(state, error)

    def stick(self, error: LLMException) -> None:
        """End it as stuck, because it is not known when the device lets go of its memory."""
        self._finish(TransferState.STUCK, error)

    def watch(self, watcher: Callable[[int], object]) -> int:
        """Call ``watcher`` on the loop from now on with the number of landed layers, whenever that grows before the end.

        Returns the number so far. Without a watcher the loop is not woken before the end.
        """
        self._watcher = watcher
        return self._stream._watch(self)

    def _pass(self, layers: int) -> None:
        if self._watcher is not None:
            self._watcher(layers)

    def _complete(self, completion: Any) -> None:
        """Take over the results from C's completion."""
        self.nbytes: int = completion.bytes
        self.ranges: int = completion.ranges
        asked, aside = self._asked_ns or completion.submitted_ns, completion.aside_ns
        self.queue_seconds = (completion.started_ns - asked + aside) / 1e9
        self.transfer_seconds: float = (completion.finished_ns - completion.started_ns - aside) / 1e9
        state = STATES[completion.state]
        if completion.gate and completion.state == ring.RING_TIMED_OUT:
            self.shut_gate = completion.gate - 1
        told = completion.state not in {ring.RING_DONE, ring.RING_CANCELLED}
        error = completion_error(completion) if told else None
        if completion.unclean and self._clean is not None and state is not TransferState.STUCK:
            self.is_failing = True
            self._clean(self, error, partial(self._finish, state, error))
        else:
            self._finish(state, error)

    def _let_go(self) -> None:
        if self.state is TransferState.STUCK:
            _stuck.setdefault(self._stream, []).append(self)
        else:
            self._drop_program()

    def _drop_program(self) -> None:
        """Drop what the device has let go of; from any thread."""
        if self._program is not None:
            self._program.use = None
            self._program = None

    def _what(self) -> str:
        return f"Transfer {self._id} on {self._stream.name}"


class Stream:
    """A queue of work for a device, or for the connections to a peer. It belongs to the event loop on which it is opened.

    Args:
        ring: the new handle in C, which belongs to the stream from here on.
        calls: the calls for such a handle.

    Attributes:
        calls: as above.
        ring: the handle; None once it has been released.
    """

    def __init__(self, name: str, limits: StreamLimits, ring: Handle, calls: RingCalls = DEVICE_RING) -> None:
        self.name = name
        self.limits = limits
        self.calls: RingCalls = calls
        self._loop = asyncio.get_running_loop()
        self.loop_time: LoopTime = loop_time(self._loop)
        self._numbers = itertools.count(1)
        self._pending: dict[int, StreamTransfer] = {}
        self._backlog: tuple[deque[StreamTransfer], ...] = tuple(map(deque, [()] * len(TransferPriority)))
        self._waiting = 0
        self._ran = ffi.new("ring_completion *")
        self._left = ffi.new("int64_t *")
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._reaped = ffi.new("ring_completion *")
        self.ring: Handle | None = ring
        self._closed = False
        self._holds = 0
        self._pid = os.getpid()
        self._loop.add_reader(calls.fd(ring), self._drain)

    @property
    def is_idle(self) -> bool:
        return not self._pending and not self._waiting

    def hold(self) -> None:
        """Keep waiting programs from starting until the same number of :meth:`go_on`. A serial stream starts nothing then."""
        self._holds += 1

    def go_on(self) -> None:
        """Undo one :meth:`hold`."""
        self._holds -= 1
        self._start_waiting()

    def submit(
        self,
        program: Program,
        timeout: float,
        clean: Clean | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
    ) -> StreamTransfer:
        """Start a program. Its time limit, in seconds, counts from when it begins to run, but not while others pass it.

        Args:
            clean: called instead of ending the transfer if requests of it may be left in a communicator. Only the
                communicator's owner knows if they matter.
            priority: it passes less urgent programs, also between two windows of one that runs. A program that waits
                for a gate or an event must have a stream without more urgent work, which could not pass it.

        Raises:
            ParamInvalid: if a step makes no sense, or the stream is closed.
        """
        if self._pid != os.getpid():
            raise ForkError(f"this stream was opened {forks.since(self._pid)}", hint="start processes with spawn")
        if self._closed:
            raise ParamInvalid(f"{self.name} is closed")
        timeout_ms = max(1, round(timeout * 1000))
        transfer = StreamTransfer(self, next(self._numbers), program, clean, timeout_ms, priority)
        # behind those that wait: transfers of one priority run in the order of their submission
        if self._holds or self._backlog[priority]:
            self._put_back(transfer, last=True)
        else:
            self._start(transfer)
        return transfer

    @property
    def may_run_at_once(self) -> bool:
        """True if nothing is under way, and nothing waits."""
        return not (self._pending or self._waiting or self._holds or self._closed)

    def new_number(self) -> int:
        """Return a number for a program of this stream."""
        return next(self._numbers)

    def take_up(self, program: Program, number: int, timeout_ms: int, ran: Handle | None) -> StreamTransfer:
        """Return the transfer of a :class:`BlockRun` that did not succeed at once.

        It has ended with ``ran``, or is under way if that is None.
        """
        transfer = StreamTransfer(self, number, program, None)
        if ran is not None:
            transfer._complete(ran)
        else:
            self._pending[number] = transfer
            self._look_within(timeout_ms / 1000 + 2 * self.limits.grace)
        return transfer

    def _start(self, transfer: StreamTransfer) -> bool:
        """Hand a transfer to C; return False if it must wait in the backlog, because C is full."""
        program, timeout_ms, priority = transfer._program, transfer._timeout_ms, transfer.priority
        if program is None:
            raise InternalError(f"{transfer!r} was started twice")
        if self.limits.is_serial and any(pending.priority is priority for pending in self._pending.values()):
            self._put_back(transfer)
            return False
        steps, count = program.assemble()
        status = self.calls.submit_as(self.ring, priority, transfer._id, steps, count, timeout_ms, self._ran)
        if status == ring.RING_RAN:
            ran = self._ran
            if ran.finished_ns > self.loop_time.limit:
                self.loop_time.passed(ran.submitted_ns, ran.finished_ns)
            transfer._complete(ran)
        elif status == ring.RING_QUEUED:
            self._pending[transfer._id] = transfer
            self._look_within(timeout_ms / 1000 + 2 * self.limits.grace)
            # The watcher may have come while the transfer was in the backlog.
            if transfer._watcher is not None and (landed := self._watch(transfer)):
                transfer._pass(landed)
        elif status == ring.RING_FULL:
            self._put_back(transfer)
            return False
        elif status == ring.RING_CLOSED:
            raise ParamInvalid(f"{self.name} is closed")
        elif status == ring.RING_NO_THREAD:
            raise DeviceError(
                f"{self.name}: no thread can be started", hint="a limit of processes or memory is reached"
            )
        else:
            raise ParamInvalid(f"{self.name} refused the program: status {status} of ring_submit")
        return True

    def _put_back(self, transfer: StreamTransfer, *, last: bool = False) -> None:
        """Let it wait in Python: as the first of its priority, or as the last."""
        transfer._asked_ns = transfer._asked_ns or time.monotonic_ns()
        backlog = self._backlog[transfer.priority]
        self._waiting += 1
        if last:
            backlog.append(transfer)
        else:
            backlog.appendleft(transfer)

    def _cancel(self, transfer: StreamTransfer) -> bool:
        if transfer._id in self._pending:
            self._look_within(self.limits.patience + 2 * self.limits.grace)
            return bool(self.calls.cancel(self.ring, transfer._id))
        if transfer.is_failing:
            return True
        transfer._end_waiting(TransferState.CANCELLED, None)  # its backlog skips it when its turn comes
        return True

    def _watch(self, transfer: StreamTransfer) -> int:
        if transfer._id not in self._pending:
            return 0
        return int(self.calls.watch(self.ring, transfer._id))

    def _drain(self) -> None:
        """Take all completions, end their transfers, and start what waits. Called when the eventfd is readable.

        It takes one at a time: what a callback submits must not end before those that C has still to report.
        """
        completion = self._reaped
        while self.calls.reap(self.ring, completion, 1):
            if completion.state == ring.RING_UNDER_WAY:
                if (transfer := self._pending.get(completion.id)) is not None:
                    transfer._pass(completion.step)
            # A transfer that is no longer pending was overdue, and has ended as stuck.
            elif (transfer := self._pending.pop(completion.id, None)) is not None:
                if completion.state == ring.RING_GIVEN_BACK:
                    transfer._asked_ns = transfer._asked_ns or completion.submitted_ns
                    transfer.nbytes, transfer.ranges = completion.bytes, completion.ranges
                    self._put_back(transfer)
                else:
                    transfer._complete(completion)
        self._start_waiting()
        if self._pending and not self._closed:
            self._look()

    def _take_waiting(self) -> StreamTransfer:
        """Take the most urgent transfer off its backlog."""
        self._waiting -= 1
        return next(backlog for backlog in self._backlog if backlog).popleft()

    def _start_waiting(self) -> None:
        """Hand C what it accepts of each priority: C knows the order, in which less urgent work has its turn, too."""
        for backlog in self._backlog:
            while backlog and not self._closed and not self._holds:
                self._waiting -= 1
                if not self._start_or_end(backlog.popleft()):
                    break

    def _start_or_end(self, transfer: StreamTransfer) -> bool:
        """Start a transfer that waited, unless it has ended in the meantime; return False if it continues to wait.

        A late one is ended by its deadline instead, which ends a few at a time so that the loop is not held up.
        """
        if transfer.is_done or transfer.late_after:
            return True
        try:
            return self._start(transfer)
        except LLMException as error:
            transfer.fail(error)
            return True

    def _look_within(self, seconds: float) -> None:
        """Look for an overdue program at most this number of seconds from now.

        A stream that closes has one limit for all of them instead.
        """
        when = self._loop.time() + seconds
        if when < self._alarm_at and not self._closed:
            self._silence()
            self._alarm_at = when
            self._alarm = self._loop.call_at(when, self._wake)

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, math.inf

    def _wake(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        self._look()

    def _look(self) -> None:
        """End a program whose call of the vendor's library does not return, as stuck, and those behind it as not begun.

        Such a call holds the worker, and nothing says when the device lets go of the memory.
        """
        number = self.calls.overdue(self.ring, self._left)
        if (transfer := self._pending.pop(number, None)) is not None:
            transfer.stick(StuckError("a call of the device's library has not returned in time"))
        elif self._left[0] >= 0:
            self._look_within(self._left[0] / 1000)

    async def aclose(self) -> None:
        """Cancel what is left, wait until the device has let go, and release the stream. May be called twice.

        Raises:
            StuckError: if the device did not let go in time. The stream is closed all the same, and its transfers are
                stuck. A thread waits until the device lets go, and then drops what their programs use.
        """
        if self._closed:
            return
        self._closed = True
        # after the stream counts as closed: callbacks of these transfers can submit nothing more
        self._cancel_waiting()
        self._silence()
        # A thread closes the ring. The loop must not reap it meanwhile: what is left is taken at the end.
        self._loop.remove_reader(self.calls.fd(self.ring))
        wait_ms = round(1000 * self.limits.quiesce)
        answers: list[int] = []
        try:
            await in_thread(lambda: answers.append(self.calls.close(self.ring, wait_ms)), gives_back=True)
        finally:  # also when cancelled: the call has ended by then, too
            self._settle_all()
            if answers == [0]:
                self._free()
            else:
                self._leave_to_thread()
        if answers != [0]:
            raise StuckError(f"{self.name}: the device does not let go of a transfer's memory")

    def _free(self) -> None:
        self.calls.free(self.ring)
        self.ring = None
        for transfer in _stuck.pop(self, []):
            transfer._drop_program()

    def _leave_to_thread(self) -> None:
        """Wait in a thread until the device has let go. If no thread can be started, that is never known."""

        def wait() -> None:
            if self.calls.close(self.ring, WITHOUT_LIMIT) == 0:
                self._free()

        with suppress(RuntimeError):
            DaemonThread(wait, "aiodatadist stuck").start()

    def _cancel_waiting(self) -> None:
        while self._waiting:
            self._take_waiting()._end_waiting(TransferState.CANCELLED, None)

    def _settle_all(self) -> None:
        """Take the last completions of the closed ring; transfers without one are stuck."""
        self._drain()
        self._cancel_waiting()  # those that C has just given back
        for transfer in list(self._pending.values()):
            transfer._finish(
                TransferState.STUCK, StuckError(f"{self.name} was closed before the device released its memory")
            )
        self._pending.clear()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"{self.name} was never closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<Stream {self.name} {len(self._pending) + self._waiting} pending>"
