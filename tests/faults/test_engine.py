"""Clusters that harm each other, by accident or on purpose: the one who does it bears the cost."""

from __future__ import annotations

import asyncio
import secrets
import socket
from contextlib import ExitStack
from typing import Any

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    NotLinked,
)
from aiodatadist._link import Wire
from aiodatadist._wire.messages import PLAIN_PROTOCOL, Accept, Connect, EndpointInfo, Hello, Refuse
from aiodatadist.testing import Cluster, cluster_info, inside, linked_pair, open_cluster, soft_counters
from tests.held import let_pass
from tests.stopwatch import lasting

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)


def address(cluster: Cluster) -> tuple[str, int]:
    found = cluster.datadist.listen_address
    assert found is not None
    return found


async def test_leaving_through_a_cancelled_scope_gives_everything_back(no_leaks: None) -> None:
    before = soft_counters()
    with anyio.CancelScope() as scope:
        async with linked_pair(DESC) as (prompt, decoder, _, cache):
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])
            where = address(prompt)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    with pytest.raises(OSError, match=r"refused|failed"):
        await anyio.connect_tcp(*where)
    after = soft_counters()
    assert {n: after[n] for n in ("device_bytes", "streams", "comms")} == {
        n: before[n] for n in ("device_bytes", "streams", "comms")
    }


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
async def test_a_link_over_ipv6_is_as_good(no_leaks: None) -> None:
    options: dict[str, Any] = {"listen_ip_info": "[::1]:0", "heartbeat_interval": 0.2, "heartbeat_misses": 4}
    async with open_cluster(1, **options) as prompt, open_cluster(2, device_id=1, **options) as decoder:
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        await inside(decoder.datadist).initiator.link(address(prompt), 1, 5.0)
        await let_pass(2)  # twice as long as a link without heartbeats lives
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


async def test_two_links_to_one_peer_at_a_time_are_one_link() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        info = cluster_info(prompt)
        results = await asyncio.gather(*[decoder.datadist.link_clusters([info]) for _ in range(2)])
        assert sorted(status.name for status, _ in results) == ["LLM_PROCESSING_LINK", "LLM_SUCCESS"]
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


async def test_links_from_both_ends_at_the_same_time_are_one_link() -> None:
    async with open_cluster(1) as first, open_cluster(2, device_id=1) as second:
        await first.blocks(DESC)
        cache = await second.blocks(DESC)
        with lasting(2):
            results = await asyncio.gather(
                first.datadist.link_clusters([cluster_info(second)]),
                second.datadist.link_clusters([cluster_info(first)]),
            )
        assert {status for status, _ in results} <= {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}
        await second.datadist.wait_linked(1)
        await second.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


async def test_a_refusal_arrives_with_its_reason_and_at_once() -> None:
    async with linked_pair(DESC) as (prompt, _, _, _), open_cluster(3, device_id=2) as impostor:
        inside(impostor.datadist).cluster_id = 1  # as another process may have it; this one refuses it at init()
        with lasting(2):
            status, _ = await impostor.datadist.link_clusters([cluster_info(prompt)], 100_000)
        assert status is LLMStatusCode.LLM_PARAM_INVALID  # it has the prompt's own id


async def test_silent_connections_do_not_keep_a_peer_out() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        silent = [await anyio.connect_tcp(*address(prompt)) for _ in range(80)]
        with lasting(2):
            status, _ = await decoder.datadist.link_clusters([cluster_info(prompt)], 100_000)
        assert status is LLMStatusCode.LLM_SUCCESS
        for stream in silent:
            await stream.aclose()


async def introduce(wire: Wire, cluster_id: int) -> None:
    """Say hello and ask for a channel, as a peer of softnpu on this machine would, under an id that is in use."""
    end = EndpointInfo(transport="hccl", runtime="soft", host="elsewhere", server_id="s", device_id="0", device_ip="i",
                       process=1)  # fmt: skip
    await wire.send(
        Hello(protocol=PLAIN_PROTOCOL, cluster_id=cluster_id, role=3,
              instance=secrets.token_hex(32), nonce=secrets.token_hex(32), one_sided=True,
              has_key=False, heartbeat=2.0, endpoint=end)
    )  # fmt: skip
    await wire.receive()
    await wire.send(Connect(channel="made_up", timeout=30.0))
    refusal = await wire.receive()
    assert isinstance(refusal, Refuse)
    assert "another process has this id" in refusal.reason


async def test_a_stranger_with_a_peers_id_does_not_end_the_peers_link() -> None:
    async with linked_pair(DESC, trust="none") as (prompt, decoder, _, cache):
        wire = Wire(await anyio.connect_tcp(*address(prompt)))
        await introduce(wire, 2)
        await wire.aclose()
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])


async def test_clients_that_die_while_they_link_hold_up_no_other(no_leaks: None) -> None:
    with ExitStack() as ending:
        async with open_cluster(1, trust="none") as prompt:
            host = inside(prompt.datadist).transport.endpoint.host
            for cluster_id in range(100, 110):
                wire = Wire(await anyio.connect_tcp(*address(prompt)))
                await half_way(wire, cluster_id, host)
            with lasting(2):
                await prompt.blocks(DESC)
            ending.enter_context(lasting(5))


async def half_way(wire: Wire, cluster_id: int, host: str) -> None:
    end = EndpointInfo(transport="hccl", runtime="soft", host=host, server_id="127.0.0.1", device_id="7",
                       device_ip="127.0.0.1", process=1)  # fmt: skip
    hello = Hello(protocol=PLAIN_PROTOCOL, cluster_id=cluster_id, role=3,
              instance=secrets.token_hex(32), nonce=secrets.token_hex(32),
                  one_sided=True, has_key=False, heartbeat=2.0, endpoint=end)  # fmt: skip
    await wire.send(hello)
    await wire.receive()
    await wire.send(Connect(channel=f"dies_{cluster_id}", timeout=60.0))
    assert isinstance(await wire.receive(), Accept)
    await wire.aclose()


async def test_a_cache_is_not_given_up_while_a_link_is_being_made() -> None:
    async with open_cluster(1, trust="none") as prompt:
        cache = await prompt.blocks(DESC)
        wire = Wire(await anyio.connect_tcp(*address(prompt)))
        await introduce_waiting(wire, prompt)
        with pytest.raises(LLMException) as caught:
            await prompt.datadist.cache_manager.unregister_cache(cache.cache_id)
        assert caught.value.status_code is LLMStatusCode.LLM_EXIST_LINK
        await wire.aclose()


async def introduce_waiting(wire: Wire, cluster: Cluster) -> None:
    host = inside(cluster.datadist).transport.endpoint.host
    end = EndpointInfo(transport="hccl", runtime="soft", host=host, server_id="127.0.0.1", device_id="7",
                       device_ip="127.0.0.1", process=1)  # fmt: skip
    hello = Hello(protocol=PLAIN_PROTOCOL, cluster_id=50, role=3,
                  instance=secrets.token_hex(32), nonce=secrets.token_hex(32), one_sided=True,
                  has_key=False, heartbeat=2.0, endpoint=end)  # fmt: skip
    await wire.send(hello)
    await wire.receive()
    await wire.send(Connect(channel="waits", timeout=3.0))
    assert isinstance(await wire.receive(), Accept)


async def test_the_end_of_a_cluster_ends_what_waits_on_it() -> None:
    datadist = LLMDataDist(LLMRole.MIX, 5)
    await datadist.init()
    silent = LLMClusterInfo(6)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        silent.append_remote_ip_info("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port))
        link = asyncio.create_task(datadist.link_clusters([silent], 60_000))
        wait = asyncio.create_task(datadist.wait_linked(6))
        await anyio.wait_all_tasks_blocked()
        with lasting(3):
            await datadist.finalize()
        assert (await link)[1] == [LLMStatusCode.LLM_ENGINE_FINALIZED]
        with pytest.raises(NotLinked, match="finalized"):
            await wait
