"""The engine of HIXL without await: each call returns a status, and the log has the reason of one that is not SUCCESS."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from aiodatadist._blocking.config import add_key
from aiodatadist._blocking.hixl.connects import Connects
from aiodatadist._blocking.hixl.requests import Requests
from aiodatadist._blocking.hixl.values import FeatureType, GetTransferStatusArgs, TransferArgs, TransferResult, expect
from aiodatadist._blocking.loop_door import LoopDoor
from aiodatadist._cache.task import CacheTask
from aiodatadist._concurrency.loop_thread import LoopThread
from aiodatadist._concurrency.threads import DaemonThread
from aiodatadist._counting import OF_PROCESS, Incident
from aiodatadist._hixl import engine as awaitable
from aiodatadist._hixl.names import parse_peer
from aiodatadist._hixl.options import Options, read_options
from aiodatadist._hixl.statuses import Status, status_of
from aiodatadist._hixl.values import (
    AsyncConnectStatus,
    MemDesc,
    MemType,
    NotifyDesc,
    TransferOp,
    TransferOpDesc,
    TransferStatus,
    unsigned,
)
from aiodatadist.errors import FeatureNotEnabled, LLMException, LLMStatusCode

logger = logging.getLogger(__name__)

T = TypeVar("T")

_INT32 = 1 << 31


class _Life:
    """An engine on the event loop, and its transfers and connections that were not waited for.

    Attributes:
        inner, connects: the engine, and its connections. Set once :meth:`open` has returned.
    """

    inner: awaitable.Hixl
    connects: Connects

    def __init__(self, options: Options, thread: LoopThread) -> None:
        self.thread = thread
        self.requests = Requests()
        self.lists_requests = options.lists_requests
        self._options = options

    async def open(self, local_engine: str) -> None:
        """Open the engine. Raises as :meth:`aiodatadist.hixl.Hixl.initialize`, with nothing left open."""
        self.inner = awaitable.Hixl()
        await self.inner.initialize(local_engine, self._options)
        resources = self._options.resources
        spawn = awaitable.spawner_of(self.inner)
        self.connects = Connects(spawn, resources.connect_threads, resources.connect_queue)

    async def close(self) -> None:
        """Close everything."""
        await self.inner.finalize()

    async def leave(self, remote_engine: str, timeout_in_millis: int) -> None:
        """End a connection, and forget its requests."""
        try:
            await self.inner.disconnect(remote_engine, timeout_in_millis)
        finally:
            with suppress(LLMException):
                self.requests.forget(_key(remote_engine))


class Hixl:
    """An engine, for code that does not await. May be used from several threads; one process may have several.

    The first :meth:`initialize` starts the process's loop thread, and the last :meth:`finalize` ends it. No call raises for
    what happens while it runs. TypeError is raised if an argument cannot be converted.
    """

    def __init__(self) -> None:
        self._door: LoopDoor[_Life] | None = None
        self._initialising = threading.RLock()  # reentrant: a signal handler of the thread that holds it may call, too

    def __del__(self) -> None:
        door = getattr(self, "_door", None)
        if door is None or door.opened is None or door.thread.pid != os.getpid():
            return
        with suppress(Exception):  # the interpreter may be ending
            if door.thread.is_here:  # a collection of garbage on the loop's thread, which must not wait for itself
                DaemonThread(door.close, "aiodatadist finalize").start()
            else:
                self.finalize()

    # ---- life ----

    def initialize(self, local_engine: str, options: Mapping[str, str] | None = None) -> int:
        """Open the device that is current, and listen if the name has a port above 0. Return SUCCESS, or why not.

        Args:
            local_engine: ``ip:port``, ``ip``, ``[ipv6]:port`` or ``[ipv6]``: the engine's name.
            options: texts by the names of options. Keys that begin with ``aiodatadist.`` are options of ``LLMConfig``.
        """
        expect(local_engine, "local_engine", str)
        given = dict(expect(options or {}, "options", dict))
        for key, text in given.items():
            expect(key, "option", str)
            expect(text, f"option {key!r}", str)
        with self._initialising:
            if self._door is not None and not self._door.is_closed:
                return int(Status.SUCCESS)
            _, status = self._told("initialize", lambda: self._open(local_engine, given), None)
            return status

    def _open(self, local_engine: str, given: dict[str, str]) -> None:
        found = read_options(given)
        add_key(found.config)
        if (device := _current_device()) is not None and "device_id" not in found.config.model_fields_set:
            found.config.device_id = device
        door = self._door = LoopDoor("Hixl")
        life = _Life(found, door.thread)
        door.open_or_close(life, partial(life.open, local_engine))
        self._running()  # raises if a signal handler has finalized it meanwhile

    def finalize(self) -> None:
        """Close connections, registrations and the listener. No effect if the engine is not initialised.

        If another thread initialises it, this waits, and finalizes it then. A signal handler does not wait for the
        :meth:`initialize` that it interrupts: that call finalizes the engine as soon as it is open, and returns FAILED.

        On the thread of the event loop, where a collection of garbage may call it, it would wait for itself: there it has
        no effect except for a line in the log. An engine that is dropped there is finalized by another thread.
        """
        if (door := self._door) is not None:
            self._told("finalize", door.close, None)

    def _running(self) -> _Life:
        if self._door is None:
            raise LLMException("the engine is not initialised", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
        return self._door.life

    def _told(self, operation: str, call: Callable[[], T], otherwise: T) -> tuple[T, int]:
        """Return what a call returns, and SUCCESS; if it fails, ``otherwise`` and the status. The log has the reason."""
        try:
            return call(), int(Status.SUCCESS)
        except TypeError:  # of an argument
            raise
        except Exception as error:
            status = status_of(error)
            told = "hixl: %s: %s (%s)", operation, error, status.name
            OF_PROCESS.add(Incident.CALL_FAILED, logger, *told)
            return otherwise, int(status)

    def _call(self, operation: str, call: Callable[[_Life], Awaitable[T]], otherwise: T) -> tuple[T, int]:
        """Run a call on the loop, and wait for it."""

        def run() -> T:
            life = self._running()
            return life.thread.call(lambda: call(life))

        return self._told(operation, run, otherwise)

    # ---- memory ----

    def register_mem(self, mem: MemDesc, type: MemType, /) -> tuple[int, int]:  # noqa: A002 - HIXL's name
        """Register a range. Return the status and a handle above 0, or 0 if the call failed."""
        expect(mem, "mem", MemDesc)
        expect(type, "type", MemType)
        handle, status = self._call("register_mem", lambda life: life.inner.register_mem(mem, type), 0)
        return status, handle

    def deregister_mem(self, handle: int, /) -> int:
        """Release a range. An unknown handle counts as success. FAILED while there are connections."""
        number = unsigned(handle, "handle")
        return self._call("deregister_mem", lambda life: life.inner.deregister_mem(number), None)[1]

    # ---- connections ----

    def connect(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """Connect to an engine that listens."""
        _check_call(remote_engine, timeout_in_millis)
        return self._call("connect", lambda life: life.inner.connect(remote_engine, timeout_in_millis), None)[1]

    def disconnect(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """End a connection. Its transfers fail and are forgotten; once this returns, no byte of theirs lands."""
        _check_call(remote_engine, timeout_in_millis)
        return self._call("disconnect", lambda life: life.leave(remote_engine, timeout_in_millis), None)[1]

    def connect_async(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """Queue a call of :meth:`connect`. RESOURCE_EXHAUSTED if too many wait."""
        return self._queue("connect_async", remote_engine, timeout_in_millis, is_connect=True)

    def disconnect_async(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """Queue a call of :meth:`disconnect`. RESOURCE_EXHAUSTED if too many wait."""
        return self._queue("disconnect_async", remote_engine, timeout_in_millis, is_connect=False)

    def _queue(self, operation: str, remote_engine: str, timeout_in_millis: int, *, is_connect: bool) -> int:
        _check_call(remote_engine, timeout_in_millis)

        async def add(life: _Life) -> Status:
            awaitable.milliseconds(timeout_in_millis, "timeout_in_millis")

            async def carry_out() -> None:
                try:
                    if is_connect:
                        await life.inner.connect(remote_engine, timeout_in_millis)
                    else:
                        await life.leave(remote_engine, timeout_in_millis)
                except Exception as error:
                    told = "hixl: %s: %s (%s)", operation, error, status_of(error).name
                    OF_PROCESS.add(Incident.CALL_FAILED, logger, *told)
                    raise

            return life.connects.add(_key(remote_engine), is_connect, carry_out)

        status, failure = self._call(operation, add, Status.FAILED)
        return failure or int(status)

    def get_async_connect_status(self, remote_engine: str, /) -> tuple[int, AsyncConnectStatus]:
        """Return the state of the last queued call for an engine; NOT_CONNECT if there was none, or it was disconnected."""
        expect(remote_engine, "remote_engine", str)

        def look() -> AsyncConnectStatus:
            return self._running().connects.state(_key(remote_engine))

        state, status = self._told("get_async_connect_status", look, AsyncConnectStatus.NOT_CONNECT)
        return status, state

    def get_all_async_connect_status(self) -> tuple[int, dict[str, AsyncConnectStatus]]:
        """Return the states of all engines for which calls were queued."""

        def look() -> dict[str, AsyncConnectStatus]:
            return self._running().connects.states()

        none: dict[str, AsyncConnectStatus] = {}
        states, status = self._told("get_all_async_connect_status", look, none)
        return status, states

    # ---- transfers ----

    def transfer_sync(
        self, remote_engine: str, op: TransferOp, op_descs: Sequence[TransferOpDesc], timeout_in_millis: int = 1000
    ) -> int:
        """Move ranges, and wait. Once this has returned, also with TIMEOUT, no byte of it is written."""
        _check_call(remote_engine, timeout_in_millis)
        _check_transfer(op, op_descs)

        async def move(life: _Life) -> None:
            seconds = awaitable.milliseconds(timeout_in_millis, "timeout_in_millis")
            await life.inner.transfer(remote_engine, op, op_descs, timeout=seconds)

        return self._call("transfer_sync", move, None)[1]

    def transfer_async(
        self,
        remote_engine: str,
        op: TransferOp,
        op_descs: Sequence[TransferOpDesc],
        args: TransferArgs | None = None,
    ) -> tuple[int, int]:
        """Start to move ranges. Return the status and the number of the request, or 0 if the call failed."""
        expect(remote_engine, "remote_engine", str)
        _check_transfer(op, op_descs)
        user_data = 0 if args is None else expect(args, "args", TransferArgs).user_data

        async def start(life: _Life) -> int:
            task: CacheTask = life.inner.transfer(remote_engine, op, op_descs, staging=False)
            return life.requests.add(task, _key(remote_engine), user_data)

        number, status = self._call("transfer_async", start, 0)
        return status, number

    def get_transfer_status(self, req: int, /) -> tuple[int, TransferStatus]:
        """Return the state of a request: WAITING any number of times, then once how it ended."""
        number = unsigned(req, "req")

        def look() -> tuple[Status, TransferStatus]:
            return self._running().requests.status(number)

        (outcome, state), status = self._told("get_transfer_status", look, (Status.FAILED, TransferStatus.FAILED))
        return status or int(outcome), state

    def get_all_transfer_status(self, args: GetTransferStatusArgs | None = None) -> tuple[int, list[TransferResult]]:
        """Return the states of requests, the oldest first. UNSUPPORTED unless HIXL's newer engine was asked for."""
        asked = GetTransferStatusArgs() if args is None else expect(args, "args", GetTransferStatusArgs)

        def look() -> list[TransferResult]:
            life = self._running()
            if not life.lists_requests:
                raise FeatureNotEnabled(
                    "requests are listed only with LocalCommRes 1.3 or comm_resource_config.protocol_desc"
                )
            return life.requests.all(asked)

        none: list[TransferResult] = []
        found, status = self._told("get_all_transfer_status", look, none)
        return status, found

    # ---- notifications ----

    def send_notify(self, remote_engine: str, notify: NotifyDesc, timeout_in_millis: int = 1000) -> int:
        """Send a notification to a connected engine, and wait until it has it."""
        _check_call(remote_engine, timeout_in_millis)
        expect(notify, "notify", NotifyDesc)
        return self._call(
            "send_notify", lambda life: life.inner.send_notify(remote_engine, notify, timeout_in_millis), None
        )[1]

    def get_notifies(self) -> tuple[int, list[NotifyDesc]]:
        """Return the notifications that have come since the last call, in the order of each peer's calls."""

        async def take(life: _Life) -> list[NotifyDesc]:
            return life.inner.get_notifies()

        none: list[NotifyDesc] = []
        notes, status = self._call("get_notifies", take, none)
        return status, notes


def _check_call(remote_engine: Any, timeout_in_millis: Any) -> None:
    """Raise TypeError for arguments that cannot be converted."""
    expect(remote_engine, "remote_engine", str)
    if isinstance(timeout_in_millis, bool) or not isinstance(timeout_in_millis, int):
        raise TypeError(f"timeout_in_millis is {timeout_in_millis!r}: must be an int")
    if not -_INT32 <= timeout_in_millis < _INT32:
        raise TypeError(f"timeout_in_millis is {timeout_in_millis}: must fit 32 bits")


def _check_transfer(op: Any, op_descs: Any) -> None:
    expect(op, "op", TransferOp)
    if not isinstance(op_descs, (list, tuple)):
        raise TypeError(f"op_descs is of type {type(op_descs).__name__}: must be a list of TransferOpDesc")


def _key(remote_engine: str) -> str:
    """Return the one spelling of an engine's name. Raises ParamInvalid if it is none."""
    return str(parse_peer(remote_engine, "remote_engine"))


def _current_device() -> int | None:
    """Return the device that the caller made current with torch; None if it has none."""
    npu = getattr(sys.modules.get("torch"), "npu", None)
    return None if npu is None else int(npu.current_device())


def get_capability(feature_type: FeatureType) -> tuple[int, int]:
    """Return SUCCESS, and 1 if a feature is there. Both are."""
    expect(feature_type, "feature_type", FeatureType)
    return int(Status.SUCCESS), 1
