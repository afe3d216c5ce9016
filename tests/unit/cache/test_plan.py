"""A plan names exactly the bytes that were asked for, and none outside of either cache."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiodatadist import LLMException, LLMStatusCode, ParamInvalid
from aiodatadist.cache.catalogue import RemoteCache
from aiodatadist.cache.plan import Layers, blocks_to_blocks, slot_to_blocks, slot_to_slot
from aiodatadist.cache.table import Entry
from aiodatadist.layout import Grid
from tests.unit.cache.examples import local, place, remote

ALL = Layers()
Moved = tuple[tuple[int, int, int], tuple[int, int, int], int]

tensors = st.integers(1, 5)
strides = st.integers(1, 10_000) | st.sampled_from([2**31, 2**40])


def moved(grid: Grid, mine: Entry, theirs: RemoteCache) -> list[Moved]:
    """(local tensor, block, offset), (remote tensor, block, offset), bytes; all of them inside of both caches."""
    return [
        (
            place(mine.addresses, mine.pieces, mine.stride, r.local, r.nbytes),
            place(theirs.addresses, theirs.pieces, theirs.stride, r.remote, r.nbytes),
            r.nbytes,
        )
        for r in grid.ranges()
    ]


@st.composite
def layer_ranges(draw: st.DrawFn) -> tuple[Layers, int, int, list[tuple[int, int]]]:
    """Layers, tensors of the remote and of the local cache, and the pairs of tensors (remote, local) that they mean."""
    per_layer, count = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ends: list[tuple[range | None, int, int]] = []
    for _ in range(2):
        first, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        given_as = range(first, first + count) if first or after or draw(st.booleans()) else None
        ends.append((given_as, (first + count + after) * per_layer, first * per_layer))
    (src, theirs, src_start), (dst, mine, dst_start) = ends
    pairs = [(src_start + i, dst_start + i) for i in range(count * per_layer)]
    return Layers(src, dst, per_layer), theirs, mine, pairs


# ---- blocks to blocks ----


@given(layer_ranges(), st.integers(1, 50), st.integers(1, 50), strides, st.data())
def test_each_block_goes_to_its_block_in_each_tensor_and_nothing_else_moves(
    chosen: tuple[Layers, int, int, list[tuple[int, int]]],
    their_blocks: int,
    my_blocks: int,
    stride: int,
    data: st.DataObject,
) -> None:
    layers, their_tensors, my_tensors, pairs = chosen
    mine, theirs = (
        local(my_tensors, my_blocks, stride, blocks=True),
        remote(their_tensors, their_blocks, stride, blocks=True),
    )
    block_pairs = data.draw(st.lists(st.tuples(st.integers(0, their_blocks - 1), st.integers(0, my_blocks - 1))))
    src, dst = [a for a, _ in block_pairs], [b for _, b in block_pairs]
    grid = blocks_to_blocks(mine, theirs, src, dst, layers)
    assert moved(grid, mine, theirs) == [
        ((to, b, 0), (source, a, 0), stride) for source, to in pairs for a, b in block_pairs
    ]
    assert grid.total == len(pairs) * len(block_pairs) * stride


def test_four_blocks_of_sixty_four_bytes_are_reversed() -> None:
    mine, theirs = local(4, 4, 64, blocks=True), remote(4, 4, 64, blocks=True)
    grid = blocks_to_blocks(mine, theirs, [0, 1, 2, 3], [3, 2, 1, 0], ALL)
    assert len(list(grid.ranges())) == 4 * 4
    assert [(to[1], source[1]) for to, source, _ in moved(grid, mine, theirs)[:4]] == [(3, 0), (2, 1), (1, 2), (0, 3)]


def test_block_nine_needs_ten_blocks() -> None:
    mine = local(4, 4, 64, blocks=True)
    blocks_to_blocks(mine, remote(4, 10, 64, blocks=True), [5, 6, 9], [0, 1, 2], ALL)
    with pytest.raises(ParamInvalid, match=r"src_blocks\[2\] is 9: the peer's cache has 9 blocks"):
        blocks_to_blocks(mine, remote(4, 9, 64, blocks=True), [5, 6, 9], [0, 1, 2], ALL)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 100))
def test_first_block_outside_of_either_cache_is_named(numbers: list[int], blocks: int) -> None:
    bad = next((i for i, number in enumerate(numbers) if number >= blocks), None)
    assume(bad is not None)
    zeros = [0] * len(numbers)
    mine, theirs = local(1, blocks, 64, blocks=True), remote(1, blocks, 64, blocks=True)
    with pytest.raises(ParamInvalid, match=rf"src_blocks\[{bad}\] is \d+: the peer's cache has {blocks} blocks"):
        blocks_to_blocks(mine, theirs, numbers, zeros, ALL)
    with pytest.raises(ParamInvalid, match=rf"dst_blocks\[{bad}\] is \d+: the local cache has {blocks} blocks"):
        blocks_to_blocks(mine, theirs, zeros, numbers, ALL)


def test_block_sizes_have_to_be_equal() -> None:
    with pytest.raises(ParamInvalid, match="a block has 128 bytes at the peer and 64 here"):
        blocks_to_blocks(local(1, 4, 64, blocks=True), remote(1, 4, 128, blocks=True), [0], [0], ALL)


def test_lists_have_to_be_as_long_as_each_other() -> None:
    with pytest.raises(ParamInvalid, match="2 src_blocks for 1 dst_blocks"):
        blocks_to_blocks(local(1, 4, 64, blocks=True), remote(1, 4, 64, blocks=True), [0, 1], [0], ALL)


# ---- slot to blocks ----


@given(layer_ranges(), st.integers(1, 4), st.integers(1, 5000), st.integers(1, 5000), st.data())
def test_slot_is_cut_into_blocks_without_gap_or_overlap(
    chosen: tuple[Layers, int, int, list[tuple[int, int]]], slots: int, slot_bytes: int, block: int, data: st.DataObject
) -> None:
    layers, their_tensors, my_tensors, pairs = chosen
    needed = -(-slot_bytes // block)
    assume(needed <= 50)
    slot = data.draw(st.integers(0, slots - 1))
    dst = data.draw(st.permutations(range(needed + 2)))[:needed]
    mine = local(my_tensors, needed + 2, block, blocks=True)
    theirs = remote(their_tensors, slots, slot_bytes, blocks=False, slot=slot)
    grid = slot_to_blocks(mine, theirs, dst, layers)
    assert moved(grid, mine, theirs) == [
        ((to, dst[i], 0), (source, slot, i * block), min(block, slot_bytes - i * block))
        for source, to in pairs
        for i in range(needed)
    ]
    assert grid.total == len(pairs) * slot_bytes


def test_two_and_a_half_million_bytes_need_three_blocks_of_a_mebibyte() -> None:
    mine, theirs = local(2, 8, 1_048_576, blocks=True), remote(2, 4, 2_500_000, blocks=False, slot=3)
    grid = slot_to_blocks(mine, theirs, [6, 1, 4], ALL)
    assert [r.nbytes for r in grid.ranges()] == [1_048_576, 1_048_576, 402_848] * 2
    assert grid.tail == 402_848
    for wrong in ([6, 1], [6, 1, 4, 0], []):
        with pytest.raises(
            ParamInvalid, match=f"{len(wrong)} dst_blocks: a slot of 2500000 bytes needs exactly 3 blocks"
        ):
            slot_to_blocks(mine, theirs, wrong, ALL)


def test_block_larger_than_the_slot_is_filled_in_part() -> None:
    mine, theirs = local(1, 1, 4 << 20, blocks=True), remote(1, 1, 2 << 20, blocks=False)
    grid = slot_to_blocks(mine, theirs, [0], ALL)
    assert [r.nbytes for r in grid.ranges()] == [2 << 20]
    assert grid.nbytes == 2 << 20, "a transport that checks bounds looks here"


def test_slot_goes_to_blocks_that_exist() -> None:
    with pytest.raises(ParamInvalid, match=r"dst_blocks\[1\] is 2: the local cache has 2 blocks"):
        slot_to_blocks(local(1, 2, 64, blocks=True), remote(1, 1, 128, blocks=False), [0, 2], ALL)


# ---- slot to slot ----


@given(layer_ranges(), st.integers(1, 4), st.integers(1, 4), strides, strides, st.data())
def test_slot_goes_to_its_slot_as_far_as_size_says(
    chosen: tuple[Layers, int, int, list[tuple[int, int]]],
    their_slots: int,
    my_slots: int,
    their_stride: int,
    my_stride: int,
    data: st.DataObject,
) -> None:
    layers, their_tensors, my_tensors, pairs = chosen
    slot, batch_index = data.draw(st.integers(0, their_slots - 1)), data.draw(st.integers(0, my_slots - 1))
    size = data.draw(st.integers(1, min(my_stride, their_stride)))
    mine = local(my_tensors, my_slots, my_stride, blocks=False)
    theirs = remote(their_tensors, their_slots, their_stride, blocks=False, slot=slot)
    grid = slot_to_slot(mine, theirs, batch_index, size, layers)
    assert moved(grid, mine, theirs) == [((to, batch_index, 0), (source, slot, 0), size) for source, to in pairs]


def test_slot_one_of_two_is_the_second_half_of_each_tensor() -> None:
    mine, theirs = local(4, 2, 2_097_152, blocks=False), remote(4, 2, 2_097_152, blocks=False, slot=1)
    grid = slot_to_slot(mine, theirs, 1, -1, ALL)
    assert [(r.local - base, r.nbytes) for r, base in zip(grid.ranges(), mine.addresses, strict=True)] == [
        (2_097_152, 2_097_152)
    ] * 4


def test_size_minus_one_is_the_local_slot_also_when_the_remote_one_is_larger() -> None:
    grid = slot_to_slot(local(1, 1, 80, blocks=False), remote(1, 1, 100, blocks=False), 0, -1, ALL)
    assert grid.total == 80


@pytest.mark.parametrize(
    ("my_stride", "their_stride", "size", "words"),
    [
        (100, 80, -1, "100 bytes do not fit: a slot of the peer's cache has 80"),
        (100, 80, 81, "81 bytes do not fit: a slot of the peer's cache has 80"),
        (80, 100, 81, "81 bytes do not fit: a slot of the local cache has 80"),
    ],
)
def test_bytes_that_do_not_fit_either_slot_are_refused(
    my_stride: int, their_stride: int, size: int, words: str
) -> None:
    with pytest.raises(ParamInvalid, match=words):
        slot_to_slot(local(1, 1, my_stride, blocks=False), remote(1, 1, their_stride, blocks=False), 0, size, ALL)


def test_local_slot_has_to_exist() -> None:
    with pytest.raises(ParamInvalid, match="batch_index is 2: the local cache has 2 slots"):
        slot_to_slot(local(1, 2, 64, blocks=False), remote(1, 4, 64, blocks=False), 2, -1, ALL)


# ---- layers ----


def test_layers_one_and_two_are_tensors_two_to_five() -> None:
    mine, theirs = local(4, 1, 64, blocks=True), remote(8, 1, 64, blocks=True)
    grid = blocks_to_blocks(mine, theirs, [0], [0], Layers(src=range(1, 3)))
    assert [source[0] for _, source, _ in moved(grid, mine, theirs)] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("my_tensors", "their_tensors", "layers", "words"),
    [
        (4, 8, ALL, "8 source tensors for 4 destination tensors"),
        (4, 8, Layers(src=range(3)), "6 source tensors for 4 destination tensors"),
        (8, 4, Layers(dst=range(1)), "4 source tensors for 2 destination tensors"),
        (4, 8, Layers(range(1, 3), range(2), 3), "dst_layer_range is given, but 4 tensors are not a whole number"),
        (6, 8, Layers(range(1, 3), range(2), 3), "src_layer_range is given, but 8 tensors are not a whole number"),
        (8, 8, Layers(range(3, 5), range(2)), r"src_layer_range is range\(3, 5\), but the cache has 4 layers"),
        (8, 8, Layers(range(2), range(3, 5)), r"dst_layer_range is range\(3, 5\), but the cache has 4 layers"),
        (8, 8, Layers(range(2), range(3)), "4 source tensors for 6 destination tensors"),
        (8, 8, Layers(range(0), range(0)), "it needs step 1 and 0 <= start < stop"),
    ],
)
def test_layers_that_do_not_fit_are_refused(my_tensors: int, their_tensors: int, layers: Layers, words: str) -> None:
    mine, theirs = local(my_tensors, 2, 64, blocks=True), remote(their_tensors, 2, 64, blocks=True)
    with pytest.raises(LLMException, match=words) as caught:
        blocks_to_blocks(mine, theirs, [0], [0], layers)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_without_ranges_three_tensors_per_layer_are_accepted() -> None:
    blocks_to_blocks(local(8, 2, 64, blocks=True), remote(8, 2, 64, blocks=True), [0], [0], Layers(None, None, 3))


# ---- kinds ----


@pytest.mark.parametrize(
    ("plan", "blocks", "words"),
    [
        (lambda mine, theirs: blocks_to_blocks(mine, theirs, [0], [0], ALL), False, "is contiguous: name its slot"),
        (lambda mine, theirs: slot_to_blocks(mine, theirs, [0], ALL), True, "is a blocks cache: name it by"),
        (lambda mine, theirs: slot_to_slot(mine, theirs, 0, -1, ALL), True, "is a blocks cache: pull it with"),
    ],
)
def test_peers_cache_of_the_other_kind_is_refused(plan: Any, blocks: bool, words: str) -> None:
    with pytest.raises(ParamInvalid, match=f"the peer's cache 5 {words}"):
        plan(local(1, 2, 64, blocks=True), remote(1, 2, 64, blocks=blocks))


# ---- what may change meanwhile ----


def test_plan_measures_the_cache_as_it_was_registered() -> None:
    mine, theirs = local(1, 4, 64, blocks=True), remote(1, 100, 64, blocks=True)
    mine.desc.update_dim(0, 100)
    with pytest.raises(ParamInvalid, match="the local cache has 4 blocks"):
        blocks_to_blocks(mine, theirs, [99], [99], ALL)
    mine.desc.update_dim(1, 1)
    assert blocks_to_blocks(mine, theirs, [1], [1], ALL).total == 64
