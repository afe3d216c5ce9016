"""Memory into which a lost peer may still write, because it was stopped while it wrote."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from aiodatadist._cache.deallocation import Writes
from aiodatadist._cache.table import Entry, LeaseHolder
from aiodatadist._counting import Incident, Incidents
from aiodatadist._device import Device
from aiodatadist.errors import LLMException

logger = logging.getLogger(__name__)

_kept: list[list[object]] = []
"""Callers' memory that a stopped peer or the device may still touch after this cluster was finalized. Never freed."""


class WithheldMemory:
    """The withheld caches of one cluster. ``spawn`` starts a task in the group of the engine, as of CacheRegistry."""

    def __init__(
        self,
        device: Device,
        incidents: Incidents,
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], bool],
    ) -> None:
        self._device = device
        self._incidents = incidents
        self._spawn = spawn

    def withhold(self, entries: Sequence[Entry], peer: LeaseHolder, writes: Writes) -> None:
        """Withhold caches into which a peer without a link may still write.

        They are not used, and their memory is not reused, until the peer has let go.
        """
        for entry in entries:
            entry.withhold(peer)
        if not self._spawn(partial(self._free_when_let_go, list(entries), peer, writes)):
            self._hold_on_to(entries, writes)

    async def _free_when_let_go(self, entries: list[Entry], peer: LeaseHolder, writes: Writes) -> None:
        try:
            await writes.wait_let_go()
        except LLMException as error:
            self.lost("%r may write for ever: %s", peer, error)
            for entry in entries:
                entry.poison()
        except BaseException:
            self._hold_on_to(entries, writes)
            raise
        else:
            told = "%r has let go of %d caches", peer, len(entries)
            self._incidents.add(Incident.MEMORY_RETURNED, logger, *told, level=logging.INFO)
            for entry in entries:
                entry.drop_holder(peer)

    def _hold_on_to(self, entries: Sequence[Entry], writes: Writes) -> None:
        """Keep the memory, because the cluster is finalized before the peer let go.

        A pool's pages go with the pool, and no other memory is in their place while the peer copies there. The caller's
        memory is kept alive: until the peer has let go of the device, or as long as the process lives if it does not hold it.
        """
        writes.abandon()
        for entry in entries:
            if entry.pool is None:
                if not self._device.keep(entry.keep):
                    _kept.append(entry.keep)
                words = "cache %d: a peer that was stopped while it wrote there may continue; do not use its memory"
                self.lost(words, entry.cache_id)

    def keep_stuck(self, entries: Sequence[Entry]) -> None:
        """Keep callers' memory that the device never released, because the cluster ends."""
        for entry in entries:
            if entry.pool is None and any(self._device.is_stuck(r.address, r.nbytes) for r in entry.regions()):
                _kept.append(entry.keep)
                self.lost("cache %d: the device never released its memory; do not use it", entry.cache_id)

    def lost(self, words: str, *args: object) -> None:
        """Log that memory will never be used again, and count that."""
        self._incidents.add(Incident.MEMORY_LOST, logger, words, *args, level=logging.ERROR)
