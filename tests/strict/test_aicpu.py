"""HCCL unfolds batches on an A3's device unless the communicator's configuration says HOST.

Then an abort stops no copy, and one notify tells of all ends.
[src externalinput.cc:1706-1732, hccl_one_sided_service.cc:336-348, 1021-1060].
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import anyio
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMStatusCode,
    TransferPriority,
)
from aiodatadist.testing import Cluster
from tests.held import PULL, PUSH, each_held, let_pass, turns
from tests.strict import runner

TENSORS = range(2)
WORKERS = 8
DESC = CacheDesc(2, [WORKERS, 96 << 10], DataType.DT_UINT8)
ROUNDS = 25
EMPTY, OTHER_USE = 0, 0xEE
"""What a destination holds before; and what an owner puts where a cancelled transfer was."""


@dataclass
class Side:
    """A cluster, and the block of each worker in its cache."""

    cluster: Cluster
    cache: Cache
    peer: int

    def blocks(self, block: int) -> list[memoryview]:
        memory = self.cluster.memory(self.cache)
        starts = [address - memory.address + block * DESC.stride for address in self.cache.tensor_addrs]
        return [memory.view()[at : at + DESC.stride] for at in starts]

    def fill(self, block: int, value: int) -> None:
        for view in self.blocks(block):
            view[:] = bytes([value]) * DESC.stride

    def values(self, block: int) -> set[int]:
        return {value for view in self.blocks(block) for value in set(bytes(view))}


@dataclass
class Worker:
    """Pulls and pushes one block, of which it changes the contents at both ends; half of its transfers are cancelled.

    Attributes:
        wrong: one line for each byte comparison that failed.
    """

    block: int
    near: Side
    far: Side
    dice: random.Random
    wrong: list[str] = field(default_factory=list)

    async def run(self) -> None:
        for number in range(ROUNDS):
            is_pull, is_cancelled = self.dice.random() < 0.5, self.dice.random() < 0.5
            sent = 1 + number % 200
            source, target = (self.far, self.near) if is_pull else (self.near, self.far)
            source.fill(self.block, sent)
            target.fill(self.block, EMPTY)
            manager = self.near.cluster.datadist.cache_manager
            move = manager.pull_blocks if is_pull else manager.push_blocks
            priority = self.dice.choice([TransferPriority.CRITICAL, TransferPriority.NORMAL])
            task = move(BlocksCacheKey(self.near.peer), self.near.cache, [self.block], [self.block], priority=priority)
            what = f"round {number}: {'pull' if is_pull else 'push'}"
            if is_cancelled:
                await turns(self.dice.randrange(40))
                task.cancel()
            if await task.synchronize() is LLMStatusCode.LLM_SUCCESS:
                self.expect(target, {sent}, f"{what} was reported before it landed")
            elif is_pull:
                target.fill(self.block, OTHER_USE)
                await let_pass(self.dice.random() * 0.01)
                self.expect(target, {OTHER_USE}, f"{what} wrote after it was cancelled")
            else:
                source.fill(self.block, OTHER_USE)
                await let_pass(self.dice.random() * 0.01)
                if OTHER_USE in target.values(self.block):
                    self.wrong.append(f"{what} sent after it was cancelled")

    def expect(self, side: Side, values: set[int], what: str) -> None:
        if (found := side.values(self.block)) != values:
            self.wrong.append(f"{what}: {sorted(found)[:4]}")


async def nothing_is_corrupt() -> None:
    """Pull and push at both ends at once, in two priorities, while some copies stand still for turns of the loop."""
    seed = int(os.environ.get("AIODATADIST_SEED", "0")) or random.randrange(1, 1 << 32)
    dice = random.Random(seed)
    async with runner.pair(DESC) as (one, two, mine, theirs):
        ends = Side(one, mine, 2), Side(two, theirs, 1)
        workers = [
            Worker(block, *(ends if block % 2 else ends[::-1]), random.Random(dice.random()))
            for block in range(WORKERS)
        ]

        def pause() -> int:
            return dice.randrange(60)

        async with each_held(PULL, pause), each_held(PUSH, pause), anyio.create_task_group() as group:
            for worker in workers:
                group.start_soon(worker.run)
    wrong = [line for worker in workers for line in worker.wrong]
    assert not wrong, f"seed {seed}: {len(wrong)} results are corrupt: {wrong[:5]}"


@pytest.mark.parametrize("mode", ["", "AIV"])
def test_pulls_pushes_and_cancellations_corrupt_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says. AIV, which guides for serving engines set, leaves the device's mode on."""
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", mode)
    runner.run("aicpu", nothing_is_corrupt)


def test_nor_where_the_library_does_not_know_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then HCCS has RoCE's rules: one stream for a link, and a channel that is closed after a transfer was stopped."""
    monkeypatch.setenv("SOFTNPU_FAULTS", "HcclGetCommConfigCapability:fail=4@*")
    runner.run("aicpu", nothing_is_corrupt)
