"""Both connectors in one engine: it pulls from a prefill engine, and shares prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.context_caching.servers import RedisServer, need_redis, running
from tests.engines.engines import BLOCK, Answer, Engine, Router, eventually, opened, prompts, transfer_config

TOKENS = 6


def both(redis: str, **pulls: object) -> Answer:
    """Return the settings of vLLM's MultiConnector, whose first connector with blocks loads them."""
    return {
        "connectors": [
            transfer_config("AioDataDistConnector", pulls),
            transfer_config("AioDataDistContextConnector", {"pool": redis, "device_id": pulls.get("device_id", 0)}),
        ]
    }


@pytest.fixture(scope="module")
def pair(model: Path, redis_url: str) -> Iterator[tuple[Engine, Engine]]:
    made = [Engine(model, model / f"multi{i}.log", both(redis_url, device_id=i), "MultiConnector") for i in range(2)]
    with opened(*made):
        yield made[0], made[1]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    need_redis()
    server = RedisServer()
    with running(server):
        yield server.url


def test_an_engine_pulls_and_shares_prefixes(alone: Engine, pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    free = [engine.state()["free"] for engine in pair]
    wanted = prompts(12, seed=5, most=8 * BLOCK)
    expected = [alone.generate(f"alone{i}", prompt, TOKENS)["tokens"] for i, prompt in enumerate(wanted)]
    assert Router(prefill, decode).serve("multi", wanted, TOKENS) == expected
    pulled = decode.state()["counted"]
    assert pulled["pull_done"] == len(wanted)
    assert "pull_failed" not in pulled
    eventually(lambda: prefill.state()["counted"].get("lease_taken"), len(wanted))
    full = sum(len(prompt) // BLOCK for prompt in wanted)
    eventually(lambda: prefill.state()["counted"].get("saved_blocks", 0) >= full, True)
    eventually(lambda: [engine.state()["free"] for engine in pair], free)  # once their saves have ended
    for engine in pair:
        engine.say(op="forget")
    again = [decode.generate(f"again{i}", prompt, TOKENS)["tokens"] for i, prompt in enumerate(wanted)]
    assert again == expected
    assert decode.state()["counted"]["load_done"] == sum(len(prompt) >= BLOCK for prompt in wanted)


def test_blocks_that_are_both_offered_and_shared_are_loaded_once(alone: Engine, pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts(1, seed=9, most=4 * BLOCK)
    prompt = prompt * 2
    expected = alone.generate("alone once", prompt, TOKENS)["tokens"]
    before = decode.state()["counted"]
    params = prefill.prefill("once", prompt)
    assert decode.generate("once", prompt, TOKENS, params)["tokens"] == expected
    after = decode.state()["counted"]
    assert after["pull_done"] == before.get("pull_done", 0) + 1
    assert after.get("load_done", 0) == before.get("load_done", 0)
