"""A pool that others can write: what no member of the group sealed, under this name and as it is now, is absent."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aiodatadist import ParamInvalid
from aiodatadist._config.trust import Key, TrustFolder
from aiodatadist._context_caching.pools.contract import GetStatus, KVPool, PoolKey, PutStatus
from aiodatadist._context_caching.pools.sealed import SealedPool
from aiodatadist._context_caching.pools.seals import HEADER, SealKey, Seals, writable
from aiodatadist._testing.views import entries_of, pipeline_of
from aiodatadist.context_caching import CcStatus, ContextCache, EmsInvalidArgument, MemoryPool, open_pool
from aiodatadist.testing.pools import MIB, PoolContract, content, fetch, soon, store
from tests.context_caching.engine_fixtures import redis_server
from tests.context_caching.fakes import Foreign
from tests.context_caching.kit import ROOM, Kv, block_slots, by_slots, opened
from tests.context_caching.servers import RedisServer
from tests.keys import HEX, folder_of

__all__ = ["redis_server"]

OLD, NEW = f"old {HEX}", f"new {'cd' * 32}"
NAME, OTHER = PoolKey("ns", "hash", "p0t0"), PoolKey("ns", "hash", "p0t1")
SIZE = 5000
DAY = 86_400.0


def key_file(folder: Path, *lines: str, name: str = "seal") -> Path:
    """Write a file of keys, in place of another one if there is one."""
    fresh = folder / f".{name}"
    fresh.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
    fresh.chmod(0o600)
    return fresh.rename(folder / name)


@asynccontextmanager
async def pools(file: Path, **options: Any) -> AsyncIterator[tuple[MemoryPool, SealedPool]]:
    """Open a pool in which others write too, and the same pool as a member of the group sees it."""
    async with await MemoryPool.open(16 * MIB) as inner:
        yield inner, await SealedPool.open(Foreign(inner), file, **options)


async def raw(pool: KVPool, key: PoolKey, nbytes: int) -> bytes:
    """Return what the pool has, as a reader without the key does."""
    (found,) = await fetch(pool, [key], [nbytes])
    assert isinstance(found, bytes)
    return found


async def overwrite(pool: KVPool, key: PoolKey, value: bytes) -> None:
    """Write as another writer of the pool does, without the key."""
    await pool.remove_many([key], deadline=soon())
    assert await store(pool, [key], [value]) == [PutStatus.STORED]


async def test_a_member_reads_what_a_member_wrote_and_the_pool_sees_none_of_it(tmp_path: Path) -> None:
    file = key_file(tmp_path, OLD)
    async with pools(file) as (inner, pool):
        sizes = [1, 4096, 70_001, MIB + 3]
        keys, values = [PoolKey("ns", str(size), "a") for size in sizes], [content(size, size) for size in sizes]
        assert await store(pool, keys, values) == [PutStatus.STORED] * 4
        assert await fetch(pool, keys, sizes) == values
        other = await SealedPool.open(Foreign(inner), file)
        assert await fetch(other, keys, sizes) == values
        for key, value in zip(keys[1:], values[1:], strict=True):
            assert value[:64] not in await raw(inner, key, len(value) + HEADER)


async def test_equal_values_look_different_each_time(tmp_path: Path) -> None:
    """A nonce that came again would show the difference of two values, and the key of their tags."""
    async with pools(key_file(tmp_path, OLD)) as (inner, pool):
        seen = set()
        for _ in range(20):
            await store(pool, [NAME], [bytes(SIZE)])
            seen.add(await raw(inner, NAME, SIZE + HEADER))
            await pool.remove_many([NAME], deadline=soon())
        assert len({value[24:36] for value in seen}) == len({value[HEADER:] for value in seen}) == 20


async def forge(inner: KVPool, _: SealedPool) -> None:
    await overwrite(inner, NAME, content(3, SIZE + HEADER))


async def forge_with_a_header(inner: KVPool, _: SealedPool) -> None:
    value = await raw(inner, NAME, SIZE + HEADER)
    await overwrite(inner, NAME, value[:HEADER] + content(3, SIZE))


async def seal_with_another_key(inner: KVPool, _: SealedPool) -> None:
    key, value = SealKey.of(Key("old", b"x" * 32)), bytearray(HEADER) + content(3, SIZE)
    Seals().seal(key, NAME, memoryview(value))
    await overwrite(inner, NAME, bytes(value))


async def seal_with_another_key_under_its_id(inner: KVPool, _: SealedPool) -> None:
    true, value = SealKey.of(Key("old", bytes.fromhex(HEX))), bytearray(HEADER) + content(3, SIZE)
    Seals().seal(SealKey(true.id, b"x" * 32), NAME, memoryview(value))
    await overwrite(inner, NAME, bytes(value))


async def swap(inner: KVPool, pool: SealedPool) -> None:
    await store(pool, [OTHER], [content(2, SIZE)])
    mine, its = await raw(inner, NAME, SIZE + HEADER), await raw(inner, OTHER, SIZE + HEADER)
    await overwrite(inner, NAME, its)
    await overwrite(inner, OTHER, mine)


async def replay_from(name: PoolKey, inner: KVPool, pool: SealedPool) -> None:
    await store(pool, [name], [content(2, SIZE)])
    await overwrite(inner, NAME, await raw(inner, name, SIZE + HEADER))


async def write_without_a_seal(inner: KVPool, _: SealedPool) -> None:
    await overwrite(inner, NAME, b"addvalue" + content(3, SIZE + HEADER - 8))


ATTACKS: dict[str, Callable[[KVPool, SealedPool], Any]] = {
    "forge": forge,
    "forge with a true header": forge_with_a_header,
    "seal with another key": seal_with_another_key,
    "seal with another key under the true id": seal_with_another_key_under_its_id,
    "swap": swap,
    "replay under another name": partial(replay_from, PoolKey("ns", "hash", "p0t1")),
    "replay under another hash": partial(replay_from, PoolKey("ns", "hasi", "p0t0")),
    "replay in another namespace": partial(replay_from, PoolKey("nt", "hash", "p0t0")),
    "replay under a name with the same letters": partial(replay_from, PoolKey("nsh", "ash", "p0t0")),
    "write without a seal": write_without_a_seal,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_what_no_member_sealed_under_this_name_is_forged(attack: Any, tmp_path: Path) -> None:
    async with pools(key_file(tmp_path, OLD)) as (inner, pool):
        await store(pool, [NAME], [content(1, SIZE)])
        await attack(inner, pool)
        assert await fetch(pool, [NAME], [SIZE]) == [GetStatus.FORGED]
        await pool.remove_many([NAME], deadline=soon())
        assert await store(pool, [NAME], [content(1, SIZE)]) == [PutStatus.STORED]
        assert await fetch(pool, [NAME], [SIZE]) == [content(1, SIZE)]


async def test_a_change_of_any_bit_of_the_header_is_found(tmp_path: Path) -> None:
    async with pools(key_file(tmp_path, OLD)) as (inner, pool):
        await store(pool, [NAME], [content(1, 16)])
        true = await raw(inner, NAME, 16 + HEADER)
        for place in range(len(true)):
            await overwrite(inner, NAME, true[:place] + bytes([true[place] ^ 1 << place % 8]) + true[place + 1 :])
            assert await fetch(pool, [NAME], [16]) == [GetStatus.FORGED], place
        await overwrite(inner, NAME, true)
        assert await fetch(pool, [NAME], [16]) == [content(1, 16)]


async def test_what_is_forged_keeps_no_memory(tmp_path: Path) -> None:
    async with pools(key_file(tmp_path, OLD)) as (inner, pool):
        for _ in range(5):
            await overwrite(inner, NAME, content(3, 5 * MIB + HEADER))
            assert await fetch(pool, [NAME], [5 * MIB]) == [GetStatus.FORGED]
        await pool.remove_many([NAME], deadline=soon())
        assert await store(pool, [NAME, OTHER], [content(1, 7 * MIB)] * 2) == [PutStatus.STORED] * 2


async def test_a_cut_or_longer_value_is_not_there(tmp_path: Path) -> None:
    async with pools(key_file(tmp_path, OLD)) as (inner, pool):
        await store(pool, [NAME], [content(1, SIZE)])
        true = await raw(inner, NAME, SIZE + HEADER)
        for wrong in (true[:-1], true + b"\0", true[:HEADER], true[:1]):
            await overwrite(inner, NAME, wrong)
            assert await fetch(pool, [NAME], [SIZE]) == [GetStatus.WRONG_LENGTH]
        await overwrite(inner, NAME, true[:-1])
        assert await fetch(pool, [NAME], [SIZE - 1]) == [GetStatus.FORGED], "asked for as long as it is now"


async def test_an_old_value_that_is_played_again_counts_as_absent_if_an_age_is_set(tmp_path: Path) -> None:
    now = 1000 * DAY
    async with pools(key_file(tmp_path, OLD), seal_seconds=DAY, clock=lambda: now) as (inner, pool):
        await store(pool, [NAME], [content(1, SIZE)])
        old = await raw(inner, NAME, SIZE + HEADER)
        now += DAY
        assert await fetch(pool, [NAME], [SIZE]) == [content(1, SIZE)]
        now += 1
        assert await fetch(pool, [NAME], [SIZE]) == [GetStatus.EXPIRED]
        await overwrite(inner, NAME, old[:16] + int(now).to_bytes(8, "little") + old[24:])
        assert await fetch(pool, [NAME], [SIZE]) == [GetStatus.FORGED]
        now -= 3 * DAY
        await overwrite(inner, NAME, old)
        assert await fetch(pool, [NAME], [SIZE]) == [GetStatus.EXPIRED], "of a member whose clock is days ahead"


class Restless(str):
    """A part of a name. While a value is proved to have it, another writer of the pool's memory changes the value."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def encode(self, *options: str) -> bytes:
        self.then()
        return super().encode(*options)


class Shared(Foreign):
    """A pool whose memory others write while values are read. ``lent`` are the values of the last call."""

    lent: list[Any]

    async def get_many(self, keys: Sequence[PoolKey], sizes: Sequence[int], *, deadline: float) -> Any:
        self.lent = await super().get_many(keys, sizes, deadline=deadline)
        return self.lent


async def test_a_header_that_changes_while_it_is_read_makes_no_value_young(tmp_path: Path) -> None:
    """The time that is compared is the time that the tag proves."""
    now = 1000 * DAY
    async with await MemoryPool.open(16 * MIB) as inner:
        shared = Shared(inner)
        pool = await SealedPool.open(shared, key_file(tmp_path, OLD), seal_seconds=DAY, clock=lambda: now)
        await store(pool, [NAME], [content(1, SIZE)])
        true = await raw(inner, NAME, SIZE + HEADER)
        now += 2 * DAY
        await overwrite(inner, NAME, true[:16] + int(now).to_bytes(8, "little") + true[24:])
        restless = Restless(NAME[1])
        restless.then = lambda: writable(shared.lent[0].address, HEADER).__setitem__(slice(HEADER), true[:HEADER])
        assert await fetch(pool, [NAME._replace(**{NAME._fields[1]: restless})], [SIZE]) == [GetStatus.FORGED]


# ---- the context cache over it ----


@asynccontextmanager
async def cache_over(file: Path) -> AsyncIterator[tuple[Kv, ContextCache, MemoryPool]]:
    kv = Kv()
    async with await MemoryPool.open(ROOM) as inner, opened(await SealedPool.open(Foreign(inner), file), kv) as cache:
        yield kv, cache, inner


@pytest.mark.parametrize("kind", ["changed", "cut"])
async def test_a_cache_counts_a_forged_value_as_absent_says_so_and_replaces_it(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cache_over(key_file(tmp_path, OLD)) as (kv, cache, inner):
        await cache.save([1, 2], **by_slots([0, 1]), write_rcache=False)
        key, entry = list(entries_of(inner).items())[1]
        true = await raw(inner, key, entry.nbytes)
        await overwrite(inner, key, true[:-1] if kind == "cut" else true[:-1] + bytes([true[-1] ^ 1]))
        before = kv.rows(block_slots([9]))
        result = await cache.load([1, 2], **by_slots([8, 9]))
        assert result.details == (CcStatus.OK, CcStatus.MISS)
        assert kv.rows(block_slots([9])) == before, "nothing of it is used"
        assert (cache.statistics.forged, cache.statistics.damaged, cache.statistics.missed) == (1, 0, 1)
        assert cache.figures().incidents["value_forged"] == 1
        await cache.load([2], **by_slots([9]))
        assert cache.statistics.forged == 2
        assert caplog.text.count("is not as a member of the group sealed it: it counts as absent") == 1
        assert (await cache.save([1, 2], **by_slots([0, 1]), write_rcache=False)).success == 2
        assert (await cache.load([1, 2], **by_slots([8, 9]))).success == 2
        assert kv.rows(block_slots([8, 9])) == kv.rows(block_slots([0, 1]))


async def test_a_member_that_does_not_seal_reads_nothing_and_is_believed_in_nothing(tmp_path: Path) -> None:
    kv = Kv()
    async with (
        cache_over(key_file(tmp_path, OLD)) as (_, sealed, inner),
        opened(Foreign(inner), kv) as plain,
    ):
        await sealed.save([1], **by_slots([0]), write_rcache=False)
        assert (await plain.load([1], **by_slots([8]))).success == 0
        assert plain.statistics.damaged == 1
        await plain.save([2], **by_slots([0]), write_rcache=False)
        assert (await sealed.load([2], **by_slots([8]))).success == 0
        assert sealed.statistics.forged == 1
        assert pipeline_of(sealed).wrapping.nbytes == 0


# ---- keys ----


async def test_two_rotations_lose_no_value_that_has_a_key_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aiodatadist._context_caching.pools.sealed.LOOK_SECONDS", 0.0)  # each call looks
    caplog.set_level(logging.INFO)
    file = key_file(tmp_path, OLD)
    async with pools(file) as (inner, pool):
        await store(pool, [NAME], [content(1, SIZE)])
        key_file(tmp_path, NEW, OLD)
        await store(pool, [OTHER], [content(2, SIZE)])
        assert await fetch(pool, [NAME, OTHER], [SIZE] * 2) == [content(1, SIZE), content(2, SIZE)]
        assert "values are sealed with key new of new, old" in caplog.text
        ids = [(await raw(inner, key, SIZE + HEADER))[8:16] for key in (NAME, OTHER)]
        assert ids[0] != ids[1]
        key_file(tmp_path, NEW)
        assert await fetch(pool, [NAME, OTHER], [SIZE] * 2) == [GetStatus.FORGED, content(2, SIZE)]
        assert HEX not in caplog.text


async def test_keys_come_from_the_url_of_any_pool(redis_server: RedisServer, tmp_path: Path) -> None:
    file = key_file(tmp_path, OLD)
    for url in (
        "memory:?bytes=1MiB&seal_key_file={}",
        f"{redis_server.url}?seal_key_file={{}}&memory=8MiB&seal_seconds=60",
    ):
        async with aclosing(await open_pool(url.format(file))) as pool:
            assert pool.capabilities.sealed
            assert await store(pool, [NAME], [content(1, SIZE)]) == [PutStatus.STORED]
            assert await fetch(pool, [NAME], [SIZE]) == [content(1, SIZE)]
    async with aclosing(await open_pool(redis_server.url)) as plain:
        assert not plain.capabilities.sealed
        assert content(1, SIZE)[:64] not in await raw(plain, NAME, SIZE + HEADER)
        await plain.remove_many([NAME], deadline=soon())


async def test_keys_come_from_the_folder_of_trust_for_pools_outside_this_process(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "trust", OLD)
    monkeypatch.setenv("AIODATADIST_TRUST", str(folder))
    async with aclosing(await open_pool(redis_server.url)) as pool:
        assert not pool.capabilities.sealed
    folder_of(folder, OLD, f"seal-2 {'cd' * 32}", f"seal {'ef' * 32}")
    async with aclosing(await open_pool(redis_server.url)) as pool:
        assert isinstance(pool, SealedPool)
        assert pool.key_name == "seal-2"
    async with aclosing(await open_pool("memory:")) as pool:
        assert not pool.capabilities.sealed
    (folder / "keys").chmod(0o604)
    with pytest.raises(EmsInvalidArgument, match="mode 0604: users outside its group must not be able to read it"):
        await open_pool(redis_server.url)


def test_a_key_for_values_proves_no_link(tmp_path: Path) -> None:
    """Processes that only use the pool can have it, and are no members of the links' group."""
    folder = folder_of(tmp_path / "trust", f"seal {'cd' * 32}", f"seal-2 {'ef' * 32}", f"sealed {HEX}")
    assert [key.name for key in TrustFolder(str(folder)).current()] == ["sealed"]
    folder_of(folder, f"seal {'cd' * 32}")
    with pytest.raises(ParamInvalid, match="has no key for links: all of its keys are for values"):
        TrustFolder(str(folder)).current()


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("seal_key_file={}/nowhere", "the file of keys for values '.*/nowhere' cannot be read: No such file"),
        ("seal_key_file=", "seal_key_file is empty: must be a path"),
        ("seal_key_file={}/seal&seal_key_file={}/seal", "option seal_key_file is in the URL twice"),
        ("seal_key_file={}/short", "the secret has 3 bytes: must have at least 32"),
        ("seal_key_file={}/open", "mode 0604: users outside its group must not be able to read it"),
        ("seal_seconds=60", "seal_seconds is set, but nothing is sealed"),
        ("seal_key_file={}/seal&seal_seconds=0", "seal_seconds is 0: must be 1.0 to"),
        ("seal_key_file={}/seal&seal_seconds=nan", "seal_seconds is nan: must be 1.0 to"),
    ],
)
async def test_a_wrong_option_is_refused_before_anything_is_opened(query: str, why: str, tmp_path: Path) -> None:
    key_file(tmp_path, OLD)
    key_file(tmp_path, "a abcdef", name="short")
    key_file(tmp_path, OLD, name="open").chmod(0o604)
    for engine in ("memory:", "redis://127.0.0.1:1"):
        with pytest.raises(EmsInvalidArgument, match=why):
            await open_pool(f"{engine}?{query.format(tmp_path, tmp_path)}")


async def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.partition(".")[0] == "cryptography":
                raise ModuleNotFoundError(f"No module named {name!r}", name="cryptography")

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(EmsInvalidArgument, match=r"needs the package cryptography.*'\.\[sealed\]'"):
        await open_pool(f"memory:?seal_key_file={key_file(tmp_path, OLD)}")


# ---- the contract of pools ----


class TestSealedMemory(PoolContract):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.file = key_file(tmp_path, OLD)

    @asynccontextmanager
    async def open_pool(self) -> AsyncIterator[KVPool]:
        async with await MemoryPool.open(self.lendable + MIB) as inner:
            yield await SealedPool.open(inner, self.file)

    async def all_is_back(self, pool: KVPool) -> None:
        """Check it with smaller stages: with its header, one of 1 MiB leaves gaps in which no other one fits."""
        stages = await pool.stage([60_000] * (self.lendable // 65_536), deadline=soon())
        assert None not in stages
        for stage in stages:
            if stage is not None:
                stage.release()


class TestSealedRedis(PoolContract):
    @pytest.fixture(autouse=True)
    def _server(self, redis_server: RedisServer, tmp_path: Path) -> None:
        self.url = f"{redis_server.url}?memory={self.lendable + MIB}&seal_key_file={key_file(tmp_path, OLD)}"

    def open_pool(self) -> AbstractAsyncContextManager[KVPool]:
        return _opened(self.url)


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[KVPool]:
    async with aclosing(await open_pool(url)) as pool:
        yield pool
