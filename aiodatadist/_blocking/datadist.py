"""The LLMDataDist without await. Its engine runs on the process's loop thread, with those of all others."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final, NoReturn, cast

import anyio

from aiodatadist import _datadist as awaitable
from aiodatadist import legacy
from aiodatadist._blocking.cache_manager import CacheManager
from aiodatadist._blocking.config import config_of
from aiodatadist._blocking.facade import blocking
from aiodatadist._blocking.kv_cache_manager import KvCacheManager
from aiodatadist._blocking.model import LLMModel
from aiodatadist._blocking.runner import call, inside, runner_for
from aiodatadist._blocking.shared_loop import acquire, release
from aiodatadist._blocking.stats import Counters, Stats
from aiodatadist._blocking.submitted import Handle, Submissions
from aiodatadist._cache.pool import PoolUsage
from aiodatadist._concurrency.loop_thread import LoopThread
from aiodatadist._config import llm_config as config
from aiodatadist._counting import Figures, Observer
from aiodatadist._link import Notification
from aiodatadist._values.cluster_info import LLMClusterInfo, only_address
from aiodatadist._values.descriptors import LLMRole
from aiodatadist.errors import LLMException
from aiodatadist.legacy import ModelRunner

Manager = CacheManager | KvCacheManager


_initialised: weakref.WeakSet[LLMDataDist] = weakref.WeakSet()


def finalize_all() -> None:
    """Finalize every cluster of this process that is initialised."""
    for datadist in list(_initialised):
        datadist.finalize()


class _Cluster(legacy.LLMDataDist):
    """The awaitable cluster, as strict as upstream where upstream asks for more than is needed."""

    def _check_unlink(self, info: LLMClusterInfo, force: bool) -> None:
        """Check that the cluster has one address, as upstream's HCCL backend does without force, even if it is not linked.

        Upstream's hixl backend needs no address.
        """
        if not force and not self._is_v1 and not self.config.links_have_owners:
            only_address(info)


class LLMDataDist:
    """A cluster, for code that does not await. May be used from several threads; one process may have several.

    :meth:`init` starts the process's loop thread if this is the first cluster; :meth:`finalize` and :meth:`close` end
    the thread with the last one.

    The options choose the mode, as upstream: with ``llm.EnableCacheManager`` there is a ``cache_manager``. If that is
    missing or 0 there is a ``kv_cache_manager``, and roles, links and models work as in
    :class:`aiodatadist.legacy.LLMDataDist`.

    Args:
        role: informational with a ``cache_manager``, enforced with a ``kv_cache_manager``.
        cluster_id: unique among all clusters that may ever be linked.
    """

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        self._inner = _Cluster(role, cluster_id)
        self._life = threading.Lock()
        self._ending: int | None = None
        self._running: LoopThread | None = None
        self._manager: Manager | None = None
        self._submissions: Submissions | None = None
        self._last_stats = Stats()

    # ---- life ----

    def init(self, options: Mapping[str, str] | config.LLMConfig) -> None:
        """Open the device and start listening. Does nothing on an initialised object if the options are the same.

        Args:
            options: from ``LLMConfig.generate_options()``. A missing mode is off, as upstream.

        Raises:
            TypeError, ValueError, ParamInvalid: if an option is wrong or differs from the first call's, or another
                cluster of this process has the same id and is not finalized.
            LLMException: if the device cannot be opened, or the port is in use. Nothing is left behind.
        """
        self._check_process()
        if inside(self) is not None:
            return  # called by a runner: it is initialised, and finalize() may be waiting for this thread
        with self._life:
            if self._running is not None:
                self._running.check_usable()
                same = config_of(options)
                self._running.call(lambda: self._inner.init(same))
                return
            wanted = config_of(options)
            thread = acquire()
            submissions = Submissions(thread, Counters())
            try:
                self._manager = thread.call(lambda: self._open(thread, wanted, submissions))
                self._submissions, self._running = submissions, thread
                _initialised.add(self)
            except BaseException:  # also an interrupt: nothing is left behind
                self._manager = self._submissions = self._running = None
                try:
                    thread.call(self._inner.finalize)  # an interrupt may have come after it was open
                finally:
                    release(thread)
                raise

    async def _open(self, thread: LoopThread, wanted: config.LLMConfig, submissions: Submissions) -> Manager:
        await self._inner.init(wanted)
        if wanted.enable_cache_manager:
            return CacheManager(thread, self._inner.cache_manager, submissions)
        manager = self._inner.kv_cache_manager
        manager._v1_engine.watch = submissions.counters.watch
        return KvCacheManager(thread, manager)

    def finalize(self) -> None:
        """End all links and release everything. Does nothing if not initialised. May be called twice, from any thread.

        Running calls of other threads end with an error, and submitted transfers are cancelled. A running model is
        waited for.

        Raises:
            LLMException: if a ``ModelRunner`` of this object calls it, for which it would wait.
        """
        self._end(0, "finalize")

    def close(self, drain: float = 0) -> list[Handle]:
        """Refuse new calls, let submitted transfers finish for ``drain`` seconds, stop the rest, and finalize.

        Returns:
            The handles that were not drained. All have ended: those that did not succeed have failed or are cancelled.

        Raises:
            TypeError, ValueError: if ``drain`` is not a number of at least 0.
            LLMException: if a ``ModelRunner`` of this object calls it, for which it would wait.
        """
        if not isinstance(drain, (int, float)):
            raise TypeError(f"drain is {drain!r} of type {type(drain).__name__}: must be a number of seconds")
        if not drain >= 0:
            raise ValueError(f"drain is {drain}: must be 0 seconds or more")
        submissions = self._end(drain, "close")
        return [] if submissions is None else submissions.drain()

    def _end(self, seconds: float, what: str) -> Submissions | None:
        thread, submissions = self._running, self._submissions
        if thread is None or submissions is None or thread.pid != os.getpid():
            return None  # in a forked child: it is the parent's
        thread.check_usable()
        self._check_outside(what, "run_model", "on_cache_allocated", "on_cache_deallocated")
        if self._ending == threading.get_ident():
            return None  # a signal handler in this thread, which continues to finalize when the handler returns
        with self._life:
            if self._running is not thread:
                return None
            self._ending = threading.get_ident()
            try:
                self._end_now(thread, submissions, seconds)
            finally:
                self._ending = None
        return submissions

    def _end_now(self, thread: LoopThread, submissions: Submissions, seconds: float) -> None:
        try:
            thread.call(lambda: submissions.close(seconds))
        finally:
            try:
                thread.call(self._inner.finalize)
            finally:
                self._last_stats = submissions.counters.now
                self._running = self._manager = self._submissions = None
                _initialised.discard(self)
                try:
                    submissions.abandon()
                finally:
                    release(thread)

    def _check_outside(self, what: str, *methods: str) -> None:
        """Raise LLMException if one of these methods of a runner makes this call, which would wait for it."""
        method = inside(self)
        if method in methods:
            raise LLMException(f"{method}() of a model called {what}(), which would wait for it", operation=what)

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
        """The id of this cluster."""
        return self._inner.cluster_id

    @property
    def cache_manager(self) -> CacheManager:
        """The caches and transfers, with ``llm.EnableCacheManager``.

        Raises RuntimeError if not initialised, ParamInvalid if ``llm.EnableCacheManager`` is off, and ForkError in a
        child of the process that initialised it.
        """
        self._check_process()
        manager = self._manager
        return manager if isinstance(manager, CacheManager) else self._refuse("cache_manager")

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The caches and transfers, without ``llm.EnableCacheManager``.

        Raises RuntimeError if not initialised, ParamInvalid if ``llm.EnableCacheManager`` is on, and ForkError in a
        child of the process that initialised it.
        """
        self._check_process()
        manager = self._manager
        return manager if isinstance(manager, KvCacheManager) else self._refuse("kv_cache_manager")

    def _refuse(self, name: str) -> NoReturn:
        """Raise the reason why this manager does not exist, or no longer exists. The awaitable cluster knows the reason."""

        async def ask() -> object:
            return getattr(self._inner, name)

        self._thread.call(ask)
        raise RuntimeError(f"this LLMDataDist was initialised again meanwhile: get its {name} again")

    def stats(self) -> Stats:
        """Return counts of this cluster's transfers since ``init``; once finalized, of its last life. Never waits."""
        submissions = self._submissions
        return self._last_stats if submissions is None else submissions.counters.now

    def figures(self) -> Figures[PoolUsage]:
        """Return all counts since this object was made, over all links and lives, for a metrics endpoint. Never waits."""
        return self._inner.figures()

    @property
    def observer(self) -> Observer | None:
        """The observer that is notified of each transfer, on the loop's thread and in the context of the transfer's call.

        See :attr:`aiodatadist.LLMDataDist.observer`.
        """
        return self._inner.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._inner.observer = observer

    # ---- upstream's calls ----

    link_clusters: Final = blocking(awaitable.LLMDataDist.link_clusters)
    unlink_clusters: Final = blocking(awaitable.LLMDataDist.unlink_clusters)
    switch_role: Final = blocking(awaitable.LLMDataDist.switch_role)
    link: Final = blocking(awaitable.LLMDataDist.link)
    unlink: Final = blocking(awaitable.LLMDataDist.unlink)
    query_register_mem_status: Final = blocking(awaitable.LLMDataDist.query_register_mem_status)
    check_link_status: Final = blocking(awaitable.LLMDataDist.check_link_status)

    # ---- upstream's calls of the KvCacheManager mode ----

    complete_request: Final = blocking(legacy.LLMDataDist.complete_request)
    check_capacity: Final = blocking(legacy.LLMDataDist.check_capacity)

    def add_model(self, model_options: dict[str, str], model_runner: ModelRunner | None = None) -> LLMModel:
        """Add a model, as :meth:`aiodatadist.legacy.LLMDataDist.add_model` does.

        The runner's methods are called in worker threads. Errors are those of the awaitable call, and the following.

        Raises:
            TypeError: if a method of the runner is ``async def``.
            LLMException: if ``on_cache_allocated`` of another model of this object calls it.
            BaseException: whatever ``on_cache_allocated`` raises. Then there is no model, and no memory is taken.
        """
        self._check_outside("add_model", "on_cache_allocated")
        thread, runner = self._thread, runner_for(model_runner, self)
        return LLMModel(thread, call(thread, lambda: self._inner.add_model(model_options, runner)))

    # ---- ours ----

    def link_to(
        self, peer: int | LLMClusterInfo, address: str | tuple[str, int] | None = None, *, timeout: float = 3.0
    ) -> None:
        """Link to one peer that listens, as :meth:`aiodatadist.LLMDataDist.link_to` does, but return None."""
        self._thread.call(lambda: self._inner.link_to(peer, address, timeout=timeout))

    unlink_from: Final = blocking(awaitable.LLMDataDist.unlink_from)
    statistics: Final = blocking(awaitable.LLMDataDist.statistics)
    wait_register_mem_status: Final = blocking(awaitable.LLMDataDist.wait_register_mem_status)
    wait_linked: Final = blocking(awaitable.LLMDataDist.wait_linked)
    wait_link_closed: Final = blocking(awaitable.LLMDataDist.wait_link_closed)
    notify: Final = blocking(awaitable.LLMDataDist.notify)

    def next_notification(self, timeout: float | None = None) -> Notification | None:
        """Take the next notification from a peer, waiting at most ``timeout`` seconds; return None if there is none.

        Returns None also if the cluster is finalized meanwhile.
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
        """The address at which peers can link to this cluster, with the real port; None if it does not listen."""

        async def ask() -> tuple[str, int] | None:
            return self._inner.listen_address

        return self._thread.call(ask)

    def __repr__(self) -> str:
        return f"<blocking LLMDataDist {self.cluster_id}{'' if self._running is None else ' initialised'}>"
