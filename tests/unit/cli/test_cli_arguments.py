"""Wrong arguments are one line on stderr and exit code 2."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from aiodatadist._cli import main
from aiodatadist._cli.doctor import arguments as doctor_arguments


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nonsense"], "nonsense"),
        (["demo", "--tokens", "0"], "'0' is not a whole number from 1 to"),
        (["demo", "--tokens", "many"], "'many'"),
        (["demo", "--port", "65536"], "from 0 to 65535"),
        (["demo", "--seed", "-1"], "'-1'"),
        (["demo", "--colour"], "--colour"),
        (["chaos", "--profile", "wild"], "--profile: 'wild' is not one of all, one-sided, request"),
        (["chaos", "--faults", "kill,rain"], "--faults: 'rain' is not one of kill, stop"),
        (["benhc"], "'benhc' is not a command; did you mean bench?"),
        (["xyz"], "'xyz' is not a command: must be demo, doctor, bench, chaos"),
        (["bench", "--batches", "3"], "--batches; did you mean --batch? (see aiodatadist bench --help)"),
        (["demo", "--layred"], "--layred; did you mean --layered? (see aiodatadist demo --help)"),
        (["--versoin"], "--versoin; did you mean --version?"),
        (["chaos", "--profile", "one-sides"], "did you mean one-sided?"),
        (["chaos", "--faults", "kil"], "did you mean kill?"),
        (["bench", "--op", "pul"], "did you mean pull?"),
        (["chaos", "--seconds", "0"], "'0' is not a number of seconds from 1 on"),
    ],
)
def test_wrong_argument_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.count("\n") == 1
    assert words in errors


class Interrupting:
    """A finder during which Ctrl-C comes."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "aiodatadist._cli":
            raise KeyboardInterrupt


def test_an_interrupt_during_the_imports_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aiodatadist._cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    (program,) = metadata.entry_points(group="console_scripts", name="aiodatadist")
    assert program.load()() == 130


INTERRUPTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""
"""A sitecustomize with a finder during which Ctrl-C comes."""


COMMANDS = {
    "module": [sys.executable, "-m", "aiodatadist", "--version"],
    "script": [sys.executable, str(Path(sys.executable).with_name("aiodatadist")), "--version"],
    "blocking": [sys.executable, "-m", "aiodatadist.blocking", "run", "script.py"],
}
INTERRUPTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
"""A script during which Ctrl-C comes."""


@pytest.mark.parametrize(
    ("command", "module"),
    [
        *[
            (command, module)
            for command in ("module", "script")
            for module in ("aiodatadist._cache.pool", "aiodatadist._cli", "aiodatadist._cli.arguments")
        ],
        ("blocking", "aiodatadist._cache.pool"),
        ("blocking", "of the script"),
    ],
)
def test_ctrl_c_is_quiet(command: str, module: str, tmp_path: Path) -> None:
    """During any import, and while a script for the vendor's library runs."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING.format(module=module))
    (tmp_path / "script.py").write_text(INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(COMMANDS[command], capture_output=True, check=False, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_the_demo_says_that_it_starts_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on a terminal: who reads a pipe is told nothing beside the results."""
    program = importlib.import_module("aiodatadist_command")
    lines: list[str] = []

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            assert "aiodatadist._cli" not in sys.modules
            lines.append(text)
            return len(text)

    monkeypatch.setattr(sys, "argv", ["aiodatadist", "demo"])
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.delitem(sys.modules, "aiodatadist._cli", raising=False)
        monkeypatch.setattr(sys, "stderr", stream)
        assert program.main() == 130
    assert "".join(lines) == "aiodatadist demo: starting\n"


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"aiodatadist {metadata.version('aiodatadist')}\n"


def test_without_a_command_there_is_the_help_and_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith("usage: aiodatadist [-h] [--version] COMMAND")
    assert all(f"\n    {command} " in errors for command in ("demo", "doctor", "bench", "chaos"))


def test_help_hides_what_is_not_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--prompt" in text
    assert "--worker" not in text


def test_interrupt_is_130_and_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor_arguments, "run_doctor", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


def test_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aiodatadist", "demo", "-h"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("usage: aiodatadist demo")


def test_missing_numpy_is_one_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("aiodatadist._cli.demo.command.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.splitlines() == ["aiodatadist: the demo's model needs numpy: pip install numpy"]
