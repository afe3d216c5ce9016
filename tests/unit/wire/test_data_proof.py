"""The proof of data connections: both ends of a channel make the same keys, and no other process makes any."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from aiodatadist._wire.data_proof import ChannelKey
from aiodatadist._wire.frames import Decoder, encode
from aiodatadist._wire.handshake import Handshake
from aiodatadist._wire.messages import AttachData, Connect
from aiodatadist.errors import AuthError, ProtocolError
from tests.unit.wire.examples import hello

KEY = ChannelKey.of(b"a secret of the link", "channel")
OURS, THEIRS = "a" * 64, "b" * 64


def travelled(message: AttachData) -> AttachData:
    (arrived,) = Decoder().feed(encode(message))
    assert isinstance(arrived, AttachData)
    return arrived


def exchanged(
    key: ChannelKey = KEY, index: int = 0, ours: str = OURS, theirs: str = THEIRS
) -> tuple[AttachData, AttachData]:
    """Return the client's message and the server's, each checked by the other end."""
    asked = travelled(key.ask(index, ours))
    key.check(asked)
    answered = travelled(key.answer(asked, theirs))
    key.check(answered, asked)
    return asked, answered


def test_both_ends_prove_themselves_and_have_the_same_keys() -> None:
    asked, answered = exchanged()
    client, server = KEY.seals(asked, answered, "client"), KEY.seals(asked, answered, "server")
    assert client is not None
    assert server is not None
    assert client == server[::-1]
    assert {len(key) for key in client} == {32}
    assert client[0] != client[1]


def test_no_two_connections_have_a_key_in_common() -> None:
    others = [
        exchanged(index=1),
        exchanged(ours="c" * 64),
        exchanged(theirs="c" * 64),
        exchanged(ChannelKey.of(b"a secret of the link", "another channel")),
        exchanged(ChannelKey.of(b"a secret of another link", "channel")),
    ]
    keys = [
        ChannelKey.of(b"a secret of the link", "another channel"),
        ChannelKey.of(b"a secret of another link", "channel"),
    ]
    of = [KEY, KEY, KEY, KEY, *keys]
    seals = [key.seals(*said, "client") for key, said in zip(of, [exchanged(), *others], strict=True)]
    each = [key for pair in seals if pair is not None for key in pair]
    assert len(set(each)) == 12


def test_the_keys_are_made_as_the_page_of_the_protocol_says() -> None:
    asked, answered = exchanged(index=3)
    secret = hmac.new(b"a secret of the link", b"aiodatadist 5 channel channel", sha256).digest()
    assert (KEY.secret, KEY.name) == (secret, sha256(b"aiodatadist 5 channel's name" + secret).hexdigest())
    said = b"aiodatadist 5 data" + bytes([3, 0]) + bytes.fromhex(OURS)
    assert asked.proof == hmac.new(secret, said, sha256).hexdigest()
    said = b"aiodatadist 5 data" + bytes([3, 0]) + bytes.fromhex(THEIRS + OURS)
    assert answered.proof == hmac.new(secret, said, sha256).hexdigest()
    extracted = hmac.new(bytes.fromhex(OURS + THEIRS), secret, sha256).digest()
    made = [
        hmac.new(extracted, b"aiodatadist 5 seals to " + to + b"\3", sha256).digest() for to in (b"server", b"client")
    ]
    assert KEY.seals(asked, answered, "client") == tuple(made)


CHANGES: dict[str, Callable[[AttachData], dict[str, Any]]] = {
    "index": lambda said: {"index": said.index + 1},
    "plain": lambda said: {"plain": not said.plain},
    "nonce": lambda _: {"nonce": "c" * 64},
    "proof": lambda said: {"proof": said.proof[:-1] + ("0" if said.proof[-1] != "0" else "1")},
    "no proof": lambda _: {"proof": "0" * 64},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_message_that_was_changed_proves_nothing(change: str) -> None:
    asked, answered = exchanged()
    with pytest.raises(AuthError, match="has a wrong proof"):
        KEY.check(asked.model_copy(update=CHANGES[change](asked)))
    with pytest.raises(AuthError, match="has a wrong proof"):
        KEY.check(answered.model_copy(update=CHANGES[change](answered)), asked)


def test_a_proof_is_of_one_channel_and_one_link() -> None:
    asked, answered = exchanged()
    for data, channel in ((b"a secret of the link", "another channel"), (b"a secret of another link", "channel")):
        other = ChannelKey.of(data, channel)
        assert other.name != KEY.name
        with pytest.raises(AuthError):
            other.check(asked)
        with pytest.raises(AuthError):
            other.check(answered, asked)


def test_what_an_end_said_itself_proves_nothing_to_it() -> None:
    asked, answered = exchanged()
    with pytest.raises(AuthError):
        KEY.check(asked, asked)
    with pytest.raises(AuthError):
        KEY.check(answered)


def test_an_answer_is_to_one_message() -> None:
    (_, recorded), (asked, _) = exchanged(), exchanged(ours="c" * 64)
    with pytest.raises(AuthError):
        KEY.check(recorded, asked)
    _, of_another_index = exchanged(index=1)
    with pytest.raises(AuthError):
        KEY.check(of_another_index, exchanged()[0])


@pytest.mark.parametrize(("ours", "theirs"), [(False, False), (True, False), (False, True)])
def test_bytes_are_sealed_unless_both_ends_let_them_travel_plain(ours: bool, theirs: bool) -> None:
    asked = KEY.ask(0, OURS, plain=ours)
    answered = KEY.answer(asked, THEIRS, plain=theirs)
    KEY.check(answered, asked)
    assert KEY.seals(asked, answered, "client") is not None
    both = KEY.ask(0, OURS, plain=True)
    assert KEY.seals(both, KEY.answer(both, THEIRS, plain=True), "server") is None


def test_no_message_and_no_repr_shows_a_key() -> None:
    asked, answered = exchanged()
    assert set(asked.model_dump()) == {"type", "channel", "index", "plain", "nonce", "proof"}
    for text in (repr(KEY), repr(asked), repr(answered), KEY.name):
        assert KEY.secret.hex() not in text
        assert repr(KEY.secret) not in text


def test_without_a_credential_the_secret_is_what_both_ends_said() -> None:
    client, server = Handshake("client", hello(1, nonce="1" * 64)), Handshake("server", hello(2, nonce="2" * 64))
    with pytest.raises(ProtocolError):
        _ = client.secret
    to_server, to_client = client.start(Connect(channel="c", timeout=1.0)), [hello(2, nonce="2" * 64)]
    for message in to_server:
        server.receive(message)
    client.receive(to_client[0])
    assert client.secret == server.secret == bytes.fromhex("1" * 64 + "2" * 64)
