"""Programs in a process of their own: how strict softnpu is, is read once, when a process opens it first."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiodatadist import Cache, CacheDesc, LLMStatusCode
from aiodatadist.testing import Cluster, cluster_info, open_cluster
from tests import children

ROOT = Path(__file__).parents[2]
PROGRAM_SECONDS = 25.0
"""Seconds that a program may take: each takes one or two, and one that blocks takes HCCL_CONNECT_TIMEOUT's 120."""


def run(kind: str, program: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function of a test's module where softnpu is ``hccs`` or ``roce``.

    Raises:
        AssertionError: it raised; the message has its traceback.
        subprocess.TimeoutExpired: it blocked.
    """
    code = f"import asyncio; from {program.__module__} import {program.__name__} as program; asyncio.run(program())"
    environment = {**os.environ, "SOFTNPU_STRICT": kind, "AIODATADIST_RUNTIME": "soft"}
    done = children.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@asynccontextmanager
async def pair(desc: CacheDesc, **options: Any) -> AsyncIterator[tuple[Cluster, Cluster, Cache, Cache]]:
    """Open clusters 1 and 2 with a blocks cache each, and link them. Both may pull and push."""
    async with open_cluster(1, device_id=0, **options) as one, open_cluster(2, device_id=1, **options) as two:
        mine, theirs = await one.blocks(desc), await two.blocks(desc)
        await link(one, two)
        yield one, two, mine, theirs


async def link(one: Cluster, two: Cluster) -> None:
    """Let one cluster link the other."""
    status, each = await one.datadist.link_clusters([cluster_info(two)], 5000)
    assert status is LLMStatusCode.LLM_SUCCESS, each
    await two.datadist.wait_linked(1)
