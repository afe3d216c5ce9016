"""Values that destinations refuse, when made and when changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMException,
    ParamInvalid,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

LAYERS = range(2)
WRONG_RANGES = [range(0), range(3, 3), range(3, 1), range(-1, 2), range(0, 4, 2), range(4, 0, -1)]


def by_address(**given: Any) -> TransferConfig:
    return TransferConfig(**{"dst_cluster_id": 2, "dst_addrs": [1, 2, 3, 4], **given})


def by_key(**given: Any) -> TransferWithCacheKeyConfig:
    key = CacheKeyByIdAndIndex(2, 7, 1)
    return TransferWithCacheKeyConfig(
        **{"cache_key": key, "src_layer_range": LAYERS, "dst_layer_range": LAYERS, **given}
    )


def test_what_was_given_is_there() -> None:
    one = by_address(src_layer_range=range(1, 3), src_batch_index=5)
    assert (one.dst_cluster_id, list(one.dst_addrs), one.src_layer_range, one.src_batch_index) == (
        2,
        [1, 2, 3, 4],
        range(1, 3),
        5,
    )
    two = by_key(src_layer_range=range(1, 3), dst_layer_range=range(4, 6), src_batch_index=3)
    assert (two.dst_cluster_id, two.src_layer_range, two.dst_layer_range) == (2, range(1, 3), range(4, 6))
    assert two.src_batch_index == 3
    assert two.cache_key == CacheKeyByIdAndIndex(2, 7, 1)


def test_defaults() -> None:
    assert by_address().src_layer_range is None
    assert by_address().src_batch_index == by_key().src_batch_index == 0
    assert TransferConfig(2**64 - 1, (0, 2**64 - 1)).dst_addrs == (0, 2**64 - 1)


def test_positional_as_upstream() -> None:
    config = TransferConfig(2, [1, 2], range(3, 4), 1)
    assert (config.src_layer_range, config.src_batch_index) == (range(3, 4), 1)
    keyed = TransferWithCacheKeyConfig(BlocksCacheKey(2, 0), range(1), range(3, 4), 0)
    assert keyed.dst_layer_range == range(3, 4)


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("dst_cluster_id", "2", TypeError, "dst_cluster_id is '2' of type str: must be an int"),
        ("dst_cluster_id", None, TypeError, "dst_cluster_id is None"),
        ("dst_cluster_id", -1, ValueError, "dst_cluster_id is -1: the uint64 range"),
        ("dst_cluster_id", 2**64, ValueError, "dst_cluster_id is 18446744073709551616"),
        ("dst_addrs", None, TypeError, "dst_addrs is of type NoneType"),
        ("dst_addrs", {1, 2}, TypeError, "dst_addrs is of type set"),
        ("dst_addrs", [1, 2.0], TypeError, r"dst_addrs\[1\] is 2.0 of type float"),
        ("dst_addrs", [1, -2], ValueError, r"dst_addrs\[1\] is -2: the uint64 range"),
        ("dst_addrs", [2**64], ValueError, r"dst_addrs\[0\] is 18446744073709551616"),
        ("src_layer_range", (0, 2), TypeError, r"src_layer_range is \(0, 2\) of type tuple"),
        ("src_batch_index", "0", TypeError, "src_batch_index is '0'"),
        ("src_batch_index", -1, ValueError, "src_batch_index is -1: the uint32 range"),
        ("src_batch_index", 2**32, ValueError, "src_batch_index is 4294967296"),
    ],
)
def test_addresses_are_checked_when_made_and_when_set(
    name: str, value: object, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        by_address(**{name: value})
    config = by_address()
    before = getattr(config, name)
    with pytest.raises(kind, match=message):
        setattr(config, name, value)
    assert getattr(config, name) == before


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("dst_layer_range", 2, TypeError, "dst_layer_range is 2 of type int"),
        ("src_layer_range", [0, 1], TypeError, r"src_layer_range is \[0, 1\]"),
        ("src_batch_index", None, TypeError, "src_batch_index is None"),
        ("src_batch_index", -1, ValueError, "src_batch_index is -1"),
        ("src_batch_index", 2**32, ValueError, "src_batch_index is 4294967296"),
    ],
)
def test_keys_are_checked_when_made_and_when_set(name: str, value: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        by_key(**{name: value})
    config = by_key()
    with pytest.raises(kind, match=message):
        setattr(config, name, value)


@pytest.mark.parametrize("key", [CacheKey(2, 1), (2, 7, 1), 7], ids=str)
def test_only_keys_of_caches_that_can_be_written_to(key: object) -> None:
    with pytest.raises(TypeError, match=r"cache_key is .*must be BlocksCacheKey or CacheKeyByIdAndIndex"):
        by_key(cache_key=key)
    config = by_key()
    with pytest.raises(TypeError, match="cache_key"):
        config.cache_key = key  # type: ignore[assignment]
    assert config.cache_key == CacheKeyByIdAndIndex(2, 7, 1)


def test_no_key_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="cache_key"):
        by_key(cache_key=None)


@pytest.mark.parametrize("wrong", WRONG_RANGES, ids=str)
@pytest.mark.parametrize(
    ("make", "name"), [(by_address, "src_layer_range"), (by_key, "src_layer_range"), (by_key, "dst_layer_range")]
)
def test_ranges_are_not_empty_and_in_steps_of_one(wrong: range, make: Callable[..., object], name: str) -> None:
    message = f"{name} is .*must have step 1 and 0 <= start < stop"
    with pytest.raises(ParamInvalid, match=message):
        make(**{name: wrong})
    config = make()
    with pytest.raises(LLMException, match=message):
        setattr(config, name, wrong)


def test_all_layers_where_none_are_named() -> None:
    config = TransferWithCacheKeyConfig(BlocksCacheKey(2, 0))
    assert (config.src_layer_range, config.dst_layer_range) == (None, None)
    config.dst_layer_range = range(1, 4)
    config.dst_layer_range = None
    assert config.dst_layer_range is None
    assert by_key(src_layer_range=None, dst_layer_range=range(1, 4)).src_layer_range is None


def test_equally_many_layers() -> None:
    with pytest.raises(ParamInvalid, match=r"range\(0, 2\) and dst_layer_range range\(1, 4\).*the same length"):
        by_key(dst_layer_range=range(1, 4))


def test_blocks_have_no_batch_slots() -> None:
    with pytest.raises(ParamInvalid, match="src_batch_index is 1: must be 0 with a BlocksCacheKey"):
        by_key(cache_key=BlocksCacheKey(2, 0), src_batch_index=1)
    config = by_key(cache_key=BlocksCacheKey(2, 0))
    with pytest.raises(ParamInvalid, match="src_batch_index is 1"):
        config.src_batch_index = 1


def test_the_cluster_is_that_of_the_first_key() -> None:
    config = by_key()
    config.cache_key = BlocksCacheKey(3, 0)
    assert config.dst_cluster_id == 2
    config.dst_cluster_id = 5
    assert config.cache_key.cluster_id == 3
    with pytest.raises(ValueError, match="dst_cluster_id is -1"):
        config.dst_cluster_id = -1
