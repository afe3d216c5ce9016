"""A failure that no caller looks at is heard, in a program that did not configure logging."""

from __future__ import annotations

import sys

import pytest

from tests import children

PROGRAM = """
import asyncio, gc, logging
from aiodatadist import BlocksCacheKey, CacheDesc, DataType
from aiodatadist.testing import linked_pair
{setup}

async def main():
    async with linked_pair(CacheDesc(2, [4, 4096], DataType.DT_UINT8)) as (_, decoder, _, cache):
        task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1, model_id=7), cache, [0], [0])
        while not task.done():
            await asyncio.sleep(0)
        del task
        gc.collect()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("setup", "lines"),
    [("", 1), ("logging.getLogger('aiodatadist').addHandler(logging.NullHandler())", 0)],
    ids=["not configured", "silenced"],
)
def test_a_forgotten_failure_is_one_line(setup: str, lines: int) -> None:
    command = [sys.executable, "-c", PROGRAM.format(setup=setup)]
    done = children.run(command, capture_output=True, text=True, check=True, timeout=60)
    told = done.stderr.splitlines()
    assert len(told) == lines, done.stderr
    assert all("pull_blocks" in line and "LLM_KV_CACHE_NOT_EXIST" in line for line in told)
