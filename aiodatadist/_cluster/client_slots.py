"""Room for connections of unidentified clients: the oldest ones make room for the newest. No I/O.

If the newest had to wait instead, a client could keep all others away with silent connections. If there is no room at
all, the address with the most connections loses one, so it takes no room from an address with few.

Each address also has a rate. A connection beyond it has a slot, but is read only when its turn comes. Connections that
are proved do not count, so engines of one machine that all restart at once do not wait for each other.
"""

from __future__ import annotations

import ipaddress
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiodatadist._values import peer_budget
from aiodatadist._values.peer_budget import Budget

MAX_CLIENTS = peer_budget.UNPROVED
"""Connections of all addresses; fewer if the process may not open four times as many files."""
MAX_CLIENTS_OF_ONE = peer_budget.UNPROVED_OF_ONE
"""Connections of one address; with IPv6, of one /64 network, in which a host can have any number of addresses."""
MAX_RATES: Final = 4096
"""The addresses whose rates are remembered: those from which a connection came last."""

LOOPBACK_IPV6: Final = "::1"

GiveWay = Callable[[], object]


class Bucket:
    """A token bucket whose tokens may be taken in advance.

    Args:
        rate: tokens for each second.
        burst: the most tokens that gather.
        now: the time in seconds.
    """

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float) -> float:
        """Take a token, and return the seconds until it is available."""
        self._tokens = min(self._burst, self._tokens + self._rate * (now - self._at)) - 1
        self._at = now
        return max(0.0, -self._tokens / self._rate)

    def give(self) -> None:
        """Put a token back."""
        self._tokens = min(self._burst, self._tokens + 1)


@dataclass(slots=True)
class _Slot:
    """A slot. If it has a token, ``bucket`` is where that was taken, and ``turn`` the time at which it is available."""

    place: str
    bucket: Bucket | None = None
    turn: float = 0.0


class ClientSlots:
    """Connections by the place from which they come.

    Args:
        of_one: the largest number of connections of one address.
        of_all: the largest number of connections of all addresses; ``MAX_CLIENTS`` if it is None.
        rate: connections of one address for each second; ``of_one`` may come together. If None, there is no rate.
        spares_this_machine: True if loopback addresses have no limit and no rate per address: all users of the
            machine share them.
        clock: returns the time in seconds.
        refusals: counts the clients that had to make room, by limit.
        waits: counts the clients that have to wait for their turn.

    Attributes:
        displaced: the number of clients that had to make room.
    """

    def __init__(
        self,
        of_one: int = MAX_CLIENTS,
        of_all: int | None = None,
        rate: float | None = None,
        spares_this_machine: bool = False,
        clock: Callable[[], float] = time.monotonic,
        refusals: Counter[str] | None = None,
        waits: Counter[str] | None = None,
    ) -> None:
        self.displaced = 0
        self._limit = min(MAX_CLIENTS if of_all is None else of_all, max(open_files() // 4, 1))
        self._of_one = of_one
        self._rate = rate
        self._spares_this_machine = spares_this_machine
        self._clock = clock
        self._refusals = Counter[str]() if refusals is None else refusals
        self._waits = Counter[str]() if waits is None else waits
        self._all: dict[int, _Slot] = {}  # in order of arrival, as all dictionaries here
        self._by_place: dict[str, dict[int, GiveWay]] = {}
        self._rates: OrderedDict[str, Bucket] = OrderedDict()
        self._last = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def rated(self) -> int:
        """The number of addresses whose rates are remembered."""
        return len(self._rates)

    def enter(self, host: str, give_way: GiveWay) -> int:
        """Take a slot; return its number. ``give_way`` is called if a later client needs the slot."""
        place = place_of(host)
        is_spared = self._spares_this_machine and is_of_this_machine(host)
        theirs = self._by_place.get(place, {})
        if len(theirs) >= self._of_one and not is_spared:
            self._displace(next(iter(theirs)), Budget.UNPROVED_OF_ONE)
        elif len(self._all) >= self._limit:
            most: dict[int, GiveWay] = max(self._by_place.values(), key=len)
            self._displace(next(iter(most)), Budget.UNPROVED)
        self._last += 1
        self._all[self._last] = _Slot(place) if is_spared or self._rate is None else self._rated(place, self._rate)
        self._by_place.setdefault(place, {})[self._last] = give_way
        return self._last

    def _rated(self, place: str, rate: float) -> _Slot:
        now = self._clock()
        bucket = self._rates.pop(place, None) or Bucket(rate, self._of_one, now)
        self._rates[place] = bucket
        if len(self._rates) > MAX_RATES:
            self._rates.popitem(last=False)
        return _Slot(place, bucket, now + bucket.take(now))

    def wait(self, number: int) -> float:
        """Return the seconds until a client may be read; 0 if it is its turn."""
        slot = self._all.get(number)
        if slot is None or slot.bucket is None:
            return 0.0
        seconds = slot.turn - self._clock()
        if seconds > 0:
            self._waits[Budget.UNPROVED_PER_SECOND.value] += 1
        return max(0.0, seconds)

    def proved(self, number: int) -> None:
        """Note that a client is proved: it no longer counts towards the rate of its address. It keeps its slot."""
        slot = self._all.get(number)
        if slot is not None and slot.bucket is not None:
            slot.bucket.give()
            slot.bucket = None

    def leave(self, number: int) -> None:
        """Free a slot. No effect if it was freed for another client."""
        if number in self._all:
            self._take(number)

    def _displace(self, number: int, limit: Budget) -> None:
        self.displaced += 1
        self._refusals[limit.value] += 1
        self._take(number)()

    def _take(self, number: int) -> GiveWay:
        slot = self._all.pop(number)
        if slot.bucket is not None and slot.turn > self._clock():
            slot.bucket.give()  # it was never read
        theirs = self._by_place[slot.place]
        give_way = theirs.pop(number)
        if not theirs:
            del self._by_place[slot.place]
        return give_way


def open_files() -> int:
    """Return the number of files that this process may have open; at least 4096 if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CLIENTS * 4 if soft == resource.RLIM_INFINITY else soft


def is_of_this_machine(host: str) -> bool:
    """Return True for a loopback address."""
    try:
        return ipaddress.ip_address(place_of(host).partition("/")[0]).is_loopback or host == LOOPBACK_IPV6
    except ValueError:
        return False


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
