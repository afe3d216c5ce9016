"""Tensors in and out: every way to say where memory is, every rule it has to keep, and views that keep it alive."""

from __future__ import annotations

import array
import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiodatadist import CacheDesc, DataType, DeviceError, FeatureNotEnabled, LLMStatusCode, ParamInvalid, Placement
from aiodatadist._device.tensors import Span, as_arrays, as_tensors, npu_tensors, spans

HOST, DEVICE = Placement.HOST, Placement.DEVICE
NAMES = {
    DataType.DT_FLOAT: "float32",
    DataType.DT_FLOAT16: "float16",
    DataType.DT_INT8: "int8",
    DataType.DT_INT32: "int32",
    DataType.DT_UINT8: "uint8",
    DataType.DT_INT16: "int16",
    DataType.DT_UINT16: "uint16",
    DataType.DT_UINT32: "uint32",
    DataType.DT_INT64: "int64",
    DataType.DT_UINT64: "uint64",
    DataType.DT_DOUBLE: "float64",
    DataType.DT_BOOL: "bool",
}
"""The types that numpy and torch both have."""

LETTERS = {
    DataType.DT_FLOAT: "f",
    DataType.DT_INT8: "b",
    DataType.DT_INT32: "i",
    DataType.DT_UINT8: "B",
    DataType.DT_INT16: "h",
    DataType.DT_UINT16: "H",
    DataType.DT_UINT32: "I",
    DataType.DT_INT64: "q",
    DataType.DT_UINT64: "L",
    DataType.DT_DOUBLE: "d",
}


def desc_of(
    num_tensors: int = 1, data_type: DataType = DataType.DT_FLOAT16, placement: Placement = HOST, shape: Any = (4, 8)
) -> CacheDesc:
    """Tensors of 4 x 8 elements: 64 bytes each with two bytes an element."""
    return CacheDesc(num_tensors, shape, data_type, placement)


def take(value: Any, desc: CacheDesc | None = None, **options: Any) -> Span:
    """Return the span of one tensor."""
    (span,) = spans([value], "tensors", desc or desc_of(), **options)
    return span


def refused(value: Any, words: str, desc: CacheDesc | None = None, **options: Any) -> None:
    with pytest.raises(ParamInvalid) as caught:
        take(value, desc, **options)
    assert words in str(caught.value)
    assert "tensors[0]" in str(caught.value)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


class Named:
    """A dtype, which is nothing but what it is called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


class FakeTensor:
    """A stand-in for a torch tensor, with the attributes that ``spans`` reads."""

    def __init__(
        self,
        address: int = 4096,
        dtype: str = "float16",
        device: str = "npu",
        layout: str = "torch.strided",
        numel: int = 32,
        element_size: int = 2,
        contiguous: bool = True,
    ) -> None:
        self.address = address
        self.dtype = Named(f"torch.{dtype}")
        self.device = SimpleNamespace(type=device, index=0)
        self.layout = Named(layout)
        self._numel, self._element_size, self._contiguous = numel, element_size, contiguous

    def data_ptr(self) -> int:
        if self.device.type == "meta" or self.layout.name != "torch.strided":
            raise AssertionError("never asked")
        return self.address

    def is_contiguous(self) -> bool:
        return self._contiguous

    def numel(self) -> int:
        return self._numel

    def element_size(self) -> int:
        return self._element_size


class TensorWithoutMemory(FakeTensor):
    def data_ptr(self) -> int:
        raise RuntimeError("Cannot access data pointer")


# ---- addresses ----


def test_an_address_is_taken_as_it_is_with_nothing_to_keep() -> None:
    assert spans([4096, 8192], "addrs", desc_of(2)) == [Span(4096, None, None), Span(8192, None, None)]
    assert spans((4096,), "addrs", desc_of()) == [Span(4096, None, None)]


def test_placement_says_nothing_about_an_address() -> None:
    assert take(4096, desc_of(placement=DEVICE)).address == 4096


def test_the_last_tensor_of_the_address_space_is_fine() -> None:
    assert take(2**64 - 64).address == 2**64 - 64


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (None, TypeError, "addrs is of type NoneType: must be a list or tuple"),
        ({4096, 8192}, TypeError, "addrs is of type set"),
        (np.zeros((2, 32), np.float16), TypeError, "addrs is of type ndarray"),
        ([], ParamInvalid, "addrs has 0 entries for 2 tensors: must have one for each, and at least 1"),
        ([4096], ParamInvalid, "addrs has 1 entries for 2 tensors"),
        ([4096, 8192, 16384], ParamInvalid, "addrs has 3 entries for 2 tensors"),
        (
            [4096, True],
            TypeError,
            "addrs[1] is True of type bool: must be an address (int), a numpy array, a torch",
        ),
        ([4096, 1.5], TypeError, "addrs[1] is 1.5 of type float"),
        ([4096, "8192"], TypeError, "addrs[1] is '8192' of type str"),
        ([4096, None], TypeError, "addrs[1] is None of type NoneType"),
        ([4096, [8192]], TypeError, "addrs[1] is [8192] of type list"),
        ([4096, np.int64(8192)], TypeError, "addrs[1] is np.int64(8192) of type int64"),
        ([4096, np.ndarray], TypeError, "of type type"),
        ([None], TypeError, "addrs[0] is None"),
        ([4096, -1], ValueError, "addrs[1] is -1: the uint64 range is 0 to 18446744073709551615"),
        ([4096, 2**64], ValueError, "addrs[1] is 18446744073709551616"),
        ([4096, 0], ParamInvalid, "addrs[1] is 0: no tensor starts there"),
        (
            [4096, 2**64 - 63],
            ParamInvalid,
            "addrs[1] is 0xffffffffffffffc1: 64 bytes from there leave the address space",
        ),
        ([4096, 4096], ParamInvalid, "addrs[1] at 0x1000 overlaps addrs[0] at 0x1000"),
        (
            [4096, 4159],
            ParamInvalid,
            "addrs[1] at 0x103f overlaps addrs[0] at 0x1000: tensors of 64 bytes must not overlap",
        ),
        ([4159, 4096], ParamInvalid, "addrs[0] at 0x103f overlaps addrs[1] at 0x1000"),
    ],
)
def test_wrong_addresses_are_refused_with_index_and_value(values: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        spans(values, "addrs", desc_of(2))
    assert words in str(caught.value)


def test_neighbours_are_apart() -> None:
    assert [span.address for span in spans([4160, 4096], "addrs", desc_of(2))] == [4160, 4096]


def test_a_cache_without_tensors_has_no_spans() -> None:
    with pytest.raises(ParamInvalid, match="addrs has 0 entries for 0 tensors"):
        spans([], "addrs", desc_of(0))


# ---- numpy arrays ----


@pytest.mark.parametrize("data_type", NAMES)
def test_an_array_of_the_caches_type_is_taken_and_kept(data_type: DataType) -> None:
    values = np.zeros((4, 8), NAMES[data_type])
    span = take(values, desc_of(data_type=data_type))
    assert (span.address, span.nbytes) == (values.ctypes.data, values.nbytes)
    assert span.keep is values


def test_the_shape_of_an_array_is_free() -> None:
    assert take(np.zeros(32, np.float16)).nbytes == 64


def test_bfloat16_comes_as_uint16() -> None:
    assert take(np.zeros(32, np.uint16), desc_of(data_type=DataType.DT_BF16)).nbytes == 64


def test_bfloat16_comes_as_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert take(np.zeros(32, ml_dtypes.bfloat16), desc_of(data_type=DataType.DT_BF16)).nbytes == 64
    refused(np.zeros(32, ml_dtypes.bfloat16), "elements of bfloat16: the cache has DT_FLOAT16")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((8, 4), np.float16).T, "has strides (2, 8): must be C-contiguous"),
        (np.zeros((4, 16), np.float16)[:, ::2], "must be C-contiguous"),
        (np.broadcast_to(np.float16(0), (4, 8)), "must be C-contiguous"),
        (np.frombuffer(bytes(64), np.float16), "is a read-only ndarray: must be writable"),
        (np.zeros(32, np.int16), "has elements of int16: the cache has DT_FLOAT16"),
        (np.zeros(32, np.uint16), "has elements of uint16: the cache has DT_FLOAT16"),
        (np.zeros(64, np.uint8), "has elements of uint8: the cache has DT_FLOAT16"),
        (np.zeros(32, ">f2"), "has elements of >f2: the cache has DT_FLOAT16"),
        (np.zeros(32, "V2"), "the cache has DT_FLOAT16"),
        (
            np.zeros(31, np.float16),
            "has 62 bytes: each tensor of CacheDesc(1, [4, 8], DT_FLOAT16, Placement.HOST) has 64",
        ),
        (np.zeros(33, np.float16), "has 66 bytes"),
        (np.zeros(0, np.float16), "has 0 bytes"),
    ],
)
def test_wrong_array_is_refused_with_value_and_rule(value: Any, words: str) -> None:
    refused(value, words)


# ---- other buffers ----


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(64),
        lambda: memoryview(bytearray(64)),
        lambda: memoryview(bytearray(128))[64:],
        lambda: array.array("B", bytes(64)),
        ctypes.c_char * 64,
        ctypes.c_ubyte * 64,
        lambda: np.zeros(64, np.uint8).data,
        lambda: np.zeros(32, np.float16).data,
    ],
)
def test_plain_bytes_fit_every_type_and_a_typed_buffer_its_own(make: Callable[[], Any]) -> None:
    value = make()
    span = take(value)
    assert span.nbytes == 64
    assert span.address == np.frombuffer(value, np.uint8).ctypes.data
    assert isinstance(span.keep, memoryview)


@pytest.mark.parametrize("data_type", LETTERS)
def test_a_buffers_letter_is_its_type(data_type: DataType) -> None:
    desc = desc_of(data_type=data_type)
    letter = LETTERS[data_type]
    assert take(array.array(letter, bytes(desc.size)), desc).nbytes == desc.size
    assert take(np.ctypeslib.as_ctypes(np.zeros((4, 8), NAMES[data_type])), desc).nbytes == desc.size


def test_bytes_hold_strings_but_no_array_does() -> None:
    desc = desc_of(data_type=DataType.DT_STRING)
    assert take(bytearray(512), desc).nbytes == 512
    refused(np.zeros(32, "V16"), "the cache has DT_STRING", desc)


def test_bfloat16_fits_a_buffer_of_uint16() -> None:
    assert take(array.array("H", bytes(64)), desc_of(data_type=DataType.DT_BF16)).nbytes == 64


def test_a_bytearray_cannot_be_resized_while_its_span_is_held() -> None:
    values = bytearray(64)
    span = take(values)
    with pytest.raises(BufferError):
        values.append(0)
    del span
    values.append(0)


def test_a_memoryview_that_its_owner_releases_stays_exported() -> None:
    values = bytearray(64)
    view = memoryview(values)
    span = take(view)
    view.release()
    with pytest.raises(BufferError):
        values.append(0)
    assert span.nbytes == 64


def test_a_refused_buffer_is_let_go() -> None:
    values = bytearray(63)
    refused(values, "has 63 bytes: each tensor of CacheDesc(1, [4, 8], DT_FLOAT16, Placement.HOST) has 64")
    gc.collect()
    values.append(0)


class BigEndian(ctypes.BigEndianStructure):
    _fields_ = (("word", ctypes.c_uint16),)


def released() -> memoryview:
    view = memoryview(bytearray(64))
    view.release()
    return view


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (bytes(64), "is a read-only bytes: must be writable"),
        (memoryview(bytes(64)), "is a read-only memoryview"),
        (memoryview(bytearray(128))[::2], "has strides (2,): must be C-contiguous"),
        (released(), "is a memoryview that shows no memory"),
        (bytearray(0), "has 0 bytes"),
        (array.array("h", bytes(64)), "has elements of int16: the cache has DT_FLOAT16"),
        (array.array("f", bytes(64)), "has elements of float32"),
        ((BigEndian * 32)(), "the cache has DT_FLOAT16"),
    ],
)
def test_wrong_buffer_is_refused_with_value_and_rule(value: Any, words: str) -> None:
    refused(value, words)


# ---- torch tensors, by what they can do ----


def test_a_tensor_on_npu_is_taken_and_kept() -> None:
    tensor = FakeTensor()
    assert take(tensor, desc_of(placement=DEVICE)) == Span(4096, 64, tensor)


def test_a_tensor_on_cpu_is_memory_of_the_host() -> None:
    assert take(FakeTensor(device="cpu")).nbytes == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "uint16"])
def test_bfloat16_fits_both_names(dtype: str) -> None:
    assert take(FakeTensor(device="cpu", dtype=dtype), desc_of(data_type=DataType.DT_BF16)).nbytes == 64


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (FakeTensor(device="npu"), "is on npu: a cache of Placement.HOST needs memory of the host"),
        (FakeTensor(device="cuda"), "is on cuda: must be on cpu or npu"),
        (FakeTensor(device="meta"), "is on meta"),
        (
            FakeTensor(device="cpu", layout="torch.sparse_coo"),
            "has the layout torch.sparse_coo: must be torch.strided",
        ),
        (FakeTensor(device="cpu", contiguous=False), "is not contiguous"),
        (FakeTensor(device="cpu", dtype="bfloat16"), "has elements of bfloat16: the cache has DT_FLOAT16"),
        (FakeTensor(device="cpu", numel=31), "has 62 bytes"),
        (FakeTensor(device="cpu", address=0), "is 0: no tensor starts there"),
        (FakeTensor(device="cpu", address=2**64 - 1), "leave the address space"),
        (TensorWithoutMemory(device="cpu"), "is a TensorWithoutMemory without its own memory: Cannot access"),
    ],
)
def test_wrong_tensor_is_refused_with_value_and_rule(tensor: FakeTensor, words: str) -> None:
    refused(tensor, words)


@pytest.mark.parametrize(
    "make", [lambda: FakeTensor(device="cpu"), lambda: np.zeros(32, np.float16), lambda: bytearray(64)]
)
def test_host_memory_is_device_memory_only_where_it_is_adopted(make: Callable[[], Any]) -> None:
    desc = desc_of(placement=DEVICE)
    refused(make(), "is on cpu: a cache of Placement.DEVICE needs memory of the NPU", desc)
    assert take(make(), desc, host_as_device=True).nbytes == 64
    refused(FakeTensor(device="cuda"), "is on cuda", desc, host_as_device=True)


# ---- several at once ----


def test_one_call_mixes_all_kinds() -> None:
    values = [4096, np.zeros(32, np.float16), bytearray(64), FakeTensor(address=8192, device="cpu")]
    found = spans(values, "tensors", desc_of(4))
    assert [span.nbytes for span in found] == [None, 64, 64, 64]
    assert [found[0].address, found[3].address] == [4096, 8192]


def test_tensors_in_one_piece_of_memory_may_touch_but_not_overlap() -> None:
    whole = np.zeros(96, np.float16)
    start = whole.ctypes.data
    touching = spans([whole[32:64], whole[:32], start + 128], "tensors", desc_of(3))
    assert [span.address - start for span in touching] == [64, 0, 128]
    for other in (whole[:32], whole[31:63], whole.data[1:33], start, start + 63):
        with pytest.raises(ParamInvalid, match="overlaps"):
            spans([whole[:32], other], "tensors", desc_of(2))


def test_the_message_names_the_tensor_that_is_wrong() -> None:
    with pytest.raises(ParamInvalid, match=r"kv\[2\] has 32 bytes"):
        spans([4096, bytearray(64), bytearray(32)], "kv", desc_of(3))


def test_wrong_types_come_before_wrong_counts_and_values() -> None:
    with pytest.raises(TypeError, match=r"kv\[2\]"):
        spans([0, bytes(1), None], "kv", desc_of(2))
    with pytest.raises(ParamInvalid, match="kv has 2 entries for 1 tensors"):
        spans([-1, bytes(1)], "kv", desc_of(1))


def test_a_shape_without_elements_is_refused() -> None:
    with pytest.raises(ParamInvalid, match="all above 0"):
        take(4096, desc_of(shape=(4, 0)))


# ---- arrays over memory ----


class Block:
    """Memory that says whether a view of it is left."""

    def __init__(self, nbytes: int) -> None:
        block = (ctypes.c_char * nbytes)()
        self.view = memoryview(block).cast("B")
        self.alive = weakref.ref(block)


@pytest.mark.parametrize("data_type", NAMES)
def test_arrays_are_views_of_the_caches_type_and_shape(data_type: DataType) -> None:
    desc = desc_of(2, data_type)
    view = memoryview(bytearray(2 * desc.size + 64))
    first, second = as_arrays(view, desc, [desc.size + 64, 0])
    assert (first.shape, first.dtype) == ((4, 8), np.dtype(NAMES[data_type]))
    second[:] = 1
    assert bytes(view[: desc.size]) == second.tobytes()
    assert not any(view[desc.size :])
    view[desc.size + 64 : desc.size + 64 + first.itemsize] = second[0, 0].tobytes()
    assert first[0, 0] == 1


def test_arrays_of_bfloat16_are_its_bits() -> None:
    (found,) = as_arrays(memoryview(bytearray(64)), desc_of(data_type=DataType.DT_BF16), [0])
    assert found.dtype == np.uint16


def test_arrays_come_back_as_tensors() -> None:
    desc = desc_of(2)
    view = memoryview(bytearray(192))
    start = np.frombuffer(view, np.uint8).ctypes.data
    found = spans(as_arrays(view, desc, (128, 0)), "tensors", desc)
    assert [span.address - start for span in found] == [128, 0]


def test_arrays_keep_the_memory_alive() -> None:
    block = Block(64)
    found = as_arrays(block.view, desc_of(), [0])
    block.view.release()
    gc.collect()
    found[0][0, 0] = 2
    assert block.alive() is not None
    found.clear()
    gc.collect()
    assert block.alive() is None


@pytest.mark.parametrize("make", [as_arrays, as_tensors])
@pytest.mark.parametrize(
    ("view", "data_type", "offsets", "error", "words"),
    [
        (bytearray(64), DataType.DT_FLOAT16, [0], TypeError, "must be memoryview"),
        (memoryview(bytes(64)), DataType.DT_FLOAT16, [0], ParamInvalid, "must be writable"),
        (memoryview(bytearray(128))[::2], DataType.DT_FLOAT16, [0], ParamInvalid, "in one piece"),
        (memoryview(bytearray(64)), DataType.DT_STRING, [0], ParamInvalid, "data_type is DT_STRING"),
        (memoryview(bytearray(64)), DataType.DT_FLOAT16, [1], ParamInvalid, "offsets[0] is 1: 64 bytes from there"),
        (memoryview(bytearray(64)), DataType.DT_FLOAT16, [0, -1], ParamInvalid, "offsets[1] is -1"),
        (memoryview(bytearray(63)), DataType.DT_FLOAT16, [0], ParamInvalid, "are not within the view's 63"),
        (memoryview(bytearray(64)), DataType.DT_FLOAT16, ["0"], TypeError, "offsets[0] is '0'"),
        (memoryview(bytearray(64)), DataType.DT_FLOAT16, None, TypeError, "offsets is of type NoneType"),
    ],
)
def test_views_stay_within_writable_memory(
    make: Callable[..., Any], view: Any, data_type: DataType, offsets: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        make(view, desc_of(data_type=data_type), offsets)
    assert words in str(caught.value)


# ---- without the packages ----


def test_the_module_imports_neither_numpy_nor_torch() -> None:
    heavy = "{'numpy', 'torch', 'torch_npu', 'torchair'}"
    program = f"import sys, aiodatadist._device.tensors; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("missing", "package", "call"),
    [
        ("numpy", "numpy", lambda: as_arrays(memoryview(bytearray(64)), desc_of(), [0])),
        ("torch", "torch", lambda: as_tensors(memoryview(bytearray(64)), desc_of(), [0])),
        ("torch", "torch", lambda: npu_tensors(desc_of(placement=DEVICE), [4096])),
        ("torch_npu", "torch-npu", lambda: npu_tensors(desc_of(placement=DEVICE), [4096])),
        ("torchair", "torch-npu", lambda: npu_tensors(desc_of(placement=DEVICE), [4096])),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: str, package: str, call: Callable[[], object]
) -> None:
    for name in {"torch", "torch_npu", "torchair"} - {missing}:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(FeatureNotEnabled) as caught:
        call()
    method = "arrays" if missing == "numpy" else "tensors"
    assert f"{method}() needs {missing}, which cannot be imported" in str(caught.value)
    assert caught.value.hint == f"pip install {package}"


def test_torch_without_uint16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.1.0"))
    with pytest.raises(FeatureNotEnabled, match=r"torch 2\.1\.0 has no uint16"):
        as_tensors(memoryview(bytearray(64)), desc_of(data_type=DataType.DT_UINT16), [0])


# ---- tensors on npu, with stand-ins for torch and torchair ----


class Torchair:
    """Takes the call as torchair's ``create_npu_tensors`` does, and makes what it was asked for."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem

    def create_npu_tensors(self, shape: list[int], dtype: str, addresses: list[int]) -> list[Any]:
        if self.problem is not None:
            raise self.problem
        return [(shape, dtype, address) for address in addresses]


def install(monkeypatch: pytest.MonkeyPatch, torchair: object) -> None:
    torch = SimpleNamespace(__version__="2.13.0", float16="torch.float16", bfloat16="torch.bfloat16")
    for name, module in (("torch", torch), ("torch_npu", SimpleNamespace()), ("torchair", torchair)):
        monkeypatch.setitem(sys.modules, name, module)


def test_torchair_is_asked_for_a_tensor_at_each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SimpleNamespace(llm_datadist=Torchair()))
    assert npu_tensors(desc_of(2, DataType.DT_BF16, DEVICE), (4096, 8192)) == [
        ([4, 8], "torch.bfloat16", 4096),
        ([4, 8], "torch.bfloat16", 8192),
    ]


@pytest.mark.parametrize(
    ("desc", "addresses", "error", "words"),
    [
        (desc_of(), [4096], ParamInvalid, "need Placement.DEVICE, not Placement.HOST"),
        (desc_of(data_type=DataType.DT_STRING, placement=DEVICE), [4096], ParamInvalid, "data_type is DT_STRING"),
        (desc_of(placement=DEVICE), None, TypeError, "addresses is of type NoneType"),
        (desc_of(placement=DEVICE), ["4096"], TypeError, "addresses[0] is '4096'"),
        (desc_of(placement=DEVICE), [4096, 2**64], ValueError, "addresses[1] is 18446744073709551616"),
        (desc_of(placement=DEVICE), [4096, 0], ParamInvalid, "addresses[1] is 0: no tensor starts there"),
        (desc_of(placement=DEVICE), [2**64 - 1], ParamInvalid, "leave the address space"),
        (
            desc_of(data_type=DataType.DT_FLOAT, placement=DEVICE),
            [4096],
            FeatureNotEnabled,
            "torch 2.13.0 has no float32",
        ),
    ],
)
def test_wrong_npu_tensors_are_refused_before_torchair_is_asked(
    monkeypatch: pytest.MonkeyPatch, desc: CacheDesc, addresses: Any, error: type[Exception], words: str
) -> None:
    install(monkeypatch, SimpleNamespace(llm_datadist=Torchair(AssertionError("asked"))))
    with pytest.raises(error) as caught:
        npu_tensors(desc, addresses)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("torchair", "error", "words"),
    [
        (SimpleNamespace(), FeatureNotEnabled, "this torchair has no llm_datadist"),
        (
            SimpleNamespace(llm_datadist=Torchair(ValueError("unsupported dtype"))),
            ParamInvalid,
            "CacheDesc(1, [4, 8], DT_FLOAT16, Placement.DEVICE): unsupported dtype",
        ),
        (SimpleNamespace(llm_datadist=Torchair(RuntimeError("returned 1"))), DeviceError, "returned 1"),
    ],
)
def test_what_torchair_says_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, torchair: object, error: type[Exception], words: str
) -> None:
    install(monkeypatch, torchair)
    with pytest.raises(error) as caught:
        npu_tensors(desc_of(placement=DEVICE), [4096])
    assert words in str(caught.value)


# ---- with torch itself; skipped where it is not installed ----


@pytest.fixture(name="torch")
def real_torch() -> Any:
    return pytest.importorskip("torch")


def torch_name(data_type: DataType) -> str:
    return "bfloat16" if data_type is DataType.DT_BF16 else NAMES[data_type]


@pytest.mark.parametrize("data_type", [*NAMES, DataType.DT_BF16])
def test_a_real_tensor_is_taken_and_kept(torch: Any, data_type: DataType) -> None:
    tensor = torch.zeros((4, 8), dtype=getattr(torch, torch_name(data_type)))
    span = take(tensor, desc_of(data_type=data_type))
    assert (span.address, span.nbytes) == (tensor.data_ptr(), 32 * data_type.itemsize)
    assert span.keep is tensor


def test_a_real_parameter_and_a_view_are_tensors(torch: Any) -> None:
    assert take(torch.nn.Parameter(torch.zeros(32, dtype=torch.float16))).nbytes == 64
    whole = torch.zeros((2, 32), dtype=torch.float16)
    assert take(whole[1]).address == whole.data_ptr() + 64


def test_real_tensors_over_one_storage_may_not_overlap(torch: Any) -> None:
    whole = torch.zeros(64, dtype=torch.float16)
    assert len(spans([whole[:32], whole[32:]], "tensors", desc_of(2))) == 2
    with pytest.raises(ParamInvalid, match=r"tensors\[1\] at .* overlaps tensors\[0\]"):
        spans([whole[:32], whole[16:48].numpy()], "tensors", desc_of(2))


def test_wrong_real_tensors_are_refused(torch: Any) -> None:
    half = torch.float16
    refused(torch.zeros((8, 4), dtype=half).T, "is not contiguous")
    refused(torch.zeros(32, dtype=half).to_sparse(), "has the layout torch.sparse_coo")
    refused(torch.zeros(32, dtype=half, device="meta"), "is on meta")
    refused(torch.zeros(32, dtype=torch.bfloat16), "has elements of bfloat16: the cache has DT_FLOAT16")
    refused(torch.zeros(8, dtype=torch.complex64), "has elements of complex64")
    refused(torch.zeros(16, dtype=half), "has 32 bytes")
    refused(torch.zeros(32, dtype=half), "is on cpu", desc_of(placement=DEVICE))
    with pytest.raises(TypeError, match="of type _TensorMeta"):
        take(torch.Tensor)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer:UserWarning")
def test_a_real_tensor_without_memory_is_refused(torch: Any) -> None:
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode():
        tensor = torch.zeros(32, dtype=torch.float16)
    refused(tensor, "tensors[0] is 0: no tensor starts there")


@pytest.mark.parametrize("data_type", [*NAMES, DataType.DT_BF16])
def test_real_tensors_are_views_of_the_caches_type_and_shape(torch: Any, data_type: DataType) -> None:
    desc = desc_of(2, data_type, shape=[4, 8])
    view = memoryview(bytearray(2 * desc.size + 64))
    first, second = as_tensors(view, desc, [desc.size + 64, 0])
    assert (tuple(first.shape), first.dtype) == ((4, 8), getattr(torch, torch_name(data_type)))
    second.fill_(1)
    assert any(view[: desc.size])
    assert not any(view[desc.size :])
    view[desc.size + 64 :] = view[: desc.size]
    assert torch.equal(first, second)


def test_real_tensors_keep_the_memory_alive(torch: Any) -> None:
    block = Block(64)
    found = as_tensors(block.view, desc_of(), [0])
    block.view.release()
    gc.collect()
    found[0].fill_(2)
    assert block.alive() is not None
    found.clear()
    gc.collect()
    assert block.alive() is None


def test_memory_cannot_be_resized_while_a_real_tensor_is_alive(torch: Any) -> None:
    values = bytearray(64)
    view = memoryview(values)
    found = as_tensors(view, desc_of(), [0])
    view.release()
    with pytest.raises(BufferError):
        values.append(0)
    assert found[0].dtype == torch.float16


def test_real_tensors_come_back_as_tensors(torch: Any) -> None:
    desc = desc_of(2)
    made = as_tensors(memoryview(bytearray(128)), desc, [64, 0])
    first, second = spans(made, "tensors", desc)
    assert first.address - second.address == 64
    assert isinstance(first.keep, torch.Tensor)
