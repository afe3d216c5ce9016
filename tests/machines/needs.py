"""Checks for machines: without them tests are skipped, with the reason, or fail if they are required."""

from __future__ import annotations

import os
import shutil
from functools import cache

import pytest

from tests.machines import networks

REQUIRED = "AIODATADIST_REQUIRE_MACHINES"
"""If this variable is 1, what cannot run fails."""


@cache
def why_not() -> str:
    """Return why there can be no machines here; empty if there can. Removes what killed processes left."""
    if shutil.which("ip") is None:
        return "network namespaces need ip: apt-get install iproute2"
    if os.geteuid():
        return "network namespaces need root"
    if not networks.TUN.exists():
        return f"network namespaces are there, but not {networks.TUN}"
    try:
        networks.remove(networks.leftovers())
        with networks.machines("trial"):
            return ""
    except (AssertionError, OSError) as error:
        return f"network namespaces cannot be made: {error}"


def missing_nft() -> str:
    """Return what is missing for address translation; empty if nothing is."""
    return "" if shutil.which("nft") else "nft is not installed: apt-get install nftables"


def need(reason: str) -> None:
    """Skip if there is a reason, or fail if the tests are required."""
    if reason and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED} is set, but {reason}")
    if reason:
        pytest.skip(reason)
