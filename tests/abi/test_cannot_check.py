"""When the gate cannot run it says why in one line, and it never takes something else for the vendor's headers."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from . import REPOSITORY, CannotCheck, vendor_headers
from .declarations import read_declarations
from .test_abi import REQUIRED, stop

if TYPE_CHECKING:
    from pathlib import Path


def gate(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.abi"]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def write_headers(
    folder: Path, text: str, names: tuple[str, ...] = ("acl/acl.h", "acl/acl_rt.h", "hccl/hccl.h")
) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_folder_without_the_headers_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = gate(AIODATADIST_ABI_HEADERS=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"abi: {tmp_path} has no acl/acl.h\n")


def test_a_missing_compiler_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = gate(PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "abi: g++ is not installed: the vendor's headers compile only as C++\n"


def test_headers_that_do_not_compile_are_one_line_and_status_2(tmp_path: Path) -> None:
    write_headers(tmp_path, "no such thing;\n")
    done = gate(AIODATADIST_ABI_HEADERS=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "acl.h:1" in done.stderr


def test_a_compiler_that_gives_up_is_not_taken_for_a_content_one(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    write_headers(tmp_path, "")
    done = gate(AIODATADIST_ABI_HEADERS=str(tmp_path), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stderr) == (2, "abi: g++ did not reach the end of the generated unit\n")


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vendor_headers.VARIABLE, raising=False)
    monkeypatch.setattr(vendor_headers, "CACHE", tmp_path / "abi")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CannotCheck, match=f"pip cannot download {vendor_headers.REQUIREMENT}") as failure:
        vendor_headers.fetch()
    assert "\n" not in str(failure.value)
    assert not list(tmp_path.iterdir())


def test_a_partial_or_edited_cache_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vendor_headers.VARIABLE, raising=False)
    monkeypatch.setattr(vendor_headers, "CACHE", tmp_path)
    write_headers(tmp_path, "", vendor_headers.FILES)
    with pytest.raises(CannotCheck, match="--fetch"):
        vendor_headers.locate()


def test_without_the_headers_a_test_skips_and_names_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    monkeypatch.delenv(vendor_headers.VARIABLE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="make abi"):
        stop(CannotCheck("nothing there"))


@pytest.mark.parametrize(
    "asked_for", [(REQUIRED, "1"), (vendor_headers.VARIABLE, "/nowhere")], ids=lambda pair: pair[0]
)
def test_a_check_that_was_asked_for_is_never_skipped(
    asked_for: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*asked_for)
    with pytest.raises(pytest.fail.Exception, match="nothing there"):
        stop(CannotCheck("nothing there"))


@pytest.mark.parametrize("text", ["int *f(;", "typedef int A, B;", "typedef struct opaque opaque;", "enum { A = 1 };"])
def test_a_declaration_that_would_go_unchecked_is_refused(text: str, tmp_path: Path) -> None:
    header = tmp_path / "ours.h"
    header.write_text(text)
    with pytest.raises(CannotCheck):
        read_declarations(header)
