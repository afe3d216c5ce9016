"""``aiodatadist bench`` as a user runs it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from aiodatadist import __version__
from aiodatadist._cli import main
from aiodatadist._cli.bench.arguments import MEASURING, add_bench, bench_options
from aiodatadist._cli.bench.caches import BenchCache
from aiodatadist._cli.bench.command import measure_cases, run_bench
from aiodatadist._cli.bench.figures import Row
from aiodatadist._cli.bench.initiator import Lengths, measure
from aiodatadist._cli.bench.machine import commit_of
from aiodatadist._cli.bench.options import BenchOptions
from aiodatadist._cli.bench.report import BenchReport
from aiodatadist._cli.bench.workload import MemoryKind, Op
from aiodatadist._cli.kit.options import check_target
from tests import children
from tests.profiles import at_night
from tests.strict.marks import any_memory

SHORT = ("--layers", "2", "--batch", "4", "--seconds", "0.01", "--warmup", "0", "--windows", "2", "--block")
MANY = ("4KiB:512KiB", "--memory", "pool,user,host", "--seconds", "0.25")
"""24 cases, which take several seconds: what comes after the first of them comes before the last."""
PATIENCE = 60.0


def bench(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aiodatadist", "bench", *arguments]
    return children.run(command, capture_output=True, text=True, timeout=PATIENCE, env=env, forks=True)


@contextmanager
def owner(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a ``--role prefill``. Yield the process and its address."""
    command = [sys.executable, "-m", "aiodatadist", "bench", "--role", "prefill", *arguments]
    with children.Popen(command, stdout=subprocess.PIPE, text=True, forks=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield process, line.removeprefix("listening on ").strip()
        finally:
            process.kill()


@any_memory
def test_every_operation_and_kind_of_memory(tmp_path: Path) -> None:
    into = tmp_path / "report.json"
    done = bench(
        *SHORT,
        "4KiB",
        "--op",
        "pull,push,copy",
        "--memory",
        "pool,user,host",
        "--concurrency",
        "2",
        "--json",
        str(into),
        env={**os.environ, "COLUMNS": "400"},
    )
    assert done.returncode == 0, done.stderr
    report = BenchReport.model_validate_json(into.read_text())
    assert [(row.case.op, row.case.memory) for row in report.rows] == [
        (op, m) for op in (Op.PULL, Op.PUSH, Op.COPY) for m in MemoryKind
    ]
    for row in report.rows:
        assert row.wrong == []
        assert row.transfers >= 2 * row.windows
        assert row.bytes == 4096 * 4 * 4
    assert report.ran.runtime == "soft"
    written = json.loads(into.read_text())
    assert isinstance(written["rows"][0]["gigabytes_per_second"]["median"], float)
    for column in ("Block Size (B)", "Batch Size", "B/W (GB/Sec)", "Avg Lat. (us)"):
        assert column in done.stdout
    narrow = {**os.environ, "COLUMNS": "80"}
    again = bench(*SHORT, "4KiB", "--op", "pull", "--concurrency", "2", "--compare", str(into), env=narrow)
    assert again.returncode == 0, again.stderr
    assert [line for line in again.stdout.splitlines() if len(line) > 80] == []
    assert again.stdout.count("gone") == 8


def test_a_comparison_leaves_stdout_to_json(tmp_path: Path) -> None:
    into = tmp_path / "report.json"
    assert bench(*SHORT, "4KiB", "--json", str(into)).returncode == 0
    again = bench(*SHORT, "4KiB", "--transport", "loopback", "--json", "-", "--compare", str(into))
    assert again.returncode == 0, again.stderr
    assert len(BenchReport.model_validate_json(again.stdout).rows) == 1
    assert "pull pool 4KiB x 4 x 2 layers" in again.stderr
    assert "The older report is from another machine: transport hccl, now loopback\n" in again.stderr


def test_layered_on_uvloop_and_inside_one_process() -> None:
    for more in (["--loop", "uvloop"], ["--transport", "loopback"]):
        done = bench(*SHORT, "64KiB", "--op", "layered", "--json", "-", *more)
        assert done.returncode == 0, done.stderr
        (row,) = BenchReport.model_validate_json(done.stdout).rows
        assert row.wrong == []


def test_the_report_says_how_bytes_travelled() -> None:
    for transport, way in (("auto", "hccl"), ("tcp", "tcp")):
        done = bench(*SHORT, "4KiB", "--transport", transport, "--json", "-")
        assert done.returncode == 0, done.stderr
        report = BenchReport.model_validate_json(done.stdout)
        assert report.ran.transport == way
        assert report.rows[0].wrong == []


def test_two_commands_one_after_the_other_and_at_the_same_time(tmp_path: Path) -> None:
    """Run initiators as on two machines. The owner stays, whatever becomes of them."""
    with owner("--listen", "127.0.0.1:0") as (process, address):
        command = ["--role", "decode", "--peer", address, "--device", "1", *SHORT, "4KiB", "--op", "pull,push"]
        started = [sys.executable, "-m", "aiodatadist", "bench", *command]
        with children.Popen([*started, "--seconds", "60"], stderr=subprocess.DEVNULL, forks=True) as killed:
            both = [children.Popen(started, forks=True) for _ in range(2)]
            assert [each.wait(PATIENCE) for each in both] == [0, 0]
            killed.kill()
        assert bench(*command).returncode == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130


def test_an_owner_that_dies_is_named_and_what_was_measured_is_shown() -> None:
    with owner() as (process, address):
        command = [
            sys.executable,
            "-m",
            "aiodatadist",
            "bench",
            "--role",
            "decode",
            "--peer",
            address,
            *SHORT,
            *MANY,
        ]
        with children.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, forks=True) as decode:
            assert decode.stderr is not None
            assert decode.stderr.readline().startswith("1 of 24: pull pool 4KiB")
            process.kill()
            out, errors = decode.communicate(timeout=PATIENCE)
    assert decode.returncode == 1
    ended = len(re.findall(r"^\d+ of 24: ", errors, flags=re.MULTILINE)) + 1
    assert f"case {ended + 1} of 24 failed" in errors
    assert " 4096 " in out


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_ctrl_c_shows_and_writes_what_was_measured(loop: str, tmp_path: Path) -> None:
    into = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "aiodatadist",
        "bench",
        *SHORT,
        *MANY,
        "--loop",
        loop,
        "--json",
        str(into),
    ]
    with children.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, forks=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("1 of 24: pull pool 4KiB")
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    report = BenchReport.model_validate_json(into.read_text())
    assert errors.splitlines()[-1] == f"aiodatadist: interrupted after {len(report.rows)} of 24 cases"
    assert " 4096 " in out
    assert report.rows[0].case.block == 4096
    assert report.failure == "interrupted"


async def test_an_interrupted_run_closes_its_ends_and_one_without_a_row_has_no_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = BenchOptions(blocks_of=(4096, 8192), batch=4, lengths=Lengths(0.05, 2, 0), transport="loopback")
    measured = [*options.cases()[:1]]

    async def interrupted(*arguments: Any) -> list[Row]:
        if arguments[2] in measured:
            return await measure(*arguments)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        raise AssertionError

    monkeypatch.setattr("aiodatadist._cli.bench.command.measure", interrupted)
    report = await asyncio.ensure_future(measure_cases(options, options.cases()))
    assert (len(report.rows), report.failure) == (1, "interrupted")
    measured.clear()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.ensure_future(measure_cases(options, options.cases()))


def test_against_the_kernels_own_copy() -> None:
    done = bench(*SHORT, "4KiB", "--op", "pull,push", "--memory", "user", "--against", "process_vm", "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = BenchReport.model_validate_json(done.stdout).rows
    assert [row.by for row in rows] == ["aiodatadist", "process_vm"] * 2
    assert rows[1].what == "process_vm_readv, process_vm_writev"
    assert all(row.wrong == [] and row.transfers > 0 and row.cpu_seconds_per_gigabyte > 0 for row in rows)
    assert (rows[1].post_us, rows[1].transfer_us, rows[1].loop_late_p99_us) == (None, None, None)


def test_against_memcpy_with_every_operation(tmp_path: Path) -> None:
    """Also with those, and as many at a time, that no other library has."""
    into = tmp_path / "report.json"
    more = ["--op", "pull,layered,copy", "--concurrency", "2", "--against", "memcpy"]
    done = bench(*SHORT, "4KiB", *more, "--json", str(into), env={**os.environ, "COLUMNS": "400"})
    assert done.returncode == 0, done.stderr
    rows = BenchReport.model_validate_json(into.read_text()).rows
    assert [row.by for row in rows] == ["aiodatadist", "memcpy"] * 3
    for ours, copies in zip(rows[::2], rows[1::2], strict=True):
        assert copies.case == ours.case
        assert ours.memcpy_gigabytes_per_second is not None
        assert copies.gigabytes_per_second.median == pytest.approx(ours.memcpy_gigabytes_per_second.median)
        assert copies.transfers % 2 == 0
        assert (copies.latency_us, copies.wrong) == (None, None)
    assert sum(line.split()[:1] == ["memcpy"] for line in done.stdout.splitlines()) == 3
    again = bench(*SHORT, "4KiB", *more, "--compare", str(into), env={**os.environ, "COLUMNS": "400"})
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("memcpy: ") == 3
    assert " gone " not in again.stdout


def test_with_and_without_checksums_in_turns() -> None:
    done = bench(*SHORT, "4KiB", "--op", "pull,push", "--memory", "pool,host", "--checksum", "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = BenchReport.model_validate_json(done.stdout).rows
    assert [row.by for row in rows] == ["aiodatadist", "with checksums"] * 4
    assert [row.what for row in rows] == ["", "CRC-32C of every block"] * 4
    assert [row.wrong for row in rows] == [[], None] * 4
    assert all(row.transfers > 0 and row.cpu_seconds_per_gigabyte > 0 for row in rows)


@pytest.mark.parametrize("copiers", ["", "3"], ids=["by itself", "as told"])
def test_a_report_says_how_many_threads_copied_and_of_which_state_of_a_clone(copiers: str) -> None:
    done = bench(*SHORT, "4KiB", "--json", "-", env={**os.environ, "SOFTNPU_COPIERS": copiers})
    assert done.returncode == 0, done.stderr
    report = BenchReport.model_validate_json(done.stdout)
    assert report.ran.copiers == (int(copiers) if copiers else min(4, len(os.sched_getaffinity(0))))
    root = Path(__file__).parents[2]
    assert (report.machine.commit is not None) is ((root / ".git").exists() and which("git") is not None)
    assert report.machine.aiodatadist == __version__


def test_a_package_outside_a_clone_has_no_commit(tmp_path: Path) -> None:
    assert anyio.run(commit_of, tmp_path) is None


@pytest.mark.parametrize("has_room", [False, at_night(True)], ids=["no folder", "no index"])
def test_a_library_that_cannot_be_installed_is_named(has_room: bool, tmp_path: Path) -> None:
    """Report at once a cache that cannot be written, and a package index that cannot be reached."""
    if not has_room:
        (tmp_path / "aiodatadist").touch()
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "XDG_CACHE_HOME": str(tmp_path)}
    done = bench(*SHORT, "4KiB", "--against", "mooncake", env={**os.environ, **offline})
    assert done.returncode == 1
    assert f"mooncake-transfer-engine-non-cuda>=0.3.13 cannot be installed into {tmp_path}" in done.stderr
    assert "this needs access to a package index" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_byte_that_did_not_travel_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill = BenchCache.fill

    async def fill_and_hide(self: BenchCache, owner: int) -> None:
        await fill(self, owner)
        target = self.case.moves[0].sources[0] * self.case.block
        self.views[1][target + 17] ^= 1

    monkeypatch.setattr(BenchCache, "fill", fill_and_hide)
    options = BenchOptions(
        ops=(Op.COPY,), blocks_of=(4096,), batch=4, lengths=Lengths(0.05, 2, 0), transport="loopback"
    )
    assert run_bench(options) == 1
    shown = capsys.readouterr().out
    assert "WRONG: copy of 4096 B: block" in shown
    assert "of tensor 1 does not hold block" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--role", "decode"], "--role decode needs --peer"),
        (["--peer", "127.0.0.1:1"], "--peer is for --role decode"),
        (["--role", "decode", "--peer", "nowhere"], "'nowhere' is not HOST:PORT"),
        (["--role", "decode", "--peer", "127.0.0.1:1", "--listen", "127.0.0.1:0"], "--listen is for --role prefill"),
        (["--role", "prefill", "--json", "report.json"], "--json has no effect with --role prefill"),
        (["--role", "prefill", "--op", "pull", "--seed", "0"], "--op, --seed have no effect with --role prefill"),
        (["--role", "prefill", "--no-check"], "--check has no effect with --role prefill"),
        (["--role", "prefill", "--checksum"], "--checksum has no effect with --role prefill"),
        (["--role", "prefill", "--transport", "loopback"], "needs --role both"),
        (["--block", "16X"], "'16X' is not a size"),
        (["--op", "pul"], "'pul' is not one of pull, push, layered, copy"),
        (["--seconds", "nan"], "'nan' is not a number of seconds"),
        (["--blocks", "3", "--batch", "4"], "blocks is 3: 1 transfers of 4 blocks"),
        (["--compare", "/dev/null"], "/dev/null is not a report of this command: --json writes one\n"),
        (["--compare", "/nowhere"], "--compare: cannot read /nowhere: No such file or directory\n"),
        (["--compare", sys.executable], f"{sys.executable} is not a report of this command: --json writes one\n"),
        (["--auth-key-file", "/nowhere"], "--auth-key-file '/nowhere' cannot be read: No such file or directory"),
        (["--against", "process_vm", "--op", "copy", "--batch", "2"], "--against measures pulls and pushes"),
        (["--checksum", "--op", "pull,copy", "--batch", "2"], "--checksum measures pulls and pushes"),
        (["--device", "0"], "--device 0 names 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_starts(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_every_option_of_the_end_that_measures_is_refused_by_the_owner() -> None:
    """Each has a default that is filled in later, and none that argparse knows."""
    parser = argparse.ArgumentParser()
    add_bench(parser)
    of_ends = {"role", "listen", "peer", "auth_key_file", "transport", "loop", "device", "device_ip", "local_comm_res"}
    arguments = vars(parser.parse_args([]))
    assert set(arguments) == {*of_ends, *MEASURING, "until_stdin_closes"}
    assert {name for name in MEASURING if arguments[name] is not None} == set()
    defaults = bench_options(argparse.Namespace(**arguments))
    assert (defaults.ops, defaults.layers, defaults.lengths) == ((Op.PULL,), 4, Lengths())
    assert (defaults.seed, defaults.concurrency, defaults.checksum) == (0, 1, False)
    assert defaults.blocks_of == BenchOptions().blocks_of


@pytest.mark.parametrize(
    ("option", "name", "reason"),
    [
        ("--json", "none/report.json", "there is no folder"),
        ("--json", ".", "it is a folder"),
        ("--json", "shut.json", "it is read-only"),
        ("--json", "shut/report.json", "is read-only"),
        ("--json", "n" * 300, "File name too long"),
        ("--plot", "none/plot.png", "there is no folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_starts(
    option: str,
    name: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut.json").touch()
    shut = {tmp_path / "shut", tmp_path / "shut.json"}
    monkeypatch.setattr(os, "access", lambda path, mode: path not in shut)  # root may write everywhere
    plots_as(["png", "svg"], tmp_path, monkeypatch)
    into = tmp_path / name
    assert main(["bench", option, str(into)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"aiodatadist: {option}: {into} cannot be written: ")
    assert reason in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("name", ["plot.xyz", "plot", "plot.pgf"])
def test_a_plot_without_a_format_is_told_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plots_as(["svg", "png", "pgf"], tmp_path, monkeypatch)
    assert main(["bench", "--plot", str(tmp_path / name)]) == 2
    words = f"the suffix of {tmp_path / name} is not a format of matplotlib: png, svg"
    assert capsys.readouterr().err == f"aiodatadist: --plot: {words}\n"


def plots_as(formats: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a matplotlib with these formats into place, even if none is installed."""
    canvas = SimpleNamespace(get_supported_filetypes=lambda: dict.fromkeys(formats, ""))
    backends = SimpleNamespace(FigureCanvasBase=canvas)
    (folder / "matplotlib").mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", cast("ModuleType", backends))


def test_a_target_is_neither_made_nor_changed_by_the_question(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("older")
    for name in ("report.json", "new.json"):
        check_target("--json", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "older"


def test_a_disk_that_is_full_costs_no_figures() -> None:
    done = bench(*SHORT, "4KiB", "--json", "/dev/full")
    assert done.returncode == 1
    assert " 4096 " in done.stdout
    assert done.stderr.splitlines()[-1].startswith("aiodatadist: ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_owner_that_is_not_there() -> None:
    done = bench("--role", "decode", "--peer", "127.0.0.1:1", *SHORT, "4KiB")
    assert done.returncode == 1
    assert "no link to the owner at 127.0.0.1:1: LLM_LINK_FAILED" in done.stderr
    assert "Traceback" not in done.stderr
