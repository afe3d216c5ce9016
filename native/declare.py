"""The headers of native/, read by cffi when the package is built: ``declare.py OUTPUT HEADER...`` writes a Python module.

softnpu is compiled against these files, and what they declare is what the package calls. Everything in Python that reads
them does it through ``cdef_source``, so that all readers see one truth. An import then parses no C, which would take longer
than all else that it does.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

_COMPILER_ONLY = re.compile(r"[ \t]*#[ \t]*(?:pragma|include)\b")


def cdef_source(*paths: Path) -> str:
    """Join the declarations of these header files into one text for ``FFI.cdef``.

    ``#pragma`` and ``#include`` lines, which cffi cannot read, come back empty: every other line keeps its text and
    its number, counted over the files laid end to end. Comments stay: cffi skips them. Name an included header before
    the headers that include it.
    """
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    return "".join("\n" if _COMPILER_ONLY.match(line) else f"{line}\n" for line in lines)


def main(output: str, *headers: str) -> None:
    ffi = FFI()
    ffi.set_source("aiodatadist._native._declarations", None)
    ffi.cdef(cdef_source(*map(Path, headers)))
    ffi.emit_python_code(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
