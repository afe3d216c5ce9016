"""Declarations and the libraries of our own: opened once, when the package is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from aiodatadist._native import _declarations

Handle: TypeAlias = Any
"""A vendor handle, or a pointer, as cffi holds it."""

FOLDER = Path(__file__).resolve().parent
"""Where the build puts our shared libraries, and the module that cffi makes of the headers."""

ffi: Any = _declarations.ffi
ring: Any = ffi.dlopen(str(FOLDER / "libring.so"))
SOFTNPU = FOLDER / "libsoftnpu.so"
