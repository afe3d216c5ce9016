"""The caches of this cluster: ids, names, who refers to them, and who uses them."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMException, ParamInvalid, Placement
from aiodatadist._cache.catalogue import Catalogue
from aiodatadist._cache.names import Name
from aiodatadist._cache.pool import PagePool, PoolConfig
from aiodatadist._cache.table import CacheTable, Entry, check_desc
from aiodatadist._concurrency.signal import Signal
from aiodatadist._transport import Region
from aiodatadist._values.descriptors import UNSET, forget_addresses
from aiodatadist._wire.frames import Decoder, encode
from aiodatadist._wire.messages import MAX_TENSORS, Found
from tests.unit.cache.examples import quiet

BLOCKS = CacheDesc(2, [4, 32], DataType.DT_FLOAT16)
ADDRS = [4096, 8192]
POOL = PagePool("the pool", 4096, PoolConfig(memory_size=1 << 20))
PLACEHOLDER = CacheKey(1, UNSET)


def slots(count: int, tensors: int = 1) -> CacheDesc:
    return CacheDesc(tensors, [count, 8], DataType.DT_FLOAT16)


def bind(table: CacheTable, *keys: CacheKey, count: int = 4, tensors: int = 1, pool: PagePool | None = None) -> Entry:
    desc = slots(count, tensors)
    return table.add(desc, [4096] * tensors, False, table.check_slots(desc, keys), True, pool)


def add_blocks(table: CacheTable, key: BlocksCacheKey | None = None, pool: PagePool | None = None) -> Entry:
    return table.add(BLOCKS, ADDRS, True, table.check_blocks(key), True, pool)


class Peer:
    """A holder."""

    failure: LLMException | None = None

    def revoke(self, entry: Entry) -> Signal:
        raise AssertionError("no test asks for this")


# ---- ids ----


def test_ids_start_at_one_and_are_never_used_again() -> None:
    table = CacheTable()
    ids = []
    for _ in range(3):
        entry = add_blocks(table)
        ids.append(entry.cache_id)
        table.remove(entry)
    assert ids == [1, 2, 3]
    assert list(table) == []


def test_cache_is_found_by_its_id_until_it_is_removed() -> None:
    table = CacheTable()
    entry = add_blocks(table)
    assert table.find(1) is entry
    assert table.resolve(Name("id", 1)) == (entry, 0)
    assert len(table) == 1
    table.remove(entry)
    table.remove(entry)
    assert (table.find(1), table.resolve(Name("id", 1)), len(table)) == (None, None, 0)


# ---- names ----


def test_one_blocks_cache_per_model_id() -> None:
    table = CacheTable()
    first = add_blocks(table, BlocksCacheKey(1, 5))
    with pytest.raises(ParamInvalid, match="a blocks cache with model_id 5 exists already"):
        table.check_blocks(BlocksCacheKey(2, 5))
    assert table.check_blocks(BlocksCacheKey(1, 6)) == {Name("blocks", 0, 6): 0}
    table.remove(first)
    assert table.check_blocks(BlocksCacheKey(1, 5)) == {Name("blocks", 0, 5): 0}


def test_any_number_of_blocks_caches_without_a_key() -> None:
    table = CacheTable()
    for _ in range(3):
        add_blocks(table)
    assert len(table) == 3


def test_i_th_key_names_slot_i_and_placeholders_name_nothing() -> None:
    table = CacheTable()
    entry = bind(table, PLACEHOLDER, CacheKey(1, 7))
    assert entry.names == {Name("request", 7): 1}
    assert table.resolve(Name("request", 7)) == (entry, 1)


def test_any_number_of_placeholders_is_fine() -> None:
    table = CacheTable()
    add_blocks(table, BlocksCacheKey(1))
    for _ in range(2):
        assert bind(table, *[PLACEHOLDER] * 4).names == {}


def test_more_keys_than_slots_are_refused() -> None:
    with pytest.raises(ParamInvalid, match="5 keys for 4 batch slots"):
        bind(CacheTable(), *(CacheKey(1, i) for i in range(5)))
    with pytest.raises(ParamInvalid, match="5 keys for 4 batch slots"):
        bind(CacheTable(), *[PLACEHOLDER] * 5)


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
def test_key_is_bound_once_in_its_name_space(first: CacheKey, second: CacheKey, same: bool) -> None:
    apart = CacheTable()
    bind(apart, first)
    if same:
        for table, keys in ((apart, [second]), (CacheTable(), [first, second])):
            with pytest.raises(ParamInvalid, match="is bound to a slot already"):
                bind(table, *keys)
        assert len(apart) == 1
    else:
        bind(apart, second)
        bind(CacheTable(), first, second)


def test_name_that_was_unbound_stands_for_nothing_and_may_be_given_again() -> None:
    table = CacheTable()
    entry = bind(table, CacheKey(1, 7), CacheKey(1, 8))
    assert table.unbind(Name("request", 7)) is entry
    assert table.unbind(Name("request", 7)) is None
    assert table.resolve(Name("request", 7)) is None
    assert entry.names == {Name("request", 8): 1}
    other = bind(table, CacheKey(1, 7))
    assert table.resolve(Name("request", 7)) == (other, 0)


def test_removed_cache_takes_its_own_names_with_it_and_no_other() -> None:
    table = CacheTable()
    entry = bind(table, CacheKey(1, 7), CacheKey(1, 8))
    table.unbind(Name("request", 8))
    other = bind(table, CacheKey(1, 8))
    table.remove(entry)
    assert table.resolve(Name("request", 7)) is None
    assert table.resolve(Name("request", 8)) == (other, 0)


# ---- references ----


def test_cache_of_a_pool_is_referred_to_by_its_id_and_by_each_name() -> None:
    table = CacheTable()
    entry = bind(table, CacheKey(1, 7), PLACEHOLDER, CacheKey(1, UNSET, 0, 7), pool=POOL)
    counts = [entry.references]
    table.unbind(Name("request", 7))
    counts.append(entry.references)
    entry.has_id = False
    counts.append(entry.references)
    table.unbind(Name("prefix", 7))
    assert [*counts, entry.references] == [3, 2, 1, 0]


def test_names_of_blocks_and_of_the_callers_memory_do_not_count() -> None:
    table = CacheTable()
    for entry in (
        add_blocks(table, BlocksCacheKey(1, 1), POOL),
        add_blocks(table, BlocksCacheKey(1, 2)),
        bind(table, CacheKey(1, 7)),
    ):
        assert entry.references == 1
        entry.has_id = False
        assert entry.references == 0


# ---- what was pulled ----


@given(st.integers(1, 70), st.lists(st.tuples(st.integers(0, 69), st.integers(0, 69)), max_size=6))
def test_all_tensors_were_pulled_when_the_pieces_cover_them(tensors: int, pieces: list[tuple[int, int]]) -> None:
    entry = bind(CacheTable(), CacheKey(1, 7), tensors=tensors)
    seen: set[int] = set()
    for a, b in pieces:
        piece = range(min(a, b, tensors), min(max(a, b) + 1, tensors))
        seen |= set(piece)
        assert entry.cover(Name("request", 7), piece) == (len(seen) == tensors)


def test_each_key_has_its_own_coverage_which_ends_with_it() -> None:
    table = CacheTable()
    entry = bind(table, CacheKey(1, 7), CacheKey(1, 8), tensors=4)
    one, other = Name("request", 7), Name("request", 8)
    assert not entry.cover(one, range(2))
    assert not entry.cover(other, range(2, 4))
    table.unbind(one)
    assert not entry.cover(one, range(2, 4)), "as if it were new"
    assert entry.cover(other, range(2))


# ---- limits ----


def test_only_dimension_zero_is_cut() -> None:
    with pytest.raises(
        ParamInvalid, match="batch_dim_index is 1: must be 0, because tensors that move are cut along dimension 0"
    ):
        check_desc(CacheDesc(1, [4, 32], DataType.DT_FLOAT16, batch_dim_index=1))


@pytest.mark.parametrize("shape", [[0, 8], [4, -1], [1] * 32])
def test_shape_without_a_size_is_refused(shape: list[int]) -> None:
    with pytest.raises(ParamInvalid, match="1 to 31 dimensions, all above 0"):
        check_desc(CacheDesc(1, shape, DataType.DT_FLOAT16))


@pytest.mark.parametrize("count", [0, MAX_TENSORS + 1])
def test_number_of_tensors_is_one_that_a_peer_can_be_told(count: int) -> None:
    with pytest.raises(ParamInvalid, match=f"num_tensors is {count}: a cache has 1 to {MAX_TENSORS}"):
        check_desc(CacheDesc(count, [1], DataType.DT_INT8))
    for fine in (1, MAX_TENSORS):
        check_desc(CacheDesc(fine, [1], DataType.DT_INT8))


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
    table, desc = CacheTable(), CacheDesc(tensors, [count, 3], data_type, placement)
    try:
        entry = table.add(desc, [64] * tensors, False, table.check_slots(desc, keys), True)
    except LLMException:
        return
    entry.epoch = 3
    catalogue = Catalogue()
    for name, slot in entry.names.items():
        (found,) = Decoder().feed(encode(Found(call=1, cache=entry.message(), slot=slot)))
        assert isinstance(found, Found)
        assert found.cache is not None
        catalogue.learn(found.cache, name, found.slot)
    for slot, key in enumerate(keys):
        known = catalogue.find(key)
        if key.is_placeholder:
            assert known is None
            continue
        assert known is not None
        remote, at = known
        assert (at, remote.cache_id, remote.blocks) == (slot, entry.cache_id, False)
        assert (remote.pieces, remote.stride, remote.epoch) == (entry.pieces, entry.stride, 3)
        assert remote.addresses == entry.addresses


def test_each_tensor_is_one_region_however_often_it_is_named() -> None:
    table = CacheTable()
    assert add_blocks(table).regions() == [Region(address, 256, Placement.DEVICE) for address in ADDRS]
    assert table.add(BLOCKS, [4096, 4096], True, {}, True).regions() == [Region(4096, 256, Placement.DEVICE)]


def test_description_that_its_owner_changes_changes_nothing_here() -> None:
    desc = CacheDesc(1, [4, 32], DataType.DT_FLOAT16)
    entry = CacheTable().add(desc, [4096], True, {}, True)
    before = (entry.regions(), entry.message())
    desc.update_dim(0, 400)
    forget_addresses(entry.cache)
    assert (entry.regions(), entry.message()) == before


# ---- who uses it ----


async def test_cache_is_quiet_when_its_last_lease_and_its_last_holder_are_gone() -> None:
    entry, one, other = bind(CacheTable()), Peer(), Peer()
    order = []

    async def wait() -> None:
        await quiet(entry)
        order.append("quiet")

    entry.lease()
    entry.lease()
    entry.holders |= {one, other}
    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        group.start_soon(wait)
        for less in (entry.release, lambda: entry.drop_holder(one), entry.release, lambda: entry.drop_holder(other)):
            await anyio.wait_all_tasks_blocked()
            order.append("less")
            less()
    assert order == ["less"] * 4 + ["quiet"] * 2


async def test_lease_taken_before_the_waiter_ran_is_waited_for_too() -> None:
    entry = bind(CacheTable())
    entry.lease()
    order = []

    async def wait() -> None:
        await quiet(entry)
        order.append("quiet")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        entry.release()
        entry.lease()
        await anyio.wait_all_tasks_blocked()
        order.append("release")
        entry.release()
    assert order == ["release", "quiet"]


async def test_no_call_waits_for_a_cache_that_the_device_does_not_let_go_of() -> None:
    entry = bind(CacheTable())
    entry.lease()
    entry.holders.add(Peer())
    async with anyio.create_task_group() as group:
        group.start_soon(quiet, entry)
        await anyio.wait_all_tasks_blocked()
        entry.poison()
    await quiet(entry)
    assert (entry.is_poisoned, entry.leases) == (True, 1)


async def test_unused_cache_is_quiet_at_once() -> None:
    entry = bind(CacheTable())
    entry.drop_holder(Peer())
    await quiet(entry)
