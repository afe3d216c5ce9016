"""A plan names exactly the bytes that were asked for, and none outside of either cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiodatadist import LLMException, LLMStatusCode, ParamInvalid
from aiodatadist._cache.catalogue import RemoteCache
from aiodatadist._cache.plan import (
    blocks_to_blocks,
    check_below,
    check_once,
    inside,
    parts_to_parts,
    slot_to_blocks,
    slot_to_slot,
)
from aiodatadist._values.grid import Grid
from aiodatadist._values.selection import BlockParts, Geometry, Layers, Selection
from tests.unit.cache.examples import Shape, local, place, source, target
from tests.unit.wire.examples import entry

ALL = Layers()
Piece = tuple[int, int, int]
Moved = tuple[Piece, Piece, int]
Pairs = list[tuple[int, int]]

strides = st.integers(1, 10_000) | st.sampled_from([2**31, 2**40])


def moved(grid: Grid, src: Geometry, dst: Geometry) -> list[Moved]:
    """Return each move as (tensor, piece, offset) at both ends and its bytes. All are inside both caches."""
    return [
        (
            place(src.addresses, src.pieces, src.stride, r.remote, r.nbytes),
            place(dst.addresses, dst.pieces, dst.stride, r.local, r.nbytes),
            r.nbytes,
        )
        for r in grid.ranges()
    ]


@st.composite
def layer_ranges(draw: st.DrawFn) -> tuple[Layers, int, int, Pairs]:
    """Draw layers, the numbers of tensors at both ends, and the pairs of tensors that the layers mean."""
    per_layer, count = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ends: list[tuple[range | None, int, int]] = []
    for _ in range(2):
        first, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        given_as = range(first, first + count) if first or after or draw(st.booleans()) else None
        ends.append((given_as, (first + count + after) * per_layer, first * per_layer))
    (src, src_tensors, src_start), (dst, dst_tensors, dst_start) = ends
    pairs = [(src_start + i, dst_start + i) for i in range(count * per_layer)]
    return Layers(src, dst, per_layer), src_tensors, dst_tensors, pairs


# ---- blocks to blocks ----


@given(layer_ranges(), st.integers(1, 50), st.integers(1, 50), strides, st.data())
def test_each_block_goes_to_its_block_in_each_tensor_and_nothing_else_moves(
    chosen: tuple[Layers, int, int, Pairs], src_blocks: int, dst_blocks: int, stride: int, data: st.DataObject
) -> None:
    layers, src_tensors, dst_tensors, pairs = chosen
    here, there = (
        source(src_tensors, src_blocks, stride, blocks=True),
        target(dst_tensors, dst_blocks, stride, blocks=True),
    )
    block_pairs = data.draw(
        st.lists(
            st.tuples(st.integers(0, src_blocks - 1), st.integers(0, dst_blocks - 1)), unique_by=lambda pair: pair[1]
        )
    )
    src, dst = [a for a, _ in block_pairs], [b for _, b in block_pairs]
    grid = blocks_to_blocks(here, there, src, dst, layers)
    assert moved(grid, here, there) == [((f, a, 0), (t, b, 0), stride) for f, t in pairs for a, b in block_pairs]
    assert grid.total == len(pairs) * len(block_pairs) * stride


def test_four_blocks_of_sixty_four_bytes_are_reversed() -> None:
    here, there = source(4, 4, 64, blocks=True), target(4, 4, 64, blocks=True)
    grid = blocks_to_blocks(here, there, [0, 1, 2, 3], [3, 2, 1, 0], ALL)
    assert len(list(grid.ranges())) == 4 * 4
    assert [(a[1], b[1]) for a, b, _ in moved(grid, here, there)[:4]] == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_block_nine_needs_ten_blocks() -> None:
    there = target(4, 4, 64, blocks=True)
    blocks_to_blocks(source(4, 10, 64, blocks=True), there, [5, 6, 9], [0, 1, 2], ALL)
    with pytest.raises(ParamInvalid, match=r"src_blocks\[2\] is 9: the source cache has 9 blocks"):
        blocks_to_blocks(source(4, 9, 64, blocks=True), there, [5, 6, 9], [0, 1, 2], ALL)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 100))
def test_first_block_outside_of_either_cache_is_named(numbers: list[int], blocks: int) -> None:
    bad = next((i for i, number in enumerate(numbers) if number >= blocks), None)
    assume(bad is not None)
    zeros = [0] * len(numbers)
    here, there = source(1, blocks, 64, blocks=True), target(1, blocks, 64, blocks=True)
    with pytest.raises(ParamInvalid, match=rf"src_blocks\[{bad}\] is \d+: the source cache has {blocks} blocks"):
        blocks_to_blocks(here, there, numbers, zeros, ALL)
    with pytest.raises(ParamInvalid, match=rf"dst_blocks\[{bad}\] is \d+: the destination cache has {blocks} blocks"):
        blocks_to_blocks(here, there, zeros, numbers, ALL)


@given(st.lists(st.integers(0, 2**64 - 1)), st.integers(0, 2**64 - 1))
def test_numbers_below_the_limit_are_all_there_is(numbers: list[int], limit: int) -> None:
    try:
        check_below(array("Q", numbers), limit, "blocks", "other")
        fits = True
    except ParamInvalid:
        fits = False
    assert fits == all(number < limit for number in numbers)


@given(st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), max_size=300))
def test_the_first_number_that_is_repeated_is_named(numbers: list[int]) -> None:
    at = next((i for i, number in enumerate(numbers) if number in numbers[:i]), None)
    if at is None:
        check_once(array("Q", numbers), "dst_blocks")
        return
    words = rf"^dst_blocks\[{at}\] is {numbers[at]}, as dst_blocks\[{numbers.index(numbers[at])}\] is: "
    with pytest.raises(ParamInvalid, match=words):
        check_once(array("Q", numbers), "dst_blocks")


def test_many_numbers_in_any_order() -> None:
    numbers = [(i * 7919) % 65536 for i in range(65536)]
    check_once(array("Q", numbers), "dst_blocks")
    check_once(array("Q", [number << 40 for number in numbers]), "dst_blocks")
    with pytest.raises(ParamInvalid, match=r"dst_blocks\[65536\] is 7919, as dst_blocks\[1\] is"):
        check_once(array("Q", [*numbers, 7919]), "dst_blocks")


def test_block_sizes_have_to_be_equal() -> None:
    with pytest.raises(ParamInvalid, match="a block has 128 bytes at the source and 64 at the destination"):
        blocks_to_blocks(source(1, 4, 128, blocks=True), target(1, 4, 64, blocks=True), [0], [0], ALL)


def test_lists_have_to_be_as_long_as_each_other() -> None:
    with pytest.raises(ParamInvalid, match="2 src_blocks for 1 dst_blocks"):
        blocks_to_blocks(source(1, 4, 64, blocks=True), target(1, 4, 64, blocks=True), [0, 1], [0], ALL)


# ---- within one cache ----


@given(
    st.integers(1, 4),
    st.integers(1, 20),
    strides,
    st.dictionaries(st.integers(0, 19), st.lists(st.integers(0, 19), max_size=4), max_size=5),
)
def test_block_goes_to_each_of_its_copies_in_each_tensor(
    tensors: int, blocks: int, stride: int, pairs: dict[int, list[int]]
) -> None:
    fresh = iter(dict.fromkeys(dst % blocks for copies in pairs.values() for dst in copies))
    pairs = {src % blocks: list(islice(fresh, len(copies))) for src, copies in pairs.items()}
    cache = target(tensors, blocks, stride, blocks=True)
    grid = inside(cache, pairs)
    assert moved(grid, cache, cache) == [
        ((t, src, 0), (t, dst, 0), stride) for t in range(tensors) for src, copies in pairs.items() for dst in copies
    ]


def test_copies_within_a_cache_stay_in_it() -> None:
    cache = target(1, 4, 64, blocks=True)
    with pytest.raises(ParamInvalid, match=r"src_blocks\[1\] is 4"):
        inside(cache, {0: [1], 4: [2]})
    with pytest.raises(ParamInvalid, match=r"dst_blocks\[2\] is 4"):
        inside(cache, {0: [1, 2], 1: [4]})
    with pytest.raises(ParamInvalid, match="cache 6 is a contiguous cache"):
        inside(target(1, 4, 64, blocks=False), {0: [1]})


# ---- slot to blocks ----


@given(layer_ranges(), st.integers(1, 4), st.integers(1, 5000), st.integers(1, 5000), st.data())
def test_slot_is_cut_into_blocks_without_gap_or_overlap(
    chosen: tuple[Layers, int, int, Pairs], slots: int, slot_bytes: int, block: int, data: st.DataObject
) -> None:
    layers, src_tensors, dst_tensors, pairs = chosen
    needed = -(-slot_bytes // block)
    assume(needed <= 50)
    slot = data.draw(st.integers(0, slots - 1))
    dst = data.draw(st.permutations(range(needed + 2)))[:needed]
    here, there = (
        source(src_tensors, slots, slot_bytes, blocks=False),
        target(dst_tensors, needed + 2, block, blocks=True),
    )
    grid = slot_to_blocks(here, slot, there, dst, layers)
    assert moved(grid, here, there) == [
        ((f, slot, i * block), (t, dst[i], 0), min(block, slot_bytes - i * block))
        for f, t in pairs
        for i in range(needed)
    ]
    assert grid.total == len(pairs) * slot_bytes


def test_two_and_a_half_million_bytes_need_three_blocks_of_a_mebibyte() -> None:
    here, there = source(2, 4, 2_500_000, blocks=False), target(2, 8, 1_048_576, blocks=True)
    grid = slot_to_blocks(here, 3, there, [6, 1, 4], ALL)
    assert [r.nbytes for r in grid.ranges()] == [1_048_576, 1_048_576, 402_848] * 2
    assert grid.tail == 402_848
    for wrong in ([6, 1], [6, 1, 4, 0], []):
        with pytest.raises(
            ParamInvalid, match=f"{len(wrong)} dst_blocks: a slot of 2500000 bytes needs exactly 3 blocks"
        ):
            slot_to_blocks(here, 3, there, wrong, ALL)


def test_block_larger_than_the_slot_is_filled_in_part() -> None:
    here, there = source(1, 1, 2 << 20, blocks=False), target(1, 1, 4 << 20, blocks=True)
    grid = slot_to_blocks(here, 0, there, [0], ALL)
    assert [r.nbytes for r in grid.ranges()] == [2 << 20]
    assert grid.nbytes == 2 << 20, "a transport that checks bounds looks here"


def test_slot_goes_to_blocks_that_exist() -> None:
    with pytest.raises(ParamInvalid, match=r"dst_blocks\[1\] is 2: the destination cache has 2 blocks"):
        slot_to_blocks(source(1, 1, 128, blocks=False), 0, target(1, 2, 64, blocks=True), [0, 2], ALL)


# ---- slot to slot ----


@given(layer_ranges(), st.integers(1, 4), st.integers(1, 4), strides, strides, st.data())
def test_bytes_of_a_slot_go_from_their_offset_to_the_other_slots(
    chosen: tuple[Layers, int, int, Pairs],
    src_slots: int,
    dst_slots: int,
    src_stride: int,
    dst_stride: int,
    data: st.DataObject,
) -> None:
    layers, src_tensors, dst_tensors, pairs = chosen
    src_slot, dst_slot = data.draw(st.integers(0, src_slots - 1)), data.draw(st.integers(0, dst_slots - 1))
    src_offset, dst_offset = (data.draw(st.just(0) | st.integers(0, limit - 1)) for limit in (src_stride, dst_stride))
    nbytes = data.draw(st.integers(1, min(src_stride - src_offset, dst_stride - dst_offset)))
    here, there = (
        source(src_tensors, src_slots, src_stride, blocks=False),
        target(dst_tensors, dst_slots, dst_stride, blocks=False),
    )
    grid = slot_to_slot(here, src_slot, there, dst_slot, nbytes, layers, src_offset, dst_offset)
    places = [((f, src_slot, src_offset), (t, dst_slot, dst_offset), nbytes) for f, t in pairs]
    assert moved(grid, here, there) == places
    assert (list(here.addresses), list(there.addresses)) == (
        list(source(src_tensors, src_slots, src_stride, blocks=False).addresses),
        list(target(dst_tensors, dst_slots, dst_stride, blocks=False).addresses),
    ), "a plan changes no cache"


def test_slot_one_of_two_is_the_second_half_of_each_tensor() -> None:
    here, there = source(4, 2, 2_097_152, blocks=False), target(4, 2, 2_097_152, blocks=False)
    grid = slot_to_slot(here, 1, there, 1, 2_097_152, ALL)
    for bases, side in ((there.addresses, "local"), (here.addresses, "remote")):
        assert [getattr(r, side) - base for r, base in zip(grid.ranges(), bases, strict=True)] == [2_097_152] * 4


@pytest.mark.parametrize(
    ("src_stride", "dst_stride", "offset", "nbytes", "words"),
    [
        (80, 100, 0, 81, "81 bytes from 0 do not fit: a slot of the source cache has 80"),
        (100, 80, 0, 81, "81 bytes from 0 do not fit: a slot of the destination cache has 80"),
        (100, 80, 10, 90, "90 bytes from 10 do not fit: a slot of the destination cache has 80"),
        (100, 80, 80, 1, "offset is 80: a slot of the destination cache has only 80 bytes"),
        (80, 100, 2**64 - 1, 1, "offset is 18446744073709551615: a slot of the source cache has only 80 bytes"),
    ],
)
def test_bytes_that_do_not_fit_either_slot_are_refused(
    src_stride: int, dst_stride: int, offset: int, nbytes: int, words: str
) -> None:
    here, there = source(1, 1, src_stride, blocks=False), target(1, 1, dst_stride, blocks=False)
    with pytest.raises(ParamInvalid, match=words):
        slot_to_slot(here, 0, there, 0, nbytes, ALL, offset, offset)


def test_seventy_bytes_from_ten_fit_a_slot_of_eighty() -> None:
    here, there = source(1, 1, 100, blocks=False), target(1, 1, 80, blocks=False)
    assert moved(slot_to_slot(here, 0, there, 0, 70, ALL, 10, 10), here, there) == [((0, 0, 10), (0, 0, 10), 70)]


def test_slots_have_to_exist() -> None:
    here, there = source(1, 4, 64, blocks=False), target(1, 2, 64, blocks=False)
    with pytest.raises(ParamInvalid, match="batch index 4: the source cache 5 has 4 slots"):
        slot_to_slot(here, 4, there, 0, 64, ALL)
    with pytest.raises(ParamInvalid, match="batch index 2: the destination cache 6 has 2 slots"):
        slot_to_slot(here, 0, there, 2, 64, ALL)
    with pytest.raises(ParamInvalid, match="batch index 4: the source cache 5 has 4 slots"):
        slot_to_blocks(here, 4, target(1, 1, 64, blocks=True), [0], ALL)


# ---- layers ----


def test_layers_one_and_two_are_tensors_two_to_five() -> None:
    here, there = source(8, 1, 64, blocks=True), target(4, 1, 64, blocks=True)
    grid = blocks_to_blocks(here, there, [0], [0], Layers(src=range(1, 3)))
    assert [a[0] for a, _, _ in moved(grid, here, there)] == [2, 3, 4, 5]
    assert Layers(src=range(1, 3)).of_source(here) == range(2, 6)
    assert Layers(dst=range(1, 2)).of_target(there) == range(2, 4)


@pytest.mark.parametrize(
    ("dst_tensors", "src_tensors", "layers", "words"),
    [
        (4, 8, ALL, "8 source tensors for 4 destination tensors"),
        (4, 8, Layers(src=range(3)), "6 source tensors for 4 destination tensors"),
        (8, 4, Layers(dst=range(1)), "4 source tensors for 2 destination tensors"),
        (4, 8, Layers(range(1, 3), range(2), 3), "src_layer_range is given, but 8 tensors are not a whole number"),
        (4, 6, Layers(range(2), range(2), 3), "dst_layer_range is given, but 4 tensors are not a whole number"),
        (8, 8, Layers(range(3, 5), range(2)), r"src_layer_range is range\(3, 5\), but the cache has 4 layers"),
        (8, 8, Layers(range(2), range(3, 5)), r"dst_layer_range is range\(3, 5\), but the cache has 4 layers"),
        (8, 8, Layers(range(2), range(3)), "4 source tensors for 6 destination tensors"),
        (8, 8, Layers(range(0), range(0)), "must have step 1 and 0 <= start < stop"),
    ],
)
def test_layers_that_do_not_fit_are_refused(dst_tensors: int, src_tensors: int, layers: Layers, words: str) -> None:
    with pytest.raises(LLMException, match=words) as caught:
        blocks_to_blocks(
            source(src_tensors, 2, 64, blocks=True), target(dst_tensors, 2, 64, blocks=True), [0], [0], layers
        )
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_without_ranges_three_tensors_per_layer_are_accepted() -> None:
    blocks_to_blocks(source(8, 2, 64, blocks=True), target(8, 2, 64, blocks=True), [0], [0], Layers(None, None, 3))


# ---- kinds ----


def plan_blocks(here: Shape, there: Shape) -> Grid:
    return blocks_to_blocks(here, there, [0], [0], ALL)


def plan_cut(here: Shape, there: Shape) -> Grid:
    return slot_to_blocks(here, 0, there, [0], ALL)


def plan_slots(here: Shape, there: Shape) -> Grid:
    return slot_to_slot(here, 0, there, 0, 64, ALL)


@pytest.mark.parametrize(
    ("plan", "src", "dst"), [(plan_blocks, True, True), (plan_cut, False, True), (plan_slots, False, False)]
)
def test_cache_of_the_other_kind_is_refused_at_either_end(
    plan: Callable[[Shape, Shape], Grid], src: bool, dst: bool
) -> None:
    plan(source(1, 2, 64, blocks=src), target(1, 2, 64, blocks=dst))
    kinds = {True: "blocks", False: "contiguous"}
    for wrong_src, wrong_dst, words in (
        (not src, dst, f"the source cache 5 is a {kinds[not src]} cache: must be a {kinds[src]} cache here"),
        (src, not dst, f"the destination cache 6 is a {kinds[not dst]} cache: must be a {kinds[dst]} cache here"),
    ):
        with pytest.raises(ParamInvalid, match=words):
            plan(source(1, 2, 64, blocks=wrong_src), target(1, 2, 64, blocks=wrong_dst))


# ---- whose ----


def test_plan_is_made_of_our_caches_and_of_the_peers_either_way() -> None:
    ours, theirs = local(1, 4, 64, blocks=True), RemoteCache(entry(pieces=4, stride=64, addresses=[2**48]))
    pull = blocks_to_blocks(theirs, ours, [1], [2], ALL)
    push = blocks_to_blocks(ours, theirs, [2], [1], ALL)
    assert pull == push.mirrored()


def test_plan_measures_the_cache_as_it_was_made() -> None:
    ours, there = local(1, 4, 64, blocks=True), target(1, 100, 64, blocks=True)
    ours.cache.cache_desc.update_dim(0, 100)
    with pytest.raises(ParamInvalid, match="the source cache has 4 blocks"):
        blocks_to_blocks(ours, there, [99], [99], ALL)
    ours.cache.cache_desc.update_dim(1, 1)
    assert blocks_to_blocks(ours, there, [1], [1], ALL).total == 64


def test_parts_of_blocks_that_a_peer_says_are_as_large_as_memory() -> None:
    """Its cache may have one block of 2**62 bytes, and a request may name that many times."""
    huge = Shape(5, True, 1, 2**62, array("Q", [0]))
    mine, blocks = target(1, 4, 64, blocks=True), array("Q", [0] * 16)
    parts = BlockParts(1, [2**62 + 5], [3])
    grid = parts_to_parts(huge, mine, Selection(Layers(), blocks, array("Q", [1])), parts)
    assert (list(grid.remote_index), list(grid.local_index)) == ([5], [64 + 3])
