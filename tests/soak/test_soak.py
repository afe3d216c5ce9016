"""Front doors between real processes: a few seconds of each in every run, production size and all modes nightly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.soak.__main__ import run
from tests.soak.kit import DOORS, MODES, Settings

SMALL = Settings("", "", seconds=2, peers=4, processes=2, pool=64 << 20, layers=4, blocks=64)


@pytest.mark.parametrize("door", ["await", "blocking", "v1"])
def test_nothing_is_lost_in_a_moment(door: str) -> None:
    outcome = run(replace(SMALL, door=door, mode="load"))
    assert outcome.is_good, outcome
    assert outcome.transfers > SMALL.peers


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("door", DOORS)
def test_nothing_is_lost(door: str, mode: str, loop: str) -> None:
    outcome = run(Settings(door, mode, seconds=60, loop=loop))
    assert outcome.is_good, outcome
