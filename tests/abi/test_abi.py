"""The gate holds on the real headers, and it would notice: every altered declaration is reported by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from . import SOURCES, CannotCheck, compiler, vendor_headers
from .changes import CHANGES, Change
from .check import check
from .findings import Status
from .test_internal import PARAMETERS

if TYPE_CHECKING:
    from .vendor_headers import HeaderSet

REQUIRED = "AIODATADIST_REQUIRE_ABI"  # `make abi` sets it to 1


def stop(reason: CannotCheck) -> NoReturn:
    """Skip, unless the caller asked for the check: then not being able to check is a failure."""
    if os.environ.get(REQUIRED) == "1" or vendor_headers.VARIABLE in os.environ:
        pytest.fail(str(reason))
    pytest.skip(f"{reason} (`make abi` runs this check)")


@pytest.fixture(scope="session")
def headers() -> HeaderSet:
    try:
        compiler.require()
        return vendor_headers.locate()
    except CannotCheck as reason:
        stop(reason)


def test_every_declaration_is_what_the_vendor_headers_say(headers: HeaderSet) -> None:
    report = check(SOURCES, headers)
    assert report.failures == [], str(report)
    assert report.names(Status.IDENTICAL)


def test_the_pinned_wheel_has_all_but_the_one_sided_family(headers: HeaderSet) -> None:
    if not vendor_headers.is_pinned(headers.include[0]):
        pytest.skip(f"{vendor_headers.VARIABLE} names other headers than those of {vendor_headers.REQUIREMENT}")
    report = check(SOURCES, headers)
    assert report.names(Status.EQUIVALENT) == []
    assert report.count("functions") == {Status.IDENTICAL: 130, Status.HIDDEN: 14}
    assert report.count("structs") == {Status.IDENTICAL: 9, Status.HIDDEN: 5}
    assert report.names(Status.HIDDEN) == HIDDEN_FUNCTIONS
    for name in HIDDEN_FUNCTIONS:
        assert name in str(report), "what was not checked must be said"


HIDDEN_FUNCTIONS = [
    "HcclRegisterMem",
    "HcclDeregisterMem",
    "HcclExchangeMemDesc",
    "HcclEnableMemAccess",
    "HcclDisableMemAccess",
    "HcclBatchPut",
    "HcclBatchGet",
    "HcclRemapRegistedMemory",
    "HcclRegisterGlobalMem",
    "HcclDeregisterGlobalMem",
    "HcclCommBindMem",
    "HcclCommUnbindMem",
    "HcclCommPrepare",
    "HcclCommInitClusterInfoMemConfig",
]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_an_altered_declaration_is_reported_by_name(change: Change, headers: HeaderSet, tmp_path: Path) -> None:
    failures = check(altered(change, tmp_path), headers).failures
    assert (change.name, change.status) in [(finding.declaration.name, finding.status) for finding in failures]


def test_another_spelling_of_one_type_is_told_apart_and_passes(headers: HeaderSet, tmp_path: Path) -> None:
    change = Change("aclFinalizeReference(uint64_t *", "aclFinalizeReference(unsigned long long *", "")
    report = check(altered(change, tmp_path), headers)
    assert report.names(Status.EQUIVALENT) == ["aclFinalizeReference"]
    assert report.failures == []


def test_a_later_symbol_may_be_absent_only_from_headers_known_to_be_older(headers: HeaderSet, tmp_path: Path) -> None:
    sources = altered(Change("aclrtMemcpyBatchV2(", "aclrtMemcpyBatchV9(", ""), tmp_path)
    assert check(sources, headers, (9, 0)).names(Status.LATER) == ["aclrtMemcpyBatchV9"]
    assert check(sources, headers, (9, 1)).names(Status.MISSING) == ["aclrtMemcpyBatchV9"]
    assert check(sources, headers).names(Status.MISSING) == ["aclrtMemcpyBatchV9"]


def test_a_failure_says_what_both_sides_have(headers: HeaderSet, tmp_path: Path) -> None:
    sources = altered(Change("HCCL_RECV = 1", "HCCL_RECV = 7", ""), tmp_path)
    assert list(map(str, check(sources, headers).failures)) == [
        "constant HCCL_RECV: different (value: the headers have 1, we declare 7)"
    ]


ONE_SIDED_HEADER = """
#pragma once
#include <stdint.h>
typedef enum { COMM_MEM_TYPE_INVALID = -1, COMM_MEM_TYPE_DEVICE = 0, COMM_MEM_TYPE_HOST = 1 } CommMemType;
typedef struct { CommMemType type; void *addr; uint64_t size; } CommMem;
typedef struct { char desc[512]; } HcclMemDesc;
typedef struct { HcclMemDesc *array; uint32_t arrayLength; } HcclMemDescs;
typedef struct { void *localAddr; void *remoteAddr; uint64_t count; HcclDataType dataType; } HcclOneSideOpDesc;
typedef enum { HCCL_TOPO_FULLMESH = 0, HCCL_TOPO_NUM } HcclTopoType;
typedef struct { HcclTopoType topoType; uint64_t rsvd0; uint64_t rsvd1; uint64_t rsvd2; } HcclPrepareConfig;
"""
"""Of what the vendor's header has, as we wrote it down; its functions are added from ``test_internal``."""


@pytest.fixture
def one_sided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: HeaderSet) -> Path:
    """Provide a stand-in for the vendor's header of the one-sided family, where HCOMM_INCLUDE names it."""
    names = [name for name in PARAMETERS if name != "HcclCommInitClusterInfoMemConfig"]
    functions = "".join(f'extern "C" HcclResult {name}({PARAMETERS[name]});\n' for name in names)
    header = tmp_path / vendor_headers.ONE_SIDED
    header.parent.mkdir()
    header.write_text(ONE_SIDED_HEADER + functions, encoding="utf-8")
    monkeypatch.setenv(vendor_headers.ONE_SIDED_VARIABLE, str(tmp_path))
    return header


def test_with_its_header_at_hand_the_one_sided_family_is_checked_too(one_sided: Path) -> None:
    report = check(SOURCES, vendor_headers.locate())
    assert report.failures == [], str(report)
    assert report.names(Status.HIDDEN) == ["HcclCommInitClusterInfoMemConfig"]
    assert "143 of 144 functions are as the headers declare them" in str(report)


def test_a_change_of_the_one_sided_family_is_found(one_sided: Path) -> None:
    text = one_sided.read_text(encoding="utf-8")
    one_sided.write_text(
        text.replace("uint32_t descNum, aclrtStream", "uint64_t descNum, aclrtStream"), encoding="utf-8"
    )
    found = check(SOURCES, vendor_headers.locate()).failures
    assert [finding.declaration.name for finding in found] == ["HcclBatchPut", "HcclBatchGet"]


def test_a_folder_without_the_header_cannot_be_checked(one_sided: Path) -> None:
    one_sided.unlink()
    with pytest.raises(CannotCheck, match="HCOMM_INCLUDE"):
        vendor_headers.locate()


def altered(change: Change, folder: Path) -> list[Path]:
    copies = [Path(shutil.copy(path, folder)) for path in SOURCES]
    before = {path: path.read_text(encoding="utf-8") for path in copies}
    assert sum(text.count(change.old) for text in before.values()) == 1, f"{change.old!r} must stand once"
    for path, text in before.items():
        path.write_text(text.replace(change.old, change.new), encoding="utf-8")
    return copies
