"""Two linked clusters of one process, with a paged cache of numpy arrays each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodatadist.blocking import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheManager,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)

BLOCKS = 16
DESC = CacheDesc(4, [BLOCKS, 32 << 10], DataType.DT_UINT8)
"""Large enough that no whole transfer of it runs in the submitting call."""
EVERYTHING = list(range(BLOCKS))
KEY = BlocksCacheKey(1)


def options(**values: Any) -> dict[str, str]:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = 20_000
    for name, value in values.items():
        setattr(config, name, value)
    return config.generate_options()


@dataclass
class Cluster:
    """``tensors[t][b]`` holds ``start + 4 * b + t`` at first."""

    datadist: LLMDataDist
    start: int
    tensors: list[NDArray[np.uint8]]
    cache: Cache

    @property
    def manager(self) -> CacheManager:
        return self.datadist.cache_manager

    @property
    def cluster_id(self) -> int:
        return self.datadist.cluster_id

    @property
    def info(self) -> LLMClusterInfo:
        address = self.datadist.listen_address
        assert address is not None
        info = LLMClusterInfo(self.cluster_id)
        info.append_remote_ip_info(*address)
        return info

    def check(self, moved: dict[int, tuple[int, int]]) -> None:
        """Block b holds what block ``moved[b]``, (the owner's start, its block), held; all others hold their own."""
        for t, tensor in enumerate(self.tensors):
            for b in range(BLOCKS):
                start, source = moved.get(b, (self.start, b))
                assert (tensor[b] == start + 4 * source + t).all(), (t, b)


@contextmanager
def cluster(cluster_id: int, start: int, **values: Any) -> Iterator[Cluster]:
    datadist = LLMDataDist(LLMRole.MIX, cluster_id)
    datadist.init(options(listen_ip_info="127.0.0.1:0", device_id=cluster_id % 8, **values))
    try:
        blocks = np.arange(BLOCKS, dtype=np.uint8)[:, None]
        tensors = [np.repeat(start + 4 * blocks + t, DESC.shape[1], 1) for t in range(DESC.num_tensors)]
        cache = datadist.cache_manager.register_blocks_cache(DESC, tensors, BlocksCacheKey(cluster_id))
        yield Cluster(datadist, start, tensors, cache)
    finally:
        datadist.finalize()


@dataclass
class Pair:
    """Cluster 1, and cluster 2, which pulls."""

    source: Cluster
    target: Cluster

    def pull(self, *, src: list[int] = EVERYTHING, dst: list[int] = EVERYTHING) -> None:
        self.target.manager.pull_blocks(KEY, self.target.cache, src, dst)


@contextmanager
def linked_pair(**values: Any) -> Iterator[Pair]:
    with cluster(1, 0, **values) as source, cluster(2, 100, **values) as target:
        status, each = target.datadist.link_clusters([source.info], 5000)
        assert status is LLMStatusCode.LLM_SUCCESS, each
        source.datadist.wait_linked(2)
        yield Pair(source, target)
