"""Virtual environments for other libraries, each created on first use."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio

from aiodatadist._cli.kit.errors import CommandError

# Without what they do not need for memory of the host: NIXL's dependencies are 6 GB of CUDA and PyTorch.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "process_vm": (),
    "nixl": ("--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"),
    "mooncake": ("mooncake-transfer-engine-non-cuda>=0.3.13",),
}
_LAST_WORDS = 300


async def python_of(name: str) -> str:
    """Return an interpreter that can import this library.

    Raises:
        CommandError: if the library cannot be installed here, for instance because no package index can be reached.
    """
    requirements = REQUIREMENTS[name]
    if not requirements:
        return sys.executable
    folder = _cache() / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    python, stamp = folder / "bin" / "python", folder / "stamp"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == repr(requirements):
        return str(python)
    shutil.rmtree(folder, ignore_errors=True)
    await _run(name, [sys.executable, "-m", "venv", str(folder)])
    await _run(name, [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])
    stamp.write_text(repr(requirements), encoding="utf-8")
    return str(python)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aiodatadist" / "bench"


async def _run(name: str, command: Sequence[str]) -> None:
    done = await anyio.run_process(command, check=False)
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).decode(errors="replace").split())[-_LAST_WORDS:]
        raise CommandError(
            f"--against {name}: {' '.join(REQUIREMENTS[name])} cannot be installed into {_cache()}; this needs access "
            f"to a package index: {words}"
        )
