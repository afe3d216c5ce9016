"""Numbers of examples for property tests: few in every run, many at night (``AIODATADIST_NIGHTLY=1``)."""

from __future__ import annotations

import os

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

IS_NIGHT = os.environ.get("AIODATADIST_NIGHTLY") == "1"

# Property tests may take their time: machines are shared, and a slow example is not a wrong one.
settings.register_profile("short", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.register_profile("long", settings.get_profile("short"), max_examples=1000)
settings.load_profile("long" if IS_NIGHT else "short")


def at_night(*values: object) -> ParameterSet:
    """Make a set of parameters that is tried at night only."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def examples(count: int) -> int:
    """Return ``count``, or ten times as many at night, for tests whose examples cost more or less than others'."""
    return 10 * count if IS_NIGHT else count
