"""Numbers that Python writes out are those of the headers; a header's number means one exception."""

from __future__ import annotations

import runpy
from itertools import combinations
from pathlib import Path
from typing import Any

import cffi
import pytest

from aiodatadist import (
    DeviceError,
    FeatureNotEnabled,
    LLMException,
    LLMStatusCode,
    OutOfMemory,
    ParamInvalid,
    Placement,
    StuckError,
    TransferError,
    TransferTimeout,
)
from aiodatadist._device import CopyKind, TransferState, memory, stream
from aiodatadist._native import runtime
from aiodatadist._native.library import ffi
from aiodatadist._native.runtime import acl_error, completion_error, hccl_error
from aiodatadist._transport import blob_exchange, communicator, hccl, registrations

NATIVE = Path(__file__).resolve().parents[3] / "native"
cdef_source = runpy.run_path(str(NATIVE / "declare.py"))["cdef_source"]


def declared() -> tuple[cffi.FFI, Any]:
    """Read the headers of the repository into a fresh FFI, and return it with their numbers."""
    fresh = cffi.FFI()
    fresh.cdef(cdef_source(*(NATIVE / name for name in ("acl.h", "hccl.h", "ring.h", "softnpu/softnpu.h"))))
    return fresh, fresh.dlopen(None)


HEADERS, C = declared()
ACL_CODES = [name for name in dir(C) if name.startswith("ACL_ERROR_")]
HCCL_CODES = [name for name in dir(C) if name.startswith("HCCL_E_")]


def completion(**values: Any) -> Any:
    made = ffi.new("ring_completion *")
    for name, value in values.items():
        setattr(made, name, value)
    return made


# ---- numbers that are written out ----


def test_copy_kinds_are_the_runtimes() -> None:
    assert [(kind.value, f"ACL_MEMCPY_{kind.name}") for kind in CopyKind] == [
        (getattr(C, f"ACL_MEMCPY_{kind.name}"), f"ACL_MEMCPY_{kind.name}") for kind in CopyKind
    ]


@pytest.mark.parametrize("source", Placement)
@pytest.mark.parametrize("target", Placement)
def test_copy_kind_follows_from_the_placements(source: Placement, target: Placement) -> None:
    assert CopyKind(2 * source + target).name == f"{source.name}_TO_{target.name}"


def test_memory_types_are_hccls() -> None:
    assert registrations.MEM_TYPES == {
        Placement.DEVICE: C.COMM_MEM_TYPE_DEVICE,
        Placement.HOST: C.COMM_MEM_TYPE_HOST,
    }


def test_allocation_policy_is_the_runtimes() -> None:
    assert memory.HUGE_FIRST == C.ACL_MEM_MALLOC_HUGE_FIRST


def test_communicator_configuration_is_hccls() -> None:
    assert HEADERS.sizeof("HcclCommConfig") == communicator.CONFIG_BYTES
    assert communicator.CONFIG_MAGIC == C.HCCL_COMM_CONFIG_MAGIC_WORD
    assert hccl.BUFFER_MIB == C.HCCL_COMM_DEFAULT_BUFFSIZE
    assert {communicator.NOT_SET} == {
        C.HCCL_COMM_TRAFFIC_CLASS_CONFIG_NOT_SET,
        C.HCCL_COMM_SERVICE_LEVEL_CONFIG_NOT_SET,
    }


def test_a_blob_and_its_ranks_fill_a_descriptor_of_hccls() -> None:
    assert blob_exchange.RANKS.size + blob_exchange.BLOB + 1 == HEADERS.sizeof("HcclMemDesc")


def test_status_codes_that_pass_through_are_the_runtimes() -> None:
    assert LLMStatusCode.LLM_DEVICE_MEM_ERROR == C.ACL_ERROR_RT_DEVICE_MEM_ERROR
    assert LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR == C.ACL_ERROR_RT_SUSPECT_REMOTE_ERROR


def test_every_end_of_a_program_is_an_end_of_a_transfer() -> None:
    ends = {
        name: getattr(C, f"RING_{name}") for name in ("DONE", "FAILED", "CANCELLED", "TIMED_OUT", "STUCK", "REFUSED")
    }
    assert set(stream.STATES) == set(ends.values())
    assert TransferState.PENDING not in stream.STATES.values()
    assert stream.STATES[ends["STUCK"]] is TransferState.STUCK


# ---- the tables of codes ----


def test_no_code_is_in_two_groups() -> None:
    groups = (runtime.ACL_TIMEOUTS, runtime.ACL_OUT_OF_MEMORY, runtime.ACL_BAD_ARGUMENT, runtime.ACL_UNSUPPORTED)
    assert all(a.isdisjoint(b) for a, b in combinations(groups, 2))


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        (507046, TransferTimeout, LLMStatusCode.LLM_TIMEOUT),
        (507047, TransferTimeout, LLMStatusCode.LLM_TIMEOUT),
        (107019, TransferTimeout, LLMStatusCode.LLM_TIMEOUT),
        (107020, TransferTimeout, LLMStatusCode.LLM_TIMEOUT),
        (207001, OutOfMemory, LLMStatusCode.LLM_OUT_OF_MEMORY),
        (207018, OutOfMemory, LLMStatusCode.LLM_OUT_OF_MEMORY),
        (200000, OutOfMemory, LLMStatusCode.LLM_OUT_OF_MEMORY),
        (100000, ParamInvalid, LLMStatusCode.LLM_PARAM_INVALID),
        (107000, ParamInvalid, LLMStatusCode.LLM_PARAM_INVALID),
        (107001, ParamInvalid, LLMStatusCode.LLM_PARAM_INVALID),
        (107017, ParamInvalid, LLMStatusCode.LLM_PARAM_INVALID),
        (200001, FeatureNotEnabled, LLMStatusCode.LLM_FEATURE_NOT_ENABLED),
        (207000, FeatureNotEnabled, LLMStatusCode.LLM_FEATURE_NOT_ENABLED),
        (507053, TransferError, LLMStatusCode.LLM_DEVICE_MEM_ERROR),
        (507057, TransferError, LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR),
        (507899, DeviceError, LLMStatusCode.LLM_FAILED),
        (123456, DeviceError, LLMStatusCode.LLM_FAILED),
    ],
)
def test_code_of_the_runtime_is_one_exception(code: int, kind: type[LLMException], status: LLMStatusCode) -> None:
    error = acl_error("aclrtMalloc", code, "no room")
    assert type(error) is kind
    assert error.status_code is status
    assert f"aclrtMalloc returned {code}: no room" in str(error)


@pytest.mark.parametrize(
    ("name", "kind", "status"),
    [
        ("HCCL_E_PARA", ParamInvalid, LLMStatusCode.LLM_PARAM_INVALID),
        ("HCCL_E_TIMEOUT", TransferTimeout, LLMStatusCode.LLM_TIMEOUT),
        ("HCCL_E_MEMORY", OutOfMemory, LLMStatusCode.LLM_OUT_OF_MEMORY),
        ("HCCL_E_NOT_SUPPORT", FeatureNotEnabled, LLMStatusCode.LLM_FEATURE_NOT_ENABLED),
        ("HCCL_E_REMOTE", TransferError, LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR),
        ("HCCL_E_ROCE_TRANSFER", TransferError, LLMStatusCode.LLM_FAILED),
        ("HCCL_E_OOM", TransferError, LLMStatusCode.LLM_FAILED),
    ],
)
def test_code_of_hccl_is_one_exception(name: str, kind: type[LLMException], status: LLMStatusCode) -> None:
    error = hccl_error("HcclBatchGet", getattr(C, name), "")
    assert type(error) is kind
    assert error.status_code is status


@pytest.mark.parametrize("name", HCCL_CODES)
def test_every_code_of_hccl_is_called_by_its_name(name: str) -> None:
    code = getattr(C, name)
    assert f"HcclBatchGet returned {code} ({name})" in str(hccl_error("HcclBatchGet", code, ""))


@pytest.mark.parametrize("name", ACL_CODES)
def test_every_code_of_the_runtime_is_a_failure(name: str) -> None:
    assert acl_error("call", getattr(C, name), "").status_code is not LLMStatusCode.LLM_SUCCESS


def test_headers_were_read() -> None:
    assert len(ACL_CODES) > 40
    assert len(HCCL_CODES) == 24


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        (
            {"state": C.RING_TIMED_OUT, "started_ns": 10**9, "finished_ns": 3 * 10**9, "bytes": 5},
            TransferTimeout,
            "stopped after 2.000 s with 5 bytes landed",
        ),
        ({"state": C.RING_STUCK}, StuckError, "did not let go"),
        (
            {"state": C.RING_FAILED, "origin": C.RING_HCCL, "code": 9, "step": 3},
            TransferTimeout,
            "step 3 of the transfer returned 9 (HCCL_E_TIMEOUT)",
        ),
        (
            {"state": C.RING_FAILED, "origin": C.RING_ACL, "code": 507899, "message": b"broken"},
            DeviceError,
            "step 0 of the transfer returned 507899: broken",
        ),
        (
            {"state": C.RING_FAILED, "origin": C.RING_WORK, "code": 507057, "step": 1},
            TransferError,
            "waiting for step 1 of the transfer, or for other work in the same device context, returned 507057",
        ),
        (
            {"state": C.RING_STUCK, "abort_code": 207000, "message": b"not here"},
            StuckError,
            "aclrtStreamAbort returned 207000 (this chip cannot abort a stream; A2, A3 and 950 can): not here",
        ),
        ({"state": C.RING_STUCK, "abort_code": 507899}, StuckError, "aclrtStreamAbort returned 507899"),
    ],
)
def test_completion_that_is_not_done_says_why(values: dict[str, Any], kind: type[LLMException], words: str) -> None:
    error = completion_error(completion(**values))
    assert type(error) is kind
    assert words in str(error)
