"""A client's connection: its first message is read and no byte more; then it is a byte stream, or the heartbeats'."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from aiodatadist import PeerLost, ProtocolError
from aiodatadist._concurrency import forks
from aiodatadist._config.certificates import read_certificates
from aiodatadist._link import Connection, FirstWords
from aiodatadist._link.control.connection import connected
from aiodatadist._link.control.wire import RECEIVE, UNVERIFIED_BODY
from aiodatadist._wire.frames import HEAD, MAGIC, VERSION, Decoder, Unknown, encode
from aiodatadist._wire.messages import AttachHeartbeats, Message, Refuse
from aiodatadist._wire.tls_pipe import TlsPipe
from tests.certificates import Authority, tls_folder
from tests.held import turns

ATTACH = AttachHeartbeats(token="0" * 64)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """Yield a client's blocking socket, and the server's as the event loop accepts it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        listener.setblocking(False)
        client.connect(listener.getsockname())
        server, _ = await asyncio.get_running_loop().sock_accept(listener)
        with server:
            yield client, server


def said(client: socket.socket) -> list[Message | Unknown]:
    """Return the messages that the server sent until it closed."""
    client.settimeout(5)
    decoder, messages = Decoder(), list[Message | Unknown]()
    while data := client.recv(1 << 16):
        messages += decoder.feed(data)
    return messages


# ---- the first message ----


@pytest.mark.parametrize("cut", [1, 5, 8, 50, 1000])
async def test_what_is_behind_the_first_message_stays_in_the_socket(cut: int) -> None:
    async with pair() as (client, server):
        data = encode(ATTACH) + b"\0\0\0"
        hearing = asyncio.create_task(FirstWords(server).hear())
        for at in range(0, len(data), cut):
            client.sendall(data[at : at + cut])
            await asyncio.sleep(0)
        assert await hearing == ATTACH
        for _ in range(10):
            await asyncio.sleep(0)
        client.shutdown(socket.SHUT_WR)
        server.setblocking(True)
        assert server.recv(100, socket.MSG_WAITALL) == b"\0\0\0"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak our protocol"),
        (HEAD.pack(MAGIC, VERSION + 2, 10) + b"x" * 1000, "frames have version"),
        (HEAD.pack(MAGIC, VERSION, UNVERIFIED_BODY + 1), f"the limit is {UNVERIFIED_BODY}"),
        (HEAD.pack(MAGIC, VERSION, 0), "not valid"),
        (HEAD.pack(MAGIC, VERSION, 4) + b"null" + b"x" * 1000, "not valid"),
    ],
)
async def test_client_that_says_nonsense_is_told(data: bytes, words: str) -> None:
    async with pair() as (client, server):
        client.sendall(data)
        first = FirstWords(server)
        with pytest.raises(ProtocolError, match=words) as raised:
            await first.hear()
        first.refuse(raised.value)
        server.close()
        (refusal,) = said(client)
        assert isinstance(refusal, Refuse)
        assert words in refusal.reason


@pytest.mark.parametrize("data", [b"", encode(ATTACH)[:5], encode(ATTACH)[:-1]])
async def test_client_that_leaves_is_lost(data: bytes) -> None:
    async with pair() as (client, server):
        client.sendall(data)
        client.close()
        with pytest.raises(PeerLost):
            await FirstWords(server).hear()


async def test_waiting_for_a_silent_client_can_be_cancelled() -> None:
    async with pair() as (client, server):
        hearing = asyncio.create_task(FirstWords(server).hear())
        await turns()
        hearing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hearing
        client.sendall(encode(ATTACH))
        assert await FirstWords(server).hear() == ATTACH


# ---- the rest as a stream ----


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[socket.socket, Connection]]:
    async with pair() as (client, server):
        stream = await Connection.over(server)
        try:
            yield client, stream
        finally:
            await anyio.aclose_forcefully(stream)


async def test_stream_gives_what_comes_and_then_the_end() -> None:
    async with connection() as (client, stream):
        client.sendall(b"x" * 1000)
        client.shutdown(socket.SHUT_WR)
        found = [await stream.receive(300)]
        while sum(map(len, found)) < 1000:
            found.append(await stream.receive(300))
        assert b"".join(found) == b"x" * 1000
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()


async def test_no_message_waits_for_an_acknowledgement() -> None:
    async with connection() as (_, stream):
        sock = stream._writer.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_message_takes_no_more_memory_than_it_is_long() -> None:
    """Use the buffered protocol: for another one asyncio takes 256 KiB a message, which the kernel maps and unmaps."""
    async with connection() as (client, stream):
        client.sendall(b"first")
        assert await stream.receive() == b"first"
        tracemalloc.start()
        try:
            client.sendall(b"second")
            before, _ = tracemalloc.get_traced_memory()
            assert await stream.receive() == b"second"
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak - before < RECEIVE


async def test_a_write_that_finds_the_connection_broken_leaves_what_came_before() -> None:
    async with connection() as (client, stream):
        assert stream.send_at_once(b"unread")
        await asyncio.sleep(0)
        client.sendall(b"the last word")
        client.close()  # with something unread: a reset
        for _ in range(3):  # in one turn of the loop, which reads nothing meanwhile
            stream.send_at_once(b"x")
        assert await stream.receive() == b"the last word"
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await stream.receive()


async def test_a_forked_child_leaves_the_last_word_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connection() as (client, stream):
        client.sendall(b"the last word")
        with monkeypatch.context() as child:
            child.setattr(forks, "generation", forks.generation + 1)
            reader = stream._reader
            reader._take_the_rest()
        assert not reader._has_unread()
        assert await stream.receive() == b"the last word"


async def test_stream_that_is_always_full_lets_the_loop_go_on() -> None:
    async with connection() as (client, stream), anyio.create_task_group() as group:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        client.sendall(b"x" * 1000)
        await stream.receive(1)
        group.start_soon(count)
        await asyncio.sleep(0)
        before = turns
        for _ in range(900):
            await stream.receive(1)
        assert turns - before >= 800
        group.cancel_scope.cancel()


async def test_sending_waits_for_a_peer_that_does_not_read() -> None:
    async with connection() as (client, stream):
        size = 16 << 20
        sending = asyncio.create_task(stream.send(b"x" * size))
        await turns()
        sending.cancel()  # it cannot have ended: the kernel does not keep that much
        with pytest.raises(asyncio.CancelledError):
            await sending
        found = 0
        while found < size:
            found += len(await asyncio.to_thread(client.recv, 1 << 20))


async def test_reader_of_a_stream_that_is_closed_here_wakes() -> None:
    async with connection() as (_, stream), anyio.create_task_group() as group:

        async def read() -> None:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()

        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        await stream.aclose()
        with pytest.raises(anyio.BrokenResourceError):
            await stream.send(b"x")


async def test_peer_that_resets_is_noticed_by_reader_and_writer() -> None:
    async with connection() as (client, stream):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()
        with pytest.raises(anyio.BrokenResourceError):
            await stream.send(b"x")


async def _fails_to_send(connection: Connection) -> None:
    with contextlib.suppress(anyio.BrokenResourceError):
        while True:
            await connection.send(b"x")


async def test_what_came_before_the_connection_broke_is_heard() -> None:
    async with pair() as (client, server):
        connection = await Connection.over(server)
        client.sendall(b"the last word")
        for _ in range(10):  # the event loop has taken it in, and no caller has asked for it
            await asyncio.sleep(0)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # which resets the connection, as to close it does where something was not read
        await _fails_to_send(connection)
        assert await connection.receive() == b"the last word"
        with pytest.raises(anyio.BrokenResourceError):
            await connection.receive()
        await connection.aclose()


async def test_a_connection_that_met_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP lets a socket connect to its own port, where no process listens on it: by chance, if that is an ephemeral one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect

    async def from_there(sock: socket.socket, to: tuple[str, int]) -> None:
        sock.bind(to)
        await connect(sock, to)

    monkeypatch.setattr(type(loop), "sock_connect", lambda _, sock, to: from_there(sock, to), raising=False)
    with pytest.raises(ConnectionRefusedError):
        await connected(*address)
    async with await anyio.create_tcp_listener(local_host=address[0], local_port=address[1]):
        pass  # the port is free for what is to listen there


async def test_a_message_that_comes_with_the_end_of_tls_is_not_lost(tmp_path: Path) -> None:
    """Other ends than ours close TLS in order, and the kernel may return both in one piece."""
    ours, theirs = (
        read_certificates(tls_folder(tmp_path / str(number), Authority(0).for_cluster(number), Authority(0)))
        for number in (1, 2)
    )
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = theirs.server.wrap_bio(to_server, to_client, server_side=True)
    async with pair() as (peer, sock):
        peer.setblocking(False)
        loop, connection = asyncio.get_running_loop(), await Connection.over(sock.dup())
        pipe = TlsPipe("client", ours)
        shaking = asyncio.create_task(connection.start_tls(pipe))
        is_complete = False
        while not is_complete:
            to_server.write(await loop.sock_recv(peer, RECEIVE))
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
                is_complete = True
            await loop.sock_sendall(peer, to_client.read())
        await shaking
        tls.write(b"last")
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.unwrap()
        await loop.sock_sendall(peer, to_client.read())
        assert await connection.receive() == b"last"
        with pytest.raises(anyio.EndOfStream):
            await connection.receive()
        await connection.aclose()
