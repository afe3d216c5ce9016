"""``aiodatadist doctor --peer``: what is between this machine and another, on which ``aiodatadist doctor --serve`` runs.

The two ends link over TCP, as clusters do, and move blocks of HOST memory both ways. Each finding says what it rules out.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import anyio

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LinkPhase,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    Placement,
)
from aiodatadist._cli.doctor.finding import Finding
from aiodatadist._cli.kit.errors import CommandError, wrong_input
from aiodatadist._cli.kit.numbers import duration
from aiodatadist._config.secret_files import read_key
from aiodatadist._values.addresses import host_port
from aiodatadist._values.foreign import printable
from aiodatadist.errors import AuthError, ParamInvalid

SERVING: Final = 1
"""The cluster id of the end that serves."""
BLOCKS, BLOCK, TENSORS = 64, 256 << 10, 2
POOL: Final = "64MiB"
STREAMS: Final = LLMConfig().tcp_streams
DIAL_SECONDS, LINK_SECONDS, FULL_SECONDS = 5.0, 10.0, 5.0
PINGS: Final = 20
FULL: Final = bytes(48 << 10)
"""A message of several packets of full size, also of jumbo frames."""
SECONDS: Final = 2.0
"""Seconds for which each kind of transfer is measured."""
IP_MTU, IPV6_MTU = 14, 24  # linux/in.h, linux/in6.h
TRANSFER_MILLISECONDS: Final = 60_000


@dataclass(frozen=True)
class Peer:
    """The end that serves.

    Attributes:
        key_file: the file with the secret of both ends; None if ``AIODATADIST_TRUST`` names their keys.
    """

    host: str
    port: int
    key_file: Path | None = None

    def __str__(self) -> str:
        return host_port(self.host, self.port)


@asynccontextmanager
async def _opened(
    key_file: Path | None, number: int, listen: str | None = None, streams: int = STREAMS
) -> AsyncIterator[tuple[LLMDataDist, Cache]]:
    """Open a cluster over TCP with a cache in HOST memory. Raises CommandError if it cannot be opened."""
    try:
        config = LLMConfig(
            listen_ip_info=listen,
            transport="tcp",
            host_mem_pool_cfg={"memory_size": POOL},
            sync_kv_timeout=TRANSFER_MILLISECONDS,
            auth_key=None if key_file is None else read_key(key_file, "--auth-key-file"),
            tcp_streams=streams,
        )
        datadist = LLMDataDist(LLMRole.MIX, number, config)
        await datadist.init()
    except ParamInvalid as error:
        raise wrong_input(str(error)) from error
    except LLMException as error:
        raise CommandError(str(error)) from error
    async with datadist:
        desc = CacheDesc(TENSORS, [BLOCKS, BLOCK], DataType.DT_UINT8, Placement.HOST)
        yield datadist, await datadist.cache_manager.allocate_blocks_cache(desc, BlocksCacheKey(number))


# ---- the end that serves ----


async def serve(host: str, port: int, key_file: Path | None) -> None:
    """Serve until cancelled, and say who comes."""
    async with _opened(key_file, SERVING, host_port(host, port)) as (datadist, _):
        assert datadist.listen_address is not None
        place = host_port(*datadist.listen_address)
        print(f"listening on {place}; on the other machine: aiodatadist doctor --peer {place}", flush=True)
        async for change in datadist.link_changes():
            if change.state is LinkPhase.LINKED:
                print(f"linked to {change.cluster_id}", flush=True)
            elif change.reason is not None:
                print(f"the link to {change.cluster_id} has ended: {change.reason}", flush=True)


# ---- the end that looks ----


def peer_findings(peer: Peer) -> list[Finding]:
    """Return what was found out about the way to a peer. Raises CommandError if nothing can be tried."""
    return anyio.run(_examine, peer)


async def _examine(peer: Peer) -> list[Finding]:
    reached = await _reach(peer)
    if reached.mark == "fail":
        return [reached]
    found = [reached]
    number = 2 + secrets.randbelow(2**31)
    async with _opened(peer.key_file, number, streams=1) as (datadist, cache):
        found += [await _link(datadist, peer)]
        if found[-1].mark == "ok":
            found += await _measure(_Way(datadist, cache))
    if found[-1].mark == "ok":
        found += await _with_all_streams(peer, number)
    return found


async def _reach(peer: Peer) -> Finding:
    """Return if the peer's port accepts a connection, and what the kernel knows of the way there."""
    name = "peer"
    try:
        with anyio.fail_after(DIAL_SECONDS):
            began = perf_counter()
            stream = await anyio.connect_tcp(peer.host, peer.port)
            seconds = perf_counter() - began
    except TimeoutError:
        why = f"no answer within {DIAL_SECONDS:g} s: a firewall drops what goes to this port, or no machine has this address"
        return Finding(name, str(peer), "fail", why)
    except OSError as error:
        return Finding(name, str(peer), "fail", _why_not(error))
    async with stream:
        mtu = _mtu(stream.extra(anyio.abc.SocketAttribute.raw_socket))
    packets = f", in packets of at most {mtu} bytes" if mtu else ""
    return Finding(name, str(peer), "ok", f"accepts connections after {duration(seconds)}{packets}")


def _why_not(error: OSError) -> str:
    causes = [cause for cause in (error, error.__cause__, *_members(error)) if isinstance(cause, OSError)]
    for cause in causes:
        if isinstance(cause, socket.gaierror):
            return f"the name is not known here: {cause.strerror}"
        if isinstance(cause, ConnectionRefusedError):
            return (
                "the machine answers, and nothing listens on this port: run aiodatadist doctor --serve there, on an address "
                "that this machine reaches, not on 127.0.0.1; or a firewall refuses"
            )
        if cause.strerror:
            return f"there is no way to it: {cause.strerror}; look at the routes of both machines"
    return f"cannot be reached: {error}"


def _members(error: OSError) -> tuple[BaseException, ...]:
    cause = error.__cause__
    return cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()


def _mtu(sock: socket.socket) -> int:
    """Return the largest packet that the kernel sends this way; 0 if it does not say."""
    level, option = (socket.IPPROTO_IPV6, IPV6_MTU) if sock.family == socket.AF_INET6 else (socket.IPPROTO_IP, IP_MTU)
    try:
        return int(struct.unpack("i", sock.getsockopt(level, option, 4))[0])
    except OSError:
        return 0


async def _link(datadist: LLMDataDist, peer: Peer) -> Finding:
    """Link to the peer; return who it has proved to be, or why there is no link."""
    name = "peer's key"
    try:
        await datadist.link_to(SERVING, (peer.host, peer.port), timeout=LINK_SECONDS)
    except AuthError as error:
        return Finding(name, "differs", "fail", f"{error}; both machines need the same keys")
    except LLMException as error:
        why = (
            f"{error}; is it aiodatadist doctor --serve that listens there? If that says nothing of this link, full packets "
            "may be lost on the way: try a smaller MTU, ip link set DEVICE mtu 1280"
        )
        return Finding("peer's link", "none", "fail", why)
    (link,) = datadist.statistics().links
    proved = printable(link.credential) or "nothing"
    return Finding(name, proved, "ok", "both ends have proved it, and a link is made, with its data connection")


class _Way:
    """The link to the peer, as it is measured."""

    def __init__(self, datadist: LLMDataDist, cache: Cache) -> None:
        self.datadist = datadist
        self._cache = cache
        self._key = BlocksCacheKey(SERVING)

    async def round_trip(self) -> float:
        """Return the seconds of a message and its answer, a median."""
        times = []
        for _ in range(PINGS):
            began = perf_counter()
            await self.datadist.check_link_status(SERVING)
            times.append(perf_counter() - began)
        return median(times)

    async def full_packets_pass(self) -> bool:
        """Return True if a message of many full packets arrives in time."""
        with anyio.move_on_after(FULL_SECONDS):
            await self.datadist.notify(SERVING, FULL)
            await self.datadist.check_link_status(SERVING)
            return True
        return False

    async def pulled(self, count: int) -> int:
        """Pull blocks; return their bytes."""
        blocks = list(range(count))
        manager = self.datadist.cache_manager
        return (await manager.pull_blocks(self._key, self._cache, blocks, blocks)).bytes

    async def pushed(self, count: int) -> int:
        """Push blocks; return their bytes."""
        blocks = list(range(count))
        manager = self.datadist.cache_manager
        return (await manager.push_blocks(self._key, self._cache, blocks, blocks)).bytes


async def _measure(way: _Way) -> list[Finding]:
    """Return what the link over one data connection does, both ways, until something fails."""
    found = []
    try:
        seconds = await way.round_trip()
        meaning = f"of a message, {PINGS} times; less than that, no pull takes"
        found.append(Finding("round trip", duration(seconds), "ok", meaning))
        if not await way.full_packets_pass():
            why = (
                "small messages pass, and full packets do not: a router on the way has a smaller MTU, and a firewall keeps "
                "back what it says about it; try ip link set DEVICE mtu 1280 on both machines"
            )
            return [*found, Finding("full packets", "lost", "fail", why)]
        found.append(Finding("full packets", "pass", "ok", f"{len(FULL) >> 10} KiB arrived in one message"))
        for direction, move in (("from the peer", way.pulled), ("to the peer", way.pushed)):
            speed = await _speed(move)
            found.append(Finding(direction, _shown(speed), "ok", f"one data connection, {SECONDS:g} s of transfers"))
    except LLMException as error:
        found.append(Finding("peer's link", "lost", "fail", f"while it was measured: {error}"))
    return found


async def _with_all_streams(peer: Peer, number: int) -> list[Finding]:
    """Return what a link with the usual number of data connections does."""
    async with _opened(peer.key_file, number) as (datadist, cache):
        try:
            await datadist.link_to(SERVING, (peer.host, peer.port), timeout=LINK_SECONDS)
            speed = await _speed(_Way(datadist, cache).pulled)
        except LLMException as error:
            return [Finding("peer's link", "lost", "fail", f"with {STREAMS} data connections: {error}")]
    meaning = f"from the peer over {STREAMS} data connections; more of them help if this is much faster than one"
    return [Finding("all streams", _shown(speed), "ok", meaning)]


async def _speed(move: Callable[[int], Awaitable[int]]) -> float:
    """Return bytes per second. The first transfers find out how many blocks take a tenth of the time."""
    count, took = 1, 0.0
    while took < SECONDS / 10 and count < BLOCKS:
        began = perf_counter()
        await move(count)
        took = perf_counter() - began
        count = count if took >= SECONDS / 10 else min(2 * count, BLOCKS)
    moved, began = 0, perf_counter()
    while perf_counter() - began < SECONDS:
        moved += await move(count)
    return moved / (perf_counter() - began)


def _shown(speed: float) -> str:
    return f"{speed / 1e9:.2f} GB/s" if speed >= 1e9 else f"{speed / 1e6:.1f} MB/s"
