"""Every interface between real processes for a minute of the night, of production size: nothing may be lost.

Each change has moments of them, in ``test_checks.py``.
"""

from __future__ import annotations

import json

import pytest

from tests.chaos.test_chaos import run
from tests.profiles import at_night

SECONDS = 60
WAYS: tuple[tuple[str, ...], ...] = ((), ("--layered",), ("--v1",), ("--context-cache",))


@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("loop", [at_night("asyncio"), at_night("uvloop")])
@pytest.mark.parametrize("load", ["idle", "full", "busy"])
@pytest.mark.parametrize("profile", ["calm", "calm-blocking", "calm-v1", "calm-redis"])
def test_nothing_is_lost(profile: str, load: str, loop: str) -> None:
    size = ("--clusters", "8", "--gib", "16", "--load", load, "--loop", loop)
    done = run("chaos", "--seconds", str(SECONDS), "--profile", profile, *size, "--json", "-")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (found,) = json.loads(done.stdout)["profiles"]
    assert found["moved_bytes"] > 0
    assert found["looks"] == 2


@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", [at_night(each) for each in WAYS])
def test_the_demo_works_again_and_again(way: tuple[str, ...]) -> None:
    for _ in range(5):
        done = run("demo", "--json", *way)
        assert done.returncode == 0, done.stderr
