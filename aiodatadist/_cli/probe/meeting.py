"""The meeting of the two ends of a probe on two hosts: by TCP, with a key unless they are on one host.

Each proves to the other that it has the key, by an HMAC of the other's nonce; what follows is neither signed nor secret.
The key is in the file that AIODATADIST_AUTH_KEY_FILE names.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
from pathlib import Path
from typing import NamedTuple

from aiodatadist._blocking.config import KEY_FILE
from aiodatadist._cli.probe.lines import Lines

MAX_LIMIT = 3600
"""Seconds that a near end may claim for a step."""

SECONDS = 10.0
"""Seconds for connecting, and for each line of the greeting."""


class Peer(NamedTuple):
    """The address where the far end listens."""

    host: str
    port: int


def key_for(host: str) -> bytes:
    """Return the key; empty on this host's loopback.

    Raises:
        PermissionError: if a key is required and there is none.
    """
    file = os.environ.get(KEY_FILE)
    if file:
        key = Path(file).read_bytes().strip()
        if key:
            return key
        raise PermissionError(f"{KEY_FILE} names {file!r}, which is empty: must hold the key of both ends")
    if is_loopback(host):
        return b""
    raise PermissionError(
        f"{host} is not a loopback address: set {KEY_FILE} to a file with a key, the same at both ends"
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def proof(key: bytes, side: str, nonce: str) -> str:
    return hmac.new(key, f"aiodatadist probe {side} {nonce}".encode(), hashlib.sha256).hexdigest()


def _check(key: bytes, side: str, nonce: str, given: object) -> None:
    if not hmac.compare_digest(proof(key, side, nonce), str(given)):
        raise PermissionError("the other end has another key")


def meet(peer: Peer, limit: float) -> tuple[socket.socket, str]:
    """Connect to a far end for one step, and return the connection and the name of its host.

    Raises:
        OSError: if the far end cannot be reached, or has another key.
    """
    key, mine = key_for(peer.host), os.urandom(16).hex()
    link = socket.create_connection(peer, SECONDS)
    try:
        lines = Lines(link)
        theirs = str(lines.receive().get("nonce"))
        lines.send(proof=proof(key, "near", theirs), nonce=mine, limit=limit)
        answer = lines.receive()
        if "refused" in answer:
            raise PermissionError(f"the far end refused: {answer['refused']}")
        _check(key, "far", mine, answer.get("proof"))
        link.settimeout(None)
    except BaseException:
        link.close()
        raise
    return link, str(answer.get("host"))


def welcome(link: socket.socket, key: bytes, host: str) -> float:
    """Accept :meth:`meet` of the other side, and return the seconds that the step may take.

    Raises:
        OSError: if the near end has another key, or another protocol.
    """
    link.settimeout(SECONDS)
    lines, mine = Lines(link), os.urandom(16).hex()
    lines.send(nonce=mine)
    greeting = lines.receive()
    try:
        _check(key, "near", mine, greeting.get("proof"))
        limit = float(greeting.get("limit", 0))
        if not 1 <= limit <= MAX_LIMIT:
            raise ValueError(f"a limit of {limit} s: must be 1 to {MAX_LIMIT}")
    except (PermissionError, TypeError, ValueError) as error:
        lines.send(refused=str(error))
        raise PermissionError(str(error)) from error
    lines.send(proof=proof(key, "far", str(greeting.get("nonce"))), host=host)
    link.settimeout(None)
    return limit
