"""softnpu's fault switches and counters, by name. They concern the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from aiodatadist._native.library import SOFTNPU, ffi
from aiodatadist.errors import ParamInvalid


@cache
def _softnpu() -> Any:
    return ffi.dlopen(str(SOFTNPU))


def soft_fault(spec: str) -> None:
    """Arm faults: ``"HcclBatchGet:exec=507057@3"``, several separated by ``;``. softnpu.h has the grammar.

    Raises:
        ParamInvalid: the spec cannot be read. Nothing was armed.
    """
    if _softnpu().softnpu_fault(spec.encode()) != 0:
        raise ParamInvalid(f"softnpu does not understand the fault {spec!r}")


@contextmanager
def soft_faults_cleared() -> Iterator[None]:
    """Whatever is armed inside is disarmed afterwards."""
    try:
        yield
    finally:
        _softnpu().softnpu_fault_clear()


def soft_counters() -> dict[str, int]:
    """softnpu's counters: live objects, threads, bytes."""
    out = ffi.new("softnpu_counters *")
    _softnpu().softnpu_get_counters(out)
    return {name: getattr(out, name) for name, _ in ffi.typeof("softnpu_counters").fields}
