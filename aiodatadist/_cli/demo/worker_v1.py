"""The common part of the v1 demo's processes: a model whose KV cache is slots of tokens, seen as blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiodatadist import DataType
from aiodatadist._cli.demo.kv import CONFIG
from aiodatadist._cli.kit.errors import wrong_input
from aiodatadist.legacy import KvCache, KvCacheManager, LLMConfig, LLMDataDist, LLMReq, ModelConfig
from aiodatadist.testing.small_model import BLOCK, Array, blocks_for

PREFIX_ID = 7
REQ_ID = 1


def model_options(batch: int, tokens: int) -> dict[str, str]:
    """Return the options of a batch of slots of ``tokens`` tokens each; -1 means the length of the request."""
    config = ModelConfig()
    config.kv_shapes = [f"{batch},{tokens},{CONFIG.kv_heads},{CONFIG.head_dim}"] * CONFIG.num_tensors
    config.kv_dtypes = [DataType.DT_FLOAT] * CONFIG.num_tensors
    config.kv_tensor_format = "BSND"
    config.enable_shared_system_prefix = True
    return config.generate_options()


def config_for(tokens: int, **options: Any) -> LLMConfig:
    """Return options with a pool for ``tokens`` tokens of KV cache, including what is lost by rounding to pages."""
    nbytes = int(1.2 * tokens * CONFIG.num_tensors * CONFIG.block_bytes // BLOCK) + (8 << 20)
    return LLMConfig(ge_options={"ge.flowGraphMemMaxSize": str(nbytes)}, sync_kv_timeout=10_000, **options)


def check_memory(datadist: LLMDataDist) -> None:
    """Check that the model can compute in the cache. Raises CommandError if v1 allocates it in DEVICE memory."""
    if not datadist.runtime.is_soft:
        raise wrong_input("--v1 computes in the cache itself, which the host cannot address on an NPU: leave --v1 out")


def padded(tokens: int) -> int:
    """Round a number of tokens up to whole blocks."""
    return blocks_for(tokens) * BLOCK


def prefix_of(prompt: bytes) -> bytes:
    """Return the part of a prompt that is treated as a shared prefix: about half of it, in whole blocks, possibly none."""
    return prompt[: len(prompt) // 2 // BLOCK * BLOCK]


def request(cluster_id: int, tokens: int, prefix: bytes = b"") -> LLMReq:
    return LLMReq(REQ_ID, padded(tokens), cluster_id, 0, PREFIX_ID if prefix else 2**64 - 1)


def blocks_of(manager: KvCacheManager, cache: KvCache, slot: int) -> list[Array]:
    """Return one slot of each tensor as the model sees it: blocks in the order of the sequence."""
    shape = (-1, BLOCK, CONFIG.kv_heads, CONFIG.head_dim)
    return [array[slot].reshape(shape) for array in manager.arrays(cache)]


def digest(blocks: Sequence[Array], tokens: int) -> str:
    """Return a hash over the first blocks of every tensor: those that hold ``tokens`` tokens."""
    state = hashlib.blake2b(digest_size=16)
    for each in blocks:
        state.update(np.ascontiguousarray(each[: blocks_for(tokens)]).data)
    return state.hexdigest()
