"""The transfer and its destination call each other once for each thing that happens, and ask their progress for the rest."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from aiodatadist import CacheDesc, DataType
from aiodatadist._layered import destination, transfer
from tests.faults.test_layered_faults import Opened, ways
from tests.test_layered import OK, arrived, fan

LAYERS = 2
MOST = 14
"""Calls between a transfer and its only destination, for two layers that are watched."""


@contextmanager
def calls_between() -> Iterator[Counter[str]]:
    """Count the calls from one of the two files into the other. A coroutine counts once, however often it suspends."""
    files, calls, before = {transfer.__file__, destination.__file__}, Counter[str](), sys.getprofile()
    frames: set[FrameType] = set()  # kept, because a new frame could have the place of one that has ended

    def note(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event == "call" and caller is not None and frame not in frames:
            ends = {caller.f_code.co_filename, frame.f_code.co_filename}
            if ends == files:
                frames.add(frame)
                calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@ways
async def test_two_layers_take_few_calls_back_and_forth(way: str) -> None:
    desc = CacheDesc(2 * LAYERS, [16, 1024], DataType.DT_UINT8)
    async with fan(desc, desc) as made:
        opened = Opened(way, made.source, LAYERS)
        config = made.config(0, range(LAYERS))
        with calls_between() as calls:
            task = made.start(opened.synchronizer, [config], [1, 2, 9], [4, 5, 0])
            for layer in range(LAYERS):
                opened.open(layer)
            assert len(await arrived(task)) == LAYERS
            assert await task.synchronize() is OK
        await opened.aclose()
        assert calls["LayeredTransfer._news"], "nothing was counted"
        assert calls.total() <= MOST, calls
