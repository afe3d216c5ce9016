"""Programs of the README and of pages that need a second process, a free port, or a cache that is down."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiodatadist._testing.ports import free_port
from tests import children
from tests.profiles import IS_NIGHT

DOCS = Path(__file__).resolve().parent.parent / "docs"
QUICKSTART, CACHING = DOCS / "quickstart.md", DOCS / "context-caching.md"

DECODE_SAYS, PREFILL_SAYS = "32768 bytes [1, 2, 3, 4]", "cluster 2: request 7 is here"
PYTHON = [sys.executable, *(["-X", "dev"] if IS_NIGHT else []), "-W", "error", "-c"]
"""Debug modes are of the night: they need an interpreter of their own."""


def complaints(stderr: str) -> list[str]:
    """Return what a program wrote to stderr, without what asyncio's debug mode says of a slow machine."""
    return [line for line in stderr.splitlines() if not re.fullmatch(r"Executing <.*> took \d+\.\d+ seconds", line)]


def found(page: Path, name: str) -> str:
    blocks = re.findall(r"```python\n(# (\S+):.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (text,) = [code for code, title in blocks if title == name]
    return str(text)


def program(name: str, port: int) -> str:
    text = found(QUICKSTART, name)
    assert "26001" in text
    return text.replace("26001", str(port))


README = DOCS.parent / "README.md"


def test_readme_is_short() -> None:
    """A reader knows after a minute what this is, and its program has at most 25 lines."""
    lines = [line for line in found(README, "handover.py").splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 25
    assert len(README.read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize(
    ("page", "name"), [(QUICKSTART, "prefill.py"), (QUICKSTART, "decode.py"), (CACHING, "prompts.py")]
)
def test_first_programs_are_short(page: Path, name: str) -> None:
    lines = [line for line in found(page, name).splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 30


def test_context_caching_computes_nothing_twice() -> None:
    done = children.run(
        [*PYTHON, found(CACHING, "prompts.py")], capture_output=True, text=True, check=False, timeout=30
    )
    assert (complaints(done.stderr), done.returncode) == ([], 0)
    assert [line.partition(" did")[0] for line in done.stdout.splitlines()] == ["0 of 2 blocks", "2 of 3 blocks"]


def test_context_caching_goes_on_without_its_cache() -> None:
    text = found(CACHING, "prompts.py")
    broken = text.replace("    try:\n", "    await cache.aclose()\n    try:\n", 1)
    assert broken != text
    done = children.run([*PYTHON, broken], capture_output=True, text=True, check=False, timeout=30)
    assert (complaints(done.stderr), done.returncode) == ([], 0)
    told = [line.partition(":")[0].partition(" did")[0] for line in done.stdout.splitlines()]
    rest = ["all is computed", "no instance will find these blocks"]
    assert told == [*rest, "0 of 2 blocks", *rest, "0 of 3 blocks"]


def test_layer_groups_of_the_guide_are_found_as_far_as_both_are_there() -> None:
    done = children.run([*PYTHON, found(CACHING, "hybrid.py")], capture_output=True, text=True, check=False, timeout=30)
    assert (complaints(done.stderr), done.returncode) == ([], 0)
    assert done.stdout == "3 of 4 blocks were loaded, 3 asked for\n"


def test_ems_program_of_the_migration_guide() -> None:
    done = children.run(
        [*PYTHON, found(DOCS / "migrating.md", "worker.py")], capture_output=True, text=True, check=False, timeout=30
    )
    assert (complaints(done.stderr), done.returncode) == ([], 0)
    assert done.stdout == "2 blocks of 3 are there\n"


@pytest.mark.parametrize("page", [QUICKSTART, QUICKSTART.with_suffix(".zh.md")], ids=["english", "chinese"])
def test_quick_start_says_what_prefill_and_decode_print(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [line for line in ("ready", DECODE_SAYS, PREFILL_SAYS) if f"`{line}`" not in text] == []


def test_prefill_and_decode_share_blocks() -> None:
    port = free_port()
    with children.Popen([*PYTHON, program("prefill.py", port)], stdout=subprocess.PIPE, text=True) as prefill:
        assert prefill.stdout is not None
        assert prefill.stdout.readline() == "ready\n"
        done = children.run(
            [*PYTHON, program("decode.py", port)], capture_output=True, text=True, check=False, timeout=30
        )
        assert done.stdout == f"{DECODE_SAYS}\n", done.stderr
        assert complaints(done.stderr) == []
        assert prefill.stdout.read() == f"{PREFILL_SAYS}\n"
    assert prefill.returncode == 0
