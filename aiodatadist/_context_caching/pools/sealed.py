"""A pool whose values only members of a group can write and read, in front of any other pool.

A value that the pool behind it has under a name counts as absent unless a member put it there. That pool, its network and
its other users can still lose values, and see names and lengths.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import addressof, c_char, memmove
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import anyio

from aiodatadist._cluster.key_ring import LOOK_SECONDS, KeyRing
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._config.seal_keys import SealKeys
from aiodatadist._config.trust import Key
from aiodatadist._context_caching.pools import lending
from aiodatadist._context_caching.pools.contract import (
    GetStatus,
    KVPool,
    NodeInfo,
    PoolKey,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)
from aiodatadist._context_caching.pools.seals import HEADER, Clock, SealKey, Seals, writable
from aiodatadist._counting import Incidents
from aiodatadist.errors import AuthError

logger = logging.getLogger(__name__)

T = TypeVar("T")

ON_THE_LOOP: Final = 64 << 10
"""Most bytes that are sealed or opened on the event loop: that takes less than handing them to a thread."""
FEW: Final = 8
"""The most values that are sealed or opened there: each costs some tens of microseconds, whatever its length."""
THREADS: Final = 2
"""The number of threads that seal and open, the same as of those that hash unsealed values."""


class SealedStage:
    """Memory of the pool behind, without the header in front of the value."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.address = stage.address + HEADER
        self.nbytes = stage.nbytes - HEADER

    def view(self) -> memoryview:
        return self.stage.view()[HEADER:]

    def release(self) -> None:
        self.stage.release()


class OpenedValue:
    """A value that was opened: in the memory of the pool behind, or in a copy if others may read that memory.

    The pool's memory stays lent in both cases. So its limit bounds the copies, too.
    """

    def __init__(self, value: Value, *, is_private: bool) -> None:
        self._value: Value | None = value
        self.nbytes = value.nbytes - HEADER
        self._copy = None if is_private else (c_char * self.nbytes)()
        self.address = value.address + HEADER if self._copy is None else addressof(self._copy)

    def view(self) -> memoryview:
        if self._value is None:
            raise ValueError("this value was released")
        return writable(self.address, self.nbytes).toreadonly()

    def release(self) -> None:
        value, self._value, self._copy = self._value, None, None
        if value is not None:
            value.release()


class SealedPool(KVPool):
    """A pool that seals what it puts into another pool, and opens what it gets from there; see :meth:`open`."""

    def __init__(self, pool: KVPool, ring: KeyRing, seals: Seals) -> None:
        self._pool = pool
        self._ring = ring
        self._seals = seals
        self._made: tuple[tuple[Key, ...], list[SealKey]] = ((), [])
        self._next_look = anyio.current_time() + LOOK_SECONDS
        self._threads = ThreadPoolExecutor(THREADS, "aiodatadist seals")
        self.capabilities = replace(pool.capabilities, sealed=True)

    @classmethod
    async def open(
        cls,
        pool: KVPool,
        seal_key_file: str | Path,
        *,
        seal_seconds: float | None = None,
        clock: Clock = time.time,
    ) -> Self:
        """Seal the values of a pool, which is closed with this one.

        The file has lines of ``name secret``, as the file ``keys`` of a folder of trust. The first key seals, all open.
        It is looked at again every 30 seconds while the pool is used.

        Args:
            seal_key_file: if others than a group may read it, or others than its owner may write it, it is refused.
            seal_seconds: age up to which a value is used; an older one counts as absent. Members' clocks must agree.

        Raises:
            ParamInvalid: if the file cannot be used.
            ImportError: if the extra ``sealed`` is not installed.
        """
        seals = await in_thread(Seals, seal_seconds, clock)
        return cls(pool, await ring_of(SealKeys(Path(seal_key_file)), pool.capabilities.name), seals)

    @property
    def key_name(self) -> str:
        """The name of the key that seals. Raises AuthError if the keys cannot be used."""
        return self._ring.keys()[0].name

    async def stage(self, sizes: Sequence[int], *, deadline: float) -> list[Stage | None]:
        stages = await self._pool.stage(_with_headers(sizes), deadline=deadline)
        return [None if stage is None else SealedStage(stage) for stage in stages]

    def keeps(self, sizes: Sequence[int]) -> int:
        return self._pool.keeps(_with_headers(sizes))

    def why_no_room(self, nbytes: int) -> str:
        return self._pool.why_no_room(nbytes + HEADER)

    async def put_many(self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float) -> list[PutStatus]:
        try:
            lending.same_length(keys, stages, "stages")
            inner = [_stage(stage) for stage in stages]
            first = (await self._keys(deadline))[0]
            await self._apart(lambda: self._seal_all(first, keys, inner), inner)
        except BaseException:
            for stage in stages:
                stage.release()
            raise
        return await self._pool.put_many(keys, inner, deadline=deadline)

    async def get_many(
        self, keys: Sequence[PoolKey], sizes: Sequence[int], *, deadline: float
    ) -> list[Value | GetStatus]:
        known = await self._keys(deadline)
        answers = await self._pool.get_many(keys, _with_headers(sizes), deadline=deadline)
        values = [answer for answer in answers if not isinstance(answer, GetStatus)]
        names = [key for key, answer in zip(keys, answers, strict=True) if not isinstance(answer, GetStatus)]
        try:
            opened = iter(await self._apart(lambda: self._open_all(known, names, values), values))
        except BaseException:
            for value in values:
                value.release()
            raise
        return [answer if isinstance(answer, GetStatus) else next(opened) for answer in answers]

    async def exists_many(self, keys: Sequence[PoolKey], *, lease: float = 0.0, deadline: float) -> list[bool]:
        """Return for each key True if the pool behind says that it is there. Only a read finds out if it is a member's."""
        return await self._pool.exists_many(keys, lease=lease, deadline=deadline)

    async def remove_many(self, keys: Sequence[PoolKey], *, deadline: float) -> int:
        return await self._pool.remove_many(keys, deadline=deadline)

    async def nodes(self, *, deadline: float) -> list[NodeInfo]:
        return await self._pool.nodes(deadline=deadline)

    async def healthy(self, *, deadline: float) -> bool:
        return await self._pool.healthy(deadline=deadline)

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False)
        await self._pool.aclose()

    # ---- keys and threads ----

    async def _keys(self, deadline: float) -> list[SealKey]:
        """Return the keys, the one that seals first. Raises PoolUnreachable if they cannot be used now."""
        if anyio.current_time() >= self._next_look:
            self._next_look = anyio.current_time() + LOOK_SECONDS
            with anyio.CancelScope(deadline=deadline):
                await self._ring.look()
        try:
            keys = self._ring.for_client(self._ring.keys)
        except AuthError as error:
            raise PoolUnreachable(f"values of the {self.capabilities.name} pool cannot be sealed: {error}") from error
        if self._made[0] is not keys:
            self._made = tuple(keys), [SealKey.of(key) for key in keys]
        return self._made[1]

    async def _apart(self, work: Callable[[], T], memory: Sequence[Any]) -> T:
        """Do the work, in a thread if it is long. If cancelled, this returns only when the work has ended."""
        if len(memory) <= FEW and sum(each.nbytes for each in memory) <= ON_THE_LOOP:
            return work()
        return await in_thread(work, threads=self._threads)

    def _seal_all(self, key: SealKey, names: Sequence[PoolKey], stages: Sequence[Stage]) -> None:
        for name, stage in zip(names, stages, strict=True):
            with stage.view() as view:
                self._seals.seal(key, name, view)

    def _open_all(
        self, known: Sequence[SealKey], names: Sequence[PoolKey], values: Sequence[Value]
    ) -> list[Value | GetStatus]:
        return [self._opened(known, name, value) for name, value in zip(names, values, strict=True)]

    def _opened(self, known: Sequence[SealKey], name: PoolKey, value: Value) -> Value | GetStatus:
        opened = OpenedValue(value, is_private=self.capabilities.private_values)
        with value.view() as view:
            header = bytes(view[:HEADER])
        if not self.capabilities.private_values:
            memmove(opened.address, value.address + HEADER, opened.nbytes)  # lets other threads run, unlike a slice
        with writable(opened.address, opened.nbytes) as payload:
            fault = self._seals.open(known, name, header, payload)
        if fault is None:
            return opened
        opened.release()
        return fault


async def ring_of(keys: SealKeys, pool: str) -> KeyRing:
    """Read the keys for a pool's values, and return them. Raises ParamInvalid if they cannot be used."""
    ring = KeyRing(keys, f"the {pool} pool", Incidents(), use="values are sealed with")
    await ring.check()
    return ring


def _with_headers(sizes: Sequence[int]) -> list[int]:
    return [size + HEADER if isinstance(size, int) and size > 0 else size for size in sizes]


def _stage(stage: Stage) -> Stage:
    if not isinstance(stage, SealedStage):
        raise TypeError(f"a stage is a {type(stage).__name__}: must be one of this pool's")
    return stage.stage
