"""The pool of an engine's context cache, as the engine's user configures it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from aiodatadist._values.sizes import Size
from aiodatadist.context_caching import CcConfig, ContextCache, HealthGate, KVPool, open_pool

MIB = 1 << 20
EMBEDDED = "memory:"


class PoolSettings(BaseModel):
    """A user's settings of a pool.

    Attributes:
        pool: a URL for :func:`~aiodatadist.context_caching.open_pool`. All users in this process with the same
            ``memory:`` URL share one pool.
        device_id: the device of rank 0; rank r has ``device_id + r``.
        read_cache_bytes, bytes_in_flight: host memory in bytes, or as a text like ``"1GiB"``. See
            :meth:`~aiodatadist.context_caching.ContextCache.open`.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    pool: str = EMBEDDED
    device_id: int = Field(default=0, ge=0)
    read_cache_bytes: Size = Field(default=0, ge=0)
    bytes_in_flight: Size = Field(default=256 * MIB, ge=1)


class _EmbeddedPools:
    """The pools in this process's memory, by URL. On the loop's thread."""

    def __init__(self) -> None:
        self._pools: dict[str, tuple[KVPool, int]] = {}

    async def acquire(self, url: str) -> KVPool:
        """Return the pool of a URL, opened by its first user."""
        pool, users = self._pools.get(url) or (await open_pool(url), 0)
        self._pools[url] = pool, users + 1
        return pool

    async def release(self, url: str) -> None:
        """Release a pool; its last user closes it."""
        pool, users = self._pools.pop(url)
        if users > 1:
            self._pools[url] = pool, users - 1
        else:
            await pool.aclose()


_embedded = _EmbeddedPools()


async def open_cache(stack: AsyncExitStack, settings: PoolSettings, config: CcConfig) -> ContextCache:
    """Open a cache until the stack is unwound.

    A pool that does not answer is retried from time to time, and misses until then.

    Raises:
        EmsException: if the URL is wrong, or the pool's extra is not installed.
    """
    pool: KVPool | str = settings.pool
    gate: HealthGate | None = HealthGate()
    if settings.pool.startswith(EMBEDDED):
        pool, gate = await _embedded.acquire(settings.pool), None
        stack.push_async_callback(_embedded.release, settings.pool)
    return await stack.enter_async_context(
        await ContextCache.open(
            config, pool, settings.read_cache_bytes, bytes_in_flight=settings.bytes_in_flight, gate=gate
        )
    )
