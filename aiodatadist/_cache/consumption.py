"""Requests' keys, each of which one pull consumes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from aiodatadist._cache.names import Name
from aiodatadist._cache.table import CacheTable, Entry


class Consumption:
    """The requests' keys of one cluster. ``unbound`` is called with the cache of each key that was consumed."""

    def __init__(self, table: CacheTable, unbound: Callable[[Entry], None]) -> None:
        self._table = table
        self._unbound = unbound
        self._claims: dict[tuple[int, int], tuple[anyio.Lock, int]] = {}

    def is_possible(self, entry: Entry, name: Name, slot: int) -> bool:
        """Return True if a pull by this name may be the last one of a key."""
        return bool(_bound(entry, name, slot))

    @asynccontextmanager
    async def claim(self, entry: Entry, slot: int) -> AsyncIterator[None]:
        """Let one pull at a time use a slot whose key it may consume, so that each key is consumed by one pull."""
        place = (entry.cache_id, slot)
        lock, users = self._claims.get(place, (anyio.Lock(), 0))
        self._claims[place] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._claims.pop(place)
            if users > 1:
                self._claims[place] = (lock, users - 1)

    def pulled(self, entry: Entry, name: Name, slot: int, tensors: range) -> None:
        """Note that a peer pulled these tensors of a slot: with the last of them a request's key is removed."""
        for each in _bound(entry, name, slot):
            if entry.cover(each, tensors):
                self._table.unbind(each)
                self._unbound(entry)


def _bound(entry: Entry, name: Name, slot: int) -> list[Name]:
    """Return the requests' keys for which a pull by this name counts."""
    if not entry.may_have_keys:
        return []
    if name.kind == "id":
        return [each for each, bound in entry.names.items() if bound == slot and each.kind == "request"]
    return [name] if name in entry.names and name.kind == "request" else []
