"""Over HCCS a peer's HOST memory is out of reach, which is said before anything starts; a program for each kind of link."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    LLMException,
    ParamInvalid,
    Placement,
    TransferWithCacheKeyConfig,
)
from aiodatadist.testing import cluster_info, open_cluster
from tests import children

HOST = CacheDesc(2, [4, 4096], DataType.DT_UINT8, Placement.HOST)
DEVICE = CacheDesc(2, [4, 4096], DataType.DT_UINT8)


async def said(transfer: Awaitable[Any]) -> str:
    try:
        await transfer
    except ParamInvalid as error:
        return f"{error.args[0]} ({error.hint})" if error.hint else str(error.args[0])
    except LLMException as error:
        return f"{type(error).__name__} {error}"
    return "moved"


class AtOnce:
    """Each layer is final already."""

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


async def one_sided() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        for model, desc in enumerate((HOST, DEVICE)):
            await prompt.blocks(desc, model)
        await prompt.contiguous(HOST, [CacheKey(1, i) for i in range(4)])
        mine = {desc.placement: await decoder.blocks(desc, i) for i, desc in enumerate((HOST, DEVICE))}
        slots = await decoder.contiguous(DEVICE, [CacheKey(2, i) for i in range(4)])
        await decoder.datadist.link_clusters([cluster_info(prompt)])
        manager = decoder.datadist.cache_manager
        for _ in range(2):  # once asked of the peer, once known
            for mine_is in (Placement.DEVICE, Placement.HOST):
                print(await said(manager.pull_blocks(BlocksCacheKey(1, 0), mine[mine_is], [1], [2])))
                print(await said(manager.push_blocks(BlocksCacheKey(1, 0), mine[mine_is], [1], [2])))
        for _ in range(2):
            layered = manager.transfer_cache_async(
                mine[Placement.DEVICE],
                AtOnce(),
                [TransferWithCacheKeyConfig(BlocksCacheKey(1, 0), range(1), range(1))],
                [1],
                [2],
            )
            print(await said(layered))
        print(await said(manager.pull_cache(CacheKey(1, 2), slots, 1)))
        print(await said(manager.pull_blocks(BlocksCacheKey(1, 1), mine[Placement.DEVICE], [1], [2])))
        print(await said(manager.push_blocks(BlocksCacheKey(1, 1), mine[Placement.DEVICE], [1], [2])))


async def asking() -> None:
    options: dict[str, Any] = {"enable_remote_cache_accessible": False}
    async with open_cluster(1, **options) as prompt, open_cluster(2, device_id=1, **options) as decoder:
        await prompt.blocks(DEVICE)
        mine = [await decoder.blocks(desc, model) for model, desc in enumerate((HOST, DEVICE))]
        await decoder.datadist.link_clusters([cluster_info(prompt)])
        for cache in mine:
            print(await said(decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2])))


CURE = (
    "is in HOST memory: a link over HCCS reaches a peer's DEVICE memory only (make that cache with Placement.DEVICE, or set "
    "HCCL_INTRA_ROCE_ENABLE=1 at both ends)"
)
MOVED = {"one_sided": ["moved"] * 13, "asking": ["moved"] * 2}
REFUSED = {
    "one_sided": [f"cache 1 of cluster 1 {CURE}"] * 10 + [f"cache 3 of cluster 1 {CURE}"] + ["moved"] * 2,
    "asking": [f"cache 1 of this cluster, which the peer is asked to fill, {CURE}", "moved"],
}


@pytest.mark.parametrize(
    ("strict", "words"),
    [("", MOVED), ("roce", MOVED), ("hccs", REFUSED), ("aicpu", REFUSED)],
    ids=["free", "roce", "hccs", "aicpu"],
)
@pytest.mark.parametrize("mode", ["one_sided", "asking"])
async def test_a_peers_host_memory(mode: str, strict: str, words: dict[str, list[str]]) -> None:
    process = await children.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        mode,
        env={**os.environ, "SOFTNPU_STRICT": strict},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.decode().splitlines() == words[mode]


if __name__ == "__main__":
    asyncio.run({"one_sided": one_sided, "asking": asking}[sys.argv[1]]())
