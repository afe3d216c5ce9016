"""The KvCacheManager without await."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from aiodatadist._blocking.facade import blocking, moving, starting
from aiodatadist._cache.registry import CacheRegistry
from aiodatadist._cache.task import CacheTask
from aiodatadist._concurrency.loop_thread import LoopThread
from aiodatadist._legacy import kv_cache_manager as awaitable


class KvCacheManager:
    """The caches and transfers of a v1 cluster, from ``LLMDataDist.kv_cache_manager``.

    Usable from any thread but the loop's own. Rules, roles, statuses and the state after a failure are those of
    :class:`aiodatadist.legacy.KvCacheManager`. Calls return when everything is done; an interrupt stops the transfer,
    and is raised once no more bytes can land. A ``synchronize_layer`` is called in its own thread, and may block.

    A ``KvCache`` may be dropped and collected in any thread; its memory is released as after ``deallocate_cache``.
    """

    def __init__(self, thread: LoopThread, inner: awaitable.KvCacheManager) -> None:
        self._thread = thread
        self._inner = inner

    def is_initialized(self) -> bool:
        """Return False once its LLMDataDist is being finalized, and in a child of its process. Never waits."""
        return self._thread.pid == os.getpid() and self._inner.is_initialized()

    @property
    def _place(self) -> tuple[asyncio.AbstractEventLoop, CacheRegistry]:
        """The event loop and the registry that release caches."""
        return self._inner._place

    allocate_cache: Final = blocking(awaitable.KvCacheManager.allocate_cache)
    allocate_blocks_cache: Final = blocking(awaitable.KvCacheManager.allocate_blocks_cache)
    deallocate_cache: Final = blocking(awaitable.KvCacheManager.deallocate_cache)
    remove_cache_key: Final = blocking(awaitable.KvCacheManager.remove_cache_key)
    pull_cache: Final = moving(awaitable.KvCacheManager.pull_cache)
    pull_blocks: Final = moving(awaitable.KvCacheManager.pull_blocks)
    copy_cache: Final = moving(awaitable.KvCacheManager.copy_cache)
    copy_blocks: Final = moving(awaitable.KvCacheManager.copy_blocks)
    swap_blocks: Final = moving(awaitable.KvCacheManager.swap_blocks)
    transfer_cache_async: Final = starting(awaitable.KvCacheManager.transfer_cache_async)
    get_cache_tensors: Final = blocking(awaitable.KvCacheManager.get_cache_tensors)
    check_cache_key: Final = staticmethod(awaitable.KvCacheManager.check_cache_key)

    # ---- ours ----

    arrays: Final = blocking(awaitable.KvCacheManager.arrays)
    tensors: Final = blocking(awaitable.KvCacheManager.tensors)
    pool_usage: Final = blocking(awaitable.KvCacheManager.pool_usage)

    def _watched(self, task: CacheTask) -> CacheTask:
        """Return the task: the inner manager counts it, as it counts the transfers of models."""
        return task
