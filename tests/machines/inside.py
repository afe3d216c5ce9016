"""Programs on a machine: ``python -m tests.machines.inside NAMESPACE MODULE ARGUMENTS``, and calls of this process there."""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from aiodatadist._cli.kit.pipes import die_with_parent

FOLDER = Path("/run/netns")
"""The folder in which ``ip netns`` keeps the names of namespaces."""
CLONE_NEWNET = 0x40000000
T = TypeVar("T")


def enter(namespace: str) -> None:
    """Move the calling thread into a network namespace. Raises OSError."""
    number = os.open(FOLDER / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(number, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(number)


def call_inside(namespace: str, call: Callable[[], T]) -> T:
    """Return what a call returns in a thread of that namespace. Sockets and devices that it opens stay there."""

    def called() -> T:
        enter(namespace)
        return call()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(called).result()


if __name__ == "__main__":
    die_with_parent()
    enter(sys.argv[1])
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
