"""A process whose threads are interrupted by signals all the time: no call fails with EINTR, and no link is lost."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType
from aiodatadist.testing import Cluster, cluster_info, open_cluster, verify
from tests import children
from tests.faults import test_full_memory
from tests.faults.test_full_memory import open_descriptors, save_and_close
from tests.held import let_pass
from tests.profiles import at_night

DESC = CacheDesc(2, [64, 64 << 10], DataType.DT_UINT8)
HEARTBEATS = {"heartbeat_interval": 0.05, "heartbeat_misses": 100}  # often, and no loss where the machine is busy
ROUNDS = 4
PERIOD = 0.001


def strike(pid: int) -> None:
    """Signal each thread of a process, a thousand times a second, until the process or our parent is gone."""
    tgkill = ctypes.CDLL(None, use_errno=True).tgkill
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                tgkill(pid, int(thread.name), signal.SIGALRM)
        except FileNotFoundError:
            return
        time.sleep(PERIOD)


@contextmanager
def storm() -> Iterator[list[int]]:
    """Send signals to threads; a timer strikes any of them besides. Yield a list whose one number counts the signals."""
    came = [0]

    def handler(_: int, __: Any) -> None:
        came[0] += 1

    signal.signal(signal.SIGALRM, handler)
    striker = subprocess.Popen([sys.executable, "-m", "tests.faults.test_signals", "strike", str(os.getpid())])
    signal.setitimer(signal.ITIMER_REAL, PERIOD, PERIOD)
    try:
        yield came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        striker.kill()
        striker.wait()


async def use(owner: Cluster, puller: Cluster, round_: int) -> None:
    """Link, transfer both ways, notify, and end."""
    source, target = await owner.blocks(DESC), await puller.blocks(DESC)
    linked = await puller.datadist.link_clusters([cluster_info(owner)], 10_000)
    assert not linked[0], linked.errors
    manager = puller.datadist.cache_manager
    await manager.pull_blocks(BlocksCacheKey(1), target, range(32), range(32), checksum=True)
    await manager.pull_blocks(BlocksCacheKey(1), target, [40], [41], notify=b"%d" % round_)
    async for note in owner.datadist.notifications():
        assert note.payload == b"%d" % round_
        break
    verify(puller.memory(target), target, [(t, b, 1, b) for t in range(2) for b in range(32)])
    await let_pass(0.5)  # some ten heartbeats
    await puller.datadist.check_link_status(1)
    await puller.datadist.unlink_clusters([cluster_info(owner)], 10_000)
    await manager.unregister_cache(target.cache_id)
    await owner.datadist.cache_manager.unregister_cache(source.cache_id)


async def one_round(one_sided: bool, round_: int) -> None:
    options: dict[str, Any] = {
        "enable_remote_cache_accessible": one_sided,
        **HEARTBEATS,
        "sync_kv_timeout": 10_000,
    }
    async with open_cluster(1, **options) as owner, open_cluster(2, device_id=1, **options) as puller:
        await use(owner, puller, round_)
    await save_and_close()


def threads() -> int:
    """Return the number of threads, without softnpu's copiers: the first copy that takes long starts them, for good."""
    copiers = sum((task / "comm").read_text().strip() == "softnpu-copier" for task in Path("/proc/self/task").iterdir())
    return test_full_memory.threads() - copiers


async def main(one_sided: bool) -> dict[str, Any]:
    await one_round(one_sided, 0)
    before = open_descriptors(), threads()
    with storm() as came:
        for round_ in range(1, ROUNDS):
            await one_round(one_sided, round_)
    return {"came": came[0], "before": before, "after": (open_descriptors(), threads())}


@pytest.mark.parametrize(
    ("one_sided", "loop"),
    [(True, "asyncio"), at_night(False, "uvloop"), at_night(True, "uvloop"), at_night(False, "asyncio")],
    ids=str,
)
def test_signals_at_any_moment_change_nothing(one_sided: bool, loop: str) -> None:
    command = [sys.executable, "-m", "tests.faults.test_signals", loop, str(int(one_sided))]
    done = children.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["came"] > 500
    assert found["after"][0] == found["before"][0], "descriptors"
    assert found["after"][1] <= found["before"][1], "threads: one may have been on its way out before"


if __name__ == "__main__":
    if sys.argv[1] == "strike":
        strike(int(sys.argv[2]))
    else:
        chosen = {"use_uvloop": sys.argv[1] == "uvloop"}
        print(json.dumps(anyio.run(main, sys.argv[2] == "1", backend_options=chosen)))
