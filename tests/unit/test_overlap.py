"""The closed forms against simulated schedules, and portions that are the best there are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiodatadist._link.data.cost_model import (
    Costs,
    Estimate,
    best_hidden_share,
    group_size,
    hidden_share,
    ideal,
    ideal_uniform,
    total,
)

seconds = st.floats(0, 10)
positive = st.floats(1e-3, 10)
layers = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=80)


def simulate(compute: Sequence[float], transfer: Sequence[float]) -> float:
    """Return when the last byte lands, if each layer leaves once it is computed and the channel is free."""
    computed = free = 0.0
    for c, t in zip(compute, transfer, strict=True):
        computed += c
        free = max(free, computed) + t
    return free


@given(layers)
def test_the_ideal_is_what_a_flow_shop_takes(times: list[tuple[float, float]]) -> None:
    compute, transfer = [c for c, _ in times], [t for _, t in times]
    assert math.isclose(ideal(compute, transfer), simulate(compute, transfer), rel_tol=1e-9, abs_tol=1e-9)


@given(positive, positive, st.integers(1, 100))
def test_alike_layers_have_a_closed_form(compute: float, transfer: float, count: int) -> None:
    simulated = simulate([compute / count] * count, [transfer / count] * count)
    assert math.isclose(ideal_uniform(compute, transfer, count), simulated, rel_tol=1e-9)
    assert math.isclose(
        hidden_share(compute, transfer, simulated), best_hidden_share(compute, transfer, count), abs_tol=1e-9 * 1e4
    )


@given(layers)
def test_no_schedule_hides_more_than_all_and_none_is_slower_than_serial(times: list[tuple[float, float]]) -> None:
    compute, transfer = math.fsum(c for c, _ in times), math.fsum(t for _, t in times)
    assume(transfer > 1e-6)
    best = ideal([c for c, _ in times], [t for _, t in times])
    assert max(compute, transfer) <= best + 1e-9
    assert best <= compute + transfer + 1e-9
    assert -1e-6 <= hidden_share(compute, transfer, best) <= 1 + 1e-6


def test_different_lengths_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="zip"):
        ideal([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("count", "percent"),
    [(16, 93.75), (32, 96.88), (48, 97.92), (61, 98.36), (80, 98.75), (32 / 4, 87.5), (80 / 4, 95)],
)
def test_limits_of_the_hidden_share(count: int, percent: float) -> None:
    assert best_hidden_share(2.0, 1.0, int(count)) * 100 == pytest.approx(percent, abs=0.006)
    assert best_hidden_share(1.0, 1.0, int(count)) * 100 == pytest.approx(percent, abs=0.006)


def test_the_hidden_share_is_bounded_by_compute_too() -> None:
    assert best_hidden_share(0.5, 1.0, 2**30) == pytest.approx(0.5)
    assert best_hidden_share(5.0, 1.0, 1) == 0
    assert hidden_share(1.0, 1.0, 2.0) == 0
    assert hidden_share(1.0, 1.0, 1.0) == 1


# ---- portions ----


def test_layer_by_layer_while_nothing_is_known() -> None:
    assert group_size(32, 1 << 30, 1.0, None) == 1
    assert group_size(32, 1 << 30, None, Costs(1e-3, 1e-9, 0)) == 1
    assert group_size(32, 1 << 30, 0.0, Costs(1e-3, 1e-9, 0)) == 1
    assert group_size(1, 1 << 30, 1.0, Costs(1e-3, 1e-9, 1.0)) == 1


def test_all_at_once_where_hiding_saves_less_than_it_costs() -> None:
    count, nbytes, per_byte = 32, 1 << 20, 1e-9
    saved = nbytes * per_byte * (1 - 1 / count)
    assert group_size(count, nbytes, 1.0, Costs(0, per_byte, saved / count * 1.001)) == count
    assert group_size(count, nbytes, 1.0, Costs(0, per_byte, saved / count * 0.999)) == 1


counts = st.integers(2, 100)
messages = st.floats(1e-6, 1e-2)


@given(counts, st.floats(1e-3, 1.0), st.floats(1e-3, 2.0), messages)
def test_no_other_group_is_done_much_earlier(count: int, alone: float, compute: float, message: float) -> None:
    group = group_size(count, 1 << 30, compute, Costs(message, alone / (1 << 30), 0))
    assert 1 <= group <= count
    best = min(total(g, count, alone, compute, message) for g in range(1, count + 1))
    assert total(group, count, alone, compute, message) <= 1.1 * best + message


def test_one_layer_at_a_time_although_its_messages_nearly_fit() -> None:
    """Twice the last layer would cost more than the messages save."""
    assert group_size(32, 1 << 30, 0.084, Costs(5e-4, 0.069 / (1 << 30), 0)) == 1


# ---- measuring ----


@given(
    st.floats(0, 1e-2),
    st.floats(1e-12, 1e-6),
    st.lists(st.integers(1, 1 << 30), min_size=2, max_size=60).filter(lambda sizes: max(sizes) > 2 * min(sizes)),
)
def test_an_estimate_recovers_a_line(message: float, per_byte: float, sizes: list[int]) -> None:
    estimate = Estimate()
    for size in sizes:
        estimate.add(size, message + per_byte * size)
    costs = estimate.costs
    assert costs is not None
    weight = 0.95 ** len(sizes)
    scale = message + per_byte * max(sizes)
    assert costs.message == pytest.approx(message, rel=1e-3, abs=1e-3 * scale / weight)
    assert costs.per_byte == pytest.approx(per_byte, rel=1e-3, abs=1e-3 * scale / max(sizes) / weight)


def test_an_estimate_forgets() -> None:
    estimate = Estimate()
    for speed in (1e-6, 1e-9):
        for i in range(400):
            size = (i % 7 + 1) << 20
            estimate.add(size, 1e-4 + speed * size)
    assert estimate.costs is not None
    assert estimate.costs.per_byte == pytest.approx(1e-9, rel=1e-3)
    assert estimate.costs.message == pytest.approx(1e-4, rel=1e-2)


def test_sizes_all_alike_make_messages_free() -> None:
    estimate = Estimate()
    for _ in range(10):
        estimate.add(1000, 1e-3)
    costs = estimate.costs
    assert costs is not None
    assert costs.message == pytest.approx(0, abs=1e-12)
    assert costs.per_byte == pytest.approx(1e-6)
    assert costs.interference == 0


def test_nothing_is_negative_however_odd_the_measurements() -> None:
    estimate = Estimate()
    for size, taken in ((1000, 1.0), (100_000, 0.5), (1_000_000, 0.1)):
        estimate.add(size, taken)
    costs = estimate.costs
    assert costs is not None
    assert costs.message >= 0
    assert costs.per_byte > 0


def test_an_estimate_begins_with_the_first_transfer() -> None:
    estimate = Estimate()
    seen = [estimate.costs]
    estimate.add_interference(2e-6)
    seen.append(estimate.costs)
    estimate.add(0, 1e-3)
    seen.append(estimate.costs)
    assert seen == [None] * 3
    estimate.add(1 << 20, 1e-3)
    estimate.add_interference(4e-6)
    costs = estimate.costs
    assert costs is not None
    assert 2e-6 < costs.interference < 4e-6
