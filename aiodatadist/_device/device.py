"""An accelerator of this process."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiodatadist._concurrency import forks
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._device.memory import Memory
from aiodatadist._device.memory_limit import check_memory_limit, memory_limit
from aiodatadist._device.ring_calls import StreamLimits, open_device_ring
from aiodatadist._device.stream import Stream
from aiodatadist._native.library import Handle, ffi
from aiodatadist._native.runtime import Runtime, open_runtime
from aiodatadist._values.descriptors import Placement
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist.errors import FeatureNotEnabled, ForkError, LLMException, ParamInvalid

logger = logging.getLogger(__name__)

_PLACES = {0: Placement.HOST, 1: Placement.DEVICE}  # aclrtMemLocationType; 2 is memory that the runtime does not know


class Device:
    """An opened device. Use ``await Device.open(0)``, or ``async with await Device.open(0) as device``.

    A device can be opened twice: each time takes its own reference.

    Attributes:
        index: the device's number among those that this process can see.
        runtime: the runtime that it belongs to.
    """

    def __init__(self, runtime: Runtime, index: int, limits: StreamLimits | None = None) -> None:
        self.runtime = runtime
        self.index = index
        self.limits: StreamLimits = limits or StreamLimits()
        _ = runtime.ring_driver  # looked up here, in a thread, rather than by the first stream
        self._context: Handle = runtime.acquire_device(index)
        self._memories: set[Memory] = set()
        self._adopted: Counter[tuple[int, int]] = Counter()
        self._notifies: list[Handle] = []
        self._spare_notifies: list[Handle] = []
        self._streams = 0
        self._holds = 0
        self._kept: list[object] = []
        self._closed = False
        self._stuck: list[tuple[int, int]] = []
        self._pid = os.getpid()

    @classmethod
    async def open(cls, index: int, limits: StreamLimits | None = None) -> Device:
        """Open a device of the process's runtime.

        Raises:
            RuntimeUnavailable: if no runtime can be opened.
            ParamInvalid: if there is no such device.
        """
        return await in_thread(lambda: cls(open_runtime(), index, limits), undo=Device._release)

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise ForkError(f"this device was opened {forks.since(self._pid)}", hint="start processes with spawn")
        if self._closed:
            raise ParamInvalid(f"device {self.index} is closed")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device current in this thread inside this context: the runtime's calls need that."""
        self._check_open()
        with self.runtime.context(self._context):
            yield

    def allocate(self, nbytes: int, placement: Placement = Placement.DEVICE) -> Memory:
        """Allocate device memory, or pinned host memory. Contents are undefined. Slow: allocate once, and cut.

        Raises:
            OutOfMemory: if there is not enough. The message says how much there is, or what the container allows.
        """
        if self._is_of_the_host(placement):
            others = sum(memory.nbytes for memory in self._memories if self._is_of_the_host(memory.placement))
            check_memory_limit(nbytes, others)
        with self.current():
            memory = Memory(self.runtime, nbytes, placement, self._memories.discard)
        self._memories.add(memory)
        return memory

    async def populate(self, memory: Memory) -> None:
        """Give memory of softnpu's all its pages. They otherwise come with their first use, which takes many times as long.

        Raises:
            OutOfMemory: if the machine or the container would be left less than an eighth of its memory.
        """
        if not self.runtime.is_soft:
            return
        self._tell_memory_group()
        stop = ffi.new("int32_t *")

        def run() -> None:
            with self.current():
                code = self.runtime.acl.softnpu_populate(ffi.cast("void *", memory.address), memory.nbytes, stop)
                self.runtime.check("softnpu_populate", code)

        def cancel() -> None:
            stop[0] = 1

        await in_thread(run, on_cancel=cancel)

    def populate_soon(self, memory: Memory) -> None:
        """Let a thread of softnpu's do that, as long as an eighth is left. It gives way to transfers."""
        if self.runtime.is_soft:
            self._tell_memory_group()
            self.runtime.acl.softnpu_populate_soon(ffi.cast("void *", memory.address), memory.nbytes)

    def _tell_memory_group(self) -> None:
        """Tell softnpu which files have the container's limit and the memory in use."""
        found = memory_limit()
        limit = "" if found is None else found.file
        stat = "" if found is None else str(Path(limit).with_name("memory.stat"))
        self.runtime.acl.softnpu_memory_group(limit.encode(), stat.encode())

    def _is_of_the_host(self, placement: Placement) -> bool:
        return placement is Placement.HOST or self.runtime.is_soft

    def fill(self, ranges: Sequence[tuple[int, int]], value: int) -> None:
        """Set every byte of ``(address, bytes)`` ranges of allocated memory. Blocking; from any thread.

        Raises:
            DeviceError: if the runtime refused a range; those before it are filled.
        """
        with self.current():
            for address, nbytes in ranges:
                pointer = ffi.cast("void *", address)
                self.runtime.check("aclrtMemset", self.runtime.acl.aclrtMemset(pointer, nbytes, value, nbytes))

    def adopt(self, ranges: Sequence[tuple[int, int, Placement]]) -> None:
        """Treat memory of the caller's, ``(address, bytes, placement)`` each, as memory of that placement; all or nothing.

        On an NPU this has no effect, because the runtime knows the kind of memory. softnpu accepts ordinary memory of
        the process for either.

        Raises:
            ParamInvalid: if softnpu knows the memory as something else, or a range overlaps an adopted one in part.
        """
        if not self.runtime.is_soft:
            return
        done: list[tuple[int, int]] = []
        with self.current():
            try:
                for address, nbytes, placement in ranges:
                    self._adopt(address, nbytes, placement)
                    done.append((address, nbytes))
            except LLMException:
                self.disown(done)
                raise

    def _adopt(self, address: int, nbytes: int, placement: Placement) -> None:
        pointer = ffi.cast("void *", address)
        if self.runtime.acl.softnpu_adopt(pointer, nbytes, placement.value) == 0:
            self._adopted[address, nbytes] += 1
            return
        words = self.runtime.recent_words()
        attributes = ffi.new("aclrtPtrAttributes *")
        self.runtime.check("aclrtPointerGetAttributes", self.runtime.acl.aclrtPointerGetAttributes(pointer, attributes))
        known = _PLACES.get(attributes.location.type)
        if known is not placement:
            what = words if known is None else f"they are {known}"
            raise ParamInvalid(f"{nbytes} bytes at {address:#x} cannot be {placement}: {what}")

    def disown(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Release adopted memory; other memory is ignored."""
        for address, nbytes in ranges:
            if self._adopted[address, nbytes]:
                self._adopted[address, nbytes] -= 1
                self.runtime.acl.softnpu_release(ffi.cast("void *", address), nbytes)
            if not self._adopted[address, nbytes]:
                del self._adopted[address, nbytes]

    def placements_of(self, addresses: Iterable[int]) -> list[Placement | None]:
        """Return the placement of the memory at each address; None if the runtime does not know it: ordinary host memory."""
        return [_PLACES.get(attributes.location.type) for attributes in self._attributes_of(addresses)]

    def page_sizes_of(self, addresses: Iterable[int]) -> list[int]:
        """Return the page size in bytes of the memory at each address; 0 if the runtime does not say."""
        return [attributes.pageSize for attributes in self._attributes_of(addresses)]

    def _attributes_of(self, addresses: Iterable[int]) -> Iterator[Any]:
        """Yield an ``aclrtPtrAttributes`` for each address, valid until the next one."""
        attributes = ffi.new("aclrtPtrAttributes *")
        look, pointer = self.runtime.acl.aclrtPointerGetAttributes, ffi.typeof("void *")
        with self.current():
            for address in addresses:
                code = look(ffi.cast(pointer, address), attributes)
                if code:
                    self.runtime.check("aclrtPointerGetAttributes", code)
                yield attributes

    def want_gates(self) -> None:
        """Raise FeatureNotEnabled if the runtime has no notifies."""
        if not self.runtime.has_notifies:
            raise FeatureNotEnabled("this runtime has no notifies", hint="CANN 8.5 and later have them")

    def take_notifies(self, count: int) -> list[Handle]:
        """Return this number of notifies that are not recorded, used before or new. All or nothing.

        Raises:
            DeviceError: if the device has no more (8192 on A2 and A3).
        """
        made = ffi.new("aclrtNotify *")
        with self.current():
            while len(self._spare_notifies) < count:
                self.runtime.check("aclrtCreateNotify", self.runtime.acl.aclrtCreateNotify(made, 0))
                self._spare_notifies.append(made[0])
        first = len(self._spare_notifies) - count
        taken, self._spare_notifies = self._spare_notifies[first:], self._spare_notifies[:first]
        return taken

    def give_notifies(self, notifies: Sequence[Handle]) -> None:
        """Return notifies for further use. Each must have been recorded and then waited for."""
        self._spare_notifies.extend(notifies)

    def keep_notify(self, notify: Handle) -> None:
        """Destroy a notify only with the device: work that records it, or waits for it, may be queued until then."""
        self._notifies.append(notify)

    def destroy_notify(self, notify: Handle) -> None:
        """Destroy a notify that nothing records or waits for any longer."""
        if self._closed:
            return
        with self.current():
            self.runtime.acl.aclrtDestroyNotify(notify)

    def open_stream(self, name: str, *, is_serial: bool = False) -> Stream:
        """Return a new stream for the running event loop. The caller must close it before the device.

        If ``is_serial``, a program is handed to C when the one before it has ended, or must give way to it, and never
        runs in the submitting call.
        """
        self._check_open()
        self._streams += 1
        limits = (
            replace(self.limits, depth=len(TransferPriority), inline=0, is_serial=True) if is_serial else self.limits
        )
        handle = open_device_ring(self.runtime, self._context, limits)
        return Stream(f"{name}#{self._streams}", limits, handle)

    def hold(self) -> None:
        """Keep the device and its memory until the same number of :meth:`let_go`, even if it is closed before.

        Another device of this process is in the middle of a copy there.
        """
        self._check_open()
        self._holds += 1

    def keep(self, value: object) -> bool:
        """Keep an object alive for as long as the device is held; return False if it is not held."""
        if self._holds:
            self._kept.append(value)
        return self._holds > 0

    async def let_go(self) -> None:
        """Undo one :meth:`hold`. If the device was closed in the meantime, free the memory and release the device."""
        self._holds -= 1
        if self._holds:
            return
        self._kept.clear()
        if not self._closed:
            return
        try:
            await in_thread(self._release, gives_back=True)
        except LLMException as error:  # its owner has closed it, and is gone
            logger.warning("device %d: %s", self.index, error)

    async def aclose(self) -> None:
        """Free what was allocated and release the device.

        Memory that still has views stays, a leak rather than a crash; softnpu's is freed when the last view dies.

        If the device is held, the last :meth:`let_go` does that instead.
        """
        if self._closed:
            return
        self._check_open()
        self._closed = True
        if not self._holds:
            await in_thread(self._release, gives_back=True)

    def _release(self) -> None:
        """Release everything, then raise the first refusal. Blocking; from any thread."""
        refused: LLMException | None = None
        with self.runtime.context(self._context):
            for notify in self._notifies + self._spare_notifies:
                self.runtime.acl.aclrtDestroyNotify(notify)
            self._notifies, self._spare_notifies = [], []
            for address, nbytes in list(self._adopted.elements()):
                self.disown([(address, nbytes)])
            for memory in list(self._memories):
                if memory.has_views or memory.is_stuck:
                    why = "the device may still write there" if memory.is_stuck else "arrays over it are alive"
                    logger.warning("%r is not freed with its device: %s", memory, why)
                    if not memory.is_stuck:
                        memory.free_after_views(self.index)
                    continue
                try:
                    memory.free()
                except LLMException as error:
                    refused = refused or error
        if self._stuck:
            logger.warning(
                "device %d has a transfer or a call that does not end: it is not released, because that would wait for it",
                self.index,
            )
        else:
            self.runtime.release_device(self.index)
        if refused is not None:
            raise refused

    def mark_stuck(self, address: int, nbytes: int) -> None:
        """Note that the device will not release these bytes; with 0 bytes, only that the device is kept.

        The allocation that they are in is never freed, and the device is not released.
        """
        self._stuck.append((address, nbytes))
        for memory in list(self._memories):  # copied in one step, because any thread may call this
            if self.is_stuck(memory.address, memory.nbytes):
                memory.is_stuck = True

    def is_stuck(self, address: int, nbytes: int) -> bool:
        """Return True if some of these bytes were marked as stuck."""
        return any(start < address + nbytes and address < start + length for start, length in self._stuck)

    async def __aenter__(self) -> Device:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Device {self.index} {self.runtime.name}{' closed' if self._closed else ''}>"
