"""Names of blocks in a pool that engines share: a client cannot make two prefixes that have one name.

Of a hash cut to 64 bits, two prompts with the same one are found in hours. A pool would give the blocks of one prompt to
requests with the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiodatadist.context_caching import CcConfig_v1, ContextCache
from tests.hostile.vllm_names import ADAPTER, both_halves

BLOCKS, TOKENS = 4, 8
TRUE = bytes(range(32))
COLLIDING = TRUE[:8] + b"x" * 24
"""Another prompt's hash, with the first 64 bits of the true one."""


@pytest.fixture
def context() -> Iterator[Any]:
    with both_halves():
        yield import_module(f"{ADAPTER}.context_scheduler")


@asynccontextmanager
async def opened() -> AsyncIterator[ContextCache]:
    config = CcConfig_v1(rank_id=0, device_id=0, model_id="m")
    async with await ContextCache.open(config, "memory:?bytes=4MiB") as cache:
        await cache.register_kvcache([[np.zeros((BLOCKS, TOKENS, 32), np.uint8)]])
        yield cache


async def is_there(cache: ContextCache, context: Any, block_hash: bytes) -> bool:
    return (await cache.exists(name(context, block_hash))).success == 1


def name(context: Any, block_hash: bytes) -> tuple[int, ...]:
    """Return the name of a request's one full block, as the connector gives it to the cache."""
    names: tuple[int, ...] = context.hashes_of(SimpleNamespace(block_hashes=[block_hash]), 0, 1)
    return names


async def test_a_prompt_whose_hash_begins_like_another_ones_finds_none_of_its_blocks(context: Any) -> None:
    async with opened() as cache:
        await cache.save(name(context, TRUE), chunks=[[(0, TOKENS)]])
        assert not await is_there(cache, context, COLLIDING)
        assert await is_there(cache, context, TRUE)


def test_blocks_under_other_weights_of_an_adapter_have_other_names(context: Any, tmp_path: Path) -> None:
    names = []
    for number, content in enumerate((bytes(4096), bytes(4096), b"\1" * 4096)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(content)
        lora = SimpleNamespace(lora_name="adapter", lora_path=str(folder), lora_int_id=1)
        names.append(context.hashes_of(SimpleNamespace(block_hashes=[TRUE], lora_request=lora), 0, 1))
    assert names[0] == names[1]
    assert len({*names, name(context, TRUE)}) == 3


async def test_blocks_that_an_older_version_named_by_64_bits_are_absent(context: Any) -> None:
    async with opened() as cache:
        await cache.save([int.from_bytes(TRUE[:8], "big")], chunks=[[(0, TOKENS)]])
        assert not await is_there(cache, context, TRUE)
