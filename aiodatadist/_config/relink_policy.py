"""The option ``relink``: when a broken link is re-established."""

from __future__ import annotations

import random
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from aiodatadist._config.option_rules import WholeOption
from aiodatadist._values.signatures import readable
from aiodatadist.errors import ParamInvalid

MAX_SECONDS: Final = 864_000.0
"""The longest time in the policy: ten days."""
_Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]


@readable
class RelinkPolicy(WholeOption):
    """The option ``relink``. Its defaults are ``{"first_delay": 0.02, "max_delay": 0.5, "duration": 600, "wait": 0}``.

    All values are seconds. ``first_delay`` comes before the first attempt. The delay doubles before each further one,
    up to ``max_delay``; a link that broke again within ``max_delay`` counts as a failed attempt. A random part of each
    delay, at most half, is left out, so that many clusters do not return to one peer at the same moment.

    Attributes:
        first_delay: above 0.
        max_delay: at least ``first_delay``. A peer that has returned is linked at the latest after this, plus the time
            that making a link takes.
        duration: time since the link broke after which it is given up. If None, in JSON null, it is never given up.
        wait: time for which transfers that are requested meanwhile wait for the link, instead of failing at once. If 0,
            none waits.

    Raises ParamInvalid if a value breaks its rule, or an unknown field is given.
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
        """Return the seconds to wait before this attempt, counted from 1."""
        longest = min(self.max_delay, self.first_delay * 2.0 ** min(attempt - 1, 64))
        return longest * random.uniform(0.5, 1.0)
