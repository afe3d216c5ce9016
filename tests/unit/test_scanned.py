"""Serving engines look at every attribute of every module: vLLM does, for kernels to replace. None may raise."""

from __future__ import annotations

import subprocess
import sys

SCAN = """
import importlib, pkgutil, sys
import aiodatadist
for found in pkgutil.walk_packages(aiodatadist.__path__, "aiodatadist."):
    if not found.name.startswith("aiodatadist.adapters.") and not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ImportError:  # an extra is not installed
            continue
looked = 0
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "aiodatadist":
        for value in list(vars(module).values()):
            if hasattr(value, "__dict__"):
                vars(value).get("kernel")
            looked += 1
print(looked)
"""


def test_every_attribute_of_every_module_may_be_looked_at() -> None:
    done = subprocess.run([sys.executable, "-c", SCAN], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000
