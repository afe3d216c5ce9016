"""Everything that decides the contents of a page beside its tokens, from SGLang's arguments."""

from __future__ import annotations

import sys
from typing import Any

from aiodatadist._adapters import meaning


def meaning_of(args: Any, server_args: Any, model_id: str | None) -> dict[str, str]:
    """Return these properties by name.

    Args:
        args: arguments of the KV manager.
        server_args: arguments of the engine. Those that an older version does not have count as not chosen.
        model_id: name of the weights, instead of SGLang's path and revision.
    """

    def chosen(name: str, default: str) -> str:
        return str(getattr(server_args, name, None) or default)

    dtype = chosen("dtype", "auto")
    kind = str(getattr(args, "kv_cache_dtype_str", None) or chosen("kv_cache_dtype", "auto"))
    path, revision = chosen("model_path", "unknown"), getattr(server_args, "revision", None)
    has_lora = getattr(server_args, "enable_lora", None) or getattr(server_args, "lora_paths", None)
    return {
        "model": meaning.word(model_id) if model_id else meaning.model_name(path, revision),
        "model_dtype": meaning.word(dtype),
        "quantization": meaning.word(chosen("quantization", "none")),
        "cache_dtype": meaning.word(meaning.cache_dtype(kind, dtype)),
        "attention": meaning.word(chosen("attention_backend", "auto")),
        "rope": meaning.word(f"overrides {chosen('json_model_override_args', '{}')}"),
        "lora": "on" if has_lora else "none",
        "engine": meaning.engine("sglang", str(getattr(sys.modules.get("sglang"), "__version__", ""))),
    }
