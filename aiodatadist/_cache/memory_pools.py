"""The memory pools of this cluster, one for each placement at most, and the calls that wait for room in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiodatadist._cache.pool import PagePool, PoolUsage
from aiodatadist._cache.room_queue import RoomQueue
from aiodatadist._cache.table import CacheTable, Entry
from aiodatadist._config.llm_config import PoolConfig
from aiodatadist._device import Device, Memory
from aiodatadist._transport import Region, Transport
from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import FeatureNotEnabled, LLMException, OutOfMemory, ParamInvalid

SMALLER = "make the pool smaller, or raise the limit that is named"


class MemoryPool:
    """A memory pool: one allocation, registered with the transport as a whole."""

    def __init__(self, pages: PagePool, memory: Memory, epoch: int) -> None:
        self.pages = pages
        self.room = RoomQueue(pages)
        self.memory = memory
        self.epoch = epoch


class MemoryPools:
    """The pools of one cluster.

    ``released`` returns the caches that are being released. ``table`` no longer has all of them.
    """

    def __init__(
        self, device: Device, transport: Transport, table: CacheTable, released: Callable[[], list[Entry]]
    ) -> None:
        self._device = device
        self._transport = transport
        self._table = table
        self._released = released
        self._pools: dict[Placement, MemoryPool] = {}

    async def open(self, placement: Placement, config: PoolConfig) -> None:
        """Allocate a pool's memory and register it with the transport.

        Raises:
            OutOfMemory: if the device, or the host, has less memory, or too little would be left after populating it.
            FeatureNotEnabled: if this process may not allocate such memory.
        """
        name = f"the {placement.name.lower()} pool"
        try:
            memory = self._device.allocate(config.memory_size, placement)
            if config.populate == "init":
                await self._device.populate(memory)
        except FeatureNotEnabled as error:
            text = f"{name}: {error.args[0]}"
            raise FeatureNotEnabled(text, operation="init", hint="allow the call that is named") from error
        except LLMException as error:
            raise OutOfMemory(f"{name}: {error.args[0]}", operation="init", hint=SMALLER) from error
        pages = PagePool(
            name, memory.address, config, lambda: self._pinned(placement), lambda: self._oldest_pin(placement)
        )
        await self._transport.register([Region(memory.address, memory.nbytes, placement)])
        if config.populate == "background":
            self._device.populate_soon(memory)
        self._pools[placement] = MemoryPool(pages, memory, self._transport.epoch)

    def of(self, placement: Placement) -> MemoryPool:
        """Return the pool of a placement.

        Raises:
            FeatureNotEnabled: if there is no pool at all.
            ParamInvalid: if there is none of this placement.
        """
        pool = self._pools.get(placement)
        if pool is not None:
            return pool
        self.want()
        raise ParamInvalid(
            f"there is no memory pool for {placement}",
            hint="set LLMConfig.mem_pool_cfg for device memory, host_mem_pool_cfg for host memory",
        )

    def want(self) -> None:
        """Raise FeatureNotEnabled if there is no pool at all."""
        if not self._pools:
            raise FeatureNotEnabled("there is no memory pool", hint="set LLMConfig.mem_pool_cfg or host_mem_pool_cfg")

    def usage(self) -> dict[Placement, PoolUsage]:
        """Return the usage of each pool."""
        return {placement: pool.pages.usage() for placement, pool in dict(self._pools).items()}

    def room_for(self, placement: Placement, nbytes: int) -> int:
        """Return how many allocations of ``nbytes`` each the pool has room for; 0 without a pool."""
        pool = self._pools.get(placement)
        return 0 if pool is None else pool.pages.room_for(nbytes)

    def keep(self) -> None:
        """Keep the pools' memory when the device is closed, because it may be touched for ever."""
        for pool in self._pools.values():
            self._device.mark_stuck(pool.memory.address, pool.memory.nbytes)

    def end_allocating(self) -> None:
        """Let calls that wait for room try again, each in its turn: their naming refuses new caches now."""
        for pool in self._pools.values():
            pool.room.call()

    def _pinned(self, placement: Placement) -> tuple[int, int]:
        """Return the bytes of a pool that are in use, and how many of them are withheld."""
        pinned = self._pinned_entries(placement)
        withheld = [entry for entry in pinned if entry.is_withheld]
        return _bytes_of(pinned), _bytes_of(withheld)

    def _pinned_entries(self, placement: Placement) -> list[Entry]:
        return [
            entry
            for entry in {*self._table.entries(), *self._released()}
            if entry.placement is placement and entry.pool is not None and not entry.is_quiet
        ]

    def _oldest_pin(self, placement: Placement) -> str:
        entries = self._pinned_entries(placement)
        if not entries:
            return ""
        return f" (since the longest: {min(entries, key=lambda entry: entry.pinned_at).told_pins()})"


def _bytes_of(entries: Sequence[Entry]) -> int:
    return sum(entry.nbytes * len(entry.addresses) for entry in entries)
