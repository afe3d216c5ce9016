"""The demo on softnpu under the vendor's names: its cache is DEVICE memory that the host cannot address, as on NPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import children, vendor_names
from tests.strict.marks import STRICT

from .process import PATIENCE


@pytest.fixture
def names() -> Iterator[Path]:
    with vendor_names.shared_folder() as folder:
        vendor_names.install(folder)
        vendor_names.install_tool(folder)
        yield folder


def run(folder: Path, strict: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    prompt = folder / "prompt.txt"
    prompt.write_text(("It was the best of times, it was the worst of times. " * 20)[:200])
    command = [sys.executable, "-m", "aiodatadist", "demo", "--prompt", str(prompt), "--tokens", "8", *arguments]
    environment = vendor_names.environment(folder, strict)
    return children.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, forks=True)


@pytest.mark.parametrize("strict", [STRICT] if STRICT else ["hccs", "roce", "aicpu"])
@pytest.mark.parametrize("arguments", [[], ["--layered"], ["--device", "3,2", "--device-ip", "10.1.0.1,10.1.0.2"]])
def test_blocks_travel_and_tokens_are_equal(names: Path, strict: str, arguments: list[str]) -> None:
    done = run(names, strict, "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["kv_equal"]
    assert result["tokens_equal"]
    assert result["runtime"].startswith("ascend")


def test_devices_can_be_described_by_files(names: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for number, file in enumerate(files):
        file.write_text(vendor_names.resource(number, strict=STRICT))
    done = run(names, STRICT or "roce", "--json", "--local-comm-res", ",".join(map(str, files)))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "1,1"], "both ends are device 1 of server"),
        (["--v1"], "--v1 computes in the cache itself, which the host cannot address on an NPU"),
        (["--device", "0,99"], "device 99 does not exist"),
    ],
)
def test_what_cannot_be_is_one_line(names: Path, arguments: list[str], words: str) -> None:
    done = run(names, STRICT or "hccs", *arguments)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
