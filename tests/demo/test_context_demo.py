"""The context cache demo: the second run loads what the first one saved, and says the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiodatadist import _cli as cli
from aiodatadist._cli.demo import context_demo
from aiodatadist._cli.demo.context_demo import ContextOptions, run_context_demo
from aiodatadist._cli.demo.context_worker import block_hashes
from aiodatadist._cli.demo.messages import ContextRun
from aiodatadist._cli.kit.errors import CommandError
from aiodatadist.testing.small_model import BLOCK
from tests import children


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of runs, which asyncio starts."""
    monkeypatch.setattr(subprocess, "Popen", children.Popen)


@pytest.mark.parametrize(
    ("prompt", "loaded"), [(20 * BLOCK + 3, 20 * BLOCK), (20 * BLOCK, 19 * BLOCK)], ids=["rest", "whole blocks"]
)
def test_the_second_run_loads_what_the_first_one_saved(
    prompt: int, loaded: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "prompt"
    text.write_bytes(bytes(i * i % 251 for i in range(prompt)))
    assert cli.main(["demo", "--context-cache", "--prompt", str(text), "--tokens", "12", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    first, second = told["runs"]
    assert told["tokens_equal"]
    assert len(first["text"]) == 12
    assert (first["loaded_tokens"], first["computed_tokens"], first["saved_tokens"]) == (0, prompt, 20 * BLOCK)
    assert (second["loaded_tokens"], second["computed_tokens"], second["saved_tokens"]) == (loaded, prompt - loaded, 0)
    assert second["loaded_bytes"] == loaded * 16 * 1024  # of 8 layers
    assert second["compute_seconds"] < first["compute_seconds"]


def _unwrapped(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output in one line. Each of its lines must have at most 80 columns, unless it has a path."""
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if len(line) > 80 and "/" not in line] == []
    return " ".join(out.split())


def test_it_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "prompt"
    text.write_bytes(b"x" * 100)
    command = ["demo", "--prompt", str(text), "--tokens", "2", "--context-cache"]
    assert cli.main(command) == 0
    told = _unwrapped(capsys)
    assert "the second run did not compute 96 tokens again" in told
    assert "tokens equal: yes" in told
    assert cli.main([*command, "memory:?bytes=1024"]) == 1  # no room: nothing is there the second time
    told = _unwrapped(capsys)
    assert "not saved 6 blocks: rejected" in told
    why = "the first one did not save all, since the pool has no room (6 blocks: rejected)"
    assert f"the second run found nothing that it could load; {why}" in told
    assert cli.main([*command, "memory:?bytes=1MiB"]) == 0  # room for three of the six
    told = _unwrapped(capsys)
    assert re.search(r"did not compute 48 tokens again.*since the pool has no room \(3 blocks: rejected\)", told)


def test_a_prompt_without_a_block_to_load_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "prompt"
    command = ["demo", "--prompt", str(text), "--tokens", "2", "--context-cache"]
    text.write_bytes(b"x" * BLOCK)
    assert cli.main(command) == 2
    assert "has 16 bytes, each a token: must have at least 17, because whole blocks of 16" in capsys.readouterr().err
    text.write_bytes(b"x" * (BLOCK + 1))
    assert cli.main(command) == 0


def worker(code: str) -> Sequence[str]:
    return [sys.executable, "-c", f"import sys; job = sys.stdin.read(); {code}"]


def test_with_a_server_each_run_is_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ContextOptions("redis://127.0.0.1:1", Path(__file__), 4, 0, False)
    run = ContextRun(text="same", loaded_tokens=16, computed_tokens=3)
    started = tmp_path / "started"
    says = f"open({str(started)!r}, 'a').write('x'); assert '127.0.0.1:1' in job; print({run.model_dump_json()!r})"
    assert run_context_demo(options, lambda name: worker(says)) == 0
    assert started.read_text() == "xx"
    assert "tokens equal: yes" in capsys.readouterr().out
    wrong = ContextRun(error="no server", exit_code=2)
    fails = f"open({str(started)!r}, 'a').write('y'); print({wrong.model_dump_json()!r})"
    with pytest.raises(CommandError, match="no server") as caught:
        run_context_demo(options, lambda name: worker(fails))
    assert caught.value.exit_code == 2
    assert started.read_text() == "xxy", "the second run is not tried"
    with pytest.raises(CommandError, match="ended with exit code 3: bad"):
        run_context_demo(options, lambda name: worker("sys.stderr.write('bad'); sys.exit(3)"))


@pytest.mark.parametrize("is_json", [False, True])
def test_a_password_is_not_shown(is_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    options = ContextOptions("redis://me:s3cret@127.0.0.1:1/2?memory=16MiB", Path(__file__), 4, 0, is_json)
    run = ContextRun(text="same", loaded_tokens=16)
    run_context_demo(options, lambda name: worker(f"assert 's3cret' in job; print({run.model_dump_json()!r})"))
    told = capsys.readouterr().out
    assert "s3cret" not in told
    assert "redis://me:***@127.0.0.1:1/2?memory=16MiB" in told


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("redis://me:s3#cret@h:1", "redis://me:***@h:1"),
        ("redis://me:s3/c?r@et@h:1", "redis://me:***@h:1"),
        ("redis://:s3cret@h:1", "redis://:***@h:1"),
        ("redis://h:1?password=s3cret&x=1", "redis://h:1?password=***&x=1"),
        ("rediss://h:1/2?x=1&ssl_password=s3cret", "rediss://h:1/2?x=1&ssl_password=***"),
        ("redis://h:1?PASSWORD=s3#cret", "redis://h:1?PASSWORD=***"),
        ("redis://h:1?password=s3@cret", "redis://h:***@***"),
        ("redis://me:s3?password=c@ret", "redis://me:***@***"),
        ("redis://me@h:1", "redis://me@h:1"),
        ("mooncake://h:1?metrics=2", "mooncake://h:1?metrics=2"),
    ],
)
def test_no_part_of_a_password_is_shown_wherever_it_stands(url: str, public: str) -> None:
    assert context_demo.public(url) == public


def test_a_first_run_that_loads_shows_no_gain(capsys: pytest.CaptureFixture[str]) -> None:
    run = ContextRun(text="same", loaded_tokens=4080, computed_tokens=3)
    options = ContextOptions("redis://127.0.0.1:1", Path(__file__), 4, 0, False)
    assert run_context_demo(options, lambda name: worker(f"print({run.model_dump_json()!r})")) == 0
    told = capsys.readouterr().out
    assert "the first run found 4080 tokens in the pool already" in told
    assert "instead of" not in told


def test_what_does_not_go_together_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--context-cache", "--layered"]) == 2
    assert "--layered does not go with --context-cache" in capsys.readouterr().err
    assert cli.main(["demo", "--prompt", __file__, "--context-cache", "ftp://x"]) == 2
    assert "'ftp' is not a kind of pool" in capsys.readouterr().err


def test_equal_prefixes_have_equal_hashes() -> None:
    text = bytes(range(100))
    hashes = block_hashes(text)
    assert len(hashes) == len(set(hashes)) == 100 // BLOCK
    assert block_hashes(text[: 3 * BLOCK] + b"other" * 20)[:3] == hashes[:3]
    assert block_hashes(b"x" + text[1:])[1] != hashes[1]
    assert block_hashes(text[: BLOCK - 1]) == []
