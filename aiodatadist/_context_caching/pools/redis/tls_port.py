"""TLS and the URL: options that need TLS, and a port that expects TLS although the URL does not say so.

Without TLS such a server takes the first command for the beginning of a TLS record. Some servers reset the connection,
some send an alert, and some wait for the rest of the record until the caller's time is up.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio

from aiodatadist._context_caching.pools.redis.connection import ServerRefused
from aiodatadist._context_caching.pools.redis.nodes import NodeDown

T = TypeVar("T")

QUIET_SECONDS: Final = 1.0
"""Seconds without an answer after which a server is tested for TLS."""
HELLO_SECONDS: Final = 2.0
"""Seconds in which it must answer that test."""
TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Options of redis-py that name a file. redis-py reports a missing file only when it connects, and without its name."""
RECORDS: Final = (b"\x16\x03", b"\x15\x03")
"""The first bytes of a TLS record: a handshake, or an alert."""


class SpeaksTLS(ConnectionError):
    """The server expects TLS, but the URL does not ask for it."""


async def or_tls(ask: Callable[[], Awaitable[T]], host: str, port: int, name: str) -> T:
    """Return what ``ask`` returns, unless the server turns out to speak TLS.

    Raises:
        NodeDown: if ``ask`` failed, and the server speaks no TLS either.
        SpeaksTLS: if the server speaks TLS.
    """
    answers: list[T] = []
    failures: list[NodeDown] = []
    is_tls = False

    async def look_if_quiet() -> None:
        nonlocal is_tls
        await anyio.sleep(QUIET_SECONDS)
        is_tls = await speaks_tls(host, port)
        if is_tls:
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(look_if_quiet)
        try:
            answers.append(await ask())
        except NodeDown as error:
            failures.append(error)
        group.cancel_scope.cancel()
    if answers:
        return answers[0]
    if is_tls or not isinstance(failures[0].__cause__, ServerRefused):
        is_tls = is_tls or await speaks_tls(host, port)
    if is_tls:
        raise SpeaksTLS(f"redis at {name} speaks TLS: the URL must begin with rediss://")
    raise failures[0]


async def speaks_tls(host: str, port: int) -> bool:
    """Start a handshake on a new connection, and return True if the first two bytes of the answer are TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # safe: nothing is sent after the first message
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    with suppress(OSError, anyio.BrokenResourceError, anyio.EndOfStream):
        with anyio.move_on_after(HELLO_SECONDS):
            async with await anyio.connect_tcp(host, port) as stream:
                await stream.send(outgoing.read())
                said = b""
                while len(said) < len(RECORDS[0]):
                    said += await stream.receive(len(RECORDS[0]))
                return said.startswith(RECORDS)
    return False


def check_tls_options(options: Mapping[str, Any], *, is_tls: bool) -> None:
    """Raise ValueError if there are TLS options without TLS, or a file of theirs cannot be read."""
    for name, value in options.items():
        if name.startswith("ssl_") and not is_tls:
            raise ValueError(f"option {name} needs TLS: the URL must begin with rediss://")
        if name in TLS_FILES:
            try:
                Path(value).open("rb").close()
            except OSError as error:
                raise ValueError(f"{name} is {value!r}: must be a readable file ({error.strerror})") from error
