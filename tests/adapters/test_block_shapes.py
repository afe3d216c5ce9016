"""Units of blocks that two ends cut differently, against a KV cache that says of each element whose it is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from aiodatadist import IncompatiblePeer
from aiodatadist.adapters.block_shapes import Axes, Axis, End, axes_of, check_cut, parts_between

EMPTY = -1


def shape_of(end: End, axes: Axes) -> tuple[int, ...]:
    return tuple(end.size(axis) for axis in axes)


def elements(blocks: int, end: End, axes: Axes, first_token: int) -> np.ndarray:
    """Of blocks in a row: each element is a number made of its token, its head and its place in the rest."""
    made = np.zeros((blocks, *shape_of(end, axes)), np.int64)
    for place in np.ndindex(made.shape):
        token, head, rest = first_token + place[0] * end.tokens, end.heads.start, 0
        for axis, index in zip(axes, place[1:], strict=True):
            if axis == "tokens":
                token += index
            elif axis == "heads":
                head += index
            else:
                rest = rest * int(axis) + index
        made[place] = (token * 100 + head) * 100 + rest
    return made


def token_of(element: int) -> int:
    return element // 10_000


@pytest.mark.parametrize("seed", range(300))
def test_units_of_any_two_ends(seed: int) -> None:
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 4, 8])
    ranks = [rank for rank in (1, 2, 4, 8) if heads % rank == 0]
    sources, targets = rng.choice(ranks), rng.choice(ranks)
    ordered: list[Axis] = ["tokens", "heads", rng.choice([1, 2, 3])]
    rng.shuffle(ordered)
    axes: Axes = (*ordered, *rng.choice([(), (2,)]))
    there, here = rng.choice([2, 4, 6, 8, 16]), rng.choice([2, 4, 6, 8, 16])
    stop, rank = rng.randint(1, 60), rng.randrange(targets)
    begin = rng.choice(range(0, stop, here))
    target = End(here, range(heads // targets * rank, heads // targets * (rank + 1)))
    wanted = elements(-(-(stop - begin) // here), target, axes, begin)
    found = np.full_like(wanted, EMPTY)
    skipped = begin // there
    for number in range(sources):
        source = End(there, range(heads // sources * number, heads // sources * (number + 1)))
        if not set(source.heads) & set(target.heads):
            continue
        blocks = elements(-(-stop // there) - skipped, source, axes, skipped * there)
        parts = parts_between(source, target, axes, found[0].nbytes, begin - skipped * there, stop - begin)
        run = parts.nbytes // found.itemsize
        rows, into = blocks.reshape(-1, run), found.reshape(-1, run)
        into[list(parts.dst)] = rows[list(parts.src)]
    needed = token_of(wanted) < stop  # type: ignore[arg-type]
    assert (found[needed] == wanted[needed]).all()
    assert set(np.unique(found[~needed])) <= {EMPTY, *wanted[~needed].tolist()}


def test_equal_ends_have_whole_blocks() -> None:
    end = End(16, range(4))
    parts = parts_between(end, end, ("heads", 2, "tokens", 64), 4 * 2 * 16 * 64, 0, 40)
    assert (parts.nbytes, list(parts.src), list(parts.dst)) == (4 * 2 * 16 * 64, [0, 1, 2], [0, 1, 2])


def test_units_are_as_long_as_possible() -> None:
    axes: Axes = ("heads", 2, "tokens", 64)
    half = parts_between(End(16, range(8)), End(16, range(4, 8)), axes, 4 * 2 * 16 * 64, 0, 32)
    assert (half.nbytes, list(half.src), list(half.dst)) == (4 * 2 * 16 * 64, [1, 3], [0, 1])
    small = parts_between(End(16, range(1)), End(32, range(1)), axes, 2 * 32 * 64, 0, 32)
    assert (small.nbytes, list(small.src), list(small.dst)) == (16 * 64, [0, 1, 2, 3], [0, 2, 1, 3])


def test_axes_that_cannot_be_told() -> None:
    assert axes_of((2, 16, 8), 16, 2) == ("heads", "tokens", 8)
    assert axes_of((16, 4, 64), 16, 4) == ("tokens", "heads", 64)
    assert axes_of((16, 512), 16, 1) == ("tokens", 512)
    assert axes_of((16, 16, 8), 16, 2) == ()
    assert axes_of((16, 16, 8), 16, 16) == ()
    assert axes_of((32, 8), 16, 2) == ()


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(IncompatiblePeer, match=r"block_size is 32 here and 16 at there .* not known where the tokens"):
        check_cut(End(16, range(2)), End(32, range(2)), (), "there")
    with pytest.raises(IncompatiblePeer, match="heads is 2 here and 1 at there"):
        check_cut(End(16, range(1)), End(16, range(2)), ("tokens", 64), "there")
    check_cut(End(16, range(1)), End(32, range(1)), ("tokens", 64), "there")
    with pytest.raises(IncompatiblePeer, match="8 tokens of the first block at there are not wanted"):
        check_cut(End(16, range(1)), End(16, range(2)), ("heads", 512), "there", 8)


def test_numbers_of_a_long_prompts_units_are_made_at_once() -> None:
    """Not token by token, which held the loop for a third of a second: where tokens are outermost they are one range."""
    divisions: list[int] = []

    class Counted(int):
        def __rfloordiv__(self, token: int) -> int:
            divisions.append(token)
            return token // int(self)

    axes: Axes = ("tokens", "heads", 128)
    source, target = End(Counted(16), range(8)), End(Counted(16), range(4, 8))
    parts = parts_between(source, target, axes, 16 * 4 * 128, 0, 16 << 10)
    assert list(parts.src) == [2 * token + 1 for token in range(16 << 10)]
    assert list(parts.dst) == list(range(16 << 10))
    assert len(divisions) < 100
