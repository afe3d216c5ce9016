"""Measure plain TCP that scatters the same blocks: what a transfer between two machines is compared with.

One end serves, the other one pulls or pushes blocks over any number of connections, a thread for each::

    python -m benchmarks.raw_tcp serve 10.0.0.5 7000
    python -m benchmarks.raw_tcp pull 10.0.0.5 7000 --connections 4 --block 65536 --size 134217728

Blocks lie scattered in the memory of both ends. ``raw_tcp.c``, which is compiled when it is first needed, moves a part of at
most 1 MiB with one call of the kernel, without a copy in this process, without the GIL and without the interpreter. There is
no check, no key and no frame. Printed are GB/s, and the processor seconds of both ends for a GB.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import random
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

HEAD = struct.Struct("<?QQQ")
"""A request: true if the client pulls; the bytes of a block; the number of blocks; the number of this connection's share."""
CPU = struct.Struct("<d")
SOURCE = Path(__file__).with_suffix(".c")
LARGEST = 1 << 34
"""The most bytes of a transfer that a server accepts."""


class Measured(NamedTuple):
    """The costs of one transfer: its seconds, and the processor seconds of both ends."""

    seconds: float
    processor: float


@cache
def order_of(share: int, blocks: int) -> array[int]:
    """Return the blocks of one connection's share, in the order in which both ends visit their memory."""
    order = list(range(share * blocks, (share + 1) * blocks))
    random.Random(share).shuffle(order)
    return array("Q", order)


_compiling = threading.Lock()


@cache
def _library() -> ctypes.CDLL:
    """Compile the library, unless that was done before. Raises SystemExit if there is no compiler."""
    name = f"raw_tcp-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    library = SOURCE.parent.parent / "build" / name
    if not library.exists():
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            sys.exit("plain TCP is a library in C, and there is no C compiler: install one, or name it in CC")
        library.parent.mkdir(exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", fresh, SOURCE], check=True)
        fresh.replace(library)
    loaded = ctypes.CDLL(str(library))
    size, place = ctypes.c_uint64, ctypes.c_void_p
    loaded.raw_tcp_move.argtypes = [ctypes.c_int, place, size, place, size, ctypes.c_int]
    return loaded


def _move(sock: socket.socket, memory: memoryview, block: int, order: array[int], *, sends: bool) -> None:
    """Send or receive blocks. Raises ConnectionError if the peer ends before, or OSError."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with _compiling:
        library = _library()
    code = library.raw_tcp_move(sock.fileno(), address, block, order.buffer_info()[0], len(order), sends)
    if code > 0:
        raise ConnectionError("the peer ended in the middle of a transfer")
    if code < 0:
        raise OSError(-code, os.strerror(-code))


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data


def processor_seconds() -> float:
    """Return the processor seconds of this thread."""
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_utime + used.ru_stime


def serve_one(sock: socket.socket, memory: memoryview) -> None:
    """Serve transfers on a connection until the client closes it. Raises ValueError if one does not fit."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while len(head := _read(sock, HEAD.size)) == HEAD.size:
        pulls, block, blocks, share = HEAD.unpack(head)
        if not 0 < block * blocks * (share + 1) <= min(LARGEST, len(memory)):
            raise ValueError(f"{blocks} blocks of {block} bytes in share {share}: this server has {len(memory)} bytes")
        began = processor_seconds()
        _move(sock, memory, block, order_of(share, blocks), sends=pulls)
        sock.sendall(CPU.pack(processor_seconds() - began))


def serve(listener: socket.socket, memory: memoryview) -> None:
    """Serve all clients, a thread for each connection. Does not return."""
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve_one, args=(sock, memory), daemon=True).start()


def transfer(socks: Sequence[socket.socket], memory: memoryview, block: int, *, pulls: bool) -> Measured:
    """Pull or push all of the memory in blocks, an equal share over each connection."""
    blocks, used = len(memory) // block // len(socks), list[float]()

    def run(share: int, sock: socket.socket) -> None:
        began = processor_seconds()
        sock.sendall(HEAD.pack(pulls, block, blocks, share))
        _move(sock, memory, block, order_of(share, blocks), sends=not pulls)
        (theirs,) = CPU.unpack(_read(sock, CPU.size))
        used.append(processor_seconds() - began + theirs)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(socks)]
    began = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = perf_counter() - began
    if len(used) < len(socks):
        raise ConnectionError("a connection ended in the middle of a transfer")
    return Measured(seconds, sum(used))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.raw_tcp", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["serve", "pull", "push"])
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--block", type=int, default=65536, help="bytes")
    parser.add_argument("--size", type=int, default=128 << 20, help="bytes of a transfer, and of the server's memory")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    place, memory = (given.host, given.port), memoryview(bytearray(given.size))
    family = socket.AF_INET6 if ":" in given.host else socket.AF_INET
    if given.command == "serve":
        with socket.create_server(place, family=family) as listener:
            serve(listener, memory)
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(place)) for _ in range(given.connections)]
        for sock in socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(given.rounds):
            done = transfer(socks, memory, given.block, pulls=given.command == "pull")
            gigabytes = given.size / 1e9
            print(f"{gigabytes / done.seconds:6.2f} GB/s {done.processor / gigabytes:6.3f} CPU s/GB", flush=True)


if __name__ == "__main__":
    main()
