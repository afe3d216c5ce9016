"""What can be said, and what cannot."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from pydantic import ValidationError

from aiodatadist.wire.messages import MAX_TENSORS, CacheEntry, Connect, Message, Proof, Refuse, parser
from tests.unit.wire.examples import entries, entry, hello, messages


@given(messages)
def test_message_survives_the_wire(message: Message) -> None:
    text = parser.dump_json(message)
    again = parser.validate_json(text)
    assert again == message
    assert parser.dump_json(again) == text, "both ends have to compute the same proof over it"


@given(messages)
def test_unknown_field_is_an_error(message: Message) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        parser.validate_python({**message.model_dump(), "more": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cluster_id", "1"),
        ("cluster_id", -1),
        ("cluster_id", 2**64),
        ("cluster_id", 1.0),
        ("role", 0),
        ("role", 4),
        ("nonce", "0" * 63),
        ("nonce", "A" * 64),
        ("nonce", "0" * 64 + "\n"),
        ("one_sided", 1),
        ("endpoint", None),
        ("type", "proof"),
    ],
)
def test_hello_is_strict(field: str, value: object) -> None:
    text = json.dumps({**hello(1).model_dump(), field: value})
    with pytest.raises(ValidationError):
        parser.validate_json(text)


@pytest.mark.parametrize("channel", ["", "x" * 128, "a b", "a\n", "ä", "a\0"])
def test_channel_is_a_name_that_the_vendor_takes(channel: str) -> None:
    with pytest.raises(ValidationError):
        Connect(channel=channel, timeout=1.0)


@pytest.mark.parametrize("timeout", [0.0, -1.0, 86401.0, float("nan"), float("inf")])
def test_timeout_is_a_number_of_seconds_that_passes(timeout: float) -> None:
    with pytest.raises(ValidationError):
        Connect(channel="x", timeout=timeout)


@given(entries())
def test_every_piece_of_a_cache_lies_in_the_address_space(cache: CacheEntry) -> None:
    assert all(address + cache.pieces * cache.stride <= 2**64 for address in cache.addresses)
    assert all(key.batch_index < cache.pieces for key in cache.keys)


KEY = {"kind": "request", "id": 1, "model_id": 0, "batch_index": 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"addresses": []}, "at least 1 item"),
        ({"addresses": [4096] * (MAX_TENSORS + 1)}, f"at most {MAX_TENSORS} items"),
        ({"addresses": [2**64]}, "less than"),
        ({"addresses": [4096, 2**64 - 255]}, "4 pieces of 64 bytes leave the address space"),
        ({"pieces": 2**32, "stride": 2**31}, "leave the address space"),
        ({"pieces": 0}, "greater than or equal to 1"),
        ({"stride": 0}, "greater than or equal to 1"),
        ({"keys": [KEY]}, "a key for slot 4: the cache has 4"),
        ({"placement": 2}, "Input should be 0 or 1"),
    ],
)
def test_impossible_cache_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        entry(**changes)


def test_cache_at_the_end_of_the_address_space_is_possible() -> None:
    assert entry(addresses=[2**64 - 256]).addresses == [2**64 - 256]


@pytest.mark.parametrize("status", [-2, 2**32])
def test_status_is_one_of_ours_or_looks_like_it(status: int) -> None:
    with pytest.raises(ValidationError):
        Refuse(status=status, reason="")


def test_messages_cannot_be_changed() -> None:
    proof: Any = Proof(mac="0" * 64)
    with pytest.raises(ValidationError, match="frozen"):
        proof.mac = "1" * 64
