"""Channels inside one process: plain copies. The reference for other transports, and a fake for tests.

Each end copies on its own streams, which know nothing of the other end. So closing a channel keeps the other end from
starting anything more, and reports that the memory is still used until the device has let go of what that end has
begun. An end that cannot wait for that leaves its device to the other end, which releases it when it closes its half.
Until then the memory stays in place, and nothing else is put there.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import anyio

from aiodatadist._device.program import CopyKind
from aiodatadist._transport.contract import (
    DEFAULT_RDMA,
    DEFAULT_TCP,
    Access,
    Channel,
    ChannelOffer,
    Endpoint,
    RdmaConfig,
    Region,
    StillWritten,
    TcpConfig,
    Transport,
)
from aiodatadist._values.descriptors import Placement
from aiodatadist._values.foreign import printable
from aiodatadist._values.grid import Grid
from aiodatadist.errors import IncompatiblePeer, LinkClosed, LinkTimeout, ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._device import Device, Layering, Program


PATIENCE = 0.1
"""Seconds within which the device lets go of what the other end has begun, if nothing is wrong."""


class _Use:
    """A token that is alive as long as the device may run a program on a channel."""


@dataclass(eq=False)
class _End:
    """An end of a channel: its memory, and what it has begun.

    Attributes:
        shown: what the other end may do with each region.
        left: the device of an end that could not wait, held until the other end closes its half of the channel.
    """

    regions: list[Region]
    shown: dict[Region, Access] = field(default_factory=dict)
    uses: weakref.WeakSet[_Use] = field(default_factory=weakref.WeakSet)
    is_closed: bool = False
    left: Device | None = None


@dataclass
class _Meeting:
    """The place at which the two ends of a channel find each other, by its name."""

    ends: dict[int, _End] = field(default_factory=dict)
    complete: anyio.Event = field(default_factory=anyio.Event)


_meetings: dict[str, _Meeting] = {}


def _find(regions: Iterable[Region], address: int, nbytes: int) -> Region | None:
    for region in regions:
        if region.address <= address and address + nbytes <= region.address + region.nbytes:
            return region
    return None


class LoopbackTransport(Transport):
    """A transport whose two ends live in this process, on one event loop."""

    name: ClassVar[str] = "loopback"

    def __init__(
        self,
        device: Device,
        resource: str | None = None,
        rdma: RdmaConfig = DEFAULT_RDMA,
        tcp: TcpConfig = DEFAULT_TCP,
    ) -> None:
        super().__init__(device, resource, rdma, tcp)
        self._regions: dict[Region, int] = {}
        self._host = f"process {os.getpid()}"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(
            self.name,
            self.device.runtime.name,
            self._host,
            "127.0.0.1",
            str(self.device.index),
            "127.0.0.1",
            os.getpid(),
        )

    async def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            for other in [*self._regions, *regions]:
                if region.overlaps(other) and region != other:
                    raise ParamInvalid(f"{region} overlaps the registered {other}: ranges must be equal or apart")
        fresh = [region for region in dict.fromkeys(regions) if region not in self._regions]
        self.device.adopt([(region.address, region.nbytes, region.placement) for region in fresh])
        self.epoch += bool(fresh)
        for region in regions:
            self._regions[region] = self._regions.get(region, 0) + 1

    async def unregister(self, regions: Sequence[Region]) -> None:
        for region in regions:
            count = self._regions.pop(region, 0)
            if count > 1:
                self._regions[region] = count - 1
            elif count:
                self.device.disown([(region.address, region.nbytes)])

    async def open_channel(self, offer: ChannelOffer, timeout: float) -> Channel:
        peer = offer.endpoints[offer.peer_rank]
        if (peer.transport, peer.host) != (self.name, self._host):
            raise IncompatiblePeer(
                f"the peer is {printable(peer.transport)} on {peer.host}: loopback stays in {self._host}"
            )
        meeting = _meetings.setdefault(offer.name, _Meeting())
        regions = list(self._regions)
        meeting.ends[offer.rank] = _End(regions, {region: offer.reach.access(region) for region in regions})
        try:
            if len(meeting.ends) == 2:
                meeting.complete.set()
            with anyio.move_on_after(timeout):
                await meeting.complete.wait()
            if not meeting.complete.is_set():
                raise LinkTimeout(f"the peer did not open channel {offer.name!r} within {timeout:.3f} s")
        finally:
            _meetings.pop(offer.name, None)
        return LoopbackChannel(self.device, meeting.ends[offer.rank], meeting.ends[offer.peer_rank])

    async def aclose(self) -> None:
        self.device.disown([(region.address, region.nbytes) for region in self._regions])
        self._regions.clear()


class LoopbackChannel(Channel):
    """A channel that copies between the two ends' regions; bounds are checked when a step is added."""

    def __init__(self, device: Device, mine: _End, theirs: _End) -> None:
        super().__init__(device)
        self._mine = mine
        self._theirs = theirs

    def _placements(self, grid: Grid, access: Access) -> tuple[Placement, Placement]:
        """Return where the two sides are. Raises ParamInvalid if this end has no such access to a region of the other."""
        if self._theirs.is_closed:
            raise LinkClosed("the other end has closed the channel")
        sides: list[Placement] = []
        shown = [region for region, may in self._theirs.shown.items() if access in may]
        for regions, bases, index, stride, side in (
            (self._mine.regions, grid.local, grid.local_index, grid.local_stride, "local"),
            (shown, grid.remote, grid.remote_index, grid.remote_stride, "remote"),
        ):
            ends = [i * stride + grid.nbytes for i in index[:-1]] + [index[-1] * stride + grid.tail]
            low, high = min(index) * stride, max(ends)
            found = [_find(regions, base + low, high - low) for base in bases]
            missing = next((base for base, region in zip(bases, found, strict=True) if region is None), None)
            if missing is not None or found[0] is None:
                raise ParamInvalid(
                    f"{high - low} {side} bytes at {missing or 0:#x}+{low} are not in a registered region"
                )
            sides.append(found[0].placement)
        return sides[0], sides[1]

    @staticmethod
    def _kind(source: Placement, target: Placement) -> CopyKind:
        return CopyKind(2 * source + target)

    def _copy(self, program: Program, kind: CopyKind, grid: Grid, layering: Layering | None = None) -> None:
        program.copy(kind, grid, layering)
        program.use = use = _Use()
        self._mine.uses.add(use)

    def add_get(self, program: Program, grid: Grid) -> None:
        local, remote = self._placements(grid, Access.READ)
        self._copy(program, self._kind(remote, local), grid)

    def add_put(self, program: Program, grid: Grid, layering: Layering | None = None) -> None:
        local, remote = self._placements(grid, Access.WRITE)
        self._copy(program, self._kind(local, remote), grid.mirrored(), layering)

    async def aclose(self) -> None:
        # from here on the other end can start nothing that touches this end's memory
        self._mine.regions = []
        self._mine.shown = {}
        self._mine.is_closed = True
        with anyio.move_on_after(PATIENCE):
            await self.wait_let_go()
        left, self._theirs.left = self._theirs.left, None
        if left is not None:
            await left.let_go()
        if self._theirs.uses:
            raise StillWritten("the other end, in this process, has not ended a transfer")

    async def wait_let_go(self) -> None:
        loop = asyncio.get_running_loop()
        while (use := next(iter(self._theirs.uses), None)) is not None:  # a thread may drop the last one at any moment
            ended = asyncio.Event()
            watch = weakref.finalize(use, loop.call_soon_threadsafe, ended.set)
            # this reference alone would keep it alive
            del use
            watch.atexit = False
            try:
                await ended.wait()
            finally:
                watch.detach()

    def abandon(self) -> None:
        if self._theirs.uses and self._mine.left is None:
            self.device.hold()
            self._mine.left = self.device
