"""Transfers that are cancelled while the device is in the middle of a copy: the end is reported when no byte can land."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheTask,
    DataType,
    LLMStatusCode,
    PeerLost,
    TransferTimeout,
)
from aiodatadist._concurrency.completion import TransferCompletion
from aiodatadist._concurrency.deadlines import Deadlines
from aiodatadist._link.transfers.pull_requests import PullRequest
from aiodatadist._wire.messages import Pulled
from aiodatadist.testing import Cluster, cluster_info, inside, linked_pair, soft_faults_cleared, soft_hold
from tests.strict.marks import STRICT

DESC = CacheDesc(2, [16, 1 << 18], DataType.DT_UINT8)  # 8 MiB: many pieces
BLOCKS = list(range(16))
Way = Literal["pull", "push", "request", "checked request"]
ways = pytest.mark.parametrize("way", ["pull", "push", "request", "checked request"])
"""The owner serves a request that is checked in a task."""
LETS_GO = "HcclCommDestroy" if STRICT == "roce" else "aclrtSynchronizeStreamWithTimeout"
"""What the library calls after an abort to know that no byte can land. Over RoCE an abort takes no request back."""


def start(way: Way, decoder: Cluster, cache: Cache, deadline: float | None = None) -> CacheTask:
    """Move all blocks between the two clusters' caches; cluster 2 is the caller."""
    manager, key = decoder.datadist.cache_manager, BlocksCacheKey(1)
    move = manager.push_blocks if way == "push" else manager.pull_blocks
    return move(key, cache, BLOCKS, BLOCKS, deadline=deadline, checksum=way == "checked request")


def deadline_that_strikes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that lets the time of the one transfer with a deadline be over."""
    transfers: list[tuple[TransferCompletion, float]] = []
    monkeypatch.setattr(Deadlines, "add", lambda _, transfer, seconds: transfers.append((transfer, seconds)))

    def strike() -> None:
        ((transfer, seconds),) = transfers
        transfer.late_after = seconds
        transfer.expire()

    return strike


def mover(way: Way) -> str:
    """Return the call that moves the bytes: in request/response mode the owner writes them."""
    return "HcclBatchGet" if way == "pull" else "HcclBatchPut"


async def is_under_way_at(event: Callable[[], Awaitable[None]], task: CacheTask) -> bool:
    """Wait for an event or the end of a transfer. Return True if the event came first."""
    ended = asyncio.Event()
    task.add_done_callback(lambda _: ended.set())
    async with anyio.create_task_group() as group:

        async def leave(waited: Callable[[], Awaitable[object]]) -> None:
            await waited()
            group.cancel_scope.cancel()

        group.start_soon(leave, event)
        group.start_soon(leave, ended.wait)
    return not task.done()


async def check_link(way: Way, prompt: Cluster, decoder: Cluster, source: Cache, cache: Cache) -> None:
    """Check that nothing lands any more and that the link works: one block arrives, and no other byte changes."""
    target, memory = (source, prompt.memory(source)) if way == "push" else (cache, decoder.memory(cache))
    memory.view()[:] = bytes(memory.nbytes)
    manager = decoder.datadist.cache_manager
    move = manager.push_blocks if way == "push" else manager.pull_blocks
    await move(BlocksCacheKey(1), cache, [3], [4])
    view, size = memory.view(), DESC.stride
    for address in target.tensor_addrs:
        at = address - memory.address
        assert any(view[at + 4 * size : at + 5 * size])
        assert not any(view[at : at + 4 * size])
        assert not any(view[at + 5 * size : at + 16 * size])


@ways
@pytest.mark.parametrize("why", ["cancelled", "late"])
async def test_end_of_a_stopped_transfer_is_reported_when_the_device_has_let_go(
    way: Way, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike = deadline_that_strikes(monkeypatch)
    async with linked_pair(DESC, enable_remote_cache_accessible="request" not in way) as (
        prompt,
        decoder,
        source,
        cache,
    ):
        with (
            soft_faults_cleared(),
            soft_hold(mover(way), at="half") as copy,
            soft_hold("aclrtStreamAbort") as abort,
        ):
            task = start(way, decoder, cache, deadline=3600 if why == "late" else None)
            await copy.arrived()
            if why == "cancelled":
                task.cancel()
            else:
                strike()
            await abort.arrived()
            with soft_hold(LETS_GO) as quiet:
                abort.release()
                assert await is_under_way_at(quiet.arrived, task), "reported while the device was copying"
                copy.release()
            if why == "cancelled":
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                with pytest.raises(TransferTimeout):
                    await task
                assert await task.get_results() == [LLMStatusCode.LLM_TIMEOUT]
        if STRICT != "roce":  # there the link is made again, which other tests look at
            await check_link(way, prompt, decoder, source, cache)


@ways
async def test_transfer_that_is_held_half_way_has_half_of_its_bytes(way: Way) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible="request" not in way) as (
        prompt,
        decoder,
        source,
        cache,
    ):
        target, memory = (source, prompt.memory(source)) if way == "push" else (cache, decoder.memory(cache))
        before = bytes(memory.view())
        with soft_hold(mover(way), at="half") as copy:
            task = start(way, decoder, cache)
            await copy.arrived()
            view = memory.view()
            first, last = (address - memory.address for address in (target.tensor_addrs[0], target.tensor_addrs[-1]))
            assert view[first : first + 1] != before[first : first + 1]
            end = last + target.cache_desc.size
            assert view[end - 64 : end] == before[end - 64 : end]
            copy.release()
            assert (await task).bytes == DESC.size * 2


async def test_cache_of_a_request_that_is_answered_when_its_link_breaks_is_not_lost() -> None:
    """Act on what was heard before the end. After an answer the peer writes no more."""
    async with linked_pair(DESC, enable_remote_cache_accessible=False) as (prompt, decoder, _, cache):
        manager, key = decoder.datadist.cache_manager, BlocksCacheKey(1)
        link = inside(decoder.datadist).links.any(1)
        with soft_faults_cleared(), soft_hold("HcclBatchPut", at="half") as copy:
            task = manager.pull_blocks(key, cache, BLOCKS, BLOCKS)
            await copy.arrived()
            (request,) = link.transfers.running.operations
            assert isinstance(request, PullRequest)
            question = request.question
            assert question is not None
            link.session.break_off(PeerLost("the connection is cut"))
            question.settle(Pulled(call=question.number, status=0, reason=""))
            copy.release()
            await task.get_results()
        await link.wait_closed()
        await manager.wait_usable(cache)
        status, _ = await decoder.datadist.link_clusters([cluster_info(prompt)], 10_000)
        assert status is LLMStatusCode.LLM_SUCCESS
        await manager.pull_blocks(key, cache, BLOCKS, BLOCKS)
