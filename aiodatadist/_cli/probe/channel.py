"""An end of a one-sided communicator of two ranks: the calls in the order that HCCL requires."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiodatadist._cli.probe.memory import registration
from aiodatadist._native.library import Handle, ffi
from aiodatadist._transport.communicator import EXPANSION_HOST, communicator_config
from aiodatadist._transport.contract import DEFAULT_RDMA

if TYPE_CHECKING:
    from aiodatadist._cli.probe.bench import Bench, Memory

STAGING_MIB = 200


def init_communicator(bench: Bench, name: str, table: str, rank: int, expansion: int = EXPANSION_HOST) -> Handle:
    """Create a communicator without waiting for the peer.

    Raises:
        UnexpectedCode: if it cannot be created.
    """
    config = communicator_config(name, STAGING_MIB, DEFAULT_RDMA, expansion)
    made = ffi.new("HcclComm *")
    bench.calls.ok("HcclCommInitClusterInfoMemConfig", table.encode(), rank, config, made, note=f"2 ranks, rank {rank}")
    return made[0]


@dataclass
class Registered:
    """Memory that is registered with HCCL, for all channels of a process."""

    bench: Bench
    handles: dict[int, Handle] = field(default_factory=dict)

    def handle_of(self, memory: Memory) -> Handle:
        if memory.address not in self.handles:
            kind = "host" if memory.is_host else "device"
            code, handle = registration(self.bench, memory.address, memory.size, int(memory.is_host), kind)
            if code:
                raise OSError(f"HcclRegisterGlobalMem returned {code}")
            self.handles[memory.address] = handle
        return self.handles[memory.address]

    def end(self) -> list[int]:
        codes = [self.bench.calls.code("HcclDeregisterGlobalMem", handle) for handle in self.handles.values()]
        self.handles.clear()
        return codes


@dataclass
class Channel:
    """An end of a communicator."""

    bench: Bench
    comm: Handle
    bound: list[Handle] = field(default_factory=list)

    def bind(self, handle: Handle) -> None:
        self.bench.calls.ok("HcclCommBindMem", self.comm, handle)
        self.bound.append(handle)

    def prepare(self, seconds: int) -> int:
        how = ffi.new("HcclPrepareConfig *")
        return self.bench.calls.code("HcclCommPrepare", self.comm, how, seconds, note=f"{seconds} s")

    def close(self) -> list[int]:
        """Unbind the memory, destroy the communicator, and return the codes."""
        codes = [self.bench.calls.code("HcclCommUnbindMem", self.comm, handle) for handle in self.bound]
        self.bound.clear()
        return [*codes, self.bench.calls.code("HcclCommDestroy", self.comm)]
