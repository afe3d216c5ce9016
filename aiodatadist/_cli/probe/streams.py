"""Steps 5 to 8: notifies, aborts, which call reports a failure, and what a timeout leaves in the log."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from aiodatadist._cli.probe.bench import TIMED_OUT, Bench
from aiodatadist._cli.probe.memory import KIB, copy
from aiodatadist._cli.probe.step import Skip, outcome
from aiodatadist._native.library import Handle, ffi, ring

if TYPE_CHECKING:
    from aiodatadist._cli.probe.report import Outcome

ABORT_MS = 100
TIME_OUTS = 100
SETTLE_NS = 2_000_000_000


def notify(bench: Bench) -> Outcome:
    """Wait for a notify that another stream records, and for one that no stream records."""
    bench.open()
    one, two = bench.stream(), bench.stream()
    gate = bench.shut(one)
    bench.let_through(gate, two)
    ended = bench.synchronize(one, 5000)
    bench.calls.ok("aclrtWaitAndResetNotify", gate, one, 0)
    waits = bench.synchronize(one, 50)
    bench.let_through(gate, two)
    later = bench.synchronize(one, 5000)
    return outcome(
        (ended, waits, later) == (0, TIMED_OUT, 0), f"recorded: {ended}; not recorded: {waits}; recorded then: {later}"
    )


def abort(bench: Bench) -> Outcome:
    """Abort a stream that waits, and use it again."""
    bench.open()
    stream = bench.stream()
    bench.shut(stream)
    bench.synchronize(stream, 50)
    call = bench.calls.timed("aclrtStreamAbort", stream)
    quiet = bench.synchronize(stream)
    one, two = bench.malloc(KIB), bench.malloc(KIB)
    used = copy(bench, two, one, ring.ACL_MEMCPY_DEVICE_TO_DEVICE, stream, "device to device")
    after = bench.synchronize(stream)
    milliseconds = (call.microseconds or 0) / 1000
    found = f"abort {call.code} in {milliseconds:.1f} ms, synchronize {quiet}; used again: {used}, {after}"
    is_right = (call.code, quiet, used, after) == (0, 0, 0, 0) and milliseconds < ABORT_MS
    return outcome(is_right, found, holds=None if call.code else milliseconds >= 15)


# ---- which call tells ----


def too_small(bench: Bench) -> Outcome:
    """Copy more than the destination holds."""
    bench.open()
    stream, one, two = bench.stream(), bench.malloc(2 * KIB), bench.malloc(2 * KIB)
    code = copy(bench, two, one, ring.ACL_MEMCPY_DEVICE_TO_DEVICE, stream, "device to device", most=KIB)
    if code:
        return outcome(
            True, f"refused by the call: {code}; the stream then synchronizes with {bench.synchronize(stream)}"
        )
    return who_tells(bench, stream)


def freed(bench: Bench) -> Outcome:
    """Copy from memory that is freed before its turn comes."""
    bench.open()
    stream, other = bench.stream(), bench.stream()
    one, two = bench.malloc(64 * KIB), bench.malloc(64 * KIB)
    gate = bench.shut(stream)
    code = copy(bench, two, one, ring.ACL_MEMCPY_DEVICE_TO_DEVICE, stream, "device to device")
    if code:
        raise Skip(f"aclrtMemcpyAsync of memory that is not yet freed returned {code}")
    free = bench.free(one)
    if free:
        raise Skip(f"memory with a copy before it cannot be freed: aclrtFree returned {free}")
    bench.let_through(gate, other)
    return who_tells(bench, stream)


def who_tells(bench: Bench, stream: Handle) -> Outcome:
    """Query a stream, an event and a synchronize after a copy on the stream has failed."""
    event = ffi.new("aclrtEvent *")
    bench.calls.ok("aclrtCreateEvent", event)
    recorded = bench.calls.code("aclrtRecordEvent", event[0], stream)
    query, is_complete = _last_query(bench, stream)
    waited = recorded
    if not recorded:
        waited = bench.calls.code("aclrtSynchronizeEventWithTimeout", event[0], 5000)
    last = bench.synchronize(stream, 5000)
    if not (query or waited or last):
        raise Skip("no call reported a failure: the copy did not fail here")
    told = [name for name, code in (("query", query), ("event", waited), ("synchronize", last)) if code]
    late = "" if is_complete or query else "; no query said that the stream is complete"
    found = f"query {query}, event {waited}, synchronize {last}: {', '.join(told)} tells{late}"
    return outcome(not query and bool(last), found, holds=not query)


def _last_query(bench: Bench, stream: Handle) -> tuple[int, bool]:
    """Query until the stream is complete or fails, for 2 s at most; return the last code, and True if it is complete."""
    query = bench.calls.raw("aclrtStreamQuery")
    status = ffi.new("aclrtStreamStatus *")
    codes: Counter[int] = Counter()
    began = time.monotonic_ns()
    while True:
        code = int(query(stream, status))
        codes[code] += 1
        took = time.monotonic_ns() - began
        is_complete = status[0] == ring.ACL_STREAM_STATUS_COMPLETE
        if code or is_complete or took > SETTLE_NS:
            bench.calls.sum_up("aclrtStreamQuery", codes.total(), codes, took // 1000)
            return code, is_complete
        time.sleep(0.01)


# ---- time-outs ----


def time_outs(bench: Bench) -> Outcome:
    """Let synchronize calls time out, and measure their cost in time and log entries."""
    bench.open()
    stream, other = bench.stream(), bench.stream()
    gate = bench.shut(stream)
    synchronize = bench.calls.raw("aclrtSynchronizeStreamWithTimeout")
    before, began = _log_bytes(), time.monotonic_ns()
    codes = Counter(int(synchronize(stream, 1)) for _ in range(TIME_OUTS))
    took = (time.monotonic_ns() - began) // 1000
    time.sleep(0.5)  # the vendor's log is written by another thread
    grown = _log_bytes() - before
    bench.calls.sum_up("aclrtSynchronizeStreamWithTimeout", TIME_OUTS, codes, took)
    records = _records(bench)
    bench.let_through(gate, other)
    bench.synchronize(stream)
    log = f"softnpu counts {records} records" if bench.is_soft else f"the log grew by {grown} bytes"
    found = f"{TIME_OUTS} of 1 ms took {took / 1000:.0f} ms; {log}"
    holds = (records >= TIME_OUTS if bench.is_soft else grown > 0) or None
    return outcome(codes == {TIMED_OUT: TIME_OUTS}, found, holds=holds)


def _records(bench: Bench) -> int:
    if not bench.is_soft:
        return 0
    counters = ffi.new("softnpu_counters *")
    bench.calls.raw("softnpu_get_counters")(counters)
    return int(counters.sync_timeouts)


def _log_bytes() -> int:
    folder = Path(os.environ.get("ASCEND_PROCESS_LOG_PATH") or Path.home() / "ascend" / "log")
    return sum(path.stat().st_size for path in folder.rglob("*.log")) if folder.is_dir() else 0
