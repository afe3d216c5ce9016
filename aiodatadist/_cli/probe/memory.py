"""Steps 3, 4 and 9: allocations, copies, registrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiodatadist._cli.probe.bench import Bench, Memory, pattern
from aiodatadist._cli.probe.step import outcome
from aiodatadist._native.library import Handle, ffi, ring

if TYPE_CHECKING:
    from aiodatadist._cli.probe.report import Outcome

KIB, MIB = 1 << 10, 1 << 20
HUGE = 2 * MIB


def allocate(bench: Bench) -> Outcome:
    """Allocate device memory of three sizes and pinned host memory, and report where they start."""
    bench.open()
    found = [bench.malloc(size) for size in (KIB, 2 * MIB, 64 * MIB)]
    host = bench.malloc(2 * MIB, host=True)
    starts = ", ".join(f"{_size(memory.size)} at a multiple of {_size(_alignment(memory))}" for memory in found)
    codes = [bench.free(memory) for memory in (*found, host)]
    return outcome(not any(codes), f"device: {starts}; host: at a multiple of {_size(_alignment(host))}; freed {codes}")


def _alignment(memory: Memory) -> int:
    return min(memory.address & -memory.address, 1 << 30)


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB" if count >= KIB else f"{count} B"


def copy_around(bench: Bench) -> Outcome:
    """Copy from host to device, device to device, and device to host on one stream, and compare the result."""
    bench.open()
    data = pattern(4, 4 * MIB)
    near, one, two, back = (bench.malloc(len(data), host=host) for host in (True, False, False, True))
    bench.write(near, data)
    stream = bench.stream()
    ways = (
        (one, near, ring.ACL_MEMCPY_HOST_TO_DEVICE, "host to device"),
        (two, one, ring.ACL_MEMCPY_DEVICE_TO_DEVICE, "device to device"),
        (back, two, ring.ACL_MEMCPY_DEVICE_TO_HOST, "device to host"),
    )
    codes = [copy(bench, to, source, kind, stream, words) for to, source, kind, words in ways]
    code = bench.synchronize(stream)
    same = bench.read(back, len(data)) == data
    found = f"copies {codes}, synchronize {code}, the bytes are {'equal' if same else 'different'}"
    return outcome(same and not any((*codes, code)), found)


def copy(bench: Bench, to: Memory, source: Memory, kind: int, stream: Handle, words: str, most: int = -1) -> int:
    """Copy all of ``to`` asynchronously, with ``most`` as ``destMax``."""
    most = to.size if most < 0 else most
    note = f"{words}, {to.size} bytes into {most}"
    return bench.calls.code("aclrtMemcpyAsync", to.pointer, most, source.pointer, to.size, kind, stream, note=note)


# ---- registrations ----


def registration(bench: Bench, address: int, size: int, kind: int, words: str) -> tuple[int, Handle]:
    """Return the code of HcclRegisterGlobalMem, and the handle."""
    memory = ffi.new("CommMem *")
    memory.type, memory.addr, memory.size = kind, ffi.cast("void *", address), size
    handle = ffi.new("void **")
    code = bench.calls.code("HcclRegisterGlobalMem", memory, handle, note=f"{words}, {size} bytes")
    return code, handle[0]


def register(bench: Bench) -> Outcome:
    """Register memory with HCCL: aligned, not aligned, host memory, twice, overlapping; and unregister it twice."""
    bench.open()
    device = bench.malloc(8 * MIB)
    host = bench.malloc(2 * MIB, host=True)
    aligned, first = registration(bench, device.address, HUGE, 0, "device, aligned")
    shifted, other = registration(bench, device.address + 2 * HUGE + 64, 1000, 0, "device, 64 bytes behind")
    hosted, third = registration(bench, host.address, host.size, 1, "host")
    again, same = registration(bench, device.address, HUGE, 0, "the first once more")
    overlap, _ = registration(bench, device.address + HUGE // 2, HUGE, 0, "overlapping the first")
    twice = [bench.calls.code("HcclDeregisterGlobalMem", first) for _ in range(2)]
    rest = [bench.calls.code("HcclDeregisterGlobalMem", handle) for handle in (other, third)]
    codes = [aligned, shifted, hosted, again, overlap, *twice]
    is_same = same == first
    found = f"codes {codes}, then {rest}; registered twice it is {'the same handle' if is_same else 'another handle'}"
    return outcome(
        is_same and codes == [0, 0, 0, 0, 1, 0, 1], found, holds=not again and twice[0] == 0 and twice[1] != 0
    )
