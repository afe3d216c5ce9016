"""The run over TCP leaves out tests that exist, and faults of softnpu become those of programs over TCP."""

from __future__ import annotations

import pytest

from aiodatadist import BlocksCacheKey, CacheDesc, DataType, ParamInvalid, TransferError
from aiodatadist.testing import linked_pair, soft_fault, soft_faults_cleared, soft_hold
from tests.lanes import ROOT
from tests.over_tcp import FILES, LEFT_OUT, SHORT

DESC = CacheDesc(2, [8, 4096], DataType.DT_UINT8)


def test_what_is_named_exists() -> None:
    for name in (*FILES, *SHORT):
        assert (ROOT / name).exists(), name
    for file, tests in LEFT_OUT.items():
        assert any(file.startswith(name) for name in FILES), file
        text = (ROOT / file).read_text()
        for test in tests:
            function = test.split("::")[-1].partition("[")[0]
            assert not test or f"def {function}(" in text, test


@pytest.mark.parametrize("fault", ["tcp_get:flip", "tcp_put:late=3", "tcp_get:exec=3@x", "tcp_put:hang@1@2"])
def test_a_fault_that_nothing_over_tcp_has_is_refused(fault: str) -> None:
    with pytest.raises(ParamInvalid, match="does not understand"):
        soft_fault(fault)


async def test_transfers_over_tcp_are_held_and_fail_as_told() -> None:
    async with linked_pair(DESC, transport="tcp") as (_, decoder, _, cache):
        manager = decoder.datadist.cache_manager
        with soft_faults_cleared():
            with soft_hold("tcp_get", at="half") as hold:
                pull = manager.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
                await hold.arrived()
                assert not pull.done()
            assert (await pull).bytes == 2 * 4096
            hold.release()
            soft_fault("tcp_get:exec=507053@2;tcp_put:hang@2")
            await manager.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
            with pytest.raises(TransferError, match="step 1 of the transfer returned 507053"):
                await manager.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
