"""vLLM engines that share the blocks of equal prefixes through a context cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.context_caching.servers import (
    MooncakeLender,
    MooncakeMaster,
    RedisServer,
    need_mooncake,
    need_redis,
    running,
)
from tests.engines.conftest import SMALL
from tests.engines.engines import BLOCK, Engine, eventually, opened, prompts
from tests.engines.test_vllm import REQUESTS, TOKENS, Watch, expected

CONNECTOR = "AioDataDistContextConnector"
DESCRIPTORS = 32
"""Of connections to a pool, and of streams."""
THREADS = 16
"""Of the calls of a pool that block."""
Served = dict[str, list[int]]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    need_redis()
    made = RedisServer()
    with running(made):
        yield made


@pytest.fixture(scope="module")
def sharing(model: Path, server: RedisServer) -> Iterator[tuple[Engine, Engine, Engine]]:
    """Two over Redis, and one whose pool is in its own process."""
    settings = {"pool": server.url, "load_seconds": 5, "save_seconds": 5}
    one = Engine(model, model / "one.log", settings, CONNECTOR)
    other = Engine(model, model / "other.log", {**settings, "device_id": 1}, CONNECTOR, **SMALL)
    embedded = Engine(model, model / "embedded.log", {"pool": "memory:?bytes=512MiB"}, CONNECTOR)
    with opened(one, other, embedded):
        yield one, other, embedded


@pytest.fixture(scope="module")
def over_mooncake(model: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two over a Mooncake master, to whose store another process lends memory."""
    need_mooncake()
    master = MooncakeMaster()
    with running(master, MooncakeLender(master)):
        settings = {"pool": master.url, "load_seconds": 10, "save_seconds": 10}
        one = Engine(model, model / "mooncake one.log", settings, CONNECTOR, **SMALL)
        other = Engine(model, model / "mooncake other.log", {**settings, "device_id": 1}, CONNECTOR, **SMALL)
        with opened(one, other):
            yield one, other


def serve(engine: Engine, name: str, wanted: list[list[int]], tokens: int = TOKENS) -> list[list[int]]:
    """Serve all prompts at the same time and return the tokens of each."""
    for i, prompt in enumerate(wanted):
        engine.say(op="add", id=f"{name}{i}", prompt=prompt, max_tokens=tokens, params=None)
    answers: Served = {answer["id"]: answer["tokens"] for answer in (engine.hear() for _ in wanted)}
    return [answers[f"{name}{i}"] for i in range(len(wanted))]


def full_blocks(wanted: list[list[int]]) -> int:
    return sum(len(prompt) // BLOCK for prompt in wanted)


def test_what_one_engine_computed_another_loads(alone: Engine, sharing: tuple[Engine, Engine, Engine]) -> None:
    one, other, _ = sharing
    wanted = prompts(REQUESTS // 2, 21)
    tokens = expected(alone, wanted)
    first, second = Watch(one, descriptors=DESCRIPTORS), Watch(other, descriptors=DESCRIPTORS)
    assert serve(one, "a", wanted) == tokens
    first.nothing_is_kept()
    assert (first.counted("loaded_blocks"), first.counted("unsaved_blocks")) == (0, 0)
    assert first.counted("saved_blocks") >= full_blocks(wanted)
    assert serve(other, "b", wanted) == tokens
    second.nothing_is_kept()
    assert second.counted("loaded_blocks") == full_blocks(wanted)
    assert second.counted("load_missed") == 0


def test_what_one_engine_computed_another_loads_over_mooncake(
    alone: Engine, over_mooncake: tuple[Engine, Engine]
) -> None:
    one, other = over_mooncake
    first = prompts(4, 30)
    for engine, name in ((one, "first"), (other, "second")):
        assert serve(engine, name, first) == expected(alone, first)
    wanted = prompts(12, 29)
    tokens = expected(alone, wanted)
    watch = Watch(one, other, descriptors=DESCRIPTORS, threads=THREADS)
    assert serve(one, "p", wanted) == tokens
    eventually(lambda: one.state()["requests"], 0)
    assert serve(other, "q", wanted) == tokens
    watch.nothing_is_kept()
    assert watch.counted("loaded_blocks") == full_blocks(wanted)


def test_prefixes_that_requests_share(alone: Engine, sharing: tuple[Engine, Engine, Engine]) -> None:
    one, other, _ = sharing
    rng = random.Random(22)
    stems = prompts(5, 22, 12 * BLOCK)
    wanted = [rng.choice(stems) + tail for tail in prompts(REQUESTS, 23, 3 * BLOCK)]
    tokens = expected(alone, wanted)
    watch = Watch(one, other, descriptors=DESCRIPTORS)
    half = len(wanted) // 2
    assert serve(one, "c", wanted[:half]) == tokens[:half]
    assert serve(other, "d", wanted[half:]) == tokens[half:]
    watch.nothing_is_kept()
    assert watch.counted("loaded_blocks") > 0
    assert serve(one, "e", wanted[half:]) == tokens[half:]


def test_an_engine_finds_its_own_blocks_again(alone: Engine, sharing: tuple[Engine, Engine, Engine]) -> None:
    embedded = sharing[2]
    wanted = prompts(10, 24)
    tokens = expected(alone, wanted)
    watch = Watch(embedded, descriptors=DESCRIPTORS)
    assert serve(embedded, "f", wanted) == tokens
    watch.nothing_is_kept()
    embedded.say(op="forget")
    assert serve(embedded, "g", wanted) == tokens
    watch.nothing_is_kept()
    assert watch.counted("loaded_blocks") == full_blocks(wanted)


def test_preempted_and_aborted_requests(alone: Engine, sharing: tuple[Engine, Engine, Engine]) -> None:
    other = sharing[1]
    wanted = [prompt + prompt[:1] * (2 * BLOCK - 10 - len(prompt)) for prompt in prompts(24, 25, 2 * BLOCK - 20)]
    watch = Watch(other, descriptors=DESCRIPTORS)
    before = other.state()["preemptions"]
    assert serve(other, "h", wanted, 300) == expected(alone, wanted, 300)
    assert other.state()["preemptions"] > before
    watch.nothing_is_kept()
    other.say(op="forget")
    for i, prompt in enumerate(wanted):  # now they are there to be loaded
        other.say(op="add", id=f"i{i}", prompt=prompt, max_tokens=TOKENS, params=None)
        if i % 2:
            other.say(op="abort", id=f"i{i}")
    watch.nothing_is_kept()
    while other.poll() is not None:
        pass
    assert serve(other, "j", wanted) == expected(alone, wanted)


def test_a_pool_that_is_killed_and_started_anew(
    alone: Engine, sharing: tuple[Engine, Engine, Engine], server: RedisServer
) -> None:
    one, other, _ = sharing
    wanted = prompts(12, 26)
    tokens = expected(alone, wanted)
    watch = Watch(one, other, descriptors=DESCRIPTORS)
    assert serve(one, "k", wanted) == tokens
    for i, prompt in enumerate(wanted):
        other.say(op="add", id=f"l{i}", prompt=prompt, max_tokens=TOKENS, params=None)
    server.kill()
    answers: dict[str, Any] = {answer["id"]: answer["tokens"] for answer in (other.hear() for _ in wanted)}
    assert [answers[f"l{i}"] for i in range(len(wanted))] == tokens
    assert serve(one, "m", prompts(4, 27)) == expected(alone, prompts(4, 27))
    server.start()
    assert serve(one, "n", prompts(4, 28)) == expected(alone, prompts(4, 28))
    watch.nothing_is_kept()
