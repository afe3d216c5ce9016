"""How many examples property tests try: few in every run, many in the night (``AIODATADIST_NIGHTLY=1``)."""

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
    """A set of parameters that is tried in the night; others of its kind are in every run."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def examples(count: int) -> int:
    """So many in every run, ten times as many in the night: for tests whose examples cost more, or less, than others'."""
    return 10 * count if IS_NIGHT else count
