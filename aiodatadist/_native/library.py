"""Declarations and our own libraries: opened once, when the package is imported."""

from __future__ import annotations

from contextlib import suppress
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
"""The folder of our shared libraries and of the module that cffi makes of the headers; the build puts both there."""

ffi: Any = _declarations.ffi
SOFTNPU = FOLDER / "libsoftnpu.so"

SPELLED = (
    "CommMem *", "HcclComm *", "HcclCommConfig *", "HcclMemDesc *", "HcclMemDescs *", "HcclOneSideOpDesc[]",
    "HcclPrepareConfig *", "HcclResult", "aclmdlRI *", "aclmdlRICaptureStatus *", "aclrtContext *", "aclrtEvent *",
    "aclrtNotify *", "aclrtNotify[]", "aclrtPtrAttributes *", "aclrtStream *", "aclrtStreamStatus *", "heartbeats **",
    "heartbeats_news *", "int32_t *", "int32_t[3]", "int64_t *", "int64_t[]", "net_channel **",
    "net_channel_options *", "net_options *", "net_reason *", "net_ring **", "ring **", "ring_blocks",
    "ring_blocks *", "ring_completion *", "ring_driver *", "ring_layers *", "ring_options *", "ring_step[]",
    "ring_units *", "size_t *", "slots_class[]", "slots_values *", "softnpu_counters", "softnpu_counters *",
    "uint16_t[]", "uint32_t *", "uint32_t[]", "uint64_t *", "uint64_t[]", "uint8_t[]", "uintptr_t", "void *",
    "void **",
)  # fmt: skip
"""The types that this package uses, as it spells them."""


def _known(spelled: str) -> None:
    """Have cffi make a type now.

    cffi makes each type when it is first used, in a buffer that all threads share. If two threads do that at the same
    moment, it aborts the process (https://github.com/python-cffi/cffi/issues/271).
    """
    kind = ffi.typeof(spelled)
    struct = kind.item if kind.kind in {"pointer", "array"} else kind
    if struct.kind == "struct":
        len(struct.fields or ())  # cffi makes the fields on first access


for _spelled in SPELLED:
    _known(_spelled)


def know_functions(library: Any) -> None:
    """Have cffi make the types of all functions in a library, for the same reason."""
    for name in DECLARED:
        with suppress(AttributeError, ffi.error):
            getattr(library, name)


def _contents(library: Any) -> SimpleNamespace:
    """Return everything declared that a library has.

    The library itself raises if its ``__dict__`` is read, because some of it is in other libraries, and serving engines
    read that attribute of everything in a module.
    """
    found = {}
    for name in dir(library):
        try:
            found[name] = getattr(library, name)
        except ffi.error:
            continue
    return SimpleNamespace(**found)


_opened = [ffi.dlopen(str(FOLDER / "libring.so"))]  # kept as long as the process lives
DECLARED = tuple(dir(_opened[0]))
"""The names of all functions and constants that the headers declare, whichever library has them."""
ring: Any = _contents(_opened[0])
ring_copy: Any = ffi.addressof(_opened[0], "ring_copy")
