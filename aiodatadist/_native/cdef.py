"""The headers of native/, made readable for cffi.

softnpu is compiled against these files and cffi declares the same files at run time. Everything that reads them in
Python does it through this one function, so that both readers see one truth.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_COMPILER_ONLY = re.compile(r"[ \t]*#[ \t]*(?:pragma|include)\b")


def cdef_source(*paths: Path) -> str:
    """The declarations of these header files as one text for ``FFI.cdef``.

    ``#pragma`` and ``#include`` lines, which cffi cannot read, come back empty: every other line keeps its text and
    its number, counted over the files laid end to end. Comments stay: cffi skips them. Name an included header before
    the headers that include it.
    """
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    return "".join("\n" if _COMPILER_ONLY.match(line) else f"{line}\n" for line in lines)
