"""Two linked clusters: what is pulled is what was there, and nothing else changes."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheNotFound,
    DataType,
    LinkClosed,
    LLMClusterInfo,
    LLMException,
    LLMStatusCode,
    NotLinked,
    ParamInvalid,
    Placement,
    TransferTimeout,
)
from aiodatadist._link.transfers.responder import Responder
from aiodatadist.testing import cluster_info, inside, linked_pair, open_cluster, soft_fault, soft_faults_cleared, verify
from tests.stopwatch import lasting
from tests.strict.marks import STRICT, any_memory, told_of_failures

BLOCKS = CacheDesc(8, [16, 8, 2, 4], DataType.DT_FLOAT16)
SLOTS = CacheDesc(4, [4, 1000], DataType.DT_UINT8)
transports = pytest.mark.parametrize("transport", ["auto", "hccl", "loopback", "tcp"])


def moved(desc: CacheDesc, pairs: dict[int, int]) -> list[tuple[int, int, int, int]]:
    """Return each destination piece with its origin, which is cluster 1 or the destination itself."""
    return [
        (tensor, piece, 1 if piece in pairs else 2, pairs.get(piece, piece))
        for tensor in range(desc.num_tensors)
        for piece in range(desc.shape[0])
    ]


@transports
async def test_blocks_arrive_where_they_should_and_nothing_else_changes(transport: str) -> None:
    async with linked_pair(BLOCKS, transport=transport) as (prompt, decoder, source, cache):
        report = await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3, 4, 9], [0, 1, 7])
        verify(decoder.memory(cache), cache, moved(BLOCKS, {0: 3, 1: 4, 7: 9}))
        verify(prompt.memory(source), source, [(t, p, 1, p) for t in range(8) for p in range(16)])
        assert report.bytes == 3 * 8 * BLOCKS.stride
        assert report.ranges == 2 * 8


async def test_block_keys_are_never_consumed() -> None:
    async with linked_pair(BLOCKS) as (_, decoder, _, cache):
        for target in (0, 5):
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [2], [target])
        verify(decoder.memory(cache), cache, moved(BLOCKS, {0: 2, 5: 2}))


async def test_both_ends_can_pull() -> None:
    async with linked_pair(BLOCKS) as (prompt, _, source, _):
        await prompt.datadist.cache_manager.pull_blocks(BlocksCacheKey(2), source, [1], [2])
        verify(prompt.memory(source), source, [(t, 2, 2, 1) for t in range(8)], owner=1)


async def test_a_layer_range_moves_its_tensors_only() -> None:
    async with linked_pair(BLOCKS) as (_, decoder, _, cache):
        await decoder.datadist.cache_manager.pull_blocks(
            BlocksCacheKey(1), cache, [3], [0], src_layer_range=range(1, 3), dst_layer_range=range(1, 3)
        )
        pulled = {(t, 0) for t in range(2, 6)}
        verify(
            decoder.memory(cache),
            cache,
            [(t, p, *((1, 3) if (t, p) in pulled else (2, p))) for t in range(8) for p in range(16)],
        )


@transports
async def test_a_slot_is_pulled_by_its_key_and_by_its_index(transport: str) -> None:
    async with linked_pair(SLOTS, slots=True, transport=transport) as (_, decoder, source, cache):
        manager = decoder.datadist.cache_manager
        await manager.pull_cache(CacheKey(1, 2), cache, 0)
        await manager.pull_cache(CacheKeyByIdAndIndex(1, source.cache_id, 3), cache, 1)
        verify(decoder.memory(cache), cache, moved(SLOTS, {0: 2, 1: 3}))


async def test_a_size_moves_the_beginning_of_a_slot() -> None:
    async with linked_pair(SLOTS, slots=True) as (_, decoder, _, cache):
        before = bytes(decoder.memory(cache).view())
        report = await decoder.datadist.cache_manager.pull_cache(CacheKey(1, 0), cache, 0, 100)
        after = bytes(decoder.memory(cache).view())
        assert report.bytes == 400
        assert after[100:1000] == before[100:1000]
        assert after[:100] != before[:100]


@any_memory
async def test_a_contiguous_slot_is_cut_into_blocks() -> None:
    contiguous = CacheDesc(2, [3, 2500], DataType.DT_UINT8)
    blocks = CacheDesc(2, [8, 1024], DataType.DT_UINT8)
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        source = await prompt.contiguous(contiguous, [CacheKey(1, i) for i in range(3)])
        target = await decoder.blocks(blocks)
        await decoder.datadist.link_clusters([cluster_info(prompt)])
        manager = decoder.datadist.cache_manager
        before = bytes(decoder.memory(target).view())
        await manager.pull_blocks(CacheKey(1, 1), target, [], [6, 0, 3])
        slot = prompt.memory(source).view()
        after = decoder.memory(target).view()
        for tensor in range(2):
            want = bytes(slot[tensor * 7500 + 2500 : tensor * 7500 + 5000])
            at = tensor * 8192
            assert after[at + 6 * 1024 : at + 7 * 1024] == want[:1024]
            assert after[at : at + 1024] == want[1024:2048]
            assert after[at + 3 * 1024 : at + 3 * 1024 + 452] == want[2048:]
            assert after[at + 3 * 1024 + 452 : at + 4 * 1024] == before[at + 3 * 1024 + 452 : at + 4 * 1024]
        for wrong in ([6, 0], [6, 0, 3, 4]):
            with pytest.raises(ParamInvalid, match="exactly 3 blocks"):
                await manager.pull_blocks(CacheKey(1, 1), target, [], wrong)


@any_memory
async def test_host_memory_and_borrowed_memory_travel_too() -> None:
    desc = CacheDesc(2, [4, 64], DataType.DT_UINT8, Placement.HOST)
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        source = await prompt.blocks(desc)
        borrowed = bytearray(desc.size * 2)
        address = ctypes.addressof(ctypes.c_char.from_buffer(borrowed))
        device_desc = CacheDesc(2, [4, 64], DataType.DT_UINT8)
        cache = await decoder.datadist.cache_manager.register_blocks_cache(device_desc, [address, address + desc.size])
        await decoder.datadist.link_clusters([cluster_info(prompt)])
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [1])
        assert borrowed[64:128] == prompt.memory(source).view()[192:256]
        assert borrowed[:64] == bytes(64)


async def test_wrong_names_and_numbers_are_refused_before_anything_starts() -> None:
    async with linked_pair(BLOCKS) as (_, decoder, _, cache):
        pull = decoder.datadist.cache_manager.pull_blocks
        key = BlocksCacheKey(1)
        with pytest.raises(CacheNotFound, match="offers no cache"):
            await pull(BlocksCacheKey(1, 5), cache, [0], [0])
        with pytest.raises(NotLinked, match="cluster 3 is not linked"):
            await pull(BlocksCacheKey(3), cache, [0], [0])
        with pytest.raises(ParamInvalid, match="names this cluster itself"):
            await pull(BlocksCacheKey(2), cache, [0], [0])
        with pytest.raises(
            ParamInvalid, match="src_blocks has 2 entries, dst_blocks has 1: they must have the same length"
        ):
            await pull(key, cache, [3, 4], [0])
        with pytest.raises(ParamInvalid, match=r"src_blocks\[1\] is 16: the source cache has 16 blocks"):
            await pull(key, cache, [3, 16], [0, 1])
        with pytest.raises(ValueError, match="-1"):
            await pull(key, cache, [-1], [0])
        with pytest.raises(TypeError):
            await pull(key, cache, ["0"], [0])  # type: ignore[list-item]
        with pytest.raises(TypeError):
            await pull(key, cache, [0], [0], layer=3)  # type: ignore[call-arg]
        with pytest.raises(ParamInvalid, match="dst_blocks is empty"):
            await pull(key, cache, [0])
        verify(decoder.memory(cache), cache, moved(BLOCKS, {}))
        await pull(key, cache, [0], [0])


async def test_a_task_can_be_kept_and_asked() -> None:
    async with linked_pair(BLOCKS) as (_, decoder, _, cache):
        task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
        assert await task.synchronize() is LLMStatusCode.LLM_SUCCESS
        assert await task.get_results(100) == [LLMStatusCode.LLM_SUCCESS]
        assert task.done()
        assert task.exception() is None
        assert not task.cancel()
        assert (await task).bytes == task.result().bytes == 8 * BLOCKS.stride


@told_of_failures
async def test_a_failed_transfer_says_why_and_leaves_the_link_usable() -> None:
    async with linked_pair(BLOCKS) as (_, decoder, _, cache):
        pull = decoder.datadist.cache_manager.pull_blocks
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:exec=507053")
            with pytest.raises(LLMException) as caught:
                await pull(BlocksCacheKey(1), cache, [0], [1])
        assert caught.value.status_code is LLMStatusCode.LLM_DEVICE_MEM_ERROR
        assert caught.value.peer == 1
        await pull(BlocksCacheKey(1), cache, [0], [1])
        verify(decoder.memory(cache), cache, moved(BLOCKS, {1: 0}))


async def test_a_transfer_that_hangs_ends_with_its_time_limit() -> None:
    limit = (
        1000 if STRICT == "roce" else 200
    )  # over RoCE what hangs costs a channel, and the next pull waits for another
    async with linked_pair(BLOCKS, sync_kv_timeout=limit) as (_, decoder, _, cache):
        pull = decoder.datadist.cache_manager.pull_blocks
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            with lasting(4, at_least=0.15), pytest.raises(LLMException) as caught:
                await pull(BlocksCacheKey(1), cache, [0], [1])
        assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
        assert isinstance(caught.value, TimeoutError)
        await pull(BlocksCacheKey(1), cache, [0], [1])


async def test_cancelling_the_waiter_stops_the_transfer_before_it_is_told() -> None:
    async with linked_pair(BLOCKS, sync_kv_timeout=60_000) as (_, decoder, _, cache):
        pull = decoder.datadist.cache_manager.pull_blocks
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            task = pull(BlocksCacheKey(1), cache, [0], [1])

            async def wait() -> None:
                await task

            waiter = asyncio.ensure_future(wait())
            await asyncio.sleep(0)
            assert not task.done()
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            assert task.cancelled()
            before = bytes(decoder.memory(cache).view())
        await pull(BlocksCacheKey(1), cache, [9], [2])
        after = bytes(decoder.memory(cache).view())
        assert after[: 2 * BLOCKS.stride] == before[: 2 * BLOCKS.stride]


async def test_link_statuses() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        link, info = decoder.datadist.link_clusters, cluster_info(prompt)
        assert await link([]) == (LLMStatusCode.LLM_PARAM_INVALID, [])
        with pytest.raises(ParamInvalid):
            await link([info], timeout=0)
        with pytest.raises(TypeError):
            await link([info], timeout="1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="int32"):
            await link([info], timeout=2**31)
        stranger = LLMClusterInfo(7)
        stranger.append_remote_ip_info(*(prompt.datadist.listen_address or ("", 0)))
        assert (await link([stranger]))[1] == [LLMStatusCode.LLM_PARAM_INVALID]
        absent = LLMClusterInfo(8)
        absent.append_remote_ip_info("127.0.0.1", 1)
        overall, each = await link([info, absent])
        assert overall is LLMStatusCode.LLM_LINK_FAILED
        assert each == [LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_LINK_FAILED]
        assert (await link([info]))[0] is LLMStatusCode.LLM_ALREADY_LINK
        with pytest.raises(NotLinked, match=r"the last attempt failed: .* can be reached at 127\.0\.0\.1:1"):
            decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(8), await decoder.blocks(BLOCKS), [0], [0])


async def test_unlink_and_link_again() -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, _, cache):
        manager, info = decoder.datadist.cache_manager, cluster_info(prompt)
        assert (await decoder.datadist.unlink_clusters([info]))[0] is LLMStatusCode.LLM_SUCCESS
        with pytest.raises(NotLinked):
            await manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        assert (await decoder.datadist.unlink_clusters([info]))[0] is LLMStatusCode.LLM_SUCCESS
        assert (await decoder.datadist.link_clusters([info]))[0] is LLMStatusCode.LLM_SUCCESS
        await manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        verify(decoder.memory(cache), cache, moved(BLOCKS, {0: 0}))


async def test_a_published_cache_is_not_given_up_while_it_is_linked() -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        with pytest.raises(LLMException) as caught:
            await manager.unregister_cache(cache.cache_id)
        assert caught.value.status_code is LLMStatusCode.LLM_EXIST_LINK
        await decoder.datadist.unlink_clusters([cluster_info(prompt)])
        await manager.unregister_cache(cache.cache_id)
        await manager.unregister_cache(cache.cache_id)


async def test_the_port_in_use_is_named() -> None:
    async with open_cluster(1) as first:
        host, port = first.datadist.listen_address or ("", 0)
        with pytest.raises(LLMException, match=f"{host}:{port} is in use"):
            async with open_cluster(2, listen_ip_info=f"{host}:{port}"):
                pass


async def test_a_key_is_proved_by_both_ends(no_leaks: None) -> None:
    async with (
        open_cluster(1, auth_key=b"secret") as prompt,
        open_cluster(2, device_id=1, auth_key=b"secret") as friend,
        open_cluster(3, device_id=2, auth_key=b"guess") as foe,
        open_cluster(4, device_id=3) as stranger,
    ):
        info = cluster_info(prompt)
        assert (await friend.datadist.link_clusters([info]))[0] is LLMStatusCode.LLM_SUCCESS
        for other in (foe, stranger):
            assert (await other.datadist.link_clusters([info]))[0] is LLMStatusCode.LLM_LINK_FAILED


async def test_listening_on_a_network_needs_a_key() -> None:
    with pytest.raises(ParamInvalid, match="needs auth_key"):
        async with open_cluster(1, listen_ip_info="0.0.0.0:0"):
            pass


async def test_the_first_pull_by_a_key_takes_no_task_at_either_end() -> None:
    """Each would cost more than the question: the answer is given, and acted on, in the call that brings it."""
    desc, made = CacheDesc(2, [4, 1024], DataType.DT_UINT8), list[str]()
    async with linked_pair(desc, slots=True) as (_, decoder, _, target):
        pull = decoder.datadist.cache_manager.pull_cache
        await pull(CacheKey(1, 0), target, 0)
        loop = asyncio.get_running_loop()

        def counted(loop: asyncio.AbstractEventLoop, coro: Any, **words: Any) -> asyncio.Task[Any]:
            made.append(repr(coro))
            return asyncio.Task(coro, loop=loop, **words)

        loop.set_task_factory(counted)
        try:
            await pull(CacheKey(1, 2), target, 1)
        finally:
            loop.set_task_factory(None)
        verify(decoder.memory(target), target, moved(desc, {0: 0, 1: 2}))
    assert made == []


@pytest.mark.parametrize("how", ["cancel", "deadline", "timeout", "unlink"])
async def test_a_pull_whose_question_is_not_answered_ends(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Responder, "find", lambda *_: None)
    desc = CacheDesc(2, [4, 1024], DataType.DT_UINT8)
    async with linked_pair(desc, slots=True, sync_kv_timeout=100 if how == "timeout" else 10_000) as (
        prompt,
        decoder,
        _,
        target,
    ):
        manager = decoder.datadist.cache_manager
        entry = inside(decoder.datadist).registry.table.find(target.cache_id)
        link = inside(decoder.datadist).links.find(1)
        task = manager.pull_cache(CacheKey(1, 0), target, 0, deadline=0.05 if how == "deadline" else None)
        assert entry is not None
        assert (entry.leases, len(link.session.questions)) == (1, 1)
        if how == "cancel":
            assert task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "unlink":
            async with asyncio.TaskGroup() as group:
                group.create_task(decoder.datadist.unlink_clusters([cluster_info(prompt)], 200))
                with pytest.raises(LinkClosed):
                    await task
        else:
            words = "say where its cache is within 0.1 s" if how == "timeout" else "deadline"
            with pytest.raises(TransferTimeout, match=words):
                await task
        assert (entry.leases, len(link.session.questions)) == (0, 0)
