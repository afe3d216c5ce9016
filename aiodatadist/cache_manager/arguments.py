"""What callers say of a transfer: checks of it, and what goes on from there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from aiodatadist.cache.names import Key
from aiodatadist.cache.plan import check_once
from aiodatadist.errors import ParamInvalid
from aiodatadist.values import checks
from aiodatadist.values.descriptors import BlocksCacheKey, CacheKey
from aiodatadist.values.grid import indexes
from aiodatadist.values.transfer_priority import TransferPriority


class Terms(NamedTuple):
    """What a caller wants of a transfer besides its bytes, as it was given."""

    notify: bytes | None
    checksum: bool | None
    priority: TransferPriority
    deadline: float | None


def check_offset(value: int | None, which: str) -> int:
    """Raises TypeError, ValueError: it is no int64 of at least 0."""
    if value is None:
        return 0
    if checks.integer(value, f"{which}cache_offset", checks.INT64) < 0:
        raise ValueError(f"{which}cache_offset is {value}: must be at least 0")
    return value


def blocks_to_pull(key: Key, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> tuple[array[int], array[int]]:
    """The two lists of a ``pull_blocks``, as C reads them. Raises TypeError, ValueError, ParamInvalid: they are none."""
    sources, targets = indexes(src_blocks, "src_blocks"), indexes(dst_blocks, "dst_blocks")
    if not targets:
        raise ParamInvalid("dst_blocks is empty: there is nothing to pull into")
    if isinstance(key, BlocksCacheKey) and not sources:
        raise ParamInvalid("src_blocks is empty: with a BlocksCacheKey it says which blocks to pull")
    if isinstance(key, CacheKey) and sources:
        raise ParamInvalid(f"src_blocks has {len(sources)} numbers: the slot of a CacheKey has no blocks")
    if sources and len(sources) != len(targets):
        raise ParamInvalid(f"{len(sources)} src_blocks for {len(targets)} dst_blocks: they must be as many")
    check_once(targets, "dst_blocks")
    return sources, targets


def blocks_to_push(src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> tuple[array[int], array[int]]:
    """The same of a ``push_blocks``."""
    sources, targets = indexes(src_blocks, "src_blocks"), indexes(dst_blocks, "dst_blocks")
    if not targets or len(sources) != len(targets):
        raise ParamInvalid(f"{len(sources)} src_blocks for {len(targets)} dst_blocks: they must be as many, and some")
    check_once(targets, "dst_blocks")
    return sources, targets


def check_blocks_key(key: BlocksCacheKey | None) -> BlocksCacheKey | None:
    return None if key is None else checks.instance(key, "blocks_cache_key", BlocksCacheKey)
