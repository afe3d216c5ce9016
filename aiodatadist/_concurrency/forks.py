"""Protection of a forked child: the event loop, its registrations and our tasks are the parent's.

A child that leaves through ``sys.exit`` unwinds its copy of the event loop, which cancels all tasks. Ours would then
part from peers through the parent's sockets, and the loop would remove the parent's sockets from the epoll set that
both share. libuv passes its changes of that set to the kernel through memory that both share, too, and aborts a process
that finds another's there. So a child does not get this memory: a child that runs uvloop's loop again ends with a
SIGSEGV, and the parent continues.
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
"""The kernel's ``MADV_DONTFORK``. Python's ``mmap`` offers it only for its own mappings."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_roots: WeakSet[asyncio.Task[None]] = WeakSet()
_left: list[asyncio.Task[None]] = []
_epolls: list[int] = []

generation = 0
"""The generation of this process: one more than its parent had when it was forked.

What began in an earlier generation belongs to the parent.
"""


def since(pid: int) -> str:
    """Return words for refusing something that began in process ``pid``, which is not this one."""
    return f"before a fork, in process {pid}: this is its child, process {os.getpid()}"


def guard(root: asyncio.Task[None]) -> None:
    """Bind a task, and all that it starts, to this process: a forked child does not run them, not even to their end."""
    _roots.add(root)


def _before() -> None:
    """Note what a child must not run. Runs in the parent, on the thread that forks: only its loop continues in the child."""
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
    """Return all epoll sets of the process.

    uvloop does not say which one is its own, and a child can use none of the others.
    """
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed in the meantime
            if str(entry.readlink()) == "anon_inode:[eventpoll]":
                found.append(int(entry.name))
    return found


def _keep_rings() -> None:
    """Keep the memory of this process's io_urings, which it shares with the kernel, out of the child."""
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
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))  # kept for ever: destroying a task would run its clean-up
    for number in _epolls:
        with select.epoll() as own:
            os.dup2(own.fileno(), number, inheritable=False)
    _left.clear()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
