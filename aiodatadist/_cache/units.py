"""Numbers of a block's units. They are many and regular, so C writes them, a hundred times as fast as Python."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from aiodatadist._native.library import ffi, ring


def numbers_of_units(
    offsets: Sequence[int],
    first_token: int,
    tokens: int,
    stretch: int,
    block_tokens: int,
    block_units: int,
    unit_tokens: int,
    step: int,
) -> array[int]:
    """Return the numbers, stretch by stretch of tokens; within one, offset by offset, each for all tokens of the stretch.

    Args:
        offsets: distances from the first unit of a token in its block to the token's other units.
        first_token, tokens: first token and number of tokens, counted from the start of the first block.
        stretch: tokens that an offset has in a row.
        block_tokens, block_units: tokens and units of a block.
        unit_tokens: tokens of a unit.
        step: distance from a unit to that of the next tokens.
    """
    whole, rest = divmod(max(tokens, 0), stretch)
    each = whole * -(-stretch // unit_tokens) + -(-rest // unit_tokens)
    found, starts = array("Q", [0]) * (each * len(offsets)), array("Q", offsets)
    units = ffi.new(
        "ring_units *", [first_token, max(tokens, 0), stretch, block_tokens, block_units, unit_tokens, step]
    )
    ring.ring_number_units(
        ffi.from_buffer("uint64_t[]", found), units, ffi.from_buffer("uint64_t[]", starts), len(starts)
    )
    return found
