"""The subject of one row of a report, as a value that both ends have: which blocks travel, and what they hold."""

from __future__ import annotations

import random
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator

from aiodatadist import CacheDesc, DataType, Placement


class Op(StrEnum):
    """The operation that is measured.

    The initiator pulls from the owner's cache, or writes into it; a copy stays inside the initiator.
    """

    PULL = "pull"
    PUSH = "push"
    LAYERED = "layered"
    COPY = "copy"


class MemoryKind(StrEnum):
    """The memory of both caches: the library's DEVICE memory, the caller's memory, or the library's pinned HOST memory."""

    POOL = "pool"
    USER = "user"
    HOST = "host"


class Moves(NamedTuple):
    """The blocks of one transfer, of every tensor: ``sources[i]`` to ``targets[i]``."""

    sources: list[int]
    targets: list[int]


class Case(BaseModel):
    """The subject of one row.

    Attributes:
        block: bytes of one block of one tensor.
        blocks: blocks of each tensor of either cache.
        layers: layers of two tensors each.
        batch: blocks of each tensor that one transfer moves.
        concurrency: transfers under way at the same time, each with its own blocks.
        seed: seed for choosing the blocks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    op: Op
    memory: MemoryKind
    block: PositiveInt
    blocks: PositiveInt
    layers: PositiveInt
    batch: PositiveInt
    concurrency: PositiveInt
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = 2 * self.batch * self.concurrency
        if self.blocks < needed:
            raise ValueError(
                f"blocks is {self.blocks}: {self.concurrency} transfers of {self.batch} blocks, no two of them "
                f"neighbours, need {needed}"
            )
        return self

    @property
    def tensors(self) -> int:
        return 2 * self.layers

    @property
    def pieces(self) -> int:
        """The number of blocks that one transfer moves, over all tensors."""
        return self.batch * self.tensors

    @property
    def nbytes(self) -> int:
        """The bytes of one transfer."""
        return self.pieces * self.block

    @property
    def desc(self) -> CacheDesc:
        placement = Placement.HOST if self.memory is MemoryKind.HOST else Placement.DEVICE
        return CacheDesc(self.tensors, [self.blocks, self.block], DataType.DT_UINT8, placement)

    @cached_property
    def moves(self) -> list[Moves]:
        """Return the moves of each of the concurrent transfers.

        No block is chosen twice, and no two blocks of one side are adjacent; a copy's targets lie between its sources.
        """
        sources, targets = self._shuffled(1, 0), self._shuffled(2, self.op is Op.COPY)
        batches = range(0, self.batch * self.concurrency, self.batch)
        return [Moves(sources[i : i + self.batch], targets[i : i + self.batch]) for i in batches]

    def _shuffled(self, salt: int, first: int) -> list[int]:
        chosen = list(range(first, self.blocks - self.blocks % 2, 2))
        random.Random(2 * self.seed + salt).shuffle(chosen)
        return chosen
