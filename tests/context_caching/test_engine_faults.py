"""Engines that are killed, stopped and started again: a call ends by its deadline, and nothing is lost but cached values."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import pytest

from aiodatadist._context_caching.pools.contract import (
    GetStatus,
    KVPool,
    PoolKey,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)
from aiodatadist._context_caching.pools.mooncake.pool import MooncakePool
from aiodatadist.testing.pools import MIB, content, fetch, new_key, soon, store
from tests.conftest import open_files
from tests.context_caching.kit import BLOCKS, Kv, by_slots, opened
from tests.context_caching.servers import (
    PATIENCE,
    MooncakeLender,
    MooncakeMaster,
    RedisServer,
    Server,
    make_cluster,
    need_mooncake,
    need_redis,
    running,
)
from tests.stopwatch import lasting

T = TypeVar("T")

SLACK = 0.05
"""Seconds by which a call may miss its deadline."""
MEMORY = 32 * MIB


async def within(seconds: float, call: Callable[[float], Awaitable[T]]) -> T:
    """Return what ``call(deadline)`` returns; it should end by then."""
    with lasting(seconds + SLACK):
        return await call(anyio.current_time() + seconds)


async def until_true(look: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again, less and less often."""
    pause = 0.01
    with anyio.fail_after(PATIENCE):
        while not await look():
            await anyio.sleep(pause)
            pause = min(2 * pause, 0.2)


async def staged(pool: KVPool, values: list[bytes]) -> list[Stage]:
    stages = await pool.stage([len(value) for value in values], deadline=soon())
    filled = []
    for stage, value in zip(stages, values, strict=True):
        assert stage is not None
        stage.view()[:] = value
        filled.append(stage)
    return filled


def give_back(found: list[Value | GetStatus]) -> None:
    for value in found:
        if not isinstance(value, GetStatus):
            value.release()


async def killed_in_the_middle(victim: Server, call: Callable[[], Awaitable[T]]) -> None:
    """Call while the server hangs, so that it cannot have ended, and then kill it."""
    victim.stop()
    failures: list[Exception] = []

    async def work() -> None:
        try:
            await call()
        except (PoolUnreachable, PoolTimeout) as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await anyio.wait_all_tasks_blocked()
        assert not failures
        await anyio.to_thread.run_sync(victim.kill)
    assert [type(failure) for failure in failures] == [PoolUnreachable]


class Untouched:
    """All memory that a pool can lend now, marked; no other may write to it."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages
        for i, stage in enumerate(stages):
            stage.view()[:] = bytes([0xA0 + i]) * stage.nbytes

    @classmethod
    async def lend(cls, pool: KVPool, count: int) -> Untouched:
        stages = await pool.stage([MIB] * count, deadline=soon())
        return cls([stage for stage in stages if stage is not None])

    def check(self) -> None:
        for i, stage in enumerate(self._stages):
            assert bytes(stage.view()) == bytes([0xA0 + i]) * stage.nbytes
            stage.release()


def open_sockets() -> int:
    return sum("socket" in name for name in open_files())


# ---- Redis ----


@pytest.fixture
def server() -> Iterator[RedisServer]:
    need_redis()
    with running(server := RedisServer()):
        yield server


@asynccontextmanager
async def redis_pool(url: str) -> AsyncIterator[KVPool]:
    from aiodatadist._context_caching.pools.redis.pool import RedisPool  # noqa: PLC0415 - absent where redis-py is

    async with aclosing(await RedisPool.open(f"{url}?memory={MEMORY}")) as pool:
        yield pool


@pytest.mark.usefixtures("no_leaks")
async def test_redis_killed_in_mid_save_and_mid_load_and_started_again(server: RedisServer) -> None:
    keys, values = [new_key() for _ in range(8)], [content(i, MIB) for i in range(8)]
    async with redis_pool(server.url) as pool:
        stages = await staged(pool, values)
        await killed_in_the_middle(server, lambda: within(10, lambda end: pool.put_many(keys, stages, deadline=end)))
        assert not await within(1, lambda end: pool.healthy(deadline=end))
        with pytest.raises(PoolUnreachable):
            await within(1, lambda end: pool.exists_many(keys, deadline=end))
        await anyio.to_thread.run_sync(server.start)
        assert await pool.healthy(deadline=soon())
        assert await store(pool, keys, values) == [PutStatus.STORED] * 8
        sizes = [MIB] * 8
        await killed_in_the_middle(server, lambda: within(10, lambda end: pool.get_many(keys, sizes, deadline=end)))
        await anyio.to_thread.run_sync(server.start)
        assert await fetch(pool, keys, sizes) == [GetStatus.MISS] * 8
        assert await store(pool, keys, values) == [PutStatus.STORED] * 8


@pytest.mark.usefixtures("no_leaks")
async def test_redis_stopped_and_continued_after_the_deadline(server: RedisServer) -> None:
    key, absent, large = new_key(), new_key(), content(2, 16 * MIB)
    async with redis_pool(server.url) as pool:
        await store(pool, [key], [content(1, MIB)])
        server.stop()
        before = open_sockets()
        (stage,) = await staged(pool, [large])  # more than the sockets between us take
        with pytest.raises(PoolTimeout):
            await within(0.3, lambda end: pool.put_many([absent], [stage], deadline=end))

        async def is_dropped() -> bool:
            return open_sockets() < before

        await until_true(is_dropped)  # although the server has not read it
        with pytest.raises(PoolTimeout):
            await within(0.3, lambda end: pool.get_many([key], [MIB], deadline=end))
        assert not await within(0.3, lambda end: pool.healthy(deadline=end))
        lent = await Untouched.lend(pool, (MEMORY - len(large)) // MIB)  # that much is for what is fetched
        server.go_on()
        assert await fetch(pool, [absent], [len(large)]) == [GetStatus.MISS]
        assert await fetch(pool, [key], [MIB]) == [content(1, MIB)]
        lent.check()


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[list[RedisServer], KVPool, list[PoolKey], list[bytes]]]:
    """Start three servers, and a pool with 30 values in it."""
    need_redis()
    servers = [RedisServer(is_in_cluster=True) for _ in range(3)]
    with running(*servers):
        await anyio.to_thread.run_sync(make_cluster, servers)
        keys, values = [new_key() for _ in range(30)], [content(i, 20_000) for i in range(30)]
        async with redis_pool(servers[0].url) as pool:
            assert await store(pool, keys, values) == [PutStatus.STORED] * 30
            yield servers, pool, keys, values


@pytest.mark.usefixtures("no_leaks")
async def test_one_of_three_redis_nodes_killed_and_started_again() -> None:
    async with cluster() as (servers, pool, keys, values):
        servers[0].kill()  # the one by which the pool was opened
        found = await within(2, lambda end: pool.get_many(keys, [20_000] * 30, deadline=end))
        lost = [i for i, value in enumerate(found) if value is GetStatus.MISS]
        give_back(found)
        assert 0 < len(lost) < 30
        assert await fetch(pool, keys, [20_000] * 30) == [
            GetStatus.MISS if i in lost else value for i, value in enumerate(values)
        ]
        assert await pool.exists_many(keys, deadline=soon()) == [i not in lost for i in range(30)]
        with pytest.raises(PoolUnreachable, match=f"{len(lost)} of {len(lost)} keys were not removed: redis at"):
            await pool.remove_many([keys[i] for i in lost], deadline=soon())
        assert await store(pool, keys, values) == [
            PutStatus.FAILED if i in lost else PutStatus.PRESENT for i in range(30)
        ]
        assert sorted(node.is_alive for node in await pool.nodes(deadline=soon())) == [False, True, True]
        assert await pool.healthy(deadline=soon())
        await anyio.to_thread.run_sync(servers[0].start)

        async def stores() -> bool:
            return PutStatus.FAILED not in await store(pool, keys, values)

        await until_true(stores)
        assert await fetch(pool, keys, [20_000] * 30) == values


@pytest.mark.usefixtures("no_leaks")
async def test_one_of_three_redis_nodes_stopped() -> None:
    async with cluster() as (servers, pool, keys, values):
        servers[1].stop()
        with pytest.raises(PoolTimeout):
            await within(0.3, lambda end: pool.get_many(keys, [20_000] * 30, deadline=end))

        async def answers() -> bool:
            try:
                give_back(found := await within(0.3, lambda end: pool.get_many(keys, [20_000] * 30, deadline=end)))
            except PoolTimeout:
                return False
            return GetStatus.MISS in found

        await until_true(answers)  # as soon as the others have given it up
        servers[1].go_on()

        async def is_whole() -> bool:
            return await fetch(pool, keys, [20_000] * 30) == values

        await until_true(is_whole)


@pytest.mark.usefixtures("no_leaks")
async def test_all_redis_nodes_killed_and_started_again() -> None:
    async with cluster() as (servers, pool, keys, values):
        for server in servers:
            server.kill()
        for _ in range(2):
            with pytest.raises(PoolUnreachable):
                await within(2, lambda end: pool.get_many(keys, [20_000] * 30, deadline=end))
        for server in servers:
            await anyio.to_thread.run_sync(server.start)

        async def stores() -> bool:
            try:
                return await store(pool, keys, values) == [PutStatus.STORED] * 30
            except PoolUnreachable:
                return False

        async def has_all() -> bool:
            return await stores() or await fetch(pool, keys, [20_000] * 30) == values

        await until_true(has_all)


@pytest.mark.usefixtures("no_leaks")
async def test_a_redis_cluster_without_slots_is_not_healthy_until_it_has_them() -> None:
    need_redis()
    with running(server := RedisServer(is_in_cluster=True)):
        async with redis_pool(server.url) as pool:
            assert not await pool.healthy(deadline=soon())
            with pytest.raises(PoolUnreachable, match="no server of the cluster has a slot"):
                await pool.nodes(deadline=soon())
            await anyio.to_thread.run_sync(make_cluster, [server])
            assert await pool.healthy(deadline=soon())  # nothing else was asked for
            assert await store(pool, [new_key()], [b"value"]) == [PutStatus.STORED]


@pytest.mark.usefixtures("no_leaks")
async def test_redis_with_fewer_connections_than_the_pool_would_have() -> None:
    need_redis()
    keys, values = [new_key() for _ in range(8)], [content(i, MIB) for i in range(8)]
    with running(server := RedisServer(options=["--maxclients", "4"])):
        async with redis_pool(server.url) as pool:
            assert await store(pool, keys, values) == [PutStatus.STORED] * 8
            assert await fetch(pool, keys, [MIB] * 8) == values


# ---- Mooncake ----


class Mooncake:
    """A master, two lenders, and a pool."""

    def __init__(self) -> None:
        self.master = MooncakeMaster(client_ttl=10)  # the dead are listed for longer than a read takes to find out
        self.lenders = [MooncakeLender(self.master), MooncakeLender(self.master)]

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[MooncakePool]:
        async with aclosing(await MooncakePool.open(f"{self.master.url}&memory={MEMORY}")) as pool:
            yield pool


@pytest.fixture
def mooncake() -> Iterator[Mooncake]:
    need_mooncake()
    mooncake = Mooncake()
    with running(mooncake.master, *mooncake.lenders):
        yield mooncake


async def whose(pool: KVPool, mooncake: Mooncake, keys: list[PoolKey], values: list[bytes]) -> list[int]:
    """Store values one by one; which lender has each."""
    owners = []
    used = {node.name: node.used for node in await pool.nodes(deadline=soon())}
    for key, value in zip(keys, values, strict=True):
        assert await store(pool, [key], [value]) == [PutStatus.STORED]
        now = {node.name: node.used for node in await pool.nodes(deadline=soon())}
        (grown,) = [name for name in now if now[name] != used[name]]
        owners.append([lender.segment for lender in mooncake.lenders].index(grown))
        used = now
    return owners


async def test_mooncake_owner_killed_and_its_keys_put_anew(mooncake: Mooncake) -> None:
    keys, values = [new_key() for _ in range(12)], [content(i, 100_000) for i in range(12)]
    async with mooncake.pool() as pool:
        owners = await whose(pool, mooncake, keys, values)
        assert set(owners) == {0, 1}
        mooncake.lenders[0].kill()
        found = await within(15, lambda end: pool.get_many(keys, [100_000] * 12, deadline=end))
        give_back(found)
        assert [value is GetStatus.MISS for value in found] == [owner == 0 for owner in owners]
        assert [segment for segment in mooncake.master.segments() if segment == mooncake.lenders[0].segment]
        statuses = await within(15, lambda end: store(pool, keys, values, end))  # while the master still lists the dead
        assert statuses == [PutStatus.PRESENT if owner else PutStatus.STORED for owner in owners]
        assert await fetch(pool, keys, [100_000] * 12) == values


async def test_what_a_cache_could_not_load_from_a_killed_owner_it_saves_again(mooncake: Mooncake) -> None:
    kv, hashes = Kv(), list(range(BLOCKS))
    async with mooncake.pool() as pool, opened(pool, kv) as cache:
        assert (await cache.save(hashes, **by_slots(hashes))).success == BLOCKS
        before = kv.image()
        mooncake.lenders[0].kill()
        kv.wipe()
        loaded = (await cache.load(hashes, **by_slots(hashes), timeout=15)).success
        lost = [i for i in hashes if not await cache.match_prefix([i])]
        assert 0 < len(lost) < BLOCKS
        assert lost[0] == loaded, "it ended there"
        assert mooncake.lenders[0].segment in mooncake.master.segments(), "the master knows nothing of it"
        for tensors, fresh in zip(kv.layers, Kv().layers, strict=True):
            for tensor, again in zip(tensors, fresh, strict=True):
                tensor[...] = again
        saved, present = cache.statistics.saved, cache.statistics.present
        assert (await cache.save(hashes, **by_slots(hashes), timeout=15)).success == BLOCKS
        assert cache.statistics.saved - saved == len(lost)
        assert cache.statistics.present - present == BLOCKS - len(lost)
        kv.wipe()
        assert (await cache.load(hashes, **by_slots(hashes))).success == BLOCKS
        assert kv.image() == before


async def test_mooncake_keys_that_were_not_read_in_time_are_absent_when_their_owner_has_not_given_them(
    mooncake: Mooncake,
) -> None:
    keys, values = [new_key() for _ in range(12)], [content(i, 1000) for i in range(12)]
    async with mooncake.pool() as pool:
        owners = await whose(pool, mooncake, keys, values)
        hung = [key for key, owner in zip(keys, owners, strict=True) if owner == 0][:1]
        mooncake.lenders[0].stop()
        with pytest.raises(PoolTimeout):
            await within(0.3, lambda end: pool.get_many(hung, [1000], deadline=end))
        assert await pool.exists_many(hung, deadline=soon()) == [True], "it cannot be known yet"

        async def is_absent() -> bool:
            return await pool.exists_many(hung, deadline=soon()) == [False]

        await until_true(is_absent)  # the call has come back without it
        mooncake.lenders[0].go_on()

        async def is_read() -> bool:
            return await fetch(pool, hung, [1000]) == [values[keys.index(hung[0])]]

        await until_true(is_read)
        assert await pool.exists_many(hung, deadline=soon()) == [True]


async def test_mooncake_owner_stopped_and_continued_after_the_deadline(mooncake: Mooncake) -> None:
    keys, values = [new_key() for _ in range(12)], [content(i, MIB) for i in range(12)]
    async with mooncake.pool() as pool:
        owners = await whose(pool, mooncake, keys, values)
        hung = [key for key, owner in zip(keys, owners, strict=True) if owner == 0]
        fine = [(key, value) for key, value, owner in zip(keys, values, owners, strict=True) if owner == 1]
        mooncake.lenders[0].stop()
        with pytest.raises(PoolTimeout):
            await within(0.3, lambda end: pool.get_many(hung, [MIB] * len(hung), deadline=end))
        lent = await Untouched.lend(pool, MEMORY // MIB - 1 - len(hung) - len(fine))
        found = await within(1, lambda end: pool.get_many([fine[0][0]], [MIB], deadline=end))
        assert not isinstance(found[0], GetStatus)
        assert bytes(found[0].view()) == fine[0][1]
        give_back(found)
        with pytest.raises(PoolTimeout):  # what the engine may still write to is not lent
            await within(0.1, lambda end: pool.stage([MIB] * (len(hung) + len(fine)), deadline=end))
        mooncake.lenders[0].go_on()
        stages = await pool.stage([MIB] * (len(hung) + len(fine)), deadline=soon())
        for stage in stages:
            assert stage is not None
            stage.release()
        lent.check()

        async def is_whole() -> bool:
            return await fetch(pool, keys, [MIB] * 12) == values

        await until_true(is_whole)


async def test_mooncake_master_killed_and_started_again(mooncake: Mooncake) -> None:
    keys, values = [new_key() for _ in range(4)], [content(i, MIB) for i in range(4)]
    async with mooncake.pool() as pool:
        await store(pool, keys, values)
        mooncake.master.kill()
        for _ in range(2):
            with pytest.raises(PoolUnreachable):
                await within(3, lambda end: pool.get_many(keys, [MIB] * 4, deadline=end))
            with pytest.raises(PoolUnreachable):
                await within(3, lambda end: store(pool, [new_key()], [b"value"], end))
        assert not await within(1, lambda end: pool.healthy(deadline=end))
        await anyio.to_thread.run_sync(mooncake.master.start)

        async def stores() -> bool:
            try:
                return (
                    min(await store(pool, keys, values)) >= PutStatus.STORED
                )  # rejected as long as no process lends memory
            except PoolUnreachable:
                return False

        await until_true(stores)
        assert await fetch(pool, keys, [MIB] * 4) == values


async def test_mooncake_master_stopped_in_mid_save(mooncake: Mooncake) -> None:
    async with mooncake.pool() as pool:
        key = new_key()
        (stage,) = await staged(pool, [content(1, MIB)])
        await pool.exists_many([key], deadline=soon())
        mooncake.master.stop()
        with pytest.raises(PoolTimeout):
            await within(0.3, lambda end: pool.put_many([key], [stage], deadline=end))
        assert not await within(0.3, lambda end: pool.healthy(deadline=end))
        mooncake.master.go_on()

        async def stores() -> bool:
            return (await store(pool, [key], [content(1, MIB)]))[0] >= PutStatus.STORED

        await until_true(stores)
        assert await fetch(pool, [key], [MIB]) == [content(1, MIB)]


def threads_and_files() -> tuple[int, int]:
    gc.collect()
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


async def test_mooncake_leaves_nothing_behind(mooncake: Mooncake) -> None:
    """The engine keeps what its first pool started, and ends a connection whenever it likes, with its thread."""
    counts = []
    for _ in range(6):
        async with mooncake.pool() as pool:
            assert await store(pool, [key := new_key()], [b"value"]) == [PutStatus.STORED]
            assert await fetch(pool, [key], [5]) == [b"value"]
        counts.append(threads_and_files())
    more = [last - first for first, last in zip(counts[0], counts[-1], strict=True)]
    assert max(more) < 5, f"five more pools leave that many threads and open files: {more}"
