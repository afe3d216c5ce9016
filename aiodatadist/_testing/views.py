"""Internals that callers cannot see, for tests of the library itself. Nothing of it is promised to stay.

One place knows the names of these attributes, so that a test says what it looks at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, MutableMapping
from typing import TYPE_CHECKING, Any

from aiodatadist._blocking import shared_loop
from aiodatadist._link import Link

if TYPE_CHECKING:
    from aiodatadist._cache.registry import CacheRegistry
    from aiodatadist._cache_manager import CacheManager
    from aiodatadist._cluster.client_slots import ClientSlots
    from aiodatadist._cluster.engine import Engine
    from aiodatadist._concurrency.loop_thread import LoopThread
    from aiodatadist._context_caching.cache import ContextCache
    from aiodatadist._context_caching.pools.contract import KVPool
    from aiodatadist._device import TransferCompletion
    from aiodatadist._hixl.engine import Hixl
    from aiodatadist._link.control.wire import Wire
    from aiodatadist._transport.contract import Transport

# ---- links ----


def wire_of(link: Link) -> Wire:
    """Return the control messages of a link, in both directions."""
    return link.session.wire


def clients_of(engine: Engine) -> ClientSlots:
    """Return the places of an engine's unproved clients."""
    return engine._clients


def gather_until(wire: Wire, when: float) -> None:
    """Let a wire gather messages until this time of its loop's clock, whatever it has sent."""
    wire._gathers_until = when


async def cut_link(link: Link) -> None:
    """Close a link's connection without a word, as a broken network does."""
    await link.session.wire.aclose()


def transfers_of(holder: Any) -> Collection[Any]:
    """Return the running transfers of a link, or of a context cache."""
    running = holder.transfers.running if isinstance(holder, Link) else holder._running
    found: Collection[Any] = running.transfers
    return found


def transfer_of(task: Any) -> TransferCompletion:
    """Return the transfer behind a ``CacheTask``."""
    found: TransferCompletion = task._transfer
    return found


def connecting_of(engine: Hixl) -> Collection[int]:
    """Return the ids of the clusters to which transfers of an engine connect, or wait to connect, by themselves."""
    return engine._connecting


# ---- services of adapters, and aiodatadist.blocking ----


def thread_of(service: Any) -> LoopThread:
    """Return the thread whose event loop a service, or a cluster of ``aiodatadist.blocking``, uses."""
    found: LoopThread = service._door.thread if hasattr(service, "_door") else service._thread
    return found


def call_on_loop(service: Any, function: Callable[[], Any]) -> Any:
    """Call a function on that event loop, await what it returns, and return the result."""
    return thread_of(service).call(function)


def life_of(service: Any) -> Any:
    """Return the state that an open service has on its event loop."""
    return service._running()


def links_of(service: Any) -> Any:
    """Return an open service's links to the services of other engines."""
    return life_of(service)._links


def held_leases(service: Any) -> int:
    """Return the number of an open service's leases that requests of other engines hold."""

    async def count() -> int:
        return sum(not kept.holders.are_none for kept in life_of(service)._kept._kept.values())

    found: int = call_on_loop(service, count)
    return found


async def post_as(service: Any, peer: Any, message: Any) -> None:
    """Send a message as a service would. On its event loop."""
    await life_of(service)._post(peer, message)


# ---- context caches ----


def take_all_turns(cache: ContextCache) -> None:
    """Let no further call of a context cache start in this round of the loop."""
    cache._start_limiter._left = 0


def pipeline_of(cache: ContextCache) -> Any:
    """Return the pipeline that moves the values of a context cache."""
    return cache._pipeline


def store_of(pool: Any) -> Any:
    """Return the store in which a pool keeps its values."""
    return pool._store


def entries_of(pool: KVPool) -> MutableMapping[Any, Any]:
    """Return the values of a pool in memory, by key: the least recently used first."""
    found: MutableMapping[Any, Any] = store_of(pool)._entries
    return found


# ---- memory ----


def transport_of(registry: CacheRegistry) -> Transport:
    """Return the transport with which a registry registers its memory."""
    return registry._transport


def registry_of(manager: CacheManager) -> CacheRegistry:
    """Return the registry in which a cache manager keeps its caches."""
    return manager._registry


# ---- aiodatadist.blocking ----


def inner_of(facade: Any) -> Any:
    """Return the awaitable object that an object of ``aiodatadist.blocking`` calls on the event loop."""
    return facade._inner


def submissions_of(manager: Any) -> Any:
    """Return the submitted calls of a cache manager of ``aiodatadist.blocking``."""
    return manager._submissions


def shared_thread() -> LoopThread | None:
    """Return the thread that all users of the shared event loop share; None if there is no user."""
    return shared_loop._shared.thread


def resident_task(owner: Any) -> asyncio.Task[Any]:
    """Return the task that keeps a cluster or a context cache open."""
    found: asyncio.Task[Any] = owner.resident._task if hasattr(owner, "resident") else owner._resident._task
    return found
