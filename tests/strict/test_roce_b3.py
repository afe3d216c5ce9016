"""B3: a batch with a bad item is refused after the items before it were posted.

[src hccl_one_sided_conn.cc:328-354, 357-383].
"""

from __future__ import annotations

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, LinkError, LLMException
from aiodatadist._native.library import SOFTNPU, ffi
from aiodatadist.testing import open_cluster, pattern
from tests.strict import runner

DESC = CacheDesc(4, [16, 1024], DataType.DT_UINT8)
FIRST, WHOLE = range(1), range(2)
OTHER_USE = b"\x77" * DESC.stride


async def refused_is_over() -> None:
    softnpu = ffi.dlopen(str(SOFTNPU))
    async with open_cluster(1, device_id=0) as one, open_cluster(2, device_id=1) as two:
        good = one.datadist.device.allocate(3 * DESC.size)
        bad = ffi.new("char[]", DESC.size)
        last = int(ffi.cast("uintptr_t", bad))
        addresses = [good.address + i * DESC.size for i in range(3)] + [last]
        manager = one.datadist.cache_manager
        mine = await manager.register_blocks_cache(DESC, addresses, BlocksCacheKey(1), True)
        await two.blocks(DESC)
        await runner.link(one, two)
        await manager.pull_blocks(BlocksCacheKey(2), mine, [1], [1])
        assert softnpu.softnpu_release(bad, DESC.size) == 0  # known no longer: the last item of a batch is a bad one
        with pytest.raises(LLMException):
            await manager.pull_blocks(BlocksCacheKey(2), mine, [5], [5])
        assert softnpu.softnpu_adopt(bad, DESC.size, 1) == 0
        view, at = good.view(), 5 * DESC.stride
        view[at : at + DESC.stride] = OTHER_USE
        try:
            await manager.pull_blocks(BlocksCacheKey(2), mine, [6], [6])
        except LinkError:  # the next channel was being opened while that tensor was not known
            await manager.pull_blocks(BlocksCacheKey(2), mine, [6], [6])
        assert bytes(view[6 * DESC.stride : 7 * DESC.stride]) == pattern(2, 0, 6, DESC.stride)
        assert bytes(view[at : at + DESC.stride]) == OTHER_USE


def test_a_refused_pull_writes_nothing() -> None:
    runner.run("roce", refused_is_over)
