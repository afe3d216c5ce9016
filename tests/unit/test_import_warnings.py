"""The package's modules cause no warnings when they are imported, and each of their attributes can be looked at.

Serving engines do the second: vLLM looks at every attribute of every module, for kernels to replace. None may raise.
"""

from __future__ import annotations

import subprocess
import sys

IMPORT_AND_SCAN_ALL = """
import importlib, pkgutil, sys, warnings
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
looked = 0
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "aiodatadist":
        for value in list(vars(module).values()):
            if hasattr(value, "__dict__"):
                vars(value).get("kernel")
            looked += 1
print(count, looked)
"""


def test_no_module_warns_when_it_is_imported_and_every_attribute_may_be_looked_at() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_SCAN_ALL], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    modules, attributes = map(int, done.stdout.split())
    assert modules > 300
    assert attributes > 1000
