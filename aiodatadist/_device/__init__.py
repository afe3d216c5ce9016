"""Devices: one accelerator, its memory, and its streams as executors.

Promises: a transfer submitted to a :class:`Stream` runs in order, without the event loop, Python threads or the
interpreter lock, and reaches exactly one end. It knows nothing of caches, peers and protocols. A device may be opened
from any thread; streams belong to the event loop on which they were opened.
"""

from aiodatadist._concurrency.completion import TransferCompletion, TransferReport, TransferState
from aiodatadist._concurrency.loop_time import give_way
from aiodatadist._device.block_run import BlockRun, RanAtOnce, packed
from aiodatadist._device.device import Device
from aiodatadist._device.gate import Gate, open_gates, refuse_captured
from aiodatadist._device.memory import Memory, first_unusable
from aiodatadist._device.program import MAX_COPY_SECONDS, CopyKind, Layering, Program
from aiodatadist._device.ring_calls import RingCalls, StreamLimits
from aiodatadist._device.shareable import empty, torch_empty
from aiodatadist._device.stream import CLEAN_SECONDS, Stream, StreamTransfer
from aiodatadist._native.runtime import OUTSIDE_CAPTURE

__all__ = [
           "CLEAN_SECONDS",
           "MAX_COPY_SECONDS",
           "OUTSIDE_CAPTURE",
           "BlockRun",
           "CopyKind",
           "Device",
           "Gate",
           "Layering",
           "Memory",
           "Program",
           "RanAtOnce",
           "RingCalls",
           "Stream",
           "StreamLimits",
           "StreamTransfer",
           "TransferCompletion",
           "TransferReport",
           "TransferState",
           "empty",
           "first_unusable",
           "give_way",
           "open_gates",
           "packed",
           "refuse_captured",
           "torch_empty",
]  # fmt: skip
