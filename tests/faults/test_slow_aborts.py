"""An abort may take the vendor's library a minute: what is made of streams waits for as long as its streams do."""

from __future__ import annotations

import anyio
import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, EventLayerSynchronizer, TransferWithCacheKeyConfig
from aiodatadist.context_caching.transfer.handle import QUIESCE_SECONDS
from aiodatadist.device import StreamLimits, TransferState
from aiodatadist.testing import linked_pair, soft_fault, soft_faults_cleared

LAYERS = range(4)
DESC = CacheDesc(8, [16, 1024], DataType.DT_UINT8)


async def stop_while_an_abort_takes(milliseconds: int) -> None:
    async with linked_pair(DESC) as (prompt, _, mine, _theirs):
        gates = EventLayerSynchronizer(prompt.datadist.device, len(LAYERS))
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), LAYERS, LAYERS)
        with soft_faults_cleared():
            soft_fault(f"aclrtStreamAbort:delay={milliseconds}")
            layered = prompt.datadist.cache_manager.transfer_cache_async(mine, gates, [config], [1], [1])
            assert layered._transfer.quiesce_seconds > StreamLimits().quiesce
            with anyio.move_on_after(0.1):
                await layered
        assert layered._transfer.state is TransferState.CANCELLED


async def test_layered_transfer_waits_for_its_streams() -> None:
    await stop_while_an_abort_takes(100)


@pytest.mark.nightly
async def test_layered_transfer_waits_for_an_abort_of_eight_seconds() -> None:
    await stop_while_an_abort_takes(8000)


def test_context_caching_waits_for_its_streams() -> None:
    assert StreamLimits().quiesce < QUIESCE_SECONDS
