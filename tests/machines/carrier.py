"""A network that loses, delays and reorders packets, or carries none: it joins machines by a TUN device each.

:class:`Carrier` decides what becomes of each packet, by a clock that it is handed and with chances that a seed repeats. As a
program this reads orders from its standard input, a line of JSON each, and carries packets until that ends. So real TCP
meets real loss, on kernels without netem, too.
"""

from __future__ import annotations

import errno
import heapq
import ipaddress
import json
import os
import random
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tests.machines.networks import address

TCP = 6
LARGEST = 1 << 16
ABSENT = {errno.EIO, errno.ENOBUFS, errno.EAGAIN}
"""Errors of a device that cannot take a packet: it is down, or full."""


@dataclass(frozen=True)
class Way:
    """The treatment of packets from one machine to another.

    Attributes:
        delay: seconds that each packet takes.
        loss: the share of packets that are lost.
        late: the share of packets that take ``lateness`` longer, so that later ones overtake them.
        is_cut: True if no packet passes; those under way do not arrive either.
        cut_flows: pairs of TCP ports, the lower one first, between which no packet passes.
        largest: bytes of the largest packet that passes, if not 0. Its sender is told nothing of larger ones.
        rate: bytes that pass in a second, if not 0. Packets that would wait longer than ``QUEUE`` seconds are lost.
    """

    delay: float = 0.0
    loss: float = 0.0
    late: float = 0.0
    lateness: float = 0.005
    is_cut: bool = False
    cut_flows: tuple[tuple[int, int], ...] = ()
    largest: int = 0
    rate: float = 0.0


QUEUE = 0.05


class Packet(NamedTuple):
    """A packet under way. Packets that are due at the same time arrive in the order in which they were sent."""

    due: float
    number: int
    source: int
    target: int
    data: bytes


class Carrier:
    """A network of machines 0, 1, 2, ..., which are hosts 1, 2, 3, ... of a network.

    Attributes:
        passed, dropped: packets from one machine to another, by the two numbers.
        flows: packets of each pair of TCP ports that passed, the pair whose packets came first first.
    """

    def __init__(self, machines: int, net: int, seed: int = 1) -> None:
        families = ((4, ipaddress.IPv4Address), (6, ipaddress.IPv6Address))
        self._machines = {
            kind(address(net, number + 1, family)).packed: number
            for family, kind in families
            for number in range(machines)
        }
        self._chance = random.Random(seed)
        self._number = 0
        self._under_way: list[Packet] = []
        self._free_at: dict[tuple[int, int], float] = {}
        ends = range(machines)
        self.ways: dict[tuple[int, int], Way] = {(a, b): Way() for a in ends for b in ends if a != b}
        self.passed: Counter[tuple[int, int]] = Counter()
        self.dropped: Counter[tuple[int, int]] = Counter()
        self.flows: Counter[tuple[int, int]] = Counter()

    def take(self, data: bytes, source: int, now: float) -> None:
        """Accept a packet that a machine has sent. If it is for no machine here, it disappears."""
        target = self._machines.get(data[16:20] if data[0] >> 4 == 4 else data[24:40])
        way = self.ways.get((source, source if target is None else target))
        if way is None or target is None:
            return
        free_at = max(now, self._free_at.get((source, target), 0.0)) if way.rate else now
        if self._is_cut(way, data) or free_at > now + QUEUE or self._chance.random() < way.loss:
            self.dropped[source, target] += 1
            return
        if way.rate:
            self._free_at[source, target] = free_at = free_at + len(data) / way.rate
        due = free_at + way.delay + (way.lateness if self._chance.random() < way.late else 0.0)
        self._number += 1
        heapq.heappush(self._under_way, Packet(due, self._number, source, target, data))

    def due(self, now: float) -> Iterator[Packet]:
        """Yield the packets that arrive by now."""
        while self._under_way and self._under_way[0].due <= now:
            packet = heapq.heappop(self._under_way)
            way = packet.source, packet.target
            if self._is_cut(self.ways[way], packet.data):
                self.dropped[way] += 1
                continue
            self.passed[way] += 1
            if (flow := flow_of(packet.data)) is not None:
                self.flows[flow] += 1
            yield packet

    def next_due(self) -> float | None:
        """Return when the next packet arrives; None if none is under way."""
        return self._under_way[0].due if self._under_way else None

    @staticmethod
    def _is_cut(way: Way, data: bytes) -> bool:
        is_too_large = 0 < way.largest < len(data)
        return way.is_cut or is_too_large or (bool(way.cut_flows) and flow_of(data) in way.cut_flows)


def flow_of(data: bytes) -> tuple[int, int] | None:
    """Return the TCP ports of a packet, the lower one first; None if it is not TCP, or not the first part of its packet."""
    if data[0] >> 4 == 4:
        protocol, start, is_first = data[9], 4 * (data[0] & 15), not (data[6] & 0x1F or data[7])
    else:
        protocol, start, is_first = data[6], 40, True
    if protocol != TCP or not is_first or len(data) < start + 4:
        return None
    ports = int.from_bytes(data[start : start + 2], "big"), int.from_bytes(data[start + 2 : start + 4], "big")
    return min(ports), max(ports)


class _Program:
    """The program: it moves packets between devices, and does what it is told.

    Args:
        devices: a TUN device of each machine, in their order.
    """

    def __init__(self, devices: list[int], net: int, seed: int) -> None:
        self._carrier = Carrier(len(devices), net, seed)
        self._devices = devices
        self._awaited: tuple[str, tuple[int, int], int] | None = None
        self._poll = select.poll()
        for each in (sys.stdin.fileno(), *devices):
            self._poll.register(each, select.POLLIN)
        self._read = b""

    def run(self) -> None:
        """Carry packets until standard input ends."""
        machine_of = {number: machine for machine, number in enumerate(self._devices)}
        while True:
            due = self._carrier.next_due()
            pause = None if due is None else max(0.0, 1000 * (due - time.monotonic()))
            for number, _ in self._poll.poll(pause):
                if number in machine_of:
                    self._read_packets(number, machine_of[number])
                elif not self._obey():
                    return
            for packet in self._carrier.due(time.monotonic()):
                self._deliver(packet)
            self._answer_if_it_has_come()

    def _read_packets(self, number: int, machine: int) -> None:
        for _ in range(64):  # then the other devices have their turn
            try:
                data = os.read(number, LARGEST)
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                return
            self._carrier.take(data, machine, time.monotonic())

    def _deliver(self, packet: Packet) -> None:
        try:
            os.write(self._devices[packet.target], packet.data)
        except OSError as error:
            if error.errno not in ABSENT:
                raise

    def _obey(self) -> bool:
        data = os.read(sys.stdin.fileno(), LARGEST)
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            match json.loads(line):
                case {"ways": pairs, "change": change}:
                    for pair in pairs:
                        self._carrier.ways[tuple(pair)] = changed(self._carrier.ways[tuple(pair)], change)
                    _say(None)
                case {"count": name, "way": way, "at_least": count}:
                    self._awaited = name, tuple(way), count
                case {"flows": _}:
                    _say([[*flow, count] for flow, count in self._carrier.flows.items()])
        return bool(data)

    def _answer_if_it_has_come(self) -> None:
        if self._awaited is None:
            return
        name, way, least = self._awaited
        count = getattr(self._carrier, name)[way]
        if count >= least:
            self._awaited = None
            _say(count)


def changed(way: Way, change: dict[str, Any]) -> Way:
    """Return a way with some of its attributes changed, as they come from JSON."""
    if "cut_flows" in change:
        change = change | {"cut_flows": tuple(tuple(pair) for pair in change["cut_flows"])}
    return replace(way, **change)


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _Program([int(word) for word in sys.argv[3:]], int(sys.argv[1]), int(sys.argv[2])).run()
