"""A process that has no file descriptor left is told so, with the limit, and nothing is left behind."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import numpy as np
import pytest

from aiodatadist import LLMConfig, LLMDataDist, LLMException, LLMRole
from aiodatadist.context_caching import CcConfig_v1, ContextCache, EmsException
from tests import children

LIMIT = 100
OPTIONS = {"listen": "127.0.0.1:0", "mem_pool_cfg": '{"memory_size": 1048576}'}


async def cluster() -> None:
    async with LLMDataDist(LLMRole.MIX, 1, LLMConfig(**OPTIONS)):  # type: ignore[arg-type]
        pass


async def context_cache() -> None:
    config = CcConfig_v1(rank_id=0, device_id=0, model_id="model")
    async with await ContextCache.open(config, "memory:") as cache:
        await cache.register_kvcache([[np.zeros((8, 4, 16), np.float16)]])
        await cache.save([1], chunks=[[(0, 4)]])


async def with_spare(opening: Callable[[], Awaitable[None]], spare: int) -> str:
    """Return as text what opening raises with ``spare`` descriptors left, or "" if that is enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
    filling = []
    try:
        while True:
            filling.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for _ in range(spare):
            os.close(filling.pop())
    try:
        await opening()
    except (LLMException, EmsException) as error:
        return str(error)
    finally:
        for number in filling:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return ""


def open_numbers() -> list[str]:
    return sorted(entry.name for entry in Path("/proc/self/fd").iterdir())


async def program(opening: Callable[[], Awaitable[None]]) -> None:
    await opening()  # what is opened once in a process is
    before = open_numbers()
    found = [await with_spare(opening, spare) for spare in range(10)]
    print(json.dumps([found, before == open_numbers()]))


@pytest.mark.parametrize("opening", [cluster, context_cache])
def test_opening_without_descriptors_names_the_limit_and_leaves_nothing(opening: Callable[[], Awaitable[None]]) -> None:
    command = [sys.executable, "-m", "tests.faults.test_no_descriptors", opening.__name__]
    done = children.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    found, is_clean = json.loads(done.stdout)
    assert found[0]
    assert not found[-1]
    assert all(not words or f"RLIMIT_NOFILE is {LIMIT}" in words for words in found), found
    assert is_clean


if __name__ == "__main__":
    anyio.run(program, {"cluster": cluster, "context_cache": context_cache}[sys.argv[1]])
