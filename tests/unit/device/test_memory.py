"""Memory whose device closes while views over it are alive."""

from __future__ import annotations

import pytest

from aiodatadist import Placement
from aiodatadist._device import Device
from aiodatadist.testing import soft_counters

BYTES = 3 << 20
COUNTERS = {Placement.DEVICE: "device_bytes", Placement.HOST: "pinned_bytes"}


@pytest.mark.parametrize("placement", COUNTERS)
async def test_memory_with_views_is_freed_when_the_last_view_dies(
    placement: Placement, caplog: pytest.LogCaptureFixture
) -> None:
    def held() -> int:
        return soft_counters()[COUNTERS[placement]]

    before = held()
    async with await Device.open(0) as device:
        memory = device.allocate(BYTES, placement)
        views = [memory.view(), memory.view()[7:]]
    assert "arrays over it are alive" in caplog.text
    assert held() - before == BYTES
    views.pop(0)
    views[0][:3] = b"abc"
    assert held() - before == BYTES
    views.clear()
    assert held() == before
