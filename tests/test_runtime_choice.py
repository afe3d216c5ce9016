"""The choice of a runtime, and the vendor's layout of files, which must be understood.

There is no NPU here: softnpu, under the vendor's file names, stands in for the vendor's libraries.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import children, vendor_names
from tests.vendor_names import NEW, OLD

SHOW = """
from aiodatadist._native.runtime import open_runtime
runtime = open_runtime()
print(runtime.name, *[library.rpartition("/")[2] for library in runtime.libraries])
"""

PULL = """
import asyncio
from aiodatadist import BlocksCacheKey, CacheDesc, DataType, Placement
from aiodatadist.testing import cluster_info, open_cluster, verify
from tests.vendor_names import resource

async def main():
    desc = CacheDesc(2, [8, 4096], DataType.DT_UINT8, Placement.HOST)
    async with (
        open_cluster(1, device_id=0, local_comm_res=resource(0)) as prompt,
        open_cluster(2, device_id=1, local_comm_res=resource(1)) as decoder,
    ):
        await prompt.blocks(desc)
        cache = await decoder.blocks(desc)
        status, _ = await decoder.datadist.link_clusters([cluster_info(prompt)], 5000)
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1, 2], [5, 6])
        verify(decoder.memory(cache), cache, [(t, p, 1, p - 4) for t in (0, 1) for p in (5, 6)], owner=2)
        print(decoder.datadist.runtime.name, status.name)

asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with vendor_names.shared_folder() as empty:
        yield empty


def run(
    script: str, folder: Path, runtime: str | None, names: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    vendor_names.install(folder, names)
    environment = {key: value for key, value in os.environ.items() if key != "AIODATADIST_RUNTIME"}
    if runtime is not None:
        environment["AIODATADIST_RUNTIME"] = runtime
    environment["LD_LIBRARY_PATH"] = str(folder)
    command = [sys.executable, "-c", script]
    return children.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)


@pytest.mark.parametrize(
    ("runtime", "names", "opened"),
    [
        ("soft", NEW, "soft libsoftnpu.so"),
        ("ascend", NEW, "ascend libacl_rt.so libhcomm.so libhccl.so"),
        ("ascend", OLD, "ascend libascendcl.so libhccl.so libhccl.so"),
        ("auto", NEW, "ascend libacl_rt.so libhcomm.so libhccl.so"),
        (None, OLD, "ascend libascendcl.so libhccl.so libhccl.so"),
        (None, (), "soft libsoftnpu.so"),
    ],
)
def test_the_environment_and_what_is_installed_choose(
    folder: Path, runtime: str | None, names: tuple[str, ...], opened: str
) -> None:
    done = run(SHOW, folder, runtime, names)
    assert done.stdout.strip() == opened, done.stderr


@pytest.mark.parametrize(
    ("runtime", "words"), [("ascend", "libacl_rt.so: cannot open"), ("cuda", "must be auto, ascend or soft")]
)
def test_what_cannot_be_opened_is_said(folder: Path, runtime: str, words: str) -> None:
    done = run(SHOW, folder, runtime)
    assert done.returncode == 1
    assert words in done.stderr


def test_a_runtime_that_shows_no_device_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTNPU_FAULTS", "aclrtGetDeviceCount:fail=207004@*")
    done = run(SHOW, folder, "ascend", NEW)
    assert "the ascend runtime shows no device (code 207004)" in done.stderr


def test_a_pull_on_the_vendors_path(folder: Path) -> None:
    done = run(PULL, folder, "ascend", NEW)
    assert done.stdout.strip() == "ascend LLM_SUCCESS", done.stderr


def test_auto_does_not_pass_by_npus_that_do_not_load(folder: Path, tmp_path: Path) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / "davinci0").touch()
    script = f"""
from pathlib import Path
from aiodatadist._native import runtime
runtime.DEVICE_FILES = Path({str(devices)!r})
runtime.open_runtime()
"""
    done = run(script, folder, "auto")
    assert "RuntimeUnavailable: this machine has NPUs" in done.stderr
    assert "set_env.sh" in done.stderr
    assert run(script, folder, "soft").returncode == 0


def test_a_device_of_the_vendors_needs_no_description(folder: Path) -> None:
    """``local_comm_res`` is made where it is not given."""
    script = PULL.replace(", local_comm_res=resource(0)", "").replace(", local_comm_res=resource(1)", "")
    done = run(script, folder, "ascend", NEW)
    assert (done.returncode, done.stdout.strip()) == (0, "ascend LLM_SUCCESS"), done.stderr
