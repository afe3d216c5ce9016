"""Descriptors and keys: every rule, with its value and its limit in the message."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    Status,
)
from aiodatadist._values.descriptors import MAX_DIMENSIONS, UNSET, check_cache_key

FP16 = DataType.DT_FLOAT16


@pytest.mark.parametrize(
    ("name", "number", "itemsize"),
    [
        ("DT_FLOAT", 0, 4),
        ("DT_FLOAT16", 1, 2),
        ("DT_INT8", 2, 1),
        ("DT_INT32", 3, 4),
        ("DT_UINT8", 4, 1),
        ("DT_INT16", 6, 2),
        ("DT_UINT16", 7, 2),
        ("DT_UINT32", 8, 4),
        ("DT_INT64", 9, 8),
        ("DT_UINT64", 10, 8),
        ("DT_DOUBLE", 11, 8),
        ("DT_BOOL", 12, 1),
        ("DT_STRING", 13, 16),
        ("DT_BF16", 27, 2),
    ],
)
def test_data_types_have_upstreams_numbers_and_sizes(name: str, number: int, itemsize: int) -> None:
    assert (DataType[name].value, DataType[name].itemsize) == (number, itemsize)
    assert len(DataType) == 14


def test_other_enumerations_have_upstreams_numbers() -> None:
    assert [(role.name, role.value) for role in LLMRole] == [("PROMPT", 1), ("DECODER", 2), ("MIX", 3)]
    assert [(place.name, place.value) for place in Placement] == [("HOST", 0), ("DEVICE", 1)]
    assert [(kind.name, kind.value) for kind in Memtype] == [("MEM_TYPE_DEVICE", 0), ("MEM_TYPE_HOST", 1)]
    assert [(s.name, s.value) for s in RegisterMemStatus] == [("OK", 0), ("PREPARING", 1), ("FAILED", 2)]
    assert (str(LLMRole.PROMPT), str(Placement.HOST)) == ("LLMRole.PROMPT", "Placement.HOST")


# ---- CacheDesc ----


def test_two_slots_of_two_mebibytes() -> None:
    desc = CacheDesc(4, [2, 1048576], FP16)
    assert (desc.size, desc.stride, desc.batch_size) == (4_194_304, 2_097_152, 2)


def test_four_blocks_of_sixty_four_bytes() -> None:
    desc = CacheDesc(4, [4, 16], DataType.DT_INT32)
    assert (desc.size, desc.stride) == (256, 64)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6), st.sampled_from(DataType))
def test_strides_cover_a_tensor_exactly(shape: list[int], data_type: DataType) -> None:
    desc = CacheDesc(1, shape, data_type)
    assert desc.size == math.prod(shape) * data_type.itemsize
    assert desc.stride * shape[0] == desc.size


def test_shape_is_the_object_that_was_passed() -> None:
    for shape in ([2, 3], (2, 3)):
        assert CacheDesc(1, shape, FP16).shape is shape


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: CacheDesc("4", [1], FP16), TypeError, "num_tensors is '4' of type str"),  # type: ignore[arg-type]
        (lambda: CacheDesc(-1, [1], FP16), ValueError, "num_tensors is -1: the uint32 range is 0 to 4294967295"),
        (lambda: CacheDesc(2**32, [1], FP16), ValueError, "num_tensors is 4294967296: the uint32 range"),
        (lambda: CacheDesc(1, {2}, FP16), TypeError, "shape is of type set: must be a list or tuple"),  # type: ignore[arg-type]
        (lambda: CacheDesc(1, [2, 1.5], FP16), TypeError, "shape[1] is 1.5 of type float, not int"),  # type: ignore[list-item]
        (lambda: CacheDesc(1, [2**63], FP16), ValueError, "shape is 9223372036854775808: the int64 range"),
        (lambda: CacheDesc(1, [1], 1), TypeError, "data_type is 1 of type int: must be DataType"),  # type: ignore[arg-type]
        (lambda: CacheDesc(1, [1], FP16, 1), TypeError, "placement is 1 of type int: must be Placement"),  # type: ignore[arg-type]
        (lambda: CacheDesc(1, [], FP16), LLMException, "batch_dim_index is 0: shape [] has 0 dimensions"),
        (lambda: CacheDesc(1, [1], FP16, batch_dim_index=1), LLMException, "batch_dim_index is 1: shape [1] has 1"),
        (lambda: CacheDesc(1, [1], FP16, batch_dim_index=-1), LLMException, "batch_dim_index is -1"),
        (lambda: CacheDesc(1, [1], FP16, batch_dim_index=2**31), ValueError, "batch_dim_index is 2147483648"),
        (lambda: CacheDesc(1, [1], FP16, seq_len_dim_index=1), LLMException, "seq_len_dim_index is 1: must be -1 or"),
        (lambda: CacheDesc(1, [1], FP16, seq_len_dim_index=-2), LLMException, "seq_len_dim_index is -2: must be -1 or"),
        (lambda: CacheDesc(1, [1], FP16, seq_len_dim_index=-(2**31) - 1), ValueError, "the int32 range"),
        (lambda: CacheDesc(1, [1], FP16, kv_tensor_format=5), TypeError, "kv_tensor_format is 5"),  # type: ignore[arg-type]
        (
            lambda: CacheDesc(1, [2, 0], FP16).size,
            LLMException,
            "shape is [2, 0]: must have 1 to 31 dimensions, all above 0",
        ),
        (lambda: CacheDesc(1, [-1], FP16).size, LLMException, "shape is [-1]"),
        (lambda: CacheDesc(1, [1] * 32, FP16).size, LLMException, "1 to 31 dimensions"),
        (lambda: CacheDesc(1, [2**62], FP16).size, LLMException, "9223372036854775808 bytes: the limit is 2**63-1"),
    ],
)
def test_wrong_description_is_refused_with_value_and_limit(
    make: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_largest_description_that_fits_is_accepted() -> None:
    assert CacheDesc(1, [2**62 - 1], FP16).size == 2**63 - 2
    assert CacheDesc(1, [1] * MAX_DIMENSIONS, FP16).size == 2


def test_update_dim_changes_size_and_batch_size() -> None:
    desc = CacheDesc(1, [2, 8], FP16)
    assert desc.size == 32
    desc.update_dim(0, 4)
    assert (desc.size, desc.stride, desc.batch_size) == (64, 16, 4)


def test_a_shape_that_its_owner_changed_is_measured_anew() -> None:
    shape = [2, 8]
    desc = CacheDesc(1, shape, FP16)
    assert desc.size == 32
    shape[0] = 1
    assert (desc.size, desc.stride) == (16, 16)


@pytest.mark.parametrize(
    ("index", "value", "error"),
    [(2, 1, LLMException), (-1, 1, LLMException), ("0", 1, TypeError), (0, None, TypeError), (0, 2**63, ValueError)],
)
def test_update_dim_refuses_and_changes_nothing(index: Any, value: Any, error: type[Exception]) -> None:
    desc = CacheDesc(1, [2, 8], FP16)
    with pytest.raises(error):
        desc.update_dim(index, value)
    assert desc.shape == [2, 8]


def test_update_dim_of_a_tuple_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="tuple"):
        CacheDesc(1, (2, 8), FP16).update_dim(0, 1)


def test_descriptions_that_look_the_same_are_equal() -> None:
    one, other = CacheDesc(2, [2, 8], FP16), CacheDesc(2, (2, 8), FP16)
    assert one == other
    assert hash(one) == hash(other)
    assert one != CacheDesc(2, [2, 8], FP16, Placement.HOST)
    assert repr(one) == "CacheDesc(2, [2, 8], DT_FLOAT16, Placement.DEVICE)"


# ---- Cache ----


def test_cpu_cache_is_a_blocks_cache_without_an_id() -> None:
    cache = Cache.create_cpu_cache(CacheDesc(2, [4, 8], FP16, Placement.HOST), [4096, 8192])
    assert (cache.cache_id, cache.tensor_addrs, cache.is_blocks_cache) == (-1, [4096, 8192], True)


@pytest.mark.parametrize(
    ("placement", "addrs", "error", "words"),
    [
        (Placement.DEVICE, [1, 2], LLMException, "needs Placement.HOST, not Placement.DEVICE"),
        (Placement.HOST, [1], LLMException, "1 addresses for 2 tensors"),
        (Placement.HOST, [], LLMException, "0 addresses for 2 tensors"),
        (Placement.HOST, [1, "2"], TypeError, "addrs[1] is '2'"),
        (Placement.HOST, None, TypeError, "addrs is of type NoneType"),
    ],
)
def test_wrong_cpu_cache_is_refused(placement: Placement, addrs: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        Cache.create_cpu_cache(CacheDesc(2, [4], FP16, placement), addrs)
    assert words in str(caught.value)


def test_cache_keeps_its_own_list_of_addresses() -> None:
    addrs = [4096]
    cache = Cache(1, CacheDesc(1, [1], FP16), addrs, False)
    addrs.append(0)
    assert cache.tensor_addrs == [4096]


# ---- keys ----

ANY_KEY: Any = CacheKey
ANY_BLOCKS: Any = BlocksCacheKey
"""The same classes, for arguments that a type checker refuses."""


def test_cache_key_by_position_and_by_name_is_the_same() -> None:
    assert CacheKey(1, 2, 3, 4) == CacheKey(prompt_cluster_id=1, req_id=2, model_id=3, prefix_id=4)
    key = CacheKey(cluster_id=1, req_id=2)
    assert (key.cluster_id, key.prompt_cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 1, 2, 0, 2**64 - 1)


def test_position_wins_over_the_same_name() -> None:
    assert ANY_KEY(1, 2, cluster_id=9).cluster_id == 1


def test_blocks_cache_key_has_a_cluster_and_a_model() -> None:
    assert BlocksCacheKey(1) == BlocksCacheKey(prompt_cluster_id=1, model_id=0)
    assert (BlocksCacheKey(1, 2).cluster_id, BlocksCacheKey(1, 2).prompt_cluster_id, BlocksCacheKey(1, 2).model_id) == (
        1,
        1,
        2,
    )


def test_key_by_id_names_slot_zero_unless_told() -> None:
    key = CacheKeyByIdAndIndex(1, 2)
    assert (key.cluster_id, key.cache_id, key.batch_index) == (1, 2, 0)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (CacheKey, LLMException, "needs cluster_id (or prompt_cluster_id) and req_id"),
        (lambda: ANY_KEY(1), LLMException, "and req_id"),
        (lambda: ANY_KEY(req_id=1), LLMException, "needs cluster_id"),
        (lambda: ANY_KEY(1, 2, 3, 4, 5), LLMException, "takes at most 4 arguments: 5 were given"),
        (lambda: ANY_KEY(1, 2, batch=3), LLMException, "has no argument 'batch'"),
        (lambda: ANY_KEY("1", 2), TypeError, "cluster_id is '1'"),
        (lambda: ANY_KEY(1, None), TypeError, "req_id is None"),
        (lambda: ANY_KEY(1, 2**64), ValueError, "req_id is 18446744073709551616: the uint64 range"),
        (lambda: ANY_KEY(1, 2, -1), ValueError, "model_id is -1"),
        (lambda: ANY_KEY(1, 2, 0, 2**64), ValueError, "prefix_id is"),
        (BlocksCacheKey, LLMException, "needs cluster_id"),
        (lambda: ANY_BLOCKS(1, 2, 3), LLMException, "at most 2 arguments: 3 were given"),
        (lambda: ANY_BLOCKS(1, req_id=3), LLMException, "has no argument 'req_id'"),
        (lambda: ANY_BLOCKS(1.0), TypeError, "cluster_id is 1.0"),
        (lambda: ANY_BLOCKS(-1), ValueError, "cluster_id is -1"),
        (lambda: CacheKeyByIdAndIndex(1, 2**63), ValueError, "cache_id is 9223372036854775808: the int64 range"),
        (lambda: CacheKeyByIdAndIndex(1, 1, -1), ValueError, "batch_index is -1: the uint32 range"),
        (lambda: CacheKeyByIdAndIndex(1, 1, 2**32), ValueError, "batch_index is 4294967296"),
        (lambda: CacheKeyByIdAndIndex(2**64, 1), ValueError, "cluster_id is"),
        (lambda: CacheKeyByIdAndIndex(1, "1"), TypeError, "cache_id is '1'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_key_is_refused_with_its_reason(make: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


def test_keys_of_different_kinds_are_never_equal() -> None:
    assert len({CacheKey(1, 2), CacheKeyByIdAndIndex(1, 2), BlocksCacheKey(1, 2), CacheKey(1, 2)}) == 3
    assert repr(CacheKeyByIdAndIndex(1, 2, 3)) == "CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=3)"


def test_keys_cannot_be_changed() -> None:
    key: Any = CacheKey(1, 2)
    with pytest.raises(AttributeError):
        key.req_id = 3


def test_placeholder_has_neither_request_nor_prefix() -> None:
    assert CacheKey(1, UNSET).is_placeholder
    assert not CacheKey(1, UNSET, 0, 5).is_placeholder
    assert not CacheKey(1, 5).is_placeholder
    assert CacheKey(1, UNSET, 0, 5).is_prefix


@pytest.mark.parametrize(
    ("req_id", "prefix_id", "fine"), [(1, UNSET, True), (UNSET, 1, True), (1, 1, False), (UNSET, UNSET, False)]
)
def test_pulled_key_has_exactly_one_of_request_and_prefix(req_id: int, prefix_id: int, fine: bool) -> None:
    key = CacheKey(1, req_id, 0, prefix_id)
    if fine:
        check_cache_key(key)
    else:
        with pytest.raises(LLMException, match="exactly one of req_id and prefix_id"):
            check_cache_key(key)


# ---- the rest ----


def test_mem_info_checks_types_only() -> None:
    info = MemInfo(Memtype.MEM_TYPE_HOST, -1, 0)
    assert (info.mem_type, info.addr, info.size) == (Memtype.MEM_TYPE_HOST, -1, 0)
    wrong: Any = 0
    with pytest.raises(TypeError, match="mem_type is 0 of type int"):
        MemInfo(wrong, 1, 1)


def test_status_answers_one_question() -> None:
    assert Status(LLMStatusCode.LLM_SUCCESS).is_ok()
    assert not Status(LLMStatusCode.LLM_TIMEOUT).is_ok()
    assert Status(LLMStatusCode.LLM_TIMEOUT).status_code is LLMStatusCode.LLM_TIMEOUT


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (BlocksCacheKey(1, 2), {"cluster_id": 1, "prompt_cluster_id": 1, "model_id": 2}),
        (CacheKeyByIdAndIndex(1, 2, 3), {"cluster_id": 1, "cache_id": 2, "batch_index": 3}),
        (
            CacheKey(1, 2, 3, 4, for_cluster=5),
            {"cluster_id": 1, "prompt_cluster_id": 1, "req_id": 2, "model_id": 3, "prefix_id": 4, "for_cluster": 5},
        ),
        (
            Cache(1, CacheDesc(1, [2, 2], FP16), [7], True),
            {"cache_id": 1, "tensor_addrs": [7], "is_blocks_cache": True},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_are_read_and_never_written(values: object, names: dict[str, object]) -> None:
    assert {name: getattr(values, name) for name in names} == names
    for name, value in names.items():
        with pytest.raises(AttributeError):
            setattr(values, name, value)
        assert isinstance(getattr(type(values), name), property)


def test_descriptions_of_properties_remain() -> None:
    assert Cache.cache_id.__doc__ == "The id, with which a peer may name the cache; -1 if it has none."
