"""What a bad network does to a connection, in Toxiproxy's words; seconds and bytes instead of its milliseconds and KB."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aiodatadist.errors import ParamInvalid


def _at_least(what: object, name: str, value: float, least: float) -> None:
    """Raises ParamInvalid: it is less, or no number."""
    if not least <= value < math.inf:
        raise ParamInvalid(f"{type(what).__name__}.{name} is {value}: must be a finite number from {least:g} on")


@dataclass(frozen=True)
class _OfAShare:
    """Concerns this share of the pieces, from 0 to 1."""

    share: float = 1.0

    def __post_init__(self) -> None:
        _at_least(self, "share", self.share, 0)
        if self.share > 1:
            raise ParamInvalid(f"{type(self).__name__}.share is {self.share}: must be from 0 to 1")


@dataclass(frozen=True)
class Latency:
    """Each piece arrives later by ``seconds``, give or take up to ``jitter``; their order stays, and the bandwidth."""

    seconds: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, "seconds", self.seconds, 0)
        _at_least(self, "jitter", self.jitter, 0)


@dataclass(frozen=True)
class Bandwidth:
    """No more than so many bytes per second, in each direction of each connection."""

    bytes_per_second: float

    def __post_init__(self) -> None:
        _at_least(self, "bytes_per_second", self.bytes_per_second, 1)


@dataclass(frozen=True)
class Slicer:
    """Data comes in slices of ``average`` bytes, give or take up to ``variation``, with ``seconds`` between two of them."""

    average: int
    variation: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, "average", self.average, 1)
        _at_least(self, "seconds", self.seconds, 0)
        if not 0 <= self.variation < self.average:
            raise ParamInvalid(f"Slicer.variation is {self.variation}: must be from 0 to below average, {self.average}")


@dataclass(frozen=True)
class Timeout:
    """Nothing gets through, and the connection stays open for ``seconds``; for ever with 0.

    What comes meanwhile is held back, and goes on its way when this is removed, as after lost packets of TCP's. In Toxiproxy
    it is lost, which no network does to a connection that goes on.
    """

    seconds: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, "seconds", self.seconds, 0)


@dataclass(frozen=True)
class SlowClose:
    """The end of a connection arrives later by ``seconds``."""

    seconds: float

    def __post_init__(self) -> None:
        _at_least(self, "seconds", self.seconds, 0)


@dataclass(frozen=True)
class ResetPeer:
    """Connections, also those that are open, are reset (RST) after ``seconds``."""

    seconds: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, "seconds", self.seconds, 0)


@dataclass(frozen=True)
class LimitData:
    """A connection is closed when so many bytes have passed since this was added."""

    nbytes: int

    def __post_init__(self) -> None:
        _at_least(self, "nbytes", self.nbytes, 0)


class Corrupt(_OfAShare):
    """One bit is flipped in this share of the pieces. Not in Toxiproxy."""


class Drop(_OfAShare):
    """This share of the pieces does not arrive, and what comes behind them does. Not in Toxiproxy.

    A piece is what was there when the proxy looked: mostly one message, as they are sent one by one; of a long one a part.
    """


class Repeat(_OfAShare):
    """This share of the pieces, as of :class:`Drop`, arrives twice. Not in Toxiproxy."""


class Reorder(_OfAShare):
    """This share of the pieces, as of :class:`Drop`, arrives behind the next one, or when this is removed. Not in
    Toxiproxy."""


Toxic = Latency | Bandwidth | Slicer | Timeout | SlowClose | ResetPeer | LimitData | Corrupt | Drop | Repeat | Reorder
