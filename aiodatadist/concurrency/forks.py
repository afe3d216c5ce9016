"""What a forked child must leave alone: the event loop, its registrations and our tasks are the parent's.

A child that leaves through ``sys.exit`` unwinds its copy of the event loop, which cancels all tasks. Ours would part from
peers through the parent's sockets, and the loop would take the parent's sockets out of the epoll set that both share. libuv
hands its changes of that set to the kernel through memory that both share, too, and aborts a process that finds another's
there: a child does not get this memory, so one that runs uvloop's loop once more ends with a SIGSEGV, and the parent goes on.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
from asyncio import _get_running_loop  # get_running_loop() raises where there is none, which is fine here
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

import anyio

DONTFORK = 10
"""``MADV_DONTFORK``, which Python's ``mmap`` has for its own mappings only."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_roots: WeakSet[asyncio.Task[None]] = WeakSet()
_left: list[asyncio.Task[None]] = []
_epolls: list[int] = []

generation = 0
"""Of this process: one more than its parent's had when it was forked. What began in an earlier one is the parent's."""


def since(pid: int) -> str:
    """For the refusal of what began in process ``pid``, which is not this one."""
    return f"before a fork, in process {pid}: this is its child, process {os.getpid()}"


def guard(root: asyncio.Task[None]) -> None:
    """This task, and all that it starts, belong to this process: a forked child does not run them, not even to an end."""
    _roots.add(root)


def _before() -> None:
    """In the parent, on the thread that forks: only a loop that runs there goes on in the child."""
    _left.clear()
    _epolls.clear()
    loop = _get_running_loop()
    roots = {id(root) for root in _roots if not root.done() and root.get_loop() is loop}
    if loop is None or not roots:
        return
    selector = getattr(loop, "_selector", None)
    _epolls.extend(_all_epolls() if selector is None else [selector.fileno()])
    if selector is None:
        _keep_rings()
    tasks = {id(task): task for task in asyncio.all_tasks(loop)}
    if asyncio.current_task() is not None:
        parents = {info.id: info.parent_id for info in anyio.get_running_tasks()}
        _left.extend(task for name, task in tasks.items() if _is_below(name, parents, roots))
    else:
        _left.extend(task for name, task in tasks.items() if name in roots)


def _all_epolls() -> list[int]:
    """Of the process: uvloop does not say which is its own, and no other one is of use in a child."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(entry.readlink()) == "anon_inode:[eventpoll]":
                found.append(int(entry.name))
    return found


def _keep_rings() -> None:
    """The memory of this process's io_urings, which it shares with the kernel, is not a child's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("anon_inode:[io_uring]"):
            first, end = (int(address, 16) for address in line.split()[0].split("-"))
            _libc.madvise(first, end - first, DONTFORK)


def _is_below(task: int | None, parents: dict[int, int | None], roots: set[int]) -> bool:
    while task is not None:
        if task in roots:
            return True
        task = parents.get(task)
    return False


def _after_in_parent() -> None:
    _left.clear()


def _after_in_child() -> None:
    global generation  # noqa: PLW0603 - a fact about the process
    generation += 1
    for task in _left:
        asyncio._unregister_task(task)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))  # for ever: to destroy one would run its end
    for number in _epolls:
        with select.epoll() as own:
            os.dup2(own.fileno(), number, inheritable=False)
    _left.clear()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
