"""The meaning of the numbers in a KV cache, in words that two engines compare before blocks move.

Blocks of the same shape may belong to other weights, another eight-bit float, or another order. So each of these has an
entry in the layout of an engine's blocks, beside their sizes, and a difference is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from hashlib import blake2b
from typing import Any, Final, Literal, get_args

from aiodatadist._adapters.regions import MAX_WORD
from aiodatadist._adapters.weights import digest_of_weights

Meaning = Literal["model", "model_dtype", "quantization", "cache_dtype", "attention", "rope", "lora", "engine"]
"""Entries that may differ if the users of both engines say so."""
NAMES: Final[tuple[str, ...]] = get_args(Meaning)

Difference = tuple[str | int | None, str | int | None]
"""The values of an entry here and there; None if that end does not give it."""

_DIGEST_BYTES = 8
"""Enough to tell two values apart; both ends are the user's own, so no one searches for collisions."""


def differences(
    mine: Mapping[str, str | int], theirs: Mapping[str, str | int], accepted: Container[str] = ()
) -> dict[str, Difference]:
    """Return the entries that differ, by name, except accepted ones."""
    return {
        name: (mine.get(name), theirs.get(name))
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name) and name not in accepted
    }


def word(text: str) -> str:
    """Return a text that fits into a layout: the text itself, or its beginning and a digest of all of it."""
    if len(text) <= MAX_WORD and text.isprintable():
        return text
    head = "".join(each for each in text[: MAX_WORD // 2] if each.isprintable())
    return f"{head} #{_digest(text)}"


def model_name(model: str, revision: str | None) -> str:
    """Return the name of weights. Clients see it, so a folder is named by its last part.

    A digest of the weights follows, because an update may write other weights into the same folder. If they cannot be
    read here, it is a digest of the path.
    """
    name, weights = model, digest_of_weights(model)
    if weights is not None or model.startswith(("/", ".", "~")):
        name = f"{model.rstrip('/').rpartition('/')[2]} #{weights or _digest(model)}"
    return word(f"{name}@{revision}" if revision else name)


def cache_dtype(chosen: str, model_dtype: str) -> str:
    """Return the type of keys and values. An alias and its type become the same word."""
    kind = chosen.removeprefix("torch.")
    if kind in {"", "auto", "None"}:
        kind = model_dtype.removeprefix("torch.")
    return {"fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}.get(kind, kind)


def rope(config: Any) -> str:
    """Return how a Hugging Face configuration rotates positions: ``default``, or a digest.

    Older versions of transformers have ``rope_scaling`` and ``rope_theta``, newer ones ``rope_parameters``.
    """
    text_config = getattr(config, "text_config", None)
    config = config if text_config is None else text_config
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found.update(getattr(config, name, None) or {})
    found.setdefault("rope_theta", getattr(config, "rope_theta", None))
    kind = str(found.pop("type", None) or found.get("rope_type") or "default")
    found["rope_type"] = kind
    said = json.dumps({name: value for name, value in found.items() if value is not None}, sort_keys=True, default=str)
    return word(f"{kind} #{_digest(said)}")


def engine(name: str, version: str) -> str:
    """Return an engine and its minor version: ``vllm 0.31``."""
    found = re.match(r"\d+(?:\.\d+)?", version)
    return word(f"{name} {found.group() if found else version}".strip())


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES, person=b"adist meaning").hexdigest()
