"""Deadlines of transfers, any number of them with one timer.

Who owns what
    A cluster owns its :class:`Deadlines`. It holds a transfer until that ends, and no longer. If none is left, there is
    no timer.

What happens at a deadline
    All transfers that are due are marked first; from then on none of them can start. Then they are told to end, some at
    a time (:class:`~aiodatadist._concurrency.alarms.Alarms`). How a transfer ends depends on whether it is under way,
    and is decided by :meth:`TransferCompletion.expire`.
"""

from __future__ import annotations

import asyncio

from aiodatadist._concurrency.alarms import Alarms
from aiodatadist._concurrency.completion import TransferCompletion


class Deadlines:
    """The deadlines of one event loop. ``len()`` is the number of transfers under way whose deadline is ahead."""

    def __init__(self) -> None:
        self._alarms: Alarms[tuple[float, TransferCompletion]] = Alarms(_expire, _mark)

    def __len__(self) -> int:
        return len(self._alarms)

    def add(self, transfer: TransferCompletion, seconds: float) -> None:
        """End a transfer this many seconds from now. One that has ended is left alone."""
        if not transfer.is_done:
            alarm = self._alarms.set(asyncio.get_running_loop().time() + seconds, (seconds, transfer))
            transfer.add_done_callback(lambda _: self._alarms.drop(alarm))


def _mark(due: tuple[float, TransferCompletion]) -> None:
    seconds, transfer = due
    transfer.late_after = seconds


def _expire(due: tuple[float, TransferCompletion]) -> None:
    due[1].expire()
