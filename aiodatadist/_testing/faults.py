"""Fault switches and counters of softnpu, by name. They affect the whole process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import anyio

from aiodatadist._native.library import SOFTNPU, ffi
from aiodatadist.errors import ParamInvalid


@cache
def _softnpu() -> Any:
    return ffi.dlopen(str(SOFTNPU))


def soft_fault(spec: str) -> None:
    """Arm faults: ``"HcclBatchGet:exec=507057@3"``, several separated by ``;``. softnpu.h has the grammar.

    Raises:
        ParamInvalid: if the spec cannot be read. Nothing was armed.
    """
    if _softnpu().softnpu_fault(spec.encode()) != 0:
        raise ParamInvalid(f"softnpu does not understand the fault {spec!r}")


_numbers = itertools.count(1)


class SoftHold:
    """A place where calls or tasks of softnpu wait; see :func:`soft_hold`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arrivals = 0

    async def arrived(self, count: int = 1) -> None:
        """Wait until ``count`` calls or tasks have arrived here, counted from the beginning."""
        library = _softnpu()
        fd = library.softnpu_hold_arrivals(self._name.encode())
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
        _softnpu().softnpu_hold_release(self._name.encode())


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
        function: the vendor's name of the function, for example ``"HcclBatchGet"`` or ``"aclrtStreamAbort"``.
        at: ``"start"``: before a task moves its first byte, or before a call without a task does anything. ``"half"``:
            when a task has moved about half of its bytes, and is committed to move some more.
        nth: which call from now on; None means every call.

    Raises:
        ParamInvalid: if softnpu does not export ``function``, or 64 holds exist.
    """
    hold = SoftHold(f"hold-{next(_numbers)}")
    soft_fault(f"{function}:{'hold' if at == 'start' else 'half'}={hold._name}@{nth or '*'}")
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


def soft_counters() -> dict[str, int]:
    """Return softnpu's counters: live objects, threads, bytes."""
    out = ffi.new("softnpu_counters *")
    _softnpu().softnpu_get_counters(out)
    return {name: getattr(out, name) for name, _ in ffi.typeof("softnpu_counters").fields}
