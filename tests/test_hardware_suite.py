"""The tests for NPUs pass where softnpu has the vendor's names and is strict: one that fails on an NPU is right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import vendor_names
from tests.strict.marks import STRICT

ROOT = Path(__file__).parents[1]
SECONDS = 400
"""It takes one minute; the machine may be busy."""
SHORT = {"AIODATADIST_IDLE_SECONDS": "0.5", "AIODATADIST_FIGURES_MIB": "16"}


def run(folder: Path, strict: str, *arguments: str, **own: str) -> subprocess.CompletedProcess[str]:
    vendor_names.install(folder)
    files = [folder / f"device{number}.json" for number in range(2)]
    for number, file in enumerate(files):
        file.write_text(vendor_names.resource(number, strict=strict))
    environment = {
        **vendor_names.environment(folder, strict),
        "AIODATADIST_LOCAL_COMM_RES": ",".join(map(str, files)),
        **SHORT,
        **own,
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/hardware", *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS
    )


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("strict", [STRICT] if STRICT else ["hccs", "roce", "aicpu"])
def test_all_of_them_pass(tmp_path: Path, strict: str) -> None:
    done = run(tmp_path, strict, "-m", "hardware")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed in ", done.stdout), "none is skipped, deselected or expected to fail"
    assert "| 2048 KiB |" in done.stdout, "the table of figures is printed"


@pytest.mark.parametrize("strict", [STRICT] if STRICT else ["hccs", "roce", "aicpu"])
def test_devices_that_are_not_described_are_found(tmp_path: Path, strict: str) -> None:
    """Find devices for an owner who has set nothing: ``hccn_tool`` tells the addresses of the cards."""
    vendor_names.install_tool(tmp_path)
    some = "two_processes or two_devices or (transfers and pull)"
    done = run(tmp_path, strict, "-m", "hardware", "-k", some, AIODATADIST_LOCAL_COMM_RES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)


def test_they_are_not_for_softnpu_under_its_own_name(tmp_path: Path) -> None:
    done = run(tmp_path, "", "-m", "hardware", "--collect-only", "-q", AIODATADIST_RUNTIME="soft")
    assert done.returncode != 0
    assert "set AIODATADIST_RUNTIME=ascend, or say `make hardware`" in done.stderr + done.stdout


def test_they_are_skipped_when_they_were_not_chosen(tmp_path: Path) -> None:
    done = run(tmp_path, "", AIODATADIST_HARDWARE="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"skipped: \d+ need two NPUs", done.stdout)
    assert "passed" not in done.stdout
