"""Channels over TCP: the bytes of HOST memory, and of softnpu's, travel over the data connections of a link.

``native/net/`` moves them, without the interpreter. Only the owner of memory reads or writes it, after it has compared each
range with what it has lent to this peer. So a channel reaches what is lent, whenever it was registered: it is never replaced.
"""

from __future__ import annotations

import asyncio
import errno
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, Final

from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._device import RingCalls, Stream, StreamLimits
from aiodatadist._native.library import Handle, ffi, ring
from aiodatadist._transport.contract import (
    DEFAULT_RDMA,
    DEFAULT_TCP,
    Access,
    Channel,
    ChannelOffer,
    Endpoint,
    RdmaConfig,
    Region,
    TcpConfig,
    Transport,
)
from aiodatadist._transport.hccl import host_identity
from aiodatadist._values.descriptors import Placement
from aiodatadist._values.foreign import printable
from aiodatadist._wire.ways import ways_of
from aiodatadist.errors import IncompatiblePeer, LinkClosed, LinkError, OutOfMemory, ParamInvalid, explained

if TYPE_CHECKING:
    from aiodatadist._device import Device, Layering, Program
    from aiodatadist._transport.contract import DataConnection
    from aiodatadist._values.grid import Grid

_ADDRESS: Final = attrgetter("address")

PATIENCE: Final = 0.5
"""Seconds for which nothing may move while the peer has not confirmed a cancelled push. Then the channel is broken."""

MOST_PATIENCE: Final = ring.NET_MOST_PATIENCE * PATIENCE
"""Seconds that the peer has to confirm it while something moves."""

LIMITS: Final = StreamLimits(patience=MOST_PATIENCE, abort=0.1, grace=0.1)
"""The limits of a stream: nothing gets stuck, because every wait ends when a connection is closed."""

NET_RING: Final = RingCalls(
    ring.net_submit_as, ring.net_cancel, ring.net_watch, ring.net_overdue, ring.net_reap, ring.net_fd, ring.net_close,
    ring.net_free,
)  # fmt: skip
"""The calls of a ring that gives its programs to data connections."""


class TcpTransport(Transport):
    """One-sided transfers over TCP, for processes on any machine."""

    name: ClassVar[str] = "tcp"

    def __init__(
        self,
        device: Device,
        resource: str | None = None,
        rdma: RdmaConfig = DEFAULT_RDMA,
        tcp: TcpConfig = DEFAULT_TCP,
    ) -> None:
        if resource is not None:
            raise ParamInvalid("local_comm_res describes an NPU to HCCL: must be left out with transport 'tcp'")
        super().__init__(device, resource, rdma, tcp)
        self._regions: dict[Region, int] = {}
        self._by_address: list[Region] = []
        self._endpoint = Endpoint(
            self.name,
            device.runtime.name,
            host_identity(),
            "",
            str(device.index),
            "",
            process=os.getpid(),
            streams=tcp.streams,
        )

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            if region.placement is Placement.DEVICE and not self.device.runtime.is_soft:
                raise ParamInvalid(
                    f"{region} is on an NPU, whose memory travels by HCCL: transport 'tcp' moves HOST memory",
                    hint="make that cache with Placement.HOST, or use transport='hccl' at both ends",
                )
        fresh = [region for region in dict.fromkeys(regions) if region not in self._regions]
        by_address = self._with(fresh)
        self.device.adopt([(region.address, region.nbytes, region.placement) for region in fresh])
        self._by_address = by_address
        for region in regions:
            self._regions[region] = self._regions.get(region, 0) + 1

    def _with(self, fresh: Sequence[Region]) -> list[Region]:
        """Return all regions by address, together with these. Raises ParamInvalid if two overlap.

        Others are apart from each other, so each is compared with its two neighbours only: there may be thousands.
        """
        ordered = self._by_address.copy()
        for region in fresh:
            at = bisect_left(ordered, region.address, key=_ADDRESS)
            for other in ordered[max(at - 1, 0) : at + 1]:
                if region.overlaps(other):
                    raise ParamInvalid(f"{region} overlaps the registered {other}: ranges must be equal or apart")
            ordered.insert(at, region)
        return ordered

    async def unregister(self, regions: Sequence[Region]) -> None:
        for region in regions:
            count = self._regions.pop(region, 0)
            if count > 1:
                self._regions[region] = count - 1
            elif count:
                del self._by_address[bisect_left(self._by_address, region.address, key=_ADDRESS)]
                self.device.disown([(region.address, region.nbytes)])

    async def open_channel(self, offer: ChannelOffer, timeout: float) -> Channel:
        peer = offer.endpoints[offer.peer_rank]
        if self.name not in ways_of(peer):
            raise IncompatiblePeer(
                f"the peer's transport is {printable(peer.transport)}, and tcp here: must be the same"
            )
        if offer.sockets is None:
            raise LinkError(f"cluster at {printable(peer.host)} offers no data connections: tcp needs at least one")
        connections = await offer.sockets(offer.streams, timeout)
        return TcpChannel(self.device, connections, self.tcp)

    async def aclose(self) -> None:
        self.device.disown([(region.address, region.nbytes) for region in self._regions])
        self._regions.clear()
        self._by_address.clear()


class TcpChannel(Channel):
    """The data connections of one link. The peer reaches only what is lent.

    Args:
        connections: they belong to the channel from here on, even if it cannot be made.
        config: the first channel's number of threads counts for the process.

    Raises LinkError if a connection cannot be used.
    """

    takes_gates = False
    runs_blocks = False
    needs_loans = True
    has_connections = True

    def __init__(self, device: Device, connections: Sequence[DataConnection], config: TcpConfig) -> None:
        super().__init__(device)
        self.reaches_device = device.runtime.is_soft
        self._handle: Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._when_broken: Callable[[str], object] | None = None
        left = list(connections)
        try:
            self._handle = self._open(config)
            while left:
                self._add(left[0])
                left.pop(0)
        except BaseException:
            if self._handle is not None:
                ring.net_channel_free(self._handle)
            raise
        finally:
            for each in left:
                each.sock.close()

    @staticmethod
    def _open(config: TcpConfig) -> Handle:
        options, out = ffi.new("net_channel_options *"), ffi.new("net_channel **")
        options.threads, options.patience_ms = config.threads, round(1000 * PATIENCE)
        options.silence_ms = round(1000 * config.silence)
        if code := ring.net_channel_open(options, out):
            raise LinkError(f"no channel can be made: {explained(OSError(-code, os.strerror(-code)))}")
        return out[0]

    def _add(self, connection: DataConnection) -> None:
        keys = ffi.NULL if connection.seals is None else ffi.from_buffer("uint8_t[]", b"".join(connection.seals))
        if code := ring.net_channel_add(self._handle, connection.sock.fileno(), keys):
            if code == -errno.ENOTSUP:
                raise LinkError(
                    "a data connection cannot be sealed here, and with a key or certificates it must be",
                    hint="on a trusted network, name it in tcp_plain_networks at both ends: bytes travel plain there",
                )
            raise LinkError(f"a data connection cannot be used: {explained(OSError(-code, os.strerror(-code)))}")
        connection.sock.detach()

    def _usable(self) -> Handle:
        """Return the handle. Raises LinkClosed if the channel is closed, or a thread is closing it."""
        if self._handle is None:
            raise LinkClosed("the channel is closed")
        return self._handle

    # ---- programs ----

    def open_stream(self, name: str, *, is_serial: bool = False, is_ordered: bool = False) -> Stream:
        options, out = ffi.new("net_options *"), ffi.new("net_ring **")
        options.depth, options.ordered = LIMITS.depth, is_ordered
        if code := ring.net_open(self._usable(), options, out):
            raise OutOfMemory(
                f"{name}: no stream can be opened: code {code}, a limit of memory or open files is reached"
            )
        return Stream(f"{name}, tcp", LIMITS, out[0], NET_RING)

    def add_get(self, program: Program, grid: Grid) -> None:
        program.get(self._usable(), 0, grid)

    def add_put(self, program: Program, grid: Grid, layering: Layering | None = None) -> None:
        program.put(self._usable(), 0, grid, layering)

    # ---- what the peer reaches ----

    def lend(self, regions: Sequence[Region], access: Access) -> None:
        handle = self._usable()
        for number, region in enumerate(regions):
            if ring.net_lend(handle, region.address, region.nbytes, int(access)):
                self.take_back(regions[:number], access)
                raise OutOfMemory(f"{region} cannot be lent to the peer: there is no memory for a list")

    def take_back(self, regions: Sequence[Region], access: Access) -> None:
        if self._handle is None:  # then nothing is lent
            return
        for region in regions:
            ring.net_take_back(self._handle, region.address, region.nbytes, int(access))

    # ---- the end ----

    def when_broken(self, call: Callable[[str], object]) -> None:
        self._when_broken = call
        self._loop.add_reader(ring.net_channel_fd(self._handle), self._has_broken)

    def _has_broken(self) -> None:
        reason = ffi.new("net_reason *")
        ring.net_channel_why(self._handle, reason)
        self._stop_looking()
        call, self._when_broken = self._when_broken, None
        if call is not None:
            call(bytes(ffi.string(reason.message)).decode(errors="replace"))

    def _stop_looking(self) -> None:
        if self._when_broken is not None:
            self._loop.remove_reader(ring.net_channel_fd(self._handle))

    async def aclose(self) -> None:
        if self._handle is None:
            return
        self._stop_looking()
        # Before the thread begins, so that nothing on the loop uses what it frees.
        handle, self._handle, self._when_broken = self._handle, None, None
        await in_thread(ring.net_channel_free, handle, gives_back=True)
