"""A user's settings, and the variable that has them."""

from __future__ import annotations

import os

from pydantic import Field, ValidationError

from aiodatadist._adapters.settings import Settings

VARIABLE = "AIODATADIST_SGLANG"


class SglangSettings(Settings):
    """The settings of :class:`~aiodatadist._adapters.settings.Settings`, with SGLang's time limits.

    Attributes:
        bootstrap_seconds: time for which a request at the prefill engine waits until the decode engine says where pages
            belong.
        pull_seconds: time for which a request at the decode engine waits for its pages.
    """

    bootstrap_seconds: float = Field(default=300.0, gt=0, le=86_400)
    pull_seconds: float = Field(default=300.0, gt=0, le=86_400)
    lease_seconds: float = Field(default=300.0, gt=0, le=86_400)


def from_environment() -> SglangSettings:
    """Return the settings of the environment. Raises ValueError if the variable's content is wrong."""
    try:
        return SglangSettings.model_validate_json(os.environ.get(VARIABLE, "{}"))
    except ValidationError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


def on_device(settings: SglangSettings, device_of_rank_0: int) -> SglangSettings:
    """Return the settings with SGLang's choice of a device, unless they have one.

    The choice is below 0 if rank 0 is on another machine.
    """
    if "device_id" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"device_id": device_of_rank_0})
