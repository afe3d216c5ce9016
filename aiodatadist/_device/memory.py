"""Memory of a device, or pinned memory of the host."""

from __future__ import annotations

import ctypes
import os
import weakref
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING

from aiodatadist._native.library import ffi, ring
from aiodatadist._native.runtime import Runtime
from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import FeatureNotEnabled, LLMException, ParamInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiodatadist._native.library import Handle

HUGE_FIRST = 0  # ACL_MEM_MALLOC_HUGE_FIRST


class Memory:
    """An allocation. Freed by :meth:`free`, or by the device when it closes.

    Attributes:
        address: its start, in the address space of its placement. At least 64-byte aligned.
        nbytes: its size.
        placement: device memory, or pinned host memory.
        is_stuck: True if the device never let go of it; it is then never freed.
    """

    def __init__(self, runtime: Runtime, nbytes: int, placement: Placement, forget: Callable[[Memory], None]) -> None:
        if nbytes <= 0:
            raise ParamInvalid(f"{nbytes} bytes asked for: must be at least 1")
        pointer = ffi.new("void **")
        if placement is Placement.DEVICE:
            runtime.check("aclrtMalloc", runtime.acl.aclrtMalloc(pointer, nbytes, HUGE_FIRST))
        else:
            runtime.check("aclrtMallocHost", runtime.acl.aclrtMallocHost(pointer, nbytes))
        self._runtime = runtime
        self._pointer = pointer[0]
        self._forget = forget
        self._views: weakref.ref[ctypes.Array[ctypes.c_char]] | None = None
        self.address: int = int(ffi.cast("uintptr_t", self._pointer))
        self.nbytes = nbytes
        self.placement = placement
        self.is_stuck = False

    @property
    def is_free(self) -> bool:
        return self._pointer is None

    @property
    def has_views(self) -> bool:
        """True if some array or memoryview over this memory is still alive."""
        return self._views is not None and self._views() is not None

    def view(self) -> memoryview:
        """Return the bytes, writable, without a copy, if the host can address them: pinned memory, and softnpu.

        The memory cannot be freed while the view, or an array over it, is alive.
        """
        if self.is_free:
            raise ParamInvalid("this memory was freed")
        if self.placement is Placement.DEVICE and not self._runtime.is_soft:
            raise FeatureNotEnabled(
                "device memory of an NPU has no view on the host",
                hint="use torch_npu: tensors(cache); or copy to and from a HOST cache: swap_blocks, copy_cache",
            )
        block = self._views() if self._views is not None else None
        if block is None:
            block = (ctypes.c_char * self.nbytes).from_address(self.address)
            # weak, so that the memory can be freed once no array uses it
            self._views = weakref.ref(block)
        return memoryview(block).cast("B")

    def free(self) -> None:
        """Free the memory; a second call has no effect.

        Raises:
            BufferError: if a view is still alive. Nothing was freed.
        """
        # stuck memory is never freed, because the device may still write there
        if self.is_free or self.is_stuck:
            return
        if self.has_views:
            raise BufferError(f"{self!r} still has views: drop the arrays made from it first")
        _free(self._runtime, self._pointer, self.placement)
        self._pointer = None
        self._forget(self)

    def free_after_views(self, device: int) -> None:
        """Free the memory when its last view dies, which may be after its device was closed: only softnpu can do that."""
        block = self._views() if self._views is not None else None
        if block is not None and self._runtime.is_soft:
            given = self._runtime, self._pointer, self.placement, device, os.getpid()
            weakref.finalize(block, _free_late, *given).atexit = False

    def __repr__(self) -> str:
        state = "freed" if self.is_free else f"at {self.address:#x}"
        return f"<Memory {self.nbytes} bytes {self.placement} {state}>"


def _free(runtime: Runtime, pointer: Handle, placement: Placement) -> None:
    name = "aclrtFree" if placement is Placement.DEVICE else "aclrtFreeHost"
    runtime.check(name, getattr(runtime.acl, name)(pointer))


def _free_late(runtime: Runtime, pointer: Handle, placement: Placement, device: int, process: int) -> None:
    """Free memory of a device that may be closed: the device is opened for the call."""
    if process != os.getpid():
        return  # it is the memory of the process that this one was forked from
    with suppress(LLMException):  # the owner has closed its device, and is gone
        context = runtime.acquire_device(device)
        try:
            with runtime.context(context):
                _free(runtime, pointer, placement)
        finally:
            runtime.release_device(device)


def first_unusable(starts: Sequence[int], lengths: Sequence[int], *, writes: bool) -> int:
    """Return the position of the first range that is not memory of this process, or that cannot be read (or written).

    If there is none, return the number of ranges. Even so, an access may end the process if a file behind a range is
    shorter than the mapping.
    """
    start, length = (ffi.from_buffer("uint64_t[]", array("Q", values)) for values in (starts, lengths))
    return int(ring.ring_first_unusable(start, length, len(starts), writes))
