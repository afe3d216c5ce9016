"""The way of a layered transfer's layers from their source to one destination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiodatadist._cache.catalogue import RemoteCache
from aiodatadist._cache.table import Entry
from aiodatadist._link import Transfers
from aiodatadist._values.grid import Grid
from aiodatadist.errors import CacheNotFound, InternalError

if TYPE_CHECKING:
    from aiodatadist._link.data.link_channel import LinkChannel


@dataclass(frozen=True, slots=True)
class Route:
    """A source, a peer's cache that was found, and the ranges that connect them.

    Attributes:
        grid: the ranges of all layers, in order.
        layers: the layers of the source that travel.
        tensors: the number of tensors that make a layer.
        seconds: time for each layer to travel.
    """

    link: Transfers
    entry: Entry
    remote: RemoteCache
    grid: Grid
    layers: range
    tensors: int
    seconds: float

    def part(self, first: int, stop: int) -> Grid:
        """Return the ranges of some layers, counted from the first that travels."""
        grid = self.grid
        if first == 0 and stop * self.tensors == len(grid.local):
            return grid
        a, b = first * self.tensors, stop * self.tensors
        return Grid(grid.local[a:b], grid.remote[a:b], grid.local_index, grid.remote_index,
                    grid.local_stride, grid.remote_stride, grid.nbytes, grid.tail)  # fmt: skip

    def channel(self) -> LinkChannel:
        """Return the channel that reaches both caches.

        Raises:
            LinkError: if the link has ended.
            CacheNotFound: if the peer has revoked its cache.
        """
        self.link.session.check_ready()
        if self.remote.is_withdrawn:
            raise CacheNotFound("the peer revoked the destination while it was being filled")
        link_channel = self._find_channel()
        if link_channel is None:
            raise InternalError("the channel is older than the caches")
        return link_channel

    @property
    def has_no_channel(self) -> bool:
        """True if a transfer that was stopped half-way has taken the channel away."""
        return not self.remote.is_withdrawn and self.link.session.is_ready and self._find_channel() is None

    def _find_channel(self) -> LinkChannel | None:
        return self.link.session.channels.find(self.entry.epoch, self.remote.epoch)

    async def reach(self) -> None:
        """Have the next channel opened. Raises LLMException if the peer or the device refuses."""
        await self.link.session.channels.reach(self.entry.epoch, self.remote.epoch)
