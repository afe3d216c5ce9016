"""Pools that are not what one would wish, around an embedded one that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio

from aiodatadist._context_caching.pools.contract import GetStatus, KVPool, NodeInfo, PoolKey, PutStatus, Stage, Value
from aiodatadist.context_caching import MemoryPool

Misdeed = Callable[[], Any]


class Foreign(KVPool):
    """An embedded pool that claims to be a server's: its values need proof. What it is told to do wrong, it does.

    Attributes:
        misdeeds: by name of a call: awaited before the call goes on.
        asked: how often each call came.
    """

    def __init__(self, inner: MemoryPool) -> None:
        self.inner = inner
        self.capabilities = replace(inner.capabilities, name="foreign", in_process=False)
        self.misdeeds: dict[str, Misdeed] = {}
        self.asked: Counter[str] = Counter()

    async def _misbehave(self, call: str) -> None:
        self.asked[call] += 1
        if call in self.misdeeds:
            await self.misdeeds[call]()

    async def stage(self, sizes: Sequence[int], *, deadline: float) -> list[Stage | None]:
        await self._misbehave("stage")
        return await self.inner.stage(sizes, deadline=deadline)

    async def put_many(self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float) -> list[PutStatus]:
        try:
            await self._misbehave("put_many")
        except BaseException:
            for stage in stages:
                stage.release()
            raise
        return await self.inner.put_many(keys, stages, deadline=deadline)

    async def get_many(
        self, keys: Sequence[PoolKey], sizes: Sequence[int], *, deadline: float
    ) -> list[Value | GetStatus]:
        await self._misbehave("get_many")
        return await self.inner.get_many(keys, sizes, deadline=deadline)

    async def exists_many(self, keys: Sequence[PoolKey], *, lease: float = 0.0, deadline: float) -> list[bool]:
        await self._misbehave("exists_many")
        return await self.inner.exists_many(keys, lease=lease, deadline=deadline)

    async def remove_many(self, keys: Sequence[PoolKey], *, deadline: float) -> int:
        await self._misbehave("remove_many")
        return await self.inner.remove_many(keys, deadline=deadline)

    async def nodes(self, *, deadline: float) -> list[NodeInfo]:
        return await self.inner.nodes(deadline=deadline)

    async def healthy(self, *, deadline: float) -> bool:
        await self._misbehave("healthy")
        return await self.inner.healthy(deadline=deadline)

    async def aclose(self) -> None:
        await self.inner.aclose()


async def never() -> None:
    await anyio.sleep_forever()


def fails_with(error: Exception) -> Misdeed:
    async def fail() -> None:
        raise error

    return fail


def from_then_on(first: int, misdeed: Misdeed) -> Misdeed:
    """Return a misdeed that begins with the call of this number, counted from 1. Earlier calls behave well."""
    calls = 0

    async def behave() -> None:
        nonlocal calls
        calls += 1
        if calls >= first:
            await misdeed()

    return behave
