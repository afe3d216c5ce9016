"""Caches, keys and leases that are for some clusters only: others read, consume, claim and release nothing of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheNotFound,
    DataType,
    LeaseEnd,
    LeaseMismatch,
    LLMException,
    LLMStatusCode,
    ParamInvalid,
)
from aiodatadist._link.session import Session
from aiodatadist._wire.messages import Digest, Digests, Found, Grant, KeyName, Lookup, Pull, Pulled
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster, verify
from tests.test_pull import moved

DESC = CacheDesc(2, [8, 64], DataType.DT_UINT8)
REQUESTS = {"enable_remote_cache_accessible": False}


@asynccontextmanager
async def three(**options: Any) -> AsyncIterator[tuple[Cluster, Cluster, Cluster]]:
    """Open an owner (1) and two peers (2 and 3) that are linked to it."""
    async with (
        open_cluster(1, **options) as owner,
        open_cluster(2, device_id=1, **options) as one,
        open_cluster(3, device_id=2, **options) as other,
    ):
        for peer in (one, other):
            await peer.blocks(DESC)
            assert (await peer.datadist.link_clusters([cluster_info(owner)], 5000)).errors == (None,)
            await owner.datadist.wait_linked(peer.datadist.cluster_id)
        yield owner, one, other


async def test_only_readers_are_served() -> None:
    async with three(**REQUESTS) as (owner, one, other):
        cache = await owner.blocks(DESC, readers={2})
        mine, theirs = await one.blocks(DESC, 1), await other.blocks(DESC, 1)
        await one.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), mine, [3], [0])
        verify(one.memory(mine), mine, moved(DESC, {0: 3}))
        for key in (BlocksCacheKey(1), CacheKeyByIdAndIndex(1, cache.cache_id)):
            with pytest.raises(ParamInvalid, match=f"cluster 3 may not read cache {cache.cache_id}"):
                await other.datadist.cache_manager.pull_blocks(key, theirs, [3], [0])
        verify(other.memory(theirs), theirs, {})


async def test_a_key_for_one_cluster_is_consumed_by_no_other() -> None:
    pool = {"memory_size": 1 << 20}
    async with three(**REQUESTS, mem_pool_cfg=pool) as (owner, one, other):
        manager = owner.datadist.cache_manager
        cache = await manager.allocate_cache(DESC, [CacheKey(1, 7, for_cluster=2), CacheKey(1, 8)])
        await manager.deallocate_cache(cache)  # its keys keep it
        mine, theirs = [await each.datadist.cache_manager.allocate_cache(DESC) for each in (one, other)]
        for key in (CacheKey(1, 7), CacheKeyByIdAndIndex(1, cache.cache_id, 0)):
            with pytest.raises(ParamInvalid, match="for another cluster"):
                await other.datadist.cache_manager.pull_cache(key, theirs)
        await other.datadist.cache_manager.pull_cache(CacheKey(1, 8), theirs)
        await one.datadist.cache_manager.pull_cache(CacheKey(1, 7), mine)
        with pytest.raises(CacheNotFound):
            await one.datadist.cache_manager.pull_cache(CacheKey(1, 7), mine)


@asynccontextmanager
async def key_of_another(**options: Any) -> AsyncIterator[tuple[Cache, Cluster, Cache]]:
    """Open an owner with a cache of which slot 0 is for cluster 2, and cluster 3, which asks for that slot."""
    async with three(**REQUESTS, **options) as (owner, _, other):
        cache = await owner.contiguous(DESC, [CacheKey(1, 7, for_cluster=2), CacheKey(1, 8)])
        yield cache, other, await other.contiguous(DESC)


async def test_a_slot_for_one_cluster_is_read_by_no_other_at_its_address() -> None:
    async with key_of_another() as (cache, other, theirs):
        session = session_of(other)
        entry = inside(other.datadist).registry.table.find(theirs.cache_id)
        assert entry is not None
        session.peer_leases.told(entry)
        session.post(Grant(cache=entry.message()))
        for address in (cache.tensor_addrs[0], cache.tensor_addrs[1] + 1):
            request = partial(pull_at, KeyName(kind="address", id=address, model_id=0), theirs)
            answer = await session.questions.ask(request, Pulled)
            assert isinstance(answer, Pulled)
            assert (answer.status, answer.reason) == (LLMStatusCode.LLM_PARAM_INVALID, "the key is for another cluster")
        verify(other.memory(theirs), theirs, {})


async def test_no_checksum_tells_another_cluster_the_bytes_of_a_slot() -> None:
    async with key_of_another() as (cache, other, _):
        session = session_of(other)
        await session.questions.ask(
            lambda call: Lookup(call=call, name=KeyName(kind="id", id=cache.cache_id, model_id=0)), Found
        )
        for offset, step, indexes in ((0, 1, [5]), (63, 1, [0]), (64, 1, [0])):
            answer = await digests_of(session, partial(digest_at, cache, offset, step, indexes), len(indexes))
            assert (answer.status, answer.checksums) == (LLMStatusCode.LLM_PARAM_INVALID, []), (offset, step, indexes)


def session_of(peer: Cluster) -> Session:
    link = inside(peer.datadist).links.peek(1)
    assert link is not None
    return link.session


async def digests_of(session: Session, question: Callable[[int], Digest], count: int) -> Digests:
    with session.questions.open(question, Digests, checksums=count) as asked:
        await session.questions.persist(asked, question)
    assert isinstance(asked.answer, Digests)
    return asked.answer


def pull_at(name: KeyName, target: Cache, call: int) -> Pull:
    return Pull(
        call=call,
        name=name,
        slot=0,
        target=target.cache_id,
        src_layers=None,
        dst_layers=None,
        tensors_per_layer=1,
        src_blocks=[],
        dst_blocks=[],
        dst_slot=1,
        nbytes=64,
        seconds=5.0,
    )


def digest_at(cache: Cache, offset: int, step: int, indexes: list[int], call: int) -> Digest:
    """Return a question for the checksums of single bytes of the first tensor."""
    return Digest(
        call=call,
        cache_id=cache.cache_id,
        first_tensor=0,
        tensors=1,
        offset=offset,
        step=step,
        nbytes=1,
        tail=1,
        indexes=indexes,
        seconds=5.0,
    )


@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "requests"])
async def test_a_lease_for_one_cluster_is_claimed_and_released_by_no_other(one_sided: bool) -> None:
    async with three(enable_remote_cache_accessible=one_sided) as (owner, one, other):
        cache = await owner.blocks(DESC)
        mine, theirs = await one.blocks(DESC, 1), await other.blocks(DESC, 1)
        lease = owner.datadist.cache_manager.lease_blocks(cache, [3, 4], 60, for_cluster=2)
        ticket = lease.ticket()
        with pytest.raises(LeaseMismatch, match=r"another cluster .*made the lease with for_cluster="):
            await other.datadist.cache_manager.pull_leased(ticket, theirs, [0, 1])
        await other.datadist.cache_manager.release_lease(ticket)
        assert lease.ended is None
        assert dict(owner.datadist.figures().claims_refused) == {"another_cluster": 1}
        await one.datadist.cache_manager.pull_leased(ticket, mine, [0, 1])
        verify(one.memory(mine), mine, moved(DESC, {0: 3, 1: 4}))
        assert await lease.wait_ended() is LeaseEnd.TAKEN


async def test_memory_of_a_pool_has_no_readers_or_writers_of_its_own() -> None:
    async with open_cluster(1, mem_pool_cfg={"memory_size": 1 << 20}) as owner:
        manager = owner.datadist.cache_manager
        audiences: list[dict[str, Any]] = [{"readers": {2}}, {"writers": set()}]
        for audience in audiences:
            for allocate in (manager.allocate_cache, manager.allocate_blocks_cache):
                with pytest.raises(ParamInvalid, match=r"a link reaches a pool as a whole.*register_cache"):
                    await allocate(DESC, **audience)
        await manager.deallocate_cache(await manager.allocate_cache(DESC, readers=None))


@pytest.mark.parametrize(
    ("audience", "error", "why"),
    [
        ({"readers": 2}, TypeError, "readers"),
        ({"writers": "2"}, TypeError, "writers"),
        ({"readers": {"2"}}, TypeError, "readers"),
        ({"readers": {-1}}, ValueError, "readers"),
        ({"writers": range(2)}, TypeError, "writers"),
        ({"readers": list(range(4097))}, ValueError, "4097 cluster ids: must have at most 4096"),
    ],
)
async def test_a_wrong_set_is_refused_before_anything_is_registered(
    audience: dict[str, Any], error: type[Exception], why: str
) -> None:
    async with open_cluster(1) as owner:
        with pytest.raises(error, match=why):
            await owner.blocks(DESC, **audience)
        assert owner.datadist.statistics().caches == 0


async def test_a_wrong_cluster_is_refused() -> None:
    async with open_cluster(1) as owner:
        cache = await owner.blocks(DESC)
        wrongs: list[tuple[Any, type[Exception]]] = [(-1, ValueError), ("2", TypeError)]
        for wrong, error in wrongs:
            with pytest.raises(error, match="for_cluster"):
                owner.datadist.cache_manager.lease_blocks(cache, [1], 60, for_cluster=wrong)
            with pytest.raises((error, LLMException), match="for_cluster"):
                CacheKey(1, 2, for_cluster=wrong)
    assert repr(CacheKey(1, 2, for_cluster=3)).endswith("for_cluster=3)")
    assert "for_cluster" not in repr(CacheKey(1, 2))
    assert CacheKey(1, 2, for_cluster=3) != CacheKey(1, 2)
