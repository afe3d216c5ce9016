"""The findings about networks: whether loopback works, which addresses others can reach, and whom softnpu finds."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path
from typing import Final

from aiodatadist._cli.doctor.finding import Finding
from aiodatadist._transport.soft_reach import FOLDER
from aiodatadist._values.foreign import printable

GET_ADDRESS, GET_MTU = 0x8915, 0x8921  # SIOCGIFADDR, SIOCGIFMTU
IPV6: Final = Path("/proc/thread-self/net/if_inet6")
GLOBAL = 0  # the scope of an address that other machines can reach
NAMESPACE: Final = Path("/proc/thread-self/ns/net")
MOST_CHARACTERS = 50
"""The longest name of a folder in which softnpu's processes meet (softnpu.h)."""


def network_findings() -> Iterator[Finding]:
    """Yield if loopback works, the addresses of this machine, and which processes softnpu finds."""
    yield _loopback()
    yield _addresses()
    yield _softnpu()


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            try:
                socket.create_connection(("127.0.0.1", port), 2).close()
            except OSError as error:
                meaning = f"can listen on 127.0.0.1, but not connect to it: {error}; is the interface lo up?"
                return Finding("loopback", "no", "fail", meaning)
    except OSError as error:
        return Finding("loopback", "no", "fail", f"cannot listen on 127.0.0.1: {error}")
    return Finding("loopback", "yes", "ok", f"can listen on 127.0.0.1, and connect to it (tried port {port})")


def _addresses() -> Finding:
    found = [f"{name} {', '.join(addresses)} (MTU {mtu})" for name, mtu, addresses in _interfaces() if addresses]
    if not found:
        return Finding("network", "none", "ok", "only this machine reaches clusters here: no interface has an address")
    meaning = (
        "other machines reach a cluster that listens there, if no firewall is in between; it needs trust or auth_key"
    )
    return Finding("network", "; ".join(found), "ok", meaning)


def _interfaces() -> Iterator[tuple[str, int, list[str]]]:
    """Yield each interface with its MTU, and its addresses that other machines can reach."""
    ipv6 = _ipv6()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            addresses, mtu = list[str](), 0
            with suppress(OSError):
                mtu = struct.unpack_from("i", fcntl.ioctl(sock, GET_MTU, request), 16)[0]
                addresses.append(socket.inet_ntoa(fcntl.ioctl(sock, GET_ADDRESS, request)[20:24]))
            yield name, mtu, [each for each in addresses if not each.startswith("127.")] + ipv6.get(name, [])


def _ipv6() -> dict[str, list[str]]:
    """Return the addresses of interfaces that are neither of one link nor of this machine only."""
    found: dict[str, list[str]] = {}
    with suppress(OSError):
        for line in IPV6.read_text(encoding="ascii").splitlines():
            address, _, _, scope, _, name = line.split()
            if int(scope, 16) == GLOBAL:
                found.setdefault(name, []).append(str(IPv6Address(bytes.fromhex(address))))
    return found


def _softnpu() -> Finding:
    folder, name = os.environ.get(FOLDER, ""), "softnpu's peers"
    try:
        here = str(NAMESPACE.readlink())
    except OSError:
        here = "unknown"
    if not folder:
        others = f"those in other namespaces, as containers are, need a folder that {FOLDER} names at both ends"
        return Finding(name, f"in {here}", "ok", f"softnpu finds processes of this network namespace; {others}")
    shown = printable(folder)
    if len(os.fsencode(folder)) > MOST_CHARACTERS:
        why = f"{FOLDER} has {len(os.fsencode(folder))} characters, and must have at most {MOST_CHARACTERS}"
        return Finding(name, f"in {shown}", "fail", why)
    if not os.access(folder, os.W_OK | os.X_OK) or not Path(folder).is_dir():
        return Finding(name, f"in {shown}", "fail", f"{FOLDER} is no folder that this user may write into")
    return Finding(
        name, f"in {shown}", "ok", f"softnpu finds processes whose {FOLDER} is this folder; this one is in {here}"
    )
