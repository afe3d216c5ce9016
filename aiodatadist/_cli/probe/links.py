"""Steps 11 to 14, 19 and 21: a link between two devices, what it refuses, and what it leaves behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiodatadist._cli.probe.bench import Memory, pattern
from aiodatadist._cli.probe.memory import KIB, MIB
from aiodatadist._cli.probe.step import outcome
from aiodatadist._native.library import ffi, ring

if TYPE_CHECKING:
    from aiodatadist._cli.probe.pair import Pair
    from aiodatadist._cli.probe.report import Outcome

FAR, NEAR = 11, 12
"""Seeds of patterns."""


def move(pair: Pair) -> Outcome:
    """Get and put from 1 byte up to the largest size, and compare at both ends."""
    size = pair.bench.big
    remote, local = pair.lend("far", size, seed=FAR), pair.bench.malloc(size)
    name, channel = pair.connect(["far"], local)
    stream = pair.bench.stream()
    wrong = []
    for count in sorted({1, 64, 4 * KIB, 2 * MIB, size}):
        pair.bench.write(local, bytes(count))
        codes = [pair.get(channel, stream, [(local.address, remote, count)]), pair.bench.synchronize(stream)]
        if any(codes) or pair.bench.read(local, count) != pattern(FAR, count):
            wrong.append(f"get of {count} bytes: {codes}")
    pair.bench.write(local, pattern(NEAR, size))
    codes = [pair.put(channel, stream, [(local.address, remote, size)]), pair.bench.synchronize(stream)]
    if any(codes) or not pair.far_holds("far", NEAR, size):
        wrong.append(f"put of {size} bytes: {codes}")
    closed = pair.disconnect(name, channel)
    found = "; ".join(wrong) or f"1 byte to {size // MIB} MiB arrive both ways"
    return outcome(
        not wrong and not any(closed), f"{found}; by HCCL's rule this is {pair.kind.value}", kind=pair.kind.value
    )


def refuse(pair: Pair) -> Outcome:
    """Try too many items, the own rank, memory that is not registered, and a batch whose third item is wrong."""
    bench = pair.bench
    remote, local, other = pair.lend("far", MIB, seed=FAR), bench.malloc(MIB), bench.malloc(MIB)
    bench.write(local, bytes(MIB))
    _, channel = pair.connect(["far"], local)
    stream = bench.stream()
    many = pair.get(channel, stream, [(local.address, remote, 1)] * 257)
    own = pair.get(channel, stream, [(local.address, remote, 64)], rank=0)
    foreign = pair.get(channel, stream, [(other.address, remote, 64)])
    good = [(local.address + at, remote + at, 64) for at in (0, 4 * KIB)]
    bad = pair.get(channel, stream, [*good, (local.address + 8 * KIB, remote + (1 << 40), 64)])
    at_once, later = _landed(pair, local), "not asked"
    settled = bench.synchronize(stream, 2000)
    landed = _landed(pair, local)
    if not landed and pair.get(channel, stream, [(local.address + 12 * KIB, remote, 64)]) == 0:
        later = str(bench.synchronize(stream, 2000))
    in_the_end = _landed(pair, local)
    when = (
        "at once" if at_once else "by the synchronize" if landed else "with the next request" if in_the_end else "never"
    )
    found = (
        f"bad third item {bad} (items 1 and 2 landed {when}; synchronize {settled}, later {later}), "
        f"local memory not registered {foreign}, 257 items {many}, own rank {own}"
    )
    return outcome((bad, foreign, many, own) == (4, 4, 1, 1) and in_the_end, found, holds=in_the_end)


def _landed(pair: Pair, local: Memory) -> bool:
    whole = pattern(FAR, 4 * KIB + 64)
    return pair.bench.read(local, 4 * KIB + 64)[:64] == whole[:64] and (
        pair.bench.read(local, 64, 4 * KIB) == whole[4 * KIB :]
    )


def host_of_peer(pair: Pair) -> Outcome:
    """Get from HOST memory of the far end."""
    local = pair.bench.malloc(2 * MIB)
    pair.lend("far", 2 * MIB, seed=FAR)
    remote = pair.lend("host", 2 * MIB, host=True, seed=NEAR)
    _, channel = pair.connect(["far", "host"], local)
    stream = pair.bench.stream()
    code = pair.get(channel, stream, [(local.address, remote, 2 * MIB)])
    last = pair.bench.synchronize(stream) if code == 0 else None
    arrived = last == 0 and pair.bench.read(local, 2 * MIB) == pattern(NEAR, 2 * MIB)
    expected = arrived if pair.is_roce else code == ring.HCCL_E_INTERNAL
    found = f"HcclBatchGet {code}" + (f", the bytes {'arrive' if arrived else 'do not arrive'}" if code == 0 else "")
    return outcome(expected, found, holds=expected)


def unaligned(pair: Pair) -> Outcome:
    """Prepare a link to a region that starts 64 bytes after the start of a page."""
    local = pair.bench.malloc(2 * MIB, shift=64)
    pair.lend("far", 2 * MIB, seed=FAR)
    name, channel = pair.begin(["far"], local)
    pair.lines.send(do="prepare", channel=name, seconds=5)
    code = channel.prepare(5)  # the far end may wait for longer than this end's limit
    expected = (code == 0) == pair.is_roce
    return outcome(expected, f"HcclCommPrepare {code}", holds=expected)


def two_channels(pair: Pair) -> Outcome:
    """Open a second communicator beside the first, and destroy it."""
    remote, local = pair.lend("far", 2 * MIB, seed=FAR), pair.bench.malloc(2 * MIB)
    first, one = pair.connect(["far"], local)
    _, two = pair.connect(["far"], local)
    stream = pair.bench.stream()
    codes = [pair.get(one, stream, [(local.address, remote, MIB)]), pair.bench.synchronize(stream)]
    closed = pair.disconnect(first, one)
    pair.bench.write(local, bytes(MIB))
    codes += [pair.get(two, stream, [(local.address, remote, MIB)]), pair.bench.synchronize(stream)]
    same = pair.bench.read(local, MIB) == pattern(FAR, MIB)
    found = f"transfers {codes}, the first destroyed {closed}, then the bytes {'arrive' if same else 'do not arrive'}"
    return outcome(same and not any((*codes, *closed)), found)


def clean_up(pair: Pair) -> Outcome:
    """Compare the free device memory after two cycles of making and ending a link.

    The first may leave one-time allocations.
    """
    free = [_cycle(pair) for _ in range(3)]
    lost = free[0] - free[2]
    return outcome(lost == 0, f"free device memory after each of three links: {', '.join(map(str, free))} bytes")


def _cycle(pair: Pair) -> int:
    """Do everything once, release it all, and return the bytes that are then free."""
    remote, local = pair.lend("far", 2 * MIB, seed=FAR), pair.bench.malloc(2 * MIB)
    name, channel = pair.connect(["far"], local)
    stream = pair.bench.stream()
    codes = [pair.get(channel, stream, [(local.address, remote, MIB)]), pair.bench.synchronize(stream)]
    codes += [*pair.disconnect(name, channel), *pair.registered.end(), *pair.ask("end")["codes"]]
    codes += [pair.bench.calls.code("aclrtDestroyStream", stream), pair.bench.free(local)]
    if any(codes):
        raise OSError(f"a link and its end returned {codes}")
    free, total = ffi.new("size_t *"), ffi.new("size_t *")
    pair.bench.calls.ok("aclrtGetMemInfo", ring.ACL_HBM_MEM, free, total)
    return int(free[0])
