"""Room for connections of unidentified clients: the oldest ones make room for the newest. No I/O.

If the newest had to wait instead, a client could keep all others away with silent connections. If there is no room at
all, the address with the most connections loses one, so it takes no room from an address with few.
"""

from __future__ import annotations

import ipaddress
import resource
from collections.abc import Callable

MAX_CLIENTS = 1024
"""Connections of all addresses; fewer if the process may not open four times as many files."""
MAX_CLIENTS_OF_ONE = 64
"""Connections of one address; with IPv6, of one /64 network, in which a host can have any number of addresses."""

GiveWay = Callable[[], object]


class ClientSlots:
    """Connections by the place from which they come.

    Args:
        of_one: the largest number of connections of one address.

    Attributes:
        displaced: the number of clients that had to make room.
    """

    def __init__(self, of_one: int = MAX_CLIENTS) -> None:
        self.displaced = 0
        self._limit = min(MAX_CLIENTS, max(open_files() // 4, 1))
        self._of_one = of_one
        self._all: dict[int, str] = {}  # in order of arrival, as all dictionaries here
        self._by_place: dict[str, dict[int, GiveWay]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, host: str, give_way: GiveWay) -> int:
        """Take a slot; return its number. ``give_way`` is called if a later client needs the slot."""
        place = place_of(host)
        theirs = self._by_place.get(place, {})
        if len(theirs) >= self._of_one:
            self._displace(next(iter(theirs)))
        elif len(self._all) >= self._limit:
            most: dict[int, GiveWay] = max(self._by_place.values(), key=len)
            self._displace(next(iter(most)))
        self._last += 1
        self._all[self._last] = place
        self._by_place.setdefault(place, {})[self._last] = give_way
        return self._last

    def leave(self, number: int) -> None:
        """Free a slot. No effect if it was freed for another client."""
        if number in self._all:
            self._take(number)

    def _displace(self, number: int) -> None:
        self.displaced += 1
        self._take(number)()

    def _take(self, number: int) -> GiveWay:
        place = self._all.pop(number)
        theirs = self._by_place[place]
        give_way = theirs.pop(number)
        if not theirs:
            del self._by_place[place]
        return give_way


def open_files() -> int:
    """Return the number of files that this process may have open; at least 4096 if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CLIENTS * 4 if soft == resource.RLIM_INFINITY else soft


def place_of(host: str) -> str:
    """Return the key of a share: an address, or a /64 network with IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
