"""A link that is made again at once, while the last one is still being ended."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LLMStatusCode
from aiodatadist._testing.views import cut_link
from aiodatadist.testing import (
    cluster_info,
    inside,
    linked_pair,
    open_cluster,
    soft_counters,
    soft_hold,
)
from tests.held import held_transfer

DESC = CacheDesc(1, [8, 4096], DataType.DT_UINT8)


async def test_linking_waits_for_the_end_of_a_link_whose_unlinking_was_cancelled() -> None:
    """Wait for a running pull: before its end the peer has not heard of the unlinking, and would refuse a second link."""
    async with linked_pair(DESC) as (prompt, decoder, _, cache):
        with held_transfer() as held:
            pull = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])
            await held.arrived()
            leaving = asyncio.create_task(decoder.datadist.unlink_clusters([cluster_info(prompt)], 2000))
            while decoder.datadist.statistics().links[0].state == "ready":
                await anyio.lowlevel.checkpoint()
            leaving.cancel()
            linking = asyncio.create_task(decoder.datadist.link_clusters([cluster_info(prompt)], 5000))
            await asyncio.sleep(0)
            held.release()
            _, (status,) = await linking
            await pull
        assert status is LLMStatusCode.LLM_SUCCESS
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


@pytest.mark.autojump
async def test_a_link_that_is_being_made_is_seen_until_nothing_is_left_of_it() -> None:
    """Its half of a channel waits in a call of HCCL's that cannot be interrupted, long after the client gave up."""
    comms = soft_counters()["comms"]
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        engines = [inside(each.datadist) for each in (prompt, decoder)]
        with soft_hold("HcclCommPrepare", nth=None) as prepare:
            linking = asyncio.create_task(decoder.datadist.link_clusters([cluster_info(prompt)], 300))
            with anyio.fail_after(20):
                while soft_counters()["comms"] < comms + 2:
                    await anyio.lowlevel.checkpoint()
            assert [dict(engine.links.states()) for engine in engines] == [{"opening": 1}, {"opening": 1}]
            await anyio.sleep(0.4)  # a later timer of the same loop: by then the client has given up
            prepare.release()
            with anyio.fail_after(20):
                for engine in engines:
                    await engine.links.wait_opened()
            assert soft_counters()["comms"] == comms
            assert [dict(each.datadist.figures().links) for each in (prompt, decoder)] == [{}, {}]
            assert (await linking)[0] is not LLMStatusCode.LLM_SUCCESS


async def test_memory_waits_for_a_link_that_another_one_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close the channel of a broken link late: the memory is bound to it, and the next link has already ended."""
    async with linked_pair(DESC) as (prompt, decoder, source, _):
        old = inside(prompt.datadist).links.find(2)
        close, may_close = old.session.channels.aclose, anyio.Event()

        async def close_late() -> None:
            await may_close.wait()
            await close()

        monkeypatch.setattr(old.session.channels, "aclose", close_late)
        with anyio.fail_after(20):
            await cut_link(old)
            await decoder.datadist.wait_link_closed(1)
            assert (await decoder.datadist.link_clusters([cluster_info(prompt)], 5000))[0] is LLMStatusCode.LLM_SUCCESS
            new = inside(prompt.datadist).links.find(2)
            assert new is not old
            assert (await decoder.datadist.unlink_clusters([cluster_info(prompt)], 5000))[
                0
            ] is LLMStatusCode.LLM_SUCCESS
            await new.wait_closed()
            async with anyio.create_task_group() as group:
                group.start_soon(prompt.datadist.cache_manager.unregister_cache, source.cache_id)
                await anyio.wait_all_tasks_blocked()
                assert sum(prompt.datadist.figures().links.values()) == 1
                may_close.set()
        assert dict(prompt.datadist.figures().links) == {}
