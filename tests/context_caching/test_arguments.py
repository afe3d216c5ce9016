"""Every rule of the data calls: what breaks one is refused before anything starts, in every call and form."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from aiodatadist._testing.views import pipeline_of
from aiodatadist.context_caching import (
    CcCacheConfig,
    CcStatus,
    ContextCache,
    EmsErrorCode,
    EmsException,
    EmsInvalidArgument,
    HealthGate,
    HealthRules,
    KvBufferWrapper,
    LayerGroup,
    MemoryPool,
    PrimaryKey,
    open_pool,
)
from aiodatadist.context_caching.ems import (
    CcConfig,
    CcConfig_v1,
    CcKvOption,
    ContextCache_v1,
    ContextCaching,
    Ems,
    EmsConfig,
)
from tests.context_caching.fakes import Foreign
from tests.context_caching.kit import BLOCK, SLOTS, Kv, by_slots, opened, rank

BUFFER = bytearray(64)
ONE = [KvBufferWrapper.from_buffer(BUFFER)]

V1: list[tuple[dict[str, Any], str]] = [
    ({"hashes": []}, "hashes is empty"),
    ({"hashes": 7}, "hashes is 7 of type int"),
    ({"hashes": "ab"}, "hashes is 'ab'"),
    ({"hashes": [1, 2.0]}, r"hashes\[1\] is 2.0"),
    ({"hashes": [True, 2]}, r"hashes\[0\] is True"),
    ({"hashes": [1, 2**128]}, r"hashes\[1\] is 340282366920938463463374607431768211456"),
    ({"hashes": [1, -(2**63) - 1]}, r"hashes\[1\] is -9223372036854775809"),
    ({"hashes": [5, 5]}, r"hashes\[1\] is 5, as hashes\[0\] is"),
    ({"slots": []}, "slots is empty"),
    ({"slots": [0, 1, 2, 3, 4, 5, 6, "7"]}, r"slots\[7\] is '7'"),
    ({"slots": [0, 1, 2, 3, 4, 5, 6, 7.5]}, r"slots\[7\] is 7.5"),
    ({"slots": [0, 1, 2, 3, 4, 5, 6, SLOTS]}, rf"slots\[7\] is {SLOTS}: must be in \[0, {SLOTS}\)"),
    ({"slots": [0, 1, 2, 3, 4, 5, 6, -1]}, r"slots\[7\] is -1"),
    ({"slots": [0, 1, 2, 3, 4, 5, 6, 2**63]}, "does not fit 64 bits"),
    ({"slots": [0, 1, 2, 3, 4, 5, 6, 2]}, r"slots\[7\] is 2: a slot may occur only once"),
    ({"offsets": []}, "offsets is empty"),
    ({"offsets": [8]}, "1 offsets for 2 hashes"),
    ({"offsets": [4, 3]}, "offsets add up to 7 tokens, but slots has 8 entries"),
    ({"offsets": [8, 0]}, r"offsets\[1\] is 0: a hash has at least 1 token"),
    ({"offsets": [9, -1]}, r"offsets\[1\] is -1"),
    ({"offsets": [4, None]}, r"offsets\[1\] is None"),
    ({"slots": None}, r"slots or offsets are missing"),
    ({"offsets": None}, r"slots or offsets are missing"),
    ({"slots": None, "offsets": None}, r"slots or offsets are missing"),
    ({"chunks": [[(0, 4), (8, 4)]]}, "pass one of the two"),
    ({"slots": None, "chunks": [[(0, 4), (8, 4)]]}, "pass one of the two"),
]
CHUNKS: list[tuple[Any, str]] = [
    ([], "chunks is empty"),
    (5, "chunks is 5"),
    ([[(0, 4), (8, 4)], [(0, 4), (8, 4)]], "chunks has 2 lists for 1 layer groups"),
    (
        [[(0, 4)]],
        r"chunks\[0\] has 1 pairs for 2 hashes: must be a list of \(start_slot, length\) pairs, one for each",
    ),
    (
        [(0, 4)],
        r"chunks\[0\] is \(0, 4\) of type tuple: must be a list of \(start_slot, length\) pairs, one for each",
    ),
    ([(0, 4, 8)], r"chunks\[0\] is \(0, 4, 8\) of type tuple: must be a list"),
    ([[(0, 4), 8]], r"chunks\[0\]\[1\] is 8: must be \(start_slot, length\)"),
    ([[(0, 4), (8, 4, 1)]], r"chunks\[0\]\[1\]"),
    ([[(0, 4), (8, "4")]], r"lengths of chunks\[0\]\[1\] is '4'"),
    ([[(0, 4), (8, -1)]], r"chunks\[0\]\[1\] has the length -1"),
    ([[(0, 4), (-8, 4)]], r"chunks\[0\]\[1\] is \(-8, 4\)"),
    ([[(0, 4), (SLOTS - 3, 4)]], r"must be in \[0, 64\)"),
    ([[(0, 4), (3, 4)]], r"chunks\[0\]\[1\] is \(3, 4\): a slot may occur only once"),
]
V0: list[tuple[Any, Any, str]] = [
    ([], [], "keys is empty"),
    (["a"], [], "buffers is empty"),
    (["a", "b"], [ONE], "1 lists for 2 keys"),
    (["a"], [[]], r"buffers\[0\] is empty"),
    (["a"], [5], r"buffers\[0\] is of type int"),
    (["a"], [[5]], r"buffers\[0\]\[0\] is of type int"),
    (["a"], [[b"read-only"]], r"buffers\[0\]\[0\] is read-only"),
    (["a"], [[memoryview(BUFFER)[::2]]], "contiguous"),
    (["a", "a"], [ONE, ONE], r"^keys\[1\] is 'a', as keys\[0\] is: "),
    (
        [PrimaryKey("a", "b"), "a", PrimaryKey("a", "b")],
        [ONE] * 3,
        r"^keys\[2\] is PrimaryKey\(.*'a', .*'b'\), as keys\[0\] is",
    ),
    (["x" * 128], [ONE], r"keys\[0\] has 128 bytes"),
    (["é" * 64], [ONE], r"keys\[0\] has 128 bytes"),
    ([""], [ONE], r"keys\[0\] has 0 bytes"),
    ([5], [ONE], r"keys\[0\] is of type int"),
]


UPSTREAMS = {"slot_mapping": "slots", "chunk_descs": "chunks", "key_list": "keys", "value_list": "buffers"}


@contextmanager
def refused(match: str) -> Iterator[None]:
    """Check a message that callers of ContextCache also get, but with EMS's names of the arguments."""
    with pytest.raises(EmsInvalidArgument) as caught:
        yield
    said = caught.value.message()
    assert not re.search(r"^(slots|keys|buffers)\b|\b(slots|keys|buffers)(\[| has )|\bchunks\b", said)
    for name, ours in UPSTREAMS.items():
        said = said.replace(name, ours)
    assert re.search(match, said)


def v1_words(words: dict[str, Any]) -> dict[str, Any]:
    """Return the same arguments under EMS's names."""
    names = {"slots": "slot_mapping", "chunks": "chunk_descs"}
    return {names.get(name, name): value for name, value in words.items()}


FINE: dict[str, Any] = {"hashes": [1, 2], **by_slots([0, 1])}
WRONG = [({**FINE, **change}, match) for change, match in V1] + [
    ({"hashes": [1, 2], "chunks": chunks}, match) for chunks, match in CHUNKS
]


async def test_v1_calls_refuse_what_breaks_a_rule_and_ask_no_pool() -> None:
    kv = Kv()
    async with await MemoryPool.open(1 << 16) as inner, opened(Foreign(inner), kv) as cache:
        before = kv.image()
        for given, match in WRONG:
            words = {name: value for name, value in given.items() if name != "hashes"}
            hashes = given["hashes"]
            for call in (cache.save, cache.load):
                with pytest.raises(EmsInvalidArgument, match=match):
                    await call(hashes, **words)
            for start in (cache.start_save, cache.start_load):
                with pytest.raises(EmsInvalidArgument, match=match):
                    start(hashes, **words)
            if match.startswith("hashes"):
                for ask in (cache.exists, cache.match_prefix, cache.remove):
                    with pytest.raises(EmsInvalidArgument, match=match):
                        await ask(hashes)
        assert kv.image() == before
        pool = pipeline_of(cache).pool
        assert isinstance(pool, Foreign)
        assert not pool.asked
        assert (await cache.save([1, 2], slots=np.arange(8).tolist(), offsets=(4, 4))).success == 2


async def test_of_a_hash_without_tokens_nothing_is_stored_and_nothing_read() -> None:
    async with await MemoryPool.open(1 << 16) as pool, opened(pool, kv := Kv()) as cache:
        await cache.register_kvcache(kv.layers, [[0, 2], [1]])
        before = kv.image()
        for call in (cache.save, cache.load):
            assert (await call([3, 4], chunks=[[(0, 0), (0, 0)]] * 2)).success == 2
            result = await call([1, 2, 3], chunks=[[(0, 4), (0, 0), (8, 0)], [(0, 0), (4, 4), (0, 0)]])
            assert result.details == (CcStatus.OK,) * 3
        assert kv.image() == before
        assert len(pool) == 3, "a value each of 1 and 2, and the layout's note"
        assert (await cache.exists([1, 2, 3])).success == 2


async def test_v0_calls_refuse_what_breaks_a_rule_and_ask_no_pool() -> None:
    async with await MemoryPool.open(1 << 16) as inner, opened(Foreign(inner)) as cache:
        for keys, buffers, match in V0:
            for call in (cache.save_values, cache.load_values):
                with pytest.raises(EmsInvalidArgument, match=match):
                    await call(keys, buffers)
            for start in (cache.start_save_values, cache.start_load_values):
                with pytest.raises(EmsInvalidArgument, match=match):
                    start(keys, buffers)
        pool = pipeline_of(cache).pool
        assert isinstance(pool, Foreign)
        assert not pool.asked


@pytest.mark.parametrize("timeout", [-1, "5", True, float("nan")])
async def test_a_timeout_is_seconds(timeout: Any) -> None:
    async with opened("memory:", Kv()) as cache:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: cache.save([1], **by_slots([0]), timeout=timeout),
            lambda: cache.load_values(["a"], [ONE], timeout=timeout),
            lambda: cache.exists([1], timeout=timeout),
        ]
        for call in calls:
            with pytest.raises(EmsInvalidArgument, match="timeout is"):
                await call()
        assert (await cache.save([1], **by_slots([0]), timeout=None)).success == 1


async def test_blocks_need_a_registered_cache_and_exists_does_not() -> None:
    async with opened("memory:") as cache:
        for call in (cache.save, cache.load):
            with pytest.raises(EmsInvalidArgument, match="no KV cache is registered"):
                await call([1], **by_slots([0]))
        assert (await cache.exists([1])).success == 0


async def test_a_cache_for_keys_knows_no_hashes() -> None:
    async with await ContextCache.open(CcConfig(0, 0, "model")) as cache:
        with pytest.raises(EmsInvalidArgument, match="need a CcConfig_v1"):
            await cache.exists([1])
        assert (await cache.save_values(["a"], [ONE])).success == 1


LAYERS: list[tuple[Callable[[Kv], tuple[Any, Any]], str]] = [
    (lambda _: ([], None), "layers is empty"),
    (lambda kv: ([*kv.layers, []], None), r"layers\[3\] is empty"),
    (lambda kv: ([kv.layers[0][0]], None), r"layers\[0\] is of type ndarray"),
    (lambda _: ([["tensor"]], None), r"layers\[0\]\[0\] is of type str"),
    (lambda kv: ([[kv.layers[0][0][:, ::2]]], None), r"layers\[0\]\[0\] is not contiguous"),
    (lambda _: ([[np.zeros(8)]], None), r"layers\[0\]\[0\] has the shape \(8,\)"),
    (lambda _: ([[np.zeros((0, 4, 8))]], None), "has the shape"),
    (lambda kv: ([kv.layers[0], kv.layers[0]], None), "overlap"),
    (lambda kv: ([kv.layers[0], [np.zeros((16, 8, 3))]], None), r"layers\[1\]\[0\] has 16 blocks of 8 tokens"),
    (lambda kv: (kv.layers, []), "groups is empty"),
    (lambda kv: (kv.layers, [[0, 1]]), r"groups have the layers \[0, 1\]"),
    (lambda kv: (kv.layers, [[0, 1], [1, 2]]), "each of the 3 layers must be in one group"),
    (lambda kv: (kv.layers, [[0, 1], [3]]), r"groups\[1\]\[0\] is 3"),
    (lambda kv: (kv.layers, [LayerGroup([0, 1]), LayerGroup([])]), r"groups\[1\] is empty"),
]


async def test_a_kv_cache_that_breaks_a_rule_is_not_registered() -> None:
    async with opened("memory:") as cache:
        for make, match in LAYERS:
            layers, groups = make(Kv())
            with pytest.raises(EmsInvalidArgument, match=match):
                await cache.register_kvcache(layers, groups)
        frozen = np.zeros((4, 4, 8))
        frozen.setflags(write=False)
        with pytest.raises(EmsInvalidArgument, match="read-only"):
            await cache.register_kvcache([[frozen]])
        with pytest.raises(EmsInvalidArgument, match="no KV cache is registered"):
            await cache.save([1], **by_slots([0]))
        await cache.register_kvcache([[bytearray_of(4, 4, 8)]], [LayerGroup([0], "all")])
        assert (await cache.save([1], **by_slots([0]))).success == 1


def view_of(array: Any) -> memoryview:
    return memoryview(array)


class _Pair(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("object", ctypes.py_object))


REFERENCES: list[Callable[[], Any]] = [
    lambda: np.full((4, 4), "text", object),
    lambda: np.zeros((4, 4), [("number", "i4"), ("inner", [("objects", "O", (2,))])]),
    lambda: np.array([["a", "b"]] * 2, np.dtypes.StringDType()),
    lambda: view_of(np.full((4, 4), "text", object)),
    ctypes.py_object * 4 * 4,
    _Pair * 4 * 4,
    ctypes.POINTER(ctypes.c_int) * 4 * 4,
    ctypes.c_char_p * 4 * 4,
    ctypes.c_wchar_p * 4 * 4,
    ctypes.c_void_p * 4 * 4,
    ctypes.CFUNCTYPE(None) * 4 * 4,
]
VALUES: list[Callable[[], Any]] = [
    lambda: np.zeros((4, 4), complex),
    lambda: np.zeros((4, 4), [("Object", "i4"), ("Pz", ">f2")]),
    lambda: np.array([["Oz", "PX"]] * 2),
    lambda: view_of(np.zeros((4, 4), "complex64")),
    lambda: view_of(np.zeros((4, 4), [("Object", "i4"), ("z", "c8")])),
    ctypes.c_float * 4 * 4,
]


async def test_hashes_may_be_of_numpys_types() -> None:
    async with opened("memory:", Kv()) as cache:
        assert (await cache.save([np.int64(5), 6], **by_slots([0, 1]))).success == 2  # type: ignore[list-item]
        assert (await cache.exists(np.array([5, 6]))).success == 2  # type: ignore[arg-type]
        with pytest.raises(EmsInvalidArgument, match=r"hashes\[0\] is of type bytes: .* int.from_bytes"):
            await cache.exists([b"digest"])  # type: ignore[list-item]


async def test_an_array_in_place_of_layers_is_not_read() -> None:
    class Enormous:
        dtype = "float16"

        def tolist(self) -> object:
            raise AssertionError

    async with opened("memory:") as cache:
        with pytest.raises(EmsInvalidArgument, match="layers is of type Enormous: must be a list"):
            await cache.register_kvcache(Enormous())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "is_warned"), [((2, 8, 4, 2, 8), True), ((3, 8, 4, 2, 8), False), ((2, 4, 2, 8), False)]
)
async def test_a_tensor_that_looks_like_k_and_v_in_one_is_warned_of(
    shape: tuple[int, ...], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with await ContextCache.open(rank()) as cache:
        await cache.register_kvcache([[np.zeros(shape, np.float16)]])
    assert (f"a tensor of shape {shape} is treated as 2 blocks of 8 tokens" in caplog.text) == is_warned


class Provider:
    """A provider of memory by DLPack, and in no other way."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


async def test_memory_may_come_by_dlpack() -> None:
    kv = Kv()
    async with opened("memory:") as cache:
        await cache.register_kvcache([[Provider(tensor) for tensor in layer] for layer in kv.layers])
        assert (await cache.save([1], **by_slots([0]))).success == 1
        assert (await cache.load([1], **by_slots([5]))).success == 1
        assert kv.rows(range(20, 24)) == kv.rows(range(4))

    class Elsewhere(Provider):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("it is on another device")

    fixed = np.zeros((4, 4, 4), np.uint8)
    fixed.flags.writeable = False
    for given, match in (
        (Provider(np.zeros((4, 4, 4), np.uint8)[:, ::2]), "is not contiguous"),
        (Provider(fixed), "is read-only|without host memory"),
        (Elsewhere(fixed), "of type Elsewhere, without host memory: it is on another device"),
    ):
        async with opened("memory:") as cache:
            with pytest.raises(EmsInvalidArgument, match=match):
                await cache.register_kvcache([[given]])


async def test_what_was_registered_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiodatadist")
    async with opened("memory:", Kv()):
        assert "KV cache: 3 layers, 16 blocks of 4 tokens of 576 bytes" in caplog.text


@pytest.mark.parametrize("make", REFERENCES)
async def test_items_that_are_references_are_refused(make: Callable[[], Any]) -> None:
    owner = make()
    with pytest.raises(EmsInvalidArgument, match=r"^the buffer has the (dtype|format) .*: .* references"):
        KvBufferWrapper.from_buffer(owner)
    async with opened("memory:") as cache:
        with pytest.raises(EmsInvalidArgument, match=r"^layers\[0\]\[0\] has the (dtype|format) .*: .* references"):
            await cache.register_kvcache([[owner]])
        with pytest.raises(EmsInvalidArgument, match=r"^buffers\[0\]\[0\] has the (dtype|format) .*: .* references"):
            cache.start_load_values(["key"], [[owner]])


@pytest.mark.parametrize("make", VALUES)
async def test_items_that_look_like_references_are_not(make: Callable[[], Any]) -> None:
    owner = make()
    KvBufferWrapper.from_buffer(owner)
    async with opened("memory:") as cache:
        await cache.register_kvcache([[owner]])


def bytearray_of(*shape: int) -> memoryview:
    return memoryview(bytearray(int(np.prod(shape)))).cast("B", shape)


def test_sizes_of_a_cache_are_numbers_or_texts() -> None:
    limits = CcCacheConfig(read_cache_bytes="1GiB", bytes_in_flight="64MiB")
    assert limits == CcCacheConfig(read_cache_bytes=1 << 30, bytes_in_flight=64 << 20)
    assert (limits.read_cache_bytes, limits.bytes_in_flight) == (1 << 30, 64 << 20)


def made(make: Any, *args: Any, **named: Any) -> object:
    """Call ``make`` with types that a type checker would not let through."""
    return make(*args, **named)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: made(CcConfig, -1, 0, "m"), "rank_id is -1"),
        (lambda: made(CcConfig, True, 0, "m"), "rank_id is True"),
        (lambda: made(CcConfig, 0, "0", "m"), "device_id is '0'"),
        (lambda: made(CcConfig, 0, 0, ""), "model_id has 0 characters"),
        (lambda: made(CcConfig, 0, 0, "m" * 513), "model_id has 513 characters"),
        (lambda: made(CcConfig, 0, 0, "a\nb"), "control characters"),
        (lambda: made(CcConfig, 0, 0, "m", tp_world_size=0), "tp_world_size is 0"),
        (lambda: made(rank, tp_world_size=2, rank_in_tp_group=2), r"rank_in_tp_group is 2: must be in \[0, 1\]"),
        (lambda: made(rank, rank_in_pp_group=1), "rank_in_pp_group is 1"),
        (lambda: made(rank, kvcache_type="MLA"), "kvcache_type is 'MLA'"),
        (lambda: made(rank, llm_engine=""), "llm_engine has 0 characters"),
        (lambda: made(CcKvOption, timeout=-1), "timeout is -1"),
        (lambda: made(CcKvOption, timeout=1.5), "timeout is 1.5"),
        (lambda: made(CcKvOption, timeout=True), "timeout is True"),
        (lambda: made(CcKvOption, write_rcache=1), "write_rcache is 1"),
        (lambda: made(CcKvOption, read_local_only=None), "read_local_only is None"),
        (lambda: made(CcCacheConfig, read_cache_bytes=-1), "read_cache_bytes is -1"),
        (lambda: made(CcCacheConfig, read_cache_bytes="1GB"), 'a text like "64MiB"'),
        (lambda: made(CcCacheConfig, bytes_in_flight="0MiB"), "bytes_in_flight is 0: must be at least 1"),
        (lambda: made(PrimaryKey, "", "a"), "distribute_key is empty"),
        (lambda: made(PrimaryKey, "a", ""), "attribute_key is empty"),
        (lambda: made(PrimaryKey, "a", 5), "attribute_key is of type int"),
        (lambda: made(PrimaryKey, "a" * 64, "b" * 63), "128 bytes"),
        (lambda: made(PrimaryKey, "\ud800", "b"), "not valid Unicode"),
        (lambda: made(KvBufferWrapper, 0, 5), "data_ptr is 0"),
        (lambda: made(KvBufferWrapper, 5, 0), "length is 0"),
        (lambda: made(KvBufferWrapper, len, 5), "data_ptr is a function: call it"),
        (lambda: made(KvBufferWrapper, 2**64 - 1, 2), "leave the address space"),
        (lambda: made(KvBufferWrapper.from_buffer, b"abc"), "writable"),
        (lambda: made(EmsConfig, access_id="A"), r"access_id \('A'\) must be"),
        (lambda: made(EmsConfig, access_key="short"), r"access_key \(not shown\)"),
        (lambda: made(EmsConfig, cc_config=CcConfig(0, 0, "m"), cc_config_v1=rank()), "are both given"),
        (lambda: made(EmsConfig, cc_config=rank()), "cc_config is of type CcConfig_v1"),
        (lambda: made(EmsConfig, cc_config_v1=CcConfig(0, 0, "m")), "cc_config_v1 is of type CcConfig"),
        (lambda: made(EmsConfig, pool=5), "pool is of type int"),
        *(
            (
                lambda name=name, value=value: made(HealthRules, **{name: value}),
                rf"^{name} is {value!r} of type .* above 0",
            )
            for name in ("probe_every", "window")
            for value in ("1", None, True, float("nan"), float("inf"), -1, 0, 0.0)
        ),
        (lambda: made(HealthRules, window=10**400), "^window is .* and finite"),
        *(
            (
                lambda name=name, value=value: made(HealthRules, **{name: value}),
                rf"^{name} is {value!r}.*must be {rule}",
            )
            for name in ("successes", "changes")
            for value, rule in (
                ("x", "an int"),
                (None, "an int"),
                (True, "an int"),
                (1.5, "an int"),
                (0, "at least 1"),
                (-1, "at least 1"),
            )
        ),
        (lambda: made(HealthGate, "x"), "^rules is 'x' of type str: must be a HealthRules"),
        (lambda: made(HealthGate, 0), "^rules is 0 of type int: must be a HealthRules"),
    ],
)
def test_small_types_check_themselves(make: Callable[[], object], match: str) -> None:
    with pytest.raises(EmsInvalidArgument, match=match) as caught:
        make()
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    assert isinstance(caught.value, EmsException)


def test_small_types_are_values() -> None:
    key = PrimaryKey("a" * 64, "b" * 62)
    assert key == PrimaryKey("a" * 64, "b" * 62)
    assert len({key, PrimaryKey("a" * 64, "b" * 62), PrimaryKey("a", "b")}) == 2
    assert rank(model_id="org/model@1").kvcache_type.value == "GQA"
    assert "secret" not in repr(EmsConfig(access_key="secret" * 6))


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("ftp://there", "'ftp' is not a kind of pool"),
        ("memory:?bytes=none", "does not name a memory pool"),
        ("memory://host", "does not name a memory pool"),
        ("memory:?size=5", "does not name a memory pool"),
        ("memory:?bytes=0", "bytes is 0 bytes: must be at least 1"),
        ("memory:?bytes=-5", "bytes is -5 bytes: must be at least 1"),
        (
            f"memory:?bytes={2**64}",
            f"the memory pool has {2**64} bytes: must have at most [0-9]+ on this machine",
        ),
        (5, "url is of type int"),
    ],
)
async def test_a_wrong_url(url: Any, match: str) -> None:
    with pytest.raises(EmsInvalidArgument, match=match):
        await open_pool(url)


async def test_an_engine_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("redis", "mooncake"):
        monkeypatch.setitem(__import__("sys").modules, f"aiodatadist._context_caching.pools.{name}.pool", None)
        with pytest.raises(EmsInvalidArgument, match=rf"pip install '\.\[{name}\]' in a clone"):
            await ContextCache.open(rank(), f"{name}://127.0.0.1:1")


# ---- the same, as EMS has it ----


@pytest.fixture
def v1() -> Iterator[ContextCache_v1]:
    Ems.init(EmsConfig(cc_config_v1=rank()))
    try:
        cc = Ems.get_cc()
        assert isinstance(cc, ContextCache_v1)
        yield cc
    finally:
        Ems.shutdown()


@pytest.fixture
def v0() -> Iterator[ContextCaching]:
    Ems.init(EmsConfig(cc_config=CcConfig(0, 0, "model")))
    try:
        cc = Ems.get_cc()
        assert isinstance(cc, ContextCaching)
        yield cc
    finally:
        Ems.shutdown()


def test_emss_v1_calls_refuse_the_same(v1: ContextCache_v1) -> None:
    with pytest.raises(EmsInvalidArgument, match="no KV cache is registered"):
        v1.save([0], [1], [1])
    v1.register_kvcache(Kv().layers)
    for words, match in WRONG:
        for call in (v1.save, v1.load, v1.async_save, v1.async_load):
            with refused(match):
                call(**v1_words(words))
    for call in (v1.save, v1.load, v1.async_save, v1.async_load):
        for option in (None, 5, CcKvOption):
            with pytest.raises(EmsInvalidArgument, match="option is"):
                call([0], [1], [1], option)  # type: ignore[arg-type]
        with pytest.raises(EmsInvalidArgument, match="token_ids is no longer accepted"):
            call(hashes=[1], token_ids=[1])
        with pytest.raises(EmsInvalidArgument, match="chunks_desc is not an argument"):
            call(hashes=[1], chunks_desc=[])
        with pytest.raises(EmsInvalidArgument, match="hashes is empty"):
            call([0], None, [1])
    for future in (None, 5):
        for ask in (v1.is_ready, v1.get_result):
            with pytest.raises(EmsInvalidArgument, match="ccfuture is"):
                ask(future)  # type: ignore[arg-type]
    with pytest.raises(EmsInvalidArgument, match="option is None"):
        v1.exists([1], None)  # type: ignore[arg-type]
    with pytest.raises(EmsInvalidArgument, match="hashes is empty"):
        v1.exists([])


def test_emss_v0_calls_refuse_the_same(v0: ContextCaching) -> None:
    for call in (v0.save, v0.load, v0.async_save, v0.async_load):
        for keys, buffers, match in V0:
            with refused(match):
                call(CcKvOption(), keys, buffers)
        for option in (None, 5):
            with pytest.raises(EmsInvalidArgument, match="option is"):
                call(option, ["a"], [ONE])  # type: ignore[arg-type]


def test_what_can_be_said_in_two_ways_is_the_same(v1: ContextCache_v1) -> None:
    kv = Kv()
    v1.register_kvcache(kv.layers)
    assert v1.save(list(range(BLOCK)), [1], [BLOCK]).success == 1
    assert v1.load(hashes=[1], chunk_descs=[[(8, BLOCK)]]).success == 1
    assert kv.rows(range(BLOCK)) == kv.rows(range(8, 8 + BLOCK))
    assert isinstance(rank(), CcConfig_v1)


async def test_values_without_room_are_said(caplog: pytest.LogCaptureFixture) -> None:
    async with opened("memory:?bytes=4096", Kv()) as cache:
        result = await cache.save([1, 2], slots=range(64), offsets=[32, 32])
        assert result.details == (CcStatus.REJECTED,) * 2
        assert "no room in the memory pool for 2 of 2 values" in caplog.text
