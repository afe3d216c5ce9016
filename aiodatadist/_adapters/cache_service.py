"""Blocks of one worker's KV cache, saved to a ContextCache and loaded from it, for a busy loop that must not wait.

Each call is posted to the thread of an event loop::

    the engine's thread                         the loop's thread
    look_up(request, hashes) -> posted ->       ContextCache.exists
    found(request)           <- how many <-
    load(request, ...)       -> posted ->       ContextCache.load
    save(request, ...)       -> posted ->       ContextCache.save
    take()                   <- what ended <-

A pool that is slow or down causes misses, and is left alone for a while; it never delays the engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar

import anyio
import anyio.abc
from pydantic import ConfigDict, Field

from aiodatadist._adapters.ended import Ended, Tell
from aiodatadist._adapters.loop_service import LoopService
from aiodatadist._adapters.pools import EMBEDDED, PoolSettings, open_cache
from aiodatadist._blocking.loop_door import LoopDoor
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.signal import Signal
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.foreign import printable
from aiodatadist.context_caching import CcConfig_v1, CcResult, ContextCache, EmsException
from aiodatadist.errors import InternalError, ParamInvalid

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""Seconds in which saves must release blocks that are about to be overwritten."""


class CacheSettings(PoolSettings):
    """A user's settings of a context cache.

    Attributes:
        model_id: name of the model that computed the blocks; engines that share blocks must have the same name. None
            for the engine's own.
        lookup_seconds: time limit for learning which of a request's blocks are there.
        load_seconds: time limit for a request's blocks; missing ones are computed then.
        save_seconds: time limit for saving what one step computed.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(protected_namespaces=())  # as in Settings of block_service.py

    model_id: str | None = Field(default=None, min_length=1, max_length=256)
    lookup_seconds: float = Field(default=0.5, gt=0, le=60)
    load_seconds: float = Field(default=10.0, gt=0, le=3600)
    save_seconds: float = Field(default=30.0, gt=0, le=3600)


@dataclass
class _Saving:
    """The running saves of a request. If ``is_over``, no more come, and the engine waits for their end."""

    scopes: set[Scope] = field(default_factory=set)
    is_over: bool = False
    news: Signal = field(default_factory=Signal)


class CacheService:
    """The cache service of one worker, or of a scheduler, which only looks up.

    All methods may be called from any thread but the loop's; only :meth:`open`, :meth:`let_go` and :meth:`close` wait.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._ended = Ended()
        self._found: dict[str, int | None] = {}
        self._door: LoopDoor[_Life] = LoopDoor("CacheService")

    def open(self, config: CcConfig_v1, layers: Sequence[Sequence[Any]] = ()) -> None:
        """Open the cache, and register these layers' tensors, ``[blocks, tokens of a block, ...]`` each.

        Without tensors only :meth:`look_up` can be used. A pool that does not answer is retried from time to time.

        Raises:
            EmsException: if the URL or a tensor is wrong, or the pool's extra is not installed.
        """
        life = _Life(self._settings, self._tell, self._answer)
        self._door.open(life, lambda: life.open(config, layers))

    def look_up(self, request: str, hashes: Sequence[int]) -> None:
        """Ask how many of these blocks are there, from the first on, in the shards of all ranks."""
        life, wanted = self._running(), list(hashes)
        self._found[request] = None
        self._door.thread.post(lambda: life.look_up(request, wanted))

    def is_looked_up(self, request: str) -> bool:
        """Return True if :meth:`look_up` was called, and :meth:`forget` was not."""
        return request in self._found

    def found(self, request: str) -> int | None:
        """Return how many there are, or None if there is no answer yet."""
        return self._found[request]

    def forget(self, request: str) -> None:
        """Drop the answer, because it is no longer needed."""
        with self._lock:
            self._found.pop(request, None)

    def load(self, request: str, hashes: Sequence[int], blocks: Sequence[int]) -> None:
        """Start to load. Reported in ``received``; missing blocks are in ``failed``."""
        life, wanted, into = self._running(), list(hashes), tuple(blocks)
        self._door.thread.post(lambda: life.load(request, wanted, into))

    def save(self, request: str, hashes: Sequence[int], blocks: Sequence[int]) -> None:
        """Start to save. The blocks must not be written until :meth:`let_go`, or the report after :meth:`finish`."""
        life, wanted, kept = self._running(), list(hashes), list(blocks)
        self._door.thread.post(lambda: life.save(request, wanted, kept))

    def finish(self, request: str) -> None:
        """Declare that there are no more saves of this request. Reported in ``sent`` once those before have ended."""
        life = self._running()
        self._door.thread.post(lambda: life.finish(request))

    def cancel(self, request: str) -> None:
        """Stop a load. It is reported once no more bytes of it can land. Ended loads are unaffected."""
        life = self._running()
        self._door.thread.post(lambda: life.cancel(request))

    def let_go(self, requests: Sequence[str]) -> None:
        """Stop saves of these requests, and wait until their blocks are no longer read.

        Raises:
            LLMException: if they do not end within :data:`QUIET_SECONDS`.
        """
        life, named = self._running(), list(requests)
        if named:
            self._door.thread.call(lambda: life.let_go(named))

    def take(self) -> Ended:
        """Return what ended since the last call. Never waits."""
        life = self._door.opened  # once: another thread may close it
        with self._lock:
            ended, self._ended = self._ended, Ended()
        if life is not None:
            ended.incidents = life.incidents.take()
        return ended

    def close(self) -> None:
        """Stop running calls, and close the cache. May be called twice."""
        self._door.close()

    def _running(self) -> _Life:
        return self._door.life

    def _tell(self, change: Callable[[Ended], object]) -> None:
        with self._lock:
            change(self._ended)

    def _answer(self, request: str, count: int) -> None:
        with self._lock:
            if request in self._found:
                self._found[request] = count


class _Life:
    """The part on the loop: a ContextCache, and the tasks of orders."""

    def __init__(self, settings: CacheSettings, tell: Tell, answer: Callable[[str, int], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._answer = answer
        self._service = LoopService("cache service")
        self.close = self._service.close
        self.incidents = Incidents()
        self._cache: ContextCache
        self._block_size = 0
        self._tasks: Spawner
        self._loads: dict[str, Scope] = {}
        self._saves: dict[str, _Saving] = {}

    # ---- life ----

    async def open(self, config: CcConfig_v1, layers: Sequence[Sequence[Any]]) -> None:
        """Open the cache, and register the tensors."""
        if layers:
            self._block_size = int(layers[0][0].shape[1])

        async def enter(stack: AsyncExitStack) -> None:
            self._cache = await open_cache(stack, self._settings, config)
            if layers:
                await self._cache.register_kvcache(layers)

        await self._service.open(enter)
        self._tasks = Spawner(self._service.group)

    def _say(self, kind: Incident, words: str, request: str, error: EmsException) -> None:
        self.incidents.add(kind, logger, words, printable(request), error)

    async def _moved(self, moving: Awaitable[CcResult], kind: Incident, words: str, request: str) -> int:
        """Return how many blocks were moved, also if the call failed on its way."""
        try:
            return (await moving).success
        except EmsException as error:
            self._say(kind, words, request, error)
            return error.partial.success if error.partial is not None else 0

    # ---- looking up ----

    def look_up(self, request: str, hashes: list[int]) -> None:
        """Start to look blocks up."""
        self._tasks.start_soon(self._look_up, request, hashes)

    async def _look_up(self, request: str, hashes: list[int]) -> None:
        count = 0
        try:
            found = await self._cache.exists(hashes, timeout=self._settings.lookup_seconds, all_ranks=True)
            count = found.success
        except EmsException as error:
            self._say(Incident.LOOKUP_FAILED, "request %s: lookup failed, treated as a miss: %s", request, error)
        finally:
            self._answer(request, count)

    # ---- loading ----

    def load(self, request: str, hashes: list[int], into: tuple[int, ...]) -> None:
        """Start to load."""
        scope = self._loads[request] = Scope()
        self._tasks.start_soon(self._load, request, hashes, into, scope)

    def cancel(self, request: str) -> None:
        """Stop a load."""
        scope = self._loads.get(request)
        if scope is not None:
            scope.cancel()

    async def _load(self, request: str, hashes: list[int], into: tuple[int, ...], scope: Scope) -> None:
        """Load, and report the request whatever the outcome."""
        began, count, outcome = perf_counter(), 0, "load_cancelled"
        try:
            with scope:
                count = await self._load_prefix(request, hashes, into)
                outcome = "load_done" if count == len(into) else "load_missed"
        finally:
            self._loads.pop(request, None)
            self._tell(lambda ended: self._loaded(ended, request, outcome, into, count, perf_counter() - began))

    async def _load_prefix(self, request: str, hashes: list[int], into: tuple[int, ...]) -> int:
        loading = self._cache.load(hashes, chunks=self._chunks(into), timeout=self._settings.load_seconds)
        return await self._moved(loading, Incident.LOAD_FAILED, "request %s: its blocks are not loaded: %s", request)

    def _chunks(self, blocks: Sequence[int]) -> list[list[tuple[int, int]]]:
        return [[(block * self._block_size, self._block_size) for block in blocks]]

    @staticmethod
    def _loaded(ended: Ended, request: str, outcome: str, into: tuple[int, ...], count: int, seconds: float) -> None:
        ended.came(request, outcome, into[count:])
        ended.counters.update(loaded_blocks=count, missed_blocks=len(into) - count)
        ended.took(seconds)

    # ---- saving ----

    def save(self, request: str, hashes: list[int], blocks: list[int]) -> None:
        """Start to save."""
        saving = self._saves.setdefault(request, _Saving())
        scope = Scope()
        saving.scopes.add(scope)
        self._tasks.start_soon(self._save, request, saving, scope, hashes, blocks)

    async def _save(self, request: str, saving: _Saving, scope: Scope, hashes: list[int], blocks: list[int]) -> None:
        count = 0
        try:
            with scope:
                count = await self._save_blocks(request, hashes, blocks)
        finally:
            saving.scopes.discard(scope)
            saving.news.wake()
            counts = {"saved_blocks": count, "unsaved_blocks": len(blocks) - count}
            self._tell(lambda ended: ended.counters.update(counts))
            self._let_go_if_over(request)

    async def _save_blocks(self, request: str, hashes: list[int], blocks: list[int]) -> int:
        saving = self._cache.save(hashes, chunks=self._chunks(blocks), timeout=self._settings.save_seconds)
        return await self._moved(saving, Incident.SAVE_FAILED, "request %s: its blocks are not saved: %s", request)

    def finish(self, request: str) -> None:
        """Declare that there are no more saves of this request."""
        self._saves.setdefault(request, _Saving()).is_over = True
        self._let_go_if_over(request)

    def _let_go_if_over(self, request: str) -> None:
        saving = self._saves.get(request)
        if saving is not None and not saving.scopes:
            if saving.is_over:
                self._tell(lambda ended: ended.let_go(request, "save_done"))
            del self._saves[request]

    async def let_go(self, requests: list[str]) -> None:
        """Stop saves of these requests, and wait for their end."""
        with anyio.move_on_after(QUIET_SECONDS):
            for request in requests:
                saving = self._saves.get(request)
                while saving is not None and saving.scopes:
                    for scope in saving.scopes:
                        scope.cancel()
                    await saving.news.wait()
            return
        raise InternalError(f"saves still read blocks of preempted requests after {QUIET_SECONDS:g} seconds")


def check_pool(settings: CacheSettings, is_one_process: bool) -> None:
    """Raise ParamInvalid if not all processes of the engine can reach the pool."""
    if settings.pool.startswith(EMBEDDED) and not is_one_process:
        raise ParamInvalid(
            f"pool is {settings.pool}: it is in one process's memory, but this engine has several; redis: and mooncake: "
            "pools are outside the process"
        )
