"""Exchange of a few bytes between processes that know only a rank table: they meet through HCCL itself.

Upstream's symmetric ``link`` gives its members a name, a map of cluster ids to ranks and a rank table, but no address
of a control connection. So the members make one one-sided communicator together, and use its exchange of memory
descriptors as a mailbox: HCCL carries a descriptor and looks only at the two ranks at its beginning.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import struct
import time
from collections import Counter
from typing import Any

from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._device import Device
from aiodatadist._native.library import ffi
from aiodatadist._transport.communicator import Communicator, communicator_config, failing_as_link, whole_seconds
from aiodatadist._transport.contract import DEFAULT_RDMA, RdmaConfig
from aiodatadist._values import checks
from aiodatadist.errors import LinkTimeout, LLMException, ParamInvalid, ProtocolError

logger = logging.getLogger(__name__)

RANKS = struct.Struct("=II")
"""The beginning of a descriptor: the rank that sends it, and the rank that it is for. HCCL refuses any other rank."""

BLOB = 512 - RANKS.size - 1
"""The largest blob, in bytes: a descriptor without its ranks, and without the zero at its end."""

MEMBERS = range(2, 5)
"""The numbers of members that can link."""
NAME_LENGTH = 128  # of HcclCommConfig.hcclCommName, with the zero at its end
VERSIONS = ("1.0", "1.2")
MAX_TABLE = 64 << 10  # characters of a rank table, which names four devices at most
BUFFER_MIB = 1  # HCCL's staging memory, of which the default is 200 MiB: more than KV caches may have left


# ---- the arguments of upstream's link() ----


def validate(comm_name: Any, cluster_rank_info: Any, rank_table: Any, cluster_id: int) -> tuple[int, dict[int, int]]:
    """Check the arguments of upstream's ``link``. Return this cluster's rank, and the rank of each cluster.

    Raises:
        TypeError, ValueError: if a type is wrong, or a number is outside its C type.
        ParamInvalid: if a rule is broken. The message names it.
    """
    _check_name(checks.instance(comm_name, "comm_name", str))
    ranks = _check_ranks(checks.instance(cluster_rank_info, "cluster_rank_info", dict), cluster_id)
    _check_table(checks.instance(rank_table, "rank_table", str), ranks)
    return ranks[cluster_id], ranks


def _check_name(name: str) -> None:
    if not 1 <= len(name) < NAME_LENGTH:
        raise ParamInvalid(f"comm_name has {len(name)} characters: must have 1 to {NAME_LENGTH - 1}")
    if not (name.isascii() and name.isprintable()):
        raise ParamInvalid(f"comm_name is {name!r}: must be printable ASCII")


def _check_ranks(given: dict[Any, Any], cluster_id: int) -> dict[int, int]:
    ranks = {
        checks.integer(cluster, "a cluster id of cluster_rank_info", checks.UINT64): checks.integer(
            rank, f"cluster_rank_info[{cluster}]", checks.UINT32
        )
        for cluster, rank in given.items()
    }
    if len(ranks) not in MEMBERS:
        raise ParamInvalid(f"cluster_rank_info has {len(ranks)} entries: must have {MEMBERS[0]} to {MEMBERS[-1]}")
    for one, other in itertools.pairwise(ranks.values()):
        if one >= other:
            raise ParamInvalid(f"cluster_rank_info has rank {other} after {one}: ranks must ascend")
    if list(ranks.values()) != list(range(len(ranks))):
        raise ParamInvalid(
            f"cluster_rank_info has ranks {list(ranks.values())}: must be 0 to {len(ranks) - 1} without a gap"
        )
    if cluster_id not in ranks:
        raise ParamInvalid(f"cluster_rank_info has clusters {list(ranks)}: our own, {cluster_id}, must be one of them")
    return ranks


def _check_table(text: str, ranks: dict[int, int]) -> None:
    if len(text) > MAX_TABLE:
        raise ParamInvalid(f"rank_table has {len(text)} characters: the limit is {MAX_TABLE}")
    try:
        table = json.loads(text)
        text.encode()  # fails for a lone surrogate, which json.loads accepts
    except (ValueError, RecursionError) as error:
        raise ParamInvalid(f"rank_table is not JSON: {error}") from error
    version = _member(table, "version", str, "rank_table")
    if version not in VERSIONS:
        raise ParamInvalid(f"rank_table has version {version!r}: must be {' or '.join(VERSIONS)}")
    found: Counter[int] = Counter()
    for i, server in enumerate(_member(table, "server_list", list, "rank_table")):
        where = f"rank_table.server_list[{i}]"
        for j, device in enumerate(_member(server, "device", list, where)):
            rank_id = _member(device, "rank_id", str, f"{where}.device[{j}]")
            if not (rank_id.isascii() and rank_id.isdigit() and len(rank_id) <= len(str(checks.UINT32[-1]))):
                raise ParamInvalid(f"{where}.device[{j}].rank_id is {rank_id!r}: must be a rank, in digits")
            found[int(rank_id)] += 1
    for cluster, rank in ranks.items():
        if found[rank] != 1:
            times = f"{found[rank]} times" if found[rank] else "not"
            raise ParamInvalid(f"rank_table has rank {rank}, of cluster {cluster}, {times}: must be there once")
    surplus = sorted(found.keys() - ranks.values())
    if surplus:
        raise ParamInvalid(f"rank_table has ranks {surplus}, of no cluster in cluster_rank_info: they would never come")


def _member(of: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(of, dict) or name not in of:
        raise ParamInvalid(f"{where} has no {name!r}")
    if not isinstance(of[name], kind):
        wanted = "an array" if kind is list else "a string"
        raise ParamInvalid(f"{where}.{name} is of type {type(of[name]).__name__}: must be {wanted}")
    return of[name]


# ---- meeting ----


async def meet(
    device: Device,
    name: str,
    rank: int,
    members: int,
    rank_table: str,
    blob: bytes,
    timeout: float,
    rdma: RdmaConfig = DEFAULT_RDMA,
) -> dict[int, bytes]:
    """Exchange blobs with all other members, which make the same call with the same name, number and table.

    If cancelled or out of time, it ends at once on softnpu that is not strict. The vendor's library cannot be told to
    stop waiting: there this returns, after a cancellation as after a timeout, when ``HcclCommPrepare`` has given up by
    itself. That takes at most ``timeout`` for each of its three phases. If a member falls silent after that, it takes
    until HCCL_CONNECT_TIMEOUT has passed, 120 s unless set.

    Args:
        rank: 0 to ``members`` - 1.
        blob: at most ``BLOB`` bytes, without a zero.
        timeout: seconds.
        rdma: options of the communicator.

    Returns:
        The blob of every other member, by rank.

    Raises:
        ParamInvalid: if an argument breaks a rule. No member was waited for.
        LinkTimeout: if a member did not come in time.
        LinkError: if the communicator could not be made, or broke, because a member failed, ended or gave up.
        FeatureNotEnabled: if the runtime lacks a function.
    """
    _check_meeting(name, rank, members, blob)
    meeting = _Meeting(device, rank, members, timeout)
    try:
        async with asyncio.timeout(timeout):
            return await in_thread(meeting.run, name, rank_table, blob, rdma, on_cancel=meeting.call_off)
    except LinkTimeout:
        raise
    except TimeoutError as error:
        raise LinkTimeout(f"{name!r}: not all of the {members} ranks came within {timeout} s") from error


def _check_meeting(name: str, rank: int, members: int, blob: bytes) -> None:
    _check_name(name)
    if members not in MEMBERS:
        raise ParamInvalid(f"members is {members}: must be {MEMBERS[0]} to {MEMBERS[-1]}")
    if rank not in range(members):
        raise ParamInvalid(f"rank is {rank}: must be 0 to {members - 1}")
    if len(blob) > BLOB or 0 in blob:
        raise ParamInvalid(f"blob has {len(blob)} bytes: must have at most {BLOB}, none of them zero")


class _Meeting:
    """A member's part of a meeting. Everything blocks, in one thread; only :meth:`call_off` can be called from another."""

    def __init__(self, device: Device, rank: int, members: int, timeout: float) -> None:
        self._device = device
        self._runtime = device.runtime
        self._rank = rank
        self._others = [other for other in range(members) if other != rank]
        self._deadline = time.monotonic() + timeout
        self._comm = Communicator(device)
        self.call_off = self._comm.call_off

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def run(self, name: str, rank_table: str, blob: bytes, rdma: RdmaConfig) -> dict[int, bytes]:
        with self._device.current():
            try:
                self._comm.make(rank_table, self._rank, communicator_config(name, BUFFER_MIB, rdma))
                self._comm.prepare(self._left())
                blobs = {other: self._swap(other, blob) for other in self._others}
                self._take_leave()
                return blobs
            finally:
                self._close()

    def _swap(self, other: int, blob: bytes) -> bytes:
        """Exchange blobs with one member. All members go through the others by rank, so there is no circle of waiting."""
        mine, theirs = (ffi.new("HcclMemDescs *", {"arrayLength": 1}) for _ in range(2))
        sent, got = ffi.new("HcclMemDesc *"), ffi.new("HcclMemDesc *")
        mine.array, theirs.array = sent, got
        text = RANKS.pack(self._rank, other) + blob
        ffi.memmove(sent.desc, text, len(text))
        count = ffi.new("uint32_t *")
        exchange, seconds = self._runtime.hccl.HcclExchangeMemDesc, whole_seconds(self._left())
        with failing_as_link():
            code = exchange(self._comm.handle, other, mine, seconds, theirs, count)
            self._runtime.check_hccl("HcclExchangeMemDesc", code)
        return self._read(other, count[0], bytes(ffi.buffer(got)))

    def _read(self, other: int, count: int, text: bytes) -> bytes:
        ranks = RANKS.unpack_from(text)
        blob, zero, _ = text[RANKS.size :].partition(b"\0")
        if count != 1 or ranks != (other, self._rank) or not zero:
            raise ProtocolError(
                f"rank {other} sent {count} descriptors, from rank {ranks[0]} to {ranks[1]}: not a blob"
            )
        return blob

    def _take_leave(self) -> None:
        """Exchange empty blobs in a second round, so that no member leaves while another still reads its first blob.

        A member that has left already had all that it needs.
        """
        for other in self._others:
            try:
                self._swap(other, b"")
            except LLMException as error:
                logger.debug("rank %d has left the meeting: %s", other, error)

    def _close(self) -> None:
        """Destroy the communicator. A refusal is only logged: the blobs are there, or a better reason why not."""
        try:
            self._comm.destroy()
        except LLMException as error:
            logger.warning("after a meeting: %s", error)
