"""A process's watch over itself: operations that do not end, failures that no caller saw, and resources left behind."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from aiodatadist.testing import soft_counters

Say = Callable[[str, str], None]
"""Called with the rule that was broken and a description, from any thread."""

POOLED = ("AnyIO worker", "aiodatadist checksums", "asyncio_")
"""Threads of pools of fixed size, which start when they are needed and stay."""
LOOK = 0.5
"""Seconds between two checks of running operations."""


class Lookout:
    """A watch over this process, from :meth:`begin` on."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._running: dict[int, tuple[str, float]] = {}
        self._number = 0
        self._over = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> None:
        """Start the watch on the event loop, if there is one."""
        logging.basicConfig(format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        logging.getLogger().addHandler(_Errors(self._say))
        logging.getLogger("aiodatadist").setLevel(logging.INFO)
        warnings.simplefilter("error", ResourceWarning)
        sys.unraisablehook = self._unraisable
        threading.excepthook = self._thread_failed
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            self._loop.set_exception_handler(self._loop_failed)
        threading.Thread(target=self._look_on, name="lookout", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    @contextmanager
    def over(self, what: str, seconds: float) -> Iterator[None]:
        """Report a violation, and show the tasks, if the body does not end within ``seconds``."""
        self._number += 1
        number = self._number
        self._running[number] = (what, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._running.pop(number, None)

    def _look_on(self) -> None:
        last = time.monotonic()
        while not self._over.wait(LOOK):
            now = time.monotonic()
            if now - last > 2 * LOOK:  # the whole process stood still: that is no fault of its operations
                self._running = {
                    number: (what, end + now - last) for number, (what, end) in list(self._running.items())
                }
            last = now
            for number, (what, end) in list(self._running.items()):
                if now > end:
                    self._running.pop(number, None)
                    self._stuck(what)

    def _stuck(self, what: str) -> None:
        self._say("I3", f"{what} does not end")
        self.show()

    def show(self) -> None:
        """Log, from any thread, the stacks of all threads, what all tasks wait for, and what each file descriptor is."""
        faulthandler.dump_traceback(all_threads=True)
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                print(descriptor.name, descriptor.readlink(), file=sys.stderr)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_show_tasks, self._loop)

    # ---- failures that no caller saw ----

    def _unraisable(self, args: Any) -> None:
        trace = "".join(traceback.format_exception(args.exc_value)) if args.exc_value else str(args.exc_type)
        self._say("I7", f"unraisable, in {args.object!r}: {trace}")

    def _thread_failed(self, args: Any) -> None:
        self._say("I7", f"thread {args.thread}: {''.join(traceback.format_exception(args.exc_value))}")

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        trace = "".join(traceback.format_exception(error)) if error else ""
        self._say("I7", f"event loop: {context.get('message')}: {trace}")


def _show_tasks(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.print_stack(limit=8, file=sys.stderr)  # stdout is what the command reads


class _Errors(logging.Handler):
    """A log handler that reports errors as violations: the library logs what a peer or a network does as a warning."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.ERROR)
        self._say = say
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._say("I7", f"logged as an error: {self.format(record)}")


@dataclass(frozen=True)
class Belongings:
    """The resources of a process when nothing is running."""

    files: int
    threads: int
    tasks: int
    mappings: int
    streams: int
    events: int
    comms: int
    imported: int
    device_bytes: int
    pool_bytes: int = 0

    @classmethod
    def now(cls, pool_bytes: int = 0) -> Belongings:
        """Count the resources of the process now. ``pool_bytes`` are the used bytes of all pools."""
        gc.collect()
        soft = soft_counters()
        names = ("streams", "events", "comms", "imported", "device_bytes")
        files = sum(1 for _ in Path("/proc/self/fd").iterdir())
        threads = sum(1 for name in thread_names() if not name.startswith(POOLED))
        mappings = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:")
        numbers = {name: soft[name] for name in names}
        return cls(files, threads, _tasks(), mappings, **numbers, pool_bytes=pool_bytes)

    def more_than(self, other: Belongings) -> list[str]:
        """Return a description of the resources of which there are more than in ``other``."""
        pairs = ((each.name, getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return [f"{name}: {mine}, and {theirs} at first" for name, mine, theirs in pairs if mine > theirs]


def resident() -> int:
    """Return the bytes of memory that the process uses."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def thread_names() -> list[str]:
    """Return the names of all threads, sorted."""
    return sorted(thread.name for thread in threading.enumerate())


def _tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
