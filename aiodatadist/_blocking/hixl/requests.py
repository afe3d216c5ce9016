"""The requests of one engine that were not waited for, by number. Any thread may ask for them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from aiodatadist._blocking.hixl.values import GetTransferStatusArgs, TransferResult, result_of
from aiodatadist._cache.task import CacheTask
from aiodatadist._hixl.statuses import Status, status_of
from aiodatadist._hixl.values import TransferStatus


class _Request(NamedTuple):
    """A request: its transfer, the name of the peer, and the caller's number."""

    task: CacheTask
    peer: str
    user_data: int


class Requests:
    """The requests whose end was not told yet. That of each is told once: to the thread that takes the request out."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}

    def add(self, task: CacheTask, peer: str, user_data: int) -> int:
        """Add a request, and return its number, which is above 0."""
        number = next(self._numbers)
        self._requests[number] = _Request(task, peer, user_data)
        return number

    def forget(self, peer: str) -> None:
        """Forget the requests to a peer, because it was disconnected."""
        for number, request in self._requests.copy().items():
            if request.peer == peer:
                self._requests.pop(number, None)

    def status(self, number: int) -> tuple[Status, TransferStatus]:
        """Return the state of a request, and forget it if it has ended."""
        if not number:
            return Status.FAILED, TransferStatus.FAILED
        request = self._requests.get(number)
        if request is not None and not request.task.done():
            return Status.SUCCESS, TransferStatus.WAITING
        if request is None or self._requests.pop(number, None) is None:  # another thread was told
            return Status.PARAM_INVALID, TransferStatus.FAILED
        return _outcome(request.task)

    def all(self, args: GetTransferStatusArgs) -> list[TransferResult]:
        """Return the states of the oldest requests, and forget those that have ended."""
        found: list[TransferResult] = []
        for number, request in self._requests.copy().items():
            if len(found) >= args.max_query_count:
                break
            if not request.task.done():
                if not args.skip_waiting:
                    found.append(result_of(number, request.user_data, TransferStatus.WAITING))
            elif self._requests.pop(number, None) is not None:
                _, state = _outcome(request.task)
                found.append(result_of(number, request.user_data, state))
        return found


def _outcome(task: CacheTask) -> tuple[Status, TransferStatus]:
    error = task.exception()
    if error is None and not task.cancelled():
        return Status.SUCCESS, TransferStatus.COMPLETED
    return (Status.FAILED if error is None else status_of(error)), TransferStatus.FAILED
