"""Connections for bytes of a link: only the two ends of the link open them, each once, and all that fails leaves nothing."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from aiodatadist import LinkClosed, LinkError, LinkTimeout, LLMStatusCode, PeerLost
from aiodatadist._cluster.pending_client import CLIENT_TIMEOUT
from aiodatadist._link import session
from aiodatadist._transport import ChannelOffer, DataConnection
from aiodatadist._wire.data_proof import ChannelKey
from aiodatadist._wire.frames import HEAD, Decoder, encode
from aiodatadist._wire.messages import Accept, AttachData, AttachHeartbeats, Connect, Hello, Ping, Ready, Refuse
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster
from tests.certificates import Authority, folder_for
from tests.connected_loopback import STREAMS, ConnectedLoopback, connected_loopback, transport_of
from tests.held import turns
from tests.hostile.on_the_path import Decide, Way, as_it_is, on_the_path
from tests.hostile.test_half_made import hello_of
from tests.hostile.test_strangers import KEY, Client, client_of, link, port_of, silent

NONCE = "a" * 64
CHANNEL = "channel_1_2"
SECONDS = 20
"""Seconds in which the channel must be open."""
ROOM, MANY = 32, 400
"""Connections without a proof: for how many there is room, and how many come."""


@pytest.fixture
def options() -> Iterator[dict[str, Any]]:
    """Return the options of clusters whose channels have data connections."""
    with connected_loopback() as chosen:
        yield chosen


def trust_of(mode: str, path: Path, cluster_id: int, authority: Authority) -> dict[str, Any]:
    if mode == "certificates":
        return {"trust": str(folder_for(path / str(cluster_id), cluster_id, authority))}
    return {"trust": "none"} if mode == "none" else {"auth_key": KEY}


def heard(connection: DataConnection) -> bytes:
    """Return what has come. The other end has written it already, so it is there."""
    return connection.sock.recv(64)


def only(transport: ConnectedLoopback) -> list[DataConnection]:
    (connections,) = transport.connections.values()
    return connections


# ---- two ends that are what they say ----


@pytest.mark.parametrize("mode", ["key", "certificates", "none"])
async def test_both_ends_have_the_same_connections_in_the_same_order(
    mode: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    authority = Authority()
    async with (
        open_cluster(1, **options, **trust_of(mode, tmp_path, 1, authority)) as prompt,
        open_cluster(2, device_id=1, **options, **trust_of(mode, tmp_path, 2, authority)) as decoder,
    ):
        await link(decoder, prompt)
        ours, theirs = only(transport_of(decoder)), only(transport_of(prompt))
        assert len(ours) == len(theirs) == STREAMS
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert one.sock.getpeername() == other.sock.getsockname()
            assert one.sock.getpeername()[1] == port_of(prompt)
            assert not one.sock.getblocking()
            assert not other.sock.getblocking()
            for here, there in ((one, other), (other, one)):
                here.sock.send(bytes([number]))
                assert heard(there) == bytes([number])
        seals = [each.seals for each in (*ours, *theirs)]
        if mode == "none":
            assert set(seals) == {None}
            return
        pairs = [pair for pair in seals if pair is not None]
        assert not [key for pair in pairs for key in pair if repr(key) in repr((ours, theirs))]
        assert pairs[STREAMS:] == [pair[::-1] for pair in pairs[:STREAMS]]
        assert len({key for pair in pairs for key in pair}) == 2 * STREAMS


async def test_they_are_dialled_over_ipv6_as_the_link_is(options: dict[str, Any]) -> None:
    async with (
        open_cluster(1, **options, listen_ip_info="[::1]:0") as prompt,
        open_cluster(2, device_id=1, **options) as decoder,
    ):
        await link(decoder, prompt)
        assert {each.sock.getpeername()[0] for each in only(transport_of(decoder))} == {"::1"}


async def test_the_smaller_number_of_both_ends_applies(options: dict[str, Any]) -> None:
    async with (
        open_cluster(1, **options) as prompt,
        open_cluster(2, device_id=1, **options) as decoder,
    ):
        transport_of(prompt).streams = 2
        await link(decoder, prompt)
        assert [len(only(transport_of(each))) for each in (prompt, decoder)] == [2, 2]


async def test_no_end_that_needs_none_makes_one(options: dict[str, Any]) -> None:
    async with (
        open_cluster(1, **options) as prompt,
        open_cluster(2, device_id=1, **options) as decoder,
    ):
        transport_of(decoder).streams = 0
        await link(decoder, prompt)
        assert [transport_of(each).connections for each in (prompt, decoder)] == [{}, {}]


@pytest.mark.parametrize("number", range(STREAMS))
@pytest.mark.parametrize("end", [0, 1])
async def test_a_lost_data_connection_loses_the_link_at_both_ends(
    end: int, number: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "TELL_SECONDS", 0.0)
    async with (
        open_cluster(1, **options) as prompt,
        open_cluster(2, device_id=1, **options) as decoder,
    ):
        await link(decoder, prompt)
        both = prompt, decoder
        links = [inside(each.datadist).links.current[0] for each in both]
        only(transport_of(both[end]))[number].sock.shutdown(socket.SHUT_RDWR)
        for each in links:
            await each.wait_closed()
        failures = [each.session.failure for each in links]
        assert all(isinstance(failure, (PeerLost, LinkClosed)) for failure in failures)
        assert f"data connection {number} was closed" in " ".join(map(str, failures))
        assert both[end].datadist.figures().links_ended == {"data_connection_lost": 1}
        await link(decoder, prompt)  # and it is made again


@pytest.mark.parametrize("end", [0, 1])
async def test_a_peer_that_parts_has_time_to_say_so(
    end: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections of one link end in any order, so that for bytes may end before the last word comes on the link's own."""
    monkeypatch.setattr(session, "TELL_SECONDS", 60.0)
    async with (
        open_cluster(1, **options) as prompt,
        open_cluster(2, device_id=1, **options) as decoder,
    ):
        await link(decoder, prompt)
        both = prompt, decoder
        for each in only(transport_of(both[end])):
            each.sock.shutdown(socket.SHUT_RDWR)
        await turns(20)
        parted = await decoder.datadist.unlink_clusters([cluster_info(prompt)], 5000)
        assert parted[0] is LLMStatusCode.LLM_SUCCESS, parted.errors
        while not all(each.datadist.figures().links_ended for each in both):
            await anyio.lowlevel.checkpoint()
        assert [each.datadist.figures().links_ended for each in both] == [{"unlinked": 1}] * 2


@pytest.mark.parametrize(("ours", "theirs"), [(True, True), (True, False), (False, True)])
async def test_bytes_are_sealed_unless_both_ends_trust_the_network(
    ours: bool, theirs: bool, options: dict[str, Any]
) -> None:
    networks = {True: "10.0.0.0/8, 127.0.0.0/8", False: "10.0.0.0/8"}
    async with (
        open_cluster(1, **options, auth_key=KEY, tcp_plain_networks=networks[theirs]) as prompt,
        open_cluster(2, device_id=1, **options, auth_key=KEY, tcp_plain_networks=networks[ours]) as decoder,
    ):
        await link(decoder, prompt)
        seals = [each.seals for each in (*only(transport_of(decoder)), *only(transport_of(prompt)))]
        assert [each is None for each in seals] == [ours and theirs] * (2 * STREAMS)


# ---- an end that is made by hand, and has proved the key of its link ----


class Half:
    """A client that has proved its key, and asked for a link whose channel waits for data connections."""

    def __init__(self, cluster: Cluster, key: ChannelKey, client: Client, opened: AsyncExitStack) -> None:
        self.cluster = cluster
        self.key = key
        self.link = client
        self._opened = opened

    @asynccontextmanager
    async def data(self, *said: bytes) -> AsyncIterator[anyio.abc.SocketStream]:
        """Open a connection to the cluster's port, and send this."""
        async with await anyio.connect_tcp("127.0.0.1", port_of(self.cluster)) as stream:
            for piece in said:
                await stream.send(piece)
            yield stream

    def ask(self, index: int, nonce: str = NONCE) -> AttachData:
        return self.key.ask(index, nonce)

    async def brings(self, *asked: AttachData) -> list[anyio.abc.SocketStream]:
        """Open a data connection for each of these, and return them when each was answered."""
        opened = []
        for each in asked:
            stream = await self._opened.enter_async_context(self.data(encode(each)))
            answered = await answer_on(stream)
            assert isinstance(answered, AttachData), answered
            self.key.check(answered, each)
            opened.append(stream)
        return opened


async def answer_on(stream: anyio.abc.SocketStream) -> Any:
    """Return the next message, or None at the end of the stream."""
    decoder = Decoder()
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        while True:
            for message in decoder.feed(await stream.receive()):
                return message
    return None


async def refusal_of(half: Half, *said: bytes) -> Refuse:
    async with half.data(*said) as stream:
        answered = await answer_on(stream)
        assert isinstance(answered, Refuse), answered
        assert await answer_on(stream) is None
        return answered


@asynccontextmanager
async def half_linked(cluster: Cluster, cluster_id: int = 2, channel: str = CHANNEL) -> AsyncIterator[Half]:
    """Come so far with a link that the cluster waits for its data connections."""
    async with client_of(cluster) as client, AsyncExitStack() as opened:
        keys = await client.prove(KEY)
        hello = hello_of(cluster, cluster_id)
        await client.say(hello, Connect(channel=channel, timeout=SECONDS))
        assert isinstance(await client.hear(), Hello)
        assert isinstance(await client.hear(), Accept)
        yield Half(cluster, ChannelKey.of(keys.heartbeats.secret, channel), client, opened)


@pytest.fixture
async def half(options: dict[str, Any]) -> AsyncIterator[Half]:
    async with open_cluster(1, auth_key=KEY, **options) as cluster, half_linked(cluster) as made:
        yield made


def came(half: Half) -> list[DataConnection] | None:
    """Return the connections that the cluster's transport has; None while it waits for them."""
    return transport_of(half.cluster).connections.get(CHANNEL)


async def all_of(half: Half) -> list[DataConnection]:
    """Wait until the cluster's transport has its connections."""
    while (connections := came(half)) is None:
        await anyio.lowlevel.checkpoint()
    return connections


def files() -> int:
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def lines_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


async def test_bytes_behind_the_message_stay_in_the_socket(half: Half) -> None:
    async with half.data(encode(half.ask(0)) + b"the first bytes of the channel") as first:
        answered = await answer_on(first)
        assert isinstance(answered, AttachData)
        await half.brings(*(half.ask(index) for index in range(1, STREAMS)))
        connections = await all_of(half)
        assert heard(connections[0]) == b"the first bytes of the channel"
        assert connections[0].seals == half.key.seals(half.ask(0), answered, "server")
        for each in connections:
            descriptor = each.sock.detach()
            with socket.socket(fileno=descriptor) as again:
                assert again.getsockname()[1] == port_of(half.cluster)


async def test_they_may_come_in_any_order(half: Half) -> None:
    streams = await half.brings(*(half.ask(index) for index in reversed(range(STREAMS))))
    places = [stream.extra(anyio.abc.SocketAttribute.local_port) for stream in reversed(streams)]
    assert [each.sock.getpeername()[1] for each in await all_of(half)] == places


FORGERIES: dict[str, dict[str, Any]] = {
    "no proof": {"proof": "0" * 64},
    "another index": {"index": 1},
    "another nonce": {"nonce": "b" * 64},
    "plain": {"plain": True},
    "the proof of another link": {"proof": ChannelKey.of(b"another link", CHANNEL).ask(0, NONCE).proof},
    "the proof of another channel": {"proof": ChannelKey.of(b"", "channel_1_4").ask(0, NONCE).proof},
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_one_without_the_proof_is_refused_and_takes_no_place(
    forgery: str, half: Half, caplog: pytest.LogCaptureFixture
) -> None:
    refused = await refusal_of(half, encode(half.ask(0).model_copy(update=FORGERIES[forgery])))
    assert "has a wrong proof" in refused.reason
    assert "has a wrong proof" in lines_of(caplog)
    assert came(half) is None
    await half.brings(*(half.ask(index) for index in range(STREAMS)))
    assert len(await all_of(half)) == STREAMS


async def test_one_for_a_channel_that_does_not_exist_is_refused(half: Half, caplog: pytest.LogCaptureFixture) -> None:
    other = ChannelKey.of(b"another link", CHANNEL)
    refused = await refusal_of(half, encode(other.ask(0, NONCE)))
    assert refused.reason == "this end gave up before the proof"  # a stranger learns nothing about this end
    assert "a data connection came for a channel that does not wait for it" in lines_of(caplog)


async def test_a_peer_does_not_open_one_for_the_channel_of_another(half: Half) -> None:
    async with half_linked(half.cluster, 3, "channel_1_3") as other:
        stolen = other.ask(0).model_copy(update={"channel": half.key.name})
        assert "has a wrong proof" in (await refusal_of(half, encode(stolen))).reason
        await half.brings(half.ask(0))
        await other.brings(other.ask(0))


async def test_each_index_comes_once(half: Half, caplog: pytest.LogCaptureFixture) -> None:
    (first,) = await half.brings(half.ask(0))
    await refusal_of(half, encode(half.ask(0)))  # recorded, and said again
    await refusal_of(half, encode(half.ask(0, "b" * 64)))  # by the peer itself
    assert "data connection 0 came twice" in lines_of(caplog)
    await half.brings(*(half.ask(index) for index in range(1, STREAMS)))
    connections = await all_of(half)
    assert connections[0].sock.getpeername()[1] == first.extra(anyio.abc.SocketAttribute.local_port)


async def test_no_more_come_than_both_ends_said(half: Half, caplog: pytest.LogCaptureFixture) -> None:
    await refusal_of(half, encode(half.ask(STREAMS)))
    assert f"data connection {STREAMS} came: the channel has {STREAMS}" in lines_of(caplog)


async def test_a_late_one_is_refused(half: Half) -> None:
    transport_of(half.cluster).streams = STREAMS
    await half.brings(*(half.ask(index) for index in range(STREAMS)))
    await all_of(half)
    await refusal_of(half, encode(half.ask(0)))
    assert len(inside(half.cluster.datadist).data_connections) == 0


async def test_those_that_came_are_closed_if_the_link_is_not_made(half: Half) -> None:
    awaited = inside(half.cluster.datadist).data_connections
    streams = await half.brings(half.ask(0), half.ask(1))
    assert len(awaited) == 1
    await half.link.leave()
    for stream in streams:
        assert await answer_on(stream) is None
    assert len(awaited) == 0
    await refusal_of(half, encode(half.ask(2)))
    async with half_linked(half.cluster, 3) as again:  # a recorded message is of another key
        await refusal_of(half, encode(half.ask(0)))
        await again.brings(*(again.ask(index) for index in range(STREAMS)))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"KV" + bytes(30),
        encode(Ping(call=1)),
        encode(AttachHeartbeats(token="0" * 64)),
        HEAD.pack(b"KV", 1, 2**31),
        encode(ChannelKey.of(b"x", "c").ask(0, NONCE)).replace(b'"index":0', b'"index":99'),
    ],
    ids=["http", "zeros", "another message", "heartbeats", "endless", "an impossible index"],
)
async def test_garbage_is_refused_and_the_link_is_made(said: bytes, half: Half) -> None:
    await refusal_of(half, said)
    await half.brings(*(half.ask(index) for index in range(STREAMS)))
    assert len(await all_of(half)) == STREAMS


async def test_many_that_say_half_a_message_keep_no_link_out(options: dict[str, Any]) -> None:
    few: dict[str, Any] = {"quotas": {"unproved": ROOM}, "auth_key": KEY}
    async with open_cluster(1, **few, **options) as prompt, open_cluster(2, device_id=1, **few, **options) as decoder:
        beginning = encode(ChannelKey.of(b"x", "c").ask(0, NONCE))[:-5]
        with silent(prompt, MANY) as connections:
            for each in connections:
                each.send(beginning)
            await link(decoder, prompt)
            assert len(only(transport_of(prompt))) == STREAMS
        assert inside(prompt.datadist).totals.budget_refusals["unproved"] >= MANY - ROOM


@pytest.mark.autojump
async def test_a_slow_one_has_as_long_as_any_client(half: Half, caplog: pytest.LogCaptureFixture) -> None:
    async with half.data(encode(half.ask(0))[:-1]) as stream:
        answered = await answer_on(stream)
        assert isinstance(answered, Refuse)
    assert f"the client did not identify itself within {CLIENT_TIMEOUT:g} s" in lines_of(caplog)


@pytest.mark.autojump
async def test_a_channel_whose_connections_do_not_come_is_not_opened(half: Half) -> None:
    streams = await half.brings(half.ask(0), half.ask(2))
    refused = await half.link.hear()
    assert isinstance(refused, Refuse)
    assert refused.reason == f"2 of {STREAMS} data connections came within {SECONDS} s"
    for stream in streams:
        assert await answer_on(stream) is None


async def test_one_that_is_lost_before_the_link_is_made_is_noticed(half: Half) -> None:
    streams = await half.brings(*(half.ask(index) for index in range(STREAMS)))
    await all_of(half)
    transport = transport_of(half.cluster)
    other = await transport.open_channel(ChannelOffer(CHANNEL, 0, (transport.endpoint, transport.endpoint)), SECONDS)
    assert isinstance(await half.link.hear(), Ready)
    await streams[1].aclose()
    await turns(20)
    await half.link.say(Ready(epoch=0))
    refused = await half.link.hear()
    assert isinstance(refused, Refuse)
    assert "data connection 1 was closed" in refused.reason
    await other.aclose()


# ---- a process on the path, and one that listens in the peer's place ----


def damaged(frame: bytes, change: dict[str, Any]) -> bytes:
    """Return the frame of another message: this one, with a field that was changed on its way."""
    (message,) = Decoder().feed(frame)
    assert isinstance(message, AttachData)
    return encode(message.model_copy(update=change))


CHANGES: dict[str, tuple[Way, dict[str, Any]]] = {
    "the question": ("to_server", {"nonce": NONCE}),
    "the answer": ("to_client", {"nonce": NONCE}),
    "a question that lets bytes travel plain": ("to_server", {"plain": True}),
    "an answer that lets bytes travel plain": ("to_client", {"plain": True}),
    "an answer of another index": ("to_client", {"index": 7}),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_what_was_changed_on_its_way_makes_no_link(name: str, options: dict[str, Any]) -> None:
    way, change = CHANGES[name]

    def change_it(went: Way, kind: str, piece: bytes) -> list[bytes]:
        return [damaged(piece, change)] if (went, kind) == (way, "attach_data") else [piece]

    async with (
        open_cluster(1, auth_key=KEY, **options) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY, **options) as decoder,
        on_the_path(prompt) as path,
    ):
        path.decide = change_it
        linked = await decoder.datadist.link_clusters([path.info(1)], 5000)
        assert linked.errors
        assert "has a wrong proof" in str(linked.errors[0])
        assert transport_of(decoder).connections == {}
        came = [each for some in transport_of(prompt).connections.values() for each in some]
        while len(inside(prompt.datadist).data_connections) or not all(each.sock.fileno() < 0 for each in came):
            await anyio.lowlevel.checkpoint()


async def test_a_refusal_on_the_path_decides_about_one_attempt_only(options: dict[str, Any]) -> None:
    refusal = encode(Refuse(status=1, reason="go away", kind="key"))

    async with (
        open_cluster(1, auth_key=KEY, **options) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY, **options) as decoder,
        on_the_path(prompt) as path,
    ):
        path.decide = lambda went, kind, piece: [refusal] if (went, kind) == ("to_client", "attach_data") else [piece]
        linked = await decoder.datadist.link_clusters([path.info(1)], 5000)
        (error,) = linked.errors
        assert isinstance(error, LinkError)
        assert re.search(r"data connection \d: an unproved peer refused: go away", str(error))
        assert not error.is_proved
        path.decide = as_it_is
        assert (await decoder.datadist.link_clusters([path.info(1)], 5000))[0] is LLMStatusCode.LLM_SUCCESS


@pytest.mark.autojump
async def test_a_message_that_is_said_again_before_it_arrives_makes_no_link(
    options: dict[str, Any],
) -> None:
    """Take the place of a data connection with its own message: that gives no keys, and no link is made."""
    stolen: list[anyio.abc.SocketStream] = []
    answers: list[bytes] = []
    async with (
        open_cluster(1, auth_key=KEY, **options) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY, **options) as decoder,
        on_the_path(prompt) as path,
        anyio.create_task_group() as group,
    ):

        async def say_first(piece: bytes) -> None:
            stream = await anyio.connect_tcp("127.0.0.1", port_of(prompt))
            await stream.send(piece)
            answers.append(await stream.receive())
            stolen.append(stream)

        def decide(went: Way, kind: str, piece: bytes) -> list[bytes]:
            if (went, kind) != ("to_server", "attach_data") or stolen or b'"index":0' not in piece:
                return [piece]
            group.start_soon(say_first, piece)
            return []

        path.decide = decide
        linked = await decoder.datadist.link_clusters([path.info(1)], 5000)
        assert isinstance(linked.errors[0], LinkTimeout)
        (answer,) = Decoder().feed(answers[0])
        assert isinstance(answer, AttachData)
        assert await answer_on(stolen[0]) is None
        await stolen[0].aclose()


async def test_data_connections_go_where_the_link_went(options: dict[str, Any]) -> None:
    async with (
        open_cluster(1, auth_key=KEY, **options) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY, **options) as decoder,
        on_the_path(prompt) as path,
    ):
        assert (await decoder.datadist.link_clusters([path.info(1)], 5000))[0] is LLMStatusCode.LLM_SUCCESS
        assert path.connections == 2 + STREAMS
        assert {each.sock.getpeername()[1] for each in only(transport_of(decoder))} == {path.port}
        secret = inside(decoder.datadist).links.current[0].proved
        assert secret is not None
        for seen in path.seen.values():
            for key in [
                secret.heartbeats.secret,
                *(key for each in only(transport_of(prompt)) for key in each.seals or ()),
            ]:
                assert key not in seen
                assert key.hex().encode() not in seen


def kept(way: Way, number: int) -> Decide:
    """Return what keeps the message of one data connection in this direction, and passes on the rest."""

    def decide(went: Way, kind: str, piece: bytes) -> list[bytes]:
        if kind != "attach_data":
            return [piece]
        (message,) = Decoder().feed(piece)
        assert isinstance(message, AttachData)
        return [] if (went, message.index) == (way, number) else [piece]

    return decide


@pytest.mark.autojump
@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize(("way", "number"), [("to_server", 0), ("to_server", 2), ("to_client", 3)])
async def test_nothing_is_left_of_an_attempt_whose_data_connection_is_kept(
    way: Way, number: int, is_cancelled: bool, options: dict[str, Any]
) -> None:
    async with (
        open_cluster(1, auth_key=KEY, **options) as prompt,
        open_cluster(2, device_id=1, auth_key=KEY, **options) as decoder,
        on_the_path(prompt) as path,
    ):
        path.decide = kept(way, number)

        async def attempt() -> int:
            """Try to link, and return how many files are open when nothing is left of that."""
            said = path.kinds.count("attach_data")
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    if is_cancelled:
                        group.start_soon(cancel_after, said + number + 1, scope)
                    linked = await decoder.datadist.link_clusters([path.info(1)], 5000)
                    assert isinstance(linked.errors[0], LinkTimeout)
            assert scope.cancelled_caught is is_cancelled
            while len(inside(prompt.datadist).data_connections):
                await anyio.lowlevel.checkpoint()
            await turns(50)
            return files()

        async def cancel_after(messages: int, scope: anyio.CancelScope) -> None:
            while path.kinds.count("attach_data") < messages:
                await anyio.lowlevel.checkpoint()
            scope.cancel()

        before = await attempt()  # it has opened what stays, for heartbeats
        await attempt()
        while files() > before:
            await anyio.lowlevel.checkpoint()
        path.decide = as_it_is
        assert (await decoder.datadist.link_clusters([path.info(1)], 5000))[0] is LLMStatusCode.LLM_SUCCESS
