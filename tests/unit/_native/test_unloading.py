"""A library that has threads stays mapped when it is closed: a thread whose code is gone takes the process with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aiodatadist._native.library import FOLDER

CLOSED = """
import sys
from pathlib import Path
from cffi import FFI
ffi = FFI()
ffi.dlclose(ffi.dlopen(sys.argv[1]))
assert sys.argv[1] in Path("/proc/self/maps").read_text(), "it was unmapped"
"""


@pytest.mark.parametrize("name", ["libsoftnpu.so", "libring.so"])
def test_a_library_stays_mapped_when_it_is_closed(name: str) -> None:
    command = [sys.executable, "-c", CLOSED, str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
