"""Connections to the addresses at which peers listen."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Hashable

import anyio

from aiodatadist._cluster.host_names import HostNames
from aiodatadist._config.trust import BOTH_ENDS
from aiodatadist._link import Connection, connected
from aiodatadist._values.addresses import host_port
from aiodatadist._values.foreign import printable
from aiodatadist.errors import AuthError, LinkError, explained

ONE_OF_MANY_SECONDS = 1.0
"""Seconds for one address of a name that has a further one, at most: a host that is gone does not answer at all."""


class Steps:
    """Callbacks on the way to a peer. By default nothing limits an attempt; a caller that limits its attempts has its own.

    Args:
        share: the share to which look-ups of the host's name are counted, see :meth:`HostNames.addresses_of`.

    Attributes:
        are_limited: True if the caller limits how many of its attempts are connecting. An attempt then takes its room
            among half-made links once it is connected, so that silent places keep none. Otherwise it takes its room
            before.
    """

    are_limited = False

    def __init__(self, share: Hashable) -> None:
        self.share = share

    async def before_connecting(self) -> None:
        """Wait until a socket may be opened. Called when the host's addresses are known."""

    def connected(self) -> None:
        """Note that something has accepted the connection."""

    def met(self) -> None:
        """Note that the peer has proved that it has the key. Never called without a key."""


async def dial(
    host: str,
    port: int,
    names: HostNames,
    why_not: Callable[[str], str],
    deadline: float,
    waits_for: Callable[[str], object],
    steps: Steps,
) -> tuple[Connection, str]:
    """Return a connection, and the address that accepted it: of a name, the first one that does.

    Args:
        why_not: returns the rule that keeps this end from an address; empty if there is none.
        deadline: by the event loop's clock; the caller enforces it. The addresses share the time.
        waits_for: called with what has not happened yet, in words.
        steps: told how far the attempt is, and what it waits for.

    Raises:
        AuthError: if this end has no key that may leave the machine, and an address is elsewhere. No socket was opened.
        LinkError: if there is no such host, or nothing listens there.
    """
    what = f"no cluster can be reached at {host_port(host, port)}: "
    try:
        addresses = await names.addresses_of(host, waits_for, steps.share)
    except OSError as error:
        is_missing = isinstance(error, socket.gaierror) and error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}
        how = "is not found" if is_missing else "cannot be looked up"
        raise LinkError(f"{what}the host name {how}: {printable(explained(error))}") from error
    for address in addresses:
        if rule := why_not(address):
            stands_for = "" if address == host else f" is {address}, and"
            raise AuthError(
                f"{host_port(host, port)}{stands_for} is on a network: linking to it {rule}", hint=BOTH_ENDS
            )
    waits_for("too many places were being dialled")
    await steps.before_connecting()
    refusals: list[tuple[str, OSError]] = []
    for number, address in enumerate(addresses):
        waits_for(f"{host_port(address, port)} accepted no connection")
        left, still = deadline - anyio.current_time(), len(addresses) - number
        try:
            with anyio.fail_after(None if still == 1 else min(ONE_OF_MANY_SECONDS, left / still)):
                sock = await connected(address, port)
                steps.connected()
                connection = await Connection.over(sock)
                waits_for(f"{host_port(address, port)} accepted the connection, but did not link")
                return connection, address
        except OSError as error:  # TimeoutError is an OSError, too
            # The limit is this process's, so no other address would do better.
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                raise LinkError(what + explained(error)) from error
            refusals.append((address, error))
    raise LinkError(
        what + _told(refusals, host), hint="is the peer initialised, and listening there? LLMConfig(listen=...)"
    ) from refusals[-1][1]


def _told(refusals: list[tuple[str, OSError]], host: str) -> str:
    """Return the reasons of the refusals, each with its address if the host is a name."""
    reasons = [os.strerror(error.errno) if error.errno else "no answer" for _, error in refusals]
    if [address for address, _ in refusals] == [host]:
        return reasons[0]
    return "; ".join(f"{address}: {reason}" for (address, _), reason in zip(refusals, reasons, strict=True))
