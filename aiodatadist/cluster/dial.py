"""Connections to where peers listen."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Hashable

import anyio

from aiodatadist.cluster.host_names import HostNames
from aiodatadist.errors import LinkError, explained
from aiodatadist.link import Connection, connected
from aiodatadist.values.addresses import host_port
from aiodatadist.values.foreign import printable

ONE_OF_MANY_SECONDS = 1.0
"""For one of the addresses of a name that has a further one, at most: a host that is gone does not answer at all."""


class Steps:
    """What happens on the way to a peer. By default nothing limits an attempt; a caller that limits its attempts has its own.

    Args:
        share: whose look-ups the host's name counts among, see :meth:`HostNames.addresses_of`.

    Attributes:
        are_limited: True if the caller limits how many of its attempts are connecting. Then an attempt takes its room among
            the links that are being made when it is connected, so that silent places keep none. Else it does so before.
    """

    are_limited = False

    def __init__(self, share: Hashable) -> None:
        self.share = share

    async def before_connecting(self) -> None:
        """Wait until a socket may be opened. Called when the host's addresses are known."""

    def connected(self) -> None:
        """Called when something has taken the connection."""

    def met(self) -> None:
        """Called when the peer has proved that it has the key. Without a key, never."""


async def dial(
    host: str, port: int, names: HostNames, deadline: float, waits_for: Callable[[str], object], steps: Steps
) -> tuple[Connection, str]:
    """A connection, and the address that took it: the first one of a name's that does.

    Args:
        deadline: by the event loop's clock, which its caller keeps. Addresses share the time.
        waits_for: told what has not happened yet, in words.
        steps: told how far the attempt is, and what it waits for.

    Raises:
        LinkError: there is no such host, or nothing listens there.
    """
    what = f"no cluster can be reached at {host_port(host, port)}: "
    try:
        addresses = await names.addresses_of(host, waits_for, steps.share)
    except OSError as error:
        is_missing = isinstance(error, socket.gaierror) and error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}
        how = "is not found" if is_missing else "cannot be looked up"
        raise LinkError(f"{what}the host name {how}: {printable(explained(error))}") from error
    waits_for("too many places were being dialled")
    await steps.before_connecting()
    refusals: list[tuple[str, OSError]] = []
    for number, address in enumerate(addresses):
        waits_for(f"{host_port(address, port)} took no connection")
        left, still = deadline - anyio.current_time(), len(addresses) - number
        try:
            with anyio.fail_after(None if still == 1 else min(ONE_OF_MANY_SECONDS, left / still)):
                sock = await connected(address, port)
                steps.connected()
                connection = await Connection.over(sock)
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
