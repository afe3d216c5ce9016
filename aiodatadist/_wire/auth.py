"""Mutual proof of a shared key: HMAC-SHA256 over everything that both ends have sent so far."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

from aiodatadist._config.trust import Key
from aiodatadist._wire.frames import encode
from aiodatadist._wire.messages import Hello

Side = Literal["client", "server"]


def proof(key: bytes, side: Side, client: Hello, server: Hello) -> str:
    """Return the proof that ``side`` must send.

    It covers both hellos with their nonces, so it cannot be replayed, or used on another connection.
    """
    mac = hmac.new(key, b"aiodatadist link 1 " + side.encode(), sha256)
    mac.update(encode(client))
    mac.update(encode(server))
    return mac.hexdigest()


def is_proof(given: str, key: bytes, side: Side, client: Hello, server: Hello) -> bool:
    return hmac.compare_digest(given, proof(key, side, client, server))


def proved_key(given: str, keys: Sequence[Key], side: Side, client: Hello, server: Hello) -> Key | None:
    """Return the key that ``side`` has proved to have; None if it is none of these.

    All of them are tried, so the time does not tell which one it was.
    """
    found = None
    for key in keys:
        if is_proof(given, key.secret, side, client, server):
            found = key
    return found
