"""A finding of ``aiodatadist doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mark = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check, its level, and what it means for the user.

    ``warn`` is something that could work better, or that only some uses need; ``fail`` is fatal.
    """

    name: str
    value: str
    mark: Mark
    meaning: str
