"""A peer over TCP that asks for other bytes than those that were lent to it: the owner refuses, and goes on."""

from __future__ import annotations

from array import array
from typing import Literal

import pytest

from aiodatadist import TransferError
from aiodatadist._device import Device, Program
from aiodatadist._testing.contracts import End, TransportContract
from aiodatadist._transport import Access, Channel, Region, Transport, open_transport
from aiodatadist._values.grid import UINT64, Grid

HALF = 1 << 12
"""Bytes of each of two caches that are neighbours in memory."""

VERBS = {"get": "reading", "put": "writing"}


class Ends(TransportContract):
    """Two ends over TCP. Its suite runs elsewhere."""

    def transport(self, device: Device) -> Transport:
        return open_transport("tcp", device)


async def ask(channel: Channel, way: Literal["get", "put"], mine: End, address: int, nbytes: int) -> None:
    """Move one range by hand, whatever the peer's caches are."""
    index = array("Q", [0])
    sides = array("Q", [mine.memory.address]), array("Q", [address])
    program = Program()
    add = channel.add_get if way == "get" else channel.add_put
    add(program, Grid(*sides, index, index, nbytes, nbytes, nbytes, nbytes))
    await TransportContract.run(channel, program)


@pytest.mark.parametrize("way", ["get", "put"])
async def test_ranges_that_were_not_lent_are_refused_by_name(way: Literal["get", "put"]) -> None:
    async with Ends().channels(f"hostile-{way}") as (mine, theirs, channel, back):
        at = theirs.memory.address
        back.take_back([theirs.region], Access.ALL)
        caches = [Region(at + n * HALF, HALF, theirs.region.placement) for n in range(2)]
        back.lend(caches, Access.ALL)
        before = bytes(mine.memory.view()), bytes(theirs.memory.view())
        for address, nbytes in (
            (at - 1, 2),  # begins before
            (at + HALF - 1, 2),  # within both, and within neither
            (at, 2 * HALF),
            (at + 2 * HALF - 1, 2),  # ends behind
            (at + 2 * HALF, 1),
            (8, 8),
            (UINT64 - 16, 16),  # ends at the last address
            (UINT64 - 16, 32),  # wraps
            (UINT64 - 1, HALF),
        ):
            with pytest.raises(TransferError, match=rf"{nbytes} bytes at 0x{address:x} for {VERBS[way]}"):
                await ask(channel, way, mine, address, nbytes)
        assert (bytes(mine.memory.view()), bytes(theirs.memory.view())) == before
        for address, nbytes in ((at, HALF), (at + HALF, HALF), (at + 2 * HALF - 1, 1)):
            await ask(channel, way, mine, address, nbytes)
        assert (bytes(mine.memory.view()), bytes(theirs.memory.view())) != before
