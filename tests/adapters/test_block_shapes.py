"""Units of blocks that two ends cut differently, against a KV cache that says of each element whose it is."""

from __future__ import annotations

import random
from itertools import product
from math import gcd, prod

import numpy as np
import pytest

from aiodatadist import IncompatiblePeer
from aiodatadist._adapters.block_shapes import Axes, Axis, End, axes_of, check_cut, parts_between

EMPTY = -1


def shape_of(end: End, axes: Axes) -> tuple[int, ...]:
    return tuple(end.size(axis) for axis in axes)


def elements(blocks: int, end: End, axes: Axes, first_token: int) -> np.ndarray:
    """Return blocks in a row. Each element is a number made of its token, its head and its place in the rest."""
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


@pytest.mark.parametrize("hundred", range(3))
def test_units_of_any_two_ends(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        check_units(seed)


def check_units(seed: int) -> None:
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
    with pytest.raises(
        IncompatiblePeer, match=r"block_size is 32 here and 16 at there .*place of the tokens in a block is unknown"
    ):
        check_cut(End(16, range(2)), End(32, range(2)), (), "there")
    with pytest.raises(IncompatiblePeer, match="heads is 2 here and 1 at there"):
        check_cut(End(16, range(1)), End(16, range(2)), ("tokens", 64), "there")
    check_cut(End(16, range(1)), End(32, range(1)), ("tokens", 64), "there")
    with pytest.raises(IncompatiblePeer, match="8 tokens of the first block at there are not wanted"):
        check_cut(End(16, range(1)), End(16, range(2)), ("heads", 512), "there", 8)


def numbers_one_by_one(
    end: End, axes: Axes, cut: set[Axis], unit: tuple[int, int], heads: range, tokens: range, stretch: int
) -> list[int]:
    """Return the numbers of the units that hold these tokens and heads. A unit has at least ``unit`` tokens and heads."""
    outer = axes[: max((i + 1 for i, axis in enumerate(axes) if axis in cut), default=0)]
    of: dict[Axis, int] = dict(zip(("tokens", "heads"), unit, strict=True))
    of.update({axis: 1 for axis in outer[:-1] if isinstance(axis, str)})
    counts = [axis if isinstance(axis, int) else end.size(axis) // of[axis] for axis in outer]
    found = []
    for begin in range(tokens.start, tokens.stop, stretch):
        rows: list[list[int | None]] = []
        for axis, count in zip(outer, counts, strict=True):
            mine: list[int | None] = [(head - end.heads.start) // of["heads"] for head in heads[:: of["heads"]]]
            rows.append([None] if axis == "tokens" else mine if axis == "heads" else list(range(count)))
        for chosen in product(*rows):
            for token in range(begin, min(begin + stretch, tokens.stop), of["tokens"]):
                block, within = divmod(token, end.tokens)
                for size, index in zip(counts, chosen, strict=True):
                    block = block * size + (within // of["tokens"] if index is None else index)
                if "tokens" not in outer:
                    assert end.tokens == of["tokens"], "a block is one unit along its tokens"
                found.append(block)
    return found


@pytest.mark.parametrize("hundred", range(3))
def test_numbers_are_those_that_one_by_one_would_give(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        check_numbers(seed)


def check_numbers(seed: int) -> None:
    rng = random.Random(seed)
    ordered: list[Axis] = ["tokens", "heads", rng.choice([1, 2, 3])]
    rng.shuffle(ordered)
    axes: Axes = (*ordered, *rng.choice([(), (2,)]))
    heads, ratio = rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
    there, here = rng.randint(1, 20), rng.randint(1, 20)
    few, many = End(there, range(heads)), End(here, range(heads * ratio))
    source, target = (few, many) if rng.random() < 0.5 else (many, few)
    first, tokens = rng.choice([0, 0, rng.randrange(source.tokens)]), rng.randint(1, 90)
    cut: set[Axis] = {axis for axis in axes if source.size(axis) != target.size(axis)}
    cut |= {"tokens"} if first else set()
    shared, unit = range(heads), (gcd(source.tokens, target.tokens, first), heads)
    parts = parts_between(source, target, axes, 64 * prod(target.size(axis) for axis in axes), first, tokens)
    answers = {}
    for stretch in {unit[0], tokens}:
        src = numbers_one_by_one(source, axes, cut, unit, shared, range(first, first + tokens), stretch)
        dst = numbers_one_by_one(target, axes, cut, unit, shared, range(tokens), stretch)
        answers[stretch] = (src, dst)
    found = (list(parts.src), list(parts.dst))
    assert found in answers.values()
    assert sorted(zip(*found, strict=True)) == sorted(zip(*answers[unit[0]], strict=True))


def test_numbers_of_a_long_prompts_units_are_no_objects_of_their_own() -> None:
    """Made one by one, those of 65536 tokens held the loop for a third of a second."""
    asked: list[int] = []

    class Counted(int):
        def _count(self, token: int) -> None:
            asked.append(token)

        def __rfloordiv__(self, token: int) -> int:
            self._count(token)
            return token // int(self)

        def __rmod__(self, token: int) -> int:
            self._count(token)
            return token % int(self)

    for axes in (("tokens", "heads", 128), ("heads", "tokens", 128)):
        for here, there in ((16, 17), (16, 1), (32, 16)):
            asked.clear()
            source, target = End(Counted(there), range(8)), End(Counted(here), range(8))
            parts = parts_between(source, target, axes, here * 8 * 128, 0, 64 << 10)
            assert len(parts.src) >= (64 << 10) // gcd(here, there)
            assert len(asked) < 100
