"""Tasks of orders: one that fails unexpectedly ends alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import anyio.abc

from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._counting import Incident, Incidents

logger = logging.getLogger(__name__)


class OrderTasks(Spawner):
    """A starter of tasks that end alone: an exception of one is logged, and the others are unaffected."""

    def __init__(self, group: anyio.abc.TaskGroup, incidents: Incidents) -> None:
        super().__init__(group)
        self._incidents = incidents

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, name: object = None) -> None:
        """Start a task."""
        super().start_soon(self._guarded, function, args, name=name)

    async def _guarded(self, function: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...]) -> None:
        try:
            await function(*args)
        except Exception:
            told = "an order ended because of a defect, which should be reported"
            self._incidents.add(Incident.DEFECT, logger, told, level=logging.ERROR, exc_info=True)
