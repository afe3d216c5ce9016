"""The README's programs run as they stand there, on a port that is free."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiodatadist.context_caching import CcConfig_v1, ContextCache, MemoryPool
from tests.ports import free_port

README = Path(__file__).resolve().parent.parent / "README.md"


def program(name: str, port: int) -> str:
    blocks = re.findall(r"```python\n(# (\S+):.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (text,) = [code for code, title in blocks if title == name]
    assert "26001" in text
    return str(text).replace("26001", str(port))


@pytest.mark.parametrize("name", ["prefill.py", "decode.py"])
def test_programs_of_the_readme_are_short(name: str) -> None:
    lines = [line for line in program(name, 26001).splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 30


async def test_context_caching_of_the_readme_with_an_empty_pool_and_with_a_full_one() -> None:
    (block,) = re.findall(
        r"```python\n(async with await ContextCache.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    )
    lines = block.replace('"memory:"', "pool").replace("...  # compute", "seen.append(loaded)  # compute")
    space: dict[str, Any] = {
        "ContextCache": ContextCache,
        "CcConfig_v1": CcConfig_v1,
        "hashes": [11, 12],
        "blocks": [0, 1],
    }
    exec("async def run(pool, layers, seen):\n" + textwrap.indent(lines, "    "), space)
    seen: list[int] = []
    layers = [[np.ones((4, 16, 8), np.float16) for _ in range(2)]]
    async with await MemoryPool.open(1 << 20) as pool:
        await space["run"](pool, layers, seen)
        await space["run"](pool, layers, seen)
    assert seen == [0, 2]


def test_prefill_and_decode_of_the_readme_share_blocks() -> None:
    port = free_port()
    command = [sys.executable, "-X", "dev", "-W", "error", "-c"]
    with subprocess.Popen([*command, program("prefill.py", port)], stdout=subprocess.PIPE, text=True) as prefill:
        assert prefill.stdout is not None
        assert prefill.stdout.readline() == "ready\n"
        done = subprocess.run(
            [*command, program("decode.py", port)], capture_output=True, text=True, check=False, timeout=30
        )
        assert done.stdout == "LLM_SUCCESS 32768 [1, 2, 3, 4]\n", done.stderr
        assert done.stderr == ""
        assert prefill.stdout.read() == "cluster 2: request 7 is here\n"
    assert prefill.returncode == 0
