"""What a peer published is found by the names that callers use, and only that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, CacheNotFound, LLMStatusCode
from aiodatadist.cache.catalogue import Catalogue
from aiodatadist.descriptors import UNSET
from aiodatadist.wire.messages import CacheEntry, SlotKey
from tests.unit.wire.examples import entries, entry

SLOTS = entry(
    cache_id=3,
    blocks=False,
    keys=[
        SlotKey(kind="request", id=10, model_id=0, batch_index=2),
        SlotKey(kind="prefix", id=10, model_id=0, batch_index=1),
    ],
)
BLOCKS = entry(cache_id=4, model_id=8)
NAMELESS = entry(cache_id=5)
CATALOGUE = Catalogue(7, [SLOTS, BLOCKS, NAMELESS])


@pytest.mark.parametrize(
    ("key", "cache_id", "slot"),
    [
        (CacheKey(7, 10), 3, 2),
        (CacheKey(7, UNSET, 0, 10), 3, 1),
        (CacheKeyByIdAndIndex(7, 3), 3, 0),
        (CacheKeyByIdAndIndex(7, 3, 3), 3, 3),
        (BlocksCacheKey(7, 8), 4, 0),
        (CacheKeyByIdAndIndex(7, 4), 4, 0),
        (CacheKeyByIdAndIndex(7, 5), 5, 0),
    ],
)
def test_key_finds_its_cache_and_slot(
    key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex, cache_id: int, slot: int
) -> None:
    found = CATALOGUE.find(key)
    assert (found.cache_id, found.slot) == (cache_id, slot)


@pytest.mark.parametrize(
    "key",
    [
        CacheKey(7, 11),
        CacheKey(7, 10, 1),
        CacheKey(7, UNSET, 0, 11),
        CacheKey(7, UNSET),
        BlocksCacheKey(7),
        CacheKeyByIdAndIndex(7, 6),
        CacheKeyByIdAndIndex(7, -1),
        CacheKeyByIdAndIndex(7, 3, 4),
        CacheKeyByIdAndIndex(7, 4, 1),
    ],
    ids=repr,
)
def test_what_the_peer_does_not_offer_is_not_found(key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex) -> None:
    with pytest.raises(CacheNotFound) as caught:
        CATALOGUE.find(key)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert caught.value.peer == 7
    assert repr(key) in str(caught.value)


def names(cache: CacheEntry) -> list[BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex]:
    """Everything that a caller may call this cache, or a slot of it."""
    found: list[BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex] = [CacheKeyByIdAndIndex(7, cache.cache_id)]
    found += [
        CacheKey(7, key.id, key.model_id) if key.kind == "request" else CacheKey(7, UNSET, key.model_id, key.id)
        for key in cache.keys
        if key.id != UNSET
    ]
    return found if cache.model_id is None else [*found, BlocksCacheKey(7, cache.model_id)]


@given(st.lists(entries(), max_size=4, unique_by=lambda cache: cache.cache_id))
def test_every_name_finds_a_slot_that_exists_in_a_cache_that_was_published(published: list[CacheEntry]) -> None:
    catalogue = Catalogue(7, published)
    by_id = {cache.cache_id: cache for cache in published}
    for key in [key for cache in published for key in names(cache)]:
        found = catalogue.find(key)
        assert 0 <= found.slot < by_id[found.cache_id].pieces
        assert list(found.addresses) == by_id[found.cache_id].addresses
