"""The system has no memory for sockets: what needs one fails and says so, the rest goes on, and nothing is left open."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LinkError, LLMStatusCode, NotLinked
from aiodatadist.testing import Cluster, cluster_info, open_cluster
from tests.faults.test_full_memory import open_descriptors
from tests.profiles import at_night
from tests.strict.marks import STRICT

SHIM = Path(__file__).with_name("socket_shim.c")
DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)
KINDS = ["socket", "connect", "accept", "send"]
MANY = 1 << 20


@contextmanager
def failing(kind: str, count: int, number: int, family: int) -> Iterator[None]:
    """Fail ``count`` calls of this kind in the whole process."""
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    shim.shim_arm(KINDS.index(kind), count, number, family)
    try:
        yield
    finally:
        left = shim.shim_arm(KINDS.index(kind), 0, 0, family)
        assert left < count, f"no {kind} failed"


async def use(owner: Cluster, puller: Cluster, cache: Cache) -> None:
    linked = await puller.datadist.link_clusters([cluster_info(owner)], 10_000)
    assert linked[0] is LLMStatusCode.LLM_SUCCESS, linked.errors
    await puller.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


async def part(owner: Cluster, puller: Cluster) -> None:
    await puller.datadist.unlink_clusters([cluster_info(owner)], 10_000)
    with suppress(NotLinked):  # it has ended already
        await owner.datadist.wait_link_closed(2)


async def not_linked(owner: Cluster, puller: Cluster, kind: str, number: int, family: int) -> list[str]:
    """Check that no link is made while all such calls fail. The next attempt makes it."""
    with failing(kind, MANY, number, family):
        linked = await puller.datadist.link_clusters([cluster_info(owner)], 1_500 if STRICT else 10_000)
    assert linked[0] is not LLMStatusCode.LLM_SUCCESS
    return [linked[0].name, *(str(error) for error in linked.errors if error)]


async def late(owner: Cluster, puller: Cluster, cache: Cache, number: int) -> list[str]:
    """Check that a client that cannot be accepted waits, and nothing worse."""
    with failing("accept", 2, number, socket.AF_INET):
        await use(owner, puller, cache)
    return ["late"]


async def lost(owner: Cluster, puller: Cluster, number: int) -> list[str]:
    """Check that a link that cannot be written to ends."""
    with failing("send", MANY, number, socket.AF_INET):
        try:
            await puller.datadist.check_link_status(1)
        except LinkError as error:
            said = [type(error).__name__, str(error)]
    with suppress(NotLinked):
        await owner.datadist.wait_link_closed(2)
    return said


async def settled_descriptors() -> int:
    """Return the number of descriptors once it has been stable for 0.2 s.

    Threads of heartbeats and channels that ended close theirs without an event.
    """
    found, calm = open_descriptors(), 0
    while calm < 20:
        await anyio.sleep(0.01)
        found, last = open_descriptors(), found
        calm = calm + 1 if found == last else 0
    return found


async def main(number: int) -> list[Any]:
    options: dict[str, Any] = {"heartbeat_interval": 60.0}
    async with open_cluster(1, **options) as owner, open_cluster(2, device_id=1, **options) as puller:
        await owner.blocks(DESC)
        cache = await puller.blocks(DESC)
        await use(owner, puller, cache)
        await part(owner, puller)
        before, found = await settled_descriptors(), []
        for kind in ("socket", "connect"):
            for family in (socket.AF_INET, socket.AF_UNIX):  # the links' own, and softnpu's
                found.append(await not_linked(owner, puller, kind, number, family))
        found.append(await late(owner, puller, cache, number))
        found.append(await lost(owner, puller, number))
        await use(owner, puller, cache)
        await part(owner, puller)
        return [*found, await settled_descriptors() - before]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("shim") / "shim.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", built, SHIM, "-ldl"], check=True)
    return built


@pytest.mark.parametrize(
    ("number", "loop"),
    [(errno.ENOBUFS, "asyncio"), at_night(errno.ENOMEM, "uvloop"), at_night(errno.ENOBUFS, "uvloop"),
     at_night(errno.ENOMEM, "asyncio")],
    ids=str,
)  # fmt: skip
def test_without_memory_for_sockets_links_are_not_made_or_lost_and_the_next_is_made(
    shim: Path, number: int, loop: str
) -> None:
    command = [sys.executable, "-m", "tests.faults.test_no_buffers", loop, str(number)]
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=80, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    *refused, late, lost, left_open = json.loads(done.stdout)
    words = os.strerror(number)
    for status, *errors in refused:
        if STRICT and status == "LLM_TIMEOUT":  # one half was being opened, which cannot be interrupted
            continue
        assert status == "LLM_LINK_FAILED", errors
        assert words in errors[0], errors
    assert late == ["late"]
    assert lost[0] == "PeerLost", lost
    assert left_open == 0


if __name__ == "__main__":
    chosen = {"use_uvloop": sys.argv[1] == "uvloop"}
    print(json.dumps(anyio.run(main, int(sys.argv[2]), backend_options=chosen)))
