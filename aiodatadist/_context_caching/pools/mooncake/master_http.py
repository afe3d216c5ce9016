"""The little HTTP that it takes to ask a Mooncake master."""

from __future__ import annotations

import asyncio
from typing import Final

from aiodatadist._values.foreign import printable, shown

LIMIT: Final = 1 << 20
"""Most bytes of an answer."""


async def get(host: str, port: int, path: str) -> bytes:
    """Return the body of a successful answer.

    Raises:
        OSError: if there is no master, or it gives any other answer.

    If cancelled, the connection is dropped.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=LIMIT)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = head[0].split(" ", 2)
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        length = int(fields.get("content-length", "-1"))
        if len(status) < 2 or status[1] != "200" or not 0 <= length <= LIMIT:
            raise OSError(f"{host}:{port}{path} answers {shown(head[0])} with {length} bytes")
        return await reader.readexactly(length)
    except (EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise OSError(f"{host}:{port}{path} does not speak HTTP: {printable(repr(error))}") from error
    finally:
        writer.transport.abort()


async def listens(host: str, port: int) -> None:
    """Raise OSError if nothing listens there."""
    _, writer = await asyncio.open_connection(host, port)
    writer.transport.abort()


async def local_host(host: str, port: int) -> str:
    """Return the address by which this machine reaches the other. Raises OSError if it cannot be reached."""
    _, writer = await asyncio.open_connection(host, port)
    try:
        return str(writer.get_extra_info("sockname")[0])
    finally:
        writer.transport.abort()
