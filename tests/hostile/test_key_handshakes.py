"""Strangers, and processes on the path, before both ends of a link are proved: they find out nothing, and change nothing."""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.abc
import pytest

from aiodatadist import AuthError, LLMClusterInfo, LLMStatusCode, ProtocolError
from aiodatadist._wire.frames import HEAD, MAGIC, SEALED_VERSION, Decoder, Unknown, encode
from aiodatadist._wire.messages import (
    PLAIN_PROTOCOL,
    PROTOCOL,
    AttachData,
    AttachHeartbeats,
    Connect,
    Hello1,
    Message,
    Ready,
    Refuse,
    Welcome,
)
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster
from tests.faults.proxy import proxy
from tests.hostile.test_strangers import KEY, Client, client_of, port_of
from tests.unit.wire.examples import hello

ID, OTHER_ID = 7_305_117, 8_216_229
"""Cluster ids that are in no text by chance."""
FIRST_WORDS: dict[str, bytes] = {
    "a hello1": encode(Hello1(protocols=[PROTOCOL], nonce="a" * 64, key_names=["auth_key"])),
    "a hello1 for heartbeats": encode(
        Hello1(protocols=[PROTOCOL], nonce="a" * 64, key_names=["0" * 64], opens="heartbeats")
    ),
    "a hello1 of another version": encode(Hello1(protocols=[9], nonce="a" * 64, key_names=["auth_key"])),
    "a hello1 with another key": encode(Hello1(protocols=[PROTOCOL], nonce="a" * 64, key_names=["guess"])),
    "a hello": encode(hello(9)),
    "a hello with a key": encode(hello(9, has_key=True)),
    "a hello of the listener's id": encode(hello(ID)),
    "a hello of another version": encode(hello(9, protocol=9)),
    "a connect": encode(Connect(channel="c", timeout=5)),
    "heartbeats": encode(AttachHeartbeats(token="0" * 64)),
    "a data connection": encode(AttachData(channel="0" * 64, index=0, nonce="a" * 64, proof="0" * 64)),
    "a ready": encode(Ready(epoch=1)),
    "no frame": b"GET / HTTP/1.1\r\n\r\n",
    "half a frame": encode(hello(9))[:-5],
    "a sealed frame": HEAD.pack(MAGIC, SEALED_VERSION, 24) + bytes(24),
}


async def answers(cluster: Cluster, *said: bytes) -> bytes:
    """Say this, end the sentence, and return all that comes back."""
    got = b""
    async with await anyio.connect_tcp("127.0.0.1", port_of(cluster)) as stream:
        for piece in said:
            await stream.send(piece)
        with suppress(anyio.BrokenResourceError):
            await stream.send_eof()
            async for data in stream:
                got += data
    return got


def tells(cluster: Cluster) -> list[str]:
    """Return everything that a cluster says of itself in its hello, but for what all clusters have in common."""
    mine = inside(cluster.datadist).hello(True, None)
    ours = {
        str(mine.cluster_id),
        mine.instance,
        mine.endpoint.host,
        str(os.getpid()),
        platform.node(),
        socket.gethostname(),
    }
    ours |= {mine.endpoint.server_id, mine.endpoint.device_ip, "soft", "hccl", "role", "endpoint", "instance"}
    return [each for each in ours if len(each) > 1]


def is_told(secret: str, heard: bytes | bytearray) -> bool:
    """Return True if this is a word of what was heard: the digits of a nonce may contain a short one by chance."""
    return re.search(rb"(?<![0-9A-Za-z])" + re.escape(secret.encode()) + rb"(?![0-9A-Za-z])", heard) is not None


def said_by(data: bytes) -> list[Message | Unknown]:
    return Decoder().feed(data) if data else []


@pytest.mark.parametrize("name", FIRST_WORDS)
async def test_an_unproved_client_finds_out_nothing_about_who_listens(name: str) -> None:
    """T10: the answer has the version, a nonce and the name of a key, or says what is wrong."""
    async with open_cluster(ID, auth_key=KEY) as cluster:
        told = await answers(cluster, FIRST_WORDS[name])
        for message in said_by(told):
            assert isinstance(message, (Welcome, Refuse)), message
            if isinstance(message, Welcome):
                assert set(message.model_dump()) == {"type", "protocol", "nonce", "key_name", "confirmation"}
        for secret in tells(cluster):
            assert not is_told(secret, told), secret


@pytest.mark.parametrize("name", FIRST_WORDS)
async def test_nor_does_one_that_was_welcomed(name: str) -> None:
    async with open_cluster(ID, auth_key=KEY) as cluster:
        told = await answers(cluster, FIRST_WORDS["a hello1"], FIRST_WORDS[name])
        for secret in tells(cluster):
            assert not is_told(secret, told), secret


async def test_nor_does_one_that_the_listener_gives_up() -> None:
    async with open_cluster(ID, auth_key=KEY) as cluster, client_of(cluster) as client:
        await client.say(Hello1(protocols=[PROTOCOL], nonce="a" * 64, key_names=["auth_key"]))
        assert isinstance(await client.hear(), Welcome)
        secrets = tells(cluster)
        await cluster.datadist.finalize()
        client.accept_any_seal()
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            message = await client.hear()
            assert isinstance(message, Refuse)
            assert not [each for each in secrets if each in message.reason]


async def test_a_client_without_a_key_is_told_nothing_but_the_versions() -> None:
    async with open_cluster(ID, auth_key=KEY) as cluster:
        (refused,) = said_by(await answers(cluster, FIRST_WORDS["a hello"]))
        assert isinstance(refused, Refuse)
        assert refused.reason.startswith(f"protocol differs: {PROTOCOL} here, {PLAIN_PROTOCOL} at the peer")


@asynccontextmanager
async def listening(*said: bytes) -> AsyncIterator[tuple[LLMClusterInfo, bytearray]]:
    """Listen as a process without a key: answer each connection with this, and keep all that comes."""
    heard = bytearray()

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            for piece in said:
                heard.extend(await stream.receive())
                await stream.send(piece)
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    heard.extend(await stream.receive())

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        info = LLMClusterInfo(ID)
        info.append_remote_ip_info("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port))
        yield info, heard
        group.cancel_scope.cancel()


SERVERS: dict[str, bytes] = {
    "a welcome": encode(Welcome(protocol=PROTOCOL, nonce="b" * 64, key_name="auth_key", confirmation="c" * 64)),
    "a welcome of version 4": encode(
        Welcome(protocol=PLAIN_PROTOCOL, nonce="b" * 64, key_name="auth_key", confirmation="c" * 64)
    ),
    "a hello of version 4": encode(hello(ID)),
    "a hello of version 5": encode(hello(ID, has_key=True)),
    "a hello1": FIRST_WORDS["a hello1"],
    "a refusal": encode(Refuse(status=1, reason="no", kind="key")),
    "no frame": b"HTTP/1.1 200 OK\r\n\r\n",
    "a sealed frame": FIRST_WORDS["a sealed frame"],
}


@pytest.mark.parametrize("name", SERVERS)
async def test_an_unproved_server_finds_out_nothing_about_who_dials(name: str) -> None:
    async with listening(SERVERS[name]) as (info, heard), open_cluster(OTHER_ID, auth_key=KEY) as cluster:
        linked = await cluster.datadist.link_clusters([info], 5000)
        assert linked.status is not LLMStatusCode.LLM_SUCCESS
        for message in said_by(bytes(heard)):
            assert isinstance(message, (Hello1, Refuse)), message
        for secret in tells(cluster):
            assert not is_told(secret, heard), secret


async def test_a_silent_server_finds_out_nothing_about_who_dials() -> None:
    async with listening() as (info, heard), open_cluster(OTHER_ID, auth_key=KEY) as cluster:
        linked = await cluster.datadist.link_clusters([info], 100)
        assert linked.status is LLMStatusCode.LLM_TIMEOUT
        assert [type(each) for each in said_by(bytes(heard))][:1] == [Hello1]
        for secret in tells(cluster):
            assert not is_told(secret, heard), secret


async def test_a_server_without_the_key_is_refused_with_the_reason() -> None:
    async with open_cluster(1, auth_key=b"x" * 32) as one, open_cluster(2, device_id=1, auth_key=KEY) as other:
        linked = await other.datadist.link_clusters([cluster_info(one)], 5000)
    assert isinstance(linked.errors[0], AuthError)
    assert "the peer does not have this end's key 'auth_key'" in str(linked.errors[0])


async def test_a_member_that_is_met_is_told_who_listens() -> None:
    """The first frame whose seal is right is the client's proof."""
    async with open_cluster(ID, auth_key=KEY) as cluster, client_of(cluster) as client:
        await client.prove(KEY)
        await client.say(hello(9, has_key=True))
        mine = await client.hear()
        assert mine == inside(cluster.datadist).hello(True, None).model_copy(
            update={"nonce": getattr(mine, "nonce", "")}
        )
        assert client.is_sealed


async def test_nothing_unsealed_counts_behind_a_welcome() -> None:
    """T8: a process on the path adds messages to the segment of the welcome."""

    async def relay(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            client = Client(stream)
            await client.welcome(KEY, encode(hello(ID, has_key=True)))
            client.accept_any_seal()
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError, ProtocolError):
                while True:
                    await client.hear()

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
        open_cluster(OTHER_ID, auth_key=KEY) as cluster,
    ):
        group.start_soon(listener.serve, relay)
        info = LLMClusterInfo(ID)
        info.append_remote_ip_info("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port))
        linked = await cluster.datadist.link_clusters([info], 5000)
        assert "a message without a seal came before there was a key for it" in str(linked.errors[0])
        group.cancel_scope.cancel()


async def test_nothing_that_was_said_on_one_connection_counts_on_another(caplog: pytest.LogCaptureFixture) -> None:
    """Say again what a true client said, whole: the server's nonce is another one."""
    caplog.set_level(logging.WARNING)
    async with (
        open_cluster(1, auth_key=KEY) as one,
        open_cluster(2, device_id=1, auth_key=KEY) as other,
        proxy(one.datadist.listen_address) as door,
    ):
        door.records = True
        linked = await other.datadist.link_clusters([door.info(1)], 5000)
        assert linked.status is LLMStatusCode.LLM_SUCCESS
        said = [bytes(each) for each in door.recorded]
        assert len(said) == 2, "a connection for messages, and one for heartbeats"
        for each in said:
            await answers(one, each)
        links = inside(one.datadist).links
        assert [link.cluster_id for link in links.current] == [2]
        assert links.current[0].session.is_ready
    assert "wrong seal" in caplog.text
