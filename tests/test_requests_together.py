"""Requests that differ in their blocks alone travel in one message, and each is served, stopped and answered for itself."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LinkError,
    ParamInvalid,
    ProtocolError,
    TransferPriority,
)
from aiodatadist._cluster.engine import Engine
from aiodatadist._link import TransferSpec
from aiodatadist._link.control import wire
from aiodatadist._link.control.served_requests import ServedRequests
from aiodatadist._link.transfers import pull_requests
from aiodatadist._link.transfers.pull_requests import MOST_BLOCKS, WINDOW
from aiodatadist._values.foreign import SMALL
from aiodatadist._values.selection import BlockParts, Layers, Selection
from aiodatadist._wire import frames
from aiodatadist._wire.frames import HEAD, MAGIC, VERSION, Decoder, checked, encode
from aiodatadist._wire.messages import (
    MAX_INDEXES,
    MAX_TOGETHER,
    TOGETHER_SINCE,
    Hello,
    Message,
    PartNumbers,
    Pull,
    Pulled,
)
from aiodatadist.testing import Cluster, inside, linked_pair, verify
from tests.held import PUSH, held_transfer, there_and_back
from tests.strict.marks import STRICT
from tests.test_crowd import HeldRequests, pulls
from tests.unit.wire.examples import pull

DESC = CacheDesc(1, [16, 64], DataType.DT_UINT8)
MANY = 100
short = pytest.mark.skipif(STRICT == "roce", reason="RoCE: every transfer takes its turn in one stream")


class Said:
    """Messages that both ends of this process send from here on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._messages = list[Message]()
        said = self

        def noted(message: Message, *terms: Any) -> bytes:
            said._messages.append(message)
            return encode(message, *terms)

        monkeypatch.setattr(wire, "encode", noted)

    def requests(self) -> list[Pull]:
        return [message for message in self._messages if isinstance(message, Pull)]

    def answers(self) -> list[Pulled]:
        return [message for message in self._messages if isinstance(message, Pulled)]


@pytest.fixture(autouse=True)
def one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a turn of the loop make all requests that it may, however slow the machine is."""
    monkeypatch.setattr(pull_requests, "SLICE", 600.0)


@pytest.fixture
async def requesting() -> AsyncIterator[tuple[Cluster, Cluster, Cache, Cache]]:
    """Link a pair in which the second cluster asks the first one to write, and has been told of the destination."""
    async with linked_pair(DESC, enable_remote_cache_accessible=False, sync_kv_timeout=20_000) as made:
        await made[1].datadist.cache_manager.pull_blocks(BlocksCacheKey(1), made[3], [0], [0])
        yield made


# ---- both ends ----


@short
async def test_eight_requests_are_one_message_and_so_are_their_answers(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder, _, cache = requesting
    said, manager = Said(monkeypatch), decoder.datadist.cache_manager
    tasks = [manager.pull_blocks(BlocksCacheKey(1), cache, [(7 * i) % 16], [i % 16]) for i in range(MANY)]
    for task in tasks:
        assert await task == (64, 1, *task.result()[2:])
    assert sum(1 + len(message.also) for message in said.requests()) == MANY
    assert len(said.requests()) == ceil(MANY / MAX_TOGETHER)
    assert sum(1 + len(message.also) for message in said.answers()) == MANY
    assert len(said.answers()) == len(said.requests())
    verify(decoder.memory(cache), cache, [(0, i, 1, (7 * i) % 16) for i in range(16)])
    assert decoder.datadist.figures().answers_late == 0


@pytest.mark.parametrize("minor", range(TOGETHER_SINCE))
async def test_an_older_version_says_and_hears_one_request_in_a_message(
    minor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each end takes the other for one of that version, which would refuse the field."""
    own = Engine.hello

    def older(self: Engine, has_key: bool, peer: int | None) -> Hello:
        return own(self, has_key, peer).model_copy(update={"minor": minor})

    monkeypatch.setattr(Engine, "hello", older)
    said = Said(monkeypatch)
    async with linked_pair(DESC, enable_remote_cache_accessible=False, sync_kv_timeout=20_000) as (
        _,
        decoder,
        _,
        cache,
    ):
        for task in pulls(decoder, cache, MANY):
            await task
    assert len(said.requests()) == len(said.answers()) == MANY
    assert not any(message.also for message in said.requests())
    assert not any(message.also for message in said.answers())


@short
async def test_a_request_that_is_wrong_fails_alone(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the peer knows how many blocks its cache has."""
    _, decoder, _, cache = requesting
    said, manager = Said(monkeypatch), decoder.datadist.cache_manager
    sources = [0, 1, 999, 3]
    tasks = [manager.pull_blocks(BlocksCacheKey(1), cache, [block], [i]) for i, block in enumerate(sources)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) is ParamInvalid for result in results] == [False, False, True, False]
    assert len(said.requests()) == 1
    assert [len(message.also) for message in said.answers()] == [0, 2]
    verify(decoder.memory(cache), cache, [(0, i, 1, i) for i in (0, 1, 3)])


async def test_a_request_of_several_is_cancelled_alone(requesting: tuple[Cluster, Cluster, Cache, Cache]) -> None:
    prompt, decoder, _, cache = requesting
    with held_transfer(PUSH) as held:
        first, *tasks = pulls(decoder, cache, 4)
        await held.arrived()
        await there_and_back(decoder, prompt)
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert not any(task.done() for task in (first, tasks[0], tasks[2]))
        held.release()
        for task in (first, tasks[0], tasks[2]):
            await task
    assert inside(decoder.datadist).links.find(1).session.is_ready


async def test_a_message_of_requests_that_comes_twice_is_served_once(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, decoder, _, cache = requesting
    said = Said(monkeypatch)
    for task in pulls(decoder, cache, 5):
        await task
    served, answers = prompt.datadist.figures().transfers["served"].succeeded, len(said.answers())
    message = said.requests()[0]
    assert len(said.requests()) == 1
    inside(decoder.datadist).links.find(1).session.post(message)
    await there_and_back(decoder, prompt)
    assert prompt.datadist.figures().transfers["served"].succeeded == served
    assert len(said.answers()) == answers


async def test_requests_of_a_message_wait_for_the_device_each_in_its_turn(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answer a request when it ends, if it does not end in the call that begins it."""
    prompt, decoder, _, cache = requesting
    said = Said(monkeypatch)
    with held_transfer(PUSH) as held:
        tasks = pulls(decoder, cache, 3)
        await held.arrived()
        await there_and_back(decoder, prompt)
        assert (len(said.requests()), said.answers()) == (1, [])
        held.release()
        for task in tasks:
            await task
    assert sorted(message.call for message in said.answers()) == [each.call for each in said.requests()[0].each()]


async def test_requests_of_one_turn_are_few_blocks_in_a_message(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder, _, cache = requesting
    held, each = HeldRequests(monkeypatch), 32
    monkeypatch.setattr(pull_requests, "MOST_BLOCKS", 3 * each + 1)
    said, manager = Said(monkeypatch), decoder.datadist.cache_manager
    tasks = [manager.pull_blocks(BlocksCacheKey(1), cache, range(16), range(16)) for _ in range(WINDOW)]
    await held.have_come(WINDOW)
    held.serve()
    for task in tasks:
        await task
    assert max(message.count_blocks() for message in said.requests()) == 3 * each
    assert len(said.requests()) == ceil(WINDOW / 3)


async def test_a_request_that_is_too_long_to_be_said_fails_alone_and_at_once(
    requesting: tuple[Cluster, Cluster, Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks may have many parts, whose numbers make the message long."""
    _, decoder, _, cache = requesting
    local = inside(decoder.datadist).registry.local(cache, "cache")
    link, parts = inside(decoder.datadist).links.find(1), range(64)
    few = array("Q", [0])
    selection = Selection(Layers(), few, few, parts=BlockParts(1, parts, parts))
    long = TransferSpec(local, BlocksCacheKey(1), selection, "get", 20.0, is_request=True)
    monkeypatch.setattr(frames, "MAX_BODY", 600)
    transfer = link.transfers.start(long, "pull_leased")
    await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [1], [1])
    assert transfer.is_done
    assert isinstance(transfer.error, ParamInvalid)
    assert "the limit is 600" in str(transfer.error)


# ---- which requests are alike ----


def specs(cache: Cache, other: Cache, decoder: Cluster) -> dict[str, TransferSpec]:
    """Return a request, and others that differ from it in one field each."""
    local = inside(decoder.datadist).registry.local
    spec = TransferSpec(local(cache, "cache"), BlocksCacheKey(1), Selection(), "get", 20.0, is_request=True)
    selection = spec.selection
    return {
        "itself": spec,
        "cache": replace(spec, entry=local(other, "other")),
        "key": replace(spec, key=BlocksCacheKey(1, 5)),
        "seconds": replace(spec, seconds=10.0),
        "priority": replace(spec, priority=TransferPriority.CRITICAL),
        "checksum": replace(spec, checksum=True),
        "layers": replace(spec, selection=replace(selection, layers=Layers(range(1), range(1), 1))),
        "source layers": replace(spec, selection=replace(selection, layers=Layers(range(1), None))),
        "destination layers": replace(spec, selection=replace(selection, layers=Layers(None, range(1)))),
        "tensors of a layer": replace(spec, selection=replace(selection, layers=Layers(tensors_per_layer=1))),
        "slot": replace(spec, selection=replace(selection, dst_slot=1)),
        "bytes": replace(spec, selection=replace(selection, nbytes=64)),
        "offsets": replace(spec, selection=replace(selection, offsets=(0, 0))),
    }


async def test_requests_that_differ_in_anything_but_blocks_do_not_share_a_message(
    requesting: tuple[Cluster, Cluster, Cache, Cache],
) -> None:
    _, decoder, _, cache = requesting
    each = specs(cache, await decoder.blocks(DESC, model_id=7), decoder)
    for mine in each.values():
        for theirs in each.values():
            is_same = mine.message(1) == theirs.message(1)
            assert is_same is (mine is theirs)
            assert mine.is_like(theirs) is (is_same and not mine.checksum)


async def test_each_gets_its_own_bytes_where_destinations_and_priorities_alternate(
    requesting: tuple[Cluster, Cluster, Cache, Cache],
) -> None:
    _, decoder, _, cache = requesting
    other, manager = await decoder.blocks(DESC, model_id=7), decoder.datadist.cache_manager
    tasks = [
        manager.pull_blocks(BlocksCacheKey(1), into, [(i + shift) % 16], [i], priority=priority)
        for i in range(16)
        for priority, into, shift in zip(TransferPriority, (cache, other, cache), (1, 2, 1), strict=True)
    ]
    for task in tasks:
        await task
    for into, shift in ((cache, 1), (other, 2)):
        verify(decoder.memory(into), into, [(0, i, 1, (i + shift) % 16) for i in range(16)])


# ---- messages ----


def test_a_message_is_the_requests_that_it_would_have_been() -> None:
    alone = [pull(call=call, src_blocks=[call], dst_blocks=[call + 1]) for call in (3, 1, 2)]
    first, *others = alone
    message = first.model_copy(update={"also": [(each.call, each.src_blocks, each.dst_blocks) for each in others]})
    (read,) = Decoder().feed(encode(message))
    assert isinstance(read, Pull)
    assert list(read.each()) == alone


def test_the_largest_message_of_several_requests_is_small() -> None:
    """Keep messages small: large ones are parsed in another way, which takes several times as long."""
    blocks = [2**64 - 1] * (MOST_BLOCKS // MAX_TOGETHER // 2)
    message = pull(src_blocks=blocks, dst_blocks=blocks, also=[(2**63 - 1, blocks, blocks)] * (MAX_TOGETHER - 1))
    assert len(encode(message)) < SMALL


@pytest.mark.parametrize(
    "also",
    [
        [(2, [0], [0])] * MAX_TOGETHER,
        [(0, [0], [0])],
        [(2, [-1], [0])],
        [(2, [0], [2**64])],
        [(2, [0] * (MAX_INDEXES + 1), [0])],
        [(2, [0])],
        [(2, [0], [0], [0])],
        [(2.0, [0], [0])],
        [2, 3],
        {},
    ],
    ids=lambda also: str(also)[:30],
)
def test_what_is_no_list_of_requests_is_refused(also: object) -> None:
    content = checked(json.dumps({**pull().model_dump(), "also": also}).encode())
    with pytest.raises(ProtocolError, match=r"pull\.also"):
        Decoder().feed(HEAD.pack(MAGIC, VERSION, len(content)) + content)


async def test_requests_that_name_too_many_blocks_together_end_the_link(
    requesting: tuple[Cluster, Cluster, Cache, Cache],
) -> None:
    prompt, decoder, _, _ = requesting
    blocks = [0] * (2 * MAX_INDEXES // MAX_TOGETHER // 2)
    message = pull(src_blocks=blocks, dst_blocks=blocks, also=[(2, blocks, blocks)] * (MAX_TOGETHER - 1))
    assert message.count_blocks() == 2 * MAX_INDEXES
    mine, theirs = inside(decoder.datadist).links.find(1), inside(prompt.datadist).links.find(2)
    mine.session.post(message)
    await mine.session.ping()
    mine.session.post(message.model_copy(update={"src_blocks": [*blocks, 0]}))
    with pytest.raises(LinkError):
        await mine.session.ping()
    words = f"the requests of a message name {2 * MAX_INDEXES + 1} blocks: the limit is {2 * MAX_INDEXES}"
    assert words in str(await theirs.wait_closed())


async def test_parts_of_blocks_count_for_each_request_of_a_message(
    requesting: tuple[Cluster, Cluster, Cache, Cache],
) -> None:
    """Each request has the parts of the first one, and planning them takes the loop a millisecond and more."""
    prompt, decoder, _, _ = requesting
    most = 2 * MAX_INDEXES // MAX_TOGETHER // 2
    parts = PartNumbers(nbytes=64, src=[0] * (most - 1), dst=list(range(most - 1)))
    message = pull(src_blocks=[0], dst_blocks=[0], parts=parts, also=[(2, [0], [0])] * (MAX_TOGETHER - 1))
    mine, theirs = inside(decoder.datadist).links.find(1), inside(prompt.datadist).links.find(2)
    mine.session.post(message)
    await mine.session.ping()
    more = PartNumbers(nbytes=64, src=[0] * most, dst=list(range(most)))
    mine.session.post(message.model_copy(update={"parts": more}))
    with pytest.raises(LinkError):
        await mine.session.ping()
    words = (
        f"the requests of a message name {2 * MAX_INDEXES + 2 * MAX_TOGETHER} blocks: the limit is {2 * MAX_INDEXES}"
    )
    assert words in str(await theirs.wait_closed())


def test_an_answer_among_others_is_said_again_alone() -> None:
    served = ServedRequests()
    answer = Pulled(
        call=1, status=0, reason="", nbytes=64, ranges=1, also=[(2, 128, 2, 0.5, 0.25), (3, 64, 1, 0.0, 0.0)]
    )
    served.answered(answer)
    assert [served.answer(call) for call in (1, 2, 3, 4)] == [
        Pulled(call=1, status=0, reason="", nbytes=64, ranges=1),
        Pulled(call=2, status=0, reason="", nbytes=128, ranges=2, queue_seconds=0.5, transfer_seconds=0.25),
        Pulled(call=3, status=0, reason="", nbytes=64, ranges=1),
        None,
    ]
