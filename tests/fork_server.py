"""The process that forks Python programs for ``children.py``, which starts one of them in each pytest process.

It has imported the package and what programs of tests use, and has done nothing else: it has one thread, no event loop, no
device, and has not opened softnpu. A program is forked twice. The process between ends at once, so that the program becomes
a child of pytest's process, which is the subreaper at that moment.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests import children
from tests.children import MOST_BYTES, MOST_DESCRIPTORS

IMPORTED = (
    "anyio._backends._asyncio",
    "numpy",
    "pytest",
    "hypothesis",
    "httpx",
    "fastapi",
    "uvicorn",
    "uvicorn.protocols.http.h11_impl",
    "prometheus_client",
    "opentelemetry.sdk.trace.export",
    "aiodatadist.adapters",
    "aiodatadist._cli.bench.command",
    "aiodatadist._cli.demo.context_worker",
    "aiodatadist._cli.demo.command",
    "aiodatadist._cli.demo.decode",
    "aiodatadist._cli.demo.prefill",
    "aiodatadist._cli.probe.child",
    "aiodatadist.context_caching.ems",
    "aiodatadist.telemetry.otel",
    "aiodatadist.telemetry.prometheus",
    "aiodatadist.testing",
)
"""What programs of tests import, as far as it is installed.

Not uvloop: some look whether it is there. Nor ``aiodatadist.blocking``: to import it is to have its handler of log records.
"""

Request = dict[str, Any]


def next_program(channel_number: int) -> Request:
    """Serve requests until pytest's process ends. Returns in each forked process, with the request that it is for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in IMPORTED:
        with suppress(ImportError), warnings.catch_warnings():
            if name.startswith("aiodatadist"):
                warnings.simplefilter("error")  # a program with -W error would see it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return _serve(channel_number)


def _serve(channel_number: int) -> Request:
    channel = socket.socket(fileno=channel_number)
    while True:
        words, received, _, _ = socket.recv_fds(channel, MOST_BYTES, MOST_DESCRIPTORS)
        if not words:
            os._exit(0)
        request: Request = json.loads(words)
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a Path would cost more than the fork
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            os.close(writing)
            os.read(reading, 1)  # ends when the process between has ended
            os.close(reading)
            return request | {"received": received, "asker": channel, "threads": threads}
        os.close(reading)
        os.waitpid(between, 0)
        for number in (writing, *received):
            os.close(number)


def become(request: Request) -> None:
    """Be the program that was asked for: to itself, it looks as if an interpreter had started it."""
    kept = set[int]()
    if request["forks"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            ours.detach()
            _close_all_but({0, 1, 2, theirs.fileno()})
            become(_serve(theirs.detach()))
            return
        theirs.close()
        kept.add(_above(ours, request["numbers"]))
        children.adopt(socket.socket(fileno=max(kept)), pid, os.environ)
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Not earlier: who knows of the program may signal it, or its group.
    request["asker"].send(json.dumps([os.getpid(), request["threads"]]).encode())
    request["asker"].detach()
    _take_descriptors(dict(zip(request["numbers"], request["received"], strict=True)), kept)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for limit, values in request["limits"]:
        resource.setrlimit(limit, tuple(values))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for option in request["warnings"]:
        sys.warnoptions.append(option)
        action, _, category = option.partition("::")
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))
    error: BaseException | None = None
    try:
        _run(request["command"])
    except BaseException as raised:
        error = raised
    _end(error)


def _above(channel: socket.socket, numbers: list[int]) -> int:
    """Return a copy of it whose number is greater than all of these."""
    with channel:
        return fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1)


def _take_descriptors(received: dict[int, int], kept: set[int]) -> None:
    """Put each in its place, and close all others but those that are kept."""
    above = max(received) + 1
    copies = {number: fcntl.fcntl(mine, fcntl.F_DUPFD, above) for number, mine in received.items()}
    for number, mine in copies.items():
        os.dup2(mine, number, inheritable=True)
    _close_all_but({*received, *kept})


def _close_all_but(kept: set[int]) -> None:
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(entry) not in kept:
            try:
                os.close(int(entry))
            except OSError:  # the descriptor that listed them
                continue


def _run(command: list[str]) -> None:
    main = sys.modules["__main__"].__dict__
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    match command:
        case ["-c", text, *arguments]:
            sys.argv, sys.path[0] = ["-c", *arguments], ""
            exec(compile(text, "<string>", "exec"), main)
        case ["-m", module, *arguments]:
            sys.argv, sys.path[0] = [module, *arguments], os.getcwd()  # noqa: PTH109
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        case [script, *arguments]:
            sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
            main["__file__"] = script
            exec(compile(Path(script).read_bytes(), script, "exec"), main)


def _end(error: BaseException | None) -> None:
    """End this process as an interpreter does, but do not take its modules apart, which costs more than most programs.

    Returns if the output cannot be written: the interpreter says so.
    """
    status, is_interrupt = 0, isinstance(error, KeyboardInterrupt)
    if isinstance(error, SystemExit):
        status = _status(error.code)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    error = None  # with the program's frames, and what they refer to
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.setswitchinterval(1000)  # from here on an interpreter lets no daemon thread run
    threading.excepthook = lambda _: None
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    if is_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    ctypes.PyDLL(None).exit(status)  # what C has registered runs, and no other thread of Python does


def _status(code: object) -> int:
    """Return the status of a process that ends with ``SystemExit``, and write what is no number."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1
