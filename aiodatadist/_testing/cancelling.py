"""Cancellation of an operation at each of its awaits in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class CancelAt:
    """An awaitable that cancels the current task when ``operation`` suspends for the k-th time.

    Use it as ``await CancelAt(k, operation())``.

    Args:
        cancel: how to cancel, for instance ``scope.cancel`` of an anyio cancel scope around it. By default the task is
            cancelled.

    Attributes:
        suspensions: number of suspensions. If it is below ``k``, the operation ended first and nothing was cancelled.
    """

    def __init__(self, k: int, operation: Coroutine[Any, Any, Any], cancel: Callable[[], object] | None = None) -> None:
        self._k = k
        self._cancel = cancel
        self._operation = operation
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._operation.__await__()
        sent: Any = None
        while True:
            try:
                waited_for = steps.send(sent)
            except StopIteration as end:
                return end.value
            self.suspensions += 1
            if self.suspensions == self._k:
                task = asyncio.current_task()
                if self._cancel is not None:
                    self._cancel()
                elif task is not None:
                    task.cancel()
            try:
                sent = yield waited_for
            except BaseException as error:
                sent = None
                try:
                    waited_for = steps.throw(error)
                except StopIteration as end:
                    return end.value
                self.suspensions += 1
                sent = yield from self._rest(steps, waited_for)
                return sent

    @staticmethod
    def _rest(steps: Generator[Any, Any, Any], waited_for: Any) -> Generator[Any, Any, Any]:
        """Pass everything through, after the cancellation."""
        while True:
            try:
                sent = yield waited_for
            except BaseException as error:
                try:
                    waited_for = steps.throw(error)
                except StopIteration as end:
                    return end.value
            else:
                try:
                    waited_for = steps.send(sent)
                except StopIteration as end:
                    return end.value
