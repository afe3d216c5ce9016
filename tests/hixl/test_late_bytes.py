"""A transfer that was cancelled, ran out of time or was disconnected writes no byte after it has ended.

HIXL's own connector warns that a read which it gave up may still write into memory that belongs to others by then. Here the
end of a transfer is told once no byte of it can land: its memory is filled at that moment, and looked at later.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from anyio.lowlevel import checkpoint

from aiodatadist import CacheTask, NotLinked, PeerLost, TransferTimeout
from aiodatadist.hixl import MemType, NotifyDesc, Status, TransferOp, TransferOpDesc, status_of
from aiodatadist.testing import soft_hold
from tests.faults.test_held_transfers import LETS_GO, is_under_way_at
from tests.held import PULL, PUSH, HeldTransfer, held_transfer
from tests.hixl.pairs import SIZE, Bytes, End, connected, descs
from tests.profiles import IS_NIGHT
from tests.strict.marks import STRICT

READ, WRITE = TransferOp.READ, TransferOp.WRITE
ops = pytest.mark.parametrize("op", [READ, WRITE])
HELD = {READ: PULL, WRITE: PUSH}
LARGE = 4 * SIZE
ROUNDS = 2500 if IS_NIGHT else 60
"""Transfers of each way and operation that are stopped at random. Two ways and two operations are 10^4 at night."""


async def ended(task: CacheTask) -> Status | None:
    """Wait for a transfer; return its status, or None if it was cancelled."""
    try:
        await task
    except asyncio.CancelledError:
        return None
    except Exception as error:
        return status_of(error)
    return Status.SUCCESS


async def check_stopped(server: End, client: End, op: TransferOp, target: memoryview) -> None:
    """Fill the memory of a transfer that has ended, use the connection, and check that nothing else came."""
    target[:] = b"\xee" * SIZE
    await client.engine.transfer(server.name, op, descs(client, server, (0, 0, 100)))
    await client.engine.send_notify(server.name, NotifyDesc("behind", "it"))
    assert bytes(target[100:]) == b"\xee" * (SIZE - 100)


async def let_go(task: CacheTask, held: HeldTransfer, also: Callable[[], bool] = lambda: True) -> None:
    """Let the device stop a transfer that stands half-way: nothing is told of its end before the device has let go."""
    await held.told_to_stop()
    assert also()
    assert not task.done()
    with soft_hold(LETS_GO) as quiet:
        held.let_abort()
        assert await is_under_way_at(quiet.arrived, task), "told while the device was copying"
        assert also()
        held.release()


Stop = Callable[[End, End, CacheTask, HeldTransfer], Awaitable[Status | None]]


async def by_cancelling(server: End, client: End, task: CacheTask, held: HeldTransfer) -> Status | None:
    task.cancel()
    await let_go(task, held)
    return await ended(task)


async def by_its_waiter(server: End, client: End, task: CacheTask, held: HeldTransfer) -> Status | None:
    waiter = asyncio.ensure_future(ended(task))
    await checkpoint()
    waiter.cancel()
    await let_go(task, held)
    return await waiter


async def by_disconnecting(server: End, client: End, task: CacheTask, held: HeldTransfer) -> Status | None:
    leaving = asyncio.ensure_future(client.engine.disconnect(server.name, 20_000))
    await let_go(task, held, lambda: not leaving.done())
    await leaving
    assert task.done()
    await client.engine.connect(server.name, 5000)
    return await ended(task)


@ops
@pytest.mark.parametrize(
    ("stop", "status"), [(by_cancelling, None), (by_its_waiter, None), (by_disconnecting, Status.FAILED)]
)
async def test_a_transfer_that_is_stopped_half_way_has_ended_when_no_byte_can_land(
    op: TransferOp, stop: Stop, status: Status | None
) -> None:
    async with connected() as (server, client):
        ranges = descs(client, server, (0, 0, SIZE // 2), (SIZE // 2, SIZE // 2, SIZE // 2))
        await client.engine.transfer(server.name, op, ranges)
        with held_transfer(HELD[op]) as held:
            task = client.engine.transfer(server.name, op, ranges)
            await held.arrived()
            assert await stop(server, client, task, held) is status
        await check_stopped(server, client, op, client.view if op is READ else server.view)


@ops
async def test_a_transfer_that_runs_out_of_time_has_ended_when_no_byte_can_land(op: TransferOp) -> None:
    async with connected() as (server, client):
        ranges = descs(client, server, (0, 0, SIZE))
        await client.engine.transfer(server.name, op, ranges)
        with held_transfer(HELD[op]) as held:
            task = client.engine.transfer(server.name, op, ranges, timeout=0.05)
            await let_go(task, held)
            with pytest.raises(TransferTimeout):
                await task
        await check_stopped(server, client, op, client.view if op is READ else server.view)


@pytest.mark.parametrize("why", ["cancelled", "late"])
async def test_a_staged_transfer_that_is_stopped_has_ended_when_no_byte_can_land(why: str) -> None:
    """A buffer is not used again, and the caller's memory not written, while the device may still touch the buffer."""
    async with connected(BufferPool="1:1") as (server, client):
        mine = Bytes()
        ranges = [TransferOpDesc(mine.address, server.memory.address, SIZE)]
        await client.engine.transfer(server.name, READ, ranges)
        mine.view[:] = b"\xee" * SIZE
        with held_transfer(PULL) as held:
            task = client.engine.transfer(server.name, READ, ranges, timeout=0.05 if why == "late" else None)
            await held.arrived()
            if why == "cancelled":
                task.cancel()
            await let_go(task, held)
            assert await ended(task) is (Status.TIMEOUT if why == "late" else None)
        assert bytes(mine.view) == b"\xee" * SIZE
        await client.engine.transfer(server.name, READ, [TransferOpDesc(mine.address, server.memory.address, 100)])
        assert mine.view[:100] == server.view[:100]
        assert bytes(mine.view[100:]) == b"\xee" * (SIZE - 100)


async def test_memory_of_a_finalized_engine_is_the_callers_again() -> None:
    async with connected() as (server, client):
        ranges = descs(client, server, (0, 0, SIZE))
        await client.engine.transfer(server.name, READ, ranges)
        with held_transfer(PULL) as held:
            task = client.engine.transfer(server.name, READ, ranges)
            await held.arrived()
            leaving = asyncio.ensure_future(client.engine.finalize())
            await let_go(task, held, lambda: not leaving.done())
            await leaving
        assert task.done()
        assert status_of(task.exception()) is Status.FAILED
        client.view[:] = bytes(SIZE)
        await server.engine.finalize()
        assert bytes(client.view) == bytes(SIZE)


# ---- at random ----


@dataclass
class Areas:
    """Parts of the memory that transfers write into, one after the other. What has ended is filled, and checked later."""

    target: memoryview
    count: int = 4
    filled: dict[int, int] = field(default_factory=dict)
    marks: int = 0

    @property
    def nbytes(self) -> int:
        return LARGE // self.count

    def part(self, number: int) -> memoryview:
        return self.target[number * self.nbytes : (number + 1) * self.nbytes]

    def fill(self, number: int) -> None:
        """Fill the area of a transfer that has ended."""
        self.marks = self.marks % 255 + 1
        self.part(number)[:] = bytes([self.marks]) * self.nbytes
        self.filled[number] = self.marks

    def check(self, number: int) -> None:
        """Check that no byte came into an area since it was filled."""
        mark = self.filled.get(number)
        if mark is not None:
            assert bytes(self.part(number)) == bytes([mark]) * self.nbytes, f"late bytes in area {number}"


async def stop_at_random(draw: random.Random, task: CacheTask, server: End, client: End) -> None:
    """Let the loop turn some times, and stop a transfer in one of the ways in which one can be stopped."""
    waiter = asyncio.ensure_future(ended(task))
    for _ in range(draw.choice([1, 1, 1, 2, 3, 5, 10, 20, 60])):
        await checkpoint()
    match draw.randrange(20):
        case 0:
            with suppress(NotLinked, PeerLost):
                await client.engine.disconnect(server.name, 20_000)
            assert task.done()
            await client.engine.connect(server.name, 20_000)
        case 1 | 2 | 3:
            pass  # it ends by itself, or has a time limit
        case number if number % 2:
            waiter.cancel()
        case _:
            task.cancel()
    await waiter


@ops
@pytest.mark.parametrize("transport", ["hccl", "tcp"])
@pytest.mark.timeout(60 + ROUNDS)
async def test_no_byte_comes_late_whenever_transfers_are_stopped(transport: str, op: TransferOp) -> None:
    draw = random.Random(f"{transport} {op.name}")
    rounds = ROUNDS // 10 if STRICT and IS_NIGHT else ROUNDS // 4 if STRICT else ROUNDS
    async with connected(transport, BufferPool="2:1") as (server, client):
        mine, theirs, staged = (Bytes(LARGE) for _ in range(3))  # all zero, and no mark is
        await client.engine.register_mem(mine.desc, MemType.MEM_DEVICE)
        await server.engine.register_mem(theirs.desc, MemType.MEM_DEVICE)
        areas = Areas((mine if op is READ else theirs).view)
        statuses: Counter[Status | None] = Counter()
        for turn in range(rounds):
            number = turn % areas.count
            areas.check(number)
            step, at = draw.choice([16384, 65536, 1 << 20]), number * areas.nbytes
            starts = list(range(at, at + areas.nbytes, step))
            draw.shuffle(starts)
            # a WRITE may come from memory that is not registered; another test reads into such memory
            local = staged if op is WRITE and draw.random() < 0.2 else mine
            ranges = [TransferOpDesc(local.address + a, theirs.address + a, step) for a in starts]
            timeout = draw.choice([None, None, 0.0005, 0.002])
            try:
                task = client.engine.transfer(server.name, op, ranges, timeout=timeout)
            except (
                NotLinked,
                PeerLost,
            ):  # over TCP a peer that does not confirm in time that it has stopped loses the link
                await client.engine.connect(server.name, 20_000)
                task = client.engine.transfer(server.name, op, ranges, timeout=timeout)
            await stop_at_random(draw, task, server, client)
            statuses[await ended(task)] += 1
            areas.fill(number)
        with suppress(NotLinked, PeerLost):
            await client.engine.send_notify(server.name, NotifyDesc("behind", "it"), 20_000)
        for number in range(areas.count):
            areas.check(number)
    print(f"{transport} {op.name}: {dict(statuses)}")
