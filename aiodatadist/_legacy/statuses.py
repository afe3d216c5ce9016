"""Status codes of v1: the same errors with other codes, and tasks that report them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final

from aiodatadist._cache.task import CacheTask, StartedTask
from aiodatadist._device import TransferReport
from aiodatadist.errors import LLMException, LLMStatusCode

V1: Final = {
    LLMStatusCode.LLM_TIMEOUT: LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    LLMStatusCode.LLM_OUT_OF_MEMORY: LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
}
"""Statuses that v1 does not have, with those that it uses instead."""


def v1_status(status: LLMStatusCode) -> LLMStatusCode:
    """Return the status that v1 uses for this one."""
    return V1.get(status, status)


def v1_error(error: LLMException) -> LLMException:
    """Return the same error with v1's status."""
    status = v1_status(error.status_code)
    return error if status is error.status_code else error.with_status(status)


@contextmanager
def v1_errors() -> Iterator[None]:
    """Give v1's status to errors raised inside the context."""
    try:
        yield
    except LLMException as error:
        other = v1_error(error)
        if other is error:
            raise
        raise other from error


def busy(what: str, other: str, cluster_id: int) -> LLMException:
    """Return the error for a link that is in use: it does one thing at a time."""
    return LLMException(
        f"the link to cluster {cluster_id} is in use: {other}",
        status_code=LLMStatusCode.LLM_LINK_BUSY,
        peer=cluster_id,
        operation=what,
        hint="try again when that has ended",
    )


class KvTask(StartedTask):
    """A :class:`~aiodatadist.CacheTask` with v1's statuses: ``LLM_WAIT_PROCESS_TIMEOUT`` instead of ``LLM_TIMEOUT``.

    Args:
        ended: called when it has ended, before its waiters are woken.
    """

    __slots__ = ()

    def __init__(self, task: CacheTask, ended: Callable[[], object] | None = None) -> None:
        super().__init__(task._operation, task.peer, task._transfer, task._check_here, task._about, task._origin)
        task._is_told = True  # only this task's failure is reported if it is never retrieved
        if ended is not None:
            self._transfer.add_done_callback(lambda _: ended())

    def __await__(self) -> Generator[Any, None, TransferReport]:
        with v1_errors():
            return (yield from super().__await__())

    def exception(self) -> LLMException | None:
        error = super().exception()
        return None if error is None else v1_error(error)

    def result(self) -> TransferReport:
        with v1_errors():
            return super().result()

    async def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        results = await super().get_results(timeout_in_millis)
        return [None if status is None else v1_status(status) for status in results]
