"""Fault switches and counters of softnpu, and faults of transfers over TCP, by name. They affect the whole process."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final, Literal

import anyio

from aiodatadist._native.library import SOFTNPU, ffi, ring
from aiodatadist.errors import OutOfMemory, ParamInvalid

TCP: Final = {"tcp_get": ring.RING_GET, "tcp_put": ring.RING_PUT, "tcp_stop": ring.NET_STOP}
"""Operations of programs over TCP; the last one stands for any end before the last byte."""

_SAME: Final = {"HcclBatchGet": "tcp_get", "HcclBatchPut": "tcp_put", "aclrtStreamAbort": "tcp_stop"}
"""The names that functions of softnpu get if a whole run of tests is over TCP."""

_FAULT: Final = re.compile(r"(exec|fail|flip|hang)(?:=(-?\d+))?(?:@(\d+|\*))?")
_KINDS: Final = {"exec": ring.NET_FAIL, "fail": ring.NET_FAIL, "flip": ring.NET_FLIP, "hang": ring.NET_HOLD}


@cache
def _softnpu() -> Any:
    return ffi.dlopen(str(SOFTNPU))


def transport_of_run() -> str:
    """Return the transport of a whole run of tests, in this process and those that it starts; empty if none was chosen."""
    return os.environ.get("AIODATADIST_TEST_TRANSPORT", "")


def _name(function: str) -> str:
    return _SAME.get(function, function) if transport_of_run() == "tcp" else function


def soft_fault(spec: str) -> None:
    """Arm faults: ``"HcclBatchGet:exec=507057@3"``, several separated by ``;``. softnpu.h has the grammar.

    The functions ``tcp_get`` and ``tcp_put`` are programs of transport ``tcp``. They have ``exec``, ``flip`` and ``hang``.

    Raises:
        ParamInvalid: if the spec cannot be read. Nothing was armed.
    """
    soft, over_tcp = list[str](), list[Callable[[], int]]()
    for each in spec.split(";"):
        function, _, what = each.partition(":")
        name = _name(function)
        if name not in TCP:
            soft.append(each)
        elif (found := _FAULT.fullmatch(what)) is None or (found[1] != "hang" and found[2] is None):
            raise ParamInvalid(f"transport tcp does not understand the fault {each!r}")
        else:
            nth = 0 if found[3] == "*" else int(found[3] or 1)
            over_tcp.append(partial(_begin, _KINDS[found[1]], name, nth, int(found[2] or 0)))
    if soft and _softnpu().softnpu_fault(";".join(soft).encode()) != 0:
        raise ParamInvalid(f"softnpu does not understand the fault {spec!r}")
    for arm in over_tcp:
        arm()


def _begin(kind: int, function: str, nth: int, value: int = 0) -> int:
    """Begin a fault over TCP, and return its number."""
    number = int(ring.net_fault_begin(kind, TCP[function], nth, value))
    if number < 0:
        raise OutOfMemory(f"fault of {function}: {os.strerror(-number)}; {ring.NET_MOST_FAULTS} can be armed at a time")
    _begun.append(number)
    return number


_begun: list[int] = []
"""Faults over TCP, which may have ended."""

_numbers = itertools.count(1)


class SoftHold:
    """A place where calls or tasks of softnpu, or programs over TCP, wait; see :func:`soft_hold`."""

    def __init__(self, name: str, number: int | None = None) -> None:
        self._name = name
        self._number = number
        self._arrivals = 0

    def _fd(self) -> int:
        if self._number is not None:
            return int(ring.net_fault_fd(self._number))
        return int(_softnpu().softnpu_hold_arrivals(self._name.encode()))

    async def arrived(self, count: int = 1) -> None:
        """Wait until ``count`` calls or tasks have arrived here, counted from the beginning."""
        fd = self._fd()
        if fd < 0:
            raise ParamInvalid(f"hold {self._name} has been released")
        fd = os.dup(fd)  # softnpu closes its descriptor when the hold is released, perhaps during this wait
        try:
            while self._arrivals < count:
                await anyio.wait_readable(fd)
                self._arrivals += os.eventfd_read(fd)
        finally:
            os.close(fd)

    def release(self) -> None:
        """Let everything that waits here continue, and let later calls pass. No effect the second time."""
        if self._number is None:
            _softnpu().softnpu_hold_release(self._name.encode())
        else:
            ring.net_fault_end(self._number)


@contextmanager
def soft_hold(function: str, *, at: Literal["start", "half"] = "start", nth: int | None = 1) -> Iterator[SoftHold]:
    """Make the ``nth`` call of ``function`` from now on wait until the hold is released.

    So a test can act in a known state instead of sleeping: hold, wait for the arrival, act, release::

        with soft_hold("HcclBatchGet", at="half") as hold:
            pull = manager.pull_blocks(...)
            await hold.arrived()  # half of the bytes have landed
            pull.cancel()
            hold.release()

    An abort does not end a hold, as it does not end a copy that a device has started.

    Args:
        function: the vendor's name of the function, for example ``"HcclBatchGet"`` or ``"aclrtStreamAbort"``. ``"tcp_get"``
            and ``"tcp_put"`` hold programs of transport ``tcp``, which can be stopped meanwhile. ``"tcp_stop"`` holds
            nothing: what is stopped arrives there.
        at: ``"start"``: before a task moves its first byte, or before a call without a task does anything. ``"half"``:
            when a task has moved about half of its bytes, and is committed to move some more.
        nth: which call from now on; None means every call.

    Raises:
        ParamInvalid: if softnpu does not export ``function``, or 64 holds exist.
    """
    name, over_tcp = f"hold-{next(_numbers)}", _name(function)
    if over_tcp in TCP:
        hold = SoftHold(name, _begin(ring.NET_HOLD if at == "start" else ring.NET_HOLD_HALF, over_tcp, nth or 0))
    else:
        hold = SoftHold(name)
        soft_fault(f"{function}:{'hold' if at == 'start' else 'half'}={name}@{nth or '*'}")
    try:
        yield hold
    finally:
        hold.release()


@contextmanager
def soft_faults_cleared() -> Iterator[None]:
    """Disarm all faults and release all holds at the end."""
    try:
        yield
    finally:
        _softnpu().softnpu_fault_clear()
        while _begun:
            ring.net_fault_end(_begun.pop())


def soft_counters() -> dict[str, int]:
    """Return softnpu's counters: live objects, threads, bytes."""
    out = ffi.new("softnpu_counters *")
    _softnpu().softnpu_get_counters(out)
    return {name: getattr(out, name) for name, _ in ffi.typeof("softnpu_counters").fields}
