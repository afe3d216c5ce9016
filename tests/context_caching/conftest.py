"""Pools under test, by name. An engine joins the acceptance checks with one entry in ``STORES``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import pytest

from aiodatadist.context_caching import KVPool, MemoryPool
from tests.context_caching.fakes import Foreign


class Store(Protocol):
    """A place for values, of which there may be several clients."""

    async def client(self) -> KVPool:
        """Another client of the same store. The store closes it."""


OpenStore = Callable[[int], AbstractAsyncContextManager[Store]]
"""With so many bytes for values, and a little for what engines need beside them."""


class _Embedded:
    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    async def client(self) -> KVPool:
        return self._pool


@asynccontextmanager
async def _memory(nbytes: int) -> AsyncIterator[Store]:
    async with await MemoryPool.open(nbytes) as pool:
        yield _Embedded(pool)


@asynccontextmanager
async def _foreign(nbytes: int) -> AsyncIterator[Store]:
    """The embedded pool behind the envelope that values of servers have."""
    async with await MemoryPool.open(nbytes) as pool:
        yield _Embedded(Foreign(pool))


STORES: dict[str, OpenStore] = {"memory": _memory, "foreign": _foreign}


@pytest.fixture(params=sorted(STORES))
def pool_factory(request: pytest.FixtureRequest) -> OpenStore:
    return STORES[request.param]
