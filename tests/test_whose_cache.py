"""A cache belongs to the cluster that made it, while that is initialised: no other one takes it, frees it or moves it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheManager,
    CacheNotFound,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    ParamInvalid,
    Placement,
    TransferWithCacheKeyConfig,
)
from aiodatadist.blocking import LLMDataDist as BlockingLLMDataDist
from aiodatadist.legacy import LLMDataDist as LegacyLLMDataDist
from aiodatadist.testing import cluster_info, open_cluster

DESC = CacheDesc(2, [4, 64], DataType.DT_UINT8)
HOST = CacheDesc(2, [4, 64], DataType.DT_UINT8, Placement.HOST)
POOLS: dict[str, Any] = {
    "mem_pool_cfg": '{"memory_size": 65536, "page_shift": 10}',
    "host_mem_pool_cfg": '{"memory_size": 65536, "page_shift": 10}',
}
PEER = 3

USES: dict[str, tuple[bool, Callable[[CacheManager, Cache, Cache], Any]]] = {
    "pull_blocks": (True, lambda m, theirs, _: m.pull_blocks(BlocksCacheKey(PEER), theirs, [0], [0])),
    "pull_cache": (False, lambda m, theirs, _: m.pull_cache(CacheKey(PEER, 1), theirs)),
    "push_blocks": (True, lambda m, theirs, _: m.push_blocks(BlocksCacheKey(PEER), theirs, [0], [0])),
    "push_cache": (False, lambda m, theirs, _: m.push_cache(CacheKeyByIdAndIndex(PEER, 1), theirs)),
    "copy_blocks": (True, lambda m, theirs, _: m.copy_blocks(theirs, {0: [1]})),
    "copy_cache from": (False, lambda m, theirs, mine: m.copy_cache(mine, theirs)),
    "copy_cache to": (False, lambda m, theirs, mine: m.copy_cache(theirs, mine)),
    "arrays": (True, lambda m, theirs, _: m.arrays(theirs)),
    "tensors": (True, lambda m, theirs, _: m.tensors(theirs)),
    "transfer_cache_async": (
        True,
        lambda m, theirs, _: m.transfer_cache_async(
            theirs, object(), [TransferWithCacheKeyConfig(BlocksCacheKey(PEER), range(1), range(1))], [0], [0]
        ),
    ),
    "receive_layers": (True, lambda m, theirs, _: m.receive_layers(PEER, theirs).__aenter__()),
    "deallocate_blocks_cache": (True, lambda m, theirs, _: m.deallocate_blocks_cache(theirs)),
    "deallocate_cache": (False, lambda m, theirs, _: m.deallocate_cache(theirs)),
}


async def make(manager: CacheManager, blocks: bool) -> Cache:
    return await (manager.allocate_blocks_cache(DESC) if blocks else manager.allocate_cache(DESC))


async def refused(use: Callable[[], Any], words: str) -> None:
    with pytest.raises(ParamInvalid, match=words):
        await use()


@pytest.mark.parametrize("call", USES)
async def test_the_cache_of_another_cluster_is_refused_and_both_are_named(call: str) -> None:
    blocks, use = USES[call]
    async with (
        open_cluster(1, **POOLS) as one,
        open_cluster(2, **POOLS) as two,
        open_cluster(PEER, device_id=1) as peer,
    ):
        await two.datadist.link_clusters([cluster_info(peer)], 5000)
        theirs = await make(one.datadist.cache_manager, blocks)
        manager = two.datadist.cache_manager
        mine = await make(manager, blocks)
        assert theirs.cache_id == mine.cache_id
        before = manager.pool_usage(), one.datadist.cache_manager.pool_usage()
        await refused(lambda: use(manager, theirs, mine), "is a cache of cluster 1: this is cluster 2")
        assert (manager.pool_usage(), one.datadist.cache_manager.pool_usage()) == before
        assert mine.tensor_addrs
        assert theirs.tensor_addrs


@pytest.mark.parametrize("call", [name for name in USES if not name.startswith("deallocate")])
async def test_a_cache_that_was_given_back_is_not_used_and_its_memory_is_its_next_owners(call: str) -> None:
    blocks, use = USES[call]
    async with open_cluster(2, **POOLS) as two, open_cluster(PEER, device_id=1) as peer:
        await two.datadist.link_clusters([cluster_info(peer)], 5000)
        manager = two.datadist.cache_manager
        mine, gone = await make(manager, blocks), await make(manager, blocks)
        addresses = list(gone.tensor_addrs)
        await (manager.deallocate_blocks_cache if blocks else manager.deallocate_cache)(gone)
        heir = await make(manager, blocks)
        assert heir.tensor_addrs == addresses
        for array in manager.arrays(heir):
            array[:] = 7
        del array
        before = manager.pool_usage()
        with pytest.raises(CacheNotFound, match="is unknown here"):
            await use(manager, gone, mine)
        assert manager.pool_usage() == before
        assert all((array == 7).all() for array in manager.arrays(heir))


@pytest.mark.parametrize("blocks", [True, False])
async def test_a_cache_that_is_given_back_twice_takes_nothing_from_its_next_owner(blocks: bool) -> None:
    async with open_cluster(2, **POOLS) as two:
        manager = two.datadist.cache_manager
        give_back = manager.deallocate_blocks_cache if blocks else manager.deallocate_cache
        cache = await make(manager, blocks)
        by_hand = Cache(cache.cache_id, DESC, cache.tensor_addrs, blocks)
        await asyncio.gather(give_back(cache), give_back(cache), give_back(by_hand))
        heir = await make(manager, blocks)
        assert heir.tensor_addrs == by_hand.tensor_addrs, "the same memory, and another id"
        before = manager.pool_usage()
        for each in (cache, by_hand):
            await give_back(each)
        assert manager.pool_usage() == before
        assert manager.arrays(heir)


async def test_blocks_are_not_swapped_with_another_cluster() -> None:
    async with open_cluster(1, **POOLS) as one, open_cluster(2, **POOLS) as two:
        theirs = await one.datadist.cache_manager.allocate_blocks_cache(HOST)
        manager = two.datadist.cache_manager
        mine = await manager.allocate_blocks_cache(DESC)
        for pair in ((theirs, mine), (mine, theirs)):
            await refused(lambda pair=pair: manager.swap_blocks(pair[0], pair[1], {0: 1}), "is a cache of cluster 1")  # type: ignore[misc]


async def test_a_cache_ends_with_the_life_of_its_cluster() -> None:
    datadist = LLMDataDist(LLMRole.MIX, 7, LLMConfig(**POOLS))
    async with datadist:
        old = await make(datadist.cache_manager, True)
    async with datadist:
        new = await make(datadist.cache_manager, True)
        words = "is a cache of cluster 7 before it was finalized"
        await refused(lambda: datadist.cache_manager.deallocate_blocks_cache(old), words)
        await refused(lambda: datadist.cache_manager.copy_blocks(old, {0: [1]}), words)
        assert new.tensor_addrs
        await datadist.cache_manager.deallocate_blocks_cache(new)
        await datadist.cache_manager.deallocate_blocks_cache(new)  # deallocated: left alone


async def test_a_cache_made_by_hand_has_to_name_one_of_this_cluster() -> None:
    async with open_cluster(1, **POOLS) as one:
        manager = one.datadist.cache_manager
        cache = await make(manager, True)
        same = Cache(cache.cache_id, DESC, cache.tensor_addrs, True)
        await manager.copy_blocks(same, {0: [1]})
        other = Cache(cache.cache_id, DESC, [address + 64 for address in cache.tensor_addrs], True)
        await refused(
            lambda: manager.copy_blocks(other, {0: [1]}), "made by hand, with addresses that cache 1 of cluster 1"
        )
        await refused(lambda: manager.deallocate_blocks_cache(other), "made by hand")
        await manager.deallocate_blocks_cache(same)
        assert not cache.tensor_addrs


async def test_a_kv_cache_of_v1_belongs_to_its_cluster() -> None:
    options = {"llm.EnableCacheManager": "0", "llm.MemPoolConfig": POOLS["mem_pool_cfg"]}
    caches = []
    one, two = (LegacyLLMDataDist(LLMRole.DECODER, number) for number in (1, 2))
    try:
        for datadist in (one, two):
            await datadist.init(options)
            caches.append(await datadist.kv_cache_manager.allocate_cache(DESC))
        await refused(
            lambda: two.kv_cache_manager.deallocate_cache(caches[0]), "is a cache of cluster 1: this is cluster 2"
        )
        assert caches[1].tensor_addrs
    finally:
        await one.finalize()
        await two.finalize()


# ---- whose an id is ----


async def test_an_id_is_of_one_live_cluster() -> None:
    first, second = LLMDataDist(LLMRole.MIX, 7), LLMDataDist(LLMRole.PROMPT, 7)
    async with first:
        with pytest.raises(ParamInvalid, match="cluster 7 is initialised in this process already"):
            await second.init()
        with pytest.raises(RuntimeError, match="not initialised"):
            _ = second.cache_manager
    async with second:
        assert second.cache_manager


async def test_an_id_that_could_not_be_initialised_is_free() -> None:
    with pytest.raises(ParamInvalid):
        await LLMDataDist(LLMRole.MIX, 7, LLMConfig(device_id=99)).init()
    async with LLMDataDist(LLMRole.MIX, 7):
        pass


async def test_a_second_init_does_nothing_or_says_what_differs() -> None:
    config = LLMConfig(sync_kv_timeout=500, auth_key=b"secret")
    async with LLMDataDist(LLMRole.MIX, 7, config) as datadist:
        await datadist.init()
        await datadist.init(LLMConfig(sync_kv_timeout=500, auth_key=b"secret"))
        config.sync_kv_timeout = 501  # of the caller's own: this object was initialised with what it was
        await datadist.init(LLMConfig(sync_kv_timeout=500, auth_key=b"secret"))
        with pytest.raises(ParamInvalid, match="already, with other values of device_id, auth_key") as caught:
            await datadist.init(LLMConfig(sync_kv_timeout=500, device_id=1, auth_key=b"other"))
        assert "secret" not in str(caught.value)
        with pytest.raises(ParamInvalid, match="with other values of sync_kv_timeout"):
            await datadist.init({"llm.SyncKvCacheWaitTime": "1"})


async def test_a_second_init_on_another_event_loop_says_so() -> None:
    async with LLMDataDist(LLMRole.MIX, 7) as datadist:
        with pytest.raises(LLMException, match="cluster 7 belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, datadist.init())
        await datadist.init()


@pytest.mark.filterwarnings("ignore:cluster 7 was never finalized:ResourceWarning")
def test_a_second_init_after_the_end_of_its_event_loop_says_so() -> None:
    datadist = LLMDataDist(LLMRole.MIX, 7)
    asyncio.run(datadist.init())
    with pytest.raises(LLMException, match="the event loop on which cluster 7 was initialised is closed"):
        asyncio.run(datadist.init())

    async def anew() -> None:
        await datadist.finalize()
        async with datadist:
            assert datadist.statistics().caches == 0

    asyncio.run(anew())


def test_without_await_a_second_init_says_what_differs_and_an_id_is_of_one_cluster() -> None:
    first, second = BlockingLLMDataDist(LLMRole.DECODER, 7), BlockingLLMDataDist(LLMRole.DECODER, 7)
    first.init({"llm.SyncKvCacheWaitTime": "500"})
    try:
        first.init({"llm.SyncKvCacheWaitTime": "500"})
        with pytest.raises(ParamInvalid, match="with other values of sync_kv_timeout"):
            first.init({"llm.SyncKvCacheWaitTime": "501"})
        with pytest.raises(ParamInvalid, match="cluster 7 is initialised in this process already"):
            second.init({})
    finally:
        first.finalize()
    second.init({})
    second.finalize()
