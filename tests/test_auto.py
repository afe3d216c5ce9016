"""``transport="auto"`` on one machine: how two ends link, and what a hello that lies can change."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LLMStatusCode
from aiodatadist._cluster.engine import Engine
from aiodatadist._transport import DataConnection
from aiodatadist._wire.messages import Hello
from aiodatadist.testing import Cluster, cluster_info, linked_pair, open_cluster, verify
from tests.keys import proving
from tests.test_pull import BLOCKS, moved

SMALL = CacheDesc(2, [4, 64], DataType.DT_UINT8)


def ways(*clusters: Cluster) -> list[str]:
    """Return how the bytes of each cluster's only link travel."""
    return [link.transport for cluster in clusters for link in cluster.datadist.statistics().links]


def saying(monkeypatch: pytest.MonkeyPatch, liar: int, **changes: Any) -> None:
    """Let the hello of a cluster say something else of its endpoint, as a hostile peer's does."""
    own = Engine.hello

    def said(engine: Engine, has_key: bool, peer: int | None) -> Hello:
        hello = own(engine, has_key, peer)
        if engine.cluster_id != liar:
            return hello
        return hello.model_copy(update={"endpoint": hello.endpoint.model_copy(update=changes)})

    monkeypatch.setattr(Engine, "hello", said)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return, for each data connection that is made, whether its bytes are without seals."""
    found: list[bool] = []
    made = DataConnection

    def noting(sock: Any, seals: Any) -> Any:
        found.append(seals is None)
        return made(sock, seals)

    monkeypatch.setattr("aiodatadist._link.data.data_connections.DataConnection", noting)
    return found


@asynccontextmanager
async def clusters(one: dict[str, Any], other: dict[str, Any]) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """Open an owner, cluster 1, and a puller, cluster 2, not linked yet."""
    async with open_cluster(1, device_id=0, **one) as owner, open_cluster(2, device_id=1, **other) as puller:
        yield owner, puller


async def refusal_of(owner: Cluster, puller: Cluster) -> str:
    """Return why the puller cannot link to the owner."""
    linked = await puller.datadist.link_clusters([cluster_info(owner)], 5000)
    assert linked[0] is not LLMStatusCode.LLM_SUCCESS
    assert ways(owner, puller) == []
    return str(linked.errors)


@pytest.mark.parametrize("options", [{}, {"trust": "none"}, {"auth_key": b"a key"}], ids=["user", "none", "key"])
async def test_two_ends_on_one_machine_share_memory(options: dict[str, Any], plain: list[bool]) -> None:
    async with linked_pair(BLOCKS, transport="auto", **options) as (prompt, decoder, _, cache):
        assert ways(prompt, decoder) == ["hccl", "hccl"]
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3, 4], [0, 1])
        verify(decoder.memory(cache), cache, moved(BLOCKS, {0: 3, 1: 4}))
        assert plain == [], "no data connection was made"


@pytest.mark.parametrize(("one", "other", "way"), [("auto", "hccl", "hccl"), ("tcp", "auto", "tcp")])
async def test_an_end_with_auto_follows_the_other(one: str, other: str, way: str) -> None:
    async with clusters({"transport": one}, {"transport": other}) as (owner, puller):
        await owner.blocks(SMALL)
        cache = await puller.blocks(SMALL)
        linked = await puller.datadist.link_clusters([cluster_info(owner)], 5000)
        assert linked[0] is LLMStatusCode.LLM_SUCCESS, linked.errors
        assert ways(puller) == [way]
        await puller.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        verify(puller.memory(cache), cache, [(t, 0, 1, 3) for t in range(2)])


@pytest.mark.parametrize(("one", "other"), [("auto", "loopback"), ("hccl", "tcp")])
async def test_ends_without_a_common_transport_are_refused_with_both_options(one: str, other: str) -> None:
    async with clusters({"transport": one}, {"transport": other}) as (owner, puller):
        why = await refusal_of(owner, puller)
        assert f"transport differs: {one} at cluster 1, {other} at cluster 2" in why or (
            f"transport differs: {other} at cluster 2, {one} at cluster 1" in why
        )


# ---- what a hello that lies can change ----

FAR = {"host": "another:0", "process": os.getpid() + 1}
NEAR = {"meeting": "user:[1] pid:[2] net:[3]"}


@pytest.mark.parametrize("lie", [FAR, NEAR], ids=["another machine", "another network"])
async def test_a_proved_peer_that_says_it_is_elsewhere_gets_sealed_bytes(
    lie: dict[str, Any], plain: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    saying(monkeypatch, 1, **lie)
    async with clusters({"transport": "auto"}, {"transport": "auto"}) as (owner, puller):
        await owner.blocks(SMALL)
        cache = await puller.blocks(SMALL)
        linked = await puller.datadist.link_clusters([cluster_info(owner)], 5000)
        assert linked[0] is LLMStatusCode.LLM_SUCCESS, linked.errors
        assert ways(puller) == ["tcp"]
        assert plain == [False] * 8, "four data connections, each with two ends"
        await puller.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])


@pytest.mark.parametrize("lie", [FAR, {"transport": "tcp"}, {**FAR, "transport": "tcp"}], ids=["place", "tcp", "both"])
@pytest.mark.parametrize("liar", [1, 2])
async def test_a_peer_without_a_proof_does_not_bring_auto_to_tcp(
    liar: int, lie: dict[str, Any], plain: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes over TCP are open to every user of the machine, and softnpu's are not."""
    saying(monkeypatch, liar, **lie)
    options = {"transport": "auto", **proving(None)}
    async with clusters(options, options) as (owner, puller):
        why = await refusal_of(owner, puller)
        assert "softnpu moves bytes only between" in why or "transport differs: " in why
        assert plain == []


@pytest.mark.parametrize("lie", [{"transport": "tcp", "streams": 4}, {"transport": "tcp", "streams": 0}, FAR])
@pytest.mark.parametrize("liar", [1, 2])
async def test_a_peer_does_not_bring_an_end_to_what_its_option_does_not_allow(
    liar: int, lie: dict[str, Any], plain: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    saying(monkeypatch, liar, **lie)
    honest, hostile = {"transport": "hccl"}, {"transport": "auto"}
    async with clusters(*((hostile, honest) if liar == 1 else (honest, hostile))) as (owner, puller):
        assert await refusal_of(owner, puller)
        assert plain == []


async def test_a_peer_that_says_tcp_without_connections_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, 1, transport="tcp", streams=0)
    async with clusters({"transport": "auto"}, {"transport": "auto"}) as (owner, puller):
        assert "transport differs: " in await refusal_of(owner, puller)
