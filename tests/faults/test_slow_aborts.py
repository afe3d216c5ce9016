"""An abort may take the vendor's library a minute: what is made of streams waits for as long as its streams do."""

from __future__ import annotations

import asyncio

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, EventLayerSynchronizer, TransferWithCacheKeyConfig
from aiodatadist._context_caching.transfer.handle import QUIESCE_SECONDS
from aiodatadist._device import StreamLimits, TransferState
from aiodatadist._testing.views import transfer_of
from aiodatadist.testing import linked_pair, soft_hold

LAYERS = range(4)
DESC = CacheDesc(8, [16, 1024], DataType.DT_UINT8)


async def test_layered_transfer_waits_for_an_abort_of_any_length() -> None:
    async with linked_pair(DESC) as (prompt, _, mine, _theirs):
        gates = EventLayerSynchronizer(prompt.datadist.device, len(LAYERS))
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2), LAYERS, LAYERS)
        with soft_hold("aclrtWaitAndResetNotify") as gate, soft_hold("aclrtStreamAbort") as abort:
            layered = prompt.datadist.cache_manager.transfer_cache_async(mine, gates, [config], [1], [1])
            assert transfer_of(layered).quiesce_seconds > StreamLimits().quiesce
            waiting = asyncio.ensure_future(layered)
            await gate.arrived()
            waiting.cancel()
            await abort.arrived()
            assert not layered.done()
            abort.release()
            gate.release()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert transfer_of(layered).state is TransferState.CANCELLED


def test_context_caching_waits_for_its_streams() -> None:
    assert StreamLimits().quiesce < QUIESCE_SECONDS
