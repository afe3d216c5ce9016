"""Python programs in processes of their own, which are forked with everything imported: a start costs a third of a second.

``run`` and ``Popen`` are those of ``subprocess``, and ``create_subprocess_exec`` is asyncio's. What they start is a child of
this process as any other. One thing differs: modules are imported already. So a program about imports, the interpreter or an
entry point is for ``subprocess``. With options of Python other than ``-W`` an interpreter is started here, too.
``fork_server.py`` forks.

With ``forks=True`` the programs that such a program starts are forked, too: a command with workers costs what one start did.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import inspect
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, AnyStr

MOST_BYTES = 150_000
"""Of a request: an environment, a command, and numbers."""
MOST_DESCRIPTORS = 100

ROOT = Path(__file__).resolve().parent.parent
SERVER = "from tests import fork_server as server; server.become(server.next_program({channel}))"
AT_THE_START = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "LC_",
    "LANG",
    "TZ",
    "ASAN_",
    "TSAN_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
)
"""Variables that are read when an interpreter starts, or when a module is imported."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
SET_CHILD_SUBREAPER = 36
"""The option of ``prctl`` that makes orphans among the descendants of this process its children."""

_started = subprocess.Popen
_libc = ctypes.CDLL(None, use_errno=True)


class _Server:
    """The process that forks.

    Args:
        channel: leads to it.
        pid: its number; it is a child of this process.
        environment: the variables that it was started with.
    """

    def __init__(self, channel: socket.socket, pid: int, environment: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._channel, self._pid, self._owner = channel, pid, os.getpid()
        self._environment = environment
        atexit.register(self._end)

    @classmethod
    def started(cls, environment: Mapping[str, str]) -> _Server:
        """Start an interpreter that becomes one, with these variables."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        text = SERVER.format(channel=theirs.fileno())
        command, numbers = [sys.executable, "-c", text], [theirs.fileno()]
        process = _started(command, cwd=ROOT, env=environment, pass_fds=numbers, stdin=subprocess.DEVNULL)
        theirs.close()
        process.returncode = 0  # it is waited for in _end
        return cls(ours, process.pid, _at_the_start(environment))

    def _end(self) -> None:
        self._channel.close()
        if os.getpid() == self._owner:
            os.waitpid(self._pid, 0)

    def descriptor(self) -> int:
        """Return the number of the open file over which this process talks to the server."""
        return self._channel.fileno()

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Return True if an interpreter started in this environment would be like the server."""
        return _at_the_start(environment) == self._environment

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Return the process id of the child that now runs."""
        words = json.dumps(request).encode()
        assert len(words) < MOST_BYTES, f"a request of {len(words)} bytes: at most {MOST_BYTES}"
        with self._lock:
            _libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._channel, [words], descriptors)
                pid, threads = json.loads(self._channel.recv(MOST_BYTES))
            finally:
                _libc.prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert threads == 1, f"the server has {threads} threads: a child would lose the locks that they hold"
        return int(pid)


def _at_the_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(AT_THE_START)}


_servers: list[_Server] = []
"""The servers of this process, once they are needed: one for its own environment, then those for others."""


def server() -> _Server:
    """Return the server of this process. It ends when this process does."""
    if not _servers:
        _servers.append(_Server.started(os.environ))
    return _servers[0]


def serve(environment: Mapping[str, str]) -> None:
    """Let programs be forked that an interpreter would find other libraries for: by a further server, if it is needed."""
    if _server_for(environment) is None:
        _servers.append(_Server.started(environment))


def _server_for(environment: Mapping[str, str]) -> _Server | None:
    server()
    return next((each for each in _servers if each.can_start(environment)), None)


def adopt(channel: socket.socket, pid: int, environment: Mapping[str, str]) -> None:
    """Have this process's programs forked by a server that is there already, whatever starts them through ``subprocess``."""
    _servers.append(_Server(channel, pid, _at_the_start(environment)))
    subprocess.Popen = Popen  # type: ignore[misc]


def own_descriptors() -> set[int]:
    """Return what the server has open in this process, which stays open when a test ends: nothing before its first use."""
    return {each.descriptor() for each in _servers}


def _program(command: Any) -> tuple[list[str], list[str]] | None:
    """Return a command's ``-W`` options, and what is behind all options; None if it is not a program for the server."""
    if not isinstance(command, (list, tuple)) or os.fspath(command[0]) != sys.executable:
        return None
    words, options = [os.fspath(word) for word in command[1:]], []
    while words and words[0] == "-W":
        options.append(words[1])
        del words[:2]
    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        return None
    return options, words


class Popen(subprocess.Popen[AnyStr]):
    """``subprocess.Popen`` whose Python programs are forked.

    Args:
        forks: programs that this one starts through ``subprocess``, or asyncio's own loop, are forked as well.
    """

    def __init__(self, *given: Any, forks: bool = False, **named: Any) -> None:
        self._forks = forks
        super().__init__(*given, **named)

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(_started._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        program = _program(asked["args"])
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        unusual = any(asked[name] is not None for name in ("executable", "preexec_fn", "gid", "gids", "uid"))
        usable = program is not None and not unusual and not asked["shell"] and asked["close_fds"]
        server = _server_for(environment) if usable else None
        if program is None or server is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        places = {0: asked["p2cread"], 1: asked["c2pwrite"], 2: asked["errwrite"]}
        places = {place: place if number == -1 else number for place, number in places.items()}
        places |= {number: number for number in asked["pass_fds"]}
        options, command = program
        request = {
            "command": command,
            "warnings": options,
            "environment": environment,
            "cwd": os.fspath(asked["cwd"] or Path.cwd()),
            "session": bool(asked["start_new_session"]),
            "group": asked.get("process_group", -1),
            "forks": self._forks,
            "limits": [(limit, resource.getrlimit(limit)) for limit in LIMITS],
            "numbers": list(places),
        }
        try:
            self.pid = server.start(request, list(places.values()))
        finally:
            self._close_pipe_fds(*(asked[name] for name in PIPES))  # type: ignore[attr-defined]
        self._child_created = True


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def run(
    command: list[str],
    *,
    input: str | None = None,  # noqa: A002 - subprocess's name
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run like ``subprocess.run``, but fork Python programs."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


class _Listener(asyncio.StreamReaderProtocol):
    """Reads a pipe, and lets the loop close it at its end."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.closed = asyncio.Event()

    def eof_received(self) -> bool:
        super().eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.closed.set()


class Process:
    """``asyncio.subprocess.Process``, whose program is forked."""

    def __init__(self, process: Popen[bytes]) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(process.pid)
        self._ended = asyncio.Event()
        self._listeners: list[_Listener] = []
        self.pid = process.pid
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None

    async def _open(self) -> None:
        self._loop.add_reader(self._pidfd, self._has_ended)
        if self._process.stdin is not None:
            protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
            transport, _ = await self._loop.connect_write_pipe(lambda: protocol, self._process.stdin)
            self.stdin = asyncio.StreamWriter(transport, protocol, None, self._loop)
        self.stdout = await self._reader(self._process.stdout)
        self.stderr = await self._reader(self._process.stderr)

    async def _reader(self, pipe: IO[bytes] | None) -> asyncio.StreamReader | None:
        if pipe is None:
            return None
        reader = asyncio.StreamReader()
        listener = _Listener(reader)
        self._listeners.append(listener)
        await self._loop.connect_read_pipe(lambda: listener, pipe)
        return reader

    def _has_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        if self.stdin is not None:
            self.stdin.close()
        self._ended.set()

    @property
    def returncode(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self._process.returncode if self._ended.is_set() else None

    async def wait(self) -> int:
        """Return its status when it has ended, and its pipes are closed."""
        await self._ended.wait()
        for listener in self._listeners:
            await listener.closed.wait()
        return self._process.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        """Close its input, and return its output and errors when it has ended."""
        if self.stdin is not None:
            self.stdin.close()
        out, errors = await asyncio.gather(_all_of(self.stdout), _all_of(self.stderr))
        await self.wait()
        return out, errors

    def send_signal(self, number: int) -> None:
        """Raise ProcessLookupError if it has ended."""
        if self._ended.is_set():
            raise ProcessLookupError
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


async def _all_of(stream: asyncio.StreamReader | None) -> bytes:
    return b"" if stream is None else await stream.read()


async def create_subprocess_exec(*command: str, **options: Any) -> Process:
    """Start a process like ``asyncio.create_subprocess_exec``, but fork Python programs."""
    process = Process(Popen(command, **options))
    await process._open()
    return process
