"""The requests of an engine that were not waited for: several threads ask for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from aiodatadist._blocking.hixl.requests import Requests
from aiodatadist._hixl.statuses import Status
from aiodatadist.blocking import hixl


class _Peer(str):
    """A name that calls a function when it is compared."""

    __slots__ = ("call",)
    call: Callable[[], object]

    def __eq__(self, other: object) -> bool:
        self.call()
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_requests_are_forgotten_while_another_thread_asks_for_them() -> None:
    """A disconnect returned FAILED if another thread was told of a request meanwhile."""
    requests, told = Requests(), []

    def ask() -> None:
        thread = threading.Thread(target=lambda: told.append(requests.status(numbers[1])))
        thread.start()
        thread.join()

    task: Any = Future()
    task.set_result(None)
    peer = _Peer("127.0.0.1:1")
    peer.call = ask
    numbers = [requests.add(task, name, 0) for name in (peer, "127.0.0.1:2", "127.0.0.1:1")]
    requests.forget("127.0.0.1:1")
    assert told == [(Status.SUCCESS, hixl.TransferStatus.COMPLETED)]
    assert [requests.status(number)[0] for number in numbers] == [Status.PARAM_INVALID] * 3
