"""The findings about what bytes between machines need: the kernel's TCP, what seals bytes, and cards that nothing uses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from aiodatadist._cli.doctor.finding import Finding
from aiodatadist._cli.kit.numbers import quantity
from aiodatadist._config.llm_config import LLMConfig

IPV4: Final = Path("/proc/sys/net/ipv4")
INFINIBAND: Final = Path("/sys/class/infiniband")
LIBCRYPTO: Final = ("libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so")
"""The names under which native/net/records.c looks for it."""
FEW_BYTES: Final = 4 << 20
"""The least buffer that is no warning: with less, a connection carries less than 400 MB a second over 10 ms and back."""


def tcp_findings() -> Iterator[Finding]:
    """Yield what limits a connection between machines, whether its bytes can be sealed, and RDMA cards, if there are any."""
    yield _congestion_control()
    yield _buffers()
    yield _data_connections()
    yield from _rdma()


def _congestion_control() -> Finding:
    try:
        name = (IPV4 / "tcp_congestion_control").read_text(encoding="ascii").strip()
    except OSError:
        return Finding("TCP", "unknown", "ok", "this machine does not say which congestion control it has")
    meaning = "decides what a connection carries over a network that loses packets"
    if name != "bbr":
        meaning += "; bbr is several times as fast there: sysctl net.ipv4.tcp_congestion_control=bbr"
    return Finding("TCP", name, "ok", meaning)


def _buffers() -> Finding:
    try:
        most = [int((IPV4 / name).read_text(encoding="ascii").split()[2]) for name in ("tcp_rmem", "tcp_wmem")]
    except (OSError, ValueError, IndexError):
        return Finding("TCP buffers", "unknown", "ok", "this machine does not say how large they can be")
    least = min(most)
    meaning = f"one connection moves at most {quantity(least)} per round trip"
    if least < FEW_BYTES:
        meaning += "; over long ways raise net.ipv4.tcp_rmem and tcp_wmem, or tcp_streams"
    value = f"{quantity(most[0])} to read, {quantity(most[1])} to write"
    return Finding("TCP buffers", value, "warn" if least < FEW_BYTES else "ok", meaning)


def _data_connections() -> Finding:
    config = LLMConfig()
    value = f"{config.tcp_streams} of a link, {config.tcp_threads} threads"
    if any(map(_loads, LIBCRYPTO)):
        return Finding(
            "data connections", value, "ok", "libcrypto seals bytes over TCP, where networks are not trusted"
        )
    meaning = (
        "libcrypto of OpenSSL does not load, so links over TCP need tcp_plain_networks at both ends: install libssl3"
    )
    return Finding("data connections", value, "warn", meaning)


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _rdma() -> Iterator[Finding]:
    try:
        cards = sorted(entry.name for entry in INFINIBAND.iterdir())
    except OSError:
        return
    if cards:
        meaning = "no transport uses these cards, except HCCL on NPUs: TCP goes through the kernel"
        yield Finding("RDMA", ", ".join(cards), "ok", meaning)
