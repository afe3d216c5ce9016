"""Peers pull a key while its owner removes it, gives its memory back, and binds it anew: one version, or a typed error."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from numpy.typing import NDArray

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheManager,
    CacheNotFound,
    DataType,
    LLMStatusCode,
    ParamInvalid,
    Placement,
    TransferError,
)
from aiodatadist.testing import Cluster, cluster_info, open_cluster
from tests.profiles import at_night

PEERS = 4
KEYS = range(3)
DESC = CacheDesc(4, [4, 128 << 10], DataType.DT_UINT8)
"""128 KiB in a block of a tensor: a pull of all is no single copy."""
PULLS = 300
"""Pulls that must bring a version. A number of seconds would keep a fast machine busy for as long as a slow one."""
POOL = {"memory_size": 6 << 20, "page_shift": 12}
"""Room for as many caches as there are keys: each gets memory of another's earlier version."""


class Versions:
    """Versions that exist, and existed. A version is a number that names its key and fills a cache, four bytes each.

    Args:
        enough: the number of pulls that bring a version, after which all ends.

    Attributes:
        gone: the last version of each key whose memory was given back.
        found: what happened, counted.
    """

    def __init__(self, enough: int) -> None:
        self._enough = enough
        self.gone = dict.fromkeys(KEYS, -1)
        self.found: Counter[str] = Counter()

    def is_over(self) -> bool:
        return self.found["pulled"] >= self._enough and self.found["CacheNotFound"] > 0

    async def rebind(self, manager: CacheManager, key: int, chance: random.Random) -> None:
        """Make version after version, each in place before any peer can ask for it."""
        while not self.is_over():
            cache = await manager.allocate_blocks_cache(DESC, BlocksCacheKey(1, key), timeout=30)
            self.found["versions"] += 1
            version = self.found["versions"] * len(KEYS) + key
            for array in manager.arrays(cache):
                array.view(np.uint32)[:] = version
            del array
            for _ in range(chance.randrange(20)):
                await anyio.lowlevel.checkpoint()
            await manager.deallocate_blocks_cache(cache)
            self.gone[key] = version

    async def pull(self, peer: Cluster, chance: random.Random) -> None:
        """Pull, and check that one version of the key came that was not gone before.

        Or an error must say that the key is not there, or was taken back.
        """
        manager = peer.datadist.cache_manager
        target = await manager.allocate_blocks_cache(DESC)
        while not self.is_over():
            key = chance.choice(KEYS)
            gone = self.gone[key]
            try:
                await manager.pull_blocks(BlocksCacheKey(1, key), target, range(4), range(4))
            except (CacheNotFound, TransferError, ParamInvalid) as error:
                self.found[type(error).__name__] += 1
                continue
            self.found["pulled"] += 1
            self._look(key, gone, [array.view(np.uint32) for array in manager.arrays(target)])

    @staticmethod
    def _look(key: int, gone: int, arrays: list[NDArray[np.uint32]]) -> None:
        versions = {int(end) for array in arrays for end in (array.min(), array.max())}
        assert len(versions) == 1, f"{versions} in one pull"
        (version,) = versions
        assert version % len(KEYS) == key, f"{version} is of another key than {key}"
        assert version > gone, f"{version} was gone: {gone} was, which came after it"


@pytest.mark.parametrize(("enough", "seed"), [(PULLS, 1), at_night(50 * PULLS, 2)])
@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "request/response"])
async def test_a_pull_brings_one_version_or_an_error(one_sided: bool, enough: int, seed: int) -> None:
    options: dict[str, Any] = {"mem_pool_cfg": POOL, "enable_remote_cache_accessible": one_sided}
    options["sync_kv_timeout"] = 20_000
    versions = Versions(enough)
    async with AsyncExitStack() as stack:
        owner = await stack.enter_async_context(open_cluster(1, **options))
        peers = []
        for number in range(2, 2 + PEERS):
            peer = await stack.enter_async_context(open_cluster(number, device_id=number, **options))
            assert (await peer.datadist.link_clusters([cluster_info(owner)]))[0] is LLMStatusCode.LLM_SUCCESS
            peers.append(peer)
        async with anyio.create_task_group() as group:
            for key in KEYS:
                chance = random.Random(f"{seed} key {key}")
                group.start_soon(versions.rebind, owner.datadist.cache_manager, key, chance)
            for peer in peers:
                chance = random.Random(f"{seed} peer {peer.datadist.cluster_id}")
                group.start_soon(versions.pull, peer, chance)
        usage = owner.datadist.cache_manager.pool_usage()[Placement.DEVICE]
        assert usage.free == usage.largest == usage.total
        assert [link.state for link in owner.datadist.statistics().links] == ["ready"] * PEERS
