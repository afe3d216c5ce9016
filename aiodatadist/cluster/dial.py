"""Connections to where peers listen."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

import anyio

from aiodatadist.cluster.host_names import HostNames
from aiodatadist.errors import LinkError, explained
from aiodatadist.link import Connection, connected
from aiodatadist.values.addresses import host_port
from aiodatadist.values.foreign import printable

ONE_OF_MANY_SECONDS = 1.0
"""For one of the addresses of a name that has a further one, at most: a host that is gone does not answer at all."""


async def dial(
    host: str, port: int, names: HostNames, deadline: float, waits_for: Callable[[str], object], peer: int
) -> tuple[Connection, str]:
    """A connection, and the address that took it: the first one of a name's that does.

    Args:
        deadline: by the event loop's clock, which its caller keeps. Addresses share the time.
        waits_for: told what has not happened yet, in words.
        peer: whose address it is.

    Raises:
        LinkError: there is no such host, or nothing listens there.
    """
    what = f"no cluster can be reached at {host_port(host, port)}: "
    try:
        addresses = await names.addresses_of(host, waits_for, peer)
    except OSError as error:
        is_missing = isinstance(error, socket.gaierror) and error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}
        how = "is not found" if is_missing else "cannot be looked up"
        raise LinkError(f"{what}the host name {how}: {printable(explained(error))}") from error
    refusals: list[tuple[str, OSError]] = []
    for number, address in enumerate(addresses):
        waits_for(f"{host_port(address, port)} took no connection")
        left, still = deadline - anyio.current_time(), len(addresses) - number
        try:
            with anyio.fail_after(None if still == 1 else min(ONE_OF_MANY_SECONDS, left / still)):
                connection = await Connection.over(await connected(address, port))
                waits_for(f"{host_port(address, port)} took the connection, and did not link")
                return connection, address
        except OSError as error:  # TimeoutError is one, too
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                raise LinkError(what + explained(error)) from error
            refusals.append((address, error))
    raise LinkError(
        what + _told(refusals, host), hint="is the peer initialised, and listening there? LLMConfig(listen=...)"
    ) from refusals[-1][1]


def _told(refusals: list[tuple[str, OSError]], host: str) -> str:
    """Of a name with what it stands for."""
    reasons = [os.strerror(error.errno) if error.errno else "no answer" for _, error in refusals]
    if [address for address, _ in refusals] == [host]:
        return reasons[0]
    return "; ".join(f"{address}: {reason}" for (address, _), reason in zip(refusals, reasons, strict=True))
