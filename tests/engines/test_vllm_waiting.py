"""Requests that wait at a decode engine for longer than their lease, and several answers to one prompt."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engines import BLOCK, Answer, Engine, eventually, opened, prompts

TOKENS, LEASE = 6, 2.0
AT_A_TIME = 3
"""Requests that the decode engine computes at a time."""


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[tuple[Engine, Engine]]:
    settings: dict[str, Any] = {"lease_seconds": LEASE, "max_leased": 1.0}
    prefill = Engine(model, model / "lender.log", settings, enable_prefix_caching=False)
    options: dict[str, Any] = {"max_num_seqs": AT_A_TIME, "enable_prefix_caching": False}
    decode = Engine(model, model / "waiter.log", {"device_id": 1, "max_awaited": 1.0}, **options)
    with opened(prefill, decode):
        yield prefill, decode


def counted(engine: Engine, name: str) -> int:
    return int(engine.state()["counted"].get(name, 0))


def finished(engine: Engine, wanted: set[str]) -> dict[str, Answer]:
    """Return the answers of these requests, as they come."""
    found: dict[str, Answer] = {}
    while found.keys() < wanted:
        answer = engine.hear()
        assert answer["id"] in wanted
        found[answer["id"]] = answer
    return found


def test_requests_that_wait_longer_than_their_lease_get_their_blocks(
    alone: Engine, pair: tuple[Engine, Engine]
) -> None:
    prefill, decode = pair
    wanted = {f"r{i}": prompt for i, prompt in enumerate(prompts(4, seed=11, most=6 * BLOCK))}
    expected = {name: alone.generate(f"alone {name}", prompt, TOKENS)["tokens"] for name, prompt in wanted.items()}
    before = counted(decode, "pull_done")
    for number in range(AT_A_TIME):
        decode.say(op="add", id=f"long{number}", prompt=[5] * 8, max_tokens=4000, params=None)
    for name, prompt in wanted.items():
        decode.say(op="add", id=name, prompt=prompt, max_tokens=TOKENS, params=prefill.prefill(name, prompt))
    until = time.monotonic() + 3 * LEASE
    while time.monotonic() < until:
        with pytest.raises(queue.Empty):
            decode.hear(0.1)  # all of them wait
        assert counted(prefill, "lease_expired") == 0
    for number in range(AT_A_TIME):
        decode.say(op="abort", id=f"long{number}")
    answers = finished(decode, set(wanted))
    assert {name: answers[name]["tokens"] for name in wanted} == expected
    assert counted(decode, "pull_done") == before + len(wanted)
    eventually(lambda: counted(prefill, "lease_taken"), len(wanted))


def test_three_answers_to_one_prompt_load_three_times(alone: Engine, pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts(1, seed=12, most=4 * BLOCK)
    expected = alone.generate("alone three", prompt, TOKENS)["tokens"]
    before, free = counted(decode, "pull_done"), prefill.state()["free"]
    params = prefill.generate("three", prompt, 1, {"do_remote_decode": True, "takers": 3})["params"]
    decode.say(op="add", id="three", prompt=prompt, max_tokens=TOKENS, params=params, n=3)
    assert decode.hear()["samples"] == [expected] * 3
    assert counted(decode, "pull_done") == before + 3
    eventually(lambda: prefill.state()["free"], free)


def test_two_answers_at_the_prefill_engine_strand_nothing(alone: Engine, pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts(1, seed=13, most=4 * BLOCK)
    expected = alone.generate("alone two", prompt, TOKENS)["tokens"]
    before, free = counted(decode, "pull_done"), prefill.state()["free"]
    kept = counted(prefill, "lease_taken")
    prefill.say(op="add", id="two", prompt=prompt, max_tokens=1, params={"do_remote_decode": True}, n=2)
    params = prefill.hear()["params"]
    assert params["takers"] == 2
    decode.say(op="add", id="two", prompt=prompt, max_tokens=TOKENS, params=params, n=2)
    assert decode.hear()["samples"] == [expected] * 2
    assert counted(decode, "pull_done") == before + 2
    eventually(lambda: prefill.state()["free"], free)
    assert counted(prefill, "lease_taken") == kept + 1
