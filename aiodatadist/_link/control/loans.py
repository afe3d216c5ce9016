"""The loans of a channel whose peer reaches only what was lent: each cache that the peer is told of, until it releases it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiodatadist._transport import Access, Channel, Region
from aiodatadist._values.descriptors import Placement

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry


class Loans:
    """The caches that a channel lends to its peer.

    Args:
        access_to: returns what the peer may do with a cache when it is told of it.
    """

    def __init__(self, channel: Channel, access_to: Callable[[Entry], Access]) -> None:
        self._channel = channel
        self._access_to = access_to
        self._lent: dict[int, tuple[list[Region], Access]] = {}

    def lend(self, entry: Entry) -> None:
        """Let the peer reach a cache, as far as it may. Call it once until :meth:`take_back`."""
        regions, access = entry.regions(), self._access_to(entry)
        if access and (self._channel.reaches_device or entry.placement is Placement.HOST):
            self._channel.lend(regions, access)
            self._lent[entry.cache_id] = regions, access

    def take_back(self, entry: Entry) -> None:
        """Undo :meth:`lend`, exactly as it was done. Once this returns, no byte of the cache moves for the peer."""
        if (lent := self._lent.pop(entry.cache_id, None)) is not None:
            self._channel.take_back(*lent)
