"""The places of a Redis pool's servers: one, a cluster that describes itself, or one that sentinels name."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from aiodatadist._context_caching.pools.contract import PoolUnreachable
from aiodatadist._context_caching.pools.redis.nodes import MAX_HOST, SLOTS, Account, Node, View, parse_nodes
from aiodatadist._context_caching.pools.redis.resp import Reply, Request, ResponseError, request
from aiodatadist._values.foreign import printable

COMMANDS: Final = ("ping", "set", "getrange", "exists", "unlink")
"""Commands that an account must be allowed to use."""
IN_A_CLUSTER: Final = ("cluster|nodes", "asking")
"""Further ones in a cluster."""
AT_SENTINELS: Final = ("sentinel|get-master-addr-by-name",)
"""Commands that an account at sentinels must be allowed to use."""


class Shape(Enum):
    """The kinds of pools."""

    SINGLE = "one server"
    CLUSTER = "a cluster"
    SENTINELS = "one server at a time, which sentinels name"


def is_not_allowed(reply: Any) -> bool:
    """Return True if the reply says that this account may not use the command."""
    return isinstance(reply, ResponseError) and str(reply).startswith("NOPERM")


async def is_in_cluster(node: Node) -> bool | ResponseError | None:
    """Return True if a server is part of a cluster; None if its account may ask neither way; or its refusal.

    Raises NodeDown if it does not answer.
    """
    (info,) = await node.ask(request("INFO", "cluster"))
    if isinstance(info, bytes):
        return b"cluster_enabled:1" in info
    if is_not_allowed(info):
        (said,) = await node.ask(request("CLUSTER", "NODES"))
        if is_not_allowed(said):
            return None
        return isinstance(said, bytes)  # otherwise it says that cluster support is disabled
    return info if isinstance(info, ResponseError) else ResponseError(f"INFO is answered by {printable(info)}")


def master_of(service: str) -> Request:
    """Return the question for sentinels: where is the server of this name?"""
    return request("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)._replace(has_pair=True)


def view_in(said: Any, node: Node, account: Account) -> View:
    """Return the view in the answer of a cluster's server, or of a sentinel. Raises PoolUnreachable if there is none."""
    try:
        if isinstance(said, tuple):
            return View([account.reached(_address(*said))] * SLOTS)
        return parse_nodes(said.decode(), node.host, account.reached)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        what = "where its server is" if isinstance(said, tuple) else "who is in its cluster"
        raise PoolUnreachable(printable(f"redis at {node.name} does not say {what}: {error}")) from error


def _address(host: Reply, port: Reply) -> tuple[str, int]:
    if not isinstance(host, bytes) or not isinstance(port, bytes):
        raise ValueError("no address")  # noqa: TRY004 - of what a server says
    name, number = host.decode(), int(port)
    if not 0 < len(name) <= MAX_HOST or not (name.isascii() and name.isprintable()) or not 0 < number < 65536:
        raise ValueError(f"{printable(name)} port {number} is no address")
    return name, number
