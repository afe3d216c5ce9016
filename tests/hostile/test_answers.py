"""Answers of a linked peer that cannot be true: they end its own link, or count for no more than they can be."""

from __future__ import annotations

from typing import Any

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, ProtocolError, TransferError
from aiodatadist._wire.messages import Pull, Pulled
from aiodatadist.testing import Cluster, inside, linked_pair

DESC = CacheDesc(4, [8, 1024], DataType.DT_UINT8)
ALL = 4 * 2 * 1024
"""The bytes that each request asks for."""


async def pull(decoder: Cluster, target: Any, *, slots: bool) -> None:
    manager = decoder.datadist.cache_manager
    if slots:
        await manager.pull_cache(CacheKey(1, 3), target, 2, 1024)
        await manager.pull_cache(CacheKey(1, 4), target, 5, 1024)
    else:
        await manager.pull_blocks(BlocksCacheKey(1), target, [1, 2], [3, 4])


def lie(prompt: Cluster, monkeypatch: pytest.MonkeyPatch, **figures: Any) -> None:
    """Let a cluster answer requests, and move nothing."""
    link = inside(prompt.datadist).links.find(2)

    def answer(message: Pull) -> None:
        for each in message.each():
            link.session.post(Pulled(call=each.call, status=0, reason="", **figures))

    monkeypatch.setattr(link.transfers.responder, "begin_each", answer)


@pytest.mark.parametrize("slots", [False, True], ids=["blocks", "slots"])
@pytest.mark.parametrize(
    "figures", [{"nbytes": ALL + 1}, {"nbytes": 2**64 - 1}, {"nbytes": 1, "ranges": 2}, {"ranges": 2**64 - 1}], ids=str
)
async def test_an_answer_reports_no_more_bytes_than_were_asked_for(
    figures: dict[str, int], slots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=False, slots=slots) as (prompt, decoder, _, target):
        link = inside(decoder.datadist).links.find(1)
        lie(prompt, monkeypatch, **figures)
        with pytest.raises(ProtocolError, match="the peer moved"):
            await pull(decoder, target, slots=slots)
        await link.wait_closed()
        flows = decoder.datadist.figures().transfers
        assert sum(flow.bytes + flow.ranges for flow in flows.values()) == 0


@pytest.mark.parametrize("slots", [False, True], ids=["blocks", "slots"])
@pytest.mark.parametrize(
    "figures", [{}, {"nbytes": ALL - 1, "ranges": 1}, {"stopped": True}, {"is_unknown": True}], ids=str
)
async def test_a_success_reports_no_fewer_bytes_than_were_asked_for(
    figures: dict[str, Any], slots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=False, slots=slots) as (prompt, decoder, _, target):
        link = inside(decoder.datadist).links.find(1)
        lie(prompt, monkeypatch, **figures)
        with pytest.raises(ProtocolError, match="the peer moved"):
            await pull(decoder, target, slots=slots)
        await link.wait_closed()


async def test_a_slot_that_fills_blocks_is_no_shorter_than_they_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of three blocks may hold a single byte."""
    async with linked_pair(DESC, enable_remote_cache_accessible=False) as (prompt, decoder, _, target):
        manager, least = decoder.datadist.cache_manager, 4 * (2 * 1024 + 1)
        lie(prompt, monkeypatch, nbytes=least, ranges=1)
        await manager.pull_blocks(CacheKey(1, 3), target, [], [1, 2, 3])
        lie(prompt, monkeypatch, nbytes=least - 1, ranges=1)
        with pytest.raises(ProtocolError, match=f"the peer moved {least - 1} bytes: it was asked for at least {least}"):
            await manager.pull_blocks(CacheKey(1, 3), target, [], [1, 2, 3])


async def test_all_bytes_that_were_asked_for_may_be_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=False) as (prompt, decoder, _, target):
        lie(prompt, monkeypatch, nbytes=ALL, ranges=ALL)
        await pull(decoder, target, slots=False)
        assert decoder.datadist.figures().transfers["pull_blocks"].bytes == ALL


async def test_an_answer_took_no_longer_than_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=False) as (prompt, decoder, _, target):
        lie(prompt, monkeypatch, nbytes=ALL, queue_seconds=1e308, transfer_seconds=1e308)
        for _ in range(2):
            await pull(decoder, target, slots=False)
        flow = decoder.datadist.figures().transfers["pull_blocks"]
        limit = inside(decoder.datadist).timeout
        assert flow.queue_seconds <= 2 * limit
        assert flow.seconds <= 2 * limit


async def test_a_pull_that_its_owner_stopped_unasked_has_the_owners_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error gives the peer's reason, because no time limit has passed."""
    async with linked_pair(DESC, enable_remote_cache_accessible=False) as (prompt, decoder, _, target):
        link = inside(prompt.datadist).links.find(2)

        def answer(message: Pull) -> None:
            said = Pulled(
                call=message.call, stopped=True, status=int(TransferError.default_status), reason="it was stopped here"
            )
            link.session.post(said)

        monkeypatch.setattr(link.transfers.responder, "begin_each", answer)
        with pytest.raises(TransferError, match="it was stopped here") as raised:
            await pull(decoder, target, slots=False)
        assert "not done within" not in str(raised.value)
