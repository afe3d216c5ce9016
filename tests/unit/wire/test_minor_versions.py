"""Messages and fields that are newer than a peer's minor version are not sent to it."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from pydantic import BaseModel, ConfigDict, create_model

from aiodatadist import ProtocolError
from aiodatadist._wire.frames import HEAD, Decoder, encode
from aiodatadist._wire.messages import (
    MINOR,
    NEWER_FIELDS,
    CacheEntry,
    EndpointInfo,
    Hello,
    KeyName,
    Message,
    PartNumbers,
)
from tests.unit.wire.examples import EACH, digest, hello, messages, pull

FIRST = {
    "hello": "protocol cluster_id role instance nonce one_sided has_key backend heartbeat links endpoint minor",
    "connect": "channel timeout",
    "accept": "",
    "ready": "epoch heartbeat_token",
    "refuse": "status reason",
    "disconnect": "reason",
    "bye": "",
    "attach_heartbeats": "token",
    "lookup": "call name",
    "found": "call cache slot",
    "grant": "cache",
    "revoke": "cache_id seconds",
    "revoked": "cache_id",
    "pull": "call name slot target src_layers dst_layers tensors_per_layer src_blocks dst_blocks dst_slot nbytes offsets "
    "parts seconds",
    "stop": "call",
    "pulled": "call stopped is_unknown status reason nbytes ranges queue_seconds transfer_seconds",
    "note": "payload",
    "taken": "",
    "ping": "call",
    "pong": "call",
    "renew": "channel seconds",
    "renewed": "channel epoch reason",
    "retire": "channel",
    "broken": "channel",
    "outdated": "call mine yours",
    "watch": "cache_id on",
    "landed": "cache_id first stop status reason",
    "own": "call on",
    "owned": "call on",
    "claim": "call lease seconds patience takers",
    "claimed": "call kept",
    "unclaim": "call lease end",
    "unsupported": "kind call",
}
"""The messages of version 4.0 and their fields, as they were: never edited, but for another major version."""
NEWER: list[dict[str, str]] = [
    {
        "pull": "checksum priority", "pulled": "checksums", "digest": "", "digests": "", "revoke": "number",
        "revoked": "number", "note": "number", "taken": "count heard", "watch": "call", "landed": "watch",
        "claimed": "seconds", "refuse": "kind",
    },
    {
        "claim": "blocks_digest prompt_digest", "claimed": "why", "unclaim": "blocks_digest prompt_digest",
        "pull": "also", "pulled": "also", "landed": "tensors", "found": "access", "grant": "access",
        "attach_data": "",
    },
]  # fmt: skip
"""What each minor version added, from the first: new fields of older messages, and new messages."""
PARTS: dict[type[BaseModel], str] = {
    EndpointInfo: "transport runtime host server_id device_id device_ip process super_device_id super_pod_id device_port "
    "host_ip backup_device_ip streams meeting",
    KeyName: "kind id model_id",
    CacheEntry: "cache_id blocks placement data_type pieces stride addresses epoch",
    PartNumbers: "nbytes src dst",
}
"""What messages contain: of these nothing can be left out."""

OF_THE_PROOF = {"hello1", "welcome"}
"""Messages that version 4 has not: an end that speaks it proves nothing."""
KINDS: dict[str, type[Any]] = {
    name: kind for kind in get_args(Message) if (name := kind.model_fields["type"].default) not in OF_THE_PROOF
}


def of_the_first(name: str) -> type[BaseModel]:
    """Return a message's model as an end of version 4.0 knows it, which refuses what it does not know."""
    fields = KINDS[name].model_fields
    known: dict[str, Any] = {each: (fields[each].rebuild_annotation(), fields[each]) for each in FIRST[name].split()}
    config = ConfigDict(extra="forbid", strict=True)
    return create_model(name, __config__=config, type=(str, name), **known)


OLD = {name: of_the_first(name) for name in FIRST}


def read_by_the_first(message: Message) -> dict[str, Any]:
    """Encode a message for an end of version 4.0, and read it as that end does."""
    return OLD[message.type].model_validate_json(encode(message, 0)[HEAD.size :]).model_dump()


def test_minor_versions_have_added_these_and_nothing_else_has_changed() -> None:
    assert len(NEWER) == MINOR
    assert set(KINDS) == set(FIRST).union(*NEWER)
    for name, kind in KINDS.items():
        since = {each: minor for minor, added in enumerate(NEWER, 1) for each in added.get(name, "").split()}
        if name in FIRST:
            assert (kind.since, NEWER_FIELDS[kind]) == (0, since), name
            assert set(kind.model_fields) == {"type", *FIRST[name].split(), *since}, name
            assert not any(kind.model_fields[each].is_required() for each in since), name
        else:
            assert kind.since == next(minor for minor, added in enumerate(NEWER, 1) if name in added), name
    for part, fields in PARTS.items():
        assert set(part.model_fields) == set(fields.split())


FULL = [
    *(each for each in EACH if each.type not in {"pull", "pulled", *OF_THE_PROOF}),
    pull(checksum=True, priority=2, also=[(2, [7], [3])]),
    next(each for each in EACH if each.type == "pulled").model_copy(
        update={"checksums": [7], "also": [(2, 64, 1, 0.5, 0.25)]}
    ),
]
"""One of each kind, with all that is new in it."""


@pytest.mark.parametrize("message", FULL, ids=lambda each: each.type)
def test_a_peer_of_version_4_0_hears_only_what_it_knows(message: Message) -> None:
    assert {each.type for each in FULL} == set(KINDS)
    if message.type not in FIRST:
        words = rf"{message.type!r} messages came with version 4\.{message.since}, the peer has 4\.0"
        with pytest.raises(ProtocolError, match=words):
            encode(message, 0)
        return
    newer = NEWER_FIELDS[type(message)]
    assert read_by_the_first(message) == message.model_dump(exclude=set(newer))
    if newer:  # the model would notice
        with pytest.raises(ValueError, match="Extra inputs are not permitted"):
            OLD[message.type].model_validate_json(encode(message)[HEAD.size :])


@given(messages)
def test_so_it_is_whatever_the_message_says(message: Message) -> None:
    if message.type in FIRST:
        assert read_by_the_first(message) == message.model_dump(exclude=set(NEWER_FIELDS[type(message)]))


@pytest.mark.parametrize("message", FULL, ids=lambda each: each.type)
def test_what_this_end_says_to_its_like_is_whole(message: Message) -> None:
    for minor in (MINOR, MINOR + 1):
        assert Decoder().feed(encode(message, minor)) == [message]


def test_fields_that_an_older_peer_leaves_out_have_their_defaults() -> None:
    decoder = Decoder()
    decoder.meet(hello(1, minor=0))
    assert decoder.feed(encode(pull(checksum=True, priority=2, also=[(2, [7], [3])]), 0)) == [pull()]


def test_a_message_that_is_newer_than_its_sender_is_refused() -> None:
    decoder = Decoder()
    assert decoder.feed(encode(digest())) == [digest()], "before it has said which version it has"
    decoder.meet(hello(1, minor=0))
    with pytest.raises(ProtocolError, match=r"'digest' messages came with version 4\.1, the sender has 4\.0"):
        decoder.feed(encode(digest()))


def test_a_hello_has_the_fields_of_its_own_version_for_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a field to hello, as if it were new: an end of each version makes the same proof of it."""
    monkeypatch.setitem(NEWER_FIELDS, Hello, {"links": 1})
    for peer in (0, MINOR):
        assert b'"links":5' in encode(hello(1, links=5), peer)
        assert b'"links":5' in encode(hello(1, links=5, minor=MINOR + 1), peer)
        assert b"links" not in encode(hello(1, minor=0), peer)


def test_a_hello_that_does_not_say_its_minor_version_is_of_the_first() -> None:
    body = encode(hello(1))[HEAD.size :].rstrip().replace(b',"minor":%d' % MINOR, b"")
    head = encode(hello(1))[: HEAD.size - 4] + len(body).to_bytes(4, "big")
    decoder = Decoder()
    assert decoder.feed(head + body) == [hello(1, minor=0)]
    assert decoder.minor == 0
