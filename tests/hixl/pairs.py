"""Two engines of one process, with memory of their own that both ends have registered."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiodatadist._testing.ports import free_port
from aiodatadist.hixl import Hixl, MemDesc, MemType, TransferOpDesc

PAGE = 2 << 20
"""Over HCCS, memory that is registered starts with a page, and pages are this large."""
SIZE = 2 * PAGE


class Bytes:
    """Memory of the host that begins with a page."""

    def __init__(self, nbytes: int = SIZE, fill: int = 0) -> None:
        self._map = mmap.mmap(-1, nbytes + PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.skip = -start % PAGE
        self.address = start + self.skip
        self.nbytes = nbytes
        self.view = memoryview(self._map)[self.skip : self.skip + nbytes]
        if fill:
            self.view[:] = bytes([fill]) * nbytes

    @property
    def desc(self) -> MemDesc:
        return MemDesc(self.address, self.nbytes)


@dataclass
class End:
    """An engine, and memory that it has registered."""

    engine: Hixl
    name: str
    memory: Bytes
    handle: int

    @property
    def view(self) -> memoryview:
        return self.memory.view


def options(device: int, transport: str = "hccl", **more: str) -> dict[str, str]:
    """Return the options of an engine of a test. Two engines of one process need two devices."""
    return {"ge.exec.deviceId": str(device), "aiodatadist.Transport": transport, **more}


@asynccontextmanager
async def open_end(
    device: int, transport: str = "hccl", *, fill: int = 0, kind: MemType = MemType.MEM_DEVICE, **more: Any
) -> AsyncIterator[End]:
    """Open an engine that listens, with registered memory of ``SIZE`` bytes."""
    name = f"127.0.0.1:{free_port()}"
    async with Hixl(name, options(device, transport, **more)) as engine:
        memory = Bytes(fill=fill)
        yield End(engine, name, memory, await engine.register_mem(memory.desc, kind))


@asynccontextmanager
async def connected(transport: str = "hccl", **more: Any) -> AsyncIterator[tuple[End, End]]:
    """Open a server whose memory has a pattern, and a client that is connected to it."""
    async with open_end(0, transport, **more) as server, open_end(1, transport, **more) as client:
        for at in range(0, SIZE, 4096):
            server.view[at : at + 4096] = (at // 4096 + 1).to_bytes(4, "little") * 1024
        await client.engine.connect(server.name, 5000)
        yield server, client


def descs(here: End, there: End, *ranges: tuple[int, int, int]) -> list[TransferOpDesc]:
    """Return ranges: offset here, offset at the peer, bytes."""
    return [TransferOpDesc(here.memory.address + a, there.memory.address + b, n) for a, b, n in ranges]
