"""Pushes: what the caller has is written into the caches of a peer, which takes no part in it."""

from __future__ import annotations

import pytest

from aiodatadist import CacheKeyByIdAndIndex, ParamInvalid
from aiodatadist.testing import linked_pair, verify
from tests.test_pull import BLOCKS, SLOTS, transports


@transports
async def test_a_slot_is_pushed_into_a_slot_of_a_peers_cache(transport: str) -> None:
    async with linked_pair(SLOTS, slots=True, transport=transport) as (prompt, decoder, source, cache):
        push = prompt.datadist.cache_manager.push_cache
        await push(CacheKeyByIdAndIndex(2, cache.cache_id, 3), source, 1)
        moved = {(t, 3): (1, 1) for t in range(SLOTS.num_tensors)}
        verify(decoder.memory(cache), cache, [(t, s, *which) for (t, s), which in moved.items()], owner=2)
        with pytest.raises(ParamInvalid, match="size is 5"):
            await push(CacheKeyByIdAndIndex(2, cache.cache_id), source, size=5)


@transports
async def test_blocks_are_pushed_by_cache_id_and_layer(transport: str) -> None:
    async with linked_pair(BLOCKS, transport=transport) as (prompt, decoder, source, cache):
        first, last = 1, 2
        layers = range(first, last + 1)  # upstream's C++ interface names the last one
        report = await prompt.datadist.cache_manager.push_blocks(
            CacheKeyByIdAndIndex(2, cache.cache_id), source, [3, 9], [0, 7], layers, layers
        )
        tensors = range(2 * first, 2 * (last + 1))
        assert report.bytes == 2 * len(tensors) * BLOCKS.stride
        expected = [(t, to, 1, fro) for t in tensors for to, fro in ((0, 3), (7, 9))]
        verify(decoder.memory(cache), cache, expected, owner=2)
