"""Step 22: where HCCL expands batches, by default and with HOST in the configuration, and the cost of each."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiodatadist._cli.probe.bench import pattern
from aiodatadist._cli.probe.links import FAR
from aiodatadist._cli.probe.memory import KIB, MIB
from aiodatadist._cli.probe.step import outcome
from aiodatadist._native.library import ring
from aiodatadist._transport.communicator import EXPANSION_HOST
from aiodatadist._transport.link_kind import EXPANSION_MODE, unfolds_by_itself

if TYPE_CHECKING:
    from aiodatadist._cli.probe.bench import Memory
    from aiodatadist._cli.probe.channel import Channel
    from aiodatadist._cli.probe.pair import Pair
    from aiodatadist._cli.probe.report import Outcome
    from aiodatadist._native.library import Handle

DEFAULT = 0
PATIENCE_MS = 10_000
SETTLE = 0.2
"""Seconds for the copies of an aborted get, and for the notify that they set."""
LAST = 64
ATTEMPTS = 20
SMALL = 4 * KIB
REPEATS = 50


@dataclass
class Mode:
    """The measurements of one mode.

    Attributes:
        early: number of gets, of ``ATTEMPTS`` behind an aborted one, that were complete before their bytes had landed.
        mib_per_second, microseconds: speed of large gets, and time of small ones.
    """

    early: int
    mib_per_second: float
    microseconds: float

    @property
    def is_on_device(self) -> bool:
        return self.early > 0

    def __str__(self) -> str:
        place = f"on the device ({self.early} of {ATTEMPTS} gets complete early)" if self.early else "on the host"
        return f"{place}, {self.mib_per_second:.0f} MiB/s, {self.microseconds:.0f} us for {SMALL // KIB} KiB"


def unfolding(pair: Pair) -> Outcome:
    """Submit a get behind an aborted get, in either mode.

    On the device, the copies of the aborted get continue and set the communicator's only notify, which is taken for the
    end of the next one.
    """
    bench = pair.bench
    capability = int(bench.calls.raw("HcclGetCommConfigCapability")())
    is_read = capability > ring.HCCL_COMM_CONFIG_OP_EXPANSION_MODE
    remote, local = pair.lend("far", bench.big, seed=FAR), bench.malloc(bench.big)
    host = _look(pair, remote, local, EXPANSION_HOST)
    default = _look(pair, remote, local, DEFAULT)
    environment = os.environ.get(EXPANSION_MODE) or "unset"
    found = f"HOST: {host}; default ({EXPANSION_MODE} {environment}): {default}"
    found += "" if is_read else f"; the library does not read the field (capability {capability})"
    predicted = not pair.is_roce and unfolds_by_itself(bench.calls.runtime.chip, os.environ)
    holds = None if pair.is_roce else default.is_on_device == predicted
    return outcome(
        not host.is_on_device, found, holds, host=str(host), default=str(default), capability=str(capability)
    )


def _look(pair: Pair, remote: int, local: Memory, expansion: int) -> Mode:
    name, channel = pair.connect(["far"], local, expansion=expansion)
    stream = pair.bench.stream()
    large = min(_seconds(pair, channel, stream, (local.address, remote, local.size)) for _ in range(3))
    small = sorted(_seconds(pair, channel, stream, (local.address, remote, SMALL)) for _ in range(REPEATS))
    early = sum(_is_early(pair, channel, remote, local) for _ in range(ATTEMPTS))
    pair.disconnect(name, channel)
    return Mode(early, local.size / MIB / large, 1e6 * small[REPEATS // 2])


def _seconds(pair: Pair, channel: Channel, stream: Handle, item: tuple[int, int, int]) -> float:
    began = time.perf_counter()
    codes = pair.get(channel, stream, [item]), pair.bench.synchronize(stream, PATIENCE_MS)
    if any(codes):
        raise OSError(f"get and synchronize returned {codes}")
    return time.perf_counter() - began


def _is_early(pair: Pair, channel: Channel, remote: int, local: Memory) -> bool:
    bench = pair.bench
    aborted, next_one = bench.stream(), bench.stream()
    whole, at = [(local.address, remote, local.size)], local.size - LAST
    pair.get(channel, aborted, whole)
    bench.calls.code("aclrtStreamAbort", aborted)
    bench.synchronize(aborted, PATIENCE_MS)
    time.sleep(SETTLE)
    bench.write(local, bytes(LAST), at)
    pair.get(channel, next_one, whole)
    code = bench.synchronize(next_one, PATIENCE_MS)
    is_early = code == 0 and bench.read(local, LAST, at) != pattern(FAR, local.size)[at:]
    time.sleep(SETTLE if is_early else 0)
    for stream in (aborted, next_one):
        bench.calls.code("aclrtDestroyStream", stream)
    return is_early
