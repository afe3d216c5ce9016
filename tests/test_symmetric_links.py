"""``link``: members that know a rank table and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    LinkTimeout,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    ParamInvalid,
    RegisterMemStatus,
)
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    linked_pair,
    open_cluster,
    soft_fault,
    soft_faults_cleared,
    verify,
)
from tests.test_pull import BLOCKS, moved


def group() -> str:
    """Return the name of this process's communicator. Names count on the whole machine, where other tests run as well."""
    return f"group {os.getpid()}"


def table(count: int) -> str:
    devices = [{"device_id": str(i), "device_ip": f"10.0.0.{i}", "rank_id": str(i)} for i in range(count)]
    return json.dumps(
        {
            "version": "1.0",
            "server_count": "1",
            "status": "completed",
            "server_list": [{"server_id": "10.0.0.1", "device": devices}],
        }
    )


async def link_all(*clusters: Cluster, name: str = "") -> list[int]:
    ranks = {cluster.datadist.cluster_id: rank for rank, cluster in enumerate(clusters)}
    return await asyncio.gather(*(c.datadist.link(name or group(), ranks, table(len(clusters))) for c in clusters))


async def settled(cluster: Cluster, number: int) -> RegisterMemStatus:
    async with asyncio.timeout(10):
        status = await cluster.datadist.wait_register_mem_status(number)
    assert cluster.datadist.query_register_mem_status(number) is status
    return status


@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize("auth_key", [None, b"secret"])
async def test_two_that_do_not_listen(one_sided: bool, auth_key: bytes | None) -> None:
    options: dict[str, Any] = {
        "listen_ip_info": None,
        "enable_remote_cache_accessible": one_sided,
        "auth_key": auth_key,
    }
    async with open_cluster(1, **options) as prompt, open_cluster(2, device_id=1, **options) as decoder:
        await prompt.blocks(BLOCKS)
        cache = await decoder.blocks(BLOCKS)
        numbers = await link_all(prompt, decoder)
        assert numbers == [1, 1]
        assert await settled(prompt, 1) is await settled(decoder, 1) is RegisterMemStatus.OK
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        verify(decoder.memory(cache), cache, moved(BLOCKS, {0: 3}))
        await asyncio.gather(prompt.datadist.unlink(1), decoder.datadist.unlink(1))
        with pytest.raises(NotLinked):
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        with pytest.raises(NotLinked):
            decoder.datadist.query_register_mem_status(1)
        assert await link_all(prompt, decoder) == [2, 2]
        await decoder.datadist.wait_linked(1)
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [4], [0])


async def test_a_communicator_of_four_links_each_to_each() -> None:
    async with (
        open_cluster(1) as one,
        open_cluster(2, device_id=1) as two,
        open_cluster(3, device_id=2) as three,
        open_cluster(4, device_id=3) as four,
    ):
        clusters = [one, two, three, four]
        caches = [await cluster.blocks(BLOCKS) for cluster in clusters]
        numbers = await link_all(*clusters)
        assert [await settled(c, n) for c, n in zip(clusters, numbers, strict=True)] == [RegisterMemStatus.OK] * 4
        for i, cluster in enumerate(clusters):
            for peer in {1, 2, 3, 4} - {i + 1}:
                await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(peer), caches[i], [peer], [peer + 4])
            verify(cluster.memory(caches[i]), caches[i], [(0, p + 4, p, p) for p in {1, 2, 3, 4} - {i + 1}])


async def test_a_member_that_does_not_come_is_a_timeout() -> None:
    async with open_cluster(1, link_total_time=1) as alone:
        with pytest.raises(LinkTimeout):
            await alone.datadist.link("alone", {1: 0, 2: 1}, table(2))
        with pytest.raises(NotLinked):
            await alone.datadist.unlink(1)


@pytest.mark.parametrize("text", ["abc", "0", "-3", "nan", "1.5", "1000001", ""])
async def test_the_environments_limit_is_whole_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", text)
    async with open_cluster(1, listen_ip_info=None) as prompt:
        with pytest.raises(ParamInvalid, match=f"HCCL_CONNECT_TIMEOUT={text}: .* 1 to 1000000 whole seconds"):
            await prompt.datadist.link(group(), {1: 0, 2: 1}, table(2))


async def test_other_keys_do_not_meet_as_links(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        open_cluster(1, auth_key=b"one", link_total_time=2) as prompt,
        open_cluster(2, device_id=1, auth_key=b"two", link_total_time=2) as decoder,
    ):
        numbers = await link_all(prompt, decoder)
        assert await settled(decoder, numbers[1]) is RegisterMemStatus.FAILED
        assert await settled(prompt, numbers[0]) is RegisterMemStatus.FAILED
    told = [each.message for each in caplog.records if "a communicator failed" in each.message]
    assert len(told) == 2
    assert [words for words in told if words.endswith(": ") or "TaskGroup" in words] == []
    assert "cluster 1: a communicator failed: not all links were made within 2 s" in told


async def test_a_link_that_is_there_already_is_taken() -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, _, _):
        numbers = await link_all(prompt, decoder)
        assert await settled(prompt, numbers[0]) is await settled(decoder, numbers[1]) is RegisterMemStatus.OK


async def test_arguments_are_checked_first() -> None:
    async with open_cluster(1) as cluster:
        link = cluster.datadist.link
        with pytest.raises(TypeError):
            await link(None, {1: 0, 2: 1}, table(2))  # type: ignore[arg-type]
        with pytest.raises(ParamInvalid):
            await link("", {1: 0, 2: 1}, table(2))
        with pytest.raises(ParamInvalid):
            await link("x", {5: 0, 2: 1}, table(2))
        with pytest.raises(ParamInvalid):
            await link("x", {1: 0}, table(1))
        with pytest.raises(ValueError, match="uint64"):
            await link("x", {1: 0, -2: 1}, table(2))


async def test_ranks_that_leave_one_out_are_refused_before_a_member_is_waited_for() -> None:
    gap = json.loads(table(2))
    gap["server_list"][0]["device"][1]["rank_id"] = "5"
    async with open_cluster(1, link_total_time=1) as cluster:
        with pytest.raises(ParamInvalid, match=r"ranks \[0, 5\]: must be 0 to 1 without a gap"):
            await cluster.datadist.link(group(), {1: 0, 2: 5}, json.dumps(gap))


async def test_the_applications_own_communicator_is_not_in_the_way() -> None:
    """HCCL has one communicator of a rank table in a file for each device and process, and refuses a second."""
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        with soft_faults_cleared():
            soft_fault("HcclCommInitClusterInfo:fail=7@*;HcclCommInitClusterInfoConfig:fail=7@*")
            numbers = await link_all(prompt, decoder)
        assert await settled(prompt, numbers[0]) is await settled(decoder, numbers[1]) is RegisterMemStatus.OK


async def test_groups_may_be_asked_for_in_another_order() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        ranks = {1: 0, 2: 1}

        async def both(cluster: Cluster, first: str, second: str) -> None:
            one = asyncio.create_task(cluster.datadist.link(first, ranks, table(2)))
            await asyncio.sleep(0)
            for number in await asyncio.gather(one, cluster.datadist.link(second, ranks, table(2))):
                assert await settled(cluster, number) is RegisterMemStatus.OK

        async with asyncio.timeout(20):
            await asyncio.gather(
                both(prompt, f"{group()} a", f"{group()} b"), both(decoder, f"{group()} b", f"{group()} a")
            )


async def test_switching_the_role_moves_the_listener() -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, _, _):
        with pytest.raises(LLMException) as caught:
            await prompt.datadist.switch_role(LLMRole.DECODER)
        assert caught.value.status_code is LLMStatusCode.LLM_EXIST_LINK
        info = cluster_info(prompt)
        await decoder.datadist.unlink_clusters([info])
        await prompt.datadist.switch_role(LLMRole.DECODER)
        assert prompt.datadist.role is LLMRole.DECODER
        assert prompt.datadist.listen_address is None
        assert (await decoder.datadist.link_clusters([info]))[0] is LLMStatusCode.LLM_LINK_FAILED
        await prompt.datadist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})
        assert (await decoder.datadist.link_clusters([cluster_info(prompt)]))[0] is LLMStatusCode.LLM_SUCCESS


async def test_the_port_is_free_for_others_as_soon_as_the_role_is_switched() -> None:
    async with linked_pair(BLOCKS) as (prompt, decoder, _, _):
        await decoder.datadist.unlink_clusters([cluster_info(prompt)])
        address = prompt.datadist.listen_address
        assert address is not None
        await prompt.datadist.switch_role(LLMRole.DECODER)
        with socket.create_server(address):
            pass
