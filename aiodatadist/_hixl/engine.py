"""The engine of HIXL's interface: it registers memory, connects to engines, and moves ranges between theirs and its own."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import anyio

from aiodatadist._cache.task import CacheTask
from aiodatadist._config.llm_config import LLMConfig
from aiodatadist._counting import Incident
from aiodatadist._datadist import LLMDataDist
from aiodatadist._device import MAX_COPY_SECONDS, TransferCompletion, TransferState
from aiodatadist._hixl.cluster import RangeCluster, Ranges
from aiodatadist._hixl.memory import RegisteredMemory
from aiodatadist._hixl.names import EngineName, named, naming, parse_name, parse_peer
from aiodatadist._hixl.notes import Notes
from aiodatadist._hixl.options import Options, read_options
from aiodatadist._hixl.resources import Resources
from aiodatadist._hixl.staging import StagedRanges, Staging
from aiodatadist._hixl.values import MemDesc, MemType, NotifyDesc, TransferOp, TransferOpDesc, columns, note_payload
from aiodatadist._link import Link, RangeSpec, RemoteOperation, failed
from aiodatadist._values.descriptors import LLMRole
from aiodatadist.errors import (
    LinkClosed,
    LinkTimeout,
    LLMException,
    NotLinked,
    ParamInvalid,
    TransferError,
    TransferTimeout,
)

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 3.0
"""Seconds for a connection that a transfer without a time limit makes by itself."""


def milliseconds(value: Any, name: str) -> float:
    """Return a time limit in seconds. Raises TypeError if it is no int, and ParamInvalid unless it is above 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}: must be an int")
    if not 0 < value < 1 << 31:
        raise ParamInvalid(f"{name} is {value}: must be above 0, and below {1 << 31}")
    return value / 1000


class Hixl:
    """An engine: usually one process that drives one device. It moves bytes between registered ranges, by address.

    Use ``async with Hixl("10.0.0.7:26000") as engine:``, or call :meth:`initialize` and :meth:`finalize`. It belongs to the
    event loop on which it was initialised. The errors are those of :mod:`aiodatadist.errors`, and
    :func:`~aiodatadist.hixl.status_of` returns HIXL's status of each.

    Args:
        local_engine: the engine's name, if :meth:`initialize` is given none.
        options: the same for its options.
    """

    def __init__(self, local_engine: str | None = None, options: Mapping[str, str] | LLMConfig | None = None) -> None:
        self._first = local_engine, options
        self._name: EngineName | None = None
        self._options: Options | None = None
        self._cluster: RangeCluster | None = None
        self._changing = anyio.Lock(fast_acquire=True)  # an end that was cancelled closes everything, too
        self._ranges: Ranges
        self._memory: RegisteredMemory
        self._staging: Staging
        self._notes: Notes
        self._under_way: defaultdict[int, set[TransferCompletion]] = defaultdict(set)
        self._cut: set[TransferCompletion] = set()
        self._connecting: dict[int, anyio.Lock] = {}
        self._used: dict[EngineName, None] = {}  # connected peers, the longest unused first

    def __repr__(self) -> str:
        state = "not initialised" if self._cluster is None else f"{len(self._memory)} ranges registered"
        return f"<Hixl {self._name or ''}: {state}>"

    # ---- life ----

    async def initialize(
        self, local_engine: str | None = None, options: Mapping[str, str] | LLMConfig | Options | None = None
    ) -> None:
        """Open the device, and listen if the name has a port above 0. No effect on an engine that is initialised.

        Args:
            local_engine: ``ip:port``, ``ip``, ``[ipv6]:port`` or ``[ipv6]``: the engine's name, which must be unique among
                all engines that connect.
            options: HIXL's options, as texts. Keys that begin with ``aiodatadist.`` are options of ``LLMConfig``, which
                may also be given itself.

        Raises:
            TypeError, ParamInvalid, FeatureNotEnabled: if the name or an option is wrong.
            LLMException: if the device cannot be opened, or the port is in use. Nothing is left open.
        """
        async with self._changing:
            if self._cluster is None:
                await self._open(local_engine, options)

    async def _open(self, local_engine: str | None, options: Mapping[str, str] | LLMConfig | Options | None) -> None:
        first_name, first_options = self._first
        name = parse_name(first_name if local_engine is None else local_engine, "local_engine")
        found = read_options(first_options if options is None else options)
        found.config.listen_ip_info = str(name) if name.port else None
        for line in found.remarks:
            logger.warning("hixl %s: %s", name, line)
        cluster = RangeCluster(LLMRole.MIX, name.cluster_id(), found.config)
        try:
            await cluster.init()
            self._ranges = Ranges(cluster.engine)
            self._staging = Staging(self._ranges, found.buffers)
            await self._staging.open()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await cluster.finalize()
            raise
        self._memory = RegisteredMemory(self._ranges)
        self._notes = cluster.engine.notification_inbox = Notes(cluster.engine.check_here)
        self._name, self._options, self._cluster = name, found, cluster

    async def finalize(self) -> None:
        """Close connections, registrations and the listener. No effect if the engine is not initialised.

        Transfers under way are stopped; once this returns, no byte of theirs lands. If another task initialises or finalizes
        the engine, this waits for it.
        """
        with anyio.CancelScope(shield=True):
            await self._changing.acquire()
        try:
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                await self._close(cluster)
        finally:
            self._changing.release()

    async def _close(self, cluster: RangeCluster) -> None:
        try:
            for peer in list(self._under_way):
                await self._stop(peer, "the engine was finalized")
            await self._staging.aclose()
        finally:
            with anyio.CancelScope(shield=True):
                await cluster.finalize()

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.finalize()

    def _running(self) -> RangeCluster:
        if self._cluster is None:
            raise RuntimeError("this Hixl is not initialised: use async with, or await initialize() first")
        self._cluster.engine.check_here()
        return self._cluster

    @property
    def name(self) -> str:
        """The engine's name, by which peers connect to it. Raises RuntimeError if it is not initialised."""
        self._running()
        return str(self._name)

    @property
    def cluster(self) -> LLMDataDist:
        """The cluster below, with :meth:`~aiodatadist.LLMDataDist.figures`, ``statistics`` and ``observer``."""
        return self._running()

    # ---- memory ----

    async def register_mem(self, mem: MemDesc, type: MemType) -> int:  # noqa: A002 - HIXL's name
        """Register a range, so that it can be moved and peers that connect can reach it; return its handle, above 0.

        It can be called at any time, also on an engine with connections. The memory must stay until
        :meth:`deregister_mem`. The same range again has the same handle.

        Raises:
            TypeError, ParamInvalid: if an argument is wrong, or the range overlaps another one without being the same.
            LLMException: if the memory cannot be registered.
        """
        self._running()
        return await self._memory.register(mem, type)

    async def deregister_mem(self, handle: int) -> None:
        """Release a range. An unknown handle has no effect.

        Raises:
            ParamInvalid: if the handle is 0.
            LLMException: with ``LLM_EXIST_LINK`` while there are connections, of this end or of peers: disconnect first.
        """
        self._running()
        await self._memory.deregister(handle)

    # ---- connections ----

    async def connect(self, remote_engine: str, timeout_in_millis: int = 1000) -> None:
        """Connect to an engine that listens. This end may then move ranges; the peer may once it connects, too.

        Raises:
            ParamInvalid: if the name or the time limit is wrong, or the name is this engine's.
            LLMException: with ``LLM_ALREADY_LINK`` if it is connected; the connection stays.
            LinkTimeout: if it was not connected in time.
            LinkError: if no engine listens there, or it refused.
        """
        cluster, seconds = self._running(), milliseconds(timeout_in_millis, "timeout_in_millis")
        peer = parse_peer(remote_engine, "remote_engine")
        if peer == self._name:
            raise ParamInvalid(f"remote_engine is {remote_engine!r}: an engine does not connect to itself")
        await self._connect(cluster, peer, seconds)

    async def _connect(self, cluster: RangeCluster, peer: EngineName, seconds: float) -> None:
        cluster_id = peer.cluster_id()
        with naming(peer, cluster_id):
            await cluster.link_to(cluster_id, peer.address, timeout=seconds)
        self._use(peer)

    def _use(self, peer: EngineName) -> None:
        self._used.pop(peer, None)
        self._used[peer] = None

    async def disconnect(self, remote_engine: str, timeout_in_millis: int = 1000) -> None:
        """End this end's connection. Its transfers under way fail, and once this returns no byte of theirs lands.

        Raises:
            ParamInvalid: if the name or the time limit is wrong.
            NotLinked: if there is no connection.
            LinkTimeout: if the peer did not confirm in time. This end's half has ended all the same.
        """
        cluster, seconds = self._running(), milliseconds(timeout_in_millis, "timeout_in_millis")
        peer = parse_peer(remote_engine, "remote_engine")
        cluster_id = peer.cluster_id()
        with naming(peer, cluster_id):
            self._used.pop(peer, None)
            # first, because transfers may still be ending on a connection that is lost
            await self._stop(cluster_id, f"engine {peer} was disconnected")
            link = cluster.engine.links.find(cluster_id)
            try:
                await cluster.unlink_from(cluster_id, timeout=seconds)
            except LinkTimeout:
                if link.life.ownership.is_ours:
                    await link.abandon(LinkClosed(f"engine {peer} was disconnected, and did not answer"))
                raise

    async def _stop(self, cluster_id: int, why: str) -> None:
        """Stop this end's transfers with a peer, and wait until no byte of theirs can land."""
        for transfer in list(self._under_way.get(cluster_id, ())):
            self._cut.add(transfer)
            transfer.add_done_callback(partial(_replace, why))
            transfer.cancel()
        while left := self._under_way.get(cluster_id, set()) & self._cut:
            ended = anyio.Event()
            next(iter(left)).add_done_callback(partial(_set, ended))
            await ended.wait()

    # ---- transfers ----

    def transfer(
        self,
        remote_engine: str,
        op: TransferOp,
        op_descs: Sequence[TransferOpDesc],
        *,
        timeout: float | None = None,
        staging: bool = True,
    ) -> CacheTask:
        """Start to move ranges, all of them or, if it fails, an unknown part; ``await`` the result for its report.

        Cancelling it, or the task that awaits it, stops the transfer. It ends once no byte can land any longer, and so it
        does after ``timeout``.

        Args:
            remote_engine: the name of a connected engine; with the option ``AutoConnect``, any engine's.
            op: READ reads the peer's ranges into this end's, WRITE writes this end's into the peer's.
            op_descs: the ranges. Those of the peer must lie in memory that it registered, each in one range.
            timeout: seconds from now; None for no limit.
            staging: True to move ranges that are not registered here through staging buffers, as ``BufferPool`` says.

        Raises:
            TypeError, ParamInvalid: if an argument is wrong, or a range of this end is not registered and may not be staged.
            NotLinked: if the engine is not connected.
        """
        cluster, peer = self._running(), parse_peer(remote_engine, "remote_engine")
        if not isinstance(op, TransferOp):
            raise TypeError(f"op is {op!r} of type {type(op).__name__}: must be a TransferOp")
        local, remote, lengths = columns(op_descs)
        entries, missing = self._memory.covering(local, lengths)
        self._check_local(entries, missing, op_descs, staging)
        direction: Literal["get", "put"] = "get" if op is TransferOp.READ else "put"
        what = op.name.lower()
        seconds = MAX_COPY_SECONDS if timeout is None else timeout

        def begin(link: Link) -> TransferCompletion:
            if missing:
                return self._staging.begin(link, StagedRanges(local, remote, lengths, direction, seconds), what)
            return link.transfers.ranges.begin(RangeSpec(entries, local, remote, lengths, direction, seconds), what)

        transfer = self._begin(cluster, peer, begin, timeout)
        about = f"{len(op_descs)} ranges of engine {peer}"
        return self._ranges.follow(what, peer.cluster_id(), transfer, about, timeout)

    def _check_local(self, entries: Any, missing: list[int], op_descs: Sequence[TransferOpDesc], staging: bool) -> None:
        """Raise ParamInvalid if ranges of this end are not registered, and may not go through staging buffers."""
        if not missing:
            return
        desc = op_descs[missing[0]]
        if not staging or not self._staging.is_there:
            why = "an asynchronous transfer uses no staging buffers" if not staging else "there are no staging buffers"
            raise ParamInvalid(
                f"op_descs[{missing[0]}], {desc}: its local range is not in registered memory, and {why}"
            )
        for number in missing:
            if op_descs[number].local_addr + op_descs[number].len > 1 << 64:
                raise ParamInvalid(f"op_descs[{number}], {op_descs[number]}: its local range leaves the address space")
        if self._memory.has_device_memory(entries):
            raise ParamInvalid(
                f"op_descs[{missing[0]}], {desc}: its local range is not in registered memory and counts as memory of the "
                "host; others of the call are memory of the device: all must be of one kind",
                hint="make two calls, or register the memory",
            )

    def _begin(
        self,
        cluster: RangeCluster,
        peer: EngineName,
        begin: Callable[[Link], TransferCompletion],
        timeout: float | None,
    ) -> TransferCompletion:
        is_auto = self._options is not None and self._options.auto_connect
        cluster_id = peer.cluster_id()
        try:
            with naming(peer, cluster_id):
                transfer = begin(cluster.link_of(cluster_id))
            if is_auto:
                self._use(peer)
        except (NotLinked, LinkClosed):
            if not is_auto or peer == self._name:
                raise
            transfer = self._connect_first(cluster, peer, begin, timeout)
        if transfer.state is not TransferState.DONE:
            self._under_way[cluster_id].add(transfer)
            transfer.add_done_callback(partial(self._ended, peer, cluster_id))
            if is_auto:
                transfer.add_done_callback(partial(self._leave_if_failed, cluster, peer))
        return transfer

    def _ended(self, peer: EngineName, cluster_id: int, transfer: TransferCompletion) -> None:
        self._cut.discard(transfer)
        if transfer.error is not None:
            named(transfer.error, peer, cluster_id)
        under_way = self._under_way[cluster_id]
        under_way.discard(transfer)
        if not under_way:
            del self._under_way[cluster_id]

    # ---- connections that transfers make ----

    def _connect_first(
        self,
        cluster: RangeCluster,
        peer: EngineName,
        begin: Callable[[Link], TransferCompletion],
        timeout: float | None,
    ) -> TransferCompletion:
        operation = RemoteOperation(f"transfer with engine {peer}", MAX_COPY_SECONDS)
        cluster_id = peer.cluster_id()

        async def connect() -> None:
            async with self._turn(cluster_id):
                try:
                    link = cluster.link_of(cluster_id)
                except (NotLinked, LinkClosed):
                    await self._connect(cluster, peer, CONNECT_SECONDS if timeout is None else timeout)
                    link = cluster.link_of(cluster_id)
            operation.follow(begin(link))
            await self._make_room(peer)

        if not cluster.engine.spawn(lambda: operation.run(connect)):
            return failed("transfer", LinkClosed("the engine is being finalized"))
        return operation

    @asynccontextmanager
    async def _turn(self, cluster_id: int) -> AsyncIterator[None]:
        """Wait until no other transfer connects to the cluster."""
        turn = self._connecting.setdefault(cluster_id, anyio.Lock())
        try:
            async with turn:
                yield
        finally:
            if not turn.locked():  # its last user leaves
                self._connecting.pop(cluster_id, None)

    async def _make_room(self, current: EngineName) -> None:
        """Disconnect idle peers above the high mark of ``channel_pool``, down to the low one, the longest unused first."""
        resources = self._options.resources if self._options is not None else Resources()
        if not resources.max_channels or len(self._used) <= resources.high_mark:
            return
        for peer in [peer for peer in self._used if peer != current and not self._under_way.get(peer.cluster_id())]:
            if len(self._used) <= resources.low_mark:
                return
            try:
                await self.disconnect(str(peer))
            except (LLMException, RuntimeError) as error:  # RuntimeError: the engine is being finalized
                logger.debug("hixl %s: %s", self._name, error)

    def _leave_if_failed(self, cluster: RangeCluster, peer: EngineName, transfer: TransferCompletion) -> None:
        """Disconnect a peer with which a transfer failed, as HIXL does with ``AutoConnect``."""
        if transfer.error is None or isinstance(transfer.error, (ParamInvalid, NotLinked)):
            return

        async def leave() -> None:
            try:
                await self.disconnect(str(peer))
            except (LLMException, RuntimeError) as error:
                told = "hixl: engine %s was left after a failed transfer: %s", peer, error
                cluster.engine.totals.incidents.add(Incident.LINK_FAILED, logger, *told, level=logging.DEBUG)

        cluster.engine.spawn(leave)

    # ---- notifications ----

    async def send_notify(self, remote_engine: str, notify: NotifyDesc, timeout_in_millis: int = 1000) -> None:
        """Send a notification to a connected engine, and wait until it has it. It comes behind what was written before.

        Raises:
            TypeError, ParamInvalid: if an argument is wrong, or name or message have more than 1024 bytes.
            NotLinked: if the engine is not connected.
            TransferTimeout: if it did not acknowledge in time, for instance because 4096 others were not read there,
                or 64 MiB of all peers'.
        """
        cluster, seconds = self._running(), milliseconds(timeout_in_millis, "timeout_in_millis")
        peer, payload = parse_peer(remote_engine, "remote_engine"), note_payload(notify)
        cluster_id = peer.cluster_id()
        with naming(peer, cluster_id), anyio.move_on_after(seconds) as limit:
            link = cluster.link_of(cluster_id)
            await link.session.notify(payload)
            await link.session.ping()
        if limit.cancelled_caught:
            raise TransferTimeout(f"engine {peer} did not acknowledge a notification within {seconds:g} s")

    def notifications(self) -> AsyncIterator[NotifyDesc]:
        """Return an iterator over the notifications of peers: ``async for note in engine.notifications()``.

        If there are several iterators, each notification goes to one of them. They end with :meth:`finalize`.
        """
        self._running()
        return self._notes.read()

    def get_notifies(self) -> list[NotifyDesc]:
        """Return the notifications that have come and were not read, in the order of each peer's calls. It does not wait."""
        self._running()
        return self._notes.take_all()


def spawner_of(engine: Hixl) -> Callable[..., bool]:
    """Return a function that starts a task of an engine, which ends with it; it returns False if the engine has ended."""
    return engine._running().engine.spawn


def _set(ended: anyio.Event, transfer: TransferCompletion) -> None:
    ended.set()


def _replace(why: str, transfer: TransferCompletion) -> None:
    """Give a transfer that was stopped the reason, because a CancelledError would look like its caller's own."""
    if transfer.is_cancelled:
        transfer.replace_error(TransferError(why))
