"""KvCacheManager without await."""

from __future__ import annotations

import asyncio
import os

from aiodatadist.blocking.facade import blocking, moving, starting
from aiodatadist.cache.registry import CacheRegistry
from aiodatadist.cache.task import CacheTask
from aiodatadist.concurrency.loop_thread import LoopThread
from aiodatadist.legacy import kv_cache_manager as awaitable


class KvCacheManager:
    """Obtained from ``LLMDataDist.kv_cache_manager``. May be used from any thread but the loop's own.

    Rules, roles, statuses and what holds after a failure: :class:`aiodatadist.legacy.KvCacheManager`. Calls return when all
    is done; an interrupt of one that waits stops the transfer, and is raised when no byte can land any more. A
    ``synchronize_layer`` is called in a thread of its own, and may block.

    A ``KvCache`` may be dropped, and collected, in any thread; its memory goes back as after ``deallocate_cache``.
    """

    def __init__(self, thread: LoopThread, inner: awaitable.KvCacheManager) -> None:
        self._thread = thread
        self._inner = inner

    def is_initialized(self) -> bool:
        """False from the moment when its LLMDataDist is finalized, and in a child of its process. Never waits."""
        return self._thread.pid == os.getpid() and self._inner.is_initialized()

    @property
    def place(self) -> tuple[asyncio.AbstractEventLoop, CacheRegistry]:
        """Where caches are given back."""
        return self._inner.place

    allocate_cache = blocking(awaitable.KvCacheManager.allocate_cache)
    allocate_blocks_cache = blocking(awaitable.KvCacheManager.allocate_blocks_cache)
    deallocate_cache = blocking(awaitable.KvCacheManager.deallocate_cache)
    remove_cache_key = blocking(awaitable.KvCacheManager.remove_cache_key)
    pull_cache = moving(awaitable.KvCacheManager.pull_cache)
    pull_blocks = moving(awaitable.KvCacheManager.pull_blocks)
    copy_cache = moving(awaitable.KvCacheManager.copy_cache)
    copy_blocks = moving(awaitable.KvCacheManager.copy_blocks)
    swap_blocks = moving(awaitable.KvCacheManager.swap_blocks)
    transfer_cache_async = starting(awaitable.KvCacheManager.transfer_cache_async)
    get_cache_tensors = blocking(awaitable.KvCacheManager.get_cache_tensors)
    check_cache_key = staticmethod(awaitable.KvCacheManager.check_cache_key)

    # ---- ours ----

    arrays = blocking(awaitable.KvCacheManager.arrays)
    tensors = blocking(awaitable.KvCacheManager.tensors)
    pool_usage = blocking(awaitable.KvCacheManager.pool_usage)

    def _watched(self, task: CacheTask) -> CacheTask:
        """The inner one has it counted, as it has what models begin."""
        return task
