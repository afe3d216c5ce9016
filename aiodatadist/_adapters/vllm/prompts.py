"""The digest of a request's prompt, as both engines compute it of their own request."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b, sha256
from importlib import import_module
from typing import Any

from aiodatadist._adapters.vllm.lora import adapter_of
from aiodatadist._values.digests import DIGEST_BYTES, prompt_digest


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


def as_offered(digest: bytes, firsts: Sequence[int]) -> bytes:
    """Return the digest of a prompt whose groups of layers are offered from these blocks on.

    A client could otherwise shift a group's blocks within the prompt. If all groups begin with the prompt, the digest is
    the prompt's own.
    """
    if not any(firsts):
        return digest
    numbers = array("Q", firsts)
    if sys.byteorder == "big":
        numbers.byteswap()
    return blake2b(digest + numbers.tobytes(), digest_size=DIGEST_BYTES, person=b"adist firsts").digest()


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
