"""The demo's model is a real decoder, and where its KV blocks lie makes no difference to what it says."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from aiodatadist.testing.small_model import BLOCK, Array, Model, ModelConfig, blocks_for, empty_cache, sample

Doubles: TypeAlias = NDArray[np.float64]

SMALL = ModelConfig(layers=3, dim=48, heads=6, kv_heads=2, head_dim=16, hidden=80)
PROMPT = b"A prefill process computes the KV cache of a prompt; a decode process needs it. " * 2


def assert_close(actual: Array, expected: Array) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SMALL, seed=7)


def scattered(count: int, num_blocks: int, seed: int = 1) -> list[int]:
    table: list[int] = np.random.default_rng(seed).permutation(num_blocks)[:count].tolist()
    return table


def dense_logits(model: Model, tokens: bytes) -> Array:
    """Compute the same network the slow way: whole matrices, one head at a time, no cache, double precision."""
    c = model.config
    x = model.embedding[list(tokens)].astype(np.float64)
    count = len(tokens)
    positions = np.arange(count)[:, None]
    frequencies = c.rope_base ** (-np.arange(c.head_dim // 2) / (c.head_dim // 2))
    turn = np.exp(1j * positions * frequencies)

    def norm(x: Doubles) -> Doubles:
        normed: Doubles = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return normed

    def rotate(head: Doubles) -> Doubles:
        half = c.head_dim // 2
        turned = (head[:, :half] + 1j * head[:, half:]) * turn
        return np.concatenate((turned.real, turned.imag), axis=1)

    for layer in model.layers:
        normed = norm(x)
        query, key, value = (normed @ weights.astype(np.float64) for weights in (layer.query, layer.key, layer.value))
        outputs = []
        for head in range(c.heads):
            shared = head // (c.heads // c.kv_heads)
            q = rotate(query[:, head * c.head_dim : (head + 1) * c.head_dim])
            k = rotate(key[:, shared * c.head_dim : (shared + 1) * c.head_dim])
            v = value[:, shared * c.head_dim : (shared + 1) * c.head_dim]
            scores = np.where(np.tri(count, dtype=bool), q @ k.T / np.sqrt(c.head_dim), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = x + np.concatenate(outputs, axis=1) @ layer.output
        normed = norm(x)
        gate = normed @ layer.gate
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer.up)) @ layer.down
    logits: Array = norm(x[-1:])[0] @ model.head
    return logits


def test_paged_model_agrees_with_a_dense_one(model: Model) -> None:
    table = scattered(blocks_for(len(PROMPT)), 40)
    logits = model.prefill(PROMPT, empty_cache(SMALL, 40), table)
    assert_close(logits, dense_logits(model, PROMPT))


def test_block_table_makes_no_difference_to_a_single_bit(model: Model) -> None:
    needed = blocks_for(len(PROMPT) + 1)
    in_order, permuted = empty_cache(SMALL, needed), empty_cache(SMALL, 3 * needed)
    table = scattered(needed, 3 * needed)
    first = model.prefill(PROMPT, in_order, range(needed))
    second = model.prefill(PROMPT, permuted, table)
    np.testing.assert_array_equal(first, second)
    for here, there in zip(in_order, permuted, strict=True):
        np.testing.assert_array_equal(here, there[table])
    np.testing.assert_array_equal(
        model.decode_step(65, len(PROMPT), in_order, range(needed)),
        model.decode_step(65, len(PROMPT), permuted, table),
    )


def test_only_blocks_of_the_table_are_touched(model: Model) -> None:
    table = scattered(blocks_for(len(PROMPT)), 40)
    cache = empty_cache(SMALL, 40)
    for tensor in cache:
        tensor.fill(np.nan)
    logits = model.prefill(PROMPT, cache, table)
    assert np.isfinite(logits).all()
    untouched = sorted(set(range(40)) - set(table))
    assert all(np.isnan(tensor[untouched]).all() for tensor in cache)


@pytest.mark.parametrize("split", [1, BLOCK - 1, BLOCK, BLOCK + 1, len(PROMPT) - 1])
def test_prefill_then_decode_equals_a_longer_prefill(model: Model, split: int) -> None:
    table = scattered(blocks_for(len(PROMPT)), 20)
    cache = empty_cache(SMALL, 20)
    logits = model.prefill(PROMPT[:split], cache, table)
    for position in range(split, len(PROMPT)):
        logits = model.decode_step(PROMPT[position], position, cache, table)
    longer = empty_cache(SMALL, 20)
    assert_close(logits, model.prefill(PROMPT, longer, table))
    for here, there in zip(cache, longer, strict=True):
        assert_close(here, there)


def test_future_tokens_have_no_influence(model: Model) -> None:
    table = range(20)
    short, long = empty_cache(SMALL, 20), empty_cache(SMALL, 20)
    model.prefill(PROMPT[:64], short, table)
    model.prefill(PROMPT[:64] + b"something else", long, table)
    for here, there in zip(short, long, strict=True):
        assert_close(here[:4], there[:4])


def test_position_matters(model: Model) -> None:
    """Without rotary positions, two earlier tokens could change places unnoticed by the last one."""
    one, other = empty_cache(SMALL, 1), empty_cache(SMALL, 1)
    first = model.prefill(b"ab" + b"c", one, [0])
    second = model.prefill(b"ba" + b"c", other, [0])
    assert np.abs(first - second).max() > 0.1


@pytest.fixture
def filled(model: Model) -> tuple[list[Array], list[int]]:
    """Return a cache that holds the prompt, and its block table; block 19 is in no table."""
    table = scattered(blocks_for(len(PROMPT) + 1), 19)
    cache = empty_cache(SMALL, 20)
    model.prefill(PROMPT, cache, table)
    return cache, table


def test_missing_block_changes_the_logits(model: Model, filled: tuple[list[Array], list[int]]) -> None:
    cache, table = filled
    right = model.decode_step(65, len(PROMPT), cache, table)
    for index in range(len(table) - 1):
        wrong = model.decode_step(65, len(PROMPT), cache, [*table[:index], 19, *table[index + 1 :]])
        assert np.abs(right - wrong).max() > 0.1, f"block {index} is of no importance"


def test_values_of_another_block_change_the_logits(model: Model, filled: tuple[list[Array], list[int]]) -> None:
    cache, table = filled
    right = model.decode_step(65, len(PROMPT), cache, table)
    cache[1][table[:2]] = cache[1][[table[1], table[0]]]
    assert np.abs(right - model.decode_step(65, len(PROMPT), cache, table)).max() > 0.1


def test_whole_blocks_may_change_places_because_keys_carry_their_position(
    model: Model, filled: tuple[list[Array], list[int]]
) -> None:
    """Why the demo compares bytes as well as tokens."""
    cache, table = filled
    right = model.decode_step(65, len(PROMPT), cache, table)
    exchanged = model.decode_step(65, len(PROMPT), cache, [table[1], table[0], *table[2:]])
    assert_close(exchanged, right)


def test_same_seed_gives_the_same_model_and_another_seed_another() -> None:
    logits = [Model(SMALL, seed).prefill(PROMPT, empty_cache(SMALL, 20), range(20)) for seed in (3, 3, 4)]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert np.abs(logits[0] - logits[2]).max() > 0.1


def test_layers_are_reported_in_order_and_an_exception_ends_the_run(model: Model) -> None:
    seen: list[int] = []
    model.prefill(PROMPT, empty_cache(SMALL, 20), range(20), seen.append)
    assert seen == [1, 2, 3]

    def stop(layer: int) -> None:
        raise InterruptedError(layer)

    with pytest.raises(InterruptedError):
        model.prefill(PROMPT, empty_cache(SMALL, 20), range(20), stop)


def test_sample_is_deterministic_printable_and_varied() -> None:
    logits = np.random.default_rng(0).standard_normal(256, np.float32)
    drawn = [sample(logits, 5, position) for position in range(200)]
    assert drawn == [sample(logits, 5, position) for position in range(200)]
    assert drawn != [sample(logits, 6, position) for position in range(200)]
    assert all(32 <= token < 127 for token in drawn)
    assert len(set(drawn)) > 20


def test_sample_follows_the_logits() -> None:
    logits = np.zeros(256, np.float32)
    logits[ord("k")] = 50
    assert {sample(logits, 1, position) for position in range(20)} == {ord("k")}


@pytest.mark.parametrize(
    ("tokens", "table", "tensors", "words"),
    [
        (b"", [0], 6, "empty"),
        (b"x" * 17, [0], 6, "17 tokens need 2 blocks"),
        (b"x", [0], 4, "6 tensors"),
    ],
)
def test_what_cannot_hold_the_sequence_is_refused(
    model: Model, tokens: bytes, table: list[int], tensors: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        model.prefill(tokens, empty_cache(SMALL, 2)[:tensors], table)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        ModelConfig(heads=6, kv_heads=4)
    with pytest.raises(ValueError, match="even"):
        ModelConfig(head_dim=15)


def test_default_cache_of_a_full_prompt_is_some_tens_of_megabytes() -> None:
    config = ModelConfig()
    assert config.block_bytes == 16 * 1024
    assert config.block_bytes * config.num_tensors * blocks_for(4096) == 64 << 20
