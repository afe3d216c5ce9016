"""A wheel, installed where nothing else of this project is, does a pull. Run as ``python -m tests.packaging``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TRY = """
import asyncio, pathlib, aiodatadist
from aiodatadist import BlocksCacheKey, CacheDesc, DataType
from aiodatadist.testing import linked_pair, verify

async def main():
    assert pathlib.Path(aiodatadist.__file__).is_relative_to({prefix!r}), aiodatadist.__file__
    async with linked_pair(CacheDesc(2, [8, 4096], DataType.DT_UINT8)) as (_, decoder, _, cache):
        report = await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1, 2], [5, 6])
        assert report.bytes == 4 * 4096, report
        verify(decoder.memory(cache), cache, [(t, p, 1, p - 4) for t in (0, 1) for p in (5, 6)], owner=2)

asyncio.run(main())
print("the wheel works: 1 passed, 0 failed")
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        run(*pip, "wheel", "--no-deps", "--wheel-dir", folder / "dist", ROOT)
        (wheel,) = (folder / "dist").glob("*.whl")
        venv.create(folder / "venv", with_pip=False)
        python = folder / "venv" / "bin" / "python"
        run(*pip, "--python", python, "install", wheel)
        run(python, "-c", TRY.format(prefix=str(folder)), cwd=folder)
        run(folder / "venv" / "bin" / "aiodatadist", "doctor", cwd=folder)


if __name__ == "__main__":
    main()
