"""The numbers of the closing table, and how the blocks are cut into pulls."""

from __future__ import annotations

import pytest

from aiodatadist._cli.demo import timeline
from aiodatadist._cli.demo.figures import figures_of, portions_of, table, warm_of
from aiodatadist._cli.demo.messages import LayerTimes, Pull
from aiodatadist._cli.kit.numbers import duration, quantity
from aiodatadist._cli.kit.text import cut, wrapped_all

MIB = 1 << 20


def pull(blocks: int, seconds: float, memcpy_seconds: float) -> Pull:
    return Pull(blocks=blocks, ranges=16 * blocks, bytes=blocks * MIB, seconds=seconds, memcpy_seconds=memcpy_seconds)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 17, 255, 256])
def test_every_block_is_pulled_once_and_in_order(count: int) -> None:
    portions = portions_of(count)
    assert [block for portion in portions for block in portion] == list(range(count))
    assert all(portions)
    assert len(portions) >= min(2, count)


def test_figures_are_medians_and_single_blocks_count_for_latency_only() -> None:
    figures = figures_of([pull(4, 0.004, 0.002), pull(4, 0.002, 0.001), pull(4, 9.0, 0.001), pull(1, 0.01, 0.01)])
    assert (figures.bytes, figures.blocks, figures.ranges, figures.pulls) == (13 * MIB, 13, 208, 4)
    assert figures.gb_per_second == pytest.approx(4 * MIB / 0.004 / 1e9)
    assert figures.memcpy_share == pytest.approx(0.5)
    assert figures.block_seconds == pytest.approx(0.01)


def test_figures_of_a_prompt_of_one_block_exist() -> None:
    figures = figures_of([pull(1, 0.002, 0.001)])
    assert figures.memcpy_share == pytest.approx(0.5)
    rows = dict(table(figures, warm_of([pull(1, 0.002, 0.001)]), "soft"))
    assert (rows["share of limit"], rows["block latency"]) == ("0.50", "2.00 ms for one block alone")


def test_warm_figures_are_medians_of_pulls_of_all_blocks() -> None:
    whole = [pull(4, 0.004, 0.002), pull(4, 0.001, 0.001), pull(4, 0.002, 0.0015), pull(4, 8.0, 0.004)]
    warm = warm_of([*whole, pull(1, 0.0003, 0.1), pull(1, 0.0001, 0.1), pull(1, 0.0002, 0.1)])
    assert warm.warm_pulls == 4
    assert warm.warm_memcpy_share == pytest.approx(375 / (3500 / 6))
    assert warm.warm_gb_per_second == pytest.approx((4 * MIB / 0.004 + 4 * MIB / 0.002) / 2 / 1e9)
    assert warm.warm_block_seconds == pytest.approx(0.0002)
    rows = dict(table(figures_of(whole), warm, "soft"))
    assert rows["share of limit"] == "0.64"
    assert rows["warm pulls"].startswith(f"{warm.warm_gb_per_second:.2f} GB/s, median of 4 pulls")


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (64 * MIB, "64 MiB"), (3 << 30, "3.0 GiB")],
)
def test_quantity(count: int, words: str) -> None:
    assert quantity(count) == words


@pytest.mark.parametrize(("seconds", "words"), [(0.00002, "20 us"), (0.0125, "12.50 ms"), (2.0, "2.00 s")])
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_lines_of_80_columns() -> None:
    layers = [LayerTimes(layer=i, began=i / 2, ready=i / 2 + 0.49, landed=i / 2 + 0.5) for i in range(8)]
    assert max(len(f"  {line}") for line in timeline.lines(layers)) <= 80
    assert [len(line) for line in wrapped_all(["word " * 40, "short"])] == [79, 78, 48, 5]
    assert wrapped_all(["word " * 40])[1].startswith("    word")


@pytest.mark.parametrize("text", ["", "short", "blanks   count " * 20])
def test_text_of_the_model_is_cut_and_not_changed(text: str) -> None:
    first, *others = lines = cut(text, "  >>>")
    assert max(map(len, lines)) <= 80
    assert all(line.startswith("     ") for line in others)
    assert first.startswith("  >>>")
    assert "".join(line[5:] for line in lines) == text
