"""Digests by which the owner of kept blocks and a peer that pulls them agree on the blocks and on their prompt.

Neither end trusts what a router carries between them. Each computes the digests of what it has itself, and the owner
compares them (``Claim`` of :mod:`aiodatadist._wire.messages`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Final, NamedTuple, Self

from aiodatadist._values import checks

DIGEST_BYTES = 16
_UINT32 = "I" if array("I").itemsize == 4 else "L"


def blocks_digest(cache_ids: Sequence[int], blocks: Sequence[int]) -> bytes:
    """Return 16 bytes over the owner's cache ids and block numbers, both in order."""
    made = blake2b(_little_endian("Q", [len(cache_ids), *cache_ids]), digest_size=DIGEST_BYTES, person=b"adist blocks")
    made.update(_little_endian("Q", blocks))
    return made.digest()


def prompt_digest(
    token_ids: Sequence[int], *, lora: str = "", salt: str = "", images: Iterable[str | bytes] = ()
) -> bytes:
    """Return 16 bytes over everything that determines the keys and values of tokens.

    Args:
        token_ids: from the first token of the prompt to the last one that the blocks hold.
        lora: the adapter's name.
        salt: separates tenants, for instance vLLM's ``cache_salt``.
        images: a hash of each image, or of other input that is not text, in order.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if a token is not an unsigned 32-bit integer.
    """
    if isinstance(images, (str, bytes)):
        raise TypeError(f"images is a {type(images).__name__}: must be a list of hashes")
    tokens = _tokens(token_ids)
    made = blake2b(digest_size=DIGEST_BYTES, person=b"adist prompt")
    for part in (_utf8(lora, "lora"), _utf8(salt, "salt"), *(_utf8(each, "images") for each in images)):
        made.update(len(part).to_bytes(8, "little") + part)
    # The tokens come last, followed by their length: otherwise two prompts with the same bytes could have the same digest.
    made.update(tokens)
    made.update(len(tokens).to_bytes(8, "little"))
    return made.digest()


def check_prompt_digest(digest: bytes | None) -> bytes | None:
    """Return the digest. Raises TypeError or ValueError if it is neither None nor 16 bytes."""
    if digest is not None and len(checks.instance(digest, "prompt_digest", bytes)) != DIGEST_BYTES:
        raise ValueError(f"prompt_digest has {len(digest)} bytes: must have {DIGEST_BYTES}, as prompt_digest() returns")
    return digest


class Refusal(StrEnum):
    """The reasons why an owner refuses a claim of blocks that it keeps.

    The names in small letters are the labels under which they are counted.
    """

    OTHER_BLOCKS = "other blocks"
    ANOTHER_PROMPT = "another prompt"
    NO_DIGESTS = "no digests"
    NO_RIGHT = "no right to claim"
    ANOTHER_CLUSTER = "another cluster"


class LeaseDigests(NamedTuple):
    """The digests that one end has of a lease, in hexadecimal as in messages. An empty text means unknown.

    Attributes:
        blocks: :func:`blocks_digest` of all blocks that are kept.
        prompt: :func:`prompt_digest` of the tokens that they hold.
    """

    blocks: str = ""
    prompt: str = ""

    @classmethod
    def of(cls, cache_id: int, blocks: Sequence[int], prompt: bytes | None) -> Self:
        """Return the digests of one cache's blocks."""
        return cls(blocks_digest([cache_id], blocks).hex(), "" if prompt is None else prompt.hex())

    def refusal(self, theirs: LeaseDigests) -> Refusal | None:
        """Return the reason why the owner, whose digests these are, refuses a peer; None if it accepts the peer.

        A peer of an older version has no digests. It is accepted unless the owner knows the prompt, because then the
        owner's caller wants the two prompts compared.
        """
        if not theirs.blocks:
            return Refusal.NO_DIGESTS if self.prompt else None
        if theirs.blocks != self.blocks:
            return Refusal.OTHER_BLOCKS
        return None if theirs.prompt == self.prompt else Refusal.ANOTHER_PROMPT


UNSAID: Final = LeaseDigests()
"""The digests of a peer of an older version, which sends none."""


def _tokens(token_ids: Sequence[int]) -> bytes:
    """Return the tokens as uint32, little-endian."""
    try:
        return _little_endian(_UINT32, token_ids)
    except TypeError as error:
        kind = type(token_ids).__name__
        raise TypeError(f"token_ids is a {kind}: must be a list of integers, as a tokenizer returns: {error}") from None
    except OverflowError:
        at, value = next((i, each) for i, each in enumerate(token_ids) if not 0 <= each < 2**32)
        raise ValueError(f"token_ids[{at}] is {value}: must be from 0 to 2**32 - 1") from None


def _little_endian(code: str, numbers: Sequence[int]) -> bytes:
    if isinstance(numbers, (bytes, bytearray)):  # an array takes these as its memory, not as numbers
        numbers = list(numbers)
    made = array(code, numbers)
    if sys.byteorder == "big":
        made.byteswap()
    return made.tobytes()


def _utf8(text: str | bytes, name: str) -> bytes:
    checks.instance(text, name, (str, bytes))
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
