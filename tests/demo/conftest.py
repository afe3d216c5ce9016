"""Collections of garbage in these tests do not look at what earlier tests left."""

from tests.heap import pytest_runtest_logstart

__all__ = ["pytest_runtest_logstart"]
