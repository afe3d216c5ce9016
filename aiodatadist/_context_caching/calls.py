"""Records of a cache's calls: counts for metrics, and notifications for an observer."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from aiodatadist._context_caching.errors import EmsErrorCode, EmsException
from aiodatadist._context_caching.results import CcResult, CcStatus, Statistics
from aiodatadist._context_caching.transfer.handle import BlockTransfer
from aiodatadist._counting import Call, Ended, Flow, FlowFigures, Observer, figures_of, tell
from aiodatadist._counting.figures import SUCCESS

_FAULTS: Final = {
    CcStatus.TIMEOUT: EmsErrorCode.EMS_IO_TIMEOUT.name,
    CcStatus.IO_ERROR: EmsErrorCode.EMS_IO_ERROR.name,
    CcStatus.SKIPPED: "SKIPPED",
}
"""Status of a call that raised nothing and served no key, by the status of its first key."""


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """Counts of a :class:`~aiodatadist.context_caching.ContextCache` since it was opened.

    Attributes:
        calls: by operation, for instance ``"load"``. The statuses are ``LLM_SUCCESS``, ``CANCELLED``, an
            ``EmsErrorCode``, or ``SKIPPED`` if the pool is not used now
            (:class:`~aiodatadist.context_caching.HealthGate`).
        statistics: counts of the values.
        pool: name of the pool's engine.
        is_used: True if the pool is used now; otherwise every call misses.
        incidents: counts of what the pool and calls caused and the log reports at most once a second, named by
            :class:`~aiodatadist._counting.Incident`. Unlogged ones are counted, too.
    """

    calls: Mapping[str, FlowFigures]
    statistics: Statistics
    pool: str
    is_used: bool
    incidents: Mapping[str, int] = field(default_factory=dict)


class Record:
    """The record of one call. Its creator sets the result."""

    def __init__(self, flow: Flow, observer: Observer | None, operation: str, keys: int) -> None:
        self.result: CcResult | None = None
        self._flow = flow
        self._began = perf_counter()
        self._end = None if observer is None else tell(observer, Call("context_cache", operation, keys=keys))
        flow.running += 1

    def ended(self, status: str, error: Exception | None = None) -> None:
        """Count the end of the call and notify the observer. Called once."""
        self._flow.running -= 1
        if status == SUCCESS and self.result is not None and self.result.details and not self.result.success:
            status = _FAULTS.get(self.result.details[0], SUCCESS)
        if status == SUCCESS:
            self._flow.took(perf_counter() - self._began)
        else:
            self._flow.failed(status)
        if self._end is not None:
            self._end(Ended(status, error, hits=None if self.result is None else self.result.success))

    def failed(self, error: EmsException) -> None:
        """Count a call that raised."""
        self.result = error.partial
        self.ended(error.status_code().name, error)


class CallRecords:
    """The records of one cache, on its event loop.

    Attributes:
        observer: see :attr:`~aiodatadist.context_caching.ContextCache.observer`.
    """

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self._flows: defaultdict[str, Flow] = defaultdict(Flow)

    def _record(self, operation: str, keys: int) -> Record:
        return Record(self._flows[operation], self.observer, operation, keys)

    def follow(self, operation: str, keys: int, transfer: BlockTransfer) -> None:
        """Record a save or load that has started, until it ends."""
        record = self._record(operation, keys)

        def ended(done: BlockTransfer) -> None:
            if done.error is not None:
                record.failed(done.error)
                return
            record.result = done.outcome
            record.ended("CANCELLED" if done.cancelled() else SUCCESS)

        transfer.add_done_callback(ended)

    @contextmanager
    def of(self, operation: str, keys: int) -> Iterator[Record]:
        """Record the call that is awaited inside the ``with`` block."""
        record = self._record(operation, keys)
        try:
            yield record
        except EmsException as error:
            record.failed(error)
            raise
        except asyncio.CancelledError:
            record.ended("CANCELLED")
            raise
        except BaseException as error:
            record.ended(type(error).__name__, error if isinstance(error, Exception) else None)
            raise
        record.ended(SUCCESS)

    def figures(self) -> dict[str, FlowFigures]:
        """Return the counts by operation. Callable from any thread."""
        return figures_of(self._flows)
