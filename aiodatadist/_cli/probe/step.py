"""The steps of a probe, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from aiodatadist._cli.probe.report import Outcome

Alone: TypeAlias = Callable[[Any], Outcome]
"""A function that carries out a step with a :class:`~aiodatadist._cli.probe.bench.Bench`."""
Together: TypeAlias = Callable[[Any], Outcome]
"""A function that carries out a step with a :class:`~aiodatadist._cli.probe.pair.Pair`."""


class Skip(Exception):
    """The step cannot be done here; the text says why."""


@dataclass(frozen=True)
class Step:
    """An experiment.

    Attributes:
        alone, together: function for one device or for two; exactly one is set.
        decides: the prediction (B1 to B20) that it decides.
        soft_allows: True if softnpu allows more than HCCL there, unless it is told to be strict.
        limit: seconds after which its processes are killed.
    """

    number: str
    title: str
    expected: str
    alone: Alone | None = None
    together: Together | None = None
    decides: str = ""
    soft_allows: bool = False
    limit: float = 60.0


def outcome(as_expected: bool, found: str, holds: bool | None = None, **facts: str) -> Outcome:
    return Outcome(verdict="as expected" if as_expected else "differs", found=found, holds=holds, facts=facts)
