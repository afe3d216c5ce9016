"""Processes that know nothing of each other but a rank table meet through HCCL itself, and exchange a few bytes.

Upstream's symmetric ``link`` gives its members a name, a map of cluster ids to ranks and a rank table, but no address of
a control connection. So the members make an ordinary two-sided communicator from the rank table, send each other a blob
with what they need, and destroy the communicator.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiodatadist._native.library import Handle, ffi, ring
from aiodatadist.concurrency.blocking_calls import in_thread
from aiodatadist.device import Device
from aiodatadist.device.memory import Memory
from aiodatadist.errors import (
    FeatureNotEnabled,
    LinkError,
    LinkTimeout,
    LLMException,
    ParamInvalid,
    ProtocolError,
    TransferTimeout,
)
from aiodatadist.transport.contract import DEFAULT_RDMA, RdmaConfig
from aiodatadist.transport.hccl import Stop, communicator_config, making
from aiodatadist.values import checks
from aiodatadist.values.descriptors import Placement

logger = logging.getLogger(__name__)

BLOB = 4096
"""Bytes of one blob on the wire: its length, itself, zeros."""

LENGTH = 4  # little-endian
MEMBERS = range(2, 5)
NAME_LENGTH = 128  # of HcclCommConfig.hcclCommName, with the zero at its end
VERSIONS = ("1.0", "1.2")
MAX_TABLE = 64 << 10  # characters of a rank table, which names four devices at most
BUFFER_MIB = 1  # HCCL's staging memory, of which the default is 200 MiB: more than KV caches may have left
SLICE_MS = 50  # between two looks at whether the meeting is still wanted
GRACE_MS = 1000  # that an aborted stream has for letting go


# ---- the arguments of upstream's link() ----


def validate(comm_name: Any, cluster_rank_info: Any, rank_table: Any, cluster_id: int) -> tuple[int, dict[int, int]]:
    """Check the arguments of upstream's ``link``; our own rank, and the rank of each cluster.

    Raises:
        TypeError, ValueError: a type is wrong, or a number is not within its C type.
        ParamInvalid: a rule is broken. The message names it.
    """
    _check_name(checks.instance(comm_name, "comm_name", str))
    ranks = _check_ranks(checks.instance(cluster_rank_info, "cluster_rank_info", dict), cluster_id)
    _check_table(checks.instance(rank_table, "rank_table", str), ranks)
    return ranks[cluster_id], ranks


def _check_name(name: str) -> None:
    if not 1 <= len(name) < NAME_LENGTH:
        raise ParamInvalid(f"comm_name has {len(name)} characters: it has to have 1 to {NAME_LENGTH - 1}")
    if not (name.isascii() and name.isprintable()):
        raise ParamInvalid(f"comm_name is {name!r}: it has to be printable ASCII")


def _check_ranks(given: dict[Any, Any], cluster_id: int) -> dict[int, int]:
    ranks = {
        checks.integer(cluster, "a cluster id of cluster_rank_info", checks.UINT64): checks.integer(
            rank, f"cluster_rank_info[{cluster}]", checks.UINT32
        )
        for cluster, rank in given.items()
    }
    if len(ranks) not in MEMBERS:
        raise ParamInvalid(f"cluster_rank_info has {len(ranks)} entries: {MEMBERS[0]} to {MEMBERS[-1]} can be linked")
    for one, other in itertools.pairwise(ranks.values()):
        if one >= other:
            raise ParamInvalid(f"cluster_rank_info has rank {other} after {one}: ranks have to ascend")
    if cluster_id not in ranks:
        raise ParamInvalid(
            f"cluster_rank_info has clusters {list(ranks)}: our own, {cluster_id}, has to be one of them"
        )
    return ranks


def _check_table(text: str, ranks: dict[int, int]) -> None:
    if len(text) > MAX_TABLE:
        raise ParamInvalid(f"rank_table has {len(text)} characters: the limit is {MAX_TABLE}")
    try:
        table = json.loads(text)
        text.encode()  # which it may refuse: a lone surrogate
    except (ValueError, RecursionError) as error:
        raise ParamInvalid(f"rank_table is not JSON: {error}") from error
    version = _member(table, "version", str, "rank_table")
    if version not in VERSIONS:
        raise ParamInvalid(f"rank_table has version {version!r}: {' and '.join(VERSIONS)} are known")
    found: Counter[int] = Counter()
    for i, server in enumerate(_member(table, "server_list", list, "rank_table")):
        where = f"rank_table.server_list[{i}]"
        for j, device in enumerate(_member(server, "device", list, where)):
            rank_id = _member(device, "rank_id", str, f"{where}.device[{j}]")
            if not (rank_id.isascii() and rank_id.isdigit() and len(rank_id) <= len(str(checks.UINT32[-1]))):
                raise ParamInvalid(f"{where}.device[{j}].rank_id is {rank_id!r}: it has to be a rank, in digits")
            found[int(rank_id)] += 1
    for cluster, rank in ranks.items():
        if found[rank] != 1:
            times = f"{found[rank]} times" if found[rank] else "not"
            raise ParamInvalid(f"rank_table has rank {rank}, of cluster {cluster}, {times}: it has to be there once")
    surplus = sorted(found.keys() - ranks.values())
    if surplus:
        raise ParamInvalid(f"rank_table has ranks {surplus}, of no cluster in cluster_rank_info: they would never come")


def _member(of: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(of, dict) or name not in of:
        raise ParamInvalid(f"{where} has no {name!r}")
    if not isinstance(of[name], kind):
        wanted = "an array" if kind is list else "a string"
        raise ParamInvalid(f"{where}.{name} is of type {type(of[name]).__name__}: it has to be {wanted}")
    return of[name]


# ---- meeting ----


async def meet(
    device: Device,
    name: str,
    rank: int,
    ranks: Sequence[int],
    rank_table: str,
    blob: bytes,
    timeout: float,
    rdma: RdmaConfig = DEFAULT_RDMA,
) -> dict[int, bytes]:
    """Exchange blobs with all other members, who make the same call with the same name, ranks and table.

    Cancelled or out of time, it ends at once on softnpu. The vendor's library cannot be told to stop waiting: there this
    returns, with a cancellation as with a timeout, only when that library's own limit has passed, which is the environment
    variable HCCL_CONNECT_TIMEOUT, 120 s unless set. If that is shorter than ``timeout`` it counts on both.

    Meetings of one device take place one after the other, and hold up the making of channels on it. So members must not
    wait for each other in a circle.

    Args:
        ranks: of all members, our own among them.
        blob: at most ``BLOB - 4`` bytes.
        timeout: seconds.
        rdma: for the communicator.

    Returns:
        The blob of every other member, by rank.

    Raises:
        ParamInvalid: an argument breaks a rule. No member was waited for.
        LinkTimeout: a member did not come in time.
        LinkError: the communicator could not be made, or broke: a member failed, ended or gave up.
        FeatureNotEnabled: the runtime lacks a function.
        DeviceError, OutOfMemory: there is no stream or memory left for it.
    """
    _check_meeting(name, rank, ranks, blob)
    stop = Stop()
    meeting = _Meeting(device, rank, sorted(ranks), stop, timeout, rdma)
    try:
        async with asyncio.timeout(timeout):
            return await in_thread(meeting.run, name, rank_table, blob, on_cancel=stop.set)
    except LinkTimeout:
        raise
    except TimeoutError as error:
        raise LinkTimeout(f"{name!r}: not all of the ranks {sorted(ranks)} came within {timeout} s") from error
    finally:
        stop.close()


def _check_meeting(name: str, rank: int, ranks: Sequence[int], blob: bytes) -> None:
    _check_name(name)
    if len(ranks) not in MEMBERS or len(set(ranks)) != len(ranks):
        raise ParamInvalid(f"the ranks are {list(ranks)}: {MEMBERS[0]} to {MEMBERS[-1]} different ones can meet")
    if rank not in ranks:
        raise ParamInvalid(f"the ranks are {list(ranks)}: our own, {rank}, has to be one of them")
    if len(blob) > BLOB - LENGTH:
        raise ParamInvalid(f"a blob of {len(blob)} bytes: {BLOB - LENGTH} is the limit")


@contextmanager
def _failing_as_link() -> Iterator[None]:
    try:
        yield
    except (LinkError, FeatureNotEnabled):
        raise
    except TransferTimeout as error:
        raise LinkTimeout(*error.args) from error
    except LLMException as error:
        raise LinkError(*error.args) from error
    except (OSError, UnicodeError) as error:
        raise LinkError(f"the rank table cannot be put into a file for HCCL: {error}") from error


class _Meeting:
    """One member's part of a meeting. Everything blocks; all of it happens in one thread."""

    def __init__(
        self, device: Device, rank: int, ranks: list[int], stop: Stop, timeout: float, rdma: RdmaConfig
    ) -> None:
        self._device = device
        self._runtime = device.runtime
        self._rank = rank
        self._ranks = ranks
        self._stop = stop
        self._timeout = timeout
        self._rdma = rdma
        self._comm: Handle | None = None
        self._stream: Handle | None = None
        self._memory: Memory | None = None

    def run(self, name: str, rank_table: str, blob: bytes) -> dict[int, bytes]:
        with self._device.current():
            is_drained = False
            try:
                self._open(blob)
                with _failing_as_link():
                    self._make_communicator(name, rank_table)
                    self._exchange()
                    is_drained = True
                    return {rank: self._read(rank) for rank in self._ranks if rank != self._rank}
            finally:
                self._close(is_drained)

    # ---- what it needs ----

    def _open(self, blob: bytes) -> None:
        acl = self._runtime.acl
        self._memory = Memory(self._runtime, BLOB * len(self._ranks), Placement.DEVICE, lambda _: None)
        stream = ffi.new("aclrtStream *")
        self._runtime.check("aclrtCreateStream", acl.aclrtCreateStream(stream))
        self._stream = stream[0]
        wire = ffi.from_buffer((len(blob).to_bytes(LENGTH, "little") + blob).ljust(BLOB, b"\0"))
        kind = ring.ACL_MEMCPY_HOST_TO_DEVICE
        self._runtime.check("aclrtMemcpy", acl.aclrtMemcpy(self._slot(self._rank), BLOB, wire, BLOB, kind))

    def _slot(self, rank: int) -> Handle:
        """Where the blob of this rank is, or will be."""
        assert self._memory is not None
        return ffi.cast("void *", self._memory.address + BLOB * self._ranks.index(rank))

    def _make_communicator(self, name: str, rank_table: str) -> None:
        config = communicator_config(name, BUFFER_MIB, self._rdma)
        if self._runtime.is_soft:
            self._stop.ends_calls_of(config)
        comm = ffi.new("HcclComm *")
        with _in_file(rank_table) as path, making(self._device, self._timeout, self._stop):
            code = self._runtime.hccl.HcclCommInitClusterInfoConfig(path, self._rank, config, comm)
            self._runtime.check_hccl("HcclCommInitClusterInfoConfig", code)
        self._comm = comm[0]

    def _close(self, is_drained: bool) -> None:
        """Give everything back. Refusals are logged: the blobs are there, or a better reason why not."""
        if self._stream is not None and not is_drained and not self._abort():
            logger.error("device %d did not let go of a meeting: its memory stays allocated", self._device.index)
            return
        check, acl, hccl = self._runtime.check, self._runtime.acl, self._runtime.hccl
        gives: list[Callable[[], None]] = []
        if self._comm is not None:
            gives.append(lambda: self._runtime.check_hccl("HcclCommDestroy", hccl.HcclCommDestroy(self._comm)))
        if self._stream is not None:
            gives.append(lambda: check("aclrtDestroyStream", acl.aclrtDestroyStream(self._stream)))
        if self._memory is not None:
            gives.append(self._memory.free)
        for give in gives:
            try:
                give()
            except LLMException as error:
                logger.warning("after a meeting: %s", error)

    # ---- the exchange ----

    def _exchange(self) -> None:
        """Pair by pair, in one order for all members: no circle of waiting. The lower rank of a pair sends first."""
        for lower, higher in itertools.combinations(self._ranks, 2):
            if self._rank in (lower, higher):
                peer = lower + higher - self._rank
                for sends in (self._rank == lower, self._rank == higher):
                    self._move(peer, sends)

    def _move(self, peer: int, sends: bool) -> None:
        name, slot = ("HcclSend", self._slot(self._rank)) if sends else ("HcclRecv", self._slot(peer))
        code = getattr(self._runtime.hccl, name)(slot, BLOB, ring.HCCL_DATA_TYPE_INT8, peer, self._comm, self._stream)
        self._runtime.check_hccl(name, code)
        code = self._wait(SLICE_MS)
        while code == ring.ACL_ERROR_RT_STREAM_SYNC_TIMEOUT and not self._stop.is_set():
            self._runtime.recent_words()  # the slice's own timeout is not news
            code = self._wait(SLICE_MS)
        self._runtime.check(name, code)

    def _wait(self, milliseconds: int) -> int:
        return int(self._runtime.acl.aclrtSynchronizeStreamWithTimeout(self._stream, milliseconds))

    def _abort(self) -> bool:
        """Whatever the stream has: nothing of it may touch the memory any more. False: the device does not let go."""
        try:
            self._runtime.check("aclrtStreamAbort", self._runtime.acl.aclrtStreamAbort(self._stream))
        except LLMException as error:  # then it has to end by itself
            logger.warning("after a meeting: %s", error)
        return bool(self._wait(GRACE_MS) != ring.ACL_ERROR_RT_STREAM_SYNC_TIMEOUT)

    def _read(self, rank: int) -> bytes:
        wire = ffi.new("char[]", BLOB)
        kind = ring.ACL_MEMCPY_DEVICE_TO_HOST
        self._runtime.check("aclrtMemcpy", self._runtime.acl.aclrtMemcpy(wire, BLOB, self._slot(rank), BLOB, kind))
        text = bytes(ffi.buffer(wire))
        length = int.from_bytes(text[:LENGTH], "little")
        if length > BLOB - LENGTH:
            raise ProtocolError(f"rank {rank} sent a blob that says {length} bytes: {BLOB - LENGTH} is the limit")
        return text[LENGTH : LENGTH + length]


@contextmanager
def _in_file(rank_table: str) -> Iterator[bytes]:
    """HCCL wants the table of a two-sided communicator in a file, whose real path it looks up."""
    with tempfile.NamedTemporaryFile("w", prefix="aiodatadist-", suffix=".json", encoding="utf-8") as file:
        file.write(rank_table)
        file.flush()
        yield os.fsencode(file.name)
