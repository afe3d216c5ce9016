"""What the pools are made of: memory in turn, and threads for calls that may hang."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from aiodatadist.context_caching.engines.arena import Arena
from aiodatadist.context_caching.engines.buffers import Buffers
from aiodatadist.context_caching.engines.calls import Calls, Refused
from aiodatadist.context_caching.engines.lending import Budget
from aiodatadist.context_caching.engines.redis_nodes import parse_nodes

KIB = 1024


async def test_nobody_overtakes_and_a_cancelled_wait_lets_the_next_one_have_its_turn() -> None:
    budget, order = Budget(10), []
    await budget.take(8)

    async def take(name: str, nbytes: int) -> None:
        await budget.take(nbytes)
        order.append(name)

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as impatient:
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(take, "impatient", 10)
                await anyio.lowlevel.checkpoint()
                group.start_soon(take, "large", 9)
                await anyio.lowlevel.checkpoint()
                group.start_soon(take, "small", 1)  # there is room, but not its turn
                await anyio.wait_all_tasks_blocked()
                assert order == []
                impatient.cancel()
        await anyio.wait_all_tasks_blocked()
        assert order == []
        budget.give(8)
    assert order == ["large", "small"]
    assert budget.free == 0


async def test_an_arena_lends_everything_again_however_it_was_cut() -> None:
    arena = Arena(64 * KIB)
    sizes = [1, 4 * KIB, 9 * KIB, 20 * KIB]
    assert arena.fitting([*sizes, 24 * KIB, 4 * KIB]) == [True, True, True, True, False, True]
    pieces = await arena.lend(sizes)
    spans = sorted((piece.address, piece.address + piece.nbytes) for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for piece in (pieces[2], pieces[0], pieces[3], pieces[1]):
        piece.release()
        piece.release()
    (whole,) = await arena.lend([60 * KIB])
    with pytest.raises(ValueError, match="another pool"):
        whole.taken(Arena(64 * KIB))
    taken = whole.taken(arena)
    whole.release()
    taken.view()[:] = b"x" * 60 * KIB
    with pytest.raises(ValueError, match="released"):
        whole.view()


async def test_buffers_are_used_again_unless_somebody_may_still_read_them() -> None:
    buffers = Buffers(10 * KIB)
    first, second = await buffers.lend([4 * KIB, 4 * KIB])
    first.view()[:] = b"1" * 4 * KIB
    second.view()[:] = b"2" * 4 * KIB
    kept = second.view()
    second.is_idle = False
    first.release()
    second.release()
    again = await buffers.lend([4 * KIB, 4 * KIB])
    assert [buffer.view()[0] for buffer in again] == [ord("1"), 0]
    assert kept == b"2" * 4 * KIB
    for buffer in again:
        buffer.release()
    (whole,) = await buffers.lend([10 * KIB])  # what is kept of other sizes has gone
    assert (buffers._kept_bytes, whole.nbytes) == (0, 10 * KIB)


class Hanging:
    """Calls that return when they are told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.over = 0
        self.all_over = anyio.Event()

    def count(self) -> None:
        self.over += 1
        if self.over == 3:
            self.all_over.set()

    def call(self) -> str:
        self.go_on.wait()
        return "done"


async def abandon(call: Callable[[], object], calls: Calls, peer: str, over: Callable[[], object]) -> None:
    with anyio.move_on_after(0.01):
        await calls.run(peer, call, over)
        raise AssertionError("it did not hang")


async def test_a_peer_that_hangs_has_its_share_of_threads_and_no_more() -> None:
    calls, hanging, fine = Calls(4, 2), Hanging(), Hanging()
    fine.go_on.set()
    for _ in range(2):
        await abandon(hanging.call, calls, "hangs", hanging.count)
    with pytest.raises(Refused):
        await calls.run("hangs", hanging.call, hanging.count)
    assert hanging.over == 1, "the refused one only: the others are under way"
    for _ in range(5):
        assert await calls.run("works", fine.call, fine.count) == "done"
    assert fine.over == 5
    assert not await calls.aclose(0.05)
    hanging.go_on.set()
    with anyio.fail_after(5):
        await hanging.all_over.wait()
    assert (calls.running, calls.abandoned) == (0, 0)


@pytest.mark.usefixtures("no_leaks")
async def test_calls_give_what_they_give_and_their_threads_end() -> None:
    calls, threads = Calls(3, 3), threading.active_count()

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await calls.run("peer", fail, lambda: None)
    results: list[int] = []

    async def run(number: int) -> None:
        results.append(await calls.run("peer", lambda: number, lambda: None))

    async with anyio.create_task_group() as group:
        for number in range(50):
            group.start_soon(run, number)
    assert sorted(results) == list(range(50))
    assert threading.active_count() <= threads + 3
    assert await calls.aclose(5)
    assert threading.active_count() == threads


def test_what_a_cluster_says_of_itself() -> None:
    view = parse_nodes(
        "a 10.0.0.1:6379@16379,kv-1.example myself,master - 0 0 1 connected 0-5460 [93->-b]\n"
        "b 10.0.0.2:6379@16379 master,fail - 1 0 2 disconnected 5461-10922 10930\n"
        "c 10.0.0.3:6379@16379 slave a 0 0 1 connected\n"
        "d :0@0 master,noaddr - 1 0 2 disconnected\n"
        "e :6380@16380 master - 0 0 3 connected 16383\n",
        "10.0.0.9",
    )
    assert [view.owners[slot] for slot in (0, 5460, 5461, 10930, 10929, 16383)] == [
        ("kv-1.example", 6379),
        ("kv-1.example", 6379),
        ("10.0.0.2", 6379),
        ("10.0.0.2", 6379),
        None,
        ("10.0.0.9", 6380),
    ]
    assert view.failed == {("10.0.0.2", 6379)}


async def test_a_look_that_hangs_holds_up_no_call_that_has_returned() -> None:
    calls, go_on, over = Calls(1, 1), threading.Event(), []

    async def look() -> None:
        go_on.set()
        await anyio.sleep_forever()

    with anyio.fail_after(5):
        assert await calls.run("peer", lambda: go_on.wait(5), lambda: over.append(1), look, 0.01)
    assert over == [1]
    assert await calls.aclose(5)


async def test_a_look_that_fails_ends_the_wait() -> None:
    calls, go_on = Calls(1, 1), threading.Event()

    async def look() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await calls.run("peer", lambda: go_on.wait(5), lambda: None, look, 0.01)
    assert calls.abandoned == 1
    go_on.set()
    assert await calls.aclose(5)
