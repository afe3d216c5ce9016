"""The program of docs/machines.md on two machines, as the page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import children, pages
from tests.machines.networks import Machine, cable, machines

LISTENS = "10.0.0.5"
KEYS = f"first {'5a' * 32}\n"


def program() -> str:
    """Return the page's program."""
    blocks = pages.blocks((pages.ROOT / "docs/machines.md").read_text(encoding="utf-8"))
    (text,) = (block.text for block in blocks if block.title == "two_machines.py")
    return text


def trusting(folder: Path) -> Path:
    """Make a folder of keys, as on each of the two machines."""
    folder.mkdir(mode=0o700)
    (folder / "keys").touch(0o600)
    (folder / "keys").write_text(KEYS, encoding="ascii")
    return folder


def started(machine: Machine, script: Path, trust: Path, *words: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", machine.namespace, "env", f"AIODATADIST_TRUST={trust}", sys.executable]
    return children.Popen[str](
        [*command, str(script), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_program_of_the_page_moves_blocks_between_two_machines(tmp_path: Path) -> None:
    script = tmp_path / "two_machines.py"
    script.write_text(program(), encoding="utf-8")
    with machines("a", "b") as (a, b):
        cable(a, b)
        for machine, host in ((a, LISTENS), (b, "10.0.0.6")):
            machine.ip(f"address add {host}/24 dev net1")
        place = f"{LISTENS}:26001"
        with started(a, script, trusting(tmp_path / "one"), "prefill", place) as prefill:
            assert prefill.stdout is not None
            assert prefill.stdout.readline() == "ready\n"
            with started(b, script, trusting(tmp_path / "other"), "decode", place) as decode:
                words, errors = decode.communicate()
                assert words == "1024 KiB moved\n", errors
            prefill.communicate()
            assert (prefill.returncode, decode.returncode) == (0, 0)
