"""A cluster with a large memory pool and a cache that fills it, in a process of its own.

Arguments: its cluster id, bytes of its pool. Writes its port; for each line on its standard input, KiB of its shared
memory that are resident. Ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import anyio.to_thread

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole

LAYERS = 80
BLOCKS = 4096


def pool(nbytes: int) -> str:
    """Return the value of ``LLMConfig.mem_pool_cfg``."""
    return json.dumps({"memory_size": nbytes, "populate": "use"})


def filling(nbytes: int) -> CacheDesc:
    """Describe K and V of 80 layers with 4096 blocks each, which fill the pool in multiples of 512 bytes."""
    block = nbytes // (2 * LAYERS * BLOCKS * 512) * 512
    return CacheDesc(2 * LAYERS, [BLOCKS, block], DataType.DT_UINT8)


def resident_kib() -> int:
    """Return the shared memory that this process has touched, its own and peers'."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("RssShmem:"))
    return int(line.split()[1])


async def allocate(datadist: LLMDataDist, nbytes: int) -> Cache:
    """Allocate a cache that fills the pool. The last block of its last tensor is full of the cluster's id."""
    manager = datadist.cache_manager
    cache = await manager.allocate_blocks_cache(filling(nbytes), BlocksCacheKey(datadist.cluster_id))
    manager.arrays(cache)[-1][-1] = datadist.cluster_id
    return cache


async def main(cluster_id: int, nbytes: int) -> None:
    config = LLMConfig(listen="127.0.0.1:0", mem_pool_cfg=pool(nbytes))
    async with LLMDataDist(LLMRole.PROMPT, cluster_id, config) as datadist:
        await allocate(datadist, nbytes)
        address = datadist.listen_address
        assert address is not None
        print(address[1], flush=True)
        while await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            print(resident_kib(), flush=True)


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]), int(sys.argv[2]))
