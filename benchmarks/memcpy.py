"""The plain memcpy, compiled when a benchmark starts."""

from __future__ import annotations

import subprocess
import sysconfig
import tempfile
from array import array
from pathlib import Path
from typing import Any

from cffi import FFI

from benchmarks.common import now

SOURCE = Path(__file__).with_suffix(".c")
ffi: Any = FFI()
ffi.cdef("void copy_ranges(const uint64_t *targets, const uint64_t *sources, size_t count, size_t bytes);")


class PlainMemcpy:
    """Copies ranges of equal length, one after the other, in the calling thread and without the interpreter lock."""

    def __init__(self) -> None:
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "memcpy.so"
            subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library)], check=True)
            self._library = ffi.dlopen(str(library))

    def seconds(self, targets: array[int], sources: array[int], nbytes: int) -> float:
        start = now()
        self._library.copy_ranges(
            ffi.from_buffer("uint64_t[]", targets), ffi.from_buffer("uint64_t[]", sources), len(targets), nbytes
        )
        return now() - start
