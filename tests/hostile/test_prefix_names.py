"""Names of blocks in a pool that engines share: a client cannot make two prefixes that have one name.

Of a hash cut to 64 bits, two prompts with the same one are found in hours. A pool would give the blocks of one prompt to
requests with the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiodatadist._adapters.cache_service import CacheService, CacheSettings
from aiodatadist.context_caching import CcConfig_v1
from tests.hostile.vllm_names import ADAPTER, both_halves

BLOCKS, TOKENS = 4, 8
TRUE = bytes(range(32))
COLLIDING = TRUE[:8] + b"x" * 24
"""Another prompt's hash, with the first 64 bits of the true one."""


@pytest.fixture
def service() -> Iterator[CacheService]:
    layer = [np.zeros((BLOCKS, TOKENS, 32), np.uint8)]
    with closing(CacheService(CacheSettings(pool="memory:?bytes=4MiB"))) as made:
        made.open(CcConfig_v1(rank_id=0, device_id=0, model_id="m"), [layer])
        yield made


@pytest.fixture
def context() -> Iterator[Any]:
    with both_halves():
        yield import_module(f"{ADAPTER}.context_scheduler")


def save(service: CacheService, hashes: Sequence[int]) -> None:
    service.save("saved", hashes, [0])
    service.finish("saved")
    until = time.monotonic() + 20
    while "saved" not in service.take().sent:
        assert time.monotonic() < until
        time.sleep(0.001)


def found(service: CacheService, context: Any, block_hash: bytes) -> int:
    """Return how many tokens of a request with this one full block are offered by the cache."""
    scheduler = context.ContextScheduler(service, TOKENS)
    request = SimpleNamespace(request_id=block_hash.hex(), num_prompt_tokens=TOKENS + 1, block_hashes=[block_hash])
    until = time.monotonic() + 20
    while (tokens := scheduler.matched_tokens(request, 0)[0]) is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return int(tokens)


def test_a_prompt_whose_hash_begins_like_another_ones_finds_none_of_its_blocks(
    service: CacheService, context: Any
) -> None:
    save(service, context.hashes_of(SimpleNamespace(block_hashes=[TRUE]), 0, 1))
    assert found(service, context, COLLIDING) == 0
    assert found(service, context, TRUE) == TOKENS


def test_blocks_that_an_older_version_named_by_64_bits_are_absent(service: CacheService, context: Any) -> None:
    save(service, [int.from_bytes(TRUE[:8], "big")])
    assert found(service, context, TRUE) == 0
