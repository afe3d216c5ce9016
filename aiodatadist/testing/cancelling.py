"""Cancel an operation at each of its awaits in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class CancelAt:
    """``await CancelAt(k, operation())`` cancels the current task when the operation suspends for the k-th time.

    Args:
        cancel: how; for instance ``scope.cancel`` of an anyio cancel scope around it. By default the task itself.

    Attributes:
        suspensions: how often it suspended. Below ``k``: it ended first, and nothing was cancelled.
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
        """After the cancellation: pass everything through."""
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
