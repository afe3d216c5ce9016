"""A device as a step uses it: memory, streams and notifies through the vendor's calls, and patterns to compare."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from aiodatadist._cli.probe.calls import Calls, Tell
from aiodatadist._native.library import Handle, ffi, ring
from aiodatadist._native.runtime import RuntimeName, load_runtime

SYNC_MS = 30_000
"""Milliseconds for a stream to finish what must end."""

PERIOD = 65_521
"""Bytes after which a pattern repeats: a prime, so that no shift by a page or a block looks right."""

TIMED_OUT = ring.ACL_ERROR_RT_STREAM_SYNC_TIMEOUT


def pattern(seed: int, size: int) -> bytes:
    """Return a pattern of bytes that is unique to a seed."""
    once = hashlib.shake_128(b"aiodatadist %d" % seed).digest(PERIOD)
    return (once * (size // PERIOD + 1))[:size]


@dataclass(frozen=True)
class Memory:
    """A range of device memory, or host memory (``is_host``).

    ``whole`` is the allocation to free; the range may start later.
    """

    address: int
    size: int
    is_host: bool = False
    whole: int = 0

    @property
    def pointer(self) -> Handle:
        return ffi.cast("void *", self.address)

    def at(self, offset: int) -> Handle:
        return ffi.cast("void *", self.address + offset)


@dataclass
class Bench:
    """The device with which every step starts. ``options`` come from the command line.

    Attributes:
        rounds, big: rounds and bytes of the long steps.
    """

    calls: Calls
    device: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return int(self.options.get("rounds", 1000))

    @property
    def big(self) -> int:
        return int(self.options.get("mib", 64)) << 20

    @property
    def is_soft(self) -> bool:
        return self.calls.runtime.is_soft

    def open(self) -> None:
        """Initialise the runtime, and make the device current in this thread."""
        self.calls.ok("aclInit", ffi.NULL)
        self.calls.ok("aclrtSetDevice", self.device)

    def context(self) -> Handle:
        found = ffi.new("aclrtContext *")
        self.calls.ok("aclrtGetCurrentContext", found)
        return found[0]

    # ---- memory ----

    def malloc(self, size: int, *, host: bool = False, shift: int = 0) -> Memory:
        """Allocate ``size`` bytes that start ``shift`` bytes into an allocation."""
        found = ffi.new("void **")
        if host:
            self.calls.ok("aclrtMallocHost", found, size + shift, note=f"{size + shift} bytes")
        else:
            policy = ring.ACL_MEM_MALLOC_HUGE_FIRST
            self.calls.ok("aclrtMalloc", found, size + shift, policy, note=f"{size + shift} bytes, HUGE_FIRST")
        whole = int(ffi.cast("uintptr_t", found[0]))
        return Memory(whole + shift, size, host, whole)

    def free(self, memory: Memory) -> int:
        name = "aclrtFreeHost" if memory.is_host else "aclrtFree"
        return self.calls.code(name, ffi.cast("void *", memory.whole))

    def write(self, memory: Memory, data: bytes, offset: int = 0) -> None:
        """Write bytes by a synchronous copy, or directly if this is host memory."""
        if memory.is_host:
            ffi.memmove(memory.at(offset), data, len(data))
            return
        source = ffi.from_buffer(data)
        kind = ring.ACL_MEMCPY_HOST_TO_DEVICE
        note = f"host to device, {len(data)} bytes"
        self.calls.ok("aclrtMemcpy", memory.at(offset), len(data), source, len(data), kind, note=note)

    def read(self, memory: Memory, size: int, offset: int = 0) -> bytes:
        into = bytearray(size)
        if memory.is_host:
            ffi.memmove(into, memory.at(offset), size)
            return bytes(into)
        target = ffi.from_buffer(into)
        note = f"device to host, {size} bytes"
        self.calls.ok("aclrtMemcpy", target, size, memory.at(offset), size, ring.ACL_MEMCPY_DEVICE_TO_HOST, note=note)
        return bytes(into)

    # ---- streams and notifies ----

    def stream(self) -> Handle:
        found = ffi.new("aclrtStream *")
        self.calls.ok("aclrtCreateStream", found)
        return found[0]

    def notify(self) -> Handle:
        found = ffi.new("aclrtNotify *")
        self.calls.ok("aclrtCreateNotify", found, 0)
        return found[0]

    def shut(self, stream: Handle) -> Handle:
        """Put a shut gate into a stream, and return it: later work waits until :meth:`let_through`."""
        gate = self.notify()
        self.calls.ok("aclrtWaitAndResetNotify", gate, stream, 0)
        return gate

    def let_through(self, gate: Handle, stream: Handle) -> None:
        self.calls.ok("aclrtRecordNotify", gate, stream)

    def synchronize(self, stream: Handle, milliseconds: int = SYNC_MS) -> int:
        return self.calls.code("aclrtSynchronizeStreamWithTimeout", stream, milliseconds, note=f"{milliseconds} ms")


def open_bench(runtime: RuntimeName, device: int, options: dict[str, Any], tell: Tell) -> Bench:
    """Load the runtime, without initialising it."""
    return Bench(Calls(load_runtime(runtime), tell), device, options)
