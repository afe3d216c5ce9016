"""Acceptance check 6 of ContextCaching: what is saved into a full pool makes room for itself.

Apart from the others, since this process can have one Mooncake store at a time.
"""

from __future__ import annotations

import anyio

from tests.context_caching.conftest import SmallStore
from tests.context_caching.kit import BLOCK, Kv, block_slots, by_slots, opened


async def test_a_full_pool_keeps_the_newest(small_store: SmallStore) -> None:
    kv = Kv(rows=[[(small_store.nbytes // 8 // BLOCK // 2,)]], blocks=20, dtype="int16")  # of which 8 fit
    async with small_store.open(small_store.nbytes) as store, opened(await store.client(), kv) as cache:
        hashes = list(range(20))
        saved = kv.rows(block_slots([19]))
        result = await cache.save(hashes, **by_slots(range(20)), timeout=30)
        assert result.success == 20 or small_store.rejects
        with anyio.fail_after(20):
            while not (await cache.exists([19])).success:
                assert small_store.rejects
                await cache.save([19], **by_slots([19]))
        kv.wipe()
        assert (await cache.load([19], **by_slots([0]))).success == 1
        assert kv.rows(block_slots([0])) == saved
        present = [h for h in hashes if (await cache.exists([h])).success]
        if small_store.is_exact:
            assert present == hashes[-len(present) :]
            assert 5 <= len(present) <= 8
        assert len(present) < 16
