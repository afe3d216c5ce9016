"""Sources that were not built say so: a clone, in which another Python than the one that installed it was started."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import aiodatadist


def test_sources_that_are_not_built_say_what_to_do(tmp_path: Path) -> None:
    made = shutil.ignore_patterns("_declarations.py", "*.so", "__pycache__")
    shutil.copytree(Path(aiodatadist.__file__).parent, tmp_path / "aiodatadist", ignore=made)
    there = [str(tmp_path), sysconfig.get_path("purelib")]
    text = f"import sys; sys.path[:0] = {there!r}; import aiodatadist"
    done = subprocess.run([sys.executable, "-S", "-c", text], check=False, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path} has the sources of aiodatadist, which are not built: ")
    assert "pip install --editable ." in last
