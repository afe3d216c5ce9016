"""Values under an engine's own names in a ContextCache, for threads that must not wait.

Every call ends with one call of ``done``, on the loop's thread, with the outcome for each key. Once
:meth:`ValueService.close` has returned, callers' memory is no longer touched.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from hashlib import sha256
from typing import Any

from pydantic import Field

from aiodatadist._adapters.loop_service import LoopService
from aiodatadist._adapters.pools import PoolSettings, open_cache
from aiodatadist._blocking.loop_door import LoopDoor
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._counting import Incident, Incidents
from aiodatadist._counting.callbacks import guarded
from aiodatadist.context_caching import CcConfig, CcResult, CcStatus, ContextCache, EmsException

logger = logging.getLogger(__name__)

Done = Callable[[list[bool]], object]
"""Called with the outcome for each key: True if it is stored, found, or loaded."""


class ValueSettings(PoolSettings):
    """A user's settings of a pool of values.

    Attributes:
        namespace: values in different namespaces do not collide.
        seconds: time limit for one call.
        lease_seconds: seconds for which the pool should keep what was found for a load, if it can.
    """

    namespace: str = Field(default="lmcache", min_length=1, max_length=256)
    seconds: float = Field(default=10.0, gt=0, le=3600)
    lease_seconds: float = Field(default=10.0, ge=0, le=3600)


def short(name: str) -> str:
    """Return a key of a fixed length for the engine's name of a value."""
    return sha256(name.encode(errors="surrogatepass")).hexdigest()


class ValueService:
    """The values of one engine.

    All methods may be called from any thread but the loop's; only construction and :meth:`close` wait.

    Raises:
        EmsException: if the URL is wrong, or the pool's extra is not installed.
    """

    def __init__(self, settings: ValueSettings) -> None:
        self._door: LoopDoor[_Life] = LoopDoor("ValueService")
        life = _Life(settings)
        self._door.open_or_close(life, life.open)

    def save(self, keys: Sequence[str], buffers: Sequence[Any], done: Done) -> None:
        """Store each buffer under its key. Keys that are there already count as stored."""
        self._post("save", list(keys), list(buffers), done)

    def load(self, keys: Sequence[str], buffers: Sequence[Any], done: Done) -> None:
        """Fill each buffer with its key's value.

        A value that is missing, damaged or of another length is not loaded; its buffer is undefined then.
        """
        self._post("load", list(keys), list(buffers), done)

    def look_up(self, keys: Sequence[str], done: Done) -> None:
        """Find out which keys are there; found ones are kept for ``lease_seconds`` if the pool can do that."""
        self._post("look_up", list(keys), [], done)

    def remove(self, keys: Sequence[str], done: Done) -> None:
        """Remove the values of these keys."""
        self._post("remove", list(keys), [], done)

    def check_health(self) -> bool:
        """Return True if the pool works right now. Waits for at most a second."""
        healthy: bool = self._door.thread.call(self._running().check_health)
        return healthy

    def close(self) -> None:
        """Stop running calls, and close the cache. May be called twice."""
        self._door.close()

    def _running(self) -> _Life:
        return self._door.life

    def _post(self, what: str, keys: list[str], buffers: list[Any], done: Done) -> None:
        life = self._running()
        if not keys:
            done([])
            return
        self._door.thread.post(lambda: life.start(what, keys, buffers, done))


class _Life:
    """The part on the loop: a ContextCache, and a task for each call."""

    def __init__(self, settings: ValueSettings) -> None:
        self._settings = settings
        self._service = LoopService("value service")
        self.close = self._service.close
        self._incidents = Incidents()
        self._cache: ContextCache
        self._tasks: Spawner
        self._waiting: set[int] = set()

    async def open(self) -> None:
        """Open the cache."""
        config = CcConfig(rank_id=0, device_id=self._settings.device_id, model_id=self._settings.namespace)

        async def enter(stack: AsyncExitStack) -> None:
            self._cache = await open_cache(stack, self._settings, config)

        await self._service.open(enter)
        self._tasks = Spawner(self._service.group)

    async def check_health(self) -> bool:
        """Return True if the pool works right now."""
        return await self._cache.check_health()

    def start(self, what: str, keys: list[str], buffers: list[Any], done: Done) -> None:
        """Start a call."""
        if self._service.is_ending:
            done([False] * len(keys))
        else:
            self._tasks.start_soon(self._run, what, keys, buffers, done)

    async def _run(self, what: str, keys: list[str], buffers: list[Any], done: Done) -> None:
        """Make a call, and report to its caller whatever the outcome."""
        outcome = [False] * len(keys)
        try:
            if what == "load":
                await self._load(keys, buffers, outcome)
            else:
                outcome[:] = await self._ask(what, keys, buffers)
        except EmsException as error:
            self._incidents.add(Incident.CALL_FAILED, logger, "%s of %d values: %s", what, len(keys), error)
        finally:
            guarded(partial(done, outcome), logger, "%s of %d values: its callback failed", what, len(keys))

    async def _ask(self, what: str, keys: list[str], buffers: list[Any]) -> list[bool]:
        settings = self._settings
        call: Awaitable[CcResult]
        match what:
            case "save":
                call = self._cache.save_values(keys, [[each] for each in buffers], timeout=settings.seconds)
            case "look_up":
                call = self._cache.exists_values(keys, timeout=settings.seconds, lease=settings.lease_seconds)
            case _:
                await self._cache.remove_values(keys, timeout=settings.seconds)
                return [True] * len(keys)
        return [status is CcStatus.OK for status in (await call).details]

    async def _load(self, keys: list[str], buffers: list[Any], outcome: list[bool]) -> None:
        """Load the values. A load ends at the first missing one; the next load continues behind it."""
        left = list(range(len(keys)))
        while left:
            result = await self._cache.load_values(
                [keys[i] for i in left], [[buffers[i]] for i in left], timeout=self._settings.seconds
            )
            for i in left[: result.success]:
                outcome[i] = True
            left = left[result.success + 1 :]
            if left:
                found = await self._ask("look_up", [keys[i] for i in left], [])
                left = [i for i, there in zip(left, found, strict=True) if there]
