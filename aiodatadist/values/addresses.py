"""Addresses of listeners: what is one, and how it is shown."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

_LABEL: Final = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_HOST_NAME: Final = re.compile(rf"(?=.{{1,253}}$)(?:{_LABEL}\.)*(?!(?:[0-9]+|0[Xx][0-9A-Fa-f]*)\.?$){_LABEL}\.?")
"""Of ASCII; what ends in a number is an address, or a wrong one."""

_CARD: Final = re.compile(r"[A-Za-z0-9_.:-]{0,15}")


def is_address(host: str) -> bool:
    """It is an IP address, and no name. Behind a ``%`` stands the name of a network card: ipaddress takes anything there."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return _CARD.fullmatch(host.partition("%")[2]) is not None


def is_host_name(text: str) -> bool:
    """It can be the name of a host; whether there is one, the name service knows."""
    return _HOST_NAME.fullmatch(text) is not None


def host_port(host: str, port: int) -> str:
    """``127.0.0.1:26000``, or ``[::1]:26000``: as ``LLMConfig.listen`` takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
