"""Redirections: what a server of a cluster answers if it does not have the slot of a key."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from aiodatadist._context_caching.pools.redis.resp import ResponseError


class Redirect(NamedTuple):
    """The new place of a slot, for good or for one key. An empty host means the host of the server that says so."""

    has_moved: bool
    host: str
    port: int


def redirect_in(reply: Any) -> Redirect | None:
    """Return the redirect in a reply, or None if there is none that can be followed."""
    if not isinstance(reply, ResponseError):
        return None
    found = re.match(r"(MOVED|ASK) [0-9]+ (\S*):([0-9]{1,5})(?!\S)", str(reply))
    if found is None or not 1 <= int(found[3]) <= 65535:
        return None
    return Redirect(found[1] == "MOVED", found[2], int(found[3]))
