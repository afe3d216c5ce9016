"""Declarations and the libraries of our own: read once, when the package is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from cffi import FFI

from aiodatadist._native.cdef import cdef_source

Handle: TypeAlias = Any
"""A vendor handle, or a pointer, as cffi holds it."""

FOLDER = Path(__file__).resolve().parent
"""Where the build puts the headers and our shared libraries."""

ffi: Any = FFI()
ffi.cdef(cdef_source(*(FOLDER / name for name in ("acl.h", "hccl.h", "ring.h", "slots.h", "softnpu.h"))))

# cffi parses a type's name when it is first used, which takes milliseconds: not on the event loop, please.
for _name in (
    "CommMem *", "HcclComm *", "HcclCommConfig *", "HcclPrepareConfig *", "aclrtContext *", "int32_t[3]", "ring **",
    "aclrtNotify *", "aclrtNotify[]", "int64_t[]", "ring_completion *", "ring_completion[]", "ring_driver *", "ring_layers *",
    "ring_options *", "ring_step[]", "slots_class[]", "slots_values *", "softnpu_counters *", "uint16_t[]", "uint32_t *",
    "uint64_t *", "uint64_t[]", "uintptr_t", "void *", "void **",
):  # fmt: skip
    ffi.typeof(_name)

ring: Any = ffi.dlopen(str(FOLDER / "libring.so"))
for _name in (
    "open",
    "submit",
    "cancel",
    "watch",
    "reap",
    "fd",
    "close",
    "free",
    "first_outside",
    "first_unusable",
    "copy",
):
    getattr(ring, f"ring_{_name}")  # the same goes for functions
for _name in ("check", "take", "give", "pieces"):
    getattr(ring, f"slots_{_name}")
SOFTNPU = FOLDER / "libsoftnpu.so"
