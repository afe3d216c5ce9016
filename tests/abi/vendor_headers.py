"""The vendor's headers, fetched by a developer and cached.

They are third-party material under the vendor's own licence: a developer fetches them, the gate compiles against
them, and they stay in a cache folder outside version control. The torch-npu wheel carries them; which index it comes
from is pip's configuration. ``AIODATADIST_ABI_HEADERS`` names a folder to use instead, such as the ``include`` folder
of an installed toolkit.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from . import REPOSITORY, CannotCheck

CACHE = REPOSITORY / ".cache" / "abi"
VARIABLE = "AIODATADIST_ABI_HEADERS"
ONE_SIDED_VARIABLE = "HCOMM_INCLUDE"
"""Folders, as in PATH, in which ``hccl/hccl_one_sided_services.h`` and what it includes are found: of the toolkit, or of the
vendor's open sources. Without it the one-sided family has nothing to be compared with."""
ONE_SIDED = "hccl/hccl_one_sided_services.h"

# The headers do not depend on the platform, so every machine reads this one wheel.
REQUIREMENT = "torch-npu==2.13.0"
WHEEL = "torch_npu-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl"
WHEEL_SHA256 = "0deb809cf447d3fce636ccfdc9c9f874950f1fe76f18f4aaab31e2d345f7dac0"
WHEEL_TAGS = ("--implementation=cp", "--python-version=311", "--abi=cp311", "--platform=manylinux_2_28_x86_64")

# What acl/acl.h, acl/acl_rt.h and hccl/hccl.h include, and the digest of it all.
_ROOT = "torch_npu/include"
_HCCL = "third_party/hccl/inc"
FILES = (
    "acl/acl.h",
    "acl/acl_base.h",
    "acl/acl_base_mdl.h",
    "acl/acl_base_rt.h",
    "acl/acl_dump.h",
    "acl/acl_mdl.h",
    "acl/acl_op.h",
    "acl/acl_rt.h",
    "acl/acl_rt_allocator.h",
    "acl/error_codes/ge_error_codes.h",
    "acl/error_codes/rt_error_codes.h",
    f"{_HCCL}/hccl/hccl.h",
    f"{_HCCL}/hccl/hccl_types.h",
)
CONTENT_SHA256 = "8e1ae91f6eeb7ffeeb1ebbb8a259b0486131a20e5deaedff2b2c95c0d6e9826e"


@dataclass(frozen=True)
class HeaderSet:
    include: tuple[Path, ...]  # include path
    names: tuple[str, ...]  # what to include

    @property
    def has_one_sided(self) -> bool:
        return ONE_SIDED in self.names


def locate() -> HeaderSet:
    """Return the headers to check against: the folder that the environment names, else the cache."""
    if folder := os.environ.get(VARIABLE):
        return _header_set(Path(folder))
    if not is_pinned(CACHE):
        raise CannotCheck(f"the vendor's headers ({REQUIREMENT}) are not in {CACHE}: --fetch puts them there")
    return _header_set(CACHE)


def fetch() -> HeaderSet:
    """Fill the cache if it is needed and not filled, then :func:`locate` the headers."""
    if VARIABLE not in os.environ and not is_pinned(CACHE):
        with tempfile.TemporaryDirectory() as folder:
            _extract(_download(Path(folder)), CACHE)
    return locate()


def is_pinned(folder: Path) -> bool:
    """Return True if the folder holds all the files, unedited. A partial or an outdated cache is no cache."""
    digest = hashlib.sha256()
    for name in FILES:
        file = folder / name
        digest.update(f"{name} {_sha256(file) if file.is_file() else 'missing'}\n".encode())
    return digest.hexdigest() == CONTENT_SHA256


def _header_set(folder: Path) -> HeaderSet:
    include = tuple(path for path in (folder, folder / _HCCL) if path.is_dir())
    names = ["acl/acl.h", "acl/acl_rt.h", "hccl/hccl.h"]
    for name in names:
        if not any((path / name).is_file() for path in include):
            raise CannotCheck(f"{folder} has no {name}")
    if any((path / "hccl/hccl_comm.h").is_file() for path in include):  # newer toolkits have it apart
        names.append("hccl/hccl_comm.h")
    if one_sided := _one_sided_include():
        include += one_sided
        names.append(ONE_SIDED)
    return HeaderSet(include, tuple(names))


def _one_sided_include() -> tuple[Path, ...]:
    folders = tuple(Path(folder) for folder in os.environ.get(ONE_SIDED_VARIABLE, "").split(os.pathsep) if folder)
    if folders and not any((folder / ONE_SIDED).is_file() for folder in folders):
        raise CannotCheck(f"{ONE_SIDED_VARIABLE}={os.environ[ONE_SIDED_VARIABLE]} has no {ONE_SIDED}")
    return folders


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *WHEEL_TAGS]
    done = subprocess.run([*pip, "--dest", str(folder), REQUIREMENT], capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        reason = next((line for line in said if line.startswith("ERROR:")), said[-1])
        raise CannotCheck(f"pip cannot download {REQUIREMENT}: {reason.removeprefix('ERROR: ')}")
    wheel = folder / WHEEL
    if not wheel.is_file() or _sha256(wheel) != WHEEL_SHA256:
        raise CannotCheck(f"pip downloaded something else than the pinned {WHEEL}")
    return wheel


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(wheel: Path, destination: Path) -> None:
    """Put the needed files in place of ``destination``, whole or not at all."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder, zipfile.ZipFile(wheel) as archive:
        fresh = Path(folder, "headers")
        for name in FILES:
            file = fresh / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(archive.read(f"{_ROOT}/{name}"))
        shutil.rmtree(destination, ignore_errors=True)
        fresh.rename(destination)
