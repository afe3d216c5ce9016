"""Layers x blocks -> byte ranges, compared with the plain definition."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import ParamInvalid
from aiodatadist._values.grid import Grid, Range, blocks_for, indexes, tensor_range

uint32 = st.integers(0, 2**32 - 1)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tensors, blocks = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    column = st.lists(uint32, min_size=tensors, max_size=tensors)
    row = st.lists(uint32, min_size=blocks, max_size=blocks)
    nbytes = draw(st.integers(1, 2**20))
    return Grid(
        local=array("Q", draw(column)),
        remote=array("Q", draw(column)),
        local_index=array("Q", draw(row)),
        remote_index=array("Q", draw(row)),
        local_stride=draw(uint32),
        remote_stride=draw(uint32),
        nbytes=nbytes,
        tail=draw(st.integers(1, nbytes)),
    )


@given(grids())
def test_grid_is_every_block_of_every_tensor_and_only_the_last_is_shorter(grid: Grid) -> None:
    expected = [
        Range(
            local + grid.local_index[i] * grid.local_stride,
            remote + grid.remote_index[i] * grid.remote_stride,
            grid.nbytes if i < len(grid.local_index) - 1 else grid.tail,
        )
        for local, remote in zip(grid.local, grid.remote, strict=True)
        for i in range(len(grid.local_index))
    ]
    assert list(grid.ranges()) == expected


def joined(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join pieces, given as address and length, that begin where the one before ends."""
    found: list[tuple[int, int]] = []
    for start, nbytes in pieces:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + nbytes)
        else:
            found.append((start, nbytes))
    return found


@given(grids(), st.data())
def test_parts_of_a_side_have_the_bytes_of_each_block_in_order(grid: Grid, data: st.DataObject) -> None:
    side = grid.remote_side
    most = data.draw(st.integers(max(1, grid.nbytes // 8), 30 * grid.nbytes))
    found: list[list[tuple[int, int]]] = [[] for _ in side.index]
    for first, part in side.parts(most):
        assert len(part.addresses) * part.tensor_bytes <= most
        for address in part.addresses:
            for i, block in enumerate(part.index):
                nbytes = part.tail if i == len(part.index) - 1 else part.nbytes
                found[first + i].append((address + block * part.stride, nbytes))
    ranges = list(grid.ranges())
    count = len(side.index)
    for i, pieces in enumerate(found):
        assert joined(pieces) == joined([(each.remote, each.nbytes) for each in ranges[i::count]])


@given(grids())
def test_total_is_the_sum_of_the_ranges(grid: Grid) -> None:
    assert grid.total == sum(r.nbytes for r in grid.ranges())


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_block_numbers_of_any_kind_become_what_c_reads(values: list[int]) -> None:
    for given_as in (values, tuple(values), array("Q", values)):
        assert list(indexes(given_as, "x")) == values
    assert indexes(values, "x").itemsize == 8


def test_block_numbers_are_copied_so_that_no_caller_changes_them_under_a_transfer() -> None:
    values = array("Q", [1, 2])
    taken = indexes(values, "x")
    values[0] = 99
    assert list(taken) == [1, 2]


def test_range_of_block_numbers_is_fine() -> None:
    assert list(indexes(range(3, 6), "x")) == [3, 4, 5]


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ([0, -1], ValueError, "src_blocks has -1: block numbers must be in [0, 2**64)"),
        ([2**64, 0], ValueError, "src_blocks has 18446744073709551616"),
        ([0, "1"], TypeError, "src_blocks has '1' of type str"),
        ([1.0], TypeError, "src_blocks has 1.0 of type float"),
        ([None], TypeError, "src_blocks has None of type NoneType"),
        (array("d", [1.0]), TypeError, "src_blocks has 1.0 of type float"),
        ("12", TypeError, "src_blocks is a str"),
        (b"12", TypeError, "src_blocks is a bytes"),
        ({1}, TypeError, "src_blocks is a set"),
        (None, TypeError, "src_blocks is a NoneType"),
    ],
)
def test_wrong_block_numbers_are_named(values: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        indexes(values, "src_blocks")
    assert words in str(caught.value)


def test_layers_one_and_two_of_two_tensors_are_tensors_two_to_five() -> None:
    assert tensor_range(8, range(1, 3), 2, "src_layer_range") == range(2, 6)


def test_eight_tensors_are_no_whole_number_of_layers_of_three() -> None:
    with pytest.raises(
        ParamInvalid, match="src_layer_range is given, but 8 tensors are not a whole number of layers of 3"
    ):
        tensor_range(8, range(1, 3), 3, "src_layer_range")


def test_without_a_range_any_number_of_tensors_per_layer_is_accepted() -> None:
    assert tensor_range(8, None, 3, "x") == range(8)


@pytest.mark.parametrize(
    "layers",
    [
        range(0),
        range(2, 2),
        range(3, 1),
        range(-1, 2),
        range(0, 4, 2),
        range(3, 0, -1),
        range(0, 5),
        range(4, 5),
        range(2**70),
    ],
)
def test_wrong_layer_range_is_refused(layers: range) -> None:
    with pytest.raises(ParamInvalid, match="dst_layer_range is range"):
        tensor_range(8, layers, 2, "dst_layer_range")


@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_layer_ranges_cut_the_tensors_without_gap_or_overlap(count: int, per_layer: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else set())
    parts = zip([0, *cuts], [*cuts, count], strict=True)
    tensors = [t for a, b in parts for t in tensor_range(count * per_layer, range(a, b), per_layer, "x")]
    assert tensors == list(range(count * per_layer))


@given(st.integers(1, 2**63), st.integers(1, 2**63))
def test_blocks_hold_all_bytes_and_none_is_superfluous(nbytes: int, block: int) -> None:
    count = blocks_for(nbytes, block)
    assert (count - 1) * block < nbytes <= count * block
