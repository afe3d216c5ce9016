"""vLLM engines that cut their KV caches differently: other numbers of tensor-parallel workers, other block sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engines import BLOCK, Engine, Router, opened, prompts
from tests.engines.test_vllm import TOKENS, Watch, expected

SETTINGS = {"device_id": 4, "pull_seconds": 20, "lease_seconds": 10, "max_leased": 1.0, "max_awaited": 1.0}


@pytest.fixture(scope="module")
def two_workers(model: Path) -> Iterator[Engine]:
    """Start an engine whose heads are in two processes."""
    engine = Engine(model, model / "two.log", SETTINGS, tensor_parallel_size=2, num_gpu_blocks_override=41)
    with opened(engine):
        engine.generate("first", prompts(1, 10)[0], TOKENS)  # what it has to get ready takes longer than leases last
        yield engine


@pytest.mark.parametrize("direction", ["they decode", "they prefill"])
def test_two_workers_share_the_heads_of_one(
    alone: Engine, pair: tuple[Engine, Engine], two_workers: Engine, direction: str
) -> None:
    wanted = prompts(20, 11, most=8 * BLOCK)
    ends = (pair[0], two_workers) if direction == "they decode" else (two_workers, pair[1])
    watch = Watch(*ends)
    # With more at a time the slower engine has no room, and leases end while requests wait for it.
    assert Router(*ends, window=3).serve(direction, wanted, TOKENS) == expected(alone, wanted)
    watch.nothing_is_kept()
    assert watch.counted("pull_failed") == 0


def test_blocks_of_another_size_are_computed_again_on_a_cpu(
    model: Path, alone: Engine, pair: tuple[Engine, Engine]
) -> None:
    """Its kernels do not say how a block's tokens are stored."""
    other = Engine(model, model / "small.log", SETTINGS, block_size=BLOCK // 2, num_gpu_blocks_override=81)
    with opened(other):
        wanted = prompts(2, 12)
        watch = Watch(pair[0], other)
        assert Router(pair[0], other).serve("small", wanted, TOKENS) == expected(alone, wanted)
        watch.nothing_is_kept()
        assert watch.counted("pull_failed") == len(wanted)
    assert f"block_size is {BLOCK // 2} here and {BLOCK} at" in (model / "small.log").read_text()
