"""The calls of a cache that move no blocks: they ask which values a pool has, or remove some."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import anyio

from aiodatadist._context_caching.block_index import BlockIndex, ExistsQuery
from aiodatadist._context_caching.calls import CallRecords
from aiodatadist._context_caching.errors import translated
from aiodatadist._context_caching.pool_guard import PoolGuard
from aiodatadist._context_caching.pools.contract import PoolKey, PoolTimeout, PoolUnreachable
from aiodatadist._context_caching.results import CcResult, CcStatus
from aiodatadist._context_caching.transfer.pipeline import in_time
from aiodatadist._context_caching.transfer.start_limiter import StartLimiter
from aiodatadist._counting import Incident, Incidents

logger = logging.getLogger(__name__)


class Lookups:
    """The lookups and removals of one cache, with arguments that were checked.

    Args:
        failed: called with the seconds that a call had, if the pool failed it, or may have.
    """

    def __init__(
        self,
        guard: PoolGuard,
        index: BlockIndex,
        records: CallRecords,
        start_limiter: StartLimiter,
        incidents: Incidents,
        failed: Callable[[float], None],
    ) -> None:
        self._guard = guard
        self._index = index
        self._records = records
        self._start_limiter = start_limiter
        self._incidents = incidents
        self._failed = failed

    async def blocks(
        self,
        wanted: Sequence[int],
        seconds: float,
        shards: Sequence[str],
        groups: Sequence[int] | None,
        local_only: bool,
        lease: float,
    ) -> CcResult:
        """Look up blocks by their hashes."""

        async def ask() -> CcResult:
            left = await self._start_limiter.wait(seconds)
            if left is None:
                return CcResult.of([CcStatus.TIMEOUT] * len(wanted))
            deadline = anyio.current_time() + left
            question = ExistsQuery(shards, groups, local_only, lease, deadline)
            return await in_time(self._index.exists(wanted, question), deadline)

        return await self._found("exists", len(wanted), "hashes", seconds, ask)

    async def keys(self, names: Sequence[PoolKey], seconds: float, lease: float) -> CcResult:
        """Look up values by their keys."""

        async def ask() -> CcResult:
            deadline = anyio.current_time() + seconds
            found = await in_time(self._index.exists_keys(names, lease, deadline), deadline)
            return CcResult.of([CcStatus.OK if there else CcStatus.MISS for there in found])

        return await self._found("exists_values", len(names), "keys", seconds, ask)

    async def _found(
        self, operation: str, count: int, unit: str, seconds: float, ask: Callable[[], Coroutine[Any, Any, CcResult]]
    ) -> CcResult:
        """Record the question; a pool that is slow or fails counts as empty."""
        with self._records.of(operation, count) as record:
            if not self._guard.is_open:
                record.result = CcResult.of([CcStatus.SKIPPED] * count)
                return record.result
            try:
                record.result = await ask()
            except (PoolTimeout, PoolUnreachable) as problem:
                told = translated(problem, f"exists of {count} {unit} found nothing", seconds).message()
                self._incidents.add(Incident.LOOKUP_FAILED, logger, "%s", told)
                self._failed(seconds)
                failure = CcStatus.TIMEOUT if isinstance(problem, PoolTimeout) else CcStatus.IO_ERROR
                record.result = CcResult.of([failure] * count)
            return record.result

    async def remove(
        self, operation: str, count: int, unit: str, seconds: float, work: Callable[[float], Coroutine[Any, Any, int]]
    ) -> int:
        """Run a removal, which gets its deadline; return how many values the pool had.

        Raises:
            EmsTimeout, EmsIoError: if the pool is slow or fails.
        """
        deadline = anyio.current_time() + seconds
        with self._records.of(operation, count):
            try:
                return await in_time(work(deadline), deadline)
            except (PoolTimeout, PoolUnreachable) as problem:
                self._failed(seconds)
                raise translated(problem, f"remove of {count} {unit}", seconds) from problem
