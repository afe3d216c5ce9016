"""Connections to where peers listen."""

from __future__ import annotations

import errno

import anyio

from aiodatadist.cluster.host_names import addresses_of
from aiodatadist.errors import LinkError, explained
from aiodatadist.link import Connection, connected
from aiodatadist.values.addresses import host_port

ONE_OF_MANY_SECONDS = 1.0
"""For one of the addresses of a name that has a further one: a host that is gone does not answer at all."""


async def dial(host: str, port: int) -> tuple[Connection, str]:
    """A connection, and the address that took it: the first one of a name's that does. The caller sets the deadline.

    Raises:
        LinkError: there is no such host, or nothing listens there.
    """
    what = f"no cluster can be reached at {host_port(host, port)}: "
    try:
        addresses = await addresses_of(host)
    except OSError as error:
        raise LinkError(f"{what}the host name is not found: {explained(error)}") from error
    refusals: list[tuple[str, OSError]] = []
    for number, address in enumerate(addresses, 1):
        try:
            with anyio.fail_after(ONE_OF_MANY_SECONDS if number < len(addresses) else None):
                return await Connection.over(await connected(address, port)), address
        except OSError as error:  # TimeoutError is one, too
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                raise LinkError(what + explained(error)) from error
            refusals.append((address, error))
    raise LinkError(
        what + _told(refusals, host), hint="is the peer initialised, and listening there? LLMConfig(listen=...)"
    ) from refusals[-1][1]


def _told(refusals: list[tuple[str, OSError]], host: str) -> str:
    """Of a name with what it stands for."""
    if [address for address, _ in refusals] == [host]:
        return str(refusals[0][1])
    return "; ".join(f"{address}: {error or 'no answer'}" for address, error in refusals)
