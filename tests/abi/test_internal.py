"""Declarations that no header of the vendor's has, compared with a second writing of them.

The one-sided family stands in a package-internal header, one of its functions in none at all, so the wheel's headers
cannot confirm it. The tables below say what the vendor's open-source hcomm releases 8.5.0, 9.0.0 and 9.1.0-beta.1 agree
on (the init function as its private source header has it), on LP64 machines. They keep a slip in native/hccl.h from
passing unseen; they cannot show that the vendor changed something. On a machine with the vendor's toolkit, its
``pkg_inc`` folder can.
"""

from __future__ import annotations

import pytest

from . import SOURCES
from .declarations import Constant, Declaration, Enum, Field, Function, Struct, read_declarations

INTERNAL = {declaration.name: declaration for declaration in read_declarations(*SOURCES) if declaration.tags.hidden}

# struct: (size, {field: (offset, size)})
LAYOUTS = {
    "CommMem": (24, {"type": (0, 4), "addr": (8, 8), "size": (16, 8)}),
    "HcclMemDesc": (512, {"desc": (0, 512)}),
    "HcclMemDescs": (16, {"array": (0, 8), "arrayLength": (8, 4)}),
    "HcclOneSideOpDesc": (32, {"localAddr": (0, 8), "remoteAddr": (8, 8), "count": (16, 8), "dataType": (24, 4)}),
    "HcclPrepareConfig": (32, {"topoType": (0, 4), "rsvd0": (8, 8), "rsvd1": (16, 8), "rsvd2": (24, 8)}),
}

ENUM_SIZES = {"CommMemType": 4, "HcclTopoType": 4}

CONSTANTS = {"COMM_MEM_TYPE_INVALID": -1, "COMM_MEM_TYPE_DEVICE": 0, "COMM_MEM_TYPE_HOST": 1, "HCCL_TOPO_FULLMESH": 0}

# function: its parameters; every one of them returns HcclResult
_ONE_SIDED = "HcclComm comm, uint32_t remoteRank, HcclOneSideOpDesc *desc, uint32_t descNum, aclrtStream stream"
PARAMETERS = {
    "HcclCommInitClusterInfoMemConfig": (
        "const char *rankTableString, uint32_t rank, HcclCommConfig *config, HcclComm *comm"
    ),
    "HcclRegisterGlobalMem": "const CommMem *mem, void **memHandle",
    "HcclDeregisterGlobalMem": "void *memHandle",
    "HcclCommBindMem": "HcclComm comm, void *memHandle",
    "HcclCommUnbindMem": "HcclComm comm, void *memHandle",
    "HcclCommPrepare": "HcclComm comm, const HcclPrepareConfig *prepareConfig, const int timeout",
    "HcclExchangeMemDesc": (
        "HcclComm comm, uint32_t remoteRank, HcclMemDescs *local, int timeout, "
        "HcclMemDescs *remote, uint32_t *actualNum"
    ),
    "HcclBatchPut": _ONE_SIDED,
    "HcclBatchGet": _ONE_SIDED,
    "HcclRemapRegistedMemory": "HcclComm *comm, CommMem *memInfoArray, uint64_t commSize, uint64_t arraySize",
    "HcclRegisterMem": "HcclComm comm, uint32_t remoteRank, int type, void *addr, uint64_t size, HcclMemDesc *desc",
    "HcclDeregisterMem": "HcclComm comm, HcclMemDesc *desc",
    "HcclEnableMemAccess": "HcclComm comm, HcclMemDesc *remoteMemDesc, CommMem *remoteMem",
    "HcclDisableMemAccess": "HcclComm comm, HcclMemDesc *remoteMemDesc",
}


def internal(kind: type[Declaration]) -> set[str]:
    return {name for name, declaration in INTERNAL.items() if isinstance(declaration, kind)}


def test_the_tables_name_all_that_no_vendor_header_can_confirm() -> None:
    assert internal(Function) == set(PARAMETERS)
    assert internal(Struct) == set(LAYOUTS)
    assert internal(Enum) == set(ENUM_SIZES)
    assert internal(Constant) == set(CONSTANTS)


@pytest.mark.parametrize("struct", LAYOUTS)
def test_cffi_lays_out_an_internal_struct_as_the_vendor_does(struct: str) -> None:
    size, fields = LAYOUTS[struct]
    declared = INTERNAL[struct]
    assert isinstance(declared, Struct)
    assert declared.size == size
    layout = {f.member: (f.offset, f.size) for f in INTERNAL.values() if isinstance(f, Field) and f.struct == struct}
    assert layout == fields


@pytest.mark.parametrize("function", PARAMETERS)
def test_an_internal_function_has_its_written_prototype(function: str) -> None:
    declared = INTERNAL[function]
    assert isinstance(declared, Function)
    assert declared.prototype == f"HcclResult {function}({PARAMETERS[function]})"


def test_internal_constants_have_their_written_values() -> None:
    assert {name: c.value for name, c in INTERNAL.items() if isinstance(c, Constant)} == CONSTANTS
    assert {name: e.size for name, e in INTERNAL.items() if isinstance(e, Enum)} == ENUM_SIZES
