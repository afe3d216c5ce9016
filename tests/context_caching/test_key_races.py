"""Several processes race for the same keys of a pool: who loads one gets one whole version of it, or none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from aiodatadist._testing.servers import MIB
from tests import children
from tests.context_caching.engine_fixtures import mooncake_master
from tests.context_caching.servers import MooncakeMaster, RedisServer, need_redis, running
from tests.profiles import at_night

__all__ = ["mooncake_master"]

PROCESSES = 4
LENGTHS = pytest.mark.parametrize(("seconds", "seed"), [(0.6, 1), at_night(120, 2), at_night(120, 3)])


def race(url: str, seconds: float, seed: int) -> Counter[str]:
    """Count what happened in all processes together. Raises AssertionError if something did that must not."""
    module = "tests.context_caching.key_racer"
    racers = [
        children.Popen(
            [sys.executable, "-m", module, url, str(number), str(seconds), str(seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    said = [racer.communicate(timeout=seconds + 60) for racer in racers]
    found: Counter[str] = Counter()
    for racer, (told, errors) in zip(racers, said, strict=True):
        assert racer.returncode == 0, errors
        end = json.loads(told)
        assert end["wrong"] == [], f"seed {seed}"
        found.update(end["found"])
    return found


@LENGTHS
@pytest.mark.parametrize(
    "memory",
    [pytest.param(512 * MIB, id="with room", marks=pytest.mark.nightly), pytest.param(3 * MIB, id="evicting")],
)
def test_of_redis(seconds: float, seed: int, memory: int) -> None:
    need_redis()
    server = RedisServer(memory)
    with running(server):
        found = race(server.url, seconds, seed)
    assert min(found[what] for what in ("hits", "misses", "removed", "expired", "saved 1")) > 0, found


@LENGTHS
def test_of_mooncake(mooncake_master: MooncakeMaster, seconds: float, seed: int) -> None:
    found = race(mooncake_master.url, seconds, seed)
    assert min(found[what] for what in ("hits", "misses", "removed", "saved 1")) > 0, found
