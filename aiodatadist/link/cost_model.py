"""How much of a transfer compute can hide, and in what portions to send. Pure arithmetic; seconds and bytes throughout.

Layer ``i`` takes ``c[i]`` to compute and ``t[i]`` to transfer, in order, over one channel. ``C`` and ``X`` are the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def ideal(compute: Sequence[float], transfer: Sequence[float]) -> float:
    """The earliest that the last byte can be there: T*, the optimum of a two-machine flow shop of fixed order."""
    best = computed = 0.0
    left = math.fsum(transfer)
    for c, t in zip(compute, transfer, strict=True):
        computed += c
        best = max(best, computed + left)
        left -= t
    return best


def ideal_uniform(compute: float, transfer: float, layers: int) -> float:
    """T* when all layers are alike: the longer of the two, and one layer of the shorter."""
    return max(compute, transfer) + min(compute, transfer) / layers


def hidden_share(compute: float, transfer: float, total: float) -> float:
    """H: the share of the transfer that took place beside compute; 1 is all of it."""
    return (compute + transfer - total) / transfer


def best_hidden_share(compute: float, transfer: float, layers: int) -> float:
    """H*: what H can be at most."""
    return min(1.0, compute / transfer) * (1 - 1 / layers)


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured on a link.

    Attributes:
        message: seconds that a message costs whatever its size.
        per_byte: seconds.
        interference: seconds of the caller's that sending a message costs.
    """

    message: float
    per_byte: float
    interference: float


def group_size(layers: int, nbytes: int, compute: float | None, costs: Costs | None) -> int:
    """Layers to send at a time; ``layers`` means serially, after the last one.

    Whatever is done first of these: one layer at a time; the smallest group whose messages still fit beside compute; the
    group that balances the cost of messages with the wait for the first. All at once where hiding the transfer saves less
    than sending layer by layer costs.

    Args:
        nbytes: of all layers.
        compute: seconds of all layers; None if that is not known.
        costs: None if nothing was measured yet.
    """
    if costs is None or layers < 2:
        return 1
    alone = nbytes * costs.per_byte
    if alone * (1 - 1 / layers) <= layers * costs.interference:
        return layers
    if compute is None or compute <= 0:
        return 1
    message = max(costs.message, costs.interference)
    if message <= 0:
        return 1
    most = int((compute - alone) / message)  # messages that fit beside compute
    groups = [1, round(layers * math.sqrt(message / compute)), layers if most < 1 else math.ceil(layers / most)]
    return min(
        (max(1, min(layers, group)) for group in groups),
        key=lambda group: total(group, layers, alone, compute, message),
    )


def total(group: int, layers: int, alone: float, compute: float, message: float) -> float:
    """When the last byte is there, in groups of so many layers; ``alone``: seconds of all bytes, ``message``: of each."""
    count = math.ceil(layers / group)
    return ideal_uniform(compute, alone + count * message, count)


class Estimate:
    """Costs of a link, from the transfers that it made: a line through (bytes, seconds), in which old ones fade."""

    KEEP = 0.95

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._interference = 0.0
        self._calls = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """A transfer took this long, alone on its stream."""
        keep, x = self.KEEP, float(nbytes)
        self._n = keep * self._n + 1
        self._x = keep * self._x + x
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + x * x
        self._xy = keep * self._xy + x * seconds

    def add_interference(self, seconds: float) -> None:
        """Sending a message kept the caller's thread busy for this long."""
        self._interference = self.KEEP * self._interference + seconds
        self._calls = self.KEEP * self._calls + 1

    @property
    def costs(self) -> Costs | None:
        """None before there was a transfer. With sizes all alike a message is taken for free."""
        if self._n < 1 or self._x <= 0:
            return None
        spread = self._n * self._xx - self._x * self._x
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 1e-6 * self._xx * self._n else 0.0
        if slope <= 0:
            slope = self._y / self._x
        message = max(0.0, (self._y - slope * self._x) / self._n)
        return Costs(message, slope, self._interference / self._calls if self._calls else 0.0)
