"""Deadlines of transfers, any number of them with one timer.

Who owns what
    A cluster owns its :class:`Deadlines`. A transfer is in it until it ends, and no longer; when none is left there is no
    timer.

What happens at a deadline
    All that are due are marked at one go, from which on none of them starts any more, and are then told to end, some at a
    time (:class:`~aiodatadist.concurrency.alarms.Alarms`). Which of them are under way, and how those end, is their own
    affair (:meth:`TransferCompletion.expire`).
"""

from __future__ import annotations

import asyncio

from aiodatadist.concurrency.alarms import Alarms
from aiodatadist.concurrency.completion import TransferCompletion


class Deadlines:
    """Those of one event loop. ``len()`` is how many transfers have one that has not passed, and have not ended."""

    def __init__(self) -> None:
        self._alarms: Alarms[tuple[float, TransferCompletion]] = Alarms(_expire, _mark)

    def __len__(self) -> int:
        return len(self._alarms)

    def add(self, transfer: TransferCompletion, seconds: float) -> None:
        """It has so many seconds from now. One that has ended is left alone."""
        if not transfer.is_done:
            alarm = self._alarms.set(asyncio.get_running_loop().time() + seconds, (seconds, transfer))
            transfer.add_done_callback(lambda _: self._alarms.drop(alarm))


def _mark(due: tuple[float, TransferCompletion]) -> None:
    seconds, transfer = due
    transfer.late_after = seconds


def _expire(due: tuple[float, TransferCompletion]) -> None:
    due[1].expire()
