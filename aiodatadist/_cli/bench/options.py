"""The options of a benchmark, as values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from aiodatadist._cli.bench.figures import MEMCPY
from aiodatadist._cli.bench.initiator import Lengths
from aiodatadist._cli.bench.sizes import size_text
from aiodatadist._cli.bench.workload import Case, MemoryKind, Op
from aiodatadist._cli.kit.errors import wrong_input
from aiodatadist._cli.kit.place import Place

TOTAL = 128 << 20
"""Bytes that all concurrent transfers move together if ``--batch`` is not given."""


class BenchRole(StrEnum):
    """The end that this process is."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True)
class BenchOptions:
    """See ``aiodatadist bench --help``.

    Attributes:
        places: devices of the owner and of the initiator, or of the only role.
        owner_arguments: arguments of the command that starts the owner of ``BOTH``.
        until_stdin_closes: True if the owner ends with its stdin, because another process started it.
    """

    role: BenchRole = BenchRole.BOTH
    listen: str | None = None
    peer: tuple[str, int] | None = None
    auth_key: bytes | None = None
    ops: tuple[Op, ...] = (Op.PULL,)
    memories: tuple[MemoryKind, ...] = (MemoryKind.POOL,)
    blocks_of: tuple[int, ...] = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20)
    blocks: int | None = None
    layers: int = 4
    batch: int | None = None
    concurrency: int = 1
    seed: int = 0
    transport: Literal["auto", "hccl", "tcp", "loopback"] = "auto"
    loop: Literal["asyncio", "uvloop"] = "asyncio"
    lengths: Lengths = field(default_factory=Lengths)
    places: list[Place] = field(default_factory=lambda: [Place(device=0), Place(device=1)])
    owner_arguments: list[str] = field(default_factory=list)
    against: tuple[str, ...] = ()
    checksum: bool = False
    json: Path | None = None
    compare: Path | None = None
    plot: Path | None = None
    until_stdin_closes: bool = False

    @property
    def rows_of_a_case(self) -> int:
        return 1 + self.checksum + len(self.against)

    def cases(self) -> list[Case]:
        """Return a case for each row.

        Cases of one operation and kind of memory are adjacent, because they share a line in ``--plot``.

        Raises:
            CommandError: if a case is not possible.
        """
        return [
            self._case(op, memory, block) for op in self.ops for memory in self.memories for block in self.blocks_of
        ]

    def _case(self, op: Op, memory: MemoryKind, block: int) -> Case:
        if set(self.against) - {MEMCPY} and (op not in {Op.PULL, Op.PUSH} or self.concurrency > 1):
            raise wrong_input(
                "--against measures pulls and pushes, one at a time: --op pull,push --concurrency 1; memcpy goes with all"
            )
        if self.checksum and op not in {Op.PULL, Op.PUSH}:
            raise wrong_input("--checksum measures pulls and pushes: --op pull,push")
        if op is Op.LAYERED and memory is MemoryKind.HOST:
            raise wrong_input("--op layered does not go with --memory host: layered transfers start from device memory")
        batch = self.batch
        if batch is None:
            batch = TOTAL // (2 * self.layers * block * self.concurrency)
            if batch == 0:
                raise wrong_input(
                    f"--block {size_text(block)}: {self.concurrency} transfers of one block of {2 * self.layers} tensors are "
                    f"more than {size_text(TOTAL)}; choose fewer --layers, less --concurrency, or give --batch"
                )
        blocks = 2 * batch * self.concurrency if self.blocks is None else self.blocks
        try:
            return Case(
                op=op, memory=memory, block=block, blocks=blocks, layers=self.layers, batch=batch,
                concurrency=self.concurrency, seed=self.seed,
            )  # fmt: skip
        except ValidationError as error:
            raise wrong_input("; ".join(f"--{each['ctx']['error']}" for each in error.errors())) from None

    def as_initiator(self) -> BenchOptions:
        """Return the options of the initiator, without the owner's ``--listen``."""
        return replace(self, listen=None)
