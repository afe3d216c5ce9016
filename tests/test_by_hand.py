"""Links with ends whose frames are made by hand: one of version 4.0, and one that is newer."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.abc
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheNotFound,
    DataType,
    FeatureNotEnabled,
    LLMClusterInfo,
    LLMStatusCode,
    NotLinked,
)
from aiodatadist.testing import Cluster, open_cluster
from tests.by_hand import BLOCK, BLOCKS, SECONDS, TENSORS, ByHand, by_hand

OWN, THEIRS = 2, 1
DESC = CacheDesc(TENSORS, [BLOCKS, BLOCK], DataType.DT_UINT8)
NAME = {"kind": "blocks", "id": 0, "model_id": 0}


def contents(cluster: Cluster, cache: Cache, block: int) -> bytes:
    return bytes(cluster.memory(cache).view()[block * BLOCK : (block + 1) * BLOCK])


@asynccontextmanager
async def linked(end: ByHand, cluster: Cluster, is_client: bool) -> AsyncIterator[None]:
    """Link the two. With ``is_client``, the end made by hand is the client."""
    address = cluster.datadist.listen_address
    assert address is not None
    async with anyio.create_task_group() as group:
        if is_client:
            await end.link(*address)
            group.start_soon(end.react)
            await cluster.datadist.wait_linked(THEIRS)
        else:
            listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
            async with listener:
                (socket,) = listener.listeners
                assert isinstance(socket, anyio.abc.SocketListener)
                group.start_soon(end.serve, socket.accept)  # and reacts: a client asks whether it has the link, too
                info = LLMClusterInfo(THEIRS)
                info.append_remote_ip_info("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port))
                made = await cluster.datadist.link_clusters([info], int(SECONDS * 1000))
                assert made[0] is LLMStatusCode.LLM_SUCCESS, made.errors
        yield


async def words_both_ways(end: ByHand, cluster: Cluster) -> None:
    await end.say("ping", call=1)
    await end.heard_of("pong", 1)
    await cluster.datadist.check_link_status(THEIRS)
    for number in range(3):
        await cluster.datadist.notify(THEIRS, b"%d" % number)
        await end.say("note", payload=base64.b64encode(b"%d" % number).decode())
        assert (await anext(cluster.datadist.notifications())).payload == b"%d" % number
    await cluster.datadist.check_link_status(THEIRS)
    assert end.notes == [b"0", b"1", b"2"]
    await end.heard_of("taken")


async def blocks_one_sided(end: ByHand, cluster: Cluster, cache: Cache) -> None:
    """Let the cluster read and write the end's memory, and tell where its own is."""
    manager = cluster.datadist.cache_manager
    await manager.pull_blocks(BlocksCacheKey(THEIRS), cache, [3], [5])
    assert contents(cluster, cache, 5) == bytes([THEIRS]) * BLOCK
    await manager.push_blocks(BlocksCacheKey(THEIRS), cache, [4], [6])
    assert bytes(end.memory.view()[6 * BLOCK : 7 * BLOCK]) == contents(cluster, cache, 4)
    await end.say("lookup", call=2, name=NAME)
    found = await end.heard_of("found", 2)
    assert (found["cache"]["pieces"], found["cache"]["stride"]) == (BLOCKS, BLOCK)


async def blocks_by_request(end: ByHand, cluster: Cluster, cache: Cache) -> None:
    """Ask the cluster to write to the end, which cannot be asked itself."""
    await end.say("grant", cache=end.entry())
    await end.say(
        "pull", call=3, name=NAME, slot=0, target=7, src_layers=None, dst_layers=None, tensors_per_layer=2, src_blocks=[4],
        dst_blocks=[6], dst_slot=0, nbytes=0, seconds=SECONDS,
    )  # fmt: skip
    pulled = await end.heard_of("pulled", 3)
    assert (pulled["status"], pulled["nbytes"]) == (0, TENSORS * BLOCK), pulled
    assert bytes(end.memory.view()[6 * BLOCK : 7 * BLOCK]) == contents(cluster, cache, 4)
    with pytest.raises(CacheNotFound):
        await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(THEIRS), cache, [3], [5])


async def what_is_newer(end: ByHand, cluster: Cluster, cache: Cache) -> None:
    """Check that 4.0 is not asked for checksums, and that unknown words of a newer version are ignored or refused."""
    if not end.minor:
        with pytest.raises(FeatureNotEnabled, match=r"its protocol has version 4\.0"):
            await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(THEIRS), cache, [3], [5], checksum=True)
        return
    await end.say("novel", optional=True)
    await end.say("novel", call=77)
    assert (await end.heard_of("unsupported"))["call"] == 77


@pytest.mark.parametrize("is_client", [True, False], ids=["it links", "it is linked"])
@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "requests"])
@pytest.mark.parametrize("minor", [0, 9])
async def test_an_end_made_by_hand_talks_to_this_version(minor: int, one_sided: bool, is_client: bool) -> None:
    options = {"enable_remote_cache_accessible": one_sided, "sync_kv_timeout": int(SECONDS * 1000), "trust": "none"}
    async with (
        by_hand(minor, THEIRS, one_sided, 0) as end,
        open_cluster(OWN, device_id=1, **options) as cluster,  # type: ignore[arg-type]
    ):
        cache = await cluster.blocks(DESC)
        try:
            async with linked(end, cluster, is_client):
                await words_both_ways(end, cluster)
                await (blocks_one_sided if one_sided else blocks_by_request)(end, cluster, cache)
                await what_is_newer(end, cluster, cache)
                await end.say("disconnect", reason="it was enough")
                await end.heard_of("bye")
            with suppress(NotLinked):  # it has ended already
                await cluster.datadist.wait_link_closed(THEIRS)
            assert cluster.datadist.figures().links_ended == {"unlinked": 1}
        finally:
            await end.aclose()
