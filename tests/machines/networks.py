"""Machines that are network namespaces, and what joins them. Nothing is left of them, whatever happens.

A namespace is named after the process that made it. One whose process has ended, because it was killed, is removed by the
next process that makes namespaces.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tests.machines.inside import FOLDER, call_inside

TUN = Path("/dev/net/tun")
NAME = re.compile(r"aiodatadist-(\d+)-(\d+)-\w+")
"""The process that made a namespace, and when that process started, so that no other with its number is meant."""
PORT = 26001
"""The port on which ends listen: a machine has all ports to itself."""
T = TypeVar("T")


class Machine:
    """A machine: a namespace with its own interfaces, routes and ports."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.namespace = f"aiodatadist-{os.getpid()}-{started_at(os.getpid())}-{label}"

    def ip(self, *lines: str) -> None:
        """Run lines of ``ip`` here. Raises AssertionError with its words if it refuses one."""
        _ip("-n", self.namespace, "-batch", "-", lines=lines)

    def inside(self, call: Callable[[], T]) -> T:
        """Return what a call returns in a thread on this machine. Sockets and devices that it opens stay here."""
        return call_inside(self.namespace, call)

    def set(self, name: str, value: object) -> None:
        """Set an option of ``/proc/sys/net`` for this machine."""
        self.inside(lambda: (Path("/proc/sys/net") / name).write_text(str(value), encoding="ascii"))

    def rules(self, text: str) -> None:
        """Give this machine's kernel rules of ``nft``. Raises AssertionError with its words if it refuses them."""
        _run(["ip", "netns", "exec", self.namespace, "nft", "-f", "-"], text)


def _run(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


def _ip(*words: str, lines: Iterable[str] = ()) -> None:
    _run(["ip", *words], "".join(f"{line}\n" for line in lines))


def started_at(pid: int) -> str:
    """Return when a process started, by the kernel's clock; empty if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def leftovers() -> list[str]:
    """Return the namespaces whose process has ended."""
    names = [entry.name for entry in FOLDER.iterdir()] if FOLDER.exists() else []
    found = {name: NAME.fullmatch(name) for name in names}
    return sorted(name for name, match in found.items() if match and started_at(int(match[1])) != match[2])


def remove(names: Iterable[str]) -> None:
    """Remove namespaces, with their interfaces. Another process may be removing them, too."""
    for name in names:
        with suppress(AssertionError):
            _ip("netns", "delete", name)


@contextmanager
def machines(*labels: str) -> Iterator[list[Machine]]:
    """Make machines that nothing joins yet."""
    made = [Machine(label) for label in labels]
    try:
        for each in made:
            _ip("netns", "add", each.namespace)
            each.ip("link set lo up")
        yield made
    finally:
        remove(each.namespace for each in made)


# ---- what joins them ----


def address(net: int, host: int, family: int = 4) -> str:
    """Return a host's address in a network of this number."""
    return f"10.77.{net}.{host}" if family == 4 else f"fd77:{net}::{host}"


def address_lines(device: str, net: int, host: int, mtu: int) -> list[str]:
    """Return the lines of ``ip`` that give a device a host's addresses, and turn it on."""
    return [
        f"address add {address(net, host)}/24 dev {device}",
        f"address add {address(net, host, 6)}/64 dev {device} nodad",
        f"link set {device} mtu {mtu} up",
    ]


def cable(one: Machine, other: Machine, net: int = 1, mtu: int = 1500) -> None:
    """Join two machines. They are hosts 1 and 2 of this network, over a device ``net1`` if that is its number."""
    device = f"net{net}"
    one.ip(f"link add {device} type veth peer name {device} netns {other.namespace}")
    for host, machine in enumerate((one, other), 1):
        machine.ip(*address_lines(device, net, host, mtu))


def switch(hub: Machine, *joined: Machine, net: int = 1, mtu: int = 1500) -> None:
    """Join any number of machines by a bridge. They are hosts 1, 2, 3, ...; the hub is none of them."""
    device = f"net{net}"
    hub.ip("link add bridge type bridge", "link set bridge up")
    for host, machine in enumerate(joined, 1):
        port = f"port{host}"
        hub.ip(
            f"link add {port} type veth peer name {device} netns {machine.namespace}",
            f"link set {port} mtu {mtu} master bridge up",
        )
        machine.ip(*address_lines(device, net, host, mtu))


def route(one: Machine, router: Machine, other: Machine, mtus: tuple[int, int] = (1500, 1500)) -> None:
    """Join two machines by a router, which is host 2 of networks 1 and 2. Each of them is host 1 of its network."""
    for net, (machine, mtu) in enumerate(zip((one, other), mtus, strict=True), 1):
        cable(machine, router, net, mtu)
        machine.ip(*(f"route add default via {address(net, 2, family)}" for family in (4, 6)))
    router.set("ipv4/ip_forward", 1)
    router.set("ipv6/conf/all/forwarding", 1)


FORWARDED = """
table ip nat {{
  chain before {{ type nat hook prerouting priority dstnat; tcp dport {port} dnat to {to}; }}
  chain after {{ type nat hook postrouting priority srcnat; masquerade; }}
}}
"""


def forward(router: Machine, port: int, host: str, to: int = PORT) -> None:
    """Pass connections to a port of the router on to another host. Each side sees only the router's address."""
    router.rules(FORWARDED.format(port=port, to=f"{host}:{to}"))
