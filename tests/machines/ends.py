"""Clusters and context caches on machines, as a test sees them: their methods are called from afar."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.certificates import folder_for
from tests.machines.networks import PORT, Machine, address, machines
from tests.machines.programs import Program, Weather, weather

BRISK: dict[str, Any] = {"heartbeat_interval": 0.2, "heartbeat_misses": 4}
QUICK: dict[str, Any] = {"first_delay": 0.05, "max_delay": 0.5}
"""A policy to make links again."""
PLAIN = "10.77.0.0/16,fd77::/16"
"""The networks of these machines, where bytes may travel plain."""
KEY = "a secret of many characters"


class Refused(Exception):
    """An order failed at its end. ``kind`` is the name of the error's class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Far:
    """A program on a machine that obeys orders (``orders.py``).

    Args:
        settings: the program's argument.

    Attributes:
        first: what it said when it was ready.
    """

    def __init__(self, machine: Machine, module: str, settings: Mapping[str, Any]) -> None:
        self.program = Program(machine, module, json.dumps(settings))
        try:
            self.first = self.answer()
        except BaseException:
            self.program.close()
            raise

    def call(self, order: str, **arguments: Any) -> Any:
        """Return what an order returns. Raises Refused if it fails."""
        self.begin(order, **arguments)
        return self.answer()

    def begin(self, order: str, **arguments: Any) -> None:
        """Give an order, whose :meth:`answer` is for later."""
        self.program.tell([order, arguments])

    def answer(self) -> Any:
        """Return what the last order returns."""
        match self.program.hear():
            case {"error": kind, "text": text}:
                raise Refused(kind, text)
            case {"value": value}:
                return value


class End(Far):
    """A cluster on a machine."""

    def __init__(self, machine: Machine, cluster_id: int, options: Mapping[str, Any]) -> None:
        super().__init__(machine, "tests.machines.end", {"cluster_id": cluster_id, "options": options})
        self.cluster_id = cluster_id
        self.listens_at = self.first


@contextmanager
def opened(machine: Machine, cluster_id: int, listen: str | None = None, **options: Any) -> Iterator[End]:
    """Open a cluster on a machine, which listens at an address, or not at all. It has a key unless it has a ``trust``."""
    key = {} if "trust" in options else {"auth_key": KEY}
    end = End(machine, cluster_id, {"listen_ip_info": listen, **key, **options})
    try:
        yield end
    finally:
        end.program.close()


@contextmanager
def reading(machine: Machine, url: str) -> Iterator[Far]:
    """Open a context cache on a machine, over the pool at this URL."""
    reader = Far(machine, "tests.machines.reader", {"url": url})
    try:
        yield reader
    finally:
        reader.program.close()


def trust_of(kind: str, folder: Path, cluster_id: int) -> dict[str, Any]:
    """Return the options of a cluster: its certificates, or the key that all clusters have."""
    return {"trust": str(folder_for(folder / str(cluster_id), cluster_id))} if kind == "certificates" else {}


def over(transport: str) -> dict[str, Any]:
    """Return the options that choose a transport. ``plain`` is ``tcp`` without seals."""
    return {"transport": "tcp", "tcp_plain_networks": PLAIN} if transport == "plain" else {"transport": transport}


@contextmanager
def pair(
    transport: str, cache: Mapping[str, int] = MappingProxyType({}), **options: Any
) -> Iterator[tuple[End, End, Weather]]:
    """Link an owner, cluster 1, and a puller, cluster 2, over a carrier; both have a cache."""
    settings = {**over(transport), "relink": QUICK, **BRISK, **options}
    with (
        machines("a", "b") as (a, b),
        weather(a, b) as net,
        opened(a, 1, listen=at(address(1, 1)), **settings) as owner,
        opened(b, 2, **settings) as puller,
    ):
        for end in (owner, puller):
            end.call("cache", **cache)
        puller.call("link", peer=1, host=address(1, 1), port=PORT)
        for end in (owner, puller):
            end.call("until", phase="LINKED")
        yield owner, puller, net


def at(host: str, port: int = PORT) -> str:
    """Return an address to listen at."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
