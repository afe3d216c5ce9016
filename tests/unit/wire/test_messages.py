"""Messages that can be said, and those that cannot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from pydantic import ValidationError

from aiodatadist import LLMConfig
from aiodatadist._wire.messages import (
    MAX_NOTE,
    MAX_TENSORS,
    CacheEntry,
    Connect,
    Hello,
    Message,
    Note,
    Refuse,
    Revoke,
    Welcome,
    parser,
)
from tests.unit.wire.examples import EACH, entries, entry, hello, messages

Path = tuple[str | int, ...]


def places(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield everything in a message with its place."""
    if path:
        yield path, value
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def plain(message: Message) -> Any:
    return json.loads(parser.dump_json(message))


def changed(message: Message, path: Path, value: object) -> str:
    """Return the message as text with another value in this place."""
    copy = deepcopy(plain(message))
    inside = copy
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = value
    return json.dumps(copy)


def cases(*kinds: type) -> list[Any]:
    """Return each kind of message that holds values of these types, with the places of all of them."""
    found = [(message, [path for path, value in places(plain(message)) if type(value) in kinds]) for message in EACH]
    return [pytest.param(message, paths, id=message.type) for message, paths in found if paths]


def refuse(message: Message, path: Path, value: object) -> None:
    """Check that the message is refused with this value in this place."""
    text = changed(message, path, value)
    with pytest.raises(ValidationError):
        parser.validate_json(text)


def test_there_is_an_example_of_each_kind() -> None:
    assert Counter(type(message) for message in EACH) == Counter(get_args(Message))


@pytest.mark.parametrize("message", EACH, ids=lambda message: message.type)
def test_each_kind_survives_the_wire(message: Message) -> None:
    assert parser.validate_json(parser.dump_json(message)) == message


@given(messages)
def test_message_survives_the_wire(message: Message) -> None:
    text = parser.dump_json(message)
    again = parser.validate_json(text)
    assert again == message
    assert parser.dump_json(again) == text, "both ends must compute the same proof over it"


@given(messages.filter(lambda message: not isinstance(message, Hello)))
def test_unknown_field_is_an_error(message: Message) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        parser.validate_python({**message.model_dump(), "more": 1})


@pytest.mark.parametrize("message", EACH, ids=lambda message: message.type)
def test_unknown_field_is_an_error_however_deep(message: Message) -> None:
    for path in [(), *(path for path, value in places(plain(message)) if isinstance(value, dict))]:
        if isinstance(message, Hello):  # of whatever version its sender is: kept as they came, for the proof
            text = changed(message, (*path, "more"), {"a": [1]})
            assert json.loads(parser.dump_json(parser.validate_json(text))) == json.loads(text)
        else:
            with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
                parser.validate_json(changed(message, (*path, "more"), 1))


@pytest.mark.parametrize(("message", "paths"), cases(int, float, str, bool, dict, list))
def test_nothing_is_an_object_or_a_list_that_should_not_be(message: Message, paths: list[Path]) -> None:
    values: list[Any] = [{}, [{}], [[]]]
    for path, value in product(paths, values):
        refuse(message, path, value)


@pytest.mark.parametrize(("message", "paths"), cases(int))
def test_whole_number_is_one_in_its_range(message: Message, paths: list[Path]) -> None:
    for path, value in product(paths, ("1", None, -2, 2**64, 1.5)):
        refuse(message, path, value)


FEW_NUMBERS = {"role", "placement", "priority"}
"""Fields with one of a few numbers: pydantic takes what equals one, and makes it that one."""


@pytest.mark.parametrize(("message", "paths"), cases(int))
def test_what_looks_like_a_whole_number_is_none(message: Message, paths: list[Path]) -> None:
    for path, value in product(paths, (True, 1.0)):
        if path[-1] in FEW_NUMBERS:
            text = changed(message, path, value)
            assert json.loads(changed(message, path, 1)) == plain(parser.validate_json(text))
        else:
            refuse(message, path, value)


@pytest.mark.parametrize(("message", "paths"), cases(float))
def test_number_is_a_finite_number_of_at_least_zero(message: Message, paths: list[Path]) -> None:
    for path, value in product(paths, ("1", True, None, -2, float("nan"), float("inf"))):
        refuse(message, path, value)


@pytest.mark.parametrize(("message", "paths"), cases(bool))
def test_yes_or_no_is_nothing_else(message: Message, paths: list[Path]) -> None:
    for path, value in product(paths, (0, 1, "true", None)):
        refuse(message, path, value)


@pytest.mark.parametrize(("message", "paths"), cases(str))
def test_words_are_printable_and_of_limited_length(message: Message, paths: list[Path]) -> None:
    for path, value in product(paths, (1, None, "\n", "\0", "\u00e4", " " * (2 * MAX_NOTE))):
        refuse(message, path, value)


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
        ("heartbeat", 0),
        ("heartbeat", 5e-324),
        ("heartbeat", 0.009),
        ("heartbeat", 600.1),
        ("endpoint", None),
        ("type", "welcome"),
    ],
)
def test_hello_is_strict(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        parser.validate_json(changed(hello(1), (field,), value))


@pytest.mark.parametrize("channel", ["", "x" * 128, "a b", "a\n", "ä", "a\0"])
def test_channel_is_a_name_that_the_vendor_takes(channel: str) -> None:
    with pytest.raises(ValidationError):
        Connect(channel=channel, timeout=1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 864000.1, float("nan"), float("inf")])
def test_seconds_pass_and_are_at_most_ten_days(seconds: float) -> None:
    with pytest.raises(ValidationError):
        Connect(channel="x", timeout=seconds)
    with pytest.raises(ValidationError):
        Revoke(cache_id=1, seconds=seconds)


@pytest.mark.parametrize("payload", ["YQ==\n", "YQ===", "Y-_=", "====", "A" * (4 * MAX_NOTE // 3 + 4)])
def test_payload_looks_like_base64_of_a_notification(payload: str) -> None:
    with pytest.raises(ValidationError):
        Note(payload=payload)


@given(entries())
def test_every_piece_of_a_cache_lies_in_the_address_space(cache: CacheEntry) -> None:
    assert all(address + cache.pieces * cache.stride <= 2**64 for address in cache.addresses)


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
        ({"cache_id": 0}, "greater than or equal to 1"),
        ({"epoch": 2**32}, "less than"),
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
    proof: Any = Welcome(protocol=5, nonce="0" * 64, key_name="first", confirmation="0" * 64)
    with pytest.raises(ValidationError, match="frozen"):
        proof.confirmation = "1" * 64


@pytest.mark.parametrize("seconds", [0.01, 600])
def test_a_hello_says_every_heartbeat_interval_that_can_be_configured(seconds: float) -> None:
    interval = LLMConfig(heartbeat_interval=seconds).heartbeat_interval
    assert hello(1).model_copy(update={"heartbeat": interval}) == parser.validate_json(
        changed(hello(1), ("heartbeat",), interval)
    )
