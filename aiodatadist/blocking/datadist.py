"""LLMDataDist without await. Its engine lives on the process's loop thread, with those of all others."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import cast

import anyio

from aiodatadist import config
from aiodatadist import datadist as awaitable
from aiodatadist.blocking.cache_manager import CacheManager
from aiodatadist.blocking.config import config_of
from aiodatadist.blocking.facade import blocking
from aiodatadist.blocking.stats import Stats
from aiodatadist.blocking.submitted import Handle
from aiodatadist.blocking.thread import LoopThread, acquire, release
from aiodatadist.descriptors import LLMRole
from aiodatadist.link import Notification


class LLMDataDist:
    """One cluster, for code that does not await. May be used from several threads; several may be in one process.

    :meth:`init` starts the process's loop thread if it is the first, :meth:`finalize` and :meth:`close` end it if they are
    the last.

    Args:
        role: informational.
        cluster_id: unique among all clusters that may ever be linked.
    """

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        self._inner = awaitable.LLMDataDist(role, cluster_id)
        self._life = threading.Lock()
        self._running: LoopThread | None = None
        self._manager: CacheManager | None = None
        self._last_stats = Stats()

    # ---- life ----

    def init(self, options: Mapping[str, str] | config.LLMConfig) -> None:
        """Open the device and start listening. A second call on an initialised object does nothing.

        Args:
            options: of ``LLMConfig.generate_options()``. A mode that is absent is off, as upstream.

        Raises:
            TypeError, ValueError, ParamInvalid: an option is wrong.
            LLMException: the device cannot be opened, or the port is in use. Nothing is left behind.
        """
        self._check_process()
        with self._life:
            if self._running is not None:
                self._running.check_usable()
                return
            wanted = config_of(options)
            thread = acquire()
            try:
                self._manager = thread.call(lambda: self._open(thread, wanted))
                self._running = thread
            except BaseException:
                self._manager = self._running = None
                try:
                    thread.call(self._inner.finalize)  # an interrupt may have come when it was open already
                finally:
                    release(thread)
                raise

    async def _open(self, thread: LoopThread, wanted: config.LLMConfig) -> CacheManager:
        await self._inner.init(wanted)
        return CacheManager(thread, self._inner.cache_manager)

    def finalize(self) -> None:
        """End all links and give everything back. Does nothing when not initialised; may be called twice, by any thread.

        Calls under way in other threads end with an error, and what is submitted is cancelled.
        """
        self._end(0)

    def close(self, drain: float = 0) -> list[Handle]:
        """Refuse what is new, let what was submitted finish for ``drain`` seconds, stop the rest, and finalize.

        Returns:
            The handles that were not drained. All have ended: what did not succeed is failed or cancelled.
        """
        if not isinstance(drain, (int, float)):
            raise TypeError(f"drain is {drain!r} of type {type(drain).__name__}: it has to be a number of seconds")
        if not drain >= 0:
            raise ValueError(f"drain is {drain}: it has to be 0 seconds or more")
        manager = self._end(drain)
        return [] if manager is None else manager.drain()

    def _end(self, seconds: float) -> CacheManager | None:
        thread, manager = self._running, self._manager
        if thread is None or manager is None or thread.pid != os.getpid():
            return None  # in a child: the parent has it
        thread.check_usable()
        with self._life:
            if self._running is not thread:
                return None
            try:
                thread.call(lambda: manager._submissions.close(seconds))
            finally:
                try:
                    thread.call(self._inner.finalize)
                finally:
                    self._last_stats = manager._counters.now
                    self._running = self._manager = None
                    manager._submissions.abandon()
                    release(thread)
        return manager

    # ---- what it is ----

    @property
    def _thread(self) -> LoopThread:
        thread = self._running
        if thread is None:
            raise RuntimeError("this LLMDataDist is not initialised: init() it first")
        return thread

    def _check_process(self) -> None:
        if self._running is not None:
            self._running.check_usable()

    @property
    def cluster_id(self) -> int:
        return self._inner.cluster_id

    @property
    def cache_manager(self) -> CacheManager:
        """Raises RuntimeError: it is not initialised. ForkError: in a child of the process that initialised it."""
        self._check_process()
        manager = self._manager
        if manager is None:
            raise RuntimeError("this LLMDataDist is not initialised: init() it first")
        return manager

    def stats(self) -> Stats:
        """What this cluster transferred since it was initialised, or, finalized, in its last life. Never waits."""
        manager = self._manager
        return self._last_stats if manager is None else manager._counters.now

    # ---- upstream's calls ----

    link_clusters = blocking(awaitable.LLMDataDist.link_clusters)
    unlink_clusters = blocking(awaitable.LLMDataDist.unlink_clusters)
    switch_role = blocking(awaitable.LLMDataDist.switch_role)
    link = blocking(awaitable.LLMDataDist.link)
    unlink = blocking(awaitable.LLMDataDist.unlink)
    query_register_mem_status = blocking(awaitable.LLMDataDist.query_register_mem_status)
    check_link_status = blocking(awaitable.LLMDataDist.check_link_status)

    # ---- ours ----

    statistics = blocking(awaitable.LLMDataDist.statistics)
    wait_register_mem_status = blocking(awaitable.LLMDataDist.wait_register_mem_status)
    wait_linked = blocking(awaitable.LLMDataDist.wait_linked)
    wait_link_closed = blocking(awaitable.LLMDataDist.wait_link_closed)
    notify = blocking(awaitable.LLMDataDist.notify)

    def next_notification(self, timeout: float | None = None) -> Notification | None:
        """Take what a peer notified this cluster of, waiting at most ``timeout`` seconds; None if there was none.

        None also when the cluster is finalized meanwhile.
        """

        async def take() -> Notification | None:
            with anyio.move_on_after(timeout):
                notifications = cast("AsyncGenerator[Notification]", self._inner.notifications())
                async with aclosing(notifications):
                    return await anext(notifications, None)
            return None

        return self._thread.call(take)

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Where peers can link to us, with the real port; None when not listening."""

        async def ask() -> tuple[str, int] | None:
            return self._inner.listen_address

        return self._thread.call(ask)

    def __repr__(self) -> str:
        return f"<blocking LLMDataDist {self.cluster_id}{'' if self._running is None else ' initialised'}>"
