"""The oldest versions that are tested are those that pyproject.toml allows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import lanes


def floors() -> dict[str, str]:
    """Return the oldest version of each dependency that users may have, and of what only developers need."""
    project = tomllib.loads((lanes.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    others = [text for name, extra in extras.items() if name != "dev" for text in extra]
    found: dict[str, str] = {}
    for text in [*project["dependencies"], *others, *extras["dev"]]:
        match = re.match(r"([\w.-]+)>=([\d.]+)", text)
        if match:
            found.setdefault(match[1], match[2])
    return found


def pins() -> dict[str, str]:
    lines = [line for line in lanes.OLDEST.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_every_floor_has_its_pin_and_no_other() -> None:
    assert sorted(pins()) == sorted(floors())


@pytest.mark.parametrize("name", sorted(floors()))
def test_pin_is_the_oldest_of_its_floor(name: str) -> None:
    """A floor of 2.3 is 2.3.0, or the first of 2.3 that there is."""
    assert f"{pins()[name]}.".startswith(f"{floors()[name]}."), (pins()[name], floors()[name])


def test_stamp_changes_with_what_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = tmp_path / "limits.txt"
    limits.write_text("anyio==4.6.0\n")
    lane = lanes.Lane("made-up", constraints=limits)
    before = lane.stamp()
    assert before == lane.stamp()
    assert before != lanes.Lane("made-up", extra=("sniffio",), constraints=limits).stamp()
    limits.write_text("anyio==4.7.0\n")
    assert before != lane.stamp()


def test_lane_that_cannot_be_made_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*command: str | Path) -> None:
        if "pip" in command:
            raise subprocess.CalledProcessError(1, [str(part) for part in command])
        (tmp_path / "made-up").mkdir(parents=True)

    monkeypatch.setattr(lanes, "VENVS", tmp_path)
    monkeypatch.setattr(lanes, "run", refused)
    with pytest.raises(SystemExit, match="needs a package index once"):
        lanes.make(lanes.Lane("made-up"))
    assert not (tmp_path / "made-up").exists()


def test_lane_that_is_made_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "VENVS", tmp_path)
    monkeypatch.setattr(lanes, "run", lambda *command: pytest.fail(f"{command} was run"))
    lane = lanes.Lane("made-up")
    lane.venv.mkdir()
    (lane.venv / "stamp").write_text(lane.stamp())
    lanes.make(lane)
    assert lane.python.parts[-3:] == ("made-up", "bin", "python")


def test_environment_can_be_made_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(lanes, "make", lambda lane: made.append(lane.name))
    monkeypatch.setattr(subprocess, "run", lambda *command, **_: pytest.fail(f"{command} was run"))
    monkeypatch.setattr(sys, "argv", ["lanes", "--make", "oldest"])
    lanes.main()
    assert made == ["oldest"]
