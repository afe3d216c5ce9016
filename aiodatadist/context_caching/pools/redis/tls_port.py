"""TLS in a URL: options that belong to it, and a port that expects it although the URL does not.

Without TLS such a server takes the first command for the beginning of a TLS record. Some reset the connection, some send
an alert, and some wait for the rest of the record, until the caller's time is over.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio

from aiodatadist.context_caching.pools.redis.nodes import NodeDown
from aiodatadist.context_caching.pools.redis.wire import Refused

T = TypeVar("T")

QUIET_SECONDS: Final = 1.0
"""Seconds without an answer after which a server is asked whether it speaks TLS."""
HELLO_SECONDS: Final = 2.0
"""Seconds that it has for the answer to that."""
TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Options of redis-py that name a file. If there is none, it says so without the name, and only when it connects."""
RECORDS: Final = (b"\x16\x03", b"\x15\x03")
"""How a record of TLS begins: a handshake, or an alert."""


class SpeaksTLS(ConnectionError):
    """The server expects TLS, and the URL says that there is none."""


async def or_tls(ask: Callable[[], Awaitable[T]], host: str, port: int, name: str) -> T:
    """Return what ``ask`` does, unless the server turns out to speak TLS.

    Raises:
        NodeDown: ``ask`` failed, and the server speaks no TLS either.
        SpeaksTLS: it does.
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
    if is_tls or not isinstance(failures[0].__cause__, Refused):
        is_tls = is_tls or await speaks_tls(host, port)
    if is_tls:
        raise SpeaksTLS(f"redis at {name} speaks TLS: the URL must begin with rediss://")
    raise failures[0]


async def speaks_tls(host: str, port: int) -> bool:
    """Begin a handshake on a connection of its own, and look at the first two bytes that come back."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent behind the first message
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
    """Raises ValueError: options of TLS without it, or a file that is none."""
    for name, value in options.items():
        if name.startswith("ssl_") and not is_tls:
            raise ValueError(f"option {name} is of TLS: the URL must begin with rediss://")
        if name in TLS_FILES:
            try:
                Path(value).open("rb").close()
            except OSError as error:
                raise ValueError(f"{name} is {value!r}: must be a file that can be read ({error.strerror})") from error
