"""g++: the only judge. HCCL's headers compile only as C++, so there is no use for a C compiler here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from . import CannotCheck

if TYPE_CHECKING:
    from .vendor_headers import HeaderSet

_ERROR = re.compile(r"(?P<file>[^:]+):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<message>.*)")
_DECLARATOR = re.compile(r"\b(\w+)\s*\(([^(){};]*)\)\s*(?:__attribute__|;)")
_UNIT = "abi_unit.cpp"


@dataclass(frozen=True)
class Diagnostic:
    line: int
    message: str


def require() -> str:
    """Return the path of g++. Raises CannotCheck if it is not installed."""
    path = shutil.which("g++")
    if path is None:
        raise CannotCheck("g++ is not installed: the vendor's headers compile only as C++")
    return path


def errors(headers: HeaderSet, text: str) -> list[Diagnostic]:
    """Return the errors on the lines of this unit. An error in any other file means that the headers do not compile."""
    found = []
    for line in _run(headers, text, "-fsyntax-only", "-fmax-errors=0").stderr.splitlines():
        if not (error := _ERROR.match(line)):
            continue
        if Path(error["file"]).name != _UNIT:
            raise CannotCheck(f"the vendor's headers do not compile: {line}")
        found.append(Diagnostic(int(error["line"]), error["message"]))
    return found


@cache
def parameter_names(headers: HeaderSet) -> dict[str, tuple[str, ...]]:
    """Return the names of the parameters of each function that the headers declare."""
    text = "".join(f"#include <{header}>\n" for header in headers.names)
    done = _run(headers, text, "-E", "-P")
    if done.returncode:
        raise CannotCheck(f"the vendor's headers cannot be preprocessed: {done.stderr.strip().splitlines()[0]}")
    names = {}
    for function, inside in _DECLARATOR.findall(done.stdout):
        parameters = [re.findall(r"\w+", part) for part in inside.split(",") if part.strip() not in {"", "void"}]
        if all(len(words) > 1 for words in parameters):  # a type and a name; fewer words are a call
            names[function] = tuple(words[-1] for words in parameters)
    return names


def _run(headers: HeaderSet, text: str, *mode: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder, _UNIT)
        unit.write_text(text, encoding="utf-8")
        plain = ("-w", "-fno-diagnostics-show-caret", "-fdiagnostics-color=never")
        include = [f"-I{path}" for path in headers.include]
        command = [require(), "-std=gnu++17", *mode, *plain, *include, str(unit)]
        environment = {**os.environ, "LC_ALL": "C"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
