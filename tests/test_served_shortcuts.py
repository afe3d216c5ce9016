"""Requests for small transfers between the same two caches take a shortcut at their owner: the peer sees no difference."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from aiodatadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMException, LLMStatusCode, TransferPriority
from aiodatadist._cache.catalogue import RemoteCache
from aiodatadist._link.transfers import shortcuts
from aiodatadist._link.transfers.running import RunningTransfers
from aiodatadist._link.transfers.shortcuts import Shortcut, Shortcuts
from aiodatadist._wire.frames import encode
from aiodatadist._wire.messages import Grant, KeyName, Pull, Pulled, Revoke
from aiodatadist.testing import Cluster, inside, linked_pair, soft_fault, soft_faults_cleared, verify
from tests.held import PUSH, held_transfer, turns
from tests.strict.marks import STRICT

BLOCKS = 16
DESC = CacheDesc(4, [BLOCKS, 1024], DataType.DT_UINT8)
KEY = BlocksCacheKey(1)
NAME = KeyName(kind="blocks", id=0, model_id=0)
pytestmark = pytest.mark.skipif(STRICT == "roce", reason="RoCE: every transfer takes its turn in one stream")


@dataclass
class Served:
    """Two clusters: the first serves requests of the second. ``long``: requests that took the long way."""

    prompt: Cluster
    decoder: Cluster
    source: Cache
    target: Cache
    long: int = 0

    async def pull(self, theirs: list[int], mine: list[int], **options: Any) -> None:
        await self.decoder.datadist.cache_manager.pull_blocks(KEY, self.target, theirs, mine, **options)

    def check(self, moved: dict[int, int]) -> None:
        """Block ``moved[i]`` of the peer is in block ``i``; all others are as they were."""
        at = [(t, p, 1, moved[p]) if p in moved else (t, p, 2, p) for t in range(4) for p in range(BLOCKS)]
        verify(self.decoder.memory(self.target), self.target, at)


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    pool = '{"memory_size": 1048576}'
    async with linked_pair(DESC, enable_remote_cache_accessible=False, mem_pool_cfg=pool, trust="none") as made:
        both, submit = Served(*made), RunningTransfers.submit

        def counted(self: RunningTransfers, *args: Any) -> Any:
            both.long += 1
            return submit(self, *args)

        monkeypatch.setattr(RunningTransfers, "submit", counted)
        yield both


async def test_from_the_second_or_third_on_requests_are_short_and_move_what_they_should(served: Served) -> None:
    choose = random.Random(1)
    moved: dict[int, int] = {}
    for i in range(50):
        mine, theirs = (choose.sample(range(BLOCKS), 3) for _ in range(2))
        await served.pull(theirs, mine)
        moved.update(zip(mine, theirs, strict=True))
        if i == 1:
            before = served.long
    assert served.long == before, "one that opens a channel, and one that finds all at hand"
    served.check(moved)
    flow = served.prompt.datadist.figures().transfers["served"]
    assert (flow.succeeded, flow.running, flow.bytes) == (50, 0, 50 * 12288)
    link = served.prompt.datadist.statistics().links[0]
    assert (link.served_bytes, link.transfers, link.running) == (50 * 12288, 50, 0)


@pytest.mark.parametrize("priority", TransferPriority)
async def test_each_priority_has_a_way_of_its_own(served: Served, priority: TransferPriority) -> None:
    """Except background work, which runs in smaller windows on the long way."""
    for i in range(5):
        before = served.long
        await served.pull([i], [i + 1], priority=priority)
    served.check({i + 1: i for i in range(5)})
    assert served.long - before == (priority is TransferPriority.BACKGROUND)


async def test_some_layers_have_a_way_of_their_own(served: Served) -> None:
    for _ in range(3):
        await served.pull([1], [1])
    before = served.long
    for block in (2, 3, 4):
        await served.pull([block], [5], src_layer_range=range(1, 2), dst_layer_range=range(1))
    assert served.long == before + 1
    await served.pull([1], [1])
    assert served.long == before + 1
    view = served.decoder.memory(served.target).view()
    source = served.prompt.memory(served.source).view()
    size = BLOCKS * 1024
    for tensor in range(2):
        here, there = tensor * size + 5 * 1024, (tensor + 2) * size + 4 * 1024
        assert view[here : here + 1024] == source[there : there + 1024]
    assert view[2 * size + 5 * 1024 : 2 * size + 6 * 1024] != source[4 * 1024 : 5 * 1024]


def request(into: Cache, **changes: Any) -> Any:
    words: dict[str, Any] = {
        "name": NAME, "slot": 0, "target": into.cache_id, "src_layers": None, "dst_layers": None, "tensors_per_layer": 2,
        "src_blocks": [4], "dst_blocks": [5], "dst_slot": 0, "nbytes": 0, "seconds": 1.0,
    }  # fmt: skip
    return lambda call: Pull(call=call, **(words | changes))


@pytest.mark.parametrize(
    "wrong",
    [
        {"src_blocks": [BLOCKS]},
        {"dst_blocks": [BLOCKS]},
        {"dst_blocks": [2**64 - 1]},
        {"src_blocks": [1, 2], "dst_blocks": [3, 3]},
        {"src_blocks": [1, 2]},
        {"dst_blocks": [5, 6]},
        {"dst_slot": 1},
        {"src_layers": (0, 9), "dst_layers": (0, 9)},
        {"name": KeyName(kind="blocks", id=0, model_id=9)},
        {"target": 999},
    ],
    ids=str,
)
async def test_what_is_wrong_is_refused_as_it_is_on_the_long_way(served: Served, wrong: dict[str, Any]) -> None:
    """A caller of this version is told before it asks; whatever asks is refused by the owner, and nothing is written."""
    await served.pull([1], [1])
    questions = inside(served.decoder.datadist).links.find(1).session.questions
    first = await questions.ask(request(served.target, **wrong), Pulled)
    for _ in range(3):
        right = await questions.ask(request(served.target, src_blocks=[1], dst_blocks=[1]), Pulled)
        assert isinstance(right, Pulled)
        assert right.status == LLMStatusCode.LLM_SUCCESS
    again = await questions.ask(request(served.target, **wrong), Pulled)
    assert isinstance(first, Pulled)
    assert isinstance(again, Pulled)
    assert again.status != LLMStatusCode.LLM_SUCCESS
    assert (again.status, again.reason, again.is_unknown) == (first.status, first.reason, first.is_unknown)
    served.check({1: 1})


async def test_a_cache_that_is_given_up_is_not_reached_by_its_old_way(served: Served) -> None:
    """Neither the source, of which another one has the name, nor the destination, of which another one has the place."""
    owner, manager = served.prompt.datadist.cache_manager, served.decoder.datadist.cache_manager
    for value in (11, 22, 33):
        lent = await owner.allocate_blocks_cache(DESC, BlocksCacheKey(1, 7))
        into = await manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, 7))
        for array in (arrays := owner.arrays(lent)):
            array[:] = value
        del array, arrays
        for _ in range(4):
            await manager.pull_blocks(BlocksCacheKey(1, 7), into, [2], [3])
        arrived = manager.arrays(into)
        assert {int(number) for array in arrived for number in array[3]} == {value}
        del arrived
        await owner.deallocate_blocks_cache(lent)
        with pytest.raises(LLMException):
            await manager.pull_blocks(BlocksCacheKey(1, 7), into, [2], [3])
        await manager.deallocate_blocks_cache(into)


@pytest.mark.parametrize("is_forgotten", [True, False], ids=["forgotten", "left over"])
async def test_a_destination_whose_number_another_one_takes_over_is_not_written_by_its_old_way(
    served: Served, is_forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are the peer's, which may use one again. A shortcut that is left over is not taken."""
    if not is_forgotten:
        monkeypatch.setattr(Shortcuts, "forget", lambda *_: None)
    other = await served.decoder.blocks(DESC, model_id=7)
    await served.decoder.datadist.cache_manager.pull_blocks(KEY, other, [1], [1])  # over a channel that reaches both
    for _ in range(3):
        await served.pull([1], [1])
    link, number = inside(served.decoder.datadist).links.find(1), served.target.cache_id
    place = inside(served.decoder.datadist).registry.local(other, "other").message()
    link.session.post(Revoke(cache_id=number, seconds=1.0))
    link.session.post(Grant(cache=place.model_copy(update={"cache_id": number})))
    answer = await link.session.questions.ask(request(served.target), Pulled)
    assert isinstance(answer, Pulled)
    assert answer.status == LLMStatusCode.LLM_SUCCESS
    served.check({1: 1})
    verify(served.decoder.memory(other), other, [(t, i, 1, source) for t in range(4) for i, source in ((1, 1), (5, 4))])


async def test_one_that_takes_longer_is_under_way_and_can_be_cancelled(served: Served) -> None:
    for _ in range(3):
        await served.pull([1], [1])
    entry = inside(served.prompt.datadist).registry.table.find(served.source.cache_id)
    assert entry is not None
    before = served.long
    pull = served.decoder.datadist.cache_manager.pull_blocks
    with held_transfer(PUSH) as held:
        task = pull(KEY, served.target, [4], [5])
        await held.arrived()
        assert (task.done(), entry.leases) == (False, 1)
        held.release()
        await task
    assert (entry.leases, served.long) == (0, before)
    for _ in range(3):
        await served.pull([1], [1])
    with held_transfer(PUSH) as held:
        task = pull(KEY, served.target, [6], [7])
        await held.arrived()
        await held.stopped(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert entry.leases == 0
    await served.pull([6], [7])
    await served.pull([8], [9])
    served.check({1: 1, 5: 4, 7: 6, 9: 8})


async def test_one_that_fails_says_so_and_the_next_works(served: Served) -> None:
    for _ in range(3):
        await served.pull([1], [1])
    with soft_faults_cleared():
        soft_fault("HcclBatchPut:exec=507000@1")
        with pytest.raises(LLMException) as caught:
            await served.pull([4], [5])
        assert caught.value.peer == 1
    assert served.prompt.datadist.figures().transfers["served"].running == 0
    await served.pull([8], [9])
    served.check({1: 1, 9: 8})


def living(kind: type) -> int:
    """Return how many objects of a type are kept in this process."""
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())


async def test_nothing_is_kept_of_a_cache_that_the_peer_took_back(served: Served) -> None:
    manager = served.decoder.datadist.cache_manager
    for number in range(5):
        lent = await manager.allocate_blocks_cache(DESC)
        for _ in range(4):
            await manager.pull_blocks(KEY, lent, [2], [3])
        if not number:
            before = living(RemoteCache)
        await manager.deallocate_blocks_cache(lent)
    assert living(RemoteCache) == before - 1


async def test_requests_with_other_time_limits_take_the_place_of_earlier_ones(served: Served) -> None:
    """A peer chooses the limit of each request, and each shortcut takes some kilobytes."""
    await served.pull([1], [1])
    link = inside(served.decoder.datadist).links.find(1)
    for seconds in range(1, 40):
        for _ in range(2):
            answer = await link.session.questions.ask(request(served.target, seconds=float(seconds)), Pulled)
            assert isinstance(answer, Pulled)
            assert answer.status == LLMStatusCode.LLM_SUCCESS
    assert living(Shortcut) == 1
    served.check({1: 1, 5: 4})


async def test_caches_of_many_tensors_have_few_shortcuts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcuts, "SHORTCUT_TENSORS", 8)
    for number in range(12):
        await served.pull([number], [number + 1], priority=list(TransferPriority)[number % 3])
    assert 1 <= living(Shortcut) <= 2, "each keeps four tensors"
    served.check({number + 1: number for number in range(12)})


async def test_a_request_is_served_in_the_call_that_brings_it(served: Served) -> None:
    """Otherwise it waits for another round of an event loop that a peer keeps busy."""
    for _ in range(3):
        await served.pull([1], [1])
    await turns()
    link = inside(served.prompt.datadist).links.find(2)
    assert link.session.wire.hear(encode(request(served.target)(2**40)))
    served.check({1: 1, 5: 4})
