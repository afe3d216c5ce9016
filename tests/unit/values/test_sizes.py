"""Sizes: bytes, or texts as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import LLMConfig, ParamInvalid, PoolConfig
from aiodatadist._values.sizes import read_size


@given(st.integers(0, 2**40), st.sampled_from(["", "KiB", "MiB", "GiB", "TiB", "mib"]), st.sampled_from(["", " "]))
def test_a_text_is_its_number_times_its_unit(number: int, unit: str, gap: str) -> None:
    powers = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
    assert read_size(f"{number}{gap}{unit}") == number * 1024 ** powers[unit[:1].lower()]
    assert read_size(number) == number


@pytest.mark.parametrize("wrong", ["", "1GB", "1.5GiB", "GiB", "1 G", "1GiB ", "9" * 21, None, True, 1.5, b"1GiB"])
def test_what_is_no_size_is_refused_with_the_rule(wrong: Any) -> None:
    with pytest.raises(ValueError, match='a text like "64MiB"'):
        read_size(wrong)


def test_a_pool_takes_both_and_keeps_bytes() -> None:
    assert PoolConfig(memory_size="1GiB") == PoolConfig(memory_size=1 << 30)
    kept = LLMConfig(mem_pool_cfg={"memory_size": "64MiB"}).mem_pool_cfg
    assert kept == '{"memory_size":67108864}', "the vendor's form"
    assert LLMConfig(mem_pool_cfg=PoolConfig(memory_size="64MiB")).mem_pool_cfg == kept


@pytest.mark.parametrize("wrong", ["1GB", "0", "-1GiB", None, "1KiB"])
def test_a_pool_refuses_sizes_in_one_sentence(wrong: Any) -> None:
    with pytest.raises(ParamInvalid, match="memory_size is") as refused:
        PoolConfig(memory_size=wrong)
    assert "\n" not in str(refused.value)
