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
ffi.cdef(cdef_source(*(FOLDER / name for name in ("acl.h", "hccl.h", "ring.h", "softnpu.h"))))

ring: Any = ffi.dlopen(str(FOLDER / "libring.so"))
SOFTNPU = FOLDER / "libsoftnpu.so"
