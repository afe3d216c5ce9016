"""Blocks arrive where the caller said, whichever block comes first and however many there are.

A transfer between two caches that were used before takes a shortcut, unless it names layers: both ways are tried.
"""

from __future__ import annotations

import random

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType
from aiodatadist.testing import linked_pair, stamp, verify

BLOCKS = 12
DESC = CacheDesc(4, [BLOCKS, 4096], DataType.DT_UINT8)


def orders(count: int) -> list[tuple[list[int], list[int]]]:
    """Return source and destination blocks: each block is once the first source, and once the first destination."""
    chance = random.Random(count)
    found = []
    for first in range(BLOCKS):
        src, dst = list(range(BLOCKS)), list(range(BLOCKS))
        chance.shuffle(src)
        chance.shuffle(dst)
        for blocks in (src, dst):
            blocks.remove(first)
            blocks.insert(0, first)
        found.append((src[:count], dst[:count]))
    return found


@pytest.mark.parametrize("count", [1, 2, 5, BLOCKS])
@pytest.mark.parametrize("way", ["pull", "push", "request", "copy"])
async def test_each_block_can_be_the_first_of_any_number(way: str, count: int) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=way != "request") as (prompt, decoder, theirs, mine):
        manager, key = decoder.datadist.cache_manager, BlocksCacheKey(1)
        target, memory, owner = (theirs, prompt.memory(theirs), 1) if way == "push" else (mine, decoder.memory(mine), 2)
        source = {"pull": 1, "request": 1, "push": 2, "copy": 2}[way]
        for src, dst in orders(count if way != "copy" else min(count, BLOCKS // 2)):
            if way == "copy":  # within one cache: no block is both source and destination
                dst = [block for block in range(BLOCKS) if block not in src][: len(src)]  # noqa: PLW2901
            for layers in (range(2), None):
                stamp(memory, target, owner)
                if way == "push":
                    await manager.push_blocks(key, mine, src, dst, src_layer_range=layers, dst_layer_range=layers)
                elif way == "copy":
                    await manager.copy_blocks(mine, dict(zip(src, ([block] for block in dst), strict=True)))
                else:
                    await manager.pull_blocks(key, mine, src, dst, src_layer_range=layers, dst_layer_range=layers)
                came = dict(zip(dst, src, strict=True))
                verify(memory, target, [(t, d, source, s) for t in range(4) for d, s in came.items()], owner)
