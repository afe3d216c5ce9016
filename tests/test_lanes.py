"""The oldest versions that are tested are those that pyproject.toml allows."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests import lanes


def floors() -> dict[str, str]:
    """Return the oldest version of each dependency that users may have, and of what only developers need.

    The extra ``sealed`` is left out: cryptography 50 needs a newer cffi than the package does.
    """
    project = tomllib.loads((lanes.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    others = [text for name, extra in extras.items() if name not in {"dev", "sealed"} for text in extra]
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
    monkeypatch.setattr(lanes, "share_package", lambda lane: None)
    lane.venv.mkdir()
    (lane.venv / "stamp").write_text(lane.stamp())
    lanes.make(lane)
    assert lane.python.parts[-3:] == ("made-up", "bin", "python")


def test_package_of_a_lane_is_the_one_that_is_installed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "VENVS", tmp_path)
    lane = lanes.Lane("made-up")
    lanes.share_package(lane)
    (found,) = importlib.metadata.distributions(path=[str(next(lane.venv.glob("lib/*/site-packages")))])
    assert found.version == importlib.metadata.version("aiodatadist")
    assert all(Path(str(file.locate())).exists() for file in found.files or () if "__pycache__" not in file.parts)
    program = lane.venv / "bin" / "aiodatadist"
    assert str(lane.python) in program.read_text()
    assert os.access(program, os.X_OK)


def test_lane_needs_what_the_package_needs() -> None:
    found = [re.match(r"[\w.-]+", text)[0] for text in lanes.package_needs()]  # type: ignore[index]
    assert {"anyio", "cffi", "pydantic", "redis", "uvloop", "numpy", "pytest", "prometheus-client"} <= set(found)
