"""Arguments of transfers: the checks of what callers pass, and the form in which the rest of the code uses it."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from aiodatadist._cache.names import Key
from aiodatadist._cache.plan import check_once
from aiodatadist._values import checks
from aiodatadist._values.descriptors import BlocksCacheKey, CacheKey
from aiodatadist._values.grid import BlockNumbers, indexes
from aiodatadist._values.lease_ticket import LeaseTicket
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist.errors import ParamInvalid


class Terms(NamedTuple):
    """The terms of a transfer: everything that its caller passes besides the bytes to move, as it was passed."""

    notify: bytes | None
    checksum: bool | None
    priority: TransferPriority
    deadline: float | None


def check_offset(value: int | None, which: str) -> int:
    """Return the offset, 0 if it is None. Raises TypeError or ValueError if it is not an int64 of at least 0."""
    if value is None:
        return 0
    if checks.integer(value, f"{which}cache_offset", checks.INT64) < 0:
        raise ValueError(f"{which}cache_offset is {value}: must be at least 0")
    return value


def blocks_to_pull(key: Key, src_blocks: BlockNumbers, dst_blocks: BlockNumbers) -> tuple[array[int], array[int]]:
    """Return the two lists of a ``pull_blocks``, as C reads them.

    Raises TypeError or ValueError if an entry is not a block number, ParamInvalid if the lists do not fit the key or
    together.
    """
    sources, targets = indexes(src_blocks, "src_blocks"), indexes(dst_blocks, "dst_blocks")
    if not targets:
        raise ParamInvalid("dst_blocks is empty: there is nothing to pull into")
    if isinstance(key, BlocksCacheKey) and not sources:
        raise ParamInvalid("src_blocks is empty: with a BlocksCacheKey it must name the blocks to pull")
    if isinstance(key, CacheKey) and sources:
        raise ParamInvalid(f"src_blocks has {len(sources)} numbers: the slot of a CacheKey has no blocks")
    if sources and len(sources) != len(targets):
        raise ParamInvalid(
            f"src_blocks has {len(sources)} entries, dst_blocks has {len(targets)}: they must have the same length"
        )
    check_once(targets, "dst_blocks")
    return sources, targets


def leased_to_pull(ticket: LeaseTicket, first: int, dst_blocks: array[int]) -> tuple[array[int], array[int]]:
    """Return the two lists of a ``pull_leased``, as C reads them. Raises the errors of :func:`blocks_to_pull`."""
    sources = ticket.blocks[first : first + len(dst_blocks)]
    if len(dst_blocks) > len(sources):
        since = f" from first={first} on" if first else ""
        raise ParamInvalid(f"dst_blocks has {len(dst_blocks)} entries: the ticket has {len(sources)} blocks{since}")
    return blocks_to_pull(ticket.key, sources, dst_blocks)


def blocks_to_push(src_blocks: BlockNumbers, dst_blocks: BlockNumbers) -> tuple[array[int], array[int]]:
    """Return the two lists of a ``push_blocks``, as C reads them. Raises the errors of :func:`blocks_to_pull`."""
    sources, targets = indexes(src_blocks, "src_blocks"), indexes(dst_blocks, "dst_blocks")
    if not targets or len(sources) != len(targets):
        raise ParamInvalid(
            f"src_blocks has {len(sources)} entries, dst_blocks has {len(targets)}: "
            "they must have the same length, at least 1"
        )
    check_once(targets, "dst_blocks")
    return sources, targets


def check_blocks_key(key: BlocksCacheKey | None) -> BlocksCacheKey | None:
    return None if key is None else checks.instance(key, "blocks_cache_key", BlocksCacheKey)
