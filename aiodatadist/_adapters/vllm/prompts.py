"""The digest of a request's prompt, as both engines compute it of their own request."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from importlib import import_module
from typing import Any

from aiodatadist._adapters.vllm.lora import adapter_of
from aiodatadist._values.digests import prompt_digest


def digest_of(request: Any, tokens: int) -> bytes:
    """Return the digest of the first ``tokens`` tokens of one of vLLM's requests, and of what else decides their KV.

    That is the adapter's name and weights, ``cache_salt``, and each image or other input that begins among them, by the hash
    under which vLLM caches it. Embeddings count byte by byte.
    """
    return prompt_digest(
        [0] * tokens if request.prompt_token_ids is None else request.prompt_token_ids[:tokens],
        lora=adapter_of(request),
        salt=str(request.cache_salt or ""),
        images=[*_images(request, tokens), *_embeddings(request, tokens)],
    )


def _images(request: Any, tokens: int) -> Iterator[str]:
    for feature in request.mm_features or ():
        if feature.mm_position.offset < tokens:
            yield str(feature.identifier)


def _embeddings(request: Any, tokens: int) -> Iterator[bytes]:
    given = getattr(request, "prompt_embeds", None)
    if given is None:
        return
    rows = given[:tokens].detach().cpu().contiguous().view(-1)
    yield sha256(memoryview(rows.view(import_module("torch").uint8).numpy())).digest()
    mask = getattr(request, "prompt_is_token_ids", None)
    if mask is not None:
        yield bytes(map(bool, mask[:tokens]))
