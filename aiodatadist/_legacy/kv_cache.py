"""The KvCache: a cache as v1 shows it, which is deallocated with its last reference."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from aiodatadist._values import checks
from aiodatadist._values.descriptors import Cache, CacheDesc, Placement
from aiodatadist.errors import ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._cache.registry import CacheRegistry


class Manager(Protocol):
    """A ``KvCacheManager``, awaitable or not."""

    @property
    def _place(self) -> tuple[asyncio.AbstractEventLoop, CacheRegistry]: ...


class KvCache(Cache):
    """A cache, made by a :class:`KvCacheManager` or with :meth:`create_cpu_cache`.

    An allocated cache is deallocated when its last reference is dropped. As after ``deallocate_cache``, keys that are
    bound to it keep its memory, and so do arrays over it.

    Args:
        per_device_tensor_addrs: one list of addresses per device. A process has one device.
        kv_cache_manager: None for memory that no manager knows.
    """

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        per_device_tensor_addrs: Sequence[Sequence[int]],
        kv_cache_manager: Manager | None,
        *,
        is_blocks_cache: bool = False,
    ) -> None:
        first = per_device_tensor_addrs[0] if per_device_tensor_addrs else []
        super().__init__(cache_id, cache_desc, first, is_blocks_cache)
        self._per_device = [list(addresses) for addresses in per_device_tensor_addrs]
        if kv_cache_manager is not None:
            loop, registry = kv_cache_manager._place
            self._home = registry.home
            cache = Cache(cache_id, cache_desc, first, is_blocks_cache, registry.home)
            weakref.finalize(self, _dropped, loop, registry, cache).atexit = False

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        """Return a blocks cache over the caller's host memory, for ``swap_blocks`` only. Its id is -1.

        Args:
            addrs: the address of each tensor, or one list of them per device.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong, lists and addresses are mixed, or addresses
                are missing.
        """
        if not isinstance(addrs, (list, tuple)):
            raise TypeError(f"addrs is of type {type(addrs).__name__}: must be a list of addresses, or of lists")
        given: list[Any] = list(addrs)
        if not given:
            raise ParamInvalid("addrs is empty: must have an address per tensor")
        lists = [each for each in given if isinstance(each, (list, tuple))]
        if lists and len(lists) != len(given):
            raise ParamInvalid(f"addrs has {len(lists)} lists among {len(given)} elements: all are lists, or none")
        per_device = lists or [given]
        made = [Cache.create_cpu_cache(cache_desc, list(addresses)) for addresses in per_device]
        return cls(-1, cache_desc, [cache.tensor_addrs for cache in made], None, is_blocks_cache=True)

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """Start address of each tensor, per device; empty once the cache was deallocated."""
        return self._per_device

    def _empty(self) -> None:
        """Forget the addresses: the cache was deallocated."""
        super()._empty()
        self._per_device = []

    def __repr__(self) -> str:
        kind = "blocks" if self.is_blocks_cache else "contiguous"
        return f"<KvCache {self.cache_id} {kind} {self.cache_desc}>"


def _dropped(loop: asyncio.AbstractEventLoop, registry: CacheRegistry, cache: Cache) -> None:
    """Deallocate a cache, from whatever thread the garbage collector runs in."""
    with suppress(RuntimeError):  # the loop is closed: everything was released
        loop.call_soon_threadsafe(registry.drop, cache)


def want_device(cache_desc: Any) -> CacheDesc:
    """Return the description. Raises ParamInvalid if it is not on the device, where all caches of v1 are."""
    checks.instance(cache_desc, "cache_desc", CacheDesc)
    if cache_desc.placement is not Placement.DEVICE:
        raise ParamInvalid(f"cache_desc has {cache_desc.placement}: only device caches are supported")
    return cache_desc  # type: ignore[no-any-return]
