"""Addresses of hosts, by their names."""

from __future__ import annotations

import ipaddress
import socket

from anyio import getaddrinfo


def is_address(host: str) -> bool:
    """It is an IP address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def addresses_of(host: str) -> list[str]:
    """An address stands for itself, a name for all that it has: IPv4 first, else in the order of the name service.

    Raises OSError: there is no such host, or no name service.
    """
    if is_address(host):
        return [host]
    found = await getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = (str(each[4][0]) for each in sorted(found, key=lambda each: each[0] != socket.AF_INET))
    return list(dict.fromkeys(addresses))
