"""Steps 15 to 18: in which order bytes move, and whether a gate, a stream and an abort mean what they say.

They matter more than all benchmarks: their results on RoCE decide how a cancelled transfer can be safe.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from aiodatadist._cli.probe.bench import Memory, pattern
from aiodatadist._cli.probe.links import FAR, NEAR
from aiodatadist._cli.probe.memory import KIB, MIB
from aiodatadist._cli.probe.pair import Pair, described
from aiodatadist._cli.probe.step import outcome
from aiodatadist._native.library import Handle

if TYPE_CHECKING:
    from aiodatadist._cli.probe.channel import Channel
    from aiodatadist._cli.probe.report import Outcome

SMALL = 64
PATIENCE_MS = 10_000
SETTLE = 0.3
"""Seconds in which bytes that must not move may show."""

ITEMS, PER_CALL = 2000, 250
GATE_SECONDS = 3.0
BLOCKED = 1.0
"""Seconds after which a call counts as blocked."""


# ---- 15: two streams ----


def two_streams(pair: Pair) -> Outcome:
    """Run a large transfer on one stream and a small one on another: is one complete before its bytes landed?"""
    bench = pair.bench
    remote, big, small = pair.lend("far", bench.big, seed=FAR), bench.malloc(bench.big), bench.malloc(2 * MIB)
    _, channel = pair.connect(["far"], big, small)
    race = _Race(pair, channel, remote, big, small)
    early = hung = 0
    for number in range(bench.rounds):
        result = race.run(gated=number % 2 == 1)
        early += result == "early"
        if result == "hangs":
            hung += 1
            break
    found = f"{number + 1} rounds: {early} complete before their bytes landed, {hung} never complete"
    return outcome(not early and not hung, found, holds=bool(early or hung) if pair.is_roce else not (early or hung))


class _Race:
    """The rounds of step 15."""

    def __init__(self, pair: Pair, channel: Channel, remote: int, big: Memory, small: Memory) -> None:
        self._pair, self._bench = pair, pair.bench
        self._channel, self._remote, self._big, self._small = channel, remote, big, small
        self._one, self._two = pair.bench.stream(), pair.bench.stream()
        self._end = big.size - SMALL
        self._last = pattern(FAR, big.size)[self._end :]

    def run(self, gated: bool) -> str:
        """Run one round.

        If ``gated``, the small transfer's stream waits, so a reported end can only be that of the large one.
        """
        bench, blank = self._bench, bytes(SMALL)
        bench.write(self._big, blank, self._end)
        gate = bench.shut(self._two) if gated else None
        self._get(self._two, self._small, SMALL)
        self._get(self._one, self._big, self._big.size)
        code = bench.synchronize(self._one, PATIENCE_MS)
        is_early = code == 0 and bench.read(self._big, SMALL, self._end) != self._last
        if gate is not None:
            bench.let_through(gate, self._one)
        other = bench.synchronize(self._two, PATIENCE_MS)
        if gate is not None:
            bench.calls.code("aclrtDestroyNotify", gate)
        hangs = bool(code or other)
        return "early" if is_early else "hangs" if hangs else "fine"

    def _get(self, stream: Handle, to: Memory, count: int) -> None:
        code = self._pair.get(self._channel, stream, [(to.address, self._remote, count)])
        if code:
            raise OSError(f"HcclBatchGet returned {code}")


# ---- 16: a gate ----


def gate_holds(pair: Pair) -> Outcome:
    """Put behind a shut gate, get on another stream, and check if the put's bytes moved."""
    bench = pair.bench
    put_to, get_from = pair.lend("gated", 2 * MIB, seed=FAR), pair.lend("free", 2 * MIB, seed=FAR)
    local, into = bench.malloc(2 * MIB), bench.malloc(2 * MIB)
    bench.write(local, pattern(NEAR, local.size))
    _, channel = pair.connect(["gated", "free"], local, into)
    one, two = bench.stream(), bench.stream()
    gate = bench.shut(one)
    put = pair.put(channel, one, [(local.address, put_to, local.size)])
    get = pair.get(channel, two, [(into.address, get_from, into.size)])
    synchronized = bench.synchronize(two, PATIENCE_MS)
    time.sleep(SETTLE)
    moved = pair.far_bytes("gated", KIB) != pattern(FAR, KIB)
    bench.let_through(gate, two)
    codes = f"put {put}, get {get}, synchronize {synchronized}"
    found = f"{codes}: the bytes behind the gate {'moved' if moved else 'did not move'}"
    return outcome(not moved and not put and not get, found, holds=moved if pair.is_roce else not moved)


# ---- 17: many requests ----


def many_requests(pair: Pair) -> Outcome:
    """Submit many small items behind a shut gate, and measure how long the host stays in a call."""
    bench = pair.bench
    remote, local = pair.lend("far", 2 * MIB, seed=FAR), bench.malloc(2 * MIB)
    _, channel = pair.connect(["far"], local)
    stream = bench.stream()
    gate = bench.shut(stream)
    opener = _Opener(pair, gate)
    longest, codes = 0.0, []
    get = bench.calls.raw("HcclBatchGet")
    for start in range(0, ITEMS, PER_CALL):
        items = described(
            [(local.address + at * SMALL, remote + at * SMALL, SMALL) for at in range(start, start + PER_CALL)]
        )
        began = time.monotonic()
        codes.append(int(get(channel.comm, 1, items, PER_CALL, stream)))
        longest = max(longest, time.monotonic() - began)
    bench.calls.sum_up("HcclBatchGet", len(codes), {code: codes.count(code) for code in set(codes)}, int(longest * 1e6))
    opener.open()
    last = bench.synchronize(stream)
    blocked = longest >= BLOCKED
    found = f"{ITEMS} items in {len(codes)} calls, codes {sorted(set(codes))}, the longest took {longest:.2f} s; then {last}"
    return outcome(not blocked and not any(codes), found, holds=blocked == pair.is_roce)


class _Opener:
    """A thread that opens a gate after a while, because the caller may be in a call that waits for it."""

    def __init__(self, pair: Pair, gate: Handle) -> None:
        self._bench = pair.bench
        self._gate = gate
        self._stream = pair.bench.stream()
        self._context = pair.bench.context()
        self._now = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._now.wait(GATE_SECONDS)
        self._bench.calls.ok("aclrtSetCurrentContext", self._context)
        self._bench.let_through(self._gate, self._stream)

    def open(self) -> None:
        """Open the gate now, if it is not open yet."""
        self._now.set()
        self._thread.join()


# ---- 18: an abort ----


def abort_is_quiet(pair: Pair) -> Outcome:
    """Abort a get that has not begun, and one that is under way.

    Then write into its memory, get once more on the same communicator, and check if the written bytes are still there.
    """
    waiting, moving = _abort(pair, gated=True), _abort(pair, gated=False)
    found = f"aborted before it began: {waiting}; in the middle: {moving}"
    intact = waiting.endswith("intact") and moving.endswith("intact")
    return outcome(intact, found, holds=intact != pair.is_roce)


def _abort(pair: Pair, *, gated: bool) -> str:
    bench = pair.bench
    size = bench.big
    name = f"gated {gated}"
    remote, local, spare = pair.lend(name, size, seed=FAR), bench.malloc(size), bench.malloc(2 * MIB)
    _, channel = pair.connect([name], local, spare)
    one, two = bench.stream(), bench.stream()
    if gated:
        bench.shut(one)
    pair.get(channel, one, [(local.address, remote, size)])
    abort, quiet = bench.calls.code("aclrtStreamAbort", one), bench.synchronize(one, PATIENCE_MS)
    bench.write(local, pattern(NEAR, size))
    pair.get(channel, two, [(spare.address, remote, SMALL)])
    last = bench.synchronize(two, PATIENCE_MS)
    time.sleep(SETTLE)
    intact = bench.read(local, size) == pattern(NEAR, size)
    return f"abort {abort}, synchronize {quiet}, next {last}, memory {'intact' if intact else 'overwritten'}"
