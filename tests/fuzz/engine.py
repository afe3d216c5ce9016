"""Run one reader under atheris: ``python -m tests.fuzz.engine NAME [options of libFuzzer] FOLDERS``.

It needs atheris, which the lane ``fuzz`` of ``tests/lanes.py`` has.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main() -> None:
    atheris: Any = importlib.import_module("atheris")
    name, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["aiodatadist"]):
        readers = importlib.import_module("tests.fuzz.readers")
    atheris.Setup([sys.argv[0], *options], readers.READERS[name].check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
