"""Each status that a v2 program can meet, how it meets it, and what it is told: the value, the limit, what to do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio.lowlevel
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheManager,
    CacheNotFound,
    DataType,
    FeatureNotEnabled,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    NotLinked,
    OutOfMemory,
    ParamInvalid,
    PeerLost,
    Placement,
    TransferError,
    TransferTimeout,
)
from aiodatadist._testing.views import cut_link
from aiodatadist.testing import cluster_info, inside, linked_pair, open_cluster, soft_fault, soft_faults_cleared
from tests.stopwatch import lasting
from tests.strict.marks import told_of_failures

DESC = CacheDesc(2, [4, 64], DataType.DT_UINT8)
POOL = '{"memory_size": 1048576}'
both_modes = pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "request-response"])

NEVER_IN_V2 = {
    "LLM_WAIT_PROCESS_TIMEOUT": 1343270913,
    "LLM_REPEAT_REQUEST": 1343270915,
    "LLM_REQUEST_ALREADY_COMPLETED": 1343270916,
    "LLM_NOTIFY_PROMPT_UNLINK_FAILED": 1343270923,
    "LLM_CLUSTER_NUM_EXCEED_LIMIT": 1343270924,
    "LLM_DEVICE_OUT_OF_MEMORY": 1343270926,
    "LLM_PREFIX_ALREADY_EXIST": 1343270927,
    "LLM_PREFIX_NOT_EXIST": 1343270928,
    "LLM_SEQ_LENOVERLIMIT": 1343270929,
    "LLM_NO_FREE_BLOCK": 1343270930,
    "LLM_BLOCKS_OUT_OF_MEMORY": 1343270931,
    "LLM_LINK_BUSY": 1343270939,
    "LLM_UNKNOWN_ERROR": -1,
}
"""Of the first interface's, or reserved."""

MET = {
    "LLM_SUCCESS",
    "LLM_FAILED",
    "LLM_KV_CACHE_NOT_EXIST",
    "LLM_PARAM_INVALID",
    "LLM_ENGINE_FINALIZED",
    "LLM_NOT_YET_LINK",
    "LLM_ALREADY_LINK",
    "LLM_LINK_FAILED",
    "LLM_UNLINK_FAILED",
    "LLM_PROCESSING_LINK",
    "LLM_EXIST_LINK",
    "LLM_FEATURE_NOT_ENABLED",
    "LLM_TIMEOUT",
    "LLM_OUT_OF_MEMORY",
    "LLM_DEVICE_MEM_ERROR",
    "LLM_SUSPECT_REMOTE_ERROR",
}
"""Each has a test below that is named after it."""


async def refused(
    call: Callable[[], Awaitable[object]], status: LLMStatusCode, words: str, kind: type[LLMException] = LLMException
) -> LLMException:
    """Check that the call raises this status, with a message that matches ``words``."""
    with pytest.raises(kind) as caught:
        await call()
    text = str(caught.value)
    assert caught.value.status_code is status, text
    assert re.search(words, text), text
    assert f"[{status.name}]" in text
    return caught.value


def absent(cluster_id: int = 8) -> LLMClusterInfo:
    info = LLMClusterInfo(cluster_id)
    info.append_remote_ip_info("127.0.0.1", 1)
    return info


def pull(manager: CacheManager, cache: Cache, peer: int = 1) -> Callable[[], Awaitable[object]]:
    return lambda: manager.pull_blocks(BlocksCacheKey(peer), cache, [0], [1])


def test_each_status_is_either_met_here_or_never_in_v2() -> None:
    assert {*MET, *NEVER_IN_V2} == {status.name for status in LLMStatusCode}
    tested = " ".join(name for name in globals() if name.startswith("test_"))
    assert [name for name in MET if name.lower() not in tested] == []


@pytest.mark.parametrize("name", NEVER_IN_V2)
def test_what_v2_never_says_has_its_number_all_the_same(name: str) -> None:
    assert LLMStatusCode[name] == NEVER_IN_V2[name]
    assert LLMStatusCode.of(NEVER_IN_V2[name]) is LLMStatusCode[name]


# ---- data ----


async def test_llm_success_is_what_a_transfer_that_arrived_and_a_link_that_was_made_say() -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, cache):
        task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
        assert await task.get_results() == [LLMStatusCode.LLM_SUCCESS]
        ended = await decoder.datadist.unlink_clusters([cluster_info(prompt)])
        assert ended == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])


@both_modes
async def test_llm_kv_cache_not_exist_names_the_key_that_the_peer_has_not(one_sided: bool) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        words = r"BlocksCacheKey\(cluster_id=1, model_id=5\).*; has it been made there"
        error = await refused(
            lambda: manager.pull_blocks(BlocksCacheKey(1, 5), cache, [0], [1]),
            LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            words,
            CacheNotFound,
        )
        assert error.retryable
        assert error.peer == 1
        await pull(manager, cache)()


async def test_llm_kv_cache_not_exist_names_the_cache_that_we_have_not() -> None:
    async with open_cluster(1, mem_pool_cfg=POOL) as cluster:
        manager = cluster.datadist.cache_manager
        cache = await manager.allocate_blocks_cache(DESC)
        await manager.deallocate_blocks_cache(cache)
        await refused(
            lambda: manager.copy_blocks(cache, {0: [1]}),
            LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            rf"cache {cache.cache_id} is unknown here",
        )


async def test_llm_param_invalid_names_the_value_and_the_limit() -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        await refused(
            lambda: manager.pull_blocks(BlocksCacheKey(1), cache, [3, 4], [0, 1]),
            LLMStatusCode.LLM_PARAM_INVALID,
            r"src_blocks\[1\] is 4: the source cache has 4 blocks",
            ParamInvalid,
        )


AT_LEAST = r"\b(0\.[2-9]\d*|[1-9]\d*(\.\d+)?) s"
"""What a transfer says that had 0.2 s: a machine may be late, and no transfer is early."""


@both_modes
async def test_llm_timeout_says_after_how_long(one_sided: bool) -> None:
    options: dict[str, Any] = {"sync_kv_timeout": 200, "enable_remote_cache_accessible": one_sided}
    async with linked_pair(DESC, **options) as (_, decoder, _, cache):
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang" if one_sided else "HcclBatchPut:hang")
            error = await refused(
                pull(decoder.datadist.cache_manager, cache), LLMStatusCode.LLM_TIMEOUT, AT_LEAST, TransferTimeout
            )
        assert error.retryable
        assert error.peer == 1


@both_modes
@told_of_failures
async def test_llm_device_mem_error_carries_the_devices_own_number(one_sided: bool) -> None:
    async with linked_pair(DESC, enable_remote_cache_accessible=one_sided) as (_, decoder, _, cache):
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:exec=507053" if one_sided else "HcclBatchPut:exec=507053")
            await refused(
                pull(decoder.datadist.cache_manager, cache),
                LLMStatusCode.LLM_DEVICE_MEM_ERROR,
                r"step 1 of the transfer, .*returned 507053|step 1 of the transfer returned 507053",
                TransferError,
            )


async def test_llm_suspect_remote_error_is_what_the_device_says_of_a_copy() -> None:
    async with open_cluster(1) as cluster:
        cache = await cluster.blocks(DESC)
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:exec=507057")
            await refused(
                lambda: cluster.datadist.cache_manager.copy_blocks(cache, {0: [1]}),
                LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR,
                r"step 1 of the transfer, .*returned 507057|step 1 of the transfer returned 507057",
                TransferError,
            )


@told_of_failures
async def test_llm_suspect_remote_error_on_a_link_costs_the_link_whose_failure_holds_the_number() -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:exec=507057")
            with pytest.raises(PeerLost, match=r"cluster 1: the peer's process is gone.*507057"):
                await pull(manager, cache)()
        with pytest.raises((PeerLost, NotLinked)) as caught:
            await pull(manager, cache)()
        assert re.search(r"link again|link_clusters\(\) first", str(caught.value))
        with suppress(NotLinked):
            await decoder.datadist.wait_link_closed(1)
        assert (await decoder.datadist.link_clusters([cluster_info(prompt)]))[0] is LLMStatusCode.LLM_SUCCESS
        await pull(manager, cache)()


# ---- links ----


async def test_llm_not_yet_link_says_what_to_do_and_why_the_last_attempt_failed() -> None:
    async with open_cluster(2) as cluster:
        cache, manager = await cluster.blocks(DESC), cluster.datadist.cache_manager
        status = LLMStatusCode.LLM_NOT_YET_LINK
        await refused(
            pull(manager, cache, 8), status, r"cluster 8 is not linked .*; link_clusters\(\) first", NotLinked
        )
        await cluster.datadist.link_clusters([absent()])
        await refused(
            pull(manager, cache, 8),
            status,
            r"cluster 8 .*; the last attempt failed: .* can be reached at 127\.0\.0\.1:1",
        )


async def test_llm_not_yet_link_names_the_communicator_that_there_is_not() -> None:
    async with open_cluster(2) as cluster:

        async def query() -> object:
            return cluster.datadist.query_register_mem_status(5)

        for call in (query, lambda: cluster.datadist.unlink(5)):
            await refused(
                call, LLMStatusCode.LLM_NOT_YET_LINK, r"no communicator 5 .*; link\(\) returns the number", NotLinked
            )


async def test_llm_already_link_is_the_second_attempts_status(caplog: pytest.LogCaptureFixture) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, cache):
        status = LLMStatusCode.LLM_ALREADY_LINK
        assert await decoder.datadist.link_clusters([cluster_info(prompt)]) == (status, [status])
        assert await prompt.datadist.link_clusters([cluster_info(decoder)]) == (status, [status])
        hint = "use that link, or unlink_clusters() first"
        assert f"cluster 2: cluster 1 is linked already [LLM_ALREADY_LINK]; {hint}" in caplog.messages
        await pull(decoder.datadist.cache_manager, cache)()


async def test_llm_processing_link_is_the_status_of_an_attempt_during_another(caplog: pytest.LogCaptureFixture) -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        both = await asyncio.gather(*(decoder.datadist.link_clusters([cluster_info(prompt)]) for _ in range(2)))
        assert sorted(status.name for status, _ in both) == ["LLM_PROCESSING_LINK", "LLM_SUCCESS"]
        said = "cluster 2: a link to cluster 1 is being made [LLM_PROCESSING_LINK]; await wait_linked()"
        assert said in caplog.messages


async def test_a_peer_without_one_address_is_a_status_and_the_others_are_linked() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        nowhere, two = LLMClusterInfo(7), cluster_info(prompt)
        two.append_remote_ip_info("127.0.0.1", 1)
        param_invalid = LLMStatusCode.LLM_PARAM_INVALID
        found = await decoder.datadist.link_clusters([nowhere, two, cluster_info(prompt)])
        assert found == (param_invalid, [param_invalid, param_invalid, LLMStatusCode.LLM_SUCCESS])


async def test_llm_link_failed_names_the_address_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with open_cluster(2) as cluster:
        status = LLMStatusCode.LLM_LINK_FAILED
        assert await cluster.datadist.link_clusters([absent(8), absent(9)]) == (status, [status, status])
        assert any(" can be reached at 127.0.0.1:1" in line and status.name in line for line in caplog.messages)


async def test_llm_timeout_is_the_status_of_a_peer_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.append(writer)

    silent: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with open_cluster(2) as cluster:
        info = LLMClusterInfo(8)
        info.append_remote_ip_info("127.0.0.1", port)
        status = LLMStatusCode.LLM_TIMEOUT
        with lasting(2, at_least=0.15):
            assert await cluster.datadist.link_clusters([info], timeout=200) == (status, [status])
        why = f"was not linked within 0.2 s: 127.0.0.1:{port} accepted the connection, but did not link"
        assert f"cluster 2: cluster 8 at 127.0.0.1:{port} {why} [LLM_TIMEOUT]" in caplog.messages
    for writer in silent:
        writer.close()
    server.close()
    await server.wait_closed()


async def test_llm_unlink_failed_is_the_status_when_the_peer_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    async with linked_pair(DESC) as (prompt, decoder, _, cache):
        leaving = asyncio.create_task(decoder.datadist.unlink_clusters([cluster_info(prompt)]))
        while decoder.datadist.statistics().links[0].state == "ready":
            await anyio.lowlevel.checkpoint()
        await cut_link(inside(prompt.datadist).links.find(2))
        status, each = await leaving
        assert (status, each) == (LLMStatusCode.LLM_UNLINK_FAILED, [LLMStatusCode.LLM_UNLINK_FAILED])
        assert "cluster 2: cluster 1 went away without a word [LLM_UNLINK_FAILED]" in caplog.messages
        with pytest.raises(NotLinked):
            await pull(decoder.datadist.cache_manager, cache)()


async def test_llm_exist_link_says_to_unlink_first() -> None:
    async with linked_pair(DESC) as (_, decoder, _, cache):
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "cluster 2 has links": lambda: decoder.datadist.switch_role(LLMRole.MIX),
            f"cache {cache.cache_id} can be reached": lambda: decoder.datadist.cache_manager.unregister_cache(
                cache.cache_id
            ),
        }
        for what, call in calls.items():
            await refused(call, LLMStatusCode.LLM_EXIST_LINK, rf"{what}.*; unlink_clusters\(\) first")


# ---- memory, options, life ----


async def test_llm_out_of_memory_names_what_is_free_and_what_is_pinned() -> None:
    async with open_cluster(1, mem_pool_cfg=POOL) as cluster:
        manager = cluster.datadist.cache_manager
        cache = await manager.allocate_cache(CacheDesc(1, [1, 65537], DataType.DT_UINT8))
        error = await refused(
            lambda: manager.allocate_cache(CacheDesc(2, [1, 500_000], DataType.DT_UINT8)),
            LLMStatusCode.LLM_OUT_OF_MEMORY,
            r"device pool: 2 x 500000 bytes do not fit: 917504 of 1048576 .* largest .* 917504, 0 are pinned.*; deallocate",
            OutOfMemory,
        )
        assert error.retryable
        assert isinstance(error, MemoryError)
        assert manager.pool_usage()[Placement.DEVICE].free == 1048576 - 2 * 65536
        await manager.deallocate_cache(cache)


async def test_llm_out_of_memory_is_a_pool_larger_than_the_device() -> None:
    async def start() -> None:
        async with open_cluster(1, mem_pool_cfg=f'{{"memory_size": {1 << 40}}}'):
            pass

    await refused(start, LLMStatusCode.LLM_OUT_OF_MEMORY, rf"init: the device pool: .*{1 << 40} bytes", OutOfMemory)


async def test_llm_feature_not_enabled_names_the_option_that_is_off() -> None:
    status = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    async with linked_pair(DESC, enable_remote_cache_accessible=False) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager

        async def remap() -> None:
            manager.remap_registered_memory(MemInfo(Memtype.MEM_TYPE_DEVICE, cache.tensor_addrs[0], 64))

        calls: dict[str, Callable[[], Awaitable[object]]] = {
            r"no memory pool .*; set LLMConfig\.mem_pool_cfg": lambda: manager.allocate_cache(DESC),
            r"no memory pool .*; set LLMConfig": lambda: manager.deallocate_blocks_cache(cache),
            r"no memory pool.*; set LLMConfig": lambda: manager.remove_cache_key(CacheKey(2, 1)),
            r"needs the one-sided mode .*; set enable_remote_cache_accessible=True at both ends": lambda: (
                manager.push_blocks(BlocksCacheKey(1), cache, [0], [1])
            ),
            r"remap_registered_memory is not available .*; restart": remap,
        }
        for words, call in calls.items():
            await refused(call, status, words, FeatureNotEnabled)


async def test_llm_engine_finalized_ends_the_wait_for_a_link() -> None:
    async with open_cluster(1) as cluster:
        waiter = asyncio.ensure_future(cluster.datadist.wait_linked(7))
        await asyncio.sleep(0)
        await cluster.datadist.finalize()
        await refused(lambda: waiter, LLMStatusCode.LLM_ENGINE_FINALIZED, r"cluster 1 is finalized")


async def test_llm_engine_finalized_is_the_status_of_a_link_that_was_being_made() -> None:
    heard = asyncio.Event()

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.append(writer)
        heard.set()

    silent: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    info = LLMClusterInfo(8)
    info.append_remote_ip_info("127.0.0.1", server.sockets[0].getsockname()[1])
    async with open_cluster(1) as cluster:
        linking = asyncio.ensure_future(cluster.datadist.link_clusters([info], 30_000))
        await heard.wait()
        await cluster.datadist.finalize()
        status = LLMStatusCode.LLM_ENGINE_FINALIZED
        assert await linking == (status, [status])
    for writer in silent:
        writer.close()
    server.close()
    await server.wait_closed()


async def test_llm_engine_finalized_is_what_a_cache_manager_that_was_kept_says() -> None:
    async with linked_pair(DESC, mem_pool_cfg=POOL) as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        await decoder.datadist.finalize()

        async def usage() -> object:
            return manager.pool_usage()

        tensors = [bytearray(DESC.size) for _ in range(DESC.num_tensors)]
        for call in (
            usage,
            pull(manager, cache),
            lambda: manager.allocate_cache(DESC),
            lambda: manager.deallocate_blocks_cache(cache),
            lambda: manager.register_blocks_cache(DESC, tensors),
            lambda: manager.unregister_cache(cache.cache_id),
            lambda: manager.remove_cache_key(CacheKey(2, 1)),
            lambda: manager.copy_blocks(cache, {0: [1]}),
            lambda: manager.push_blocks(BlocksCacheKey(1), cache, [0], [1]),
        ):
            await refused(call, LLMStatusCode.LLM_ENGINE_FINALIZED, r"cluster 2 is finalized .*; init\(\) it again")


async def test_llm_failed_names_the_port_that_is_taken() -> None:
    async with open_cluster(1) as first:
        host, port = first.datadist.listen_address or ("", 0)
        where = f"{host}:{port}"

        async def start() -> None:
            async with open_cluster(2, device_id=1, listen_ip_info=where):
                pass

        words = rf"{re.escape(host)}:{port} is in use .*; choose another port, or 0 for any free port"
        await refused(start, LLMStatusCode.LLM_FAILED, words)
        async with open_cluster(2, device_id=1) as second:
            before = second.datadist.listen_address
            options = {"llm.listenIpInfo": where}
            await refused(lambda: second.datadist.switch_role(LLMRole.MIX, options), LLMStatusCode.LLM_FAILED, words)
            assert second.datadist.listen_address == before


async def test_llm_failed_is_the_result_of_a_task_that_was_cancelled() -> None:
    async with linked_pair(DESC, sync_kv_timeout=60_000) as (_, decoder, _, cache):
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:hang")
            task = decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
            assert await task.get_results(1) == [LLMStatusCode.LLM_TIMEOUT]
            assert not task.done()
            assert task.cancel()
            assert await task.synchronize() is LLMStatusCode.LLM_FAILED
            assert task.cancelled()


async def test_what_is_not_initialised_is_no_status_but_a_runtime_error() -> None:
    datadist = LLMDataDist(LLMRole.MIX, 1)
    with pytest.raises(RuntimeError, match=r"not initialised: use async with, or await init\(\) first") as caught:
        await datadist.link_clusters([absent()])
    assert not isinstance(caught.value, LLMException)
