"""``aiodatadist doctor --device`` on softnpu, free or as strict as the lane: the reports differ where they should."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiodatadist._cli.probe.report import Report, StepReport
from aiodatadist._cli.probe.steps import STEPS
from tests import children, vendor_names

STRICT = os.environ.get("SOFTNPU_STRICT", "")
PATIENCE = 120.0

DIFFER = {
    "": {"7b", "9", "12", "13", "14"},
    "hccs": set[str](),
    "roce": {"15", "16", "17", "18", "22"},
    "aicpu": set[str](),
}
"""Where softnpu does not as the vendor's sources say of HCCS. The free one is kinder; RoCE is another world."""

NUMBERED = ("7b", "9", "12", "13", "14", "15", "16", "17", "18")
STRICTLY = dict.fromkeys(NUMBERED, True)
HOLDS: dict[str, dict[str, bool | None]] = {
    "": {**STRICTLY, **dict.fromkeys(("7b", "9", "12", "13", "14"), False), "22": True},
    "hccs": {**STRICTLY, "22": True},
    "roce": {**STRICTLY, "22": None},
    "aicpu": {**STRICTLY, "22": True},
}
"""Whether that is what B1 to B19 predict of such a link."""

RACES = "20"
"""Two threads in init and destroy, which HCCL does not expect: what comes of it is a matter of luck."""


HANG = "aclrtMallocHost:hold=for-ever"


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a probe. Strict softnpu has the vendor's names, and an ``hccn_tool`` beside it."""
    given = {**os.environ, "HCCL_NPU_SOCKET_PORT_RANGE": "auto"}
    if STRICT:
        vendor_names.install(folder)
        vendor_names.install_tool(folder)
        given.update(vendor_names.environment(folder, STRICT))
    return {**given, **more}


def command(*arguments: str) -> list[str]:
    mib = "16" if STRICT else "4"
    return [sys.executable, "-m", "aiodatadist", "doctor", "--device", "0", "--rounds", "10", "--mib", mib, *arguments]


def probe(folder: Path, *arguments: str, **more: str) -> tuple[subprocess.CompletedProcess[str], Report]:
    into = folder / "report.json"
    done = children.run(
        command("--json", str(into), *arguments),
        env=environment(folder, **more),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        forks=True,
    )
    assert done.stderr == ""
    return done, Report.model_validate_json(into.read_text(encoding="utf-8"))


def step(report: Report, number: str) -> StepReport:
    return next(each for each in report.steps if each.step == number)


def test_the_report_differs_where_it_should(tmp_path: Path) -> None:
    done, report = probe(tmp_path)
    assert [each.step for each in report.steps] == [each.number for each in STEPS]
    steps = {each.step: each for each in report.steps if each.step != RACES}
    assert {n for n, each in steps.items() if each.outcome.verdict != "as expected"} == DIFFER[STRICT], done.stdout
    assert {steps[n].outcome.verdict for n in DIFFER[STRICT]} <= {"differs" if STRICT else "allowed"}
    if not STRICT:
        assert "5 as only free softnpu allows, 0 differ" in done.stdout
    assert {n: steps[n].outcome.holds for n in HOLDS[STRICT]} == HOLDS[STRICT], done.stdout
    assert {each.ending for each in report.steps} == {"finished"}
    assert done.returncode == int(any(each.outcome.verdict == "differs" for each in report.steps))
    header = report.header
    assert header.functions == "144 of 144"
    assert header.link == {"": "free", "hccs": "HCCS", "roce": "RoCE", "aicpu": "HCCS"}[STRICT]
    assert max(map(len, done.stdout.splitlines())) <= 80
    call = next(call for call in step(report, "3").calls if call.function == "aclrtMalloc")
    assert (call.code, call.end) == (0, "near")
    assert call.microseconds is not None
    assert {call.end for call in step(report, "11").calls} == {"near", "far"}


def test_a_report_tells_no_address_and_no_name(tmp_path: Path) -> None:
    addresses = {"HCCL_IF_IP": "10.9.8.7", "ASCEND_SECRET_KEY": "hush"}
    probe(tmp_path, "--step", "10", "--step", "11", **addresses)
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert not re.search(r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b", text.replace('"' + "1.17.0" + '"', ""))
    assert "hush" not in text
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert "0x" not in text


def test_a_step_that_hangs_is_a_result_and_the_rest_goes_on(tmp_path: Path) -> None:
    done, report = probe(tmp_path, "--step", "3", "--step", "5", "--limit", "3", SOFTNPU_FAULTS=HANG)
    hung = step(report, "3")
    assert (hung.ending, hung.outcome.verdict) == ("killed at the limit", "differs")
    assert hung.calls[-1].function == "aclrtMallocHost"
    assert hung.calls[-1].code is hung.calls[-1].microseconds is None
    assert "hangs in aclrtMallocHost: killed" in " ".join(done.stdout.split())
    assert [each.step for each in report.steps] == ["1", "3", "5"]


@contextmanager
def hanging(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a probe that hangs in step 3. Yield it and the process of the step."""
    asked = command("--json", str(folder / "report.json"), "--limit", "60", *arguments)
    env = environment(folder, SOFTNPU_FAULTS=HANG)
    with children.Popen(
        asked, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, forks=True
    ) as parent:
        try:
            assert parent.stdout is not None
            assert next(parent.stdout).split()[:2] == ["ok", "1"]  # step 1 is over, and its process gone
            yield parent, child_of(parent.pid)
        finally:
            parent.kill()


def child_of(pid: int) -> int:
    """Return the child once it hangs in a library: asleep at twenty looks in a row.

    A child that only waits for a processor is not asleep.
    """
    children, looks = Path(f"/proc/{pid}/task/{pid}/children"), 0
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        asleep = [child for child in map(int, children.read_text().split()) if is_asleep_in_a_library(child)]
        looks = looks + 1 if asleep else 0
        if looks == 20:
            return asleep[0]
        time.sleep(0.05)
    raise AssertionError(f"no step of process {pid} hangs")


def is_asleep_in_a_library(pid: int) -> bool:
    try:
        process = Path(f"/proc/{pid}")
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        return state == "S" and re.search(r"lib(softnpu|ascendcl)", (process / "maps").read_text()) is not None
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_step_that_crashes_is_a_result(tmp_path: Path) -> None:
    with hanging(tmp_path, "--step", "3") as (parent, child):
        os.kill(child, signal.SIGSEGV)
        assert parent.wait(PATIENCE) == 1
    crashed = step(Report.model_validate_json((tmp_path / "report.json").read_text()), "3")
    assert (crashed.ending, crashed.status) == ("crashed", -signal.SIGSEGV)
    assert "SIGSEGV in aclrtMallocHost" in crashed.outcome.found


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_probe_that_is_stopped_leaves_no_process(tmp_path: Path, end: signal.Signals) -> None:
    with hanging(tmp_path, "--step", "3") as (parent, child):
        process = os.pidfd_open(child)
        parent.send_signal(end)
        parent.wait(PATIENCE)
        assert wait_gone(process), "the step's process outlived its probe"


def wait_gone(process: int) -> bool:
    try:
        return bool(select.select([process], [], [], 30)[0])
    finally:
        os.close(process)


def test_two_ends_over_tcp(tmp_path: Path) -> None:
    """Link two ends with a key, as on two hosts."""
    key = tmp_path / "key"
    key.write_text("a secret\n")
    env = environment(tmp_path, AIODATADIST_AUTH_KEY_FILE=str(key))
    serving = [sys.executable, "-m", "aiodatadist", "doctor", "--device", "1", "--serve", "127.0.0.1:0"]
    with children.Popen(serving, env=env, stdout=subprocess.PIPE, text=True, forks=True) as far:
        try:
            assert far.stdout is not None
            address = far.stdout.readline().removeprefix("listening on ").partition(",")[0]
            host, _, port = address.rpartition(":")
            silent = [socket.create_connection((host, int(port))) for _ in range(5)]  # they keep no caller waiting
            asked = command("--peer", address, "--step", "11", "--step", "19", "--json", str(tmp_path / "report.json"))
            done = children.run(asked, env=env, capture_output=True, text=True, timeout=PATIENCE, forks=True)
            assert done.returncode == 0, done.stdout + done.stderr
            report = Report.model_validate_json((tmp_path / "report.json").read_text())
            assert [each.outcome.verdict for each in report.steps] == ["as expected"] * 3, done.stdout
            for each in silent:
                each.close()
            other = tmp_path / "other"
            other.write_text("another")
            refused = children.run(
                asked,
                env={**env, "AIODATADIST_AUTH_KEY_FILE": str(other)},
                capture_output=True,
                text=True,
                check=False,
                forks=True,
            )
            assert "the other end has another key" in " ".join(refused.stdout.split())
        finally:
            far.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peer", "10.0.0.1:5"], "set AIODATADIST_AUTH_KEY_FILE to a file with a key"),
        (["--serve", "0.0.0.0:0"], "0.0.0.0 is not a loopback address"),
        (["--serve", "1", "--peer", "127.0.0.1:1"], "two ends of a probe"),
        (["--step", "99"], "--step 99: must be one of 1, 2, 3"),
        (["--device", "77"], "device 77 does not exist"),
        (["--local-comm-res", "/nowhere"], "--local-comm-res: cannot read /nowhere: No such file or directory"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = children.run(
        command(*arguments),
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        forks=True,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
