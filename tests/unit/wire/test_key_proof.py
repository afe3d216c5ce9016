"""The proof of a key: in each state each message is answered, or ends it. Without the key there is no proof."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import AuthError, IncompatiblePeer, LinkError, ProtocolError
from aiodatadist._config.trust import Key
from aiodatadist._wire.frames import Decoder, Unknown, encode
from aiodatadist._wire.key_proof import KeyProof, ProofState, SessionKeys, Side, session_keys
from aiodatadist._wire.messages import PLAIN_PROTOCOL, PROTOCOL, Accept, Bye, Hello1, Message, Refuse, Welcome
from tests.unit.wire.examples import hello, messages

FIRST, SECOND = Key("first", b"1" * 32), Key("second", b"2" * 32)


def travelled(message: Message | None) -> Message:
    assert message is not None
    (said,) = Decoder().feed(encode(message))
    assert not isinstance(said, Unknown)
    return said


def proved(client: KeyProof, server: KeyProof) -> tuple[SessionKeys, SessionKeys]:
    client.receive(travelled(server.receive(travelled(client.start()))))
    server.sealed()
    assert client.keys is not None
    assert server.keys is not None
    return client.keys, server.keys


def test_both_ends_derive_the_same_keys() -> None:
    client, server = KeyProof("client", [FIRST]), KeyProof("server", [SECOND, FIRST])
    ours, theirs = proved(client, server)
    assert ours == theirs
    assert (client.state, server.state) == (ProofState.PROVED, ProofState.PROVED)
    assert client.credential == server.credential == "first"
    each = [
        bytes.fromhex(ours.confirmation),
        ours.frames_to_server,
        ours.frames_to_client,
        ours.beats_to_server,
        ours.beats_to_client,
    ]
    assert {len(key) for key in each} == {32}
    assert len(set(each)) == 5


def test_the_keys_are_those_of_hkdf_with_sha256() -> None:
    hello1 = Hello1(protocols=[5], nonce="ab" * 32, key_names=["first"])
    welcome = Welcome(protocol=5, nonce="cd" * 32, key_name="first", confirmation="0" * 64)
    both = encode(hello1) + encode(welcome)
    extracted = hmac.new(bytes.fromhex("ab" * 32 + "cd" * 32), FIRST.secret, sha256).digest()
    blocks = [b""]
    for number in range(1, 6):
        blocks.append(hmac.new(extracted, blocks[-1] + b"aiodatadist 5" + both + bytes([number]), sha256).digest())
    confirmed = welcome.model_copy(update={"confirmation": "f" * 64})
    confirmation = hmac.new(blocks[1], both, sha256).hexdigest()
    assert session_keys(FIRST.secret, hello1, confirmed) == SessionKeys(confirmation, *blocks[2:])


def test_each_end_seals_with_the_key_with_which_the_other_one_checks() -> None:
    keys, _ = proved(KeyProof("client", [FIRST]), KeyProof("server", [FIRST]))
    for side, other in (("client", "server"), ("server", "client")):
        sealer, opener = keys.frames(side)[0], keys.frames(other)[1]  # type: ignore[arg-type]
        data = sealer.sealed(b"said")
        assert opener.counter_of(data) == 0
        assert keys.frames(side)[1].counter_of(data) is None, "its own direction"  # type: ignore[arg-type]
    assert keys.beats("client") == keys.beats("server")[::-1]


def test_a_server_takes_the_first_key_of_the_clients_that_it_has() -> None:
    for server_keys, chosen in (([FIRST, SECOND], "second"), ([FIRST], "first")):
        client, server = KeyProof("client", [SECOND, FIRST]), KeyProof("server", server_keys)
        proved(client, server)
        assert client.credential == server.credential == chosen


def test_the_first_messages_say_nothing_about_either_end() -> None:
    client, server = KeyProof("client", [FIRST]), KeyProof("server", [FIRST])
    hello1 = client.start()
    welcome = server.receive(hello1)
    assert set(hello1.model_dump()) == {"type", "protocols", "nonce", "key_names", "opens"}
    assert welcome is not None
    assert set(welcome.model_dump()) == {"type", "protocol", "nonce", "key_name", "confirmation"}


def test_the_key_of_heartbeats_is_of_one_link_and_its_name_does_not_tell_it() -> None:
    (one, _), (other, _) = (proved(KeyProof("client", [FIRST]), KeyProof("server", [FIRST])) for _ in range(2))
    assert one.heartbeats.name != other.heartbeats.name
    assert one.heartbeats.secret == one.beats_to_server + one.beats_to_client
    assert one.heartbeats.secret.hex() not in one.heartbeats.name


SECRETS = {"session": "<SessionKeys>", "key": "<Key first>"}


def test_no_repr_shows_a_key() -> None:
    keys, _ = proved(KeyProof("client", [FIRST]), KeyProof("server", [FIRST]))
    assert (repr(keys), repr(FIRST)) == (SECRETS["session"], SECRETS["key"])


def in_state(side: Side, state: ProofState) -> KeyProof:
    end, other = KeyProof(side, [FIRST]), KeyProof("server" if side == "client" else "client", [FIRST])
    match side, state:
        case "client", ProofState.WELCOME:
            end.start()
        case "client", ProofState.PROVED:
            proved(end, other)
        case "server", ProofState.SEAL:
            end.receive(other.start())
        case "server", ProofState.PROVED:
            proved(other, end)
        case _, ProofState.OVER:
            end.start()
            with pytest.raises(LinkError):
                end.receive(Bye())
    assert end.state is state
    return end


HELLO1 = Hello1(protocols=[PROTOCOL], nonce="a" * 64, key_names=["first"])
EVENTS: dict[str, Callable[[KeyProof], object]] = {
    "hello1": lambda end: end.receive(HELLO1),
    "welcome": lambda end: end.receive(
        Welcome(protocol=PROTOCOL, nonce="b" * 64, key_name="first", confirmation="c" * 64)
    ),
    "hello": lambda end: end.receive(hello(7)),
    "refuse": lambda end: end.receive(Refuse(status=0, reason="no", kind="key")),
    "another message": lambda end: end.receive(Accept()),
    "a message of a newer version": lambda end: end.receive(Unknown("news", 0)),
    "a sealed frame": lambda end: end.sealed(),
}
ANSWERS = {
    ("server", ProofState.HELLO1, "hello1"): ProofState.SEAL,
    ("server", ProofState.SEAL, "a sealed frame"): ProofState.PROVED,
    ("server", ProofState.PROVED, "a sealed frame"): ProofState.PROVED,
    ("client", ProofState.PROVED, "a sealed frame"): ProofState.PROVED,
}
"""All that does not end a proof. A welcome does not end it either, if it is confirmed."""
ERRORS = {
    ("client", ProofState.WELCOME, "welcome"): AuthError,
    ("client", ProofState.WELCOME, "refuse"): AuthError,
    ("client", ProofState.WELCOME, "hello"): AuthError,
    ("server", ProofState.HELLO1, "hello"): AuthError,
}
"""Events that end a proof otherwise than by a ProtocolError."""


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(
    ("side", "state"),
    [
        ("client", ProofState.WELCOME),
        ("client", ProofState.PROVED),
        ("client", ProofState.OVER),
        ("server", ProofState.HELLO1),
        ("server", ProofState.SEAL),
        ("server", ProofState.PROVED),
        ("server", ProofState.OVER),
    ],
)
def test_each_event_in_each_state_is_answered_or_ends_the_proof(side: Side, state: ProofState, event: str) -> None:
    end = in_state(side, state)
    expected = ANSWERS.get((side, state, event))
    if expected is not None:
        EVENTS[event](end)
        assert end.state is expected
        return
    with pytest.raises(LinkError) as caught:
        EVENTS[event](end)
    assert type(caught.value) is ERRORS.get((side, state, event), ProtocolError)
    assert not caught.value.is_proved
    assert end.state is ProofState.OVER


@given(st.sampled_from(["client", "server"]), st.lists(messages, max_size=6))
def test_without_the_key_no_words_prove_it(side: Side, said: list[Message]) -> None:
    end = KeyProof(side, [FIRST])
    end.start()
    for message in said:
        try:
            end.receive(message)
        except LinkError:
            assert end.state is ProofState.OVER
    assert end.state is not ProofState.PROVED


def test_a_server_without_the_key_confirms_nothing() -> None:
    client, liar = KeyProof("client", [FIRST]), KeyProof("server", [Key("first", b"x" * 32)])
    welcome = liar.receive(client.start())
    assert welcome is not None
    with pytest.raises(AuthError, match="the peer does not have this end's key 'first'"):
        client.receive(welcome)


def test_names_of_keys_may_differ() -> None:
    """Prove one secret under two names: one end has a folder, and the other end has ``auth_key``."""
    ours, theirs = Key("auth_key", FIRST.secret), [FIRST, SECOND]
    client, server = KeyProof("client", [ours]), KeyProof("server", theirs)
    assert proved(client, server)[0] == server.keys
    assert (client.credential, server.credential) == ("auth_key", "first")
    client, server = KeyProof("client", [SECOND, FIRST]), KeyProof("server", [ours])
    assert proved(client, server)[0] == server.keys
    assert (client.credential, server.credential) == ("first", "auth_key")


@pytest.mark.parametrize(
    "change",
    [{"nonce": "0" * 64}, {"key_name": "second"}, {"protocol": PROTOCOL + 1}, {"confirmation": "0" * 64}],
    ids=str,
)
def test_a_changed_welcome_ends_the_proof(change: dict[str, object]) -> None:
    client, server = KeyProof("client", [FIRST, SECOND]), KeyProof("server", [FIRST, SECOND])
    welcome = server.receive(client.start())
    assert welcome is not None
    with pytest.raises((AuthError, IncompatiblePeer)):
        client.receive(welcome.model_copy(update=change))


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": "0" * 64},
        {"key_names": ["first"]},
        {"key_names": ["second", "first"]},
        {"protocols": [PROTOCOL, PLAIN_PROTOCOL]},
        {"opens": "heartbeats"},
    ],
    ids=str,
)
def test_a_changed_hello1_ends_the_proof(change: dict[str, object]) -> None:
    """Neither the versions nor the keys that a client offers can be reduced on their way."""
    client, server = KeyProof("client", [FIRST, SECOND]), KeyProof("server", [FIRST, SECOND])
    changed = Hello1.model_validate({**client.start().model_dump(), **change})
    welcome = server.receive(travelled(changed))
    assert welcome is not None
    with pytest.raises(AuthError, match="does not have this end's key"):
        client.receive(welcome)


def test_an_answer_to_one_client_is_none_to_another() -> None:
    one, other, server = KeyProof("client", [FIRST]), KeyProof("client", [FIRST]), KeyProof("server", [FIRST])
    other.start()
    welcome = server.receive(one.start())
    assert welcome is not None
    with pytest.raises(AuthError):
        other.receive(welcome)


def test_its_own_first_message_sent_back_is_no_answer() -> None:
    client = KeyProof("client", [FIRST])
    with pytest.raises(ProtocolError, match="'hello1' when 'welcome' was expected"):
        client.receive(client.start())


def test_ends_without_a_common_key_are_not_proved() -> None:
    client, server = KeyProof("client", [FIRST]), KeyProof("server", [SECOND])
    welcome = server.receive(client.start())
    assert welcome is not None
    assert welcome.key_name == "second"
    with pytest.raises(AuthError, match="the peer does not have this end's key 'first'"):
        client.receive(welcome)


@pytest.mark.parametrize("side", ["client", "server"])
def test_an_end_with_a_key_is_not_brought_down_to_version_4(side: Side) -> None:
    end = KeyProof(side, [FIRST])
    end.start()
    with pytest.raises(AuthError, match=f"protocol differs: {PROTOCOL} here, {PLAIN_PROTOCOL} at the peer"):
        end.receive(hello(7))
    with pytest.raises(IncompatiblePeer, match=f"protocol differs: {PROTOCOL} here, 4, 6 at the peer"):
        KeyProof("server", [FIRST]).receive(HELLO1.model_copy(update={"protocols": [4, 6]}))
