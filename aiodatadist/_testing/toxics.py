"""Faults of a bad network, with Toxiproxy's names; in seconds and bytes instead of its milliseconds and KB."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aiodatadist.errors import ParamInvalid


def _at_least(what: object, name: str, value: float, least: float) -> None:
    """Raise ParamInvalid if the value is less, or no number."""
    if not least <= value < math.inf:
        raise ParamInvalid(f"{type(what).__name__}.{name} is {value}: must be a finite number, at least {least:g}")


@dataclass(frozen=True)
class _OfAShare:
    """A toxic for this share of the pieces, from 0 to 1."""

    share: float = 1.0

    def __post_init__(self) -> None:
        _at_least(self, "share", self.share, 0)
        if self.share > 1:
            raise ParamInvalid(f"{type(self).__name__}.share is {self.share}: must be from 0 to 1")


@dataclass(frozen=True)
class Latency:
    """A delay: each piece arrives ``seconds`` later, plus or minus up to ``jitter``. Order and bandwidth stay the same."""

    seconds: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, "seconds", self.seconds, 0)
        _at_least(self, "jitter", self.jitter, 0)


@dataclass(frozen=True)
class Bandwidth:
    """A limit on the bytes per second, in each direction of each connection."""

    bytes_per_second: float

    def __post_init__(self) -> None:
        _at_least(self, "bytes_per_second", self.bytes_per_second, 1)


@dataclass(frozen=True)
class Slicer:
    """Data in slices of ``average`` bytes, plus or minus up to ``variation``, with ``seconds`` between two slices."""

    average: int
    variation: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, "average", self.average, 1)
        _at_least(self, "seconds", self.seconds, 0)
        if not 0 <= self.variation < self.average:
            raise ParamInvalid(
                f"Slicer.variation is {self.variation}: must be at least 0, and below average, {self.average}"
            )


@dataclass(frozen=True)
class Timeout:
    """A stalled network: nothing gets through, and the connection stays open for ``seconds``, or for ever with 0.

    Data that comes meanwhile is held back, and passes when this is removed, as after lost TCP packets. In Toxiproxy it
    is lost, which no network does to a connection that continues.
    """

    seconds: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, "seconds", self.seconds, 0)


@dataclass(frozen=True)
class SlowClose:
    """A delay of the end of a connection, by ``seconds``."""

    seconds: float

    def __post_init__(self) -> None:
        _at_least(self, "seconds", self.seconds, 0)


@dataclass(frozen=True)
class ResetPeer:
    """Resets: connections, open ones included, are reset (RST) after ``seconds``."""

    seconds: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self, "seconds", self.seconds, 0)


@dataclass(frozen=True)
class LimitData:
    """A limit on the bytes of a connection: it is closed once this number has passed since this was added."""

    nbytes: int

    def __post_init__(self) -> None:
        _at_least(self, "nbytes", self.nbytes, 0)


class Corrupt(_OfAShare):
    """Flipped bits: one bit in this share of the pieces. Not in Toxiproxy."""


class Drop(_OfAShare):
    """Lost data: this share of the pieces does not arrive, but what follows them does. Not in Toxiproxy.

    A piece is what the proxy read at once: mostly one message, because messages are sent one by one, or a part of a
    long one.
    """


class Repeat(_OfAShare):
    """Repeated data: this share of the pieces (see :class:`Drop`) arrives twice. Not in Toxiproxy."""


class Reorder(_OfAShare):
    """Reordered data: this share of the pieces (see :class:`Drop`) arrives behind the next one. Not in Toxiproxy.

    If this is removed, a piece that waits for the next one arrives at once.
    """


Toxic = Latency | Bandwidth | Slicer | Timeout | SlowClose | ResetPeer | LimitData | Corrupt | Drop | Repeat | Reorder
