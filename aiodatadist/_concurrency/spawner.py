"""Tasks of a task group that can be started outside tasks: in callbacks of the event loop.

Who owns what
    The task group owns the tasks, and the task that entered it waits for them. A :class:`Spawner` owns only the
    starters, tasks that live for one round of the loop; any number of spawners may serve one group.

What cancellation means
    A spawned task ends with its group, like any other. A task that is started after the group has ended never begins,
    and the log says so at debug level.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import anyio.abc

logger = logging.getLogger(__name__)


class Spawner:
    """A starter of a task group's tasks. From a callback they start one round later, by a task that does nothing else."""

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group
        self._starters: set[asyncio.Task[None]] = set()

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, name: object = None) -> None:
        """Start a task as the group's own ``start_soon`` does.

        A task that a callback starts in the round in which the group ends never begins.
        """
        if asyncio.current_task() is not None:
            self._group.start_soon(function, *args, name=name)
            return
        starter = asyncio.get_running_loop().create_task(self._start(function, args, name))
        self._starters.add(starter)
        starter.add_done_callback(self._starters.discard)

    async def _start(
        self, function: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...], name: object
    ) -> None:
        try:
            self._group.start_soon(function, *args, name=name)
        except RuntimeError:  # the group has ended in the meantime
            logger.debug("%r was not started: its task group has ended", function)
