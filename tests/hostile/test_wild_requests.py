"""A linked peer that asks for what it was not granted, in both transfer modes: no byte is read, and none is written."""

from __future__ import annotations

import ctypes
import errno
import random
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import pytest

from aiodatadist import Cache, CacheDesc, DataType, LLMException
from aiodatadist._device import Program
from aiodatadist._link import Link
from aiodatadist._link.transfers.responder import Responder
from aiodatadist._values.grid import Grid
from aiodatadist._wire.messages import Grant, KeyName, Pull
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster, verify
from tests.hostile.wild_counts import GATE, NIGHTLY
from tests.keys import HEX, folder_of, policy_in

KEY = f"decode {HEX}"
DESC = CacheDesc(1, [64, 4096], DataType.DT_UINT8)
COUNTS = [pytest.param(GATE, id="gate"), pytest.param(NIGHTLY, marks=pytest.mark.nightly, id="nightly")]
PROT_READ, PROT_WRITE = 1, 2
libc = ctypes.CDLL(None, use_errno=True)
Kind = Literal["blocks", "request", "prefix", "id", "address"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WINDOW = 512
"""Requests between two answers: an owner accepts some thousands at a time."""


class Ends(NamedTuple):
    """An owner (1), a peer (2) that may read one cache of it, and a key that is for others."""

    owner: Cluster
    peer: Cluster
    mine: Cache
    theirs: dict[str, Cache]

    @property
    def link(self) -> Link:
        link = inside(self.peer.datadist).links.peek(1)
        assert link is not None
        return link

    def untouched(self) -> None:
        verify(self.peer.memory(self.mine), self.mine, {})
        for cache in self.theirs.values():
            verify(self.owner.memory(cache), cache, {})
        assert sum(link.served_bytes for link in self.owner.datadist.statistics().links) == 0


@asynccontextmanager
async def ends_of(tmp_path: Path, **options: Any) -> AsyncIterator[Ends]:
    ours, theirs = folder_of(tmp_path / "ours", KEY), folder_of(tmp_path / "theirs", KEY)
    may = {"match": {"key": "decode"}, "may": ["link", "read", "write"]}
    policy_in(ours, {"version": 1, "clusters": [may]})
    async with (
        open_cluster(1, trust=ours, **options) as owner,
        open_cluster(2, device_id=1, trust=theirs, **options) as peer,
    ):
        caches = {
            "readers": await owner.blocks(DESC, 1, readers={3}, writers={3}),
            "closed": await owner.blocks(DESC, 2, readers=(), writers=()),
            "readable": await owner.blocks(DESC, 3, writers=()),
        }
        mine = await peer.blocks(DESC)
        assert (await peer.datadist.link_clusters([cluster_info(owner)], 5000)).errors == (None,)
        await owner.datadist.wait_linked(2)
        yield Ends(owner, peer, mine, caches)


# ---- one-sided: through the channel itself, past all that an honest peer asks first ----


def wild_ranges(chance: random.Random, ends: Ends, count: int) -> Iterator[tuple[str, int, int]]:
    """Yield a direction, an address of the owner's, and a number of bytes that the peer may not move there."""
    own = {name: (cache.tensor_addrs[0], DESC.size) for name, cache in ends.theirs.items()}
    for _ in range(count):
        direction, name = chance.choice(("get", "put")), chance.choice(list(own))
        base, size = own[name]
        nbytes = chance.choice((1, 64, 4096, 4097, size))
        address = chance.choice(
            (base, base + size - 1, base - 1, base + chance.randrange(size), chance.getrandbits(47))
        )
        if direction == "get" and name == "readable" and base <= address and address + nbytes <= base + size:
            direction = "put"
        yield direction, address, nbytes


def program_of(ends: Ends, channel: Any, direction: str, address: int, nbytes: int) -> Program:
    program, grid = Program(), grid_of(ends.mine.tensor_addrs[0], address, nbytes)
    (channel.add_get if direction == "get" else channel.add_put)(program, grid)
    return program


async def is_refused(ends: Ends, channel: Any, stream: Any, direction: str, address: int, nbytes: int) -> bool:
    try:
        program = program_of(ends, channel, direction, address, nbytes)
        return await fails(stream, program)
    except LLMException:
        return True


async def fails(stream: Any, program: Program) -> bool:
    try:
        transfer = stream.submit(program, 10)
        await transfer.wait()
    except LLMException:
        return True
    return transfer.error is not None


def grid_of(local: int, remote: int, nbytes: int) -> Grid:
    zero = array("Q", [0])
    return Grid(array("Q", [local]), array("Q", [remote]), zero, zero, nbytes, nbytes, nbytes, nbytes)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("transport", ["hccl", "loopback"])
async def test_no_wild_range_is_moved_through_a_channel(count: int, transport: str, tmp_path: Path) -> None:
    async with ends_of(tmp_path, transport=transport) as ends:
        channel, stream = ends.link.session.channels.current.channel, ends.peer.datadist.device.open_stream("wild")
        try:
            for direction, address, nbytes in wild_ranges(random.Random(count), ends, count):
                assert await is_refused(ends, channel, stream, direction, address, nbytes), (direction, address, nbytes)
            ends.untouched()
            base = ends.theirs["readable"].tensor_addrs[0]
            assert not await is_refused(ends, channel, stream, "get", base, 1), "what the peer may read is reached"
            verify_first(ends)
        finally:
            await stream.aclose()


async def test_in_request_response_mode_nothing_is_shown_that_the_peer_may_only_read(tmp_path: Path) -> None:
    async with ends_of(tmp_path, enable_remote_cache_accessible=False) as ends:
        channel, stream = ends.link.session.channels.current.channel, ends.peer.datadist.device.open_stream("wild")
        try:
            for direction in ("get", "put"):
                for cache in ends.theirs.values():
                    assert await is_refused(ends, channel, stream, direction, cache.tensor_addrs[0], 1)
            ends.untouched()
        finally:
            await stream.aclose()


@pytest.mark.parametrize("direction", ["get", "put"])
async def test_no_request_that_was_kept_is_carried_out_after_the_end_of_its_link(
    direction: str, tmp_path: Path
) -> None:
    async with ends_of(tmp_path) as ends:
        channel, stream = ends.link.session.channels.current.channel, ends.peer.datadist.device.open_stream("kept")
        try:
            kept = program_of(ends, channel, direction, ends.theirs["readable"].tensor_addrs[0], 4096)
            await ends.peer.datadist.unlink_clusters([cluster_info(ends.owner)], 5000)
            assert await fails(stream, kept)
            ends.untouched()
        finally:
            await stream.aclose()


async def test_what_may_be_read_is_mapped_from_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The mapping of the peer, which is in this process here, refuses to become writable, and has the region's length."""
    before = read_only_mappings()
    async with ends_of(tmp_path):
        found = read_only_mappings() - before
        assert [last - first for first, last in found] == [DESC.size]
        for first, last in found:
            assert libc.mprotect(ctypes.c_void_p(first), last - first, PROT_READ | PROT_WRITE) == -1
            assert ctypes.get_errno() == errno.EACCES
    assert read_only_mappings() == before


def read_only_mappings() -> set[tuple[int, int]]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines()]
    places = [line[0].split("-") for line in lines if "/memfd:softnpu" in line and line[1] == "r--s"]
    return {(int(first, 16), int(last, 16)) for first, last in places}


def verify_first(ends: Ends) -> None:
    """Check that the first byte, and no other, came from the cache that the peer may read, and put the old one back."""
    memory, theirs = ends.peer.memory(ends.mine).view(), ends.owner.memory(ends.theirs["readable"]).view()
    assert memory[0] == theirs[0]


# ---- request/response: messages that an honest peer would not send ----


def wild_pulls(chance: random.Random, ends: Ends, count: int) -> Iterator[Pull]:
    """Yield requests for caches of others, and requests that fit no cache: wild names, ids, slots, blocks and targets."""
    ids = [cache.cache_id for cache in ends.theirs.values()]
    for call in range(10**6, 10**6 + count):
        kind: Kind = chance.choice(KINDS)
        number = chance.choice((*ids[:2], 0, 2**40, chance.getrandbits(63)))
        if kind == "address":
            number = chance.choice([cache.tensor_addrs[0] for cache in list(ends.theirs.values())[:2]])
        model = chance.choice((1, 2, 7, 2**63)) if kind == "blocks" else 0
        blocks = [chance.choice((0, 63, 64, 2**62)) for _ in range(chance.randrange(1, 4))]
        yield Pull(
            call=call,
            name=KeyName(kind=kind, id=0 if kind == "blocks" else number, model_id=model),
            target=chance.choice((ends.mine.cache_id, ends.mine.cache_id, 98, 99)),
            slot=chance.choice((0, 1, 2**31)),
            src_blocks=blocks,
            dst_blocks=list(range(len(blocks))),
            src_layers=None,
            dst_layers=None,
            tensors_per_layer=1,
            dst_slot=0,
            nbytes=0,
            seconds=5.0,
            priority=1,
        )


@pytest.mark.parametrize("count", COUNTS)
async def test_no_wild_request_is_served(count: int, tmp_path: Path) -> None:
    async with ends_of(tmp_path, enable_remote_cache_accessible=False) as ends:
        session = ends.link.session
        entry = inside(ends.peer.datadist).registry.table.find(ends.mine.cache_id)
        assert entry is not None
        session.peer_leases.told(entry)
        session.post(Grant(cache=entry.message()))
        for number, pull in enumerate(wild_pulls(random.Random(count), ends, count)):
            session.post(pull)
            if number % WINDOW == 0:
                await session.ping()
        await session.ping()
        assert session.is_ready, "refusals end no link"
        ends.untouched()


async def test_after_the_end_of_a_link_no_request_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Pull] = []
    async with ends_of(tmp_path, enable_remote_cache_accessible=False) as ends:
        session = ends.link.session
        await ends.peer.datadist.unlink_clusters([cluster_info(ends.owner)], 5000)
        monkeypatch.setattr(Responder, "begin", lambda _, message: served.append(message))
        for pull in wild_pulls(random.Random(1), ends, 100):
            session.post(pull)
        assert served == []
        ends.untouched()
