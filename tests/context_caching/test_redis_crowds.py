"""Many calls at the same moment: the event loop goes round between them, so each learns of its deadline when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from aiodatadist._context_caching.pools.contract import PoolTimeout
from aiodatadist.testing.pools import new_key, soon
from tests.context_caching.engine_fixtures import redis_server
from tests.context_caching.servers import RedisServer

__all__ = ["redis_server"]

CALLS = 200
KEYS = 256
ROUNDS = 20
"""At least, of some hundred: each call of so many keys holds the loop for a good part of a millisecond."""


ROUNDS_OF_MEMORY = 8
"""At least, of 32: each piece of memory takes some milliseconds to clear."""


class Rounds:
    """Counts how often the event loop goes round, and in which rounds requests were handed to a server."""

    def __init__(self) -> None:
        self.now = 0
        self.handed_over: list[int] = []
        self._handle: asyncio.Handle | None = None

    def hang_nodes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Note requests, and never answer them."""
        from aiodatadist._context_caching.pools.redis.nodes import Node  # noqa: PLC0415 - absent where redis-py is

        async def hang(_: Node, *__: Any, **___: Any) -> list[Any]:
            self.handed_over.append(self.now)
            await anyio.sleep_forever()
            return []

        monkeypatch.setattr(Node, "ask", hang)

    def __enter__(self) -> Rounds:
        self._count()
        return self

    def _count(self) -> None:
        self.now += 1
        self._handle = asyncio.get_running_loop().call_soon(self._count)

    def __exit__(self, *_: object) -> None:
        assert self._handle is not None
        self._handle.cancel()


@pytest.mark.parametrize("what", ["exists", "remove", "get"])
async def test_the_loop_goes_round_while_a_crowd_prepares(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - as above

    keys = [new_key() for _ in range(KEYS)]
    async with aclosing(await RedisPool.open(redis_server.url)) as pool:
        calls: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "exists": lambda: pool.exists_many(keys, deadline=soon()),
            "remove": lambda: pool.remove_many(keys, deadline=soon()),
            "get": lambda: pool.get_many(keys, [100] * KEYS, deadline=soon()),
        }
        with monkeypatch.context() as patch, Rounds() as rounds:
            rounds.hang_nodes(patch)
            tasks = [asyncio.create_task(calls[what]()) for _ in range(CALLS)]
            handed = CALLS * (8 if what == "get" else 1)  # values have so many connections
            while len(rounds.handed_over) < handed:  # noqa: ASYNC110 - rounds of the loop are what is counted
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    assert len(set(rounds.handed_over)) >= ROUNDS


async def test_the_loop_goes_round_while_memory_is_made(redis_server: RedisServer) -> None:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - as above

    async with aclosing(await RedisPool.open(redis_server.url)) as pool:
        with Rounds() as rounds:
            stages = await pool.stage([4 << 20] * 32, deadline=soon())
        for stage in stages:
            assert stage is not None
            stage.release()
        assert rounds.now >= ROUNDS_OF_MEMORY
        with pytest.raises(PoolTimeout):
            await pool.stage([4 << 20] * 65, deadline=anyio.current_time())  # more than is kept: some is made
        stages = await pool.stage([4 << 20] * 64, deadline=soon())  # all of it: what the late call had is back
        for stage in stages:
            assert stage is not None
            stage.release()


async def test_options_of_a_connection_are_read_once_for_each_server(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py looks its own version up in the file system for each, and loads the certificates."""
    from aiodatadist._context_caching.pools.redis import nodes  # noqa: PLC0415 - as above
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - as above

    made = []

    new_settings = nodes.Account._new_settings

    def counted(account: nodes.Account, host: str, port: int) -> Any:
        made.append(port)
        return new_settings(account, host, port)

    monkeypatch.setattr(nodes.Account, "_new_settings", counted)
    keys = [new_key() for _ in range(32)]
    async with aclosing(await RedisPool.open(redis_server.url)) as pool:
        for found in await pool.get_many(keys, [100] * 32, deadline=soon()):
            assert isinstance(found, int)
    assert made == [redis_server.port]
