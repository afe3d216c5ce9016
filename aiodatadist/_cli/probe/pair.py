"""The near end of a step with two devices: its memory and channels, and its requests to the far end."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiodatadist._cli.probe.bench import Bench, Memory, pattern
from aiodatadist._cli.probe.channel import Channel, Registered, init_communicator
from aiodatadist._cli.probe.endpoint import endpoint_of
from aiodatadist._cli.probe.lines import Lines
from aiodatadist._native.library import Handle, ffi, ring
from aiodatadist._transport.communicator import EXPANSION_HOST
from aiodatadist._transport.contract import Endpoint
from aiodatadist._transport.hccl import rank_table
from aiodatadist._transport.link_kind import LinkKind, link_kind

PREPARE_SECONDS = 30
FAR_RANK = 1

Item = tuple[int, int, int]
"""A local address, a remote address, and a number of bytes."""


class FarEndFailed(Exception):
    """The far end could not do what the step requires."""


@dataclass
class Pair:
    """The two devices of a step, as the near end uses them."""

    bench: Bench
    lines: Lines
    mine: Endpoint
    theirs: Endpoint
    registered: Registered = field(init=False)

    def __post_init__(self) -> None:
        self.registered = Registered(self.bench)

    @property
    def kind(self) -> LinkKind:
        return link_kind(self.bench.calls.runtime, self.mine, self.theirs)

    @property
    def is_roce(self) -> bool:
        return self.kind is LinkKind.ROCE

    @property
    def table(self) -> str:
        return rank_table((self.mine, self.theirs))

    # ---- the far end ----

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        """Send a request to the far end.

        Raises:
            FarEndFailed: if it failed.
        """
        self.lines.send(do=do, **words)
        return self.answer(do)

    def answer(self, do: str) -> dict[str, Any]:
        try:
            answer = self.lines.receive()
        except ConnectionError as error:
            raise FarEndFailed(f"the far end is gone: it was to {do}") from error
        if "error" in answer:
            raise FarEndFailed(f"the far end could not {do}: {answer['error']}")
        return answer

    def lend(self, name: str, size: int, *, host: bool = False, seed: int = 1) -> int:
        """Return the address of the far end's memory, filled with a pattern."""
        return int(self.ask("lend", name=name, size=size, host=host, seed=seed)["address"])

    def far_bytes(self, name: str, count: int, at: int = 0) -> bytes:
        return bytes.fromhex(self.ask("read", name=name, at=at, count=count)["data"])

    def far_holds(self, name: str, seed: int, size: int) -> bool:
        return bool(self.ask("digest", name=name)["digest"] == hashlib.sha256(pattern(seed, size)).hexdigest())

    # ---- channels ----

    def begin(self, names: Sequence[str], *memories: Memory, expansion: int = EXPANSION_HOST) -> tuple[str, Channel]:
        """Open a communicator at both ends, with the memory of each bound."""
        name = f"probe-{os.urandom(6).hex()}"
        self.ask("join", channel=name, table=self.table, names=list(names), expansion=expansion)
        channel = Channel(self.bench, init_communicator(self.bench, name, self.table, 0, expansion))
        for memory in memories:
            channel.bind(self.registered.handle_of(memory))
        return name, channel

    def prepare(self, name: str, channel: Channel, seconds: int = PREPARE_SECONDS) -> tuple[int, int]:
        """Prepare both ends at the same time, and return their codes."""
        self.lines.send(do="prepare", channel=name, seconds=seconds)
        code = channel.prepare(seconds)
        return code, int(self.answer("prepare")["code"])

    def connect(self, names: Sequence[str], *memories: Memory, expansion: int = EXPANSION_HOST) -> tuple[str, Channel]:
        """Open a communicator, and prepare it.

        Raises:
            FarEndFailed: if it cannot be prepared.
        """
        name, channel = self.begin(names, *memories, expansion=expansion)
        codes = self.prepare(name, channel)
        if any(codes):
            raise FarEndFailed(f"HcclCommPrepare returned {codes[0]}, at the far end {codes[1]}")
        return name, channel

    def disconnect(self, name: str, channel: Channel) -> list[int]:
        return [*channel.close(), *self.ask("leave", channel=name)["codes"]]

    # ---- transfers ----

    def get(self, channel: Channel, stream: Handle, items: Sequence[Item], rank: int = FAR_RANK) -> int:
        return self._move("HcclBatchGet", channel, stream, items, rank)

    def put(self, channel: Channel, stream: Handle, items: Sequence[Item], rank: int = FAR_RANK) -> int:
        return self._move("HcclBatchPut", channel, stream, items, rank)

    def _move(self, function: str, channel: Channel, stream: Handle, items: Sequence[Item], rank: int) -> int:
        note = f"rank {rank}, {len(items)} items, {sum(size for _, _, size in items)} bytes"
        return self.bench.calls.code(function, channel.comm, rank, described(items), len(items), stream, note=note)


def described(items: Sequence[Item]) -> Handle:
    """Return the items as ``HcclOneSideOpDesc[]``."""
    found = ffi.new("HcclOneSideOpDesc[]", len(items))
    for at, (local, remote, size) in zip(found, items, strict=True):
        at.localAddr, at.remoteAddr = ffi.cast("void *", local), ffi.cast("void *", remote)
        at.count, at.dataType = size, ring.HCCL_DATA_TYPE_UINT8
    return found


def open_pair(bench: Bench, link: socket.socket) -> Pair:
    """Wait until the far end is ready.

    Raises:
        FarEndFailed: if it cannot use its device.
    """
    bench.open()
    lines = Lines(link)
    mine = endpoint_of(bench)
    pair = Pair(bench, lines, mine, mine)
    theirs = pair.answer("begin")["endpoint"]
    pair.theirs = Endpoint(**theirs)
    return pair
