"""Tensor: what it takes, what it gives back, and what it refuses. LLMReq: five numbers."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from aiodatadist import DataType, ParamInvalid
from aiodatadist.legacy import LLMReq, Tensor, TensorDesc

TYPES = {"float32": "DT_FLOAT", "float16": "DT_FLOAT16", "int8": "DT_INT8", "int32": "DT_INT32", "uint8": "DT_UINT8",
         "int16": "DT_INT16", "uint16": "DT_UINT16", "uint32": "DT_UINT32", "int64": "DT_INT64", "uint64": "DT_UINT64",
         "float64": "DT_DOUBLE", "bool": "DT_BOOL"}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_an_array_comes_back_as_it_was_and_is_the_tensors_own(name: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(name)
    tensor = Tensor(array)
    assert (tensor.tensor_desc.dtype, tensor.tensor_desc.shape) == (DataType[TYPES[name]], [2, 3])
    seen, copied, clone = tensor.numpy(), tensor.numpy(copy=True), Tensor(tensor)
    want = array.copy()
    array[:] = 0
    assert seen.dtype == np.dtype(name)
    assert (seen == want).all()
    seen[:] = 0
    assert (tensor.numpy() == 0).all(), "without a copy it is the tensor itself"
    for each in (copied, clone.numpy()):
        assert (each == want).all()


def test_bfloat16_is_widened_and_strings_are_copied() -> None:
    bits = np.array([0x3F80, 0xC040], np.uint16)
    tensor = Tensor(bits, TensorDesc(DataType.DT_BF16, [2]))
    assert tensor.numpy().tolist() == [1.0, -3.0]
    assert tensor.numpy().dtype == np.float32
    words = Tensor(np.array(["a", "bc"]))
    assert words.tensor_desc.dtype is DataType.DT_STRING
    assert Tensor(words).numpy(copy=True).tolist() == ["a", "bc"]
    with pytest.raises(RuntimeError, match=r"numpy\(copy=True\)"):
        words.numpy()


def test_an_address_is_looked_at() -> None:
    memory = (ctypes.c_int32 * 4)(1, 2, 3, 4)
    address = ctypes.addressof(memory)
    for tensor in (
        Tensor(address, TensorDesc(DataType.DT_INT32, (2, 2))),
        Tensor.from_tensor_tuple((address, 3, [2, 2])),
    ):
        memory[3] = 9
        assert tensor.numpy().tolist() == [[1, 2], [3, 9]]


@pytest.mark.parametrize(
    ("data", "desc", "error", "words"),
    [
        (np.zeros((2, 3))[:, ::2], None, RuntimeError, "C-contiguous"),
        (np.zeros(2, np.complex64), None, RuntimeError, "no data type stands for"),
        (np.zeros(2, ">f4"), None, RuntimeError, "no data type stands for"),
        (np.zeros(2, np.float32), TensorDesc(DataType.DT_FLOAT, [3]), RuntimeError, r"of shape \[2\]"),
        (np.zeros(2, np.float32), TensorDesc(DataType.DT_INT32, [2]), RuntimeError, "data has DT_FLOAT"),
        ([1, 2], None, TypeError, "type list"),
        (True, None, TypeError, "type bool"),
        (np.zeros(2), "float", TypeError, "TensorDesc"),
        (4096, None, TypeError, "tensor_desc is None"),
        (0, TensorDesc(DataType.DT_INT8, [1]), ParamInvalid, "data is 0"),
        (-1, TensorDesc(DataType.DT_INT8, [1]), ValueError, "-1"),
        (4096, TensorDesc(DataType.DT_STRING, [1]), RuntimeError, "strings come as an array"),
    ],
)
def test_what_is_no_tensor_is_refused(data: Any, desc: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Tensor(data, desc)


def test_a_description_keeps_a_list() -> None:
    desc = TensorDesc(DataType.DT_INT8, (2, 3))
    assert (desc.dtype, desc.shape) == (DataType.DT_INT8, [2, 3])
    with pytest.raises(TypeError):
        TensorDesc(2, [1])  # type: ignore[arg-type]
    with pytest.raises(ParamInvalid, match="below 0"):
        TensorDesc(DataType.DT_INT8, [-1])


def test_the_interface_is_there_without_numpy() -> None:
    code = "import sys; sys.modules['numpy'] = None; from aiodatadist import legacy; legacy.LLMReq()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("name", ["req_id", "prompt_length", "prompt_cluster_id", "decoder_cluster_id", "prefix_id"])
def test_a_request_is_five_numbers(name: str) -> None:
    request = LLMReq()
    assert getattr(request, name) == (2**64 - 1 if name in {"req_id", "prefix_id"} else 0)
    setattr(request, name, 17)
    assert getattr(request, name) == getattr(LLMReq(**{name: 17}), name) == 17
    for wrong, error in ((-1, ValueError), (2**64, ValueError), ("1", TypeError), (None, TypeError)):
        with pytest.raises(error):
            setattr(request, name, wrong)
    assert getattr(request, name) == 17
