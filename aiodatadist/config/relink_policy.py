"""``relink``: when a link that broke is made again."""

from __future__ import annotations

import random
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from aiodatadist.config.option_rules import WholeOption
from aiodatadist.errors import ParamInvalid

MAX_SECONDS: Final = 864_000.0
_Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]


class RelinkPolicy(WholeOption):
    """``relink``: ``{"first_delay": 0.02, "max_delay": 0.5, "duration": 600, "wait": 0}``, which are the defaults.

    All in seconds. Before the first attempt comes ``first_delay``, before each further one twice as long, up to
    ``max_delay``; of each a random half is left out, so that many clusters do not come back to one peer at the same moment.

    Attributes:
        first_delay: above 0.
        max_delay: at least ``first_delay``. A peer that is there again is linked after that, at the latest, and the time that
            making a link takes.
        duration: since the link broke: then it is given up. None, in JSON null: it is never given up.
        wait: for which transfers that are asked for meanwhile wait for the link, instead of failing at once; 0: none waits.

    Raises ParamInvalid: a value breaks its rule, or there is another.
    """

    first_delay: _Seconds = 0.02
    max_delay: _Seconds = 0.5
    duration: _Seconds | None = 600.0
    wait: Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_delay < self.first_delay:
            raise ParamInvalid(f"max_delay is {self.max_delay:g}: must be at least first_delay, {self.first_delay:g}")
        return self

    def delay(self, attempt: int) -> float:
        """Seconds before this attempt, counted from 1."""
        longest = min(self.max_delay, self.first_delay * 2.0 ** min(attempt - 1, 64))
        return longest * random.uniform(0.5, 1.0)
