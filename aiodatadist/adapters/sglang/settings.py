"""What an engine's user may say, and where."""

from __future__ import annotations

import os

from pydantic import Field, ValidationError

from aiodatadist.adapters.block_service import Settings

VARIABLE = "AIODATADIST_SGLANG"


class SglangSettings(Settings):
    """As :class:`~aiodatadist.adapters.block_service.Settings`, with SGLang's times.

    Attributes:
        bootstrap_seconds: that a request at the prefill engine waits for the decode engine to say where its pages belong.
        pull_seconds: that a request at the decode engine waits for its pages.
    """

    bootstrap_seconds: float = Field(default=300.0, gt=0, le=86_400)
    pull_seconds: float = Field(default=300.0, gt=0, le=86_400)
    lease_seconds: float = Field(default=300.0, gt=0, le=86_400)


def from_environment() -> SglangSettings:
    """Raises ValueError: what the variable has is wrong."""
    try:
        return SglangSettings.model_validate_json(os.environ.get(VARIABLE, "{}"))
    except ValidationError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


def on_device(settings: SglangSettings, device_of_rank_0: int) -> SglangSettings:
    """SGLang's choice, unless the settings have one; less than 0 where rank 0 is on another machine."""
    if "device_id" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"device_id": device_of_rank_0})
