"""Requests that a peer keeps waiting at their owner: few have a task, and the others stand in line."""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheTask,
    DataType,
    LinkError,
    LinkTimeout,
    LLMException,
    TransferPriority,
)
from aiodatadist._cache import digester as digesting
from aiodatadist._cache.catalogue import RemoteCache
from aiodatadist._link.transfers.requests_in_line import RequestInLine, RequestLines
from aiodatadist._testing.views import cut_link
from aiodatadist._values import peer_budget
from aiodatadist._values.selection import BlockParts, Layers, Selection
from aiodatadist._wire.messages import CacheEntry, KeyName, PartNumbers, Pull, Pulled
from aiodatadist.testing import Cluster, inside, linked_pair, verify
from tests.clock import took
from tests.held import there_and_back
from tests.unit.wire.examples import pull

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry
    from aiodatadist._link.link import Link
    from aiodatadist._values.grid import Side

DESC = CacheDesc(1, [16, 64], DataType.DT_UINT8)
TASKS = peer_budget.REQUEST_TASKS
MANY = TASKS + 100


class HeldSums:
    """The owner sums up for no request until it is told to: each request with checksums waits in its task."""

    def __init__(self, owner: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        digester = inside(owner.datadist).digester
        self._sums, self._go_on = digester.digests, asyncio.Event()
        self.begun = 0
        monkeypatch.setattr(digester, "digests", self._held)
        monkeypatch.setattr(digesting, "SMALL_BYTES", 0)  # what is small has no task

    async def _held(self, entry: Entry, side: Side, line: Hashable = None) -> array[int]:
        self.begun += 1
        await self._go_on.wait()
        return await self._sums(entry, side, line)

    async def have_begun(self, count: int) -> None:
        while self.begun < count:
            await anyio.lowlevel.checkpoint()

    def go_on(self) -> None:
        self._go_on.set()


class Pair:
    """An owner that writes for a peer. The peer says its requests itself, so it can say any number of them."""

    def __init__(self, owner: Cluster, peer: Cluster, source: Cache, cache: Cache) -> None:
        self.owner, self.peer, self.source, self.cache = owner, peer, source, cache
        self.answers = dict[int, Pulled]()
        self._answered = asyncio.Event()

    @property
    def link(self) -> Link:
        return inside(self.peer.datadist).links.find(1)

    def target(self) -> RemoteCache:
        found = inside(self.owner.datadist).links.find(2).session.catalogue.get(self.cache.cache_id)
        assert found is not None
        return found

    def request(self, call: int, **changes: Any) -> Pull:
        name = KeyName(kind="id", id=self.source.cache_id, model_id=0)
        plain = {"src_layers": None, "dst_layers": None, "seconds": 60.0, "checksum": True}
        blocks = {"src_blocks": [call % 16], "dst_blocks": [call % 16]}
        return pull(call=call, name=name, target=self.cache.cache_id, **(plain | blocks | changes))

    async def ask(self, calls: range, **changes: Any) -> None:
        """Say requests, and return when they have come. A few at a time, as the wire is read."""
        for call in calls:
            self.link.session.post(self.request(call, **changes))
        await there_and_back(self.peer, self.owner)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with linked_pair(DESC, enable_remote_cache_accessible=False, sync_kv_timeout=60_000) as made:
        await made[1].datadist.cache_manager.pull_blocks(BlocksCacheKey(1), made[3], [0], [0], checksum=True)
        yield Pair(*made)


def pulls(pair: Pair, count: int, **options: Any) -> list[CacheTask]:
    ask = pair.peer.datadist.cache_manager.pull_blocks
    return [ask(BlocksCacheKey(1), pair.cache, [i % 16], [i % 16], checksum=True, **options) for i in range(count)]


@contextmanager
def frozen() -> Iterator[None]:
    """Keep the garbage collector from looking at what exists now."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def objects() -> Counter[str]:
    for _ in range(3):  # a tuple of tuples is told from what has to be looked at in the third
        gc.collect()
    return Counter(type(each).__qualname__ for each in gc.get_objects())


async def test_a_request_that_waits_has_no_task_and_is_one_object_to_the_garbage_collector(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums, before = HeldSums(pair.owner, monkeypatch), len(asyncio.all_tasks())
    with frozen():
        await pair.ask(range(1000, 1000 + TASKS))
        await sums.have_begun(TASKS)
        with_tasks = objects()
        await pair.ask(range(2000, 2000 + MANY))
        more = objects() - with_tasks
    assert len(asyncio.all_tasks()) - before == TASKS == sums.begun
    assert more["RequestInLine"] == MANY
    assert more.total() < 2 * MANY, more
    await cut_link(pair.link)


async def test_requests_in_line_are_served_one_after_the_other(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = HeldSums(pair.owner, monkeypatch)
    tasks = pulls(pair, MANY)
    await sums.have_begun(TASKS)
    sums.go_on()
    for task in tasks:
        assert (await task).bytes == 64
    assert sums.begun == MANY
    verify(pair.peer.memory(pair.cache), pair.cache, [(0, i, 1, i) for i in range(16)])
    assert pair.target().uses == 0


async def test_a_stop_reaches_a_request_in_line(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the stopped request while those before it still wait, and never begin it."""
    sums = HeldSums(pair.owner, monkeypatch)
    tasks = pulls(pair, TASKS + 3)
    await sums.have_begun(TASKS)
    await there_and_back(pair.peer, pair.owner)
    stopped = tasks.pop(TASKS + 1)
    stopped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped
    assert pair.target().uses == TASKS + 2
    sums.go_on()
    for task in tasks:
        await task
    assert sums.begun == TASKS + 2
    assert pair.target().uses == 0


async def test_the_end_of_the_link_drops_the_line(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their destination is in use no longer."""
    sums, target, link = HeldSums(pair.owner, monkeypatch), pair.target(), inside(pair.owner.datadist).links.find(2)
    tasks = pulls(pair, TASKS + 20)
    await sums.have_begun(TASKS)
    await there_and_back(pair.peer, pair.owner)
    assert target.uses == TASKS + 20
    await cut_link(link)
    await link.wait_closed()
    assert target.uses == 0
    assert sums.begun == TASKS
    for task in tasks:
        with pytest.raises(LinkError):
            await task


async def test_an_owner_that_unlinks_serves_its_line_first(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """For their callers they were under way. Further ones are refused."""
    sums, target, link = HeldSums(pair.owner, monkeypatch), pair.target(), inside(pair.owner.datadist).links.find(2)
    tasks = pulls(pair, TASKS + 20)
    await sums.have_begun(TASKS)
    await there_and_back(pair.peer, pair.owner)
    ending = asyncio.ensure_future(link.disconnect("enough", 20))
    await anyio.lowlevel.checkpoint()
    late = pulls(pair, 1)[0]
    with pytest.raises(LLMException, match="unlinked"):
        await late
    assert target.uses == TASKS + 20
    sums.go_on()
    for task in tasks:
        assert (await task).bytes == 64
    await ending
    assert target.uses == 0
    assert sums.begun == TASKS + 20


@pytest.mark.autojump
async def test_a_line_that_is_not_served_in_time_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sums, target, link = HeldSums(pair.owner, monkeypatch), pair.target(), inside(pair.owner.datadist).links.find(2)
    tasks = pulls(pair, TASKS + 20)
    await sums.have_begun(TASKS)
    await there_and_back(pair.peer, pair.owner)
    with took(3):
        with pytest.raises(LinkTimeout):
            await link.disconnect("enough", 3)
        for task in tasks[TASKS:]:
            with pytest.raises(LLMException, match="unlinked"):
                await task
    assert target.uses == TASKS
    await link.wait_closed()
    assert target.uses == 0
    assert sums.begun == TASKS
    await asyncio.gather(*tasks[:TASKS], return_exceptions=True)


async def test_requests_of_another_priority_do_not_wait_behind_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = HeldSums(pair.owner, monkeypatch)
    tasks = pulls(pair, MANY, priority=TransferPriority.BACKGROUND)
    await sums.have_begun(TASKS)
    for number, priority in enumerate((TransferPriority.CRITICAL, TransferPriority.NORMAL), 1):
        tasks += pulls(pair, 1, priority=priority)
        await sums.have_begun(TASKS + number)
    sums.go_on()
    for task in tasks:
        await task


async def test_the_link_ends_at_more_requests_than_a_peer_may_have_in_line(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodatadist._link.transfers.responder.MAX_SERVED", MANY)
    HeldSums(pair.owner, monkeypatch)
    link = inside(pair.owner.datadist).links.find(2)
    await pair.ask(range(1000, 1000 + MANY))
    pair.link.session.post(pair.request(5000))
    assert f"{MANY} requests are under way" in str(await link.wait_closed())


# ---- a request in line ----


DESTINATION = RemoteCache(
    CacheEntry(cache_id=1, blocks=True, placement=0, data_type=0, pieces=8, stride=64, addresses=[2**40], epoch=0)
)


@pytest.mark.parametrize(
    ("message", "selection"),
    [
        (
            pull(src_blocks=[3, 2**63], dst_blocks=[1, 0]),
            Selection(Layers(range(1, 3), range(2), 2), array("Q", [3, 2**63]), array("Q", [1, 0])),
        ),
        (
            pull(src_blocks=[3], dst_blocks=[1], parts=PartNumbers(nbytes=8, src=[4, 5], dst=[7, 6])),
            Selection(
                Layers(range(1, 3), range(2), 2), array("Q", [3]), array("Q", [1]), parts=BlockParts(8, [4, 5], [7, 6])
            ),
        ),
        (
            pull(src_blocks=[], dst_blocks=[], offsets=(5, 6), nbytes=9, dst_slot=3, checksum=True, priority=2),
            Selection(Layers(range(1, 3), range(2), 2), dst_slot=3, nbytes=9, offsets=(5, 6)),
        ),
    ],
    ids=["blocks", "parts", "bytes"],
)
def test_what_comes_out_of_the_line_is_what_went_in(message: Pull, selection: Selection) -> None:
    found = RequestInLine(message, selection, DESTINATION).message()
    arrays = {name: getattr(found, name).tolist() for name in ("src_blocks", "dst_blocks")}
    if found.parts is not None:
        arrays["parts"] = PartNumbers(nbytes=found.parts.nbytes, src=list(found.parts.src), dst=list(found.parts.dst))
    assert found.model_copy(update=arrays) == message


def test_a_task_that_ends_leaves_its_place_to_the_first_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_budget, "REQUEST_TASKS", 2)
    lines = RequestLines()
    assert [lines.enter(1) for _ in range(3)] == [True, True, False]
    for call in (7, 8, 9):
        lines.add(RequestInLine(pull(call=call), Selection(), DESTINATION))
    removed = lines.remove(8)
    assert (removed is not None and removed.call, lines.remove(8), len(lines)) == (8, None, 2)
    assert [request and request.call for request in (lines.next(1), lines.next(1), lines.next(1))] == [7, 9, None]
    assert [lines.enter(1) for _ in range(2)] == [True, False]
