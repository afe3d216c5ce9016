"""Checksums: a byte that changed on its way is found before a transfer is reported done, whatever moved it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from aiodatadist import (
    BlockParts,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheNotFound,
    CacheTask,
    DataCorrupted,
    DataType,
    FeatureNotEnabled,
    LLMStatusCode,
    Placement,
    ProtocolError,
)
from aiodatadist._cache import digester
from aiodatadist._cluster.engine import Engine
from aiodatadist._link.transfers import checksums, transfers
from aiodatadist._link.transfers import responder as responding
from aiodatadist._link.transfers.asked_checksums import AskedChecksums
from aiodatadist._wire.messages import Digest, Digests, Hello, Pulled
from aiodatadist.testing import (
    Cluster,
    cluster_info,
    inside,
    linked_pair,
    open_cluster,
    pattern,
    soft_fault,
    soft_faults_cleared,
    verify,
)
from tests.strict.marks import IS_HCCS, any_memory

LAYERS, TENSORS, BLOCK = 3, 6, 14_000
SOURCES, TARGETS = [3, 9, 4], [0, 7, 2]
"""Blocks that travel; 18 pieces, which one call of HCCL moves, tensor by tensor."""
TINY = 96
"""Bytes of a block that travels in the submitting call."""


@dataclass
class Way:
    """A pair, and what moves blocks of cluster 1 into those of cluster 2."""

    name: str
    prompt: Cluster
    decoder: Cluster
    source: Cache
    target: Cache

    def move(self, sources: list[int] = SOURCES, targets: list[int] = TARGETS, **options: Any) -> CacheTask:
        if self.name == "push":
            push = self.prompt.datadist.cache_manager.push_blocks
            return push(BlocksCacheKey(2), self.source, sources, targets, **options)
        return self.decoder.datadist.cache_manager.pull_blocks(
            BlocksCacheKey(1), self.target, sources, targets, **options
        )

    def flip(self, byte: int, nth: int = 1) -> None:
        soft_fault(f"{'HcclBatchGet' if self.name == 'pull' else 'HcclBatchPut'}:flip={byte}@{nth}")

    @property
    def mover(self) -> Cluster:
        return self.prompt if self.name == "push" else self.decoder

    def figures(self) -> tuple[int, dict[str, int]]:
        """Transfers that failed because of checksums, and all by status."""
        found = self.mover.datadist.figures()
        statuses = found.transfers["push_blocks" if self.name == "push" else "pull_blocks"].statuses
        return found.failure_causes.get("checksum", 0), dict(statuses)

    def check(self, damaged: tuple[int, int, int] | None = None) -> None:
        """Check that the blocks are there and nothing else changed, but for a bit of this tensor, block and byte."""
        if damaged is not None:
            tensor, block, at = damaged
            view = self.decoder.memory(self.target).view()
            place = self.target.tensor_addrs[tensor] - self.decoder.memory(self.target).address
            view[place + block * self.target.cache_desc.stride + at] ^= 1
        moved = dict(zip(TARGETS, SOURCES, strict=True))
        pieces = [(t, p, 1, moved[p]) for t in range(self.target.cache_desc.num_tensors) for p in TARGETS]
        verify(self.decoder.memory(self.target), self.target, pieces, owner=2)
        own = self.source.cache_desc
        all_pieces = [(t, p, 1, p) for t in range(own.num_tensors) for p in range(own.shape[0])]
        verify(self.prompt.memory(self.source), self.source, all_pieces)


@asynccontextmanager
async def way(
    name: str, placement: Placement = Placement.DEVICE, block: int = BLOCK, blocks: int = 16, **options: Any
) -> AsyncIterator[Way]:
    desc = CacheDesc(TENSORS, [blocks, block], DataType.DT_UINT8, placement)
    one_sided = name != "request"
    async with linked_pair(desc, enable_remote_cache_accessible=one_sided, sync_kv_timeout=20_000, **options) as pair:
        with soft_faults_cleared():
            yield Way(name, *pair)


ways = pytest.mark.parametrize("name", ["pull", "push", "request"])
reachable = pytest.mark.skipif(IS_HCCS, reason="HCCS: HOST memory of a peer is out of reach")
placements = pytest.mark.parametrize(
    "placement", [Placement.DEVICE, pytest.param(Placement.HOST, marks=reachable)], ids=str
)
POSITIONS = {
    "head": (0, (0, 0, 0)),
    "middle": (3 * 3 * BLOCK + BLOCK + 17, (3, 7, 17)),
    "tail": (-1, (5, 2, BLOCK - 1)),
}
"""The byte of a call that arrives wrong, and the tensor, block and byte that it is."""


@placements
@ways
async def test_a_flipped_bit_is_found_and_its_block_is_named(name: str, placement: Placement) -> None:
    async with way(name, placement) as w:
        for count, (byte, damaged) in enumerate(POSITIONS.values(), 1):
            w.flip(byte)
            with pytest.raises(DataCorrupted, match=rf"1 of 3 pieces .*: block {damaged[1]} \(CRC-32C") as caught:
                await w.move(checksum=True)
            error = caught.value
            assert error.blocks == (damaged[1],)
            assert len(error.digests) == 1
            assert error.digests[0][0] != error.digests[0][1]
            assert (error.peer, error.status_code) == (2 if name == "push" else 1, LLMStatusCode.LLM_FAILED)
            assert error.retryable
            w.check(damaged)
            assert w.figures() == (count, {"LLM_FAILED": count, **({"LLM_SUCCESS": count - 1} if count > 1 else {})})
            report = await w.move(checksum=True)
            assert report.bytes == 3 * TENSORS * BLOCK
            w.check()
            assert w.figures() == (count, {"LLM_FAILED": count, "LLM_SUCCESS": count})


@ways
async def test_without_checksums_it_is_not_found(name: str) -> None:
    byte, damaged = POSITIONS["middle"]
    async with way(name) as w:
        w.flip(byte)
        await w.move()
        w.check(damaged)
        w.flip(byte)
        with pytest.raises(DataCorrupted):
            await w.move(checksum=True)


@ways
async def test_inside_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change bytes between the copy and the check of its checksum."""
    digests = digester.Digester.digests

    async with way(name, transport="loopback") as w:
        await w.move(checksum=True)
        w.check()

        async def change(self: digester.Digester, *arguments: Any) -> Any:
            if self is inside(w.decoder.datadist).digester:
                memory = w.decoder.memory(w.target)
                memory.view()[w.target.tensor_addrs[3] - memory.address + 7 * BLOCK] ^= 1
            return await digests(self, *arguments)

        monkeypatch.setattr(digester.Digester, "digests", change)
        with pytest.raises(DataCorrupted) as caught:
            await w.move(checksum=True)
        assert caught.value.blocks == (7,)


@ways
async def test_small_transfers_take_no_shortcut_past_it(name: str) -> None:
    async with way(name, block=TINY) as w:
        for _ in range(4):  # from the third one on they are short
            await w.move()
        w.flip(-1)
        with pytest.raises(DataCorrupted) as caught:
            await w.move(checksum=True)
        assert caught.value.blocks == (2,)
        await w.move(checksum=True)
        w.check()


@ways
async def test_an_option_checks_every_transfer_but_those_that_say_otherwise(name: str) -> None:
    async with way(name, block=TINY, transfer_checksum=True) as w:
        for _ in range(3):
            await w.move()
            w.flip(0)
            with pytest.raises(DataCorrupted):
                await w.move()
        w.flip(0)
        await w.move(checksum=False)
        w.check((0, 0, 0))


@ways
async def test_layers_of_a_cache_are_summed_at_either_end(name: str) -> None:
    layers: dict[str, Any] = {"src_layer_range": range(1, 3), "dst_layer_range": range(2), "checksum": True}
    async with way(name) as w:
        assert (await w.move(**layers)).bytes == 3 * 4 * BLOCK
        w.flip(2 * 3 * BLOCK)
        with pytest.raises(DataCorrupted) as caught:
            await w.move(**layers)
        assert caught.value.blocks == (0,)
        memory = w.decoder.memory(w.target)
        view = memory.view()
        view[w.target.tensor_addrs[2] - memory.address] ^= 1
        for tensor in range(4):
            for source, target in zip(SOURCES, TARGETS, strict=True):
                at = w.target.tensor_addrs[tensor] - memory.address + target * BLOCK
                assert bytes(view[at : at + BLOCK]) == pattern(1, tensor + 2, source, BLOCK)


@ways
async def test_all_damaged_blocks_are_named_and_each_once(name: str) -> None:
    """36 pieces of 6 tensors, none beside the next: HCCL is called for 192, and for the last 24 of the last tensor."""
    sources, targets = list(reversed(range(36))), list(range(36))
    async with way(name, block=1024, blocks=36) as w:
        w.flip(12 * 1024, nth=1)
        w.flip(0, nth=2)  # of the last tensor, the same block
        with pytest.raises(DataCorrupted, match="1 of 36 pieces") as caught:
            await w.move(sources, targets, checksum=True)
        assert caught.value.blocks == (12,)
        w.flip(5 * 1024, nth=1)
        w.flip(-1, nth=2)
        with pytest.raises(DataCorrupted, match="2 of 36 pieces") as caught:
            await w.move(sources, targets, checksum=True)
        assert caught.value.blocks == (5, 35)
        await w.move(sources, targets, checksum=True)


@ways
async def test_more_blocks_than_one_question_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "MAX_INDEXES", 2)
    async with way(name) as w:
        await w.move(checksum=True)
        w.check()
        w.flip(-1)
        with pytest.raises(DataCorrupted) as caught:
            await w.move(checksum=True)
        assert caught.value.blocks == (2,)


def crc32c(data: bytes) -> int:
    """Compute the checksum bit by bit, as RFC 3720 defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@ways
@placements
async def test_what_is_compared_is_the_crc_of_all_bytes_of_a_block_through_its_tensors(
    name: str, placement: Placement
) -> None:
    async with way(name, placement, TINY) as w:
        w.flip(-1)
        with pytest.raises(DataCorrupted) as caught:
            await w.move(checksum=True)
        sent = b"".join(pattern(1, tensor, SOURCES[-1], TINY) for tensor in range(TENSORS))
        arrived = sent[:-1] + bytes([sent[-1] ^ 1])
        assert caught.value.digests == ((crc32c(sent), crc32c(arrived)),)
        assert f"{crc32c(sent):08x} at the source, {crc32c(arrived):08x} at the destination" in str(caught.value)


@ways
@placements
async def test_pieces_larger_than_a_window_and_many_windows(
    name: str, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digester, "WINDOW_BYTES", 9000)
    monkeypatch.setattr(digester, "SLICE_BYTES", 9000)
    async with way(name, placement) as w:
        await w.move(checksum=True)
        for position, (byte, damaged) in POSITIONS.items():
            w.flip(byte)
            with pytest.raises(DataCorrupted) as caught:
                await w.move(checksum=True)
            assert caught.value.blocks == (damaged[1],), position


@ways
async def test_many_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "AT_A_TIME", 3)
    async with way(name) as w:
        w.flip(-1, nth=11)
        tasks = [w.move([i], [i], checksum=True) for i in range(16)]
        ends = [await ended(task) for task in tasks]
        assert [type(error) for error in ends if error is not None] == [DataCorrupted]
        assert w.figures() == (1, {"LLM_SUCCESS": 15, "LLM_FAILED": 1})


async def ended(task: CacheTask) -> Exception | None:
    await task.synchronize()
    return task.exception()


# ---- slots, and slots that become blocks ----

SLOTS = CacheDesc(4, [4, 10_000], DataType.DT_UINT8)


@pytest.mark.parametrize("one_sided", [True, False])
async def test_slots_from_an_offset(one_sided: bool) -> None:
    async with linked_pair(SLOTS, slots=True, enable_remote_cache_accessible=one_sided) as (_, decoder, _, cache):
        pull = decoder.datadist.cache_manager.pull_cache
        part: dict[str, Any] = {"src_cache_offset": 100, "dst_cache_offset": 2000, "size": 5000, "checksum": True}
        assert (await pull(CacheKey(1, 2), cache, 3, **part)).bytes == 4 * 5000
        with soft_faults_cleared():
            soft_fault("HcclBatchGet:flip=-1;HcclBatchPut:flip=-1")
            with pytest.raises(DataCorrupted, match="block 3") as caught:
                await pull(CacheKey(1, 2), cache, 3, **part)
        assert caught.value.blocks == (3,)
        place = cache.tensor_addrs[3] - decoder.memory(cache).address + 3 * 10_000
        there = decoder.memory(cache).view()[place : place + 10_000]
        there[6999] ^= 1
        assert bytes(there[2000:7000]) == pattern(1, 3, 2, 10_000)[100:5100]


async def test_a_pushed_slot() -> None:
    async with linked_pair(SLOTS, slots=True) as (prompt, decoder, source, cache):
        key = CacheKeyByIdAndIndex(2, cache.cache_id, 3)
        push = prompt.datadist.cache_manager.push_cache
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:flip=12345")
            with pytest.raises(DataCorrupted) as caught:
                await push(key, source, 1, checksum=True)
        assert caught.value.blocks == (3,)
        await push(key, source, 1, checksum=True)
        verify(decoder.memory(cache), cache, [(t, 3, 1, 1) for t in range(4)], owner=2)


@any_memory
@pytest.mark.parametrize("one_sided", [True, False])
async def test_a_slot_that_becomes_blocks(one_sided: bool) -> None:
    """Its last block is shorter than the others; where the peer writes, only it knows by how much."""
    options: dict[str, Any] = {"enable_remote_cache_accessible": one_sided}
    async with open_cluster(1, **options) as prompt, open_cluster(2, device_id=1, **options) as decoder:
        await prompt.contiguous(CacheDesc(2, [3, 2500], DataType.DT_UINT8), [CacheKey(1, i) for i in range(3)])
        target = await decoder.blocks(CacheDesc(2, [8, 1024], DataType.DT_UINT8))
        await decoder.datadist.link_clusters([cluster_info(prompt)])
        pull = decoder.datadist.cache_manager.pull_blocks
        assert (await pull(CacheKey(1, 1), target, [], [6, 0, 3], checksum=True)).bytes == 5000
        with soft_faults_cleared():
            for byte, block in ((0, 6), (1024, 0), (-1, 3)):
                soft_fault(f"HcclBatchGet:flip={byte};HcclBatchPut:flip={byte}")
                with pytest.raises(DataCorrupted) as caught:
                    await pull(CacheKey(1, 1), target, [], [6, 0, 3], checksum=True)
                assert caught.value.blocks == (block,)


async def test_a_key_is_consumed_when_the_source_was_summed() -> None:
    pool = '{"memory_size": 1048576, "page_shift": 12}'
    options: dict[str, Any] = {"enable_remote_cache_accessible": False, "mem_pool_cfg": pool}
    async with linked_pair(SLOTS, slots=True, **options) as (prompt, decoder, _, cache):
        await prompt.datadist.cache_manager.allocate_cache(SLOTS, [CacheKey(1, 100)])
        pull = decoder.datadist.cache_manager.pull_cache
        assert (await pull(CacheKey(1, 100), cache, 1, checksum=True)).bytes == 40_000
        with pytest.raises(CacheNotFound):
            await pull(CacheKey(1, 100), cache, 1, checksum=True)


# ---- blocks that are kept ----


@asynccontextmanager
async def leased(
    desc: CacheDesc, mine: CacheDesc, one_sided: bool
) -> AsyncIterator[tuple[Cluster, Cluster, Cache, Cache]]:
    options: dict[str, Any] = {"enable_remote_cache_accessible": one_sided}
    async with open_cluster(1, **options) as puller, open_cluster(2, device_id=1, **options) as owner:
        target, source = await puller.blocks(mine), await owner.blocks(desc)
        assert (await puller.datadist.link_clusters([cluster_info(owner)], 5000))[0] is LLMStatusCode.LLM_SUCCESS
        await owner.datadist.wait_linked(1)
        with soft_faults_cleared():
            yield puller, owner, target, source


KEPT = CacheDesc(2, [16, 4096], DataType.DT_UINT8)


@pytest.mark.parametrize("one_sided", [True, False])
async def test_what_was_damaged_of_kept_blocks_is_not_landed(one_sided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PORTION_BYTES", 2 * 2 * 4096)
    async with leased(KEPT, KEPT, one_sided) as (puller, owner, target, source):
        pull = puller.datadist.cache_manager.pull_leased
        lease = owner.datadist.cache_manager.lease_blocks(source, [3, 9, 4, 12, 1], 60)
        soft_fault("HcclBatchGet:flip=-1@2;HcclBatchPut:flip=-1@2")  # of blocks 4 and 12, the second one
        with pytest.raises(DataCorrupted) as caught:
            await pull(lease.ticket(), target, [5, 6, 7, 8, 9], checksum=True)
        assert (caught.value.landed_blocks, caught.value.blocks) == (3, (8,))
        assert lease.ended is None
        await pull(lease.ticket(), target, [8, 9], first=3, checksum=True)
        moved = zip([5, 6, 7, 8, 9], [3, 9, 4, 12, 1], strict=True)
        verify(puller.memory(target), target, [(t, b, 2, a) for b, a in moved for t in range(2)])


@any_memory
@pytest.mark.parametrize("one_sided", [True, False])
async def test_parts_of_blocks(one_sided: bool) -> None:
    async with leased(KEPT, CacheDesc(2, [16, 8192], DataType.DT_UINT8), one_sided) as (puller, owner, target, source):
        lease = owner.datadist.cache_manager.lease_blocks(source, [3, 9, 4], 60)
        parts = BlockParts(2048, list(range(6)), [1, 0, 2, 3, 6, 5])  # four in each of these blocks
        soft_fault("HcclBatchGet:flip=-1;HcclBatchPut:flip=-1")
        pull = puller.datadist.cache_manager.pull_leased
        with pytest.raises(DataCorrupted) as caught:
            await pull(lease.ticket(), target, [7, 2], parts=parts, checksum=True)
        assert (caught.value.blocks, caught.value.landed_blocks) == ((2,), 0)
        await pull(lease.ticket(), target, [7, 2], parts=parts, checksum=True)


# ---- what is refused ----


@ways
async def test_wrong_arguments(name: str) -> None:
    async with way(name) as w:
        with pytest.raises(TypeError, match="checksum"):
            w.move(checksum=1)
        await w.move([3, 3], [1, 2], checksum=True)


@pytest.fixture
def old_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers say that they are of the minor version before checksums."""
    own = Engine.hello

    def older(self: Engine, has_key: bool, peer: int | None) -> Hello:
        return own(self, has_key, peer).model_copy(update={"minor": 0})

    monkeypatch.setattr(Engine, "hello", older)


@pytest.mark.usefixtures("old_peers")
async def test_a_peer_that_knows_no_checksums_is_not_linked_where_all_is_checked() -> None:
    async with open_cluster(1) as old, open_cluster(2, device_id=1, transfer_checksum=True) as fresh:
        linked = await fresh.datadist.link_clusters([cluster_info(old)], 5000)
        assert linked[0] is LLMStatusCode.LLM_PARAM_INVALID
        words = "transfer_checksum is on at cluster 2, and cluster 1 knows no checksums"
        assert words in str(linked.errors)
        linked = await old.datadist.link_clusters([cluster_info(fresh)], 5000)
        assert f"the peer refused: {words}" in str(linked.errors)


@pytest.mark.usefixtures("old_peers")
@ways
async def test_a_peer_that_knows_no_checksums_is_linked_and_not_asked_for_them(name: str) -> None:
    async with way(name) as w:
        with pytest.raises(
            FeatureNotEnabled, match=r"knows no checksums: its protocol has version 4\.0, and they came with 4\.1"
        ):
            w.move(checksum=True)
        await w.move()
        w.check()


# ---- peers that lie ----


@pytest.mark.parametrize("count", [0, 2, 4])
async def test_a_wrong_number_of_checksums_ends_the_link(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lie(self: AskedChecksums, message: Digest, _: object) -> Digests:
        return Digests(call=message.call, status=0, checksums=[7] * count)

    monkeypatch.setattr(AskedChecksums, "_digests", lie)
    async with way("pull") as w:
        link = inside(w.decoder.datadist).links.find(1)
        with pytest.raises(ProtocolError, match="checksums: it was asked for 3"):
            await w.move(checksum=True)
        assert isinstance(await link.wait_closed(), ProtocolError)


@pytest.mark.parametrize("sums", [[], [1, 2]])
async def test_so_do_too_few_in_request_response_mode(sums: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    report = responding._report

    def lie(call: int, transfer: Any, _: object) -> Pulled:
        return report(call, transfer, sums)

    monkeypatch.setattr(responding, "_report", lie)
    async with way("request") as w:
        with pytest.raises(ProtocolError, match="checksums: it was asked for 3"):
            await w.move(checksum=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache_id": 99}, "cache 99 was never announced"),
        ({"first_tensor": 5, "tensors": 2}, "tensors 5 to 6: cache 1 has 6"),
        ({"indexes": [16]}, "a piece ends at byte 238000: a tensor of cache 1 has 224000"),
        ({"indexes": [16, 0]}, "a piece ends at byte 238000"),
        ({"indexes": [2**64 - 1]}, "a piece ends at byte"),
        ({"offset": 2**63 - 1}, "a piece ends at byte"),
        ({"step": 2**63 - 1}, "a piece ends at byte"),
        ({"nbytes": 224_001, "indexes": [0, 0]}, "a piece ends at byte 224001"),
        ({"tail": 224_001, "nbytes": 224_001, "indexes": [0]}, "a piece ends at byte 224001"),
        ({"tail": 2, "nbytes": 1, "indexes": [0]}, "tail is 2: must be at most 1"),
    ],
)
async def test_nothing_outside_of_a_cache_is_summed(changes: dict[str, Any], words: str) -> None:
    good = {"first_tensor": 0, "tensors": 1, "offset": 0, "step": BLOCK, "nbytes": BLOCK, "tail": BLOCK, "indexes": [1]}
    async with way("pull") as w:
        await w.move([0], [0])
        link = inside(w.decoder.datadist).links.find(1)

        async def ask(**fields: Any) -> Digests:
            def question(call: int) -> Digest:
                return Digest(**{"cache_id": 1, **good, **fields, "call": call, "seconds": 5.0})

            with anyio.fail_after(20), link.session.questions.open(question, Digests, checksums=1) as asked:
                await asked.answered.wait()
            assert isinstance(asked.answer, Digests)
            return asked.answer

        answer = await ask(**changes)
        assert answer.status != LLMStatusCode.LLM_SUCCESS
        assert words in answer.reason
        assert link.session.is_ready
        assert (await ask()).status == LLMStatusCode.LLM_SUCCESS
