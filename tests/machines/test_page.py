"""docs/machines.md, followed on two machines: its program, and each of its commands, in their order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import children, pages
from tests.machines.commands import PATIENCE
from tests.machines.networks import Machine, cable, machines

PAGE = (pages.ROOT / "docs/machines.md").read_text(encoding="utf-8")
LISTENS, OTHER = "10.0.0.5", "10.0.0.6"
"""The address on the page, and one beside it."""
OTHER_ONE, BOTH = "on the other one", "on both"
ENDLESS = ("doctor --serve", "bench --role prefill")
"""Commands that run until Ctrl-C."""


@dataclass
class Desk:
    """A user's shell on a machine.

    Attributes:
        at: its current folder.
        env: variables that the user has exported.
    """

    machine: Machine
    at: Path
    env: dict[str, str] = field(default_factory=dict)

    def start(self, line: str) -> subprocess.Popen[str]:
        """Start a line of the page, as the user's shell does."""
        command = ["ip", "netns", "exec", self.machine.namespace, "bash", "-c", f"exec {line}"]
        if line.startswith("("):
            command[-1] = line
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return children.Popen[str](
            command,
            cwd=self.at,
            env={**os.environ, **self.env, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def export(self, line: str) -> None:
        """Note a variable that the user exports."""
        name, value = re.fullmatch(r"export (\w+)=(\S+)", line).groups()  # type: ignore[union-attr]
        self.env[name] = value.replace("$PWD", str(self.at))


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[tuple[Desk, Desk]]:
    with machines("a", "b") as (a, b):
        cable(a, b)
        for machine, host in ((a, LISTENS), (b, OTHER)):
            machine.ip(f"address add {host}/24 dev net1")
        made = []
        for machine in (a, b):
            at = tmp_path / machine.label
            at.mkdir()
            (at / "two_machines.py").write_text(program(), encoding="utf-8")
            made.append(Desk(machine, at))
        yield made[0], made[1]


def program() -> str:
    """Return the page's program."""
    (text,) = (block.text for block in pages.blocks(PAGE) if block.title == "two_machines.py")
    return text


def commands() -> Iterator[tuple[str, str]]:
    """Yield each line that the page tells its reader to type, and where."""
    for block in pages.blocks(PAGE):
        if block.kind == "console":
            for line in block.text.splitlines():
                command, _, where = line.removeprefix("$ ").partition("#")
                yield command.strip(), where.strip()


def ended(process: subprocess.Popen[str]) -> str:
    """Return what a command has printed. Raises AssertionError if it has failed."""
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, f"{process.args!r}: {errors}"
    return out


def until_it_waits(process: subprocess.Popen[str]) -> str:
    """Return the line with which a command says that it waits for the other machine."""
    assert process.stdout is not None
    for line in process.stdout:
        if re.search("waiting|listening|ready", line):
            return line
    raise AssertionError(f"{process.args!r} ended: {process.communicate()}")


@pytest.mark.timeout(600)  # the model of the demo computes for a minute on a busy machine
def test_a_reader_who_types_the_page_gets_what_it_says(desks: tuple[Desk, Desk]) -> None:
    here, there = desks
    said: dict[str, str] = {}
    with ExitStack() as stack:
        waiting: subprocess.Popen[str] | None = None
        for line, where in commands():
            assert where in {"", OTHER_ONE, BOTH}, "a reader would not know where to type it"
            if where == BOTH:
                shutil.copytree(here.at / "trust", there.at / "trust")  # as the page says
                for desk in desks:
                    desk.export(line)
                continue
            desk = there if where == OTHER_ONE else here
            process = desk.start(line)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            if where == OTHER_ONE:
                said[line] = ended(process)
                assert waiting is not None
                if any(word in str(waiting.args) for word in ENDLESS):
                    waiting.kill()
                else:
                    said[str(waiting.args)] = ended(waiting)
                waiting = None
            elif line.startswith("("):
                ended(process)
            else:
                until_it_waits(process)
                waiting = process
    demos = [out for line, out in said.items() if " demo " in line]
    assert len(demos) == 2
    for out in demos:
        assert out.splitlines()[-2:] == ["KV bytes equal: yes", "tokens equal: yes"]
        assert "bytes travel by tcp" in out
    assert said[f"python two_machines.py decode {LISTENS}:26001"] == "1024 KiB moved\n"
    looked = said[f"aiodatadist doctor --peer {LISTENS}:26001"]
    assert "all streams" in looked
    assert "no fatal finding" in looked.splitlines()[-1]


def test_the_table_of_what_doctor_says_has_its_words(desks: tuple[Desk, Desk]) -> None:
    """A reader looks for what was printed."""
    from aiodatadist._cli.doctor import peer  # noqa: PLC0415 - opens the native libraries

    source = Path(peer.__file__).read_text(encoding="utf-8")
    for words in ("nothing listens on this port", "no answer within", "there is no way to it", "full packets"):
        assert words in PAGE
        assert words in source
