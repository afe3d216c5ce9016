"""The caches of this cluster: ids, keys, and who uses them."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import CacheDesc, CacheKey, DataType, LLMException, ParamInvalid, Placement
from aiodatadist.cache.catalogue import Catalogue
from aiodatadist.cache.table import CacheTable, Entry
from aiodatadist.descriptors import UNSET
from aiodatadist.transport import Region
from aiodatadist.wire import messages
from aiodatadist.wire.framing import Decoder, encode
from aiodatadist.wire.messages import Ready

BLOCKS = CacheDesc(2, [4, 32], DataType.DT_FLOAT16)
ADDRS = [4096, 8192]


def slots(count: int) -> CacheDesc:
    return CacheDesc(1, [count, 8], DataType.DT_FLOAT16)


def bind(table: CacheTable, *keys: CacheKey, count: int = 4) -> Entry:
    return table.add_contiguous(slots(count), [4096], keys, True)


# ---- ids ----


def test_ids_start_at_one_and_are_never_used_again() -> None:
    table = CacheTable()
    ids = []
    for _ in range(3):
        ids.append(table.add_blocks(BLOCKS, ADDRS, None, True).cache.cache_id)
        table.remove(ids[-1])
    assert ids == [1, 2, 3]
    assert list(table) == []


def test_cache_is_found_by_its_id_until_it_is_removed() -> None:
    table = CacheTable()
    entry = table.add_blocks(BLOCKS, ADDRS, None, True)
    assert table.find(1) is entry
    assert table.remove(1) is entry
    assert table.find(1) is None
    assert table.remove(1) is None


# ---- keys ----


def test_one_blocks_cache_per_model_id() -> None:
    table = CacheTable()
    first = table.add_blocks(BLOCKS, ADDRS, 5, True)
    with pytest.raises(ParamInvalid, match="a blocks cache with model_id 5 is registered already"):
        table.add_blocks(BLOCKS, ADDRS, 5, True)
    table.remove(first.cache.cache_id)
    assert table.add_blocks(BLOCKS, ADDRS, 5, True).model_id == 5


def test_any_number_of_blocks_caches_without_a_key() -> None:
    table = CacheTable()
    for _ in range(3):
        table.add_blocks(BLOCKS, ADDRS, None, True)
    assert len(list(table)) == 3


def test_i_th_key_names_slot_i_and_placeholders_name_nothing() -> None:
    free, bound = CacheKey(1, UNSET), CacheKey(1, 7)
    assert bind(CacheTable(), free, bound).slots == {1: bound}


def test_any_number_of_placeholders_is_fine() -> None:
    table = CacheTable()
    table.add_blocks(BLOCKS, ADDRS, 0, True)
    assert bind(table, *[CacheKey(1, UNSET)] * 4).slots == {}


def test_more_keys_than_slots_are_refused() -> None:
    with pytest.raises(ParamInvalid, match="5 keys for 4 batch slots"):
        bind(CacheTable(), *(CacheKey(1, i) for i in range(5)))


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (CacheKey(1, 7), CacheKey(1, 7), True),
        (CacheKey(1, 7), CacheKey(2, 7), True),
        (CacheKey(1, 7), CacheKey(1, 7, 1), False),
        (CacheKey(1, 7), CacheKey(1, UNSET, 0, 7), False),
        (CacheKey(1, 1, 0, 7), CacheKey(1, 2, 0, 7), True),
    ],
)
def test_key_is_bound_once_in_its_namespace(first: CacheKey, second: CacheKey, same: bool) -> None:
    apart = CacheTable()
    bind(apart, first)
    if same:
        for table, keys in ((apart, [second]), (CacheTable(), [first, second])):
            with pytest.raises(ParamInvalid, match="is bound to a slot already"):
                bind(table, *keys)
        assert len(list(apart)) == 1
    else:
        bind(apart, second)
        bind(CacheTable(), first, second)


def test_key_is_free_again_when_its_cache_is_removed() -> None:
    table = CacheTable()
    table.remove(bind(table, CacheKey(1, 7)).cache.cache_id)
    bind(table, CacheKey(1, 7))


# ---- limits ----


def test_only_dimension_zero_is_cut() -> None:
    desc = CacheDesc(1, [4, 32], DataType.DT_FLOAT16, batch_dim_index=1)
    refused = pytest.raises(ParamInvalid, match="batch_dim_index is 1: tensors that move are cut along dimension 0")
    with refused:
        CacheTable().add_blocks(desc, [4096], None, True)
    with refused:
        CacheTable().add_contiguous(desc, [4096], [], True)


@pytest.mark.parametrize("shape", [[0, 8], [4, -1], [1] * 32])
def test_shape_without_a_size_is_refused_and_nothing_is_kept(shape: list[int]) -> None:
    table = CacheTable()
    with pytest.raises(ParamInvalid, match="1 to 31 dimensions, all above 0"):
        table.add_blocks(CacheDesc(1, shape, DataType.DT_FLOAT16), [4096], None, True)
    assert list(table) == []


@pytest.mark.parametrize("count", [0, messages.MAX_TENSORS + 1])
def test_number_of_tensors_is_one_that_a_peer_can_be_told(count: int) -> None:
    with pytest.raises(ParamInvalid, match=f"a cache of {count} tensors: it has 1 to {messages.MAX_TENSORS}"):
        CacheTable().add_blocks(CacheDesc(count, [1], DataType.DT_INT8), [4096] * count, None, True)


def test_number_of_keys_is_one_that_a_peer_can_be_told() -> None:
    most = messages.MAX_KEYS
    bind(CacheTable(), *(CacheKey(1, i) for i in range(most)), count=most + 1).published()
    with pytest.raises(
        ParamInvalid, match=f"{most + 1} keys for {most + 1} batch slots: the limit is one each, and {most}"
    ):
        bind(CacheTable(), *(CacheKey(1, i) for i in range(most + 1)), count=most + 1)


def test_number_of_caches_is_one_that_a_peer_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodatadist.cache.table.MAX_CACHES", 2)
    table = CacheTable()
    for _ in range(2):
        table.add_blocks(BLOCKS, ADDRS, None, True)
    with pytest.raises(ParamInvalid, match="2 caches: that is the limit"):
        table.add_blocks(BLOCKS, ADDRS, None, True)


# ---- what peers are told ----


@given(
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from(DataType),
    st.sampled_from(Placement),
    st.lists(st.builds(CacheKey, st.just(1), st.integers(0, UNSET), st.just(0), st.integers(0, UNSET)), max_size=8),
)
def test_whatever_was_added_can_be_told_to_a_peer_and_found_there(
    tensors: int, count: int, data_type: DataType, placement: Placement, keys: list[CacheKey]
) -> None:
    table = CacheTable()
    try:
        entry = table.add_contiguous(CacheDesc(tensors, [count, 3], data_type, placement), [64] * tensors, keys, True)
    except LLMException:
        return
    entry.is_registered = True
    (ready,) = Decoder().feed(encode(Ready(caches=table.published())))
    assert isinstance(ready, Ready)
    catalogue = Catalogue(1, ready.caches)
    for slot, key in entry.slots.items():
        found = catalogue.find(key)
        assert (found.slot, found.pieces, found.stride) == (slot, entry.pieces, entry.stride)
        assert found.addresses == entry.addresses


def test_peers_are_told_only_what_they_may_reach() -> None:
    table = CacheTable()
    table.add_blocks(BLOCKS, ADDRS, 1, False).is_registered = True
    table.add_blocks(BLOCKS, [a + 2048 for a in ADDRS], 3, True)  # its memory is still being registered
    seen = table.add_blocks(BLOCKS, ADDRS, 2, True)
    seen.is_registered = True
    assert [cache.model_id for cache in table.published()] == [2]
    assert seen.regions() == {Region(address, 256, Placement.DEVICE) for address in ADDRS}
    assert all(not entry.regions() for entry in table if not entry.remote_accessible)


def test_tensor_that_is_named_twice_is_one_region() -> None:
    assert len(CacheTable().add_blocks(BLOCKS, [4096, 4096], None, True).regions()) == 1


def test_description_that_its_owner_changes_changes_nothing_here() -> None:
    desc = CacheDesc(1, [4, 32], DataType.DT_FLOAT16)
    table = CacheTable()
    entry = table.add_blocks(desc, [4096], 1, True)
    before = (entry.regions(), entry.published())
    desc.update_dim(0, 400)
    assert (entry.regions(), entry.published()) == before


# ---- leases ----


async def test_cache_is_idle_when_its_last_lease_is_back() -> None:
    entry = bind(CacheTable())
    order = []

    async def wait() -> None:
        await entry.wait_idle()
        order.append("idle")

    entry.lease()
    entry.lease()
    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        group.start_soon(wait)
        for _ in range(2):
            await anyio.wait_all_tasks_blocked()
            order.append("release")
            entry.release()
    assert order == ["release", "release", "idle", "idle"]


async def test_lease_taken_before_the_waiter_ran_is_waited_for_too() -> None:
    entry = bind(CacheTable())
    entry.lease()
    order = []

    async def wait() -> None:
        await entry.wait_idle()
        order.append("idle")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        entry.release()
        entry.lease()
        await anyio.wait_all_tasks_blocked()
        order.append("release")
        entry.release()
    assert order == ["release", "idle"]


async def test_unused_cache_is_idle_at_once() -> None:
    await bind(CacheTable()).wait_idle()
