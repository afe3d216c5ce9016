"""Slots, checked and cut in C: ``native/slots.h``. A mapping has an entry per token, which Python never visits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiodatadist._context_caching.errors import EmsInternalError, EmsInvalidArgument
from aiodatadist._native.library import ffi, ring


@dataclass(frozen=True, slots=True)
class Runs:
    """Slots of a call: run ``i`` is ``lengths[i]`` slots from ``starts[i]`` on; without lengths, one slot each.

    ``starts`` and ``lengths`` are ``array('q')``.
    """

    starts: array[int]
    lengths: array[int] | None = None

    def pointers(self) -> tuple[Any, Any, int]:
        """Return the arguments by which C reads the runs."""
        return _signed(self.starts), ffi.NULL if self.lengths is None else _signed(self.lengths), len(self.starts)

    def check(self, slots: int, name: str) -> None:
        """Raise EmsInvalidArgument if a slot is not below ``slots``, or occurs twice."""
        at = ffi.new("uint64_t *")
        status = ring.slots_check(*self.pointers(), slots, at)
        if status == ring.SLOTS_NO_MEMORY:
            raise EmsInternalError(f"no memory to check {slots} slots")
        if status == ring.SLOTS_OUTSIDE:
            raise EmsInvalidArgument(f"{name}[{at[0]}] is {self.shown(at[0])}: must be in [0, {slots})")
        if status == ring.SLOTS_TWICE:
            raise EmsInvalidArgument(f"{name}[{at[0]}] is {self.shown(at[0])}: a slot may occur only once in a call")

    def shown(self, at: int) -> str:
        """Return the text of an entry for a message."""
        return str(self.starts[at]) if self.lengths is None else f"({self.starts[at]}, {self.lengths[at]})"


class Users:
    """The users of each slot of a group: readers share it, a writer is alone."""

    def __init__(self, slots: int) -> None:
        self._map = bytearray(2 * slots)

    def take(self, runs: Runs, name: str, *, writes: bool) -> None:
        """Reserve the slots. Raises EmsInvalidArgument if one of them is in use; then nothing is reserved."""
        at = ffi.new("uint64_t *")
        if ring.slots_take(self._pointer(), *runs.pointers(), writes, at) == ring.SLOTS_BUSY:
            raise EmsInvalidArgument(
                f"{name}[{at[0]}] is {runs.shown(at[0])}, which another save or load uses: wait until that has ended"
            )

    def give(self, runs: Runs) -> None:
        """Release the slots."""
        ring.slots_give(self._pointer(), *runs.pointers())

    def _pointer(self) -> Any:
        return ffi.from_buffer("uint16_t[]", self._map)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Equally long pieces of equally long values: one grid.

    Attributes:
        tokens, run: number of tokens of each value, and of each piece.
        starts: slot of each piece's first token.
        places: address of that token's bytes in the value, for the first tensor of the value.
    """

    tokens: int
    run: int
    starts: array[int]
    places: array[int]


def pieces(runs: Runs, first: int, tokens: Sequence[int], addresses: Sequence[int], token_bytes: int) -> list[Pieces]:
    """Cut values, whose tokens are in the slots of ``runs`` from entry ``first`` on, into pieces.

    Args:
        tokens: number of tokens of each value. ``runs`` has the same number of consecutive slots, or one run if it has
            lengths.
        addresses: address of each value's bytes; 0 leaves the value out.
        token_bytes: bytes of one token in one tensor.
    """
    whole = runs.lengths is not None
    room = len(tokens) if whole else sum(tokens)
    counts, wanted = array("Q", tokens), array("Q", addresses)
    starts, places = array("Q", bytes(8 * room)), array("Q", bytes(8 * room))
    classes = ffi.new("slots_class[]", room)
    values = ffi.new("slots_values *")
    values.slots = _signed(runs.starts) + first
    values.tokens, values.addresses = _unsigned(counts), _unsigned(wanted)
    values.count, values.token_bytes, values.whole = len(tokens), token_bytes, whole
    known = ring.slots_pieces(values, _unsigned(starts), _unsigned(places), classes)
    if known == ring.SLOTS_NO_MEMORY:
        raise EmsInternalError(f"no memory to cut {room} tokens into pieces")
    found = []
    for i in range(known):
        one = classes[i]
        part = slice(one.first, one.first + one.count)
        found.append(Pieces(one.tokens, one.run, starts[part], places[part]))
    return found


def _signed(values: array[int]) -> Any:
    return ffi.from_buffer("int64_t[]", values)


def _unsigned(values: array[int]) -> Any:
    return ffi.from_buffer("uint64_t[]", values)
