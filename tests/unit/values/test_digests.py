"""Digests differ where what they are of differs, and are those that another implementation would make."""

from __future__ import annotations

import struct
from array import array
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist._values.digests import DIGEST_BYTES, blocks_digest, check_prompt_digest, prompt_digest

ids = st.lists(st.integers(1, 2**63 - 1), max_size=4)
numbers = st.lists(st.integers(0, 2**63 - 1), max_size=6)
few_blocks = st.tuples(ids, numbers)
texts = st.one_of(st.text(max_size=3), st.sampled_from(["", "a", "aa"]))
prompts = st.fixed_dictionaries(
    {
        "token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=4),
        "lora": texts,
        "salt": texts,
        "images": st.lists(texts, max_size=3),
    }
)


def test_a_digest_of_blocks_is_of_counted_ids_and_numbers_as_uint64() -> None:
    made = blake2b(struct.pack("<6Q", 2, 7, 8, 3, 2**63 - 1, 3), digest_size=16, person=b"adist blocks").digest()
    assert blocks_digest([7, 8], [3, 2**63 - 1, 3]) == blocks_digest((7, 8), array("Q", [3, 2**63 - 1, 3])) == made


def test_a_digest_of_a_prompt_is_of_texts_with_their_lengths_and_then_of_tokens_as_uint32() -> None:
    made = blake2b(digest_size=16, person=b"adist prompt")
    for text in (b"adapter", "sält".encode(), b"\x00\xff", b"hash"):
        made.update(struct.pack("<Q", len(text)) + text)
    made.update(struct.pack("<3I", 1, 2**32 - 1, 5) + struct.pack("<Q", 12))
    assert prompt_digest([1, 2**32 - 1, 5], lora="adapter", salt="sält", images=[b"\x00\xff", "hash"]) == made.digest()


def test_numbers_are_the_same_in_any_sequence() -> None:
    """Also in bytes, which an array takes for its memory."""
    made = prompt_digest([1, 2, 3, 4])
    for same in (bytes([1, 2, 3, 4]), bytearray([1, 2, 3, 4]), range(1, 5), (1, 2, 3, 4), array("H", [1, 2, 3, 4])):
        assert prompt_digest(same) == made


@given(few_blocks, few_blocks)
def test_other_blocks_have_another_digest(one: Any, other: Any) -> None:
    assert (blocks_digest(*one) == blocks_digest(*other)) == (one == other)


@given(st.integers(1, 9), numbers, st.integers(0, 6))
def test_an_id_is_no_number_of_a_block(cache_id: int, blocks: list[int], cut: int) -> None:
    cut = min(cut, len(blocks))
    ids = [cache_id, *blocks[:cut]]
    assert (blocks_digest(ids, blocks[cut:]) == blocks_digest([cache_id], blocks)) == (not cut)


@given(prompts, prompts)
def test_another_prompt_has_another_digest(one: Any, other: Any) -> None:
    assert (prompt_digest(**one) == prompt_digest(**other)) == (one == other)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1, 2, 3, 0]},
        {"token_ids": [1, 2]},
        {"token_ids": [2, 1, 3]},
        {"lora": "ab", "salt": ""},
        {"lora": "", "salt": "ab"},
        {"lora": "", "salt": "", "images": ["ab"]},
        {"images": ["a"]},
        {"images": ["a", "a"]},
        {"images": [b"\x01\x00\x00\x00"]},
    ],
)
def test_each_part_of_a_prompt_counts_where_it_is(change: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"token_ids": [1, 2, 3], "lora": "a", "salt": "b"}
    assert len(prompt_digest(**plain)) == DIGEST_BYTES
    assert prompt_digest(**{**plain, **change}) != prompt_digest(**plain)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"token_ids": [1, -1]}, ValueError, r"token_ids\[1\] is -1: must be from 0 to 2\*\*32 - 1"),
        ({"token_ids": [2**32]}, ValueError, r"token_ids\[0\] is 4294967296"),
        ({"token_ids": [1.0]}, TypeError, "token_ids is a list: must be a list of integers, .*float"),
        ({"token_ids": "Once"}, TypeError, "token_ids is a str: must be a list of integers"),
        ({"token_ids": [], "lora": 5}, TypeError, "lora is 5"),
        ({"token_ids": [], "salt": None}, TypeError, "salt is None"),
        ({"token_ids": [], "images": [5]}, TypeError, "images is 5"),
        ({"token_ids": [], "images": "hash"}, TypeError, "images is a str: must be a list of hashes"),
    ],
)
def test_what_is_no_prompt_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        prompt_digest(**arguments)


def test_a_caller_s_digest_is_checked() -> None:
    assert check_prompt_digest(None) is None
    assert check_prompt_digest(bytes(16)) == bytes(16)
    with pytest.raises(ValueError, match="prompt_digest has 15 bytes: must have 16"):
        check_prompt_digest(bytes(15))
    with pytest.raises(TypeError, match="prompt_digest is '00'"):
        check_prompt_digest("00")  # type: ignore[arg-type]
