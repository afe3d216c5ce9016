"""Addresses of listeners: how they are recognised, and how they are shown."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from aiodatadist._values import checks
from aiodatadist.errors import ParamInvalid

_LABEL: Final = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_HOST_NAME: Final = re.compile(rf"(?=.{{1,253}}$)(?:{_LABEL}\.)*(?!(?:[0-9]+|0[Xx][0-9A-Fa-f]*)\.?$){_LABEL}\.?")
"""An ASCII host name. A name whose last label is a number would be read as an address, so it is refused."""

_CARD: Final = re.compile(r"[A-Za-z0-9_.:-]{0,15}")
"""The name of a network card, as it may stand behind the ``%`` of a link-local address."""


def is_address(host: str) -> bool:
    """Return True if the text is an IP address, and not a name.

    The name of a network card may stand behind a ``%``; it is checked here, because ipaddress accepts anything there.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return _CARD.fullmatch(host.partition("%")[2]) is not None


def is_host_name(text: str) -> bool:
    """Return True if the text can be the name of a host. Only the name service knows if there is one."""
    return _HOST_NAME.fullmatch(text) is not None


def host_port(host: str, port: int) -> str:
    """Return ``127.0.0.1:26000`` or ``[::1]:26000``, as ``LLMConfig.listen`` takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Split ``"ip:port"``, ``"[ipv6]:port"`` or ``"name:port"`` into host and port. A host name stays a name.

    Port 0 is any free port.

    Raises:
        ParamInvalid: if the text is none of these.
    """
    host, _, port = text.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if in_brackets else host
    try:
        is_right = ipaddress.ip_address(host).version == (6 if in_brackets else 4)
    except ValueError:
        is_right = not in_brackets and is_host_name(host)
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) in checks.UINT16
    if not is_right or not is_port:
        raise ParamInvalid(f"{name} is {text!r}: must be ip:port, [ipv6]:port or name:port with a port in [0, 65535]")
    return host, int(port)
