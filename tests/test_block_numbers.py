"""Block numbers come in lists, and in arrays of integers as schedulers have them."""

from __future__ import annotations

import re
from array import array
from typing import Any

import numpy as np
import pytest

from aiodatadist import AwaitableLayerSynchronizer, BlocksCacheKey, CacheDesc, DataType, TransferWithCacheKeyConfig
from aiodatadist._values.grid import indexes
from aiodatadist.testing import linked_pair, verify

DESC = CacheDesc(4, [16, 4096], DataType.DT_UINT8)
KINDS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_integers_are_block_numbers(kind: str) -> None:
    assert indexes(np.array([3, 9, 0], kind), "blocks") == array("Q", [3, 9, 0])
    assert indexes(np.arange(10, dtype=kind)[::3], "blocks") == array("Q", [0, 3, 6, 9])
    assert indexes(np.array([], kind), "blocks") == array("Q")


def test_block_numbers_are_copied() -> None:
    given = np.array([3, 9], np.int64)
    numbers = indexes(given, "blocks")
    given[:] = 7
    assert numbers == array("Q", [3, 9])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array([1.0]), "has 1.0 of type float: block numbers must be int"),
        (np.array([[1, 2]]), "has [1, 2] of type list: block numbers must be int"),
        (np.array(["1"]), "has '1' of type str: block numbers must be int"),
        (np.int64(1), "is a int64: must be a list, tuple or range of int, or a one-dimensional array of integers"),
        (b"\x01", "is a bytes: must be a list, tuple or range of int, or a one-dimensional array of integers"),
        (None, "is a NoneType: must be a list, tuple or range of int, or a one-dimensional array of integers"),
    ],
)
def test_other_values_are_refused(values: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"^blocks {re.escape(words)}$"):
        indexes(values, "blocks")


def test_negative_numbers_of_an_array_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^blocks has -1: block numbers must be in "):
        indexes(np.array([0, -1]), "blocks")


async def test_transfers_take_arrays() -> None:
    async with linked_pair(DESC) as (prompt, decoder, source, target):
        theirs, ours = prompt.datadist.cache_manager, decoder.datadist.cache_manager
        await ours.pull_blocks(BlocksCacheKey(1), target, np.array([3, 9], np.int32), np.array([0, 1]))
        lease = theirs.lease_blocks(source, np.array([5, 6], np.uint64), 60)
        await ours.pull_leased(lease.ticket(), target, np.array([2, 3]))
        moved = [(tensor, dst, 1, src) for tensor in range(4) for dst, src in enumerate((3, 9, 5, 6))]
        verify(decoder.memory(target), target, moved)
        await ours.push_blocks(BlocksCacheKey(1), target, np.array([15]), np.array([12]))
        verify(prompt.memory(source), source, [(tensor, 12, 2, 15) for tensor in range(4)])


async def test_layered_transfers_take_arrays() -> None:
    async with linked_pair(DESC) as (prompt, decoder, source, target):
        synchronizer = AwaitableLayerSynchronizer(2)
        configs = [TransferWithCacheKeyConfig(BlocksCacheKey(2), range(2), range(2))]
        src, dst = np.array([3, 9]), np.array([0, 1], np.uint32)
        task = prompt.datadist.cache_manager.transfer_cache_async(source, synchronizer, configs, src, dst)
        for layer in range(2):
            synchronizer.ready(layer)
        await task
        verify(decoder.memory(target), target, [(t, d, 1, s) for t in range(4) for d, s in enumerate((3, 9))])
