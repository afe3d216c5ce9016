"""softnpu exports what the headers declare, nothing less and nothing more, and was built from these headers."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import REPOSITORY, SOURCES
from .declarations import Function, read_declarations

NATIVE = REPOSITORY / "native"
OWN = NATIVE / "softnpu" / "softnpu.h"
TOOLCHAIN = {"_init", "_fini", "_edata", "_end", "__bss_start"}  # some linkers export these from every library


@pytest.fixture(scope="module")
def built() -> Path:
    """Return the folder where the build puts the native libraries and cffi's modules."""
    package = importlib.util.find_spec("aiodatadist._native")
    for folder in map(Path, package.submodule_search_locations or () if package else ()):
        if (folder / "libsoftnpu.so").is_file():
            return folder
    pytest.fail("libsoftnpu.so is not built: install the package, for instance `pip install -e .`")


def test_softnpu_exports_every_declared_function(built: Path) -> None:
    assert declared() - exported(built / "libsoftnpu.so") == set()


def test_softnpu_exports_nothing_that_is_not_declared(built: Path) -> None:
    assert exported(built / "libsoftnpu.so") - declared() - TOOLCHAIN == set()


def test_python_has_the_declarations_that_were_checked(built: Path, tmp_path: Path) -> None:
    build = (NATIVE / "CMakeLists.txt").read_text(encoding="utf-8")
    found = re.search(r"set\(HEADERS ([\w./ ]+)\)", build)
    assert found
    headers = [NATIVE / name for name in found[1].split()]
    subprocess.run([sys.executable, NATIVE / "declare.py", tmp_path / "now.py", *headers], check=True)
    assert (built / "_declarations.py").read_text() == (tmp_path / "now.py").read_text(), (
        "the build is old: build again"
    )


def declared() -> set[str]:
    return {item.name for item in read_declarations(*SOURCES, OWN) if isinstance(item, Function)}


def exported(library: Path) -> set[str]:
    nm = shutil.which("nm")
    assert nm, "nm is not installed: it comes with the C compiler's binutils"
    command = [nm, "--dynamic", "--defined-only", "--format=posix", str(library)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[0].split("@")[0] for line in symbols.splitlines()}
