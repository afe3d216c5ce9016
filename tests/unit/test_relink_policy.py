"""The delays of a policy: they grow, are bounded, and differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import ParamInvalid, RelinkPolicy


@given(st.floats(1e-6, 1e3), st.floats(1.0, 1e3), st.integers(1, 10_000))
def test_a_delay_is_at_least_half_of_what_it_may_be(first: float, times: float, attempt: int) -> None:
    policy = RelinkPolicy(first_delay=first, max_delay=min(first * times, 864_000.0))
    longest = min(policy.max_delay, first * 2.0 ** min(attempt - 1, 100))
    assert longest / 2 <= policy.delay(attempt) <= longest


def test_clusters_do_not_come_back_at_the_same_moment() -> None:
    assert len({RelinkPolicy().delay(9) for _ in range(100)}) > 90


def test_what_is_wrong_is_one_sentence() -> None:
    with pytest.raises(ParamInvalid) as caught:
        RelinkPolicy(first_delay=2, max_delay=1)
    assert caught.value.args[0] == "max_delay is 1: must be at least first_delay, 2"
    with pytest.raises(ParamInvalid) as caught:
        RelinkPolicy(wait=-1)
    assert caught.value.args[0] == "wait is -1: must be greater than or equal to 0"
