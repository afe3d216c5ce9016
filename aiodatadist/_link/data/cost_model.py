"""The cost of layered transfers: how much of a transfer compute can hide, and in what portions to send it.

Pure arithmetic, in seconds and bytes. Layer ``i`` takes ``c[i]`` to compute and ``t[i]`` to transfer, in order, over one
channel. ``C`` and ``X`` are the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def ideal(compute: Sequence[float], transfer: Sequence[float]) -> float:
    """Return T*, the earliest time at which the last byte can land: the optimum of a two-machine flow shop of fixed order."""
    best = computed = 0.0
    left = math.fsum(transfer)
    for c, t in zip(compute, transfer, strict=True):
        computed += c
        best = max(best, computed + left)
        left -= t
    return best


def ideal_uniform(compute: float, transfer: float, layers: int) -> float:
    """Return T* if all layers are alike: the longer of the two times, and one layer of the shorter."""
    return max(compute, transfer) + min(compute, transfer) / layers


def hidden_share(compute: float, transfer: float, total: float) -> float:
    """Return H, the share of the transfer that ran beside compute; 1 is all of it."""
    return (compute + transfer - total) / transfer


def best_hidden_share(compute: float, transfer: float, layers: int) -> float:
    """Return H*, the most that H can be."""
    return min(1.0, compute / transfer) * (1 - 1 / layers)


@dataclass(frozen=True, slots=True)
class Costs:
    """The measured costs of a link.

    Attributes:
        message: seconds that each message costs, whatever its size.
        per_byte: seconds that each byte costs.
        interference: seconds for which sending a message keeps the caller's thread busy.
    """

    message: float
    per_byte: float
    interference: float


def group_size(layers: int, nbytes: int, compute: float | None, costs: Costs | None) -> int:
    """Return the number of layers to send at a time; ``layers`` means all of them, after the last one.

    Three sizes are tried, and the one that ends first is returned: one layer at a time; the smallest group whose messages
    still fit beside compute; the group that balances the cost of messages with the wait for the first one. All layers are
    sent at once if hiding the transfer saves less than sending layer by layer costs.

    Args:
        nbytes: the size of all layers.
        compute: the seconds that computing all layers takes; None if that is not known.
        costs: the costs of the link; None if nothing has been measured yet.
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
    """Return when the last byte lands, if ``group`` layers are sent at a time.

    Args:
        alone: the seconds that all bytes take.
        message: the seconds that each message takes.
    """
    count = math.ceil(layers / group)
    return ideal_uniform(compute, alone + count * message, count)


class Estimate:
    """The costs of a link, estimated from its transfers: a line through (bytes, seconds), in which old transfers fade."""

    KEEP = 0.95
    """The weight that earlier measurements keep, each time another one is added."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._interference = 0.0
        self._calls = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Add a transfer that took this long, alone on its stream."""
        keep, x = self.KEEP, float(nbytes)
        self._n = keep * self._n + 1
        self._x = keep * self._x + x
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + x * x
        self._xy = keep * self._xy + x * seconds

    def add_interference(self, seconds: float) -> None:
        """Add a message whose sending kept the caller's thread busy for this long."""
        self._interference = self.KEEP * self._interference + seconds
        self._calls = self.KEEP * self._calls + 1

    @property
    def costs(self) -> Costs | None:
        """The estimated costs; None before the first transfer.

        If all transfers have the same size, a message is assumed to cost nothing.
        """
        if self._n < 1 or self._x <= 0:
            return None
        spread = self._n * self._xx - self._x * self._x
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 1e-6 * self._xx * self._n else 0.0
        if slope <= 0:
            slope = self._y / self._x
        message = max(0.0, (self._y - slope * self._x) / self._n)
        return Costs(message, slope, self._interference / self._calls if self._calls else 0.0)
