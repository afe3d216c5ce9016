"""Handles of transfers whose checksums are compared: only damaged blocks have failed."""

from __future__ import annotations

import pytest

from aiodatadist import DataCorrupted
from aiodatadist.testing import soft_fault, soft_faults_cleared
from tests.blocking.pairs import KEY, Pair, linked_pair


@pytest.mark.parametrize("is_option", [True, False])
def test_a_handle_names_the_damaged_blocks_alone(is_option: bool) -> None:
    with linked_pair(transfer_checksum=is_option) as pair, soft_faults_cleared():
        checksum = None if is_option else True
        manager, cache = pair.target.manager, pair.target.cache
        soft_fault("HcclBatchGet:flip=-1@2")  # of the second window, which ends with block 4
        pull = manager.submit_pull_blocks(KEY, cache, [1, 5, 9], [2, 8, 4], checksum=checksum)
        assert pull.wait(20)
        assert (pull.poll(), pull.failed_blocks()) == ("failed", [4])
        assert isinstance(pull.exception(), DataCorrupted)
        again = manager.submit_pull_blocks(KEY, cache, [9], pull.failed_blocks(), checksum=checksum)
        assert again.wait(20)
        assert (again.poll(), again.failed_blocks()) == ("done", [])
        pair.target.check({2: (0, 1), 8: (0, 5), 4: (0, 9)})
        assert pushed(pair, checksum) == [3]


def pushed(pair: Pair, checksum: bool | None) -> list[int]:
    """Return the blocks of the peer that a damaged push names."""
    soft_fault("HcclBatchPut:flip=0")
    push = pair.target.manager.submit_push_blocks(KEY, pair.target.cache, [0, 7], [3, 6], checksum=checksum)
    assert push.wait(20)
    return push.failed_blocks()


def test_a_call_that_waits_raises_it() -> None:
    with linked_pair() as pair, soft_faults_cleared():
        soft_fault("HcclBatchGet:flip=0")
        with pytest.raises(DataCorrupted) as caught:
            pair.target.manager.pull_blocks(KEY, pair.target.cache, [1], [2], checksum=True)
        assert caught.value.blocks == (2,)
