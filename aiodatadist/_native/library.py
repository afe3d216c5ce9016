"""Declarations and the libraries of our own: opened once, when the package is imported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

try:
    from aiodatadist._native import _declarations
except ImportError as error:
    raise ImportError(
        f"{Path(__file__).resolve().parents[2]} has the sources of aiodatadist, which are not built: build them there with "
        "`pip install --editable .`, or start Python in another folder"
    ) from error

Handle: TypeAlias = Any
"""A vendor handle, or a pointer, as cffi holds it."""

FOLDER = Path(__file__).resolve().parent
"""Where the build puts our shared libraries, and the module that cffi makes of the headers."""

ffi: Any = _declarations.ffi
SOFTNPU = FOLDER / "libsoftnpu.so"


def _contents(library: Any) -> SimpleNamespace:
    """What a library has of all that is declared. The library itself raises where its ``__dict__`` is asked for, because some
    of it is in other libraries, and serving engines do ask that of whatever a module has."""
    found = {}
    for name in dir(library):
        try:
            found[name] = getattr(library, name)
        except ffi.error:
            continue
    return SimpleNamespace(**found)


_opened = [ffi.dlopen(str(FOLDER / "libring.so"))]  # for as long as the process lives
DECLARED = tuple(dir(_opened[0]))
"""Names of all functions and constants that the headers declare, whichever library has them."""
ring: Any = _contents(_opened[0])
ring_copy: Any = ffi.addressof(_opened[0], "ring_copy")
