"""Notifications: in order, exactly once, and after what they speak of."""

from __future__ import annotations

import asyncio
from itertools import islice

import anyio
import pytest

from aiodatadist import BlocksCacheKey, CacheNotFound, LinkError, Notification, NotLinked, ParamInvalid
from aiodatadist.testing import Cluster, cluster_info, linked_pair
from tests.held import PUSH, held_transfer
from tests.test_pull import BLOCKS


async def take(cluster: Cluster, count: int) -> list[bytes]:
    """Return the payloads of the next notifications."""
    found: list[bytes] = []
    async with asyncio.timeout(20):
        async for note in cluster.datadist.notifications():
            found.append(note.payload)
            if len(found) == count:
                break
    return found


async def test_what_is_notified_is_visible() -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, source, target):
        push = prompt.datadist.cache_manager.push_blocks
        for i in range(20):
            prompt.memory(source).view()[0] = i
            await push(BlocksCacheKey(2), source, [0], [1], notify=b"%d" % i)
            assert await take(decoder, 1) == [b"%d" % i]
            assert decoder.memory(target).view()[BLOCKS.stride] == i


async def test_the_order_is_that_of_the_calls() -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, source, _):
        push = prompt.datadist.cache_manager.push_blocks
        with held_transfer(PUSH) as held:
            slow = push(BlocksCacheKey(2), source, [0], [1], notify=b"1")
            await held.arrived()
            failing = push(BlocksCacheKey(2, 77), source, [0], [1], notify=b"never")
            quick = push(BlocksCacheKey(2), source, [0], [2], notify=b"2")
            said = asyncio.create_task(prompt.datadist.notify(2, b"3"))
            held.release()
            await asyncio.gather(slow, quick, said)
            with pytest.raises(CacheNotFound):
                await failing
        assert await take(decoder, 3) == [b"1", b"2", b"3"]


async def test_the_owner_hears_that_its_blocks_were_pulled() -> None:
    for one_sided in (True, False):
        async with linked_pair(BLOCKS, enable_remote_cache_accessible=one_sided) as (prompt, decoder, _, cache):
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [1], notify=b"request 7")
            async for note in prompt.datadist.notifications():
                assert note == Notification(2, b"request 7")
                break


async def test_a_slow_taker_holds_its_own_peer_up_and_loses_nothing() -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, _, _):
        sent = 0

        async def send() -> None:
            nonlocal sent
            for i in range(200):
                await prompt.datadist.notify(2, b"%d" % i)
                sent += 1

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            await anyio.wait_all_tasks_blocked()
            assert sent <= 64
            assert await take(decoder, 200) == [b"%d" % i for i in range(200)]


async def test_several_takers_share_what_comes() -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, _, _):
        taken: list[bytes] = []

        async def taker() -> None:
            async for note in decoder.datadist.notifications():
                taken.append(note.payload)
                if len(taken) == 50:
                    return

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(taker)
            for i in range(50):
                await prompt.datadist.notify(2, b"%d" % i)
            while len(taken) < 50:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert sorted(taken) == sorted(b"%d" % i for i in range(50))


async def test_an_orderly_end_loses_none() -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, source, _):
        for i in islice(range(100), 60):
            await prompt.datadist.notify(2, b"%d" % i)
        prompt.datadist.cache_manager.push_blocks(BlocksCacheKey(2), source, [0], [1], notify=b"last")
        await prompt.datadist.unlink_clusters([cluster_info(decoder)])
        assert (await take(decoder, 61))[-1] == b"last"


async def test_iteration_ends_with_the_cluster_and_waiting_with_the_link() -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, _, _):
        notes = decoder.datadist.notifications()

        async def drain() -> None:
            async for _ in notes:
                pass

        async def fill() -> None:
            for _ in range(65):
                await prompt.datadist.notify(2, b"")

        filling = asyncio.create_task(fill())
        await anyio.wait_all_tasks_blocked()
        await decoder.datadist.finalize()
        with pytest.raises(LinkError):
            await filling
        async with asyncio.timeout(20):
            await drain()


async def test_wrong_payloads_and_peers_are_refused() -> None:
    async with linked_pair(BLOCKS) as (prompt, _, source, _):
        with pytest.raises(ParamInvalid, match="65537 bytes: the limit is 65536"):
            await prompt.datadist.notify(2, bytes(65537))
        with pytest.raises(TypeError):
            await prompt.datadist.notify(2, "text")  # type: ignore[arg-type]
        with pytest.raises(NotLinked):
            await prompt.datadist.notify(3, b"")
        with pytest.raises(TypeError):
            prompt.datadist.cache_manager.push_blocks(BlocksCacheKey(2), source, [0], [1], notify="x")  # type: ignore[arg-type]
        await prompt.datadist.notify(2, bytes(65536))
