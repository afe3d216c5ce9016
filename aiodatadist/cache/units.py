"""Numbers of a block's units, which are many and follow each other by rule: C writes them, a hundred times as fast."""

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
        offsets: from the unit of a token that comes first in its block to the others of that token.
        first_token, tokens: which tokens, counted from the first one of the first block.
        stretch: tokens that an offset has in a row.
        block_tokens, block_units: of a block.
        unit_tokens: of a unit.
        step: from a unit to that of the next tokens.
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
