"""The saves and loads of a cache while they run, each in a task of the cache's group."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sized
from functools import partial
from typing import Any

import anyio.abc

from aiodatadist._concurrency.completion import TransferState
from aiodatadist._concurrency.resident import Misuse, Resident
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._context_caching import checks as rules
from aiodatadist._context_caching.calls import CallRecords
from aiodatadist._context_caching.errors import (
    EmsException,
    EmsInternalError,
    EmsInvalidArgument,
    EmsTimeout,
    refusal,
    translated,
)
from aiodatadist._context_caching.memory.regions import Memory, SlotMemory
from aiodatadist._context_caching.pool_guard import PoolGuard
from aiodatadist._context_caching.pools.contract import PoolKey, PoolTimeout, PoolUnreachable
from aiodatadist._context_caching.results import CcResult, CcStatus
from aiodatadist._context_caching.transfer.handle import BlockTransfer
from aiodatadist._context_caching.transfer.pipeline import LATE_TOLERANCE, SaveLoadCall
from aiodatadist._context_caching.transfer.start_limiter import StartLimiter
from aiodatadist._counting import Incident, Incidents
from aiodatadist._counting.callbacks import current_task, is_delivered
from aiodatadist.errors import LLMException

logger = logging.getLogger(__name__)

_UNKNOWN: dict[type[EmsException], CcStatus] = {EmsTimeout: CcStatus.TIMEOUT, EmsInvalidArgument: CcStatus.SKIPPED}
"""Status of values whose outcome is unknown, by the error that ended the call. Other errors mean an I/O error."""

Work = Callable[[SaveLoadCall], Coroutine[Any, Any, None]]


class RunningTransfers:
    """The transfers of one cache, from their start to their end.

    Args:
        failed: called with the seconds that a call had, if the pool failed it, or may have.

    Attributes:
        transfers: those that have not ended.
        in_slots: those that use the registered cache. A transfer whose memory the device does not release stays here.
    """

    def __init__(
        self,
        resident: Resident,
        guard: PoolGuard,
        records: CallRecords,
        start_limiter: StartLimiter,
        failed: Callable[[float], None],
    ) -> None:
        self.transfers: set[BlockTransfer] = set()
        self.in_slots: set[BlockTransfer] = set()
        self._resident = resident
        self._guard = guard
        self._records = records
        self._start_limiter = start_limiter
        self._failed = failed
        self._group: anyio.abc.TaskGroup
        self._incidents: Incidents

    def serve(self, group: anyio.abc.TaskGroup, incidents: Incidents) -> None:
        """Let transfers start, in tasks of this group. Called once."""
        self._group, self._incidents = group, incidents

    async def time_left(self, operation: str, timeout: float | None, wanted: Any) -> tuple[float, float]:
        """Wait for a turn to start; return the seconds that the call has in all, and those that are left.

        Raises:
            EmsInvalidArgument: if the cache is closed, or the timeout is no time.
            EmsTimeout: if no time is left. The keys were not looked at, and the pool was not asked.
        """
        self._resident.check()
        seconds = rules.seconds(timeout)
        left = await self._start_limiter.wait(seconds)
        if left is None:
            count = len(wanted) if isinstance(wanted, Sized) else 0
            with self._records.of(operation, count):
                raise EmsTimeout(f"not begun within {seconds:g} s", partial=CcResult.of([CcStatus.TIMEOUT] * count))
        return seconds, left

    def call(self, keys: list[PoolKey], memory: Memory, total: int, seconds: float) -> SaveLoadCall:
        """Return a call whose time starts now; 0 seconds leave no time to ask the pool, but all the time to copy."""
        # the loop's own clock: anyio's needs a task, and a done callback may start a call without one
        deadline = asyncio.get_running_loop().time() + seconds
        return SaveLoadCall(keys, memory, total, deadline, deadline if seconds else math.inf)

    def begin(self, what: str, seconds: float, call: SaveLoadCall, work: Work) -> BlockTransfer:
        """Run the work in a task of the cache's group."""

        def ended(done: BlockTransfer) -> None:
            self.transfers.discard(done)
            if done.state is not TransferState.STUCK:
                self.in_slots.discard(done)
                call.memory.give()

        transfer = BlockTransfer(f"{what} of {call.total} keys", seconds)
        if not self._guard.is_open:
            transfer._finish(CcResult.of([CcStatus.SKIPPED] * call.total), None)
            self._records.follow(what, call.total, transfer)
            return transfer
        call.memory.take(writes="load" in what)
        self._records.follow(what, call.total, transfer)
        transfer.add_done_callback(ended)
        self.transfers.add(transfer)
        if isinstance(call.memory, SlotMemory):
            self.in_slots.add(transfer)
        drive = partial(self._drive, transfer, call, work)
        Spawner(self._group).start_soon(self._resident.keep, drive, name=transfer.what)
        return transfer

    async def _drive(self, transfer: BlockTransfer, call: SaveLoadCall, work: Work) -> None:
        result: CcResult | None = None
        error: EmsException | None = None
        task = current_task()
        try:
            transfer._scope.deadline = call.copying + LATE_TOLERANCE
            with transfer._scope:
                await self._start_limiter.wait()
                if not transfer.is_asked_to_stop:
                    await work(call)
                    result = call.result()
            if result is None and not transfer.is_asked_to_stop:
                raise EmsTimeout(f"{transfer.what}: not done within {transfer.seconds:g} s")
        except BaseException as problem:
            if is_delivered(problem, task):
                raise
            if not isinstance(problem, (EmsException, PoolTimeout, PoolUnreachable, LLMException)):
                told = "%r failed", transfer
                self._incidents.add(Incident.DEFECT, logger, *told, level=logging.ERROR, exc_info=True)
            error = translated(problem, transfer.what, transfer.seconds)
            if error is not problem:
                error.__cause__ = problem
            error.partial = call.result(_UNKNOWN.get(type(error), CcStatus.IO_ERROR))
            if not isinstance(error, EmsInvalidArgument):
                self._failed(transfer.seconds)
        finally:
            if call.is_stuck:
                result = None
                error = EmsInternalError("the device did not release the memory", partial=call.result())
            elif result is None and error is None and not transfer.is_asked_to_stop:
                error = self.failure(call.result())
            transfer._finish(result, error, is_stuck=call.is_stuck)
            # the error's traceback would keep both alive, and a failure that no caller asks for be reported late
            del transfer, error

    def failure(self, partial: CcResult | None = None) -> EmsException | None:
        """Return why the cache ended without being closed, or None if it has not."""
        if self._resident.reason is None:
            return None
        failure = refusal(Misuse.FAILED, self._resident.reason)
        failure.partial = partial
        return failure

    def check_quiet(self) -> None:
        """Raise EmsInvalidArgument if a transfer uses the registered cache."""
        if self.in_slots:
            raise EmsInvalidArgument(
                f"{len(self.in_slots)} saves and loads use the registered cache: wait until they have ended"
            )

    def end(self) -> None:
        """End transfers whose task never started, once the group has ended."""
        for transfer in list(self.transfers):
            transfer._finish(None, self.failure())
