"""The address of Mooncake's master, a pool's share of this process, and a check that the master is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiodatadist._context_caching.pools import addresses, lending
from aiodatadist._context_caching.pools.contract import PoolUnreachable
from aiodatadist._context_caching.pools.lru_store import machine_bytes
from aiodatadist._context_caching.pools.mooncake import master_http
from aiodatadist._context_caching.pools.mooncake.store import Settings

OPTIONS: Final = frozenset({"metrics", "segment", "memory", "protocol", "device", "replicas", "threads", "hostname"})
RPC_PORT: Final = 50051
"""Port of a master that was started without one."""
PROTOCOLS: Final = ("tcp", "rdma")
LEAST: Final = 16 << 20
"""Fewest bytes of memory for values on their way. Mooncake refuses smaller segments, too."""


@dataclass(frozen=True)
class Place:
    """The address of the master, and the pool's share of this process."""

    host: str
    rpc: int
    metrics: int
    memory: int
    threads: int
    replicas: int


def read_url(url: str) -> tuple[Place, Settings]:
    """Return what the URL says. Raises TypeError or ValueError if it cannot be right."""
    address = addresses.parse(url, ("mooncake",), RPC_PORT, OPTIONS, others=False)
    options = address.options
    place = Place(
        host=address.host,
        rpc=address.port,
        metrics=addresses.number(options.get("metrics", "9003"), "metrics", 1, 65535),
        memory=addresses.byte_size(options.get("memory", "256MiB"), "memory", LEAST, machine_bytes()),
        threads=addresses.number(options.get("threads", "8"), "threads", 1, 256),
        replicas=addresses.number(options.get("replicas", "1"), "replicas", 1, 256),
    )
    if place.rpc == place.metrics:
        raise ValueError(
            f"the URL's port and metrics are both {place.rpc}: the first must be the master's RPC port, by default "
            f"{RPC_PORT}, the other its HTTP port, by default 9003"
        )
    protocol = options.get("protocol", PROTOCOLS[0])
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol is {protocol!r}: must be {' or '.join(PROTOCOLS)}")
    segment = addresses.byte_size(options.get("segment", "0"), "segment", 0, machine_bytes())
    if 0 < segment < LEAST:
        raise ValueError(f"segment is {segment} bytes: must be at least {LEAST}, or 0 to lend nothing")
    settings = Settings(
        host=options.get("hostname", ""),
        master=f"{address.host}:{address.port}",
        segment=segment,
        protocol=protocol,
        device=options.get("device", ""),
    )
    return place, settings


async def find_master(place: Place, deadline: float) -> str:
    """Check that both ports of the master answer; return this machine's address towards it.

    Raises PoolTimeout or PoolUnreachable if one of them does not.
    """
    http, rpc = f"{place.host}:{place.metrics}", f"{place.host}:{place.rpc}"
    with lending.until(deadline, f"asking Mooncake's master at {http}"):
        try:
            here = await master_http.local_host(place.host, place.metrics)
            await master_http.get(place.host, place.metrics, "/health")
        except OSError as error:
            raise PoolUnreachable(
                f"no Mooncake master at {http}: {error}; is metrics={place.metrics} its HTTP port?"
            ) from error
    with lending.until(deadline, f"connecting to Mooncake's master at {rpc}"):
        try:
            await master_http.listens(place.host, place.rpc)
        except OSError as error:
            raise PoolUnreachable(
                f"no Mooncake master at the RPC port, {rpc}: {error}; the URL's port must be the master's RPC port, by "
                f"default {RPC_PORT}"
            ) from error
    return here
