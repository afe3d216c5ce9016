"""Step 20: two threads create and destroy communicators at the same time. HCCL may crash here."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING

from aiodatadist._cli.probe.channel import STAGING_MIB
from aiodatadist._cli.probe.step import outcome
from aiodatadist._native.library import ffi
from aiodatadist._transport.communicator import communicator_config
from aiodatadist._transport.contract import DEFAULT_RDMA

if TYPE_CHECKING:
    from aiodatadist._cli.probe.pair import Pair
    from aiodatadist._cli.probe.report import Outcome
    from aiodatadist._native.library import Handle

TIMES = 100
THREADS = 2


def two_threads(pair: Pair) -> Outcome:
    """Let two threads create and destroy communicators repeatedly, starting each round together."""
    codes: Counter[int] = Counter()
    start = threading.Barrier(THREADS)
    sys.setswitchinterval(1e-6)  # seconds: a thread that comes back from waiting calls at once
    context = pair.bench.context()
    work = [threading.Thread(target=_make_and_destroy, args=(pair, context, start, codes)) for _ in range(THREADS)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    pair.bench.calls.sum_up("HcclCommInitClusterInfoMemConfig, HcclCommDestroy", codes.total(), dict(codes), 0)
    others = {code: count for code, count in codes.items() if code}
    found = f"{codes.total()} calls, " + (f"codes other than 0: {others}" if others else "all 0")
    return outcome(not others, found, holds=True if others else None)


def _make_and_destroy(pair: Pair, context: Handle, start: threading.Barrier, codes: Counter[int]) -> None:
    calls, table = pair.bench.calls, pair.table.encode()
    calls.ok("aclrtSetCurrentContext", context)
    init, destroy = calls.raw("HcclCommInitClusterInfoMemConfig"), calls.raw("HcclCommDestroy")
    configs = [communicator_config(f"race-{os.urandom(6).hex()}", STAGING_MIB, DEFAULT_RDMA) for _ in range(TIMES)]
    made = ffi.new("HcclComm *")
    for config in configs:
        start.wait()
        code = int(init(table, 0, config, made))
        codes[code] += 1
        if code == 0:
            codes[int(destroy(made[0]))] += 1
