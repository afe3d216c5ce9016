"""Everything that decides the contents of a block beside its tokens, from vLLM's configuration."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from aiodatadist._adapters import meaning

logger = logging.getLogger(__name__)


def meaning_of(vllm_config: Any, model_id: str | None) -> dict[str, str]:
    """Return these properties by name. They are equal in the scheduler and in all workers of an engine.

    Args:
        model_id: name of the weights, instead of vLLM's name and revision.
    """
    config, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = str(config.dtype)
    # a branch such as "main" has other weights after an update
    revision = getattr(getattr(config, "hf_config", None), "_commit_hash", None) or config.revision
    return {
        "model": meaning.word(model_id) if model_id else meaning.model_name(str(config.model), revision),
        "model_dtype": meaning.word(dtype.removeprefix("torch.")),
        "quantization": meaning.word(str(getattr(config, "quantization", None) or "none")),
        "cache_dtype": meaning.word(meaning.cache_dtype(str(cache.cache_dtype), dtype)),
        "attention": meaning.word(_chosen_attention(vllm_config)),
        "rope": meaning.rope(getattr(config, "hf_config", None)),
        "lora": meaning.word(_lora(getattr(vllm_config, "lora_config", None))),
        "engine": meaning.engine("vllm", str(getattr(sys.modules.get("vllm"), "__version__", ""))),
    }


def with_layers(said: dict[str, str], vllm_config: Any) -> dict[str, str]:
    """Return the same for a worker, where the attention of the layers is known."""
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    names = sorted({name for layer in layers.values() if (name := _attention_of(layer))})
    if not names:
        return said
    packing = getattr(vllm_config.cache_config, "kv_cache_layout", None) or _packing()
    return {**said, "attention": meaning.word(f"{'+'.join(names)} {packing}".strip())}


def _chosen_attention(vllm_config: Any) -> str:
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    chosen = getattr(backend, "name", None) or backend or os.environ.get("VLLM_ATTENTION_BACKEND") or "auto"
    return f"{chosen} {_packing()}".strip()


def _packing() -> str:
    """Return the order of tokens and heads in a block, if the user chose one."""
    return os.environ.get("VLLM_KV_CACHE_LAYOUT", "")


def _attention_of(layer: Any) -> str:
    """Return the attention of one layer; empty if it has none, or does not say."""
    find = getattr(layer, "get_attn_backend", None)
    try:
        backend = find() if callable(find) else getattr(layer, "attn_backend", None)
        return "" if backend is None else str(backend.get_name())
    except Exception:  # whatever vLLM raises: this is private and changes between versions
        logger.debug("a layer does not say which attention it has", exc_info=True)
        return ""


def _lora(config: Any) -> str:
    """Say if adapters may change the weights. The adapter of a request is part of its prompt's digest."""
    if config is None:
        return "none"
    return f"on, {str(getattr(config, 'lora_dtype', 'auto')).removeprefix('torch.')}"
