"""The context cache demo over real servers: each run is a process, and the second loads what the first one saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiodatadist import _cli as cli
from aiodatadist.testing.small_model import BLOCK

PROMPT = 20 * BLOCK + 3


@pytest.mark.parametrize("engine", ["redis_server", "mooncake_master"])
def test_the_second_process_loads_what_the_first_one_saved(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "prompt"
    text.write_bytes(bytes(i * i % 251 for i in range(PROMPT)))
    url = request.getfixturevalue(engine).url
    assert cli.main(["demo", "--context-cache", url, "--prompt", str(text), "--tokens", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens_equal"]
    first, second = told["runs"]
    assert (first["loaded_tokens"], first["saved_tokens"]) == (0, 20 * BLOCK)
    assert (second["loaded_tokens"], second["computed_tokens"]) == (20 * BLOCK, 3)
