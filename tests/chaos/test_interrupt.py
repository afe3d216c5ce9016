"""Ctrl-C ends a chaos run with what was found until then."""

from __future__ import annotations

import json
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from aiodatadist._cli.chaos import command
from aiodatadist._cli.chaos.command import ChaosOptions, run_chaos
from aiodatadist._cli.chaos.linked_run import LinkedRun
from aiodatadist._cli.chaos.profiles import PROFILES
from aiodatadist._cli.kit.errors import CommandError


class Interrupted(LinkedRun):
    """A run without processes, to which Ctrl-C comes once ``looks`` checks are done. Its end is not an orderly one."""

    looks = 1

    async def _rounds(self, group: anyio.abc.TaskGroup) -> None:
        self.result.looks = self.looks
        self.result.tally.moved = 5 << 20
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep_forever()

    async def _end(self) -> None:
        self.result.violated("I3", "the owner did not end well")


class Early(Interrupted):
    looks = 0


class LeftEarly(Interrupted):
    """A run whose first profile ends by itself, with a violation; Ctrl-C comes before the second one has looked."""

    async def _rounds(self, group: anyio.abc.TaskGroup) -> None:
        if self.profile.name == "request":
            self.looks = 0
            await super()._rounds(group)
        self.result.looks = 3


class LeftAtTheEnd(Interrupted):
    """A run to which Ctrl-C comes while its processes end, before it is judged."""

    async def _rounds(self, group: anyio.abc.TaskGroup) -> None:
        self.result.looks = 3

    async def _end(self) -> None:
        self.result.violated("I3", "the owner did not end well")
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep_forever()


def options(file: Path) -> ChaosOptions:
    return ChaosOptions(60, 7, [PROFILES["one-sided"], PROFILES["request"]], ["kill"], file)


def test_an_interrupt_leaves_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LinkedRun", Interrupted)
    with pytest.raises(CommandError, match="interrupted after 0 of 2 profiles") as caught:
        run_chaos(options(tmp_path / "report.json"))
    assert caught.value.exit_code == 130
    out = capsys.readouterr().out
    assert "s, everything looked at 1 times, interrupted\n  5 MiB moved" in out
    assert "violations: 0" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [each["profile"] for each in report["profiles"]] == ["one-sided"]
    assert report["profiles"][0]["moved_bytes"] == 5 << 20


def test_an_interrupt_before_anything_was_looked_at_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LinkedRun", Early)
    with pytest.raises(KeyboardInterrupt):
        run_chaos(options(tmp_path / "report.json"))
    assert "violations" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_of_a_profile_that_has_just_begun_leaves_the_profiles_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LinkedRun", LeftEarly)
    monkeypatch.setattr(LeftEarly, "judge", lambda _: None)
    with pytest.raises(CommandError, match="interrupted after 1 of 2 profiles"):
        run_chaos(options(tmp_path / "report.json"))
    assert "1 violations; seed 7" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [each["violated"] for each in report["profiles"]] == [1, 0]


def test_an_interrupt_while_the_processes_end_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The place of the logs of a violation is told, too."""
    monkeypatch.setattr(command, "LinkedRun", LeftAtTheEnd)
    with pytest.raises(CommandError, match="interrupted after 0 of 2 profiles"):
        run_chaos(options(tmp_path / "report.json"))
    out = capsys.readouterr().out
    assert "everything looked at 3 times, interrupted\n" in out
    logs = Path(out.partition("what the processes logged is in ")[2].partition("\n")[0])
    assert logs.is_dir()
    logs.rmdir()


def test_an_interrupt_between_two_profiles_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server of the second one's pool is just starting."""

    def start(_: str) -> AbstractContextManager[tuple[str, list[int]]]:
        os.kill(os.getpid(), signal.SIGINT)
        return nullcontext(("", []))

    monkeypatch.setattr(command, "LinkedRun", LeftEarly)
    monkeypatch.setattr(LeftEarly, "judge", lambda _: None)
    monkeypatch.setattr(LeftEarly, "_end", lambda _: anyio.lowlevel.checkpoint())
    monkeypatch.setattr(command, "engine", start)
    profiles = [PROFILES["one-sided"], next(each for each in PROFILES.values() if each.door == "context")]
    with pytest.raises(CommandError, match="interrupted after 1 of 2 profiles"):
        run_chaos(ChaosOptions(60, 7, profiles, ["kill"], tmp_path / "report.json"))
    assert "0 violations" in capsys.readouterr().out
