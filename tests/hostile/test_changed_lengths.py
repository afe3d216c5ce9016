"""A length that is changed on its way (T8): the link does not stay mute until that many bytes have come.

All that the peer says behind it would otherwise count as the rest of one message, while the heartbeats keep the link alive.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from aiodatadist import ProtocolError
from aiodatadist._config.certificates import read_certificates
from aiodatadist._link import Connection
from aiodatadist._link.control.wire import WHOLE_SECONDS, Wire
from aiodatadist._wire.frames import encode
from aiodatadist._wire.messages import MINOR, Ping
from aiodatadist._wire.seals import ByTls, Opener, Sealer
from aiodatadist._wire.tls_pipe import TlsPipe
from tests.certificates import Authority, tls_folder, uri_of

OUR_KEY, THEIR_KEY = b"o" * 32, b"t" * 32
Ends = tuple[Wire, socket.socket, Callable[[Ping], bytes]]
"""A wire, the other end's socket, and what makes the other end's bytes for a message."""
Opens = Callable[[Path], AbstractAsyncContextManager[Ends]]

pytestmark = pytest.mark.autojump


@asynccontextmanager
async def sealed(_: Path) -> AsyncIterator[Ends]:
    near, far = socket.socketpair()
    with far:
        far.setblocking(False)
        connection = await Connection.over(near)
        wire, sealer = connection.wire(), Sealer(THEIR_KEY)
        wire.seal_with(Sealer(OUR_KEY), Opener(THEIR_KEY))
        yield wire, far, lambda message: encode(message, MINOR, sealer)
        await connection.aclose()


@asynccontextmanager
async def over_tls(path: Path) -> AsyncIterator[Ends]:
    authority = Authority(0)
    own = read_certificates(tls_folder(path / "group", authority.issue([uri_of(1), uri_of(2)]), authority))
    ours, theirs, (near, far) = TlsPipe("server", own), TlsPipe("client", own), socket.socketpair()
    theirs.shake()
    ours.shake(theirs.outgoing())
    theirs.shake(ours.outgoing())
    assert ours.shake(theirs.outgoing())
    with far:
        far.setblocking(False)
        connection = await Connection.over(near, ours)
        yield connection.wire(), far, lambda message: theirs.seal(encode(message, MINOR, ByTls.SEALED))
        await connection.aclose()


MODES = pytest.mark.parametrize(("open_ends", "place"), [(sealed, 6), (over_tls, 3)], ids=["key", "TLS"])
"""How two ends are connected, and the place of the upper byte of a length."""


@MODES
@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_message_that_is_said_to_be_longer_ends_the_link(
    open_ends: Opens, place: int, is_busy: bool, tmp_path: Path
) -> None:
    async with open_ends(tmp_path) as (wire, far, bytes_of):
        loop = asyncio.get_running_loop()

        async def say() -> None:
            data = bytearray(bytes_of(Ping(call=1)))
            data[place] ^= 0x20
            await loop.sock_sendall(far, data)
            while is_busy:
                await anyio.sleep(WHOLE_SECONDS / 7)
                await loop.sock_sendall(far, bytes_of(Ping(call=2)))

        began = loop.time()
        async with anyio.create_task_group() as group:
            group.start_soon(say)
            with pytest.raises(ProtocolError, match="the end of a message did not come within 20 s"):
                await wire.receive()
            group.cancel_scope.cancel()
        assert WHOLE_SECONDS <= loop.time() - began < 2 * WHOLE_SECONDS


@MODES
async def test_messages_that_come_slowly_are_received(open_ends: Opens, place: int, tmp_path: Path) -> None:
    """Give each message three quarters of the time. The time between two messages does not count."""
    async with open_ends(tmp_path) as (wire, far, bytes_of):
        loop = asyncio.get_running_loop()

        async def say() -> None:
            for call in range(1, 5):
                data = bytes_of(Ping(call=call))
                for part in (data[:3], data[3:place], data[place:20], data[20:]):
                    await loop.sock_sendall(far, part)
                    await anyio.sleep(WHOLE_SECONDS / 4)
                await anyio.sleep(3 * WHOLE_SECONDS)

        async with anyio.create_task_group() as group:
            group.start_soon(say)
            assert [await wire.receive() for _ in range(4)] == [Ping(call=call) for call in range(1, 5)]
            group.cancel_scope.cancel()
