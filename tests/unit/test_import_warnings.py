"""The package's modules cause no warnings when they are imported, with the oldest pydantic either."""

from __future__ import annotations

import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, warnings
import aiodatadist

count = 0
for module in pkgutil.walk_packages(aiodatadist.__path__, "aiodatadist."):
    if module.name.endswith("__main__") or module.name.startswith("aiodatadist._native.lib"):
        continue
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name and not error.name.startswith("aiodatadist"), error
        else:
            count += 1
print(count)
"""


def test_no_module_warns_when_it_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300
