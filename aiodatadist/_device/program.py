"""Programs for a stream: a few steps, each over many ranges."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from aiodatadist._native.library import Handle, ffi, ring
from aiodatadist._values.grid import Grid

MAX_COPY_SECONDS = 86400.0
"""Seconds for copies that have no deadline."""


class CopyKind(IntEnum):
    """The directions of a copy, with the numbers of aclrtMemcpyKind."""

    HOST_TO_HOST = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


class Layering:
    """The layers of a grid that is written layer by layer. C reads and writes it, so it lives as long as the program.

    Args:
        layers, tensors: the number of layers in the grid, and of tensors in a layer.
        group: layers that travel at a time.
        gates: notifies, one per layer: the stream waits for those of a group before it. None if nothing is waited for.
        gate_seconds: the time that a gate may stay shut, from when the one before it opened or its group landed.

    Attributes:
        landed_ns: when each layer was known to have landed, on the clock of ``time.monotonic_ns``; 0 if it has not.
    """

    __slots__ = ("_gates", "landed_ns", "layers")

    def __init__(
        self, layers: int, tensors: int, group: int, gates: Sequence[Handle] | None = None, gate_seconds: float = 0.0
    ) -> None:
        self.landed_ns: array[int] = array("q", bytes(8 * layers))
        self._gates = ffi.NULL if gates is None else ffi.new("aclrtNotify[]", list(gates))
        stamps = ffi.from_buffer("int64_t[]", self.landed_ns)
        self.layers: Any = ffi.new(
            "ring_layers *", [tensors, group, self._gates, stamps, max(1, round(1000 * gate_seconds))]
        )

    @property
    def landed(self) -> int:
        """The number of layers that are known to have landed, even before the caller was notified."""
        return next((i for i, stamp in enumerate(self.landed_ns) if not stamp), len(self.landed_ns))


class Program:
    """Steps in order. Add them, then submit it once; it keeps everything that C reads alive.

    Attributes:
        nbytes: bytes that its steps move.
        is_one_sided: True if all its steps go through a communicator.
        use: an object that is alive as long as the device may carry this out; dropped when the device has let go, or
            with the program.
    """

    __slots__ = ("_keep", "_steps", "is_one_sided", "nbytes", "use")

    def __init__(self) -> None:
        self._steps: list[tuple[int, int, int, Handle, Grid | None, Layering | None]] = []
        self._keep: list[Any] = []
        self.is_one_sided: bool = True
        self.nbytes: int = 0
        self.use: object = None

    def get(self, channel: Handle, rank: int, grid: Grid) -> Program:
        """Read the remote side of a grid into the local one, through a communicator."""
        return self._add(ring.RING_GET, 0, rank, channel, grid)

    def put(self, channel: Handle, rank: int, grid: Grid, layering: Layering | None = None) -> Program:
        """Write the local side of a grid to the remote one, through a communicator."""
        return self._add(ring.RING_PUT, 0, rank, channel, grid, layering)

    def copy(self, kind: CopyKind, grid: Grid, layering: Layering | None = None) -> Program:
        """Copy the remote side of a grid to the local one; both are addresses of this process."""
        return self._add(ring.RING_COPY, kind, 0, ffi.NULL, grid, layering)

    def wait(self, event: Handle) -> Program:
        """Hold the stream until a device event, which was recorded before this is submitted, is complete."""
        return self._add(ring.RING_WAIT, ring.RING_EVENT, 0, event, None)

    def wait_number(self, event: int) -> Program:
        """Hold the stream likewise until the caller's event, given as a number, is complete."""
        return self.wait(ffi.cast("void *", event))

    def wait_gate(self, notify: Handle) -> Program:
        """Hold the stream until a notify is recorded, which may come later."""
        return self._add(ring.RING_WAIT, ring.RING_NOTIFY, 0, notify, None)

    def record(self, event: Handle) -> Program:
        """Record a device event when everything before it is done."""
        return self._add(ring.RING_RECORD, ring.RING_EVENT, 0, event, None)

    def open(self, notify: Handle) -> Program:
        """Record a notify when everything before it is done."""
        return self._add(ring.RING_RECORD, ring.RING_NOTIFY, 0, notify, None)

    def _add(
        self, op: int, kind: int, rank: int, handle: Handle, grid: Grid | None, layering: Layering | None = None
    ) -> Program:
        self._steps.append((op, kind, rank, handle, grid, layering))
        self.is_one_sided &= op in {ring.RING_GET, ring.RING_PUT}
        if grid is not None:
            self.nbytes += grid.total
        return self

    def redirect(self, channel: Handle) -> None:
        """Send gets and puts through another communicator to the same peer. Call it before the program starts."""
        self._steps = [
            (op, kind, rank, channel if op in {ring.RING_GET, ring.RING_PUT} else handle, grid, layering)
            for op, kind, rank, handle, grid, layering in self._steps
        ]

    def keep(self, *values: Any) -> None:
        """Keep further values alive for C, as long as this object lives."""
        self._keep.extend(values)

    def assemble(self) -> tuple[Handle, int]:
        """Return the steps as C reads them, and their number. What they point to lives as long as this object."""
        steps = ffi.new("ring_step[]", len(self._steps))
        self._keep.append(steps)
        for i, (op, kind, rank, handle, grid, layering) in enumerate(self._steps):
            step = steps[i]
            step.op = op
            step.kind = kind
            step.rank = rank
            step.handle = handle
            if grid is not None:
                self._fill(step.grid, grid)
            if layering is not None:
                step.layers = layering.layers
                self._keep.append(layering)
        return steps, len(self._steps)

    def _fill(self, target: Any, grid: Grid) -> None:
        target.local, target.remote, target.local_index, target.remote_index = pointers = (
            ffi.from_buffer("uint64_t[]", grid.local),
            ffi.from_buffer("uint64_t[]", grid.remote),
            ffi.from_buffer("uint64_t[]", grid.local_index),
            ffi.from_buffer("uint64_t[]", grid.remote_index),
        )
        self._keep.append(pointers)
        target.tensors = len(grid.local)
        target.blocks = len(grid.local_index)
        target.local_stride = grid.local_stride
        target.remote_stride = grid.remote_stride
        target.bytes = grid.nbytes
        target.tail = grid.tail
