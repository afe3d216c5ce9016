"""Tasks of orders: one that fails for a reason that is not foreseen ends alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from aiodatadist.concurrency.spawner import Spawner

logger = logging.getLogger(__name__)


class OrderTasks(Spawner):
    """Starts tasks that tell of their own ends: an exception of one is logged, and concerns no other."""

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, name: object = None) -> None:
        super().start_soon(self._guarded, function, args, name=name)

    @staticmethod
    async def _guarded(function: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...]) -> None:
        try:
            await function(*args)
        except Exception:
            logger.exception("an order ended because of what has to be reported as a defect")
