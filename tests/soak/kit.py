"""Parts of all soaks: settings, contents that say where they belong, and what the process holds."""

from __future__ import annotations

import argparse
import gc
import os
import random
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from aiodatadist import CacheDesc, DataType
from aiodatadist.cli.chaos.faults import Hog, spin

__all__ = [
    "DOORS", "MODES", "STAMPED", "Footprint", "Hog", "Settings", "chosen", "misplaced", "parse", "spin", "stamp", "value",
]  # fmt: skip

DOORS = ("await", "blocking", "v1", "context", "demo")
MODES = ("idle", "load", "busy")
STAMPED = 4
"""Blocks of each cache that hold something: the rest of a pool of production size is never touched."""


@dataclass(frozen=True)
class Settings:
    """Settings of a soak.

    Attributes:
        peers, processes: clusters to link to, and processes that they live in.
        pool: bytes of each cluster's memory pool.
        layers, blocks, block_bytes: shape of each cache; a layer is two tensors.
        interval: milliseconds between two heartbeats.
    """

    door: str
    mode: str
    seconds: float = 600.0
    peers: int = 64
    processes: int = 4
    pool: int = 16 << 30
    layers: int = 80
    blocks: int = 4096
    block_bytes: int = 24 << 10
    interval: int = 2000
    loop: str = "asyncio"
    seed: int = 0

    @property
    def desc(self) -> CacheDesc:
        return CacheDesc(2 * self.layers, [self.blocks, self.block_bytes], DataType.DT_UINT8)

    @property
    def pool_cfg(self) -> str:
        return f'{{"memory_size": {self.pool}}}'

    def arguments(self) -> list[str]:
        values = asdict(self)
        options = [
            f"--{name.replace('_', '-')}={value}" for name, value in values.items() if name not in {"door", "mode"}
        ]
        return [self.door, self.mode, *options]


def parse(arguments: list[str] | None = None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("door", choices=DOORS)
    parser.add_argument("mode", choices=MODES)
    for name, value in asdict(Settings("", "")).items():
        if name not in {"door", "mode"}:
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    values = vars(found)
    return Settings(**{name: values[name] for name in asdict(Settings("", ""))}), found


def value(owner: int, tensor: int, block: int) -> int:
    """Return the value of every byte of a block."""
    return 1 + (owner * 61 + tensor * 7 + block) % 251


def stamp(arrays: list[NDArray[Any]], owner: int, blocks: range) -> None:
    for tensor, array in enumerate(arrays):
        for block in blocks:
            array[block] = value(owner, tensor, block)


def misplaced(arrays: list[NDArray[Any]], owner: int, source: list[int], target: list[int]) -> list[tuple[int, int]]:
    """(tensor, block) of those that do not hold what the owner's had."""
    return [
        (tensor, at)
        for tensor, array in enumerate(arrays)
        for block, at in zip(source, target, strict=True)
        if not (array[at] == value(owner, tensor, block)).all()
    ]


@dataclass(frozen=True)
class Footprint:
    """Resources that a process holds."""

    files: int
    threads: int
    resident: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            sum(1 for _ in Path("/proc/self/fd").iterdir()),
            threading.active_count(),
            pages * os.sysconf("SC_PAGE_SIZE"),
        )


def chosen(chance: random.Random, count: int, among: range) -> list[int]:
    return chance.sample(among, count)
