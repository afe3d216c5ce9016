"""Connections that are made and ended without waiting: in order for each engine, a few engines at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import anyio

from aiodatadist._hixl.statuses import Status, status_of
from aiodatadist._hixl.values import AsyncConnectStatus

Call = Callable[[], Coroutine[Any, Any, None]]


class _Item(NamedTuple):
    """A connection to be made, or to be ended."""

    is_connect: bool
    call: Call


class Connects:
    """The calls of one engine that wait or are under way. It lives on the event loop; states can be read from any thread.

    Args:
        spawn: starts a task that ends with the engine; returns False if the engine has ended.
        workers: calls that are under way at a time.
        capacity: calls that may wait.
    """

    def __init__(self, spawn: Callable[..., bool], workers: int, capacity: int) -> None:
        self._spawn = spawn
        self._workers = anyio.Semaphore(workers)
        self._capacity = capacity
        self._waiting = 0
        self._queues: dict[str, deque[_Item]] = {}
        self._states: dict[str, AsyncConnectStatus] = {}

    def state(self, peer: str) -> AsyncConnectStatus:
        """Return the state of the last call for an engine."""
        return self._states.get(peer, AsyncConnectStatus.NOT_CONNECT)

    def states(self) -> dict[str, AsyncConnectStatus]:
        """Return the states of all engines for which calls were made, unless they were disconnected since."""
        return dict(self._states)

    def add(self, peer: str, is_connect: bool, call: Call) -> Status:
        """Queue a call. Return RESOURCE_EXHAUSTED if too many wait."""
        if self._waiting >= self._capacity:
            return Status.RESOURCE_EXHAUSTED
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = deque()
            if not self._spawn(self._work, peer, queue):
                del self._queues[peer]
                return Status.FAILED
        queue.append(_Item(is_connect, call))
        self._waiting += 1
        pending, disconnecting = AsyncConnectStatus.CONNECT_PENDING, AsyncConnectStatus.DISCONNECT_PENDING
        self._states[peer] = pending if is_connect else disconnecting
        return Status.SUCCESS

    async def _work(self, peer: str, queue: deque[_Item]) -> None:
        try:
            while queue:
                async with self._workers:
                    item = queue.popleft()
                    self._waiting -= 1
                    await self._carry_out(peer, item, queue)
        finally:
            self._waiting -= len(queue)
            self._queues.pop(peer, None)

    async def _carry_out(self, peer: str, item: _Item, later: deque[_Item]) -> None:
        connecting, disconnecting = AsyncConnectStatus.CONNECTING, AsyncConnectStatus.DISCONNECTING
        if not later:
            self._states[peer] = connecting if item.is_connect else disconnecting
        status = Status.SUCCESS
        try:
            await item.call()
        except Exception as error:  # logged by the call
            status = status_of(error)
        if later:  # the state is that of the last call
            return
        if not item.is_connect:
            self._states.pop(peer, None)
        elif status in (Status.SUCCESS, Status.ALREADY_CONNECTED):
            self._states[peer] = AsyncConnectStatus.CONNECTED
        else:
            self._states[peer] = AsyncConnectStatus.CONNECT_FAILED
