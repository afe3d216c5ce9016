"""A peer that takes back caches which its own requests here still use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiodatadist import CacheDesc, DataType, Placement
from aiodatadist.testing import inside, linked_pair
from aiodatadist.values.peer_budget import REQUEST_TASKS
from aiodatadist.wire.messages import CacheEntry, Grant, KeyName, Pull, Revoke, Stop
from tests.held import there_and_back, turns

DESC = CacheDesc(2, (8, 64), DataType.DT_UINT8, Placement.HOST)
MANY = 500


def grant(cache_id: int) -> Grant:
    """A cache that no channel reaches."""
    addresses = [2**40, 2**41]
    return Grant(
        cache=CacheEntry(
            cache_id=cache_id,
            blocks=True,
            placement=0,
            data_type=0,
            pieces=8,
            stride=64,
            addresses=addresses,
            epoch=2**31,
        )
    )


def pull(call: int, cache_id: int) -> Pull:
    return Pull(
        call=call, name=KeyName(kind="blocks", id=0, model_id=0), slot=0, target=cache_id, src_layers=None, dst_layers=None,
        tensors_per_layer=1, src_blocks=[0], dst_blocks=[0], dst_slot=0, nbytes=0, seconds=1000,
    )  # fmt: skip


@pytest.mark.parametrize("seconds", [1000.0, 0.001])
async def test_a_cache_that_is_taken_back_while_requests_use_it_needs_no_task(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, _):
        link, liars = (inside(each.datadist).links.current[0] for each in (prompt, decoder))
        given_back: list[int] = []
        nothing: Any = lambda _: None  # noqa: E731
        monkeypatch.setattr(liars.channels, "on_outdated", nothing)
        monkeypatch.setattr(liars.peer_leases, "on_revoked", lambda cache_id, _: given_back.append(cache_id))
        before = len(asyncio.all_tasks())
        caches = range(1, MANY + 1)
        for number in caches:
            for message in (
                grant(number),
                pull(number, number),
                Revoke(cache_id=number, seconds=seconds, number=number),
            ):
                liars.post(message)
            if not number % 50:
                await there_and_back(decoder, prompt)
        assert len(asyncio.all_tasks()) <= before + REQUEST_TASKS + 2
        await turns()
        assert given_back == [], "the requests still use them"
        for number in caches:
            liars.post(Stop(call=number))
        await there_and_back(decoder, prompt)
        await turns()
        await there_and_back(decoder, prompt)
        assert sorted(given_back) == list(caches)
        assert link.is_ready
        assert len(link.catalogue) == 0
