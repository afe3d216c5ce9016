"""Ctrl-C ends a chaos run with what was found until then."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import anyio
import anyio.abc
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
