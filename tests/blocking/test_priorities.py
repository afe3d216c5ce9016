"""Submitted transfers with a priority and a deadline, which counts from the submission."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aiodatadist.blocking import BlocksCacheKey, Handle, HandleState, TransferPriority, TransferWithCacheKeyConfig
from aiodatadist.errors import LLMStatusCode, ParamInvalid, TransferTimeout
from aiodatadist.testing import soft_fault, soft_faults_cleared, soft_hold
from tests.blocking.pairs import EVERYTHING, KEY, Pair

EVERY_OTHER = EVERYTHING[::2]


def pull(pair: Pair, blocks: list[int], **options: Any) -> Handle:
    return pair.target.manager.submit_pull_blocks(KEY, pair.target.cache, blocks, blocks, **options)


def push(pair: Pair, blocks: list[int], **options: Any) -> Handle:
    return pair.target.manager.submit_push_blocks(BlocksCacheKey(1), pair.target.cache, blocks, blocks, **options)


def test_the_most_urgent_ends_first(pair: Pair) -> None:
    assert pull(pair, [1]).wait(10)
    with soft_hold("HcclBatchGet") as copy:
        first = pull(pair, EVERY_OTHER, tag="first")
        anyio.run(copy.arrived)
        handles = [pull(pair, EVERY_OTHER, tag=each.name, priority=each) for each in reversed(TransferPriority)]
        assert handles[-1].wait(10), "it passes what stands still"
        assert first.poll() is HandleState.RUNNING
        copy.release()
        assert all(handle.wait(10) for handle in (first, *handles))
    tags = [handle.tag for handle in pair.target.manager.drain()][1:]
    assert tags == ["CRITICAL", "first", "NORMAL", "BACKGROUND"]


@pytest.mark.parametrize("submit", [pull, push])
def test_a_deadline_counts_from_the_submission(pair: Pair, submit: Any) -> None:
    assert submit(pair, [1]).wait(10)
    with soft_faults_cleared():
        soft_fault("HcclBatchGet:hang@*;HcclBatchPut:hang@*")
        handles = [submit(pair, EVERY_OTHER, deadline=0.2) for _ in range(20)]
        assert all(handle.wait(10) for handle in handles)
    for handle in handles:
        assert handle.poll() is HandleState.FAILED
        assert isinstance(handle.exception(), TransferTimeout)
        assert handle.failed_blocks() == EVERY_OTHER
    assert submit(pair, [1]).wait(10)


def test_layers_have_a_deadline_too(pair: Pair) -> None:
    config = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(2), range(2))
    handle = pair.target.manager.submit_layers(
        pair.target.cache, [config], [1], [1], priority=TransferPriority.CRITICAL, deadline=0.1
    )
    assert handle.wait(10)
    error = handle.exception()
    assert isinstance(error, TransferTimeout)
    assert error.status_code is LLMStatusCode.LLM_TIMEOUT


def test_what_is_wrong_is_refused_before_it_is_submitted(pair: Pair) -> None:
    with pytest.raises(TypeError, match="priority is 1"):
        pull(pair, [1], priority=1)
    with pytest.raises(ParamInvalid, match="deadline is 0"):
        push(pair, [1], deadline=0)
    assert pair.target.manager.drain() == []
