"""Any message in any state is an answer or a LinkError, and an unproved peer decides about its own connection only."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import AuthError, IncompatiblePeer, LinkError, LLMStatusCode, ProtocolError
from aiodatadist._values.foreign import printable
from aiodatadist._wire.frames import Decoder, Unknown, encode
from aiodatadist._wire.handshake import Handshake, State
from aiodatadist._wire.key_proof import Side
from aiodatadist._wire.messages import (
    MAX_REASON,
    MINOR,
    PLAIN_PROTOCOL,
    PROTOCOL,
    Accept,
    Bye,
    Connect,
    Hello,
    Hello1,
    Message,
    Ready,
    Refuse,
)
from aiodatadist._wire.reasons import refusal
from tests.unit.wire.examples import endpoint, hello, messages, vouching

CONNECT = Connect(channel="channel", timeout=3.0)
CLIENT_READY, SERVER_READY = Ready(epoch=1, heartbeat_token="a" * 64), Ready(epoch=2, heartbeat_token="b" * 64)


def end(side: Side, proved: bool = False, **changes: object) -> Handshake:
    """Return one side of a handshake. Cluster 1 is the client, cluster 2 the server."""
    return Handshake(
        side,
        hello(1 if side == "client" else 2, has_key=proved, **changes),
        vouching if proved else None,
    )


def travel(sent: list[Message]) -> list[Message]:
    return [each for each in Decoder().feed(b"".join(map(encode, sent))) if not isinstance(each, Unknown)]


def converse(client: Handshake, server: Handshake, at_once: bool = False) -> None:
    """Carry messages to and fro until neither has anything to say."""
    to_server, to_client = travel(client.start(CONNECT, at_once)), list[Message]()
    while to_server or to_client:
        for message in to_server:
            to_client += travel(server.receive(message))
        to_server = []
        for message in to_client:
            to_server += travel(client.receive(message))
        to_client = []


def in_state(side: Side, state: State, proved: bool, at_once: bool = False) -> Handshake:
    """Return a handshake that has come this far with an honest peer."""
    client, server = end("client", proved), end("server", proved)
    to_server, to_client = client.start(CONNECT, at_once), list[Message]()
    mine = client if side == "client" else server
    while mine.state is not state and (to_server or to_client):
        if to_server:
            to_client += server.receive(to_server.pop(0))
        else:
            to_server += client.receive(to_client.pop(0))
    if state is State.DONE:
        mine.receive(SERVER_READY)
    assert mine.state is state
    return mine


def answer_or_error(handshake: Handshake, message: Message) -> list[Message] | LinkError:
    try:
        return handshake.receive(message)
    except LinkError as error:
        return error


SIDES: dict[Side, tuple[State, ...]] = {
    "client": (State.HELLO, State.ACCEPT, State.OPEN, State.DONE),
    "server": (State.HELLO, State.CONNECT, State.OPEN, State.DONE),
}
STATES = [(side, state, proved) for proved in (False, True) for side, states in SIDES.items() for state in states]

# What an honest peer might say, in an order in which it would not.
plausible: st.SearchStrategy[Message] = st.sampled_from(
    [
        hello(1),
        hello(2),
        hello(1, has_key=True),
        hello(2, has_key=True),
        Hello1(protocols=[PROTOCOL], nonce="0" * 64, key_names=["a"]),
        CONNECT,
        CLIENT_READY,
        Refuse(status=0, reason=""),
        Bye(),
    ]
)


@pytest.mark.parametrize("proved", [False, True], ids=["without a key", "with a key"])
@pytest.mark.parametrize("at_once", [False, True], ids=["when the peer is known", "at once"])
def test_two_honest_ends_agree_and_say_what_their_channel_reaches(proved: bool, at_once: bool) -> None:
    client, server = end("client", proved), end("server", proved)
    converse(client, server, at_once)
    assert client.agreed == (hello(2, has_key=proved), CONNECT)
    assert server.agreed == (hello(1, has_key=proved), CONNECT)
    assert (client.is_done, server.is_done) == (False, False)
    (to_server,), (to_client,) = travel(client.opened(1, "a" * 64)), travel(server.opened(2, "b" * 64))
    assert (to_server, to_client) == (CLIENT_READY, SERVER_READY)
    assert server.receive(to_server) == client.receive(to_client) == []
    assert (client.is_done, server.is_done) == (True, True)
    assert (client.ready, server.ready) == (SERVER_READY, CLIENT_READY)


def test_peer_may_be_ready_before_we_are() -> None:
    client, server = end("client"), end("server")
    converse(client, server)
    client.receive(server.opened(2, "b" * 64)[0])
    before = client.is_done
    client.opened(1, "a" * 64)
    assert (before, client.is_done) == (False, True)


def test_our_half_alone_is_no_link() -> None:
    client = in_state("client", State.OPEN, False)
    client.opened(1, "a" * 64)
    assert (client.is_done, client.ready) == (False, None)


@pytest.mark.parametrize("proved", [False, True], ids=["without a key", "with a key"])
@pytest.mark.parametrize("side", ["client", "server"])
def test_peer_is_ready_once_and_not_before_both_agreed(side: Side, proved: bool) -> None:
    for state in [state for s, state, k in STATES if (s, k) == (side, proved) and state is not State.OPEN]:
        with pytest.raises(ProtocolError, match=f"sent 'ready' in state '{state.value}'"):
            in_state(side, state, proved).receive(SERVER_READY)


def test_each_end_knows_itself_and_how_often_the_other_beats() -> None:
    client, server = end("client", heartbeat=0.5), end("server", heartbeat=600.0)
    converse(client, server)
    assert (client.me, server.me) == (1, 2)
    assert client.peer is not None
    assert server.peer is not None
    assert (client.peer.heartbeat, server.peer.heartbeat) == (600.0, 0.5)


@given(st.sampled_from(STATES), st.lists(messages | plausible, max_size=6))
def test_any_message_in_any_state_is_an_answer_or_a_link_error(
    start: tuple[Side, State, bool], said: list[Message]
) -> None:
    handshake = in_state(*start)
    outcomes = [answer_or_error(handshake, message) for message in said]
    errors = [isinstance(outcome, LinkError) for outcome in outcomes]
    assert errors == sorted(errors), "after an error nothing is accepted any more"
    assert (handshake.state is State.OVER) == any(errors)
    assert LLMStatusCode.LLM_SUCCESS not in {o.status_code for o in outcomes if isinstance(o, LinkError)}


@pytest.mark.parametrize("side", ["client", "server"])
def test_an_end_that_proves_a_key_is_no_peer_of_one_that_does_not(side: Side) -> None:
    words = f"protocol differs: {PLAIN_PROTOCOL}.{MINOR} here, {PROTOCOL}.{MINOR} at the peer"
    with pytest.raises(IncompatiblePeer, match=words):
        end(side).receive(hello(7, has_key=True))
    with pytest.raises(AuthError, match=f"protocol differs: {PLAIN_PROTOCOL} here, {PROTOCOL}, 9 at the peer"):
        end(side).receive(Hello1(protocols=[PROTOCOL, 9], nonce="0" * 64, key_names=["a"]))


def test_a_hello_of_version_4_with_a_key_is_refused() -> None:
    with pytest.raises(AuthError, match="only cluster 7 has a key"):
        end("server").receive(hello(7, has_key=True, protocol=PLAIN_PROTOCOL))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            hello(1, protocol=PLAIN_PROTOCOL + 2),
            f"protocol differs: {PLAIN_PROTOCOL}.{MINOR} here, {PLAIN_PROTOCOL + 2}.{MINOR} at the peer",
        ),
        (hello(1, endpoint=endpoint(runtime="ascend")), "runtime differs: soft at cluster 2, ascend at cluster 1"),
        (
            hello(1, endpoint=endpoint(transport="loopback")),
            "transport differs: hccl at cluster 2, loopback at cluster 1",
        ),
        (hello(1, one_sided=False), "enable_remote_cache_accessible differs: True at cluster 2, False at cluster 1"),
        (hello(1, backend="hixl"), "transfer_backend differs: none at cluster 2, hixl at cluster 1"),
        (hello(2), "cluster 2 met itself"),
        (hello(2, instance="b" * 64), "both ends have cluster id 2: ids must be unique"),
    ],
)
def test_ends_that_do_not_fit_are_refused_with_both_values(theirs: Hello, words: str) -> None:
    with pytest.raises(IncompatiblePeer) as caught:
        end("server").receive(theirs)
    assert words in str(caught.value)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


UNFIT = [{"endpoint": endpoint(runtime="ascend")}, {"one_sided": False}, {"backend": "hixl"}]


@pytest.mark.parametrize("changes", UNFIT, ids=lambda changes: next(iter(changes)))
def test_with_a_key_the_client_compares_only_what_is_proved(changes: dict[str, Any]) -> None:
    client, server = end("client", True), end("server", True, **changes)
    with pytest.raises(IncompatiblePeer, match="differs: ") as caught:
        converse(client, server)
    assert client.peer == server._hello
    assert caught.value.is_proved
    assert client.agreed is None
    assert server.agreed is None


@pytest.mark.parametrize("changes", UNFIT, ids=lambda changes: next(iter(changes)))
def test_a_client_that_fits_not_and_asks_all_the_same_is_refused(changes: dict[str, Any]) -> None:
    server = end("server", True)
    (mine,) = server.receive(hello(1, has_key=True, **changes))
    assert isinstance(mine, Hello), "which the client compares itself"
    with pytest.raises(IncompatiblePeer, match="differs: "):
        server.receive(CONNECT)
    assert server.agreed is None


@pytest.mark.parametrize("changes", UNFIT, ids=lambda changes: next(iter(changes)))
def test_without_a_key_nothing_is_proved(changes: dict[str, Any]) -> None:
    client = end("client")
    client.start(CONNECT)
    with pytest.raises(IncompatiblePeer, match="differs: ") as caught:
        client.receive(hello(2, **changes))
    assert not caught.value.is_proved


@pytest.mark.parametrize("proved", [False, True], ids=["without a key", "with a key"])
def test_other_cluster_than_the_asked_for_is_refused_and_decides_nothing(proved: bool) -> None:
    client = Handshake("client", hello(1, has_key=proved), vouching if proved else None, expected=2)
    client.start(CONNECT)
    with pytest.raises(IncompatiblePeer, match="cluster 2 was asked for, 3 answered") as caught:
        client.receive(hello(3, has_key=proved))
    assert caught.value.hint == "check the address and the cluster id"
    assert not caught.value.is_proved


def test_client_that_did_not_start_has_nothing_to_ask() -> None:
    with pytest.raises(ProtocolError, match="start"):
        end("client").receive(hello(2))


def test_client_takes_no_connect() -> None:
    client = end("client")
    client.start(CONNECT)
    with pytest.raises(ProtocolError, match="sent 'connect' in state 'hello'"):
        client.receive(CONNECT)


@pytest.mark.parametrize("start", STATES, ids=lambda start: f"{start[0]}-{start[1].value}-{start[2]}")
def test_peer_may_refuse_in_any_state_and_its_status_is_told(start: tuple[Side, State, bool]) -> None:
    status = LLMStatusCode.LLM_ALREADY_LINK
    _, state, proved = start
    with pytest.raises(LinkError, match=f"^{'the' if proved else 'an unproved'} peer refused: we have one") as caught:
        in_state(*start).receive(Refuse(status=status, reason="we have one", kind="unfit"))
    assert caught.value.status_code is status
    assert caught.value.is_proved == (proved and state is not State.HELLO), (
        "it may be another member's until it is known"
    )


def test_a_client_that_asks_at_once_says_so_once() -> None:
    client = end("client", True)
    assert client.start(CONNECT, at_once=True) == [hello(1, has_key=True), CONNECT]
    assert (client.receive(hello(2, has_key=True)), client.state) == ([], State.ACCEPT)
    assert (client.receive(Accept()), client.agreed) == ([], (hello(2, has_key=True), CONNECT))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_client_that_does_not_want_its_peer_after_all_ends(at_once: bool) -> None:
    met: list[Hello] = []

    def meet(peer: Hello) -> None:
        met.append(peer)
        raise LinkError("not its turn")

    client = Handshake("client", hello(1, has_key=True), vouching, 2, meet)
    client.start(CONNECT, at_once)
    with pytest.raises(LinkError, match="not its turn"):
        client.receive(hello(2, has_key=True))
    assert (met, client.state) == ([hello(2, has_key=True)], State.OVER)


@pytest.mark.parametrize(
    ("status", "told"),
    [(0, LLMStatusCode.LLM_LINK_FAILED), (7, LLMStatusCode.LLM_FAILED), (-1, LLMStatusCode.LLM_UNKNOWN_ERROR)],
)
def test_refusal_with_a_strange_status_is_a_failure_all_the_same(status: int, told: LLMStatusCode) -> None:
    with pytest.raises(LinkError) as caught:
        end("client").receive(Refuse(status=status, reason=""))
    assert caught.value.status_code is told


@pytest.mark.parametrize("kind", [LinkError, AuthError, IncompatiblePeer])
def test_a_refusal_is_of_the_same_class_at_both_ends(kind: type[LinkError]) -> None:
    (said,) = Decoder().feed(encode(refusal(kind("no"))))
    assert isinstance(said, Refuse)
    with pytest.raises(LinkError, match="an unproved peer refused: no") as caught:
        end("client").receive(said)
    assert type(caught.value) is kind
    assert caught.value.status_code is kind("no").status_code
    (to_the_first_version,) = Decoder().feed(encode(refusal(kind("no")), 0))
    with pytest.raises(LinkError) as caught:
        end("client").receive(to_the_first_version)
    assert type(caught.value) is LinkError


@given(st.text(max_size=5000), st.sampled_from([status for status in LLMStatusCode if status]))
def test_any_refusal_can_be_sent_before_the_peer_is_trusted(reason: str, status: LLMStatusCode) -> None:
    data = encode(refusal(LinkError(reason, status_code=status)))
    (message,) = Decoder(max_body=1 << 14).feed(data)
    assert isinstance(message, Refuse)
    assert message.status == status
    assert message.reason == printable(reason, MAX_REASON)


def test_runtimes_of_two_ends_may_differ_over_tcp() -> None:
    ours, theirs = (endpoint(transport="tcp", streams=4, runtime=name) for name in ("soft", "ascend"))
    handshake = Handshake("server", hello(2, endpoint=ours))
    handshake.receive(hello(1, endpoint=theirs))
    assert handshake.peer is not None
    assert handshake.peer.endpoint.runtime == "ascend"
