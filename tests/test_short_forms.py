"""Every form of a transfer takes the short way from the third time on, and callers see no difference from the long one."""

from __future__ import annotations

import random
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheNotFound,
    CacheTask,
    DataType,
    LLMException,
    NotLinked,
    ParamInvalid,
    Placement,
    TransferPriority,
)
from aiodatadist._cache.local_copy import MOST_WAYS, LocalCopies
from aiodatadist._cache.task import EndedTask
from aiodatadist._link.transfers.running import RunningTransfers
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    inside,
    linked_pair,
    pattern,
    soft_fault,
    soft_faults_cleared,
    verify,
)
from tests.held import PUSH, held_transfer, there_and_back
from tests.strict.marks import STRICT

PIECES, TENSORS, STRIDE = 8, 4, 1024
DESC = CacheDesc(TENSORS, [PIECES, STRIDE], DataType.DT_UINT8)
KEY = BlocksCacheKey(1)
POOLS: dict[str, Any] = dict.fromkeys(("mem_pool_cfg", "host_mem_pool_cfg"), '{"memory_size": 4194304}')
short = pytest.mark.skipif(STRICT == "roce", reason="RoCE: every transfer takes its turn in one stream")


class Pair:
    """Two linked clusters, and how many transfers took the long way."""

    def __init__(self, prompt: Cluster, decoder: Cluster, source: Cache, target: Cache) -> None:
        self.prompt, self.decoder, self.source, self.target = prompt, decoder, source, target
        self.manager = decoder.datadist.cache_manager
        self.long = 0


@asynccontextmanager
async def pair(monkeypatch: pytest.MonkeyPatch, *, slots: bool = False, **options: Any) -> AsyncIterator[Pair]:
    async with linked_pair(DESC, slots=slots, **{**POOLS, **options}) as clusters:
        made = Pair(*clusters)

        def counted(kind: type[Any], name: str) -> None:
            call = getattr(kind, name)

            def counting(*args: Any, **kwargs: Any) -> Any:
                made.long += 1
                return call(*args, **kwargs)

            monkeypatch.setattr(kind, name, counting)

        counted(RunningTransfers, "submit")
        counted(LocalCopies, "start")
        yield made


@short
@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_layers_have_their_own_way(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch) as p:
        choose = random.Random(2)
        moved: dict[tuple[int, int], int] = {}
        call = p.manager.pull_blocks if direction == "pull" else p.manager.push_blocks
        for turn in range(40):
            ours, theirs = range(turn % 2, turn % 2 + 1), range(1 - turn % 2, 2 - turn % 2)
            src, dst = (choose.sample(range(PIECES), 2) for _ in range(2))
            layers = (theirs, ours) if direction == "pull" else (ours, theirs)
            await call(KEY, p.target, src, dst, src_layer_range=layers[0], dst_layer_range=layers[1])
            moved.update({(2 * layers[1].start + t, to): fro for t in (0, 1) for fro, to in zip(src, dst, strict=True)})
        assert p.long == 3, "one that asks the peer, and one of each form"
        # a tensor that was moved has the pattern of the other layer's
        if direction == "pull":
            check_layers(p.decoder, p.target, 1, moved)
        else:
            check_layers(p.prompt, p.source, 2, moved)


def check_layers(cluster: Cluster, cache: Cache, owner: int, moved: dict[tuple[int, int], int]) -> None:
    """Compare what was moved, from the other layer of ``owner``, and that the rest is as it was."""
    view, own = cluster.memory(cache).view(), 3 - owner
    for t in range(TENSORS):
        for block in range(PIECES):
            found = bytes(view[(t * PIECES + block) * STRIDE :][:STRIDE])
            is_moved = (t, block) in moved
            place = (owner, (t + 2) % TENSORS, moved[t, block]) if is_moved else (own, t, block)
            assert found == pattern(*place, STRIDE), (t, block, place)


@short
async def test_slots_move_like_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch, slots=True) as p:
        choose = random.Random(3)
        moved: dict[int, int] = {}
        for request in range(PIECES):
            with suppress(CacheNotFound):
                await p.manager.pull_cache(CacheKey(1, request), p.target, 0, 8)  # the peer is asked for each key
        known = p.long
        for _ in range(40):
            mine, theirs = choose.randrange(PIECES), choose.randrange(PIECES)
            task = p.manager.pull_cache(CacheKey(1, theirs), p.target, mine)
            assert (await task).bytes == TENSORS * STRIDE
            moved[mine] = theirs
        assert p.long == known + 1, "all slots have one way"
        assert f"{STRIDE} bytes of a slot, all layers" in repr(task)
        verify(
            p.decoder.memory(p.target), p.target, [(t, m, 1, s) for t in range(TENSORS) for m, s in moved.items()], None
        )


@short
async def test_a_way_takes_no_key_that_its_call_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a cache's owner says which slot a request has: a push names the slot itself."""
    async with pair(monkeypatch, slots=True) as p:
        by_id, by_request = CacheKeyByIdAndIndex(1, p.source.cache_id, 3), CacheKey(1, 5)
        for _ in range(3):
            await p.manager.pull_cache(by_request, p.target, 1)
            await p.manager.push_cache(by_id, p.target, 0)
        with pytest.raises(TypeError):
            p.manager.push_cache(by_request, p.target, 0)  # type: ignore[arg-type]
        verify(p.prompt.memory(p.source), p.source, [(t, 3, 2, 0) for t in range(TENSORS)], None)


@short
async def test_slots_are_pushed_like_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch, slots=True) as p:
        for turn in range(PIECES):
            slot = CacheKeyByIdAndIndex(1, p.source.cache_id, turn)
            await p.manager.push_cache(slot, p.target, PIECES - 1 - turn)
        assert p.long == 2
        at = [(t, b, 2, PIECES - 1 - b) for t in range(TENSORS) for b in range(PIECES)]
        verify(p.prompt.memory(p.source), p.source, at)


@short
async def test_a_slot_is_cut_into_all_its_blocks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch, slots=True) as p:
        small = CacheDesc(TENSORS, [16, 400], DataType.DT_UINT8)  # a slot of 1024 bytes fills 2 blocks, and 224 bytes
        blocks = await p.manager.allocate_blocks_cache(small)
        for turn in range(6):
            targets = [turn, turn + 8, 15 - turn]
            task = p.manager.pull_blocks(CacheKey(1, 3), blocks, [], targets)
            assert (await task).bytes == TENSORS * STRIDE
            arrays = p.manager.arrays(blocks)
            source = bytes(p.prompt.memory(p.source).view()[3 * STRIDE : 4 * STRIDE])
            first, second, third = (arrays[0][block].tobytes() for block in targets)
            assert first + second + third[:224] == source
            del arrays
        assert p.long == 2
        for wrong in ([1], [1, 2], [1, 2, 3, 4], [1, 2, 16], [1, 2, 2]):
            with pytest.raises(ParamInvalid):
                await p.manager.pull_blocks(CacheKey(1, 3), blocks, [], wrong)


@short
async def test_copies_take_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch) as p:
        for turn in range(1, 5):
            assert (await p.manager.copy_blocks(p.target, {0: [turn], 5: (6, 7)})).ranges == 3 * TENSORS or turn
        assert p.long == 1
        host = await p.manager.allocate_blocks_cache(CacheDesc(TENSORS, [4, STRIDE], DataType.DT_UINT8, Placement.HOST))
        for turn in range(4):
            task = p.manager.swap_blocks(p.target, host, {turn + 1: 3 - turn})
            await task
        assert p.long == 2
        assert repr(task) == "<CacheTask swap_blocks peer 2: 1 blocks of 4 tensors, 4096 bytes, done>"
        first = bytes(p.decoder.memory(p.target).view()[:STRIDE])
        assert [bytes(block) for block in p.manager.arrays(host)[0]] == [first] * 4
        flows = p.decoder.datadist.figures().transfers
        assert [sum(flows[name].statuses.values()) for name in ("copy_blocks", "swap_blocks")] == [4, 4]


@short
async def test_copies_of_slots_keep_to_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch, slots=True) as p:
        for turn in range(1, 5):
            await p.manager.copy_cache(p.target, p.target, turn, 0, 24, 1000, req_id=turn)
        assert p.long == 2
        view = p.decoder.memory(p.target).view()
        for turn in range(1, 5):
            own = bytes(view[turn * STRIDE :][:24])
            assert bytes(view[turn * STRIDE :][24:1024]) == bytes(view[24:1024])
            assert own != bytes(view[:24])
        good: dict[str, Any] = {"dst": p.target, "src": p.target, "offset": 24, "size": 1000}
        for wrong in (
            {"offset": 25}, {"dst_batch_index": PIECES}, {"src_batch_index": 1.0}, {"size": 0}, {"req_id": -1},
            {"req_id": 1.0},
        ):  # fmt: skip
            with pytest.raises((TypeError, ValueError, ParamInvalid)):
                p.manager.copy_cache(**{**good, **wrong})


@short
async def test_copies_into_memory_that_was_given_up_are_refused() -> None:
    async with linked_pair(DESC, **POOLS) as (_, decoder, _, target):
        manager = decoder.datadist.cache_manager
        host = CacheDesc(TENSORS, [PIECES, STRIDE], DataType.DT_UINT8, Placement.HOST)
        for gone in (0, 1):
            caches = [await manager.allocate_blocks_cache(host), target]
            lent = caches[0]
            for _ in range(3):
                await manager.swap_blocks(caches[gone], caches[1 - gone], {1: 1})
            await manager.deallocate_blocks_cache(lent)
            with pytest.raises(CacheNotFound):
                manager.swap_blocks(caches[gone], caches[1 - gone], {1: 1})


@short
async def test_short_ways_of_copies_are_bounded() -> None:
    async with linked_pair(DESC, slots=True, **POOLS) as (_, decoder, _, target):
        ways = inside(decoder.datadist).local_copies.ways
        for size in range(1, MOST_WAYS + 20):
            await decoder.datadist.cache_manager.copy_cache(target, target, 1, 0, 0, size)
        assert len(ways) == 0, "each size came once"
        for size in range(1, MOST_WAYS + 20):
            for _ in range(2):
                await decoder.datadist.cache_manager.copy_cache(target, target, 1, 0, 0, size)
            assert len(ways) <= MOST_WAYS
        assert len(ways) > 0


@short
async def test_parts_of_slots_that_come_once_have_no_way() -> None:
    async with linked_pair(DESC, slots=True) as (_, decoder, _, target):
        ours = inside(decoder.datadist).links.find
        pull = decoder.datadist.cache_manager.pull_cache
        for size in range(1, 600):
            await pull(CacheKey(1, 3), target, 1, size)
        assert len(ours(1).transfers.shortcuts.ours) == 0
        await pull(CacheKey(1, 3), target, 1, 599)
        assert len(ours(1).transfers.shortcuts.ours) == 1


@short
async def test_a_copy_under_way_leases_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch) as p:
        for _ in range(2):
            await p.manager.copy_blocks(p.target, {0: [1]})
        entry = inside(p.decoder.datadist).registry.table.find(p.target.cache_id)
        assert entry is not None
        with soft_faults_cleared():
            soft_fault("aclrtMemcpyAsync:hang@1")
            task = p.manager.copy_blocks(p.target, {0: [2]})
            assert (p.long, entry.leases, task.done()) == (1, 1, False)
            assert task.cancel()
            with pytest.raises(BaseException, match="cancelled"):
                await task
            assert entry.leases == 0
        await p.manager.copy_blocks(p.target, {0: [3]})
        verify(p.decoder.memory(p.target), p.target, [(t, 3, 2, 0) for t in range(TENSORS)])


# ---- what is wrong with a call ----

WRONG_WORDS: dict[str, dict[str, Any]] = {
    "a bool for a number": {"tensor_num_per_layer": True},
    "half a tensor": {"tensor_num_per_layer": 1.0},
    "no tensors": {"tensor_num_per_layer": 0},
    "layers in a list": {"src_layer_range": [0]},
    "layers that are not there": {"src_layer_range": range(2, 3), "dst_layer_range": range(2, 3)},
    "another number of layers": {"src_layer_range": range(2), "dst_layer_range": range(1)},
    "a note that is a text": {"notify": "done"},
    "a note that is too long": {"notify": bytes(65537)},
    "a priority that is a number": {"priority": 1},
    "a deadline in words": {"deadline": "soon"},
    "no deadline at all": {"deadline": -1.0},
    "a checksum that is a number": {"checksum": 1},
}


@pytest.mark.parametrize("words", WRONG_WORDS.values(), ids=WRONG_WORDS)
@pytest.mark.parametrize("call", ["pull_blocks", "push_blocks"])
async def test_wrong_words_are_refused_as_on_the_long_way(call: str, words: dict[str, Any]) -> None:
    async def said() -> str:
        try:
            await getattr(manager, call)(KEY, target, [1], [1], **words)
        except (TypeError, ValueError, LLMException) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    async with linked_pair(DESC) as (_, decoder, _, target):
        manager = decoder.datadist.cache_manager
        first = await said()
        for good in ({}, {"tensor_num_per_layer": 1}, {"src_layer_range": range(1), "dst_layer_range": range(1)}):
            for _ in range(3):
                await getattr(manager, call)(KEY, target, [1], [1], **good)
        assert await said() == first


WRONG_SLOTS: dict[str, dict[str, Any]] = {
    "a slot that is not here": {"batch_index": PIECES},
    "a slot below 0": {"batch_index": -1},
    "a bool for a slot": {"batch_index": True},
    "half a slot": {"batch_index": 1.0},
    "a size of 0": {"size": 0},
    "more than a slot": {"size": STRIDE + 1},
    "a bool for a size": {"size": True},
    "more than is behind the offset": {"size": STRIDE, "dst_cache_offset": 1},
    "an offset of none": {"dst_cache_offset": -1},
    "a placeholder": {"cache_key": CacheKey(1, 2**64 - 1)},
    "two names": {"cache_key": CacheKey(1, 3, prefix_id=3)},
    "a slot that the peer has not": {"cache_key": "by id"},
}


@pytest.mark.parametrize("words", WRONG_SLOTS.values(), ids=WRONG_SLOTS)
async def test_wrong_slots_are_refused_as_on_the_long_way(words: dict[str, Any]) -> None:
    async with linked_pair(DESC, slots=True) as (_, decoder, source, target):
        manager = decoder.datadist.cache_manager
        good: dict[str, Any] = {"cache_key": CacheKey(1, 3), "cache": target, "batch_index": 1}
        if words.get("cache_key") == "by id":
            words = {"cache_key": CacheKeyByIdAndIndex(1, source.cache_id, PIECES)}

        async def said() -> str:
            try:
                await manager.pull_cache(**{**good, **words})
            except (TypeError, ValueError, LLMException) as error:
                return f"{type(error).__name__}: {error}"
            return "nothing"

        first = await said()
        for _ in range(3):
            await manager.pull_cache(**good)
            await manager.pull_cache(**{**good, "cache_key": CacheKeyByIdAndIndex(1, source.cache_id, 3)})
        assert await said() == first


@short
async def test_a_key_with_two_names_is_refused_though_one_is_known() -> None:
    async with linked_pair(DESC, slots=True, **POOLS) as (prompt, decoder, _, target):
        manager, nothing = decoder.datadist.cache_manager, 2**64 - 1
        await prompt.datadist.cache_manager.allocate_cache(DESC, [CacheKey(1, nothing, prefix_id=70)])
        for _ in range(3):
            await manager.pull_cache(CacheKey(1, nothing, prefix_id=70), target)
        with pytest.raises(ParamInvalid, match="exactly one"):
            manager.pull_cache(CacheKey(1, 3, prefix_id=70), target)


KINDS = ("int64", "uint64", "int32", "uint32", "int16", "uint16")


def arrays() -> dict[str, Callable[[list[int]], Any]]:
    numpy = pytest.importorskip("numpy")
    found: dict[str, Callable[[list[int]], Any]] = {
        kind: lambda values, kind=kind: numpy.array(values, dtype=kind)  # type: ignore[misc]
        for kind in KINDS
    }
    found["every other one"] = lambda values: numpy.array([each for value in values for each in (value, 99)])[::2]
    found["array"] = lambda values: array("q", values)
    found["memoryview"] = lambda values: memoryview(array("Q", values))
    return found


@short
@pytest.mark.parametrize(
    "kind", ["int64", "uint64", "int32", "uint32", "int16", "uint16", "every other one", "array", "memoryview"]
)
async def test_arrays_are_read_as_buffers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = arrays()[kind]
    async with pair(monkeypatch) as p:
        for _ in range(2):
            await p.manager.pull_blocks(KEY, p.target, [0], [0])
        await p.manager.pull_blocks(KEY, p.target, make([3, 1]), make([4, 5]))
        await p.manager.pull_blocks(KEY, p.target, make([7]), [6])
        await p.manager.pull_blocks(KEY, p.target, (2,), make([7]))
        assert p.long == 2
        at = [(t, mine, 1, theirs) for t in range(TENSORS) for mine, theirs in ((0, 0), (4, 3), (5, 1), (6, 7), (7, 2))]
        verify(p.decoder.memory(p.target), p.target, at)


async def test_arrays_that_are_no_block_numbers_are_refused_as_on_the_long_way() -> None:
    numpy = import_module("numpy")
    wrong: list[tuple[Any, Any]] = [
        (numpy.array([-1]), numpy.array([0])),
        (numpy.array([0]), numpy.array([-1], dtype="int32")),
        (numpy.array([[0]]), numpy.array([[0]])),
        (numpy.array([0.0]), numpy.array([0])),
        (numpy.array([0, 1]), numpy.array([0])),
        (numpy.array([0, 1]), numpy.array([1, 1])),
        (numpy.array([PIECES]), numpy.array([0])),
        (numpy.array([], dtype="int64"), numpy.array([], dtype="int64")),
        (b"12345678", numpy.array([0])),
    ]
    async with linked_pair(DESC) as (_, decoder, _, target):
        manager = decoder.datadist.cache_manager

        async def said() -> list[str]:
            words = []
            for lists in wrong:
                with pytest.raises((TypeError, ValueError, LLMException)) as caught:
                    await manager.pull_blocks(KEY, target, *lists)
                words.append(f"{type(caught.value).__name__}: {caught.value}")
            return words

        first = await said()
        for _ in range(3):
            await manager.pull_blocks(KEY, target, [1], [1])
        assert await said() == first


# ---- keys that end ----


@short
async def test_a_key_that_was_removed_is_not_reached_by_its_old_way() -> None:
    async with linked_pair(DESC, slots=True, **POOLS) as (prompt, decoder, _, target):
        owner, manager = prompt.datadist.cache_manager, decoder.datadist.cache_manager
        for value in (11, 22):
            lent = await owner.allocate_cache(DESC, [CacheKey(1, 70), CacheKey(1, 71)])
            views = owner.arrays(lent)
            for view in views:
                view[:] = value
            del view, views
            for key in (CacheKey(1, 70), CacheKey(1, 71)):
                for _ in range(3):
                    await manager.pull_cache(key, target, 2)
            assert set(bytes(decoder.memory(target).view()[2 * STRIDE : 3 * STRIDE])) == {value}
            await owner.remove_cache_key(CacheKey(1, 70))
            with pytest.raises(CacheNotFound):
                await manager.pull_cache(CacheKey(1, 70), target, 2)
            assert (await manager.pull_cache(CacheKey(1, 71), target, 2)).bytes == TENSORS * STRIDE
            await owner.remove_cache_key(CacheKey(1, 71))
            await owner.deallocate_cache(lent)
            for key in (CacheKey(1, 70), CacheKey(1, 71)):
                with pytest.raises(CacheNotFound):
                    await manager.pull_cache(key, target, 2)
        await decoder.datadist.unlink_clusters([cluster_info(prompt)])
        with pytest.raises(NotLinked):
            manager.pull_cache(CacheKey(1, 1), target, 2)


# ---- notifications ----


@short
async def test_notifications_of_short_transfers_come_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch) as p:
        payloads = [b"%d" % number for number in range(200)]
        for number, payload in enumerate(payloads):
            call = p.manager.pull_blocks if number % 2 else p.manager.push_blocks
            await call(KEY, p.target, [1], [1], notify=payload)
        assert p.long <= 4
        found = []
        async for note in p.prompt.datadist.notifications():
            found.append(note.payload)
            if len(found) == len(payloads):
                break
        assert found == payloads
        await there_and_back(p.decoder, p.prompt)


@short
async def test_a_notification_waits_for_its_bytes_and_those_behind_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch) as p:
        for _ in range(3):
            await p.manager.push_blocks(KEY, p.target, [1], [1])
            await p.manager.pull_blocks(KEY, p.target, [1], [1])
        came: list[bytes] = []
        with held_transfer(PUSH) as held:
            slow = p.manager.push_blocks(KEY, p.target, [2], [3], notify=b"slow")
            await held.arrived()
            critical: dict[str, Any] = {"notify": b"quick", "priority": TransferPriority.CRITICAL}
            quick = p.manager.pull_blocks(KEY, p.target, [4], [5], **critical)
            await quick
            assert not slow.done()
            held.release()
            await slow
        async for note in p.prompt.datadist.notifications():
            came.append(note.payload)
            if len(came) == 2:
                break
        assert came == [b"slow", b"quick"]
        verify(p.prompt.memory(p.source), p.source, [(t, 3, 2, 2) for t in range(TENSORS)])


@short
async def test_a_transfer_that_fails_sends_no_notification(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch) as p:
        for _ in range(3):
            await p.manager.pull_blocks(KEY, p.target, [1], [1])
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:exec=507000@1")
            with pytest.raises(LLMException):
                await p.manager.pull_blocks(KEY, p.target, [4], [5], notify=b"never")
        await p.manager.pull_blocks(KEY, p.target, [4], [5], notify=b"then")
        async for note in p.prompt.datadist.notifications():
            assert note.payload == b"then"
            break


@pytest.mark.parametrize("form", ["pull_blocks", "push_blocks", "copy_blocks", "swap_blocks", "copy_cache"])
async def test_background_work_takes_the_long_way_each_time(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its windows are smaller there. What other calls have learnt stays."""
    async with pair(monkeypatch) as p:
        manager, desc = p.manager, CacheDesc(TENSORS, [PIECES, STRIDE], DataType.DT_UINT8, Placement.HOST)
        there, blocks = await manager.allocate_cache(desc), await manager.allocate_blocks_cache(desc)
        forms: dict[str, Callable[[TransferPriority], CacheTask]] = {
            "pull_blocks": lambda priority: manager.pull_blocks(KEY, p.target, [1], [1], priority=priority),
            "push_blocks": lambda priority: manager.push_blocks(KEY, p.target, [1], [1], priority=priority),
            "copy_blocks": lambda priority: manager.copy_blocks(p.target, {0: [1]}, priority=priority),
            "swap_blocks": lambda priority: manager.swap_blocks(blocks, p.target, {0: 1}, priority=priority),
            "copy_cache": lambda priority: manager.copy_cache(there, there, 1, 0, priority=priority),
        }
        call = forms[form]
        for priority in (TransferPriority.BACKGROUND, TransferPriority.NORMAL, TransferPriority.CRITICAL) * 3:
            await call(priority)
        for priority in TransferPriority:
            long = p.long
            await call(priority)
            is_long = priority is TransferPriority.BACKGROUND or (STRICT == "roce" and form[:4] in {"pull", "push"})
            assert p.long - long == is_long, priority


@short
async def test_each_form_ends_in_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later transfer of a form is an ended task, with everything that a task can tell."""
    async with pair(monkeypatch) as p:
        forms: list[Callable[[], CacheTask]] = [
            lambda: p.manager.pull_blocks(KEY, p.target, [1], [1], deadline=5),
            lambda: p.manager.pull_blocks(KEY, p.target, [1], [1], notify=b"x"),
            lambda: p.manager.pull_blocks(KEY, p.target, [1], [1], tensor_num_per_layer=4),
            lambda: p.manager.pull_blocks(
                KEY, p.target, [1], [1], src_layer_range=range(1, 2), dst_layer_range=range(1, 2)
            ),
            lambda: p.manager.pull_blocks(KEY, p.target, [1], [1], priority=TransferPriority.CRITICAL),
            lambda: p.manager.pull_blocks(CacheKeyByIdAndIndex(1, p.source.cache_id), p.target, [1], [1]),
        ]
        for form in forms:
            for _ in range(2):
                await form()
            long, task = p.long, form()
            assert isinstance(task, EndedTask)
            assert p.long == long
            assert (task.peer, task.done(), task.exception(), task.cancel()) == (1, True, None, False)
            assert "1 blocks" in repr(task)
            await task
