"""Engines as child processes on loopback, stopped by process id.

Redis listens on loopback only. Mooncake's processes, and every process that uses its client, the test run included,
open ports on all addresses as long as the test lasts, whatever their options are.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from aiodatadist._context_caching.pools.mooncake import store as mooncake_store
from aiodatadist._testing.ports import free_port

T = TypeVar("T")

PATIENCE = 20.0
"""Seconds in which a server must be ready."""
MIB = 1 << 20


def eventually(look: Callable[[], T | None], what: str) -> T:
    """Return what ``look`` returns once that is true, polling at growing intervals. Blocks."""
    end, pause = time.monotonic() + PATIENCE, 0.005
    while True:
        try:
            if found := look():
                return found
        except (OSError, ValueError):
            pass
        if time.monotonic() > end:
            raise AssertionError(f"not within {PATIENCE:g} s: {what}")
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


class Server(ABC):
    """A process that can be stopped in every way, and started again at the same address."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return the binary and its arguments."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Return True if it answers. May raise OSError or ValueError instead of returning False."""

    def start(self) -> None:
        """Start the process, and wait until it is ready."""
        assert self._process is None
        process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        self._process = process

        def look() -> bool:
            if process.poll() is not None:
                self._log.seek(0)
                raise AssertionError(f"{self.command()} ended: {self._log.read()[-2000:].decode(errors='replace')}")
            return self.is_ready()

        eventually(look, f"{self.command()[0]} is ready")

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stop it with SIGSTOP: it hangs, and its sockets stay open. Returns when all of its threads are stopped."""
        assert self._process is not None
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """Continue it with SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait for its end. Does nothing if it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Kill it, and delete its log."""
        self.kill()
        self._log.close()


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start the servers, and end them with the context."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        for server in servers:
            server.start()
        yield


# ---- Redis ----


class RedisServer(Server):
    """A Redis server without persistence.

    Args:
        memory: bytes; when they are used up it evicts, or with ``policy="noeviction"`` refuses.
    """

    def __init__(
        self,
        memory: int = 512 * MIB,
        policy: str = "allkeys-lru",
        *,
        is_in_cluster: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.port = free_port()
        self.folder = tempfile.mkdtemp(prefix="aiodatadist-redis-")
        self._options = [*options, "--maxmemory", str(memory), "--maxmemory-policy", policy]
        if is_in_cluster:
            self._options += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
            self._options += ["--cluster-node-timeout", "1500", "--cluster-require-full-coverage", "no"]

    @property
    def url(self) -> str:
        """The URL of a pool over this server."""
        return f"redis://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        own = [
            "--bind",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--dir",
            self.folder,
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        return ["redis-server", *own, *self._options]

    def is_ready(self) -> bool:
        return self.ask("PING").startswith((b"+PONG", b"-NOAUTH"))

    def ask(self, *words: str) -> bytes:
        """Send one command over a new connection; return the raw reply. Blocks."""
        return self.ask_at("127.0.0.1", *words)

    def ask_at(self, host: str, *words: str) -> bytes:
        """Do the same at another address of the server."""
        with socket.create_connection((host, self.port), 2) as connection:
            connection.sendall(b"*%d\r\n" % len(words))
            for word in words:
                connection.sendall(b"$%d\r\n%s\r\n" % (len(word), word.encode()))
            connection.shutdown(socket.SHUT_WR)
            reply = b""
            while part := connection.recv(1 << 16):
                reply += part
            return reply

    def add(self, *options: str) -> None:
        """Add options. They count from the next start."""
        self._options += options

    def cluster_port(self) -> str:
        """Return the port for other servers of a cluster."""
        return self._options[self._options.index("--cluster-port") + 1]

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder)


class RedisSentinel(RedisServer):
    """A sentinel that alone decides which server of a name is the master.

    Args:
        master: the first one.
        options: lines of its configuration.
    """

    def __init__(self, name: str, master: RedisServer, *, options: Sequence[str] = (), port: int | None = None) -> None:
        super().__init__()
        down = [f"sentinel down-after-milliseconds {name} 300", f"sentinel failover-timeout {name} 1000"]
        watched = f"sentinel monitor {name} 127.0.0.1 {port or master.port} 1"
        lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}", watched, *down, *options]
        self._file = Path(self.folder, "sentinel.conf")
        self._file.write_text("\n".join(lines))

    def command(self) -> Sequence[str]:
        return ["redis-server", str(self._file), "--sentinel"]


def make_cluster(servers: Sequence[RedisServer]) -> None:
    """Share the slots evenly among running servers, as redis-cli would; return when all of them agree."""
    step = -(-16384 // len(servers))
    for i, server in enumerate(servers):
        server.ask("CLUSTER", "ADDSLOTSRANGE", str(i * step), str(min((i + 1) * step, 16384) - 1))
        server.ask("CLUSTER", "SET-CONFIG-EPOCH", str(i + 1))
    for server in servers[1:]:
        servers[0].ask("CLUSTER", "MEET", "127.0.0.1", str(server.port), server.cluster_port())
    for server in servers:

        def agrees(server: RedisServer = server) -> bool:
            info = server.ask("CLUSTER", "INFO")
            return b"cluster_state:ok" in info and b"cluster_slots_ok:16384" in info

        eventually(agrees, f"the cluster is whole, as {server.port} sees it")


@contextmanager
def redis_cluster(memory: int = 256 * MIB) -> Iterator[list[RedisServer]]:
    """Run a cluster of three servers."""
    servers = [RedisServer(memory, is_in_cluster=True) for _ in range(3)]
    with running(*servers):
        make_cluster(servers)
        yield servers


# ---- Mooncake ----


def binary(name: str) -> str:
    """Return the path of a program in the wheel itself, because its console script would be one more process."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / name)


class MooncakeMaster(Server):
    """A master. Start a new one for every group of tests: keys that a dead process left confuse the next group."""

    def __init__(self, client_ttl: int = 3) -> None:
        super().__init__()
        self.port, self.metrics = free_port(), free_port()
        self._client_ttl = client_ttl

    @property
    def url(self) -> str:
        """The URL of a pool with this master."""
        return f"mooncake://127.0.0.1:{self.port}?metrics={self.metrics}"

    def command(self) -> Sequence[str]:
        addresses = ["--rpc_address=127.0.0.1", f"--rpc_port={self.port}"]
        addresses += ["--metrics_host=127.0.0.1", f"--metrics_port={self.metrics}"]
        times = ["--default_kv_lease_ttl=1000", f"--client_ttl={self._client_ttl}"]
        return [binary("mooncake_master"), *addresses, *times]

    def is_ready(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 2):
            return bool(json.loads(self.ask("/health"))["service_ready"])

    def ask(self, path: str) -> str:
        """Return the master's answer to an HTTP request. Blocks."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}{path}", timeout=2) as answer:
            return str(answer.read().decode())

    def segments(self) -> list[str]:
        """Return the names of the segments that the master knows."""
        return self.ask("/get_all_segments").split()


class MooncakeLender(Server):
    """A process that lends memory to the pool, and does nothing else.

    Attributes:
        segment: the master's name for its memory.
    """

    def __init__(self, master: MooncakeMaster, memory: int = 256 * MIB) -> None:
        super().__init__()
        self._master = master
        self._memory = memory
        self._port = free_port()
        self._before: set[str] = set()
        self.segment = ""

    def command(self) -> Sequence[str]:
        where = ["-host=127.0.0.1", f"-port={self._port}", f"-master_server_address=127.0.0.1:{self._master.port}"]
        return [
            binary("mooncake_client"),
            *where,
            "-metadata_server=P2PHANDSHAKE",
            "-protocol=tcp",
            f"-global_segment_size={self._memory // MIB} MB",
        ]

    def start(self) -> None:
        self._before = set(self._master.segments())
        super().start()

    def is_ready(self) -> bool:
        found = set(self._master.segments()) - self._before
        self.segment = next(iter(found), "")
        return bool(found)


# ---- whether there are any ----


def missing_redis() -> str:
    """Return what is missing for a test with Redis, or nothing."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed: apt-get install redis-server"
    if any(importlib.util.find_spec(name) is None for name in ("redis", "xxhash")):
        return "redis-py is not installed: pip install '.[redis]'"
    return ""


def missing_mooncake() -> str:
    """Return what is missing for a test with Mooncake, or nothing."""
    try:
        mooncake_store.load()
    except ImportError as error:
        return str(error)
    return ""
