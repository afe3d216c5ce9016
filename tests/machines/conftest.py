"""Machines for the tests of this folder, which are skipped, with the reason, if this machine cannot make any."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest

from tests.machines.needs import missing_nft, need, why_not


def pytest_runtest_setup() -> None:
    """Skip a test of this folder if there can be no machines. Skips of a hook, unlike those of a fixture, share one line."""
    need(why_not())


@pytest.fixture
def nft() -> None:
    """Skip the test if the kernel cannot be given rules for address translation."""
    need(missing_nft())


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let softnpu's processes meet in a folder, whatever machine they are on."""
    with TemporaryDirectory(prefix="npu") as folder:
        monkeypatch.setenv("SOFTNPU_RENDEZVOUS", folder)
        yield folder
