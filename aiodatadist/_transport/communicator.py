"""One-sided communicators: made from a rank table, prepared together with their peers, destroyed.

A link has a communicator of two ranks; members of a rank table meet through one with all of them. Everything here
blocks, so callers do it in threads.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiodatadist._concurrency.threads import DaemonThread
from aiodatadist._counting import OF_PROCESS, Incident
from aiodatadist._native.library import Handle, ffi
from aiodatadist._native.runtime import hccl_error
from aiodatadist._transport.contract import StillWritten
from aiodatadist.errors import FeatureNotEnabled, LinkError, LinkTimeout, LLMException, StuckError, TransferTimeout

if TYPE_CHECKING:
    from aiodatadist._device import Device
    from aiodatadist._transport.contract import RdmaConfig

logger = logging.getLogger(__name__)

CONFIG_VERSION = 5  # HcclCommConfig: the layout that every CANN version reads
CONFIG_BYTES = 300
CONFIG_MAGIC = 0xF0F0F0F0
NOT_SET = 0xFFFFFFFF
NO_HCCS = (
    "cards of one server that are in different HCCS groups have no link between them: set HCCL_INTRA_ROCE_ENABLE=1 at both "
    "ends, or take two cards of one group (npu-smi info -t topo)"
)
EXPANSION_HOST = 1
"""The setting by which the host unfolds batches.

By default an A3 does it on the device, where an abort stops no copy and one notify of the communicator reports all ends
(:func:`~aiodatadist._transport.link_kind.is_unfolded`).
"""

DESTROY_SECONDS = 30.0
"""Seconds that HCCL may take for destroying one communicator.

If it unfolds batches on the device, it waits for a kernel there, up to HCCL_EXEC_TIMEOUT (1836 s). Then the
communicator is left behind, and nothing that it is bound to is used for anything else.
"""

LEFT_BEHIND = (
    "until the process ends, the memory that this communicator reaches stays registered and is not freed, and its device "
    "is not released"
)


class _Turn:
    """The turn to make or destroy a communicator, which one thread of the process has at a time.

    HCCL keeps the communicators of a process, of all its devices, in tables without a lock. The turn includes no wait
    for a peer: preparing does that, outside.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = math.inf  # when it was last taken, in monotonic seconds; inf while it is free
        self._in_vain = math.nan  # the ``_since`` for which others have waited in vain

    def take(self) -> None:
        """Wait for the turn, and take it.

        Raises:
            StuckError: if another thread has had it for ``DESTROY_SECONDS``.
        """
        left, half, awaited = 0.0, DESTROY_SECONDS / 2, math.nan
        while not self._lock.acquire(timeout=left):
            since = self._since
            left = min(since + half - time.monotonic(), half)
            if left <= 0 and since not in {awaited, self._in_vain}:
                awaited, left = since, half  # a process that was stopped during the first wait has the second one
            elif left <= 0:
                self._in_vain = since
                raise StuckError(
                    f"HCCL has been making or destroying another communicator for {DESTROY_SECONDS:g} s, and does one at a "
                    "time in a process",
                    hint="restart the process, if that call never returns",
                )
        self._since = time.monotonic()

    def give(self) -> None:
        """Release the turn, from any thread."""
        self._since = math.inf
        self._lock.release()

    @property
    def is_taken(self) -> bool:
        return self._lock.locked()


_turn = _Turn()


def _renew_turn() -> None:
    """Make a new turn in a forked child: the parent's thread that had it is not here to release it."""
    global _turn  # noqa: PLW0603 - one per process
    _turn = _Turn()


os.register_at_fork(after_in_child=_renew_turn)


def communicator_config(name: str, buffer_mib: int, rdma: RdmaConfig, expansion: int = EXPANSION_HOST) -> Handle:
    """Return a ``HcclCommConfig``.

    Args:
        name: the same at all members.
        buffer_mib: megabytes of HCCL's staging memory.
        rdma: marks of RDMA packets.
        expansion: where batches are unfolded. It overrides the environment's HCCL_OP_EXPANSION_MODE.
    """
    config = ffi.new("HcclCommConfig *")
    header = ffi.cast("uint32_t *", ffi.addressof(config, "reserved"))
    ffi.cast("uint64_t *", header)[0] = CONFIG_BYTES
    header[2] = CONFIG_MAGIC
    header[3] = CONFIG_VERSION
    config.hcclBufferSize = buffer_mib
    config.hcclCommName = name.encode()
    config.hcclOpExpansionMode = expansion
    config.hcclRdmaTrafficClass = NOT_SET if rdma.traffic_class is None else rdma.traffic_class
    config.hcclRdmaServiceLevel = NOT_SET if rdma.service_level is None else rdma.service_level
    return config


@contextmanager
def failing_as_link() -> Iterator[None]:
    """Turn HCCL's errors inside this context into LinkError, and its timeouts into LinkTimeout."""
    try:
        yield
    except TransferTimeout as error:
        raise LinkTimeout(*error.args, hint=error.hint) from error
    except LinkError:
        raise
    except LLMException as error:
        raise LinkError(*error.args, hint=error.hint) from error


class Communicator:
    """A communicator. All calls but :meth:`call_off` must be made with the device current, and one at a time.

    Attributes:
        handle: None before :meth:`make`, and after it was destroyed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._runtime = device.runtime
        self._is_called_off = False
        self._is_used_up = False
        self.handle: Handle | None = None

    def make(self, rank_table: str, rank: int, config: Handle) -> None:
        """Make the communicator. It does not wait for peers.

        Raises:
            LinkError: if HCCL refused.
        """
        made = ffi.new("HcclComm *")
        init = self._runtime.hccl.HcclCommInitClusterInfoMemConfig
        with failing_as_link():
            turn = _turn
            turn.take()
            try:
                code = init(rank_table.encode(), rank, config, made)
                self._runtime.check_hccl("HcclCommInitClusterInfoMemConfig", code)
            finally:
                turn.give()
        self.handle = made[0]
        # call_off() found no handle while the communicator was being made
        if self._is_called_off:
            self._end_waiting()

    def prepare(self, seconds: float) -> None:
        """Meet all peers, in one call, and show them the memory that is bound. Can be called only once.

        An end that gives up and begins again would break what the other is doing, and HCCL does not clean up after a
        Prepare that failed. So a communicator that failed can only be destroyed.

        HCCL gives each of three phases (connecting, exchanging descriptors, opening memory) this number of seconds,
        rounded up.

        Raises:
            LinkTimeout: if a peer did not come in time, or :meth:`call_off` was called.
            LinkError: if it could not be prepared, or was tried before.
        """
        if self._is_called_off:
            raise LinkTimeout("called off before the peer was waited for")
        if self._is_used_up:
            raise LinkError("a communicator can be prepared only once: make another one")
        self._is_used_up = True
        how = ffi.new("HcclPrepareConfig *")
        with failing_as_link():
            code = self._runtime.hccl.HcclCommPrepare(self.handle, how, whole_seconds(seconds))
            try:
                self._runtime.check_hccl("HcclCommPrepare", code)
            except FeatureNotEnabled as error:
                raise LinkError(*error.args, hint=NO_HCCS) from error

    def call_off(self) -> None:
        """Stop waiting for peers; from any thread. An NPU that waits already cannot be told."""
        self._is_called_off = True
        self._end_waiting()

    def _end_waiting(self) -> None:
        handle = self.handle  # read once: another thread may be destroying it; softnpu recognises a handle that is gone
        if handle is not None and self._runtime.is_soft:
            self._runtime.acl.softnpu_comm_cancel(handle)

    def destroy(self) -> None:
        """Destroy the communicator; an NPU then also closes the peer's way to our memory. No effect the second time.

        Raises:
            StillWritten: if softnpu cannot, because the peer was stopped while it wrote. May be tried again.
            StuckError: if HCCL has not done it within ``DESTROY_SECONDS``. What is bound to it must stay registered,
                and must not be freed, until the process ends.
            LLMException: if HCCL refused.
        """
        # taken away first: call_off(), in another thread, must not find a handle that is being destroyed
        handle, self.handle = self.handle, None
        if handle is None:
            return
        try:
            code, words = self._destroy_in_time(handle)
        except StuckError as error:
            self._device.mark_stuck(0, 0)
            raise StuckError(f"{error.args[0]}: {LEFT_BEHIND}", hint=error.hint) from error
        if code == 0:
            return
        refused = hccl_error("HcclCommDestroy", code, words)
        if self._runtime.is_soft and self._runtime.acl.softnpu_comm_awaited(handle) >= 0:
            self.handle = handle
            raise StillWritten(str(refused)) from refused
        raise refused

    def _destroy_in_time(self, handle: Handle) -> tuple[int, str]:
        """Call ``HcclCommDestroy`` in a thread that can be left behind, which has the turn until the call returns.

        Return its code and, if it failed, the library's words, which only that thread can read.
        """
        turn, result = _turn, concurrent.futures.Future[tuple[int, str]]()

        def destroy() -> None:
            try:
                with self._device.current():
                    code = self._runtime.hccl.HcclCommDestroy(handle)
                    result.set_result((code, self._runtime.recent_words() if code else ""))
            except BaseException as error:
                result.set_exception(error)
            finally:
                turn.give()

        turn.take()
        try:
            DaemonThread(destroy, "aiodatadist destroy").start()
        except RuntimeError:
            words = "no thread can be started for HcclCommDestroy: it is waited for without a limit"
            OF_PROCESS.add(Incident.NO_THREADS, logger, words)
            destroy()
        for _ in range(2):  # a process that was stopped during the first wait has the second one
            try:
                return result.result(DESTROY_SECONDS / 2)
            except concurrent.futures.TimeoutError:
                continue
        raise StuckError(
            f"HcclCommDestroy has not returned within {DESTROY_SECONDS:g} s",
            hint="restart the process; if HCCL honours it, HCCL_OP_EXPANSION_MODE=HOST avoids this",
        )

    @property
    def awaited(self) -> int:
        """A file descriptor that becomes readable when the peer has let go, after ``StillWritten``; -1 if none is awaited."""
        return -1 if self.handle is None else int(self._runtime.acl.softnpu_comm_awaited(self.handle))

    def abandon(self) -> None:
        """Destroy it without waiting, after ``StillWritten``."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self._runtime.acl.softnpu_comm_abandon(handle)


def whole_seconds(seconds: float) -> int:
    """Return whole seconds for HCCL, at least 1, because 0 means the environment's limit."""
    return max(1, math.ceil(seconds))
