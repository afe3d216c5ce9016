"""Argument checks: the type, the range, and a message that says both."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist._values import checks

RANGES = {
    "uint8": checks.UINT8,
    "uint16": checks.UINT16,
    "uint32": checks.UINT32,
    "uint64": checks.UINT64,
    "int32": checks.INT32,
    "int64": checks.INT64,
}


@given(st.sampled_from(sorted(RANGES)), st.integers(-(2**65), 2**65))
def test_integer_is_itself_or_a_value_error_that_names_value_and_limits(kind: str, value: int) -> None:
    allowed = RANGES[kind]
    low, high = allowed.start, allowed.stop - 1
    if low <= value <= high:
        assert checks.integer(value, "port", allowed) == value
    else:
        with pytest.raises(ValueError, match=f"^port is {value}: the {kind} range is {low} to {high}$"):
            checks.integer(value, "port", allowed)


@pytest.mark.parametrize("allowed", RANGES.values(), ids=RANGES)
def test_both_ends_of_a_range_are_inside_and_their_neighbours_are_not(allowed: range) -> None:
    for inside in (allowed.start, allowed.stop - 1):
        assert checks.integer(inside, "x", allowed) == inside
    for outside in (allowed.start - 1, allowed.stop):
        with pytest.raises(ValueError, match=str(outside)):
            checks.integer(outside, "x", allowed)


@pytest.mark.parametrize("value", [None, "1", 1.0, b"1", [1]])
def test_what_is_no_int_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^port is .* of type .*: must be an int$"):
        checks.integer(value, "port", checks.UINT16)


def test_bool_is_an_int() -> None:
    assert checks.integer(True, "x", checks.UINT8) == 1


@pytest.mark.parametrize("value", [None, 3, object()])
def test_instance_of_something_else_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^name is .* of type .*: must be str or bytes$"):
        checks.instance(value, "name", (str, bytes))


def test_sequence_names_the_first_wrong_element() -> None:
    with pytest.raises(TypeError, match=r"^addrs\[1\] is 'x' of type str, not int$"):
        checks.sequence([1, "x", None], "addrs", int)


@pytest.mark.parametrize("value", [None, "12", {1}, iter([1]), range(2)])
def test_sequence_is_a_list_or_a_tuple(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^addrs is of type .*: must be a list or tuple of int$"):
        checks.sequence(value, "addrs", int)


@pytest.mark.parametrize("value", [[], (), [1, 2], (1, True)])
def test_sequence_is_given_back_as_it_is(value: list[int] | tuple[int, ...]) -> None:
    assert checks.sequence(value, "addrs", int) is value
