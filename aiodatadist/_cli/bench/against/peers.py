"""Other libraries move blocks between two processes. This script runs in an environment that has them, but not this package.

``peers.py NAME`` is the initiator, and starts ``peers.py NAME owner``, which has the blocks. Lines of JSON on stdin and
stdout: a workload (:class:`Workload`), then ``{"seconds": S}`` for a window of transfers or ``{"check": true}``, each
answered by one line. It ends with its stdin.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

PR_SET_PDEATHSIG = 1
PAGE = 2 << 20
"""The alignment of buffers: a huge page, as for the library's own memory."""


class Workload(NamedTuple):
    """Blocks of ``block`` bytes at these offsets: of the source's buffer, and of the target's."""

    op: str
    nbytes: int
    block: int
    sources: list[int]
    targets: list[int]


class Buffer:
    """Private memory with all pages touched. Each block is filled with its owner and its position."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        skip = -start % PAGE
        self.address, self.nbytes = start + skip, nbytes
        self.view = memoryview(self._map)[skip : skip + nbytes]
        self.view[:] = bytes(nbytes)

    def fill(self, block: int, offsets: list[int]) -> None:
        for offset in offsets:
            self.view[offset : offset + block] = contents(offset, block)

    def wrong(self, work: Workload) -> int:
        """Return the number of targets whose contents differ from their source's."""
        pairs = zip(work.sources, work.targets, strict=True)
        return sum(self.view[b : b + work.block] != contents(a, work.block) for a, b in pairs)


def contents(offset: int, nbytes: int) -> bytes:
    unit = struct.pack("<QQ", offset, 0x5A5A5A5A5A5A5A5A)
    return (unit * (nbytes // len(unit) + 1))[:nbytes]


class Mover:
    """A library.

    The owner calls :meth:`describe`. The initiator passes the result to :meth:`connect`, then calls :meth:`move`.
    """

    what: str

    def __init__(self, buffer: Buffer, side: str) -> None:
        self.buffer, self.side = buffer, side

    def describe(self) -> dict[str, Any]:
        return {"address": self.buffer.address, "pid": os.getpid()}

    def connect(self, owner: dict[str, Any], work: Workload) -> None:
        """Connect to the owner. Called once, before the first transfer."""
        here, there = self.buffer.address, owner["address"]
        mine, theirs = (work.targets, work.sources) if work.op == "pull" else (work.sources, work.targets)
        self.work = work
        self.local = [here + offset for offset in mine]
        self.remote = [there + offset for offset in theirs]

    def move(self) -> None:
        """Move all blocks, and return when they have arrived."""
        raise NotImplementedError


class ProcessVm(Mover):
    """The kernel's own copy between two processes, called from plain Python."""

    what = "process_vm_readv, process_vm_writev"
    MOST = 1024  # IOV_MAX

    def connect(self, owner: dict[str, Any], work: Workload) -> None:
        super().connect(owner, work)
        libc = ctypes.CDLL(None, use_errno=True)
        self._call = libc.process_vm_readv if work.op == "pull" else libc.process_vm_writev
        self._call.restype = ctypes.c_ssize_t
        self._pid = ctypes.c_int(owner["pid"])
        pieces = [slice(i, i + self.MOST) for i in range(0, len(self.local), self.MOST)]
        self._batches = [(self._vector(self.local[piece]), self._vector(self.remote[piece])) for piece in pieces]

    def _vector(self, addresses: list[int]) -> Any:
        words = [word for address in addresses for word in (address, self.work.block)]
        return (ctypes.c_size_t * len(words))(*words)

    def move(self) -> None:
        for mine, theirs in self._batches:
            count = ctypes.c_ulong(len(mine) // 2)
            moved = self._call(self._pid, mine, count, theirs, count, ctypes.c_ulong(0))
            if moved != len(mine) // 2 * self.work.block:
                raise OSError(ctypes.get_errno(), f"{self.what}: {moved} bytes moved")


class Nixl(Mover):
    """NIXL over UCX, which is configured by its own environment variables (UCX_TLS)."""

    def __init__(self, buffer: Buffer, side: str) -> None:
        super().__init__(buffer, side)
        api = import_module("nixl._api")
        settings = " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("UCX_"))
        self.what = f"nixl {version('nixl')} over UCX {settings}".strip()
        self._agent = api.nixl_agent(side, api.nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(buffer.address, buffer.nbytes, 0, "")], "DRAM")

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "metadata": self._agent.get_agent_metadata().hex()}

    def connect(self, owner: dict[str, Any], work: Workload) -> None:
        super().connect(owner, work)
        name = self._agent.add_remote_agent(bytes.fromhex(owner["metadata"]))
        mine, theirs = (
            self._agent.get_xfer_descs([(address, work.block, 0) for address in side], "DRAM")
            for side in (self.local, self.remote)
        )
        self._handle = self._agent.initialize_xfer("READ" if work.op == "pull" else "WRITE", mine, theirs, name)

    def move(self) -> None:
        state = self._agent.transfer(self._handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise OSError(f"nixl ended a transfer with {state}")


class Mooncake(Mover):
    """Mooncake's TransferEngine over TCP, the one transport that needs no RDMA."""

    HOST: ClassVar = "127.0.0.1"

    def __init__(self, buffer: Buffer, side: str) -> None:
        super().__init__(buffer, side)
        self.what = f"mooncake {version('mooncake-transfer-engine-non-cuda')} over TCP"
        self._engine = import_module("mooncake.engine").TransferEngine()
        self._done("initialize", self._engine.initialize(self.HOST, "P2PHANDSHAKE", "tcp", ""))
        self._done("register_memory", self._engine.register_memory(buffer.address, buffer.nbytes))

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "session": f"{self.HOST}:{self._engine.get_rpc_port()}"}

    def connect(self, owner: dict[str, Any], work: Workload) -> None:
        super().connect(owner, work)
        read, write = self._engine.batch_transfer_sync_read, self._engine.batch_transfer_sync_write
        self._call = read if work.op == "pull" else write
        self._session, self._lengths = owner["session"], [work.block] * len(self.local)

    def move(self) -> None:
        self._done("a transfer", self._call(self._session, self.local, self.remote, self._lengths))

    @staticmethod
    def _done(what: str, code: int) -> None:
        if code != 0:
            raise OSError(f"mooncake: {what} returned {code}")


MOVERS: dict[str, type[Mover]] = {"process_vm": ProcessVm, "nixl": Nixl, "mooncake": Mooncake}


# ---- the two processes ----


def say(message: dict[str, Any], out: int) -> None:
    """Write a line to the real stdout. Whatever libraries print goes to stderr."""
    os.write(out, json.dumps(message).encode() + b"\n")


def heard() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def own(name: str, out: int) -> None:
    messages = heard()
    work = Workload(**next(messages))
    buffer = Buffer(work.nbytes)
    buffer.fill(work.block, work.sources if work.op == "pull" else [])
    mover = MOVERS[name](buffer, "owner")
    say(mover.describe(), out)
    for message in messages:
        if "clear" in message:
            buffer.view[:] = bytes(buffer.nbytes)
        say({"wrong": buffer.wrong(work)}, out)


class OwnerProcess:
    """The other process."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, name, "owner"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise OSError("the owner's process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu_seconds(self) -> float:
        words = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def initiate(name: str, out: int) -> None:
    messages = heard()
    work = Workload(**next(messages))
    owner = OwnerProcess(name)
    try:
        described = owner.ask(work._asdict())
        buffer = Buffer(work.nbytes)
        if work.op == "push":
            buffer.fill(work.block, work.sources)
        mover = MOVERS[name](buffer, "initiator")
        mover.connect(described, work)
        mover.move()
        say({"ready": mover.what}, out)
        for message in messages:
            say(check(mover, owner) if "check" in message else window(mover, owner, message["seconds"]), out)
    except Exception as error:  # libraries have exceptions of their own
        say({"failed": f"{type(error).__name__}: {error}"}, out)
    finally:
        owner.stop()


def window(mover: Mover, owner: OwnerProcess, seconds: float) -> dict[str, Any]:
    latency: list[float] = []
    began, cpu = time.perf_counter(), time.process_time() + owner.cpu_seconds()
    now = began
    while not latency or now < began + seconds:
        start = now
        mover.move()
        now = time.perf_counter()
        latency.append(now - start)
    spent = time.process_time() + owner.cpu_seconds() - cpu
    return {"seconds": now - began, "cpu_seconds": spent, "latency": latency}


def check(mover: Mover, owner: OwnerProcess) -> dict[str, Any]:
    """Clear the targets, move everything once, and check them."""
    if mover.work.op == "pull":
        mover.buffer.view[:] = bytes(mover.buffer.nbytes)
        mover.move()
        return {"wrong": mover.buffer.wrong(mover.work)}
    owner.ask({"clear": True})
    mover.move()
    return owner.ask({"check": True})


def end_with_parent() -> None:
    """Ask Linux to kill this process with its parent, because a stopped process does not see its stdin end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    told = os.dup(1)
    os.dup2(2, 1)
    (own if len(sys.argv) > 2 else initiate)(sys.argv[1], told)
