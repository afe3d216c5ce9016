"""The interfaces through which the sides of a run call the library: with await, without it, and v1's."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import anyio
import anyio.to_thread

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    LLMDataDist,
    LLMException,
    LLMRole,
    Notification,
    NotLinked,
    Placement,
    PoolUsage,
    blocking,
    legacy,
)
from aiodatadist._cache.table import Entry
from aiodatadist._cli.chaos.profiles import Profile
from aiodatadist._cli.chaos.sizes import config, legacy_config
from aiodatadist._counting import Figures
from aiodatadist.blocking import Handle, HandleState

POLL = 0.05
"""Seconds between two checks if a link has ended, where no call that can be cancelled waits for it."""
FULL = 10.0
"""Seconds to wait for a cache while its pool is full, which is a fault that ends."""
NOTE = 0.2
"""Seconds that a thread waits for a notification."""


class Door(ABC):
    """A cluster as one interface shows it. All of its calls are awaited here.

    Attributes:
        datadist, manager: the cluster, and the manager of its caches.
        can: what the interface has beyond links and pulls of blocks.
        pulls: tasks that pull blocks from each of the owner's clusters.
    """

    can: ClassVar[frozenset[str]]
    pulls: ClassVar[int] = 2

    def __init__(self, datadist: Any, manager: Any) -> None:
        self.datadist, self.manager = datadist, manager
        self.cluster_id: int = datadist.cluster_id

    @classmethod
    @abstractmethod
    def opened(
        cls, role: LLMRole, cluster_id: int, profile: Profile, device: int, listen: str | None
    ) -> AbstractAsyncContextManager[Door]:
        """Initialise a cluster for as long as the context lasts."""

    # ---- links ----

    async def port(self) -> int:
        """Return the port at which the cluster listens."""
        return self.datadist.listen_address[1]  # type: ignore[no-any-return]

    async def is_linked(self, cluster: int) -> bool:
        """Return True if there is a link, of whatever state."""
        return any(link.cluster_id == cluster for link in self.datadist.statistics().links)

    async def wait_closed(self, cluster: int) -> None:
        """Wait until the link has ended. Raises NotLinked if there is none now."""
        if not await self.is_linked(cluster):  # the call below returns at once for a link that has ended
            raise NotLinked(f"cluster {cluster} is not linked", peer=cluster)
        await self.datadist.wait_link_closed(cluster)

    async def settled(self) -> None:
        """Wait until no link is being opened: like HCCL, strict softnpu waits for a peer that gave up."""
        await self.datadist._running().links.wait_opened()

    # ---- notifications ----

    def notifications(self) -> AsyncIterator[Notification]:
        """Return the notifications as they come."""
        return self.datadist.notifications()  # type: ignore[no-any-return]

    async def tell(self, cluster: int, payload: Callable[[], bytes]) -> None:
        """Create a notification and send it before the next one is created."""
        await self.datadist.notify(cluster, payload())

    # ---- caches and transfers ----

    def start(self, operation: str, chance: Random, *arguments: Any, **terms: Any) -> Any:
        """Start a transfer in one of the possible ways. Return a CacheTask, or an object that can be used as one."""
        return getattr(self.manager, operation)(*arguments, **terms)

    async def allocate(self, desc: CacheDesc, key: BlocksCacheKey | None = None) -> Cache:
        """Allocate a blocks cache, on the device or the host. With a key, wait while the pool is full."""
        wait = {} if key is None else {"timeout": FULL}
        return await self.manager.allocate_blocks_cache(desc, key, **wait)  # type: ignore[no-any-return]

    async def free(self, cache: Cache) -> bool:
        """Deallocate a blocks cache; return True if its memory has been released already."""
        await self.manager.deallocate_blocks_cache(cache)
        return True

    async def usable(self, cache: Cache) -> None:
        """Wait until no transfer that ended without success can write into a cache."""
        await self.manager.wait_usable(cache)

    # ---- what it has ----

    def figures(self) -> Figures[PoolUsage]:
        return self.datadist.figures()  # type: ignore[no-any-return]

    def entries(self) -> Iterable[Entry]:
        """Return all caches of the cluster."""
        return self.datadist._running().registry.table  # type: ignore[no-any-return]


class AwaitDoor(Door):
    """The calls of :class:`aiodatadist.LLMDataDist`."""

    can = frozenset({"keys", "terms", "push", "lease", "lend", "slots", "layers", "receive", "notes", "memory"})

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, role: LLMRole, cluster_id: int, profile: Profile, device: int, listen: str | None
    ) -> AsyncIterator[Door]:
        async with LLMDataDist(role, cluster_id, config(profile, device, listen)) as datadist:
            yield cls(datadist, datadist.cache_manager)


class LegacyDoor(Door):
    """The calls of :class:`aiodatadist.legacy.LLMDataDist`: a link does one thing at a time."""

    can = frozenset({"layers", "requests", "tensors"})
    pulls = 1

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, role: LLMRole, cluster_id: int, profile: Profile, device: int, listen: str | None
    ) -> AsyncIterator[Door]:
        async with legacy.LLMDataDist(role, cluster_id, legacy_config(profile, device, listen)) as datadist:
            yield cls(datadist, datadist.kv_cache_manager)

    async def allocate(self, desc: CacheDesc, key: BlocksCacheKey | None = None) -> Cache:
        if desc.placement is not Placement.HOST:
            return await self.manager.allocate_blocks_cache(desc, key)  # type: ignore[no-any-return]
        self._host = self.datadist.device.allocate(desc.size * desc.num_tensors, Placement.HOST)
        addresses = [self._host.address + i * desc.size for i in range(desc.num_tensors)]
        return legacy.KvCache.create_cpu_cache(desc, addresses)

    async def free(self, cache: Cache) -> bool:
        try:
            await self.manager.deallocate_cache(cache)
        except LLMException:  # it takes longer than v1 waits: the memory is given back later
            return False
        return True

    async def usable(self, cache: Cache) -> None:
        await self.datadist._running().registry.wait_usable(cache)


class BlockingDoor(Door):
    """The calls of :class:`aiodatadist.blocking.LLMDataDist`, each in a thread. Half of the transfers are submitted."""

    can = frozenset({"keys", "terms", "push", "lease", "slots"})

    def __init__(self, datadist: blocking.LLMDataDist) -> None:
        super().__init__(_Threaded(datadist), _Threaded(datadist.cache_manager))
        self._inner = datadist
        self._order = anyio.Lock()

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, role: LLMRole, cluster_id: int, profile: Profile, device: int, listen: str | None
    ) -> AsyncIterator[Door]:
        datadist = blocking.LLMDataDist(role, cluster_id)
        await _in_thread(datadist.init, config(profile, device, listen).generate_options())
        try:
            yield cls(datadist)
        finally:
            with anyio.CancelScope(shield=True):  # bounded by finalize()
                await _in_thread(datadist.finalize)

    async def port(self) -> int:
        address = await _in_thread(lambda: self._inner.listen_address)
        return address[1]  # type: ignore[no-any-return]

    async def is_linked(self, cluster: int) -> bool:
        return any(link.cluster_id == cluster for link in (await self.datadist.statistics()).links)

    async def wait_closed(self, cluster: int) -> None:
        if not await self.is_linked(cluster):
            raise NotLinked(f"there is no link to cluster {cluster}")
        while await self.is_linked(cluster):  # noqa: ASYNC110 - a thread that waits cannot be cancelled
            await anyio.sleep(POLL)

    async def settled(self) -> None:
        """Do nothing: only the loop thread knows it."""

    async def notifications(self) -> AsyncIterator[Notification]:
        while True:
            note = await self.datadist.next_notification(NOTE)
            if note is not None:
                yield note

    async def tell(self, cluster: int, payload: Callable[[], bytes]) -> None:
        async with self._order:  # of two threads the later one may come first
            await super().tell(cluster, payload)

    def start(self, operation: str, chance: Random, *arguments: Any, **terms: Any) -> Any:
        manager = self._inner.cache_manager
        submit = getattr(manager, f"submit_{operation}", None)
        if submit is None or chance.random() < 0.5:
            return Called(partial(getattr(manager, operation), *arguments, **terms))
        return Submitted(submit(*arguments, **terms), manager.drain)

    async def usable(self, cache: Cache) -> None:
        """Do nothing: once a call has returned, or a handle has ended, nothing more is written."""

    def figures(self) -> Figures[PoolUsage]:
        return self._inner.figures()

    def entries(self) -> Iterable[Entry]:
        """Return nothing: the table of caches is another thread's."""
        return []


DOORS: dict[str, type[Door]] = {"await": AwaitDoor, "blocking": BlockingDoor, "v1": LegacyDoor}


class _Threaded:
    """An object whose methods are called in threads, and awaited."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(_in_thread, found) if callable(found) else found


async def _in_thread(call: Callable[..., Any], *arguments: Any, **terms: Any) -> Any:
    return await anyio.to_thread.run_sync(partial(call, *arguments, **terms))


class Called:
    """A call that blocks a thread until its transfer has ended, in the form of an awaited transfer.

    It cannot be cancelled.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._error: LLMException | None = None
        self._is_over = False
        self._told: list[Callable[[Called], object]] = []

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> None:
        ended = asyncio.ensure_future(self._run())
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:  # as that of a CacheTask, it is delivered once no more bytes can land
            self.cancel()
            await asyncio.wait([ended])
            raise
        if self.cancelled():
            raise asyncio.CancelledError
        error = self.exception()
        if error is not None:
            raise error

    async def _run(self) -> None:
        try:
            await _in_thread(self._call)
        except LLMException as error:
            self._error = error
        self._is_over = True
        for told in self._told:
            told(self)

    def add_done_callback(self, told: Callable[[Called], object]) -> None:
        self._told.append(told)

    def cancel(self) -> bool:
        return False

    def done(self) -> bool:
        return self._is_over

    def cancelled(self) -> bool:
        return False

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> Any:
        """Return a report without bytes: a blocking call returns no report."""
        return SimpleNamespace(bytes=0)


class Submitted(Called):
    """A submitted transfer, drained once it has ended."""

    def __init__(self, handle: Handle, drain: Callable[[], object]) -> None:
        super().__init__(handle.wait)
        self._handle, self._drain = handle, drain

    async def _run(self) -> None:
        await super()._run()
        self._drain()

    def cancel(self) -> bool:
        if self._handle.done():
            return False
        self._handle.cancel()
        return True

    def done(self) -> bool:
        return self._handle.done()

    def cancelled(self) -> bool:
        return self._handle.poll() is HandleState.CANCELLED

    def exception(self) -> Exception | None:
        return self._handle.exception()

    def result(self) -> Any:
        return self._handle.report()

    def __repr__(self) -> str:
        return repr(self._handle)
