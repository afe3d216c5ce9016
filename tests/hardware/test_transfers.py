"""Pull, push, notifications: every byte is where it belongs, and no other one was touched."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence

import pytest

from aiodatadist import BlocksCacheKey, CacheNotFound, ParamInvalid
from tests.hardware.conftest import Pair, linked
from tests.hardware.member import Mark
from tests.hardware.place import Place
from tests.hardware.remote import Remote

BLOCKS, TENSORS = 64, 4
SIZES = [64, 4096, 64 << 10, 512 << 10]
"""Bytes of a block; at most 128 MiB in all."""


@pytest.fixture
async def roomy(mine: Place, peer: Remote) -> AsyncIterator[Pair]:
    async with linked(mine, peer, pool=256 << 20) as found:
        yield found


def moved(own: int, other: int, source: Sequence[int], target: Sequence[int]) -> list[list[Mark]]:
    """Return the contents of cluster ``own`` after blocks of ``other`` came."""
    came = dict(zip(target, source, strict=True))
    return [
        [(other, t, came[block]) if block in came else (own, t, block) for block in range(BLOCKS)]
        for t in range(TENSORS)
    ]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("one_sided", [True, False], ids=["one_sided", "request"])
async def test_scattered_blocks_are_pulled(mine: Place, peer: Remote, one_sided: bool, nbytes: int) -> None:
    shuffled = random.Random(nbytes)
    source, target = (shuffled.sample(range(BLOCKS), 40) for _ in range(2))
    async with linked(mine, peer, 256 << 20, enable_remote_cache_accessible=one_sided) as pair:
        await pair.allocate(TENSORS, BLOCKS, nbytes)
        await pair.here.pull(1, source, target)
        assert await pair.here.whose() == moved(2, 1, source, target)
        assert await pair.there.whose() == moved(1, 2, [], [])


@pytest.mark.parametrize("nbytes", SIZES)
async def test_scattered_blocks_are_pushed(roomy: Pair, nbytes: int) -> None:
    shuffled = random.Random(nbytes)
    source, target = (shuffled.sample(range(BLOCKS), 40) for _ in range(2))
    await roomy.allocate(TENSORS, BLOCKS, nbytes)
    await roomy.here.push(1, source, target)
    assert await roomy.there.whose() == moved(1, 2, source, target)
    assert await roomy.here.whose() == moved(2, 1, [], [])


async def test_many_small_requests_in_one_transfer(roomy: Pair) -> None:
    """More than a queue pair takes: 510 over RoCE."""
    await roomy.here.allocate(1, 4096, 512)
    await roomy.there.ask("allocate", cluster_id=1, tensors=1, blocks=4096, nbytes=512)
    source, target = list(range(0, 4096, 2)), list(range(4095, 0, -2))
    await roomy.here.pull(1, source, target)
    (found,) = await roomy.here.whose()
    came = dict(zip(target, source, strict=True))
    assert found == [(1, 0, came[block]) if block in came else (2, 0, block) for block in range(4096)]


async def test_both_ends_move_blocks_at_the_same_time(pair: Pair) -> None:
    tasks = [pair.here.manager.pull_blocks(BlocksCacheKey(1), pair.here.cache, [n], [n]) for n in range(4)]
    await pair.there.ask("pull", cluster_id=1, of=2, source=[8, 9], target=[8, 9])
    await pair.there.ask("push", cluster_id=1, to=2, source=[12, 13], target=[12, 13], notify=None)
    for task in tasks:
        await task
    found, theirs = await pair.here.whose(), await pair.there.whose()
    for number in range(8):
        assert [mark[0] for mark in found[number] if mark] == [1] * 4 + [2] * 8 + [1] * 2 + [2] * 2
        assert [mark[0] for mark in theirs[number] if mark] == [1] * 8 + [2] * 2 + [1] * 6


async def test_what_is_notified_is_there(pair: Pair) -> None:
    for number in range(10):
        await pair.here.push(1, [number], [15], notify=b"block %d" % number)
        assert await pair.there.ask("notes", cluster_id=1, count=1) == [f"block {number}"]
        assert [tensor[15] for tensor in await pair.there.whose()] == [(2, t, number) for t in range(8)]


async def test_notifications_come_in_order(pair: Pair) -> None:
    sent = [f"{number}" for number in range(50)]
    for number in sent:
        await pair.here.datadist.notify(1, number.encode())
    await pair.here.pull(1, [0], [1], notify=b"pulled")
    assert await pair.there.ask("notes", cluster_id=1, count=51) == [*sent, "pulled"]
    await pair.there.ask("notify", cluster_id=1, to=2, payload="the other way")
    assert await pair.here.notes(1) == ["the other way"]


async def test_what_the_peer_has_not_fails_and_the_link_stays(pair: Pair) -> None:
    with pytest.raises(CacheNotFound):
        await pair.here.manager.pull_blocks(BlocksCacheKey(1, 77), pair.here.cache, [0], [1])
    with pytest.raises(ParamInvalid):
        await pair.here.pull(1, [16], [0])
    await pair.here.pull(1, [15], [0])
    assert [tensor[0] for tensor in await pair.here.whose()] == [(1, number, 15) for number in range(8)]
