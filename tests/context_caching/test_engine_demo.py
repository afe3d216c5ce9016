"""The context cache demo over real servers: each run is a process, and the second loads what the first one saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from aiodatadist.testing.small_model import BLOCK
from tests import children
from tests.profiles import at_night

PROMPT = 20 * BLOCK + 3


@pytest.mark.parametrize("engine", ["redis_server", at_night("mooncake_master")])
def test_the_second_process_loads_what_the_first_one_saved(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    text = tmp_path / "prompt"
    text.write_bytes(bytes(i * i % 251 for i in range(PROMPT)))
    url = request.getfixturevalue(engine).url
    demo = [sys.executable, "-m", "aiodatadist", "demo", "--context-cache", url, "--prompt", str(text)]
    done = children.run([*demo, "--tokens", "4", "--json"], capture_output=True, text=True, check=True, forks=True)
    told = json.loads(done.stdout)
    assert told["tokens_equal"]
    first, second = told["runs"]
    assert (first["loaded_tokens"], first["saved_tokens"]) == (0, 20 * BLOCK)
    assert (second["loaded_tokens"], second["computed_tokens"]) == (20 * BLOCK, 3)
