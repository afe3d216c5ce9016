"""Names of engines: where one listens, and the cluster id that stands for it on the wire."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from aiodatadist._values.addresses import host_port
from aiodatadist.errors import LLMException, ParamInvalid


class EngineName(NamedTuple):
    """The name of an engine: the address of its host, and the port on which it listens; 0 if it only connects."""

    host: str
    port: int

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def cluster_id(self) -> int:
        """Return the id of the engine's cluster: a digest of its name, so that a peer knows it without asking.

        An engine that does not listen has a random one, because no peer asks for it.
        """
        if not self.port:
            return secrets.randbits(64) or 1
        digest = hashlib.blake2b(f"hixl {self}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") or 1

    def __str__(self) -> str:
        if self.port:
            return host_port(self.host, self.port)
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_name(text: Any, what: str) -> EngineName:
    """Return an engine's name: ``ip:port``, ``ip``, ``[ipv6]:port`` or ``[ipv6]``. An IPv6 address gets its short spelling.

    Raises:
        TypeError: if it is no text.
        ParamInvalid: if it is none of these.
    """
    if not isinstance(text, str):
        raise TypeError(f"{what} is {text!r} of type {type(text).__name__}: must be a text")
    is_long = text.startswith("[")
    host, found, port = text[1:].partition("]") if is_long else text.partition(":")
    if is_long and port:
        found, port = port[:1], port[1:]
    elif is_long:
        found = "" if found else "?"
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else -1
    try:
        is_right = ipaddress.ip_address(host).version == (6 if is_long else 4)
    except ValueError:
        is_right = False
    if not is_right or found not in ("", ":") or (found and not 0 <= number <= 65535):
        raise ParamInvalid(f"{what} is {text!r}: must be ip:port, ip, [ipv6]:port or [ipv6], with a port in [0, 65535]")
    return EngineName(_short(host) if is_long else host, number if found else 0)


def _short(host: str) -> str:
    """Return the one spelling of an IPv6 address, since the spelling decides the cluster's id.

    It is not ``str()`` of the address: Python 3.13 writes those that stand for IPv4 addresses in another way than 3.12.
    """
    address, mark, card = host.partition("%")
    return socket.inet_ntop(socket.AF_INET6, ipaddress.IPv6Address(address).packed) + mark + card


def parse_peer(text: Any, what: str) -> EngineName:
    """Return the name of an engine to connect to. Raises what :func:`parse_name` raises, and ParamInvalid without a port."""
    name = parse_name(text, what)
    if not name.port:
        raise ParamInvalid(f"{what} is {text!r}: an engine that others connect to listens on a port above 0")
    return name


def named(error: LLMException, peer: EngineName, cluster_id: int) -> None:
    """Let an error call the peer by its engine's name, instead of its cluster's id."""
    words = ((f"cluster {cluster_id}", f"engine {peer}"), ("is not linked", "is not connected"))
    for old, new in words:
        error.args = tuple(each.replace(old, new) if isinstance(each, str) else each for each in error.args)
    if error.hint is not None:
        error.hint = error.hint.replace("link_clusters() at this end, too", "connect() at this end, too").replace(
            "link_clusters()", "connect()"
        )


@contextmanager
def naming(peer: EngineName, cluster_id: int) -> Iterator[None]:
    """Let errors that leave this context call the peer by its name."""
    try:
        yield
    except LLMException as error:
        named(error, peer, cluster_id)
        raise
