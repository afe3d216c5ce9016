"""The demo's model: a small Llama-style decoder over bytes, in numpy.

It is real where that matters for moving a KV cache: RMSNorm, rotary positions, grouped-query attention, a SwiGLU MLP,
and a KV cache in blocks of 16 tokens, which only a block table makes into a sequence. It is not trained: the weights
come from a seeded generator, so it writes gibberish, and the same gibberish every time.

Pure arithmetic: it knows neither the library nor asyncio, and runs in whatever thread calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float32]
Cache: TypeAlias = Sequence[Array]
"""K0, V0, K1, V1 ...: two tensors per layer, each ``[num_blocks, BLOCK, kv_heads, head_dim]``."""

VOCABULARY = 256
BLOCK = 16
"""Tokens in one KV block."""

_QUERIES_AT_ONCE = 64
"""Queries per attention step: 2 heads x 64 x 4096 scores are 2 MiB and stay in the second-level cache."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder. The defaults make 16 KiB of KV per block and tensor, 16 KiB per token over all layers."""

    layers: int = 8
    dim: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    hidden: int = 704
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}: must be a multiple of kv_heads, {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    @property
    def num_tensors(self) -> int:
        """Tensors of the KV cache: K and V of each layer."""
        return 2 * self.layers

    def cache_shape(self, num_blocks: int) -> list[int]:
        """Return the shape of each tensor of the KV cache."""
        return [num_blocks, BLOCK, self.kv_heads, self.head_dim]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one tensor."""
        return BLOCK * self.kv_heads * self.head_dim * 4


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer; all matrices are ``[in, out]``."""

    query: Array
    key: Array
    value: Array
    output: Array
    gate: Array
    up: Array
    down: Array


@dataclass(frozen=True)
class _Span:
    """The places of one run's tokens: first position, blocks of the whole sequence, angles of the new positions."""

    start: int
    table: NDArray[np.intp]
    rotation: Array


def blocks_for(tokens: int) -> int:
    """Return the number of KV blocks that hold this many tokens."""
    return -(-tokens // BLOCK)


def empty_cache(config: ModelConfig, num_blocks: int) -> list[Array]:
    """Return a KV cache of zeros in ordinary memory."""
    return [np.zeros(config.cache_shape(num_blocks), np.float32) for _ in range(config.num_tensors)]


class Model:
    """A decoder with seeded weights. Immutable after construction, so threads may share it.

    A *block table* lists, in sequence order, the blocks that hold a sequence: token ``t`` lives in slot ``t % BLOCK``
    of block ``block_table[t // BLOCK]``.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        random = np.random.default_rng(seed)

        def weights(rows: int, columns: int, gain: float = 1.0) -> Array:
            return random.standard_normal((rows, columns), np.float32) * np.float32(gain / np.sqrt(rows))

        c = config
        self.embedding: Array = random.standard_normal((VOCABULARY, c.dim), np.float32)
        self.layers: list[_Layer] = [
            _Layer(
                # Sharp attention: scores with a deviation of about 2.5 pick a few of thousands of tokens. With the
                # usual 1.0 an untrained model averages its context away, and a misplaced block would go unnoticed.
                query=weights(c.dim, c.heads * c.head_dim, gain=1.6),
                key=weights(c.dim, c.kv_heads * c.head_dim, gain=1.6),
                value=weights(c.dim, c.kv_heads * c.head_dim),
                output=weights(c.heads * c.head_dim, c.dim),
                gate=weights(c.dim, c.hidden),
                up=weights(c.dim, c.hidden),
                down=weights(c.hidden, c.dim),
            )
            for _ in range(c.layers)
        ]
        self.head: Array = weights(c.dim, VOCABULARY, gain=2.0)

    def prefill(
        self,
        tokens: Sequence[int],
        cache: Cache,
        block_table: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        start: int = 0,
    ) -> Array:
        """Run the prompt and leave its keys and values in the blocks of ``block_table``.

        Args:
            start: position of the first of ``tokens``; everything before it is in the cache already.
            on_layer: called with the number of layers done, in this thread; an exception from it ends the run.

        Returns:
            Logits ``[VOCABULARY]`` for the token after the prompt.
        """
        return self._forward(tokens, start, cache, block_table, on_layer)

    def decode_step(self, token: int, position: int, cache: Cache, block_table: Sequence[int]) -> Array:
        """Append ``token`` at ``position`` to the cached sequence; return logits ``[VOCABULARY]`` for the one after it."""
        return self._forward([token], position, cache, block_table, None)

    def _forward(
        self,
        tokens: Sequence[int],
        start: int,
        cache: Cache,
        block_table: Sequence[int],
        on_layer: Callable[[int], None] | None,
    ) -> Array:
        """Run tokens at positions ``start...`` against everything cached before them."""
        self._check(tokens, start, cache, block_table)
        end = start + len(tokens)
        span = _Span(start, np.asarray(block_table[: blocks_for(end)], np.intp), _rotation(self.config, start, end))
        x = self.embedding[list(tokens)]
        for index, layer in enumerate(self.layers):
            x = x + self._attention(layer, _normed(x), span, cache[2 * index], cache[2 * index + 1])
            x = x + _mlp(layer, _normed(x))
            if on_layer is not None:
                on_layer(index + 1)
        logits: Array = (_normed(x[-1:]) @ self.head)[0]
        return logits

    def _check(self, tokens: Sequence[int], start: int, cache: Cache, block_table: Sequence[int]) -> None:
        """Refuse a cache or a table that cannot hold the sequence, before a block is written."""
        needed = blocks_for(start + len(tokens))
        if not tokens:
            raise ValueError("tokens must not be empty")
        if len(block_table) < needed:
            raise ValueError(f"{start + len(tokens)} tokens need {needed} blocks, block_table has {len(block_table)}")
        if len(cache) != self.config.num_tensors:
            raise ValueError(f"cache must have {self.config.num_tensors} tensors (K and V per layer), got {len(cache)}")

    def _attention(self, layer: _Layer, x: Array, span: _Span, keys: Array, values: Array) -> Array:
        """Write this layer's new keys and values into their blocks, then attend to the whole sequence."""
        c = self.config
        count = len(x)
        query = _rotated((x @ layer.query).reshape(count, c.heads, c.head_dim), span.rotation)
        key = _rotated((x @ layer.key).reshape(count, c.kv_heads, c.head_dim), span.rotation)
        value = (x @ layer.value).reshape(count, c.kv_heads, c.head_dim)
        positions = np.arange(span.start, span.start + count)
        slots = (span.table[positions // BLOCK], positions % BLOCK)
        keys[slots] = key
        values[slots] = value
        mixed = _attend(query, _gathered(keys, span.table), _gathered(values, span.table), span.start)
        return mixed.reshape(count, c.heads * c.head_dim) @ layer.output


def _gathered(blocks: Array, table: NDArray[np.intp]) -> Array:
    """Return the blocks of one tensor in sequence order: ``[len(table) * BLOCK, kv_heads, head_dim]``."""
    _, _, kv_heads, head_dim = blocks.shape
    return np.take(blocks, table, axis=0).reshape(-1, kv_heads, head_dim)


def _attend(query: Array, keys: Array, values: Array, start: int) -> Array:
    """Return causal grouped-query attention.

    Args:
        query: ``[count, heads, head_dim]`` for positions ``start...``.
        keys, values: ``[at least start + count, kv_heads, head_dim]``; query heads share them in equal groups.

    Returns:
        ``[count, heads, head_dim]``.
    """
    count, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    scale = np.float32(1 / np.sqrt(head_dim))
    result = np.empty_like(query)
    for first in range(0, count, _QUERIES_AT_ONCE):
        last = min(first + _QUERIES_AT_ONCE, count)
        seen = start + last
        for kv_head in range(kv_heads):
            shared = slice(kv_head * group, (kv_head + 1) * group)
            rows = query[first:last, shared].transpose(1, 0, 2).reshape(-1, head_dim) * scale
            scores = rows @ keys[:seen, kv_head].T
            scores.reshape(group, last - first, seen)[:, :, start + first :] += _later(last - first)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            mixed = scores @ values[:seen, kv_head] / scores.sum(axis=-1, keepdims=True)
            result[first:last, shared] = mixed.reshape(group, last - first, head_dim).transpose(1, 0, 2)
    return result


def _later(count: int) -> Array:
    """Return ``[count, count]``: 0 for tokens that a query may see, minus infinity for the tokens after it."""
    return np.triu(np.full((count, count), -np.inf, np.float32), 1)


def _normed(x: Array) -> Array:
    """Return RMSNorm with unit gain."""
    normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-5))
    return normed


def _mlp(layer: _Layer, x: Array) -> Array:
    """Return SwiGLU: ``(silu(x gate) * (x up)) down``."""
    gate = x @ layer.gate
    swish: Array = gate / (1 + np.exp(-gate)) * (x @ layer.up)
    return swish @ layer.down


def _rotation(config: ModelConfig, start: int, end: int) -> Array:
    """Return cosines and sines of the rotary angles: ``[2, end - start, 1, head_dim / 2]``."""
    half = np.arange(config.head_dim // 2)
    angles = np.arange(start, end)[:, None, None] * config.rope_base ** (-half / half.size)
    return np.stack((np.cos(angles), np.sin(angles))).astype(np.float32)


def _rotated(heads: Array, rotation: Array) -> Array:
    """Rotate each pair (i, i + head_dim / 2) of ``[count, heads, head_dim]`` by its position's angle."""
    cosine, sine = rotation
    left, right = np.split(heads, 2, axis=-1)
    return np.concatenate((left * cosine - right * sine, left * sine + right * cosine), axis=-1)


def sample(logits: Array, seed: int, position: int, temperature: float = 0.8) -> int:
    """Return the byte for ``position``, drawn from the printable ones. The same arguments give the same byte.

    Greedy choice would do, but an untrained model then repeats itself at once.
    """
    weights = logits[32:127].astype(np.float64) / temperature
    cumulative = np.cumsum(np.exp(weights - weights.max()))
    drawn = np.random.default_rng((seed, position)).random() * cumulative[-1]
    return 32 + min(int(np.searchsorted(cumulative, drawn, side="right")), len(weights) - 1)
