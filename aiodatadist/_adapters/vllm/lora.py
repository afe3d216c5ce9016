"""The name of a request's adapter, with a digest of its weights if their files can be read.

An adapter's name says nothing of its weights: two engines may have loaded different versions under one name.
"""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from aiodatadist._adapters.weights import digest_of_weights

CONFIG = "adapter_config.json"
SCALES = ("r", "lora_alpha", "use_rslora", "use_dora")
"""Entries of the configuration that scale the weights. Others hold paths, which may differ between machines."""
MAX_CONFIG = 1 << 20
"""Most bytes of a configuration that are read."""


def adapter_of(request: Any) -> str:
    """Return the name of a request's adapter, and a digest of its weights if they can be read; empty without an adapter."""
    lora = getattr(request, "lora_request", None)
    if lora is None:
        return ""
    name, weights = str(lora.lora_name), weights_of(request)
    return f"{name} #{weights}" if weights else name


def weights_of(request: Any) -> str:
    """Return a digest of the weights of a request's adapter; empty if there are none, or they cannot be read.

    They are read once for each time that vLLM loads the adapter, because what is written to its folder later is not what
    the engine computes with.
    """
    lora = getattr(request, "lora_request", None)
    place = getattr(lora, "lora_path", None)
    return _digest(str(place), getattr(lora, "lora_int_id", 0)) if place else ""


@lru_cache(maxsize=1024)
def _digest(place: str, load: int) -> str:
    weights = digest_of_weights(place)
    if weights is None:
        return ""
    return blake2b(f"{weights} {_scales(place)}".encode(), digest_size=8, person=b"adist adapter").hexdigest()


def _scales(place: str) -> str:
    try:
        with (Path(place).expanduser() / CONFIG).open("rb") as opened:
            found = json.loads(opened.read(MAX_CONFIG))
        return json.dumps({name: found.get(name) for name in SCALES}, sort_keys=True)
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
