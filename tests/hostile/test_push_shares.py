"""Shares of peers in pushed requests: what one peer wants and drops costs no other one, and little memory."""

from __future__ import annotations

import gc
import re
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from aiodatadist._adapters.ended import Ended
from aiodatadist._adapters.peer_links import LinkedPeer
from aiodatadist._adapters.push_marks import DroppedTransfers
from aiodatadist._adapters.push_messages import MAX_BLOCKS, Drop, More, PushMessage, Refused, Sent, TransferKey, Want
from aiodatadist._adapters.push_out import OutgoingPushes
from aiodatadist._adapters.regions import MAX_LAYOUT
from aiodatadist._adapters.sendings import Portion
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._values import peer_budget
from tests.hostile.vllm_names import sglang_manager
from tests.profiles import at_night

LIAR, HONEST = LinkedPeer(7, 1), LinkedPeer(8, 1)
ENGINE = LinkedPeer(9, 1)
"""With honest clients and others."""
PROMPT = "a" * 32
LAYOUT = {f"{number:064d}": "x" * 64 for number in range(MAX_LAYOUT)}


class Prefill:
    """The pushes of a prefill engine that computes nothing, what it answers, and what its engine has not taken yet."""

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self.answers: list[PushMessage] = []
        self.reads: anyio.Event | None = None
        self.told = Ended()
        sending = cast("Any", None)  # nothing is computed, so nothing is sent
        self.outgoing = OutgoingPushes(
            sending, {**LAYOUT}, 60, 60, 0, Spawner(group), lambda _: None, self._post, self._tell
        )

    def _tell(self, change: Callable[[Ended], object]) -> None:
        change(self.told)

    async def _post(self, _: LinkedPeer, message: PushMessage) -> None:
        if self.reads is not None:
            await self.reads.wait()
        self.answers.append(message)

    def take(self) -> Ended:
        taken, self.told = self.told, self.told.after()
        return taken

    async def want(self, peer: LinkedPeer, name: str, *into: int, number: int = 0, prompt: str = "") -> None:
        want = Want(
            transfer=name,
            number=number,
            prompt=prompt,
            first=0,
            into=into,
            count=len(into),
            caches=0,
            layout={**LAYOUT},
        )
        self.outgoing.want(peer, want)
        await anyio.lowlevel.checkpoint()

    async def drop(self, peer: LinkedPeer, name: str, number: int = 0, prompt: str = "") -> None:
        self.outgoing.drop(peer, Drop(transfer=name, number=number, prompt=prompt))
        await anyio.lowlevel.checkpoint()

    async def outcome(self, name: str, prompt: str = "") -> str:
        """Compute a request that no peer asks for, and return how it comes out."""
        self.outgoing.complete(TransferKey(name, prompt), name)
        while name not in self.told.outcomes:
            await anyio.lowlevel.checkpoint()
        return self.told.outcomes[name]


@asynccontextmanager
async def computing() -> AsyncIterator[Prefill]:
    async with anyio.create_task_group() as group:
        yield Prefill(group)
        group.cancel_scope.cancel()


async def test_peer_that_wants_too_much_leaves_room_for_others_and_its_oldest_wants_give_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_budget, "WANTS", 64)
    async with computing() as prefill:
        await prefill.want(HONEST, "honest", 0)
        for number in range(256):
            await prefill.want(LIAR, f"{number}", 0)
        await settled()
        gone = [str(number) for number in range(256 - 64)]
        assert [each.transfer for each in prefill.answers] == gone, "each is answered once, at once, the oldest first"
        words = "its request had not come, and it gave way to a later one: .* the limit of a peer's wants is 64"
        assert all(isinstance(each, Refused) and re.fullmatch(words, each.reason) for each in prefill.answers)
        assert "honest" in prefill.told.wanted
        assert prefill.told.counters["wants_refused"] == 256 - 64


async def flood(prefill: Prefill, count: int) -> None:
    """Open requests, as a client of an engine, for pushes that nothing computes."""
    for number in range(count):
        await prefill.want(ENGINE, f"hostile {len(prefill.answers)} {number}", 0)


@pytest.mark.parametrize("is_known", [True, False], ids=["while it is computed", "before it is known"])
async def test_wants_that_no_request_answers_let_others_of_the_same_engine_be(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A want outlasts so many others before its request comes, and any number once the request is here."""
    monkeypatch.setattr(peer_budget, "WANTS", 64)
    async with computing() as prefill:
        await flood(prefill, 200)
        for number in range(1, 6):
            name = f"honest {number}"
            await prefill.want(ENGINE, name, number=number)
            if is_known:
                prefill.outgoing.add(TransferKey(name), Portion(0, (1,)), name)
            await flood(prefill, 200 if is_known else 63)
            prefill.outgoing.complete(TransferKey(name), name)
            await settled()
            assert prefill.told.outcomes.pop(name) == "push_done"
            assert Sent(transfer=name, number=number) in prefill.answers


async def test_wants_whose_requests_are_known_count_with_their_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_budget, "WANTS", 64)
    monkeypatch.setattr(peer_budget, "WANT_BLOCKS", 128)
    async with computing() as prefill:
        for number in range(128):
            name = f"honest {number}"
            if number % 2:
                prefill.outgoing.add(TransferKey(name), Portion(7, (1,)), name)
            await prefill.want(ENGINE, name, 0)
            if not number % 2:
                prefill.outgoing.add(TransferKey(name), Portion(7, (1,)), name)
        assert prefill.told.counters["wants_refused"] == 0
        await prefill.want(ENGINE, "one more", 0)
        await settled()
        assert [each.transfer for each in prefill.answers] == ["one more"]


async def test_peer_of_a_request_whose_want_gave_way_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_budget, "WANTS", 64)
    async with computing() as prefill:
        await prefill.want(ENGINE, "late", 0)
        await flood(prefill, peer_budget.WANTS)
        assert await prefill.outcome("late") == "push_stopped"


async def test_numbers_of_blocks_that_a_peer_never_completes_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with computing() as prefill:
        monkeypatch.setattr(peer_budget, "WANT_BLOCKS", 10)
        for number in range(100):
            prefill.outgoing.more(LIAR, More(transfer=f"{number}", into=(1, 2, 3)))
        assert prefill.told.counters["wants_refused"] == 97
        await prefill.want(HONEST, "honest", *range(10))
        await prefill.want(LIAR, "too large", *range(11))
        assert [each.transfer for each in prefill.answers] == ["too large"], "and nothing gives way for it"
        await prefill.want(LIAR, "lie", 1, 2, 3, 4)
        await settled()
        assert len(prefill.answers) == 1
        assert prefill.told.counters["wants_refused"] == 97 + 1 + 1
        prefill.outgoing.lost(LIAR)
        await prefill.want(LIAR, "again", *range(10))
        await settled()
        assert "again" in prefill.told.wanted


# ---- what an engine is told of them ----


async def test_names_that_peers_want_are_bounded_until_the_engine_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_budget, "WANTS", 64)
    async with computing() as prefill:
        for number in range(1, 126):
            await prefill.want(LIAR, f"{number}", 0, number=number)
            await prefill.drop(LIAR, f"{number}", number)
        assert not prefill.told.wanted
        for number in range(126, 251):
            await prefill.want(LIAR, f"{number}", 0, number=number)
        await prefill.want(HONEST, "honest", 0)
        assert len(prefill.told.wanted) == peer_budget.WANTS + 1
        assert "honest" in prefill.told.wanted
        prefill.take()
        prefill.outgoing.lost(LIAR)
        assert len(prefill.told.unwanted) == peer_budget.WANTS
        for number in range(125):
            await prefill.want(LIAR, "again", 0, number=number + 1)
            await prefill.drop(LIAR, "again", number + 1)
        assert len(prefill.told.unwanted) == peer_budget.WANTS
        assert not prefill.told.wanted


@contextmanager
def manager_of(prefill: Prefill) -> Iterator[Any]:
    """Return SGLang's manager over the service."""
    with sglang_manager() as module:

        class Manager(module.AioDataDistKVManager):  # type: ignore[misc,name-defined]  # found at run time
            def __init__(self) -> None:
                self.service = SimpleNamespace(take=prefill.take)
                self._wanted, self._followed, self._outcomes = set[str](), set[str](), dict[str, str]()

            def __len__(self) -> int:
                return len(self._wanted) + len(self._outcomes)

        yield Manager()


@pytest.mark.parametrize("is_seen", [lambda number: True, lambda number: number % 2, lambda number: not number % 5])
async def test_engine_that_looks_each_step_misses_no_room_and_keeps_none_that_was_dropped(
    is_seen: Callable[[int], bool],
) -> None:
    async with computing() as prefill:
        with manager_of(prefill) as manager:
            await prefill.want(HONEST, "kept", 0)
            for number in range(1, 101):
                await prefill.want(LIAR, f"{number}", 0, number=number)
                if is_seen(number):
                    assert manager.is_wanted(f"{number}")
                await prefill.drop(LIAR, f"{number}", number)
                if is_seen(number + 1):
                    assert not manager.is_wanted(f"{number}")
                assert manager.is_wanted("kept")
                assert len(manager) == 1
            prefill.outgoing.lost(HONEST)
            assert not manager.is_wanted("kept")


async def test_room_that_is_used_again_is_wanted_though_its_first_sender_is_cleared_late() -> None:
    async with computing() as prefill:
        with manager_of(prefill) as manager:
            for number in (1, 2):
                await prefill.want(HONEST, "5", 0, number=number)
                manager.follow(f"5 {number}")
                assert manager.is_wanted("5")
                if number == 1:
                    await prefill.drop(HONEST, "5", number)
            manager.forget("5 1")
            assert manager.is_wanted("5")


async def test_outcome_that_comes_after_its_request_was_forgotten_is_not_kept() -> None:
    async with computing() as prefill:
        with manager_of(prefill) as manager:
            manager.follow("r")
            manager.forget("r")
            prefill.told.let_go("r", "push_stopped")
            assert manager.outcome("r") is None
            assert len(manager) == 0


async def test_name_of_two_prompts_is_wanted_until_no_peer_wants_either() -> None:
    async with computing() as prefill:
        for number, prompt in enumerate(("a" * 32, "b" * 32), 1):
            await prefill.want(HONEST, "t", 0, number=number, prompt=prompt)
        await prefill.drop(HONEST, "t", 1, "a" * 32)
        assert prefill.told.wanted == {"t"}
        await prefill.drop(HONEST, "t", 2, "b" * 32)
        assert not prefill.told.wanted


# ---- names that were dropped before their request came ----


async def test_drops_of_one_peer_make_those_of_others_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_budget, "DROPPED_NAMES", 64)
    monkeypatch.setattr(peer_budget, "DROPPED_BY_GONE", 256)
    async with computing() as prefill:
        await prefill.drop(HONEST, "declined", prompt=PROMPT)
        await prefill.want(HONEST, "wanted", 0, number=1, prompt=PROMPT)
        await prefill.drop(HONEST, "wanted", 1, PROMPT)
        for number in range(1, 301):
            await prefill.drop(LIAR, f"{number}")
            await prefill.want(LIAR, f"w{number}", 0, number=number)
            await prefill.drop(LIAR, f"w{number}", number)
        for name in ("declined", "wanted"):
            with anyio.fail_after(20):  # else it is kept for as long as any other
                assert await prefill.outcome(name, PROMPT) == "push_stopped"


def test_share_of_each_peer_and_of_those_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_budget, "DROPPED_NAMES", 64)
    monkeypatch.setattr(peer_budget, "DROPPED_BY_GONE", 256)
    dropped = DroppedTransfers()
    dropped.add(1, TransferKey("honest"), "push_stopped")
    for peer in range(100, 120):
        for number in range(2 * peer_budget.DROPPED_NAMES):
            dropped.add(peer, TransferKey(f"{peer} {number}"), "push_stopped")
        assert len(dropped) <= 1 + peer_budget.DROPPED_NAMES + peer_budget.DROPPED_BY_GONE
        dropped.peer_gone(peer)
    assert len(dropped) == 1 + peer_budget.DROPPED_BY_GONE
    assert dropped.take(TransferKey("honest")) == "push_stopped"
    assert dropped.take(TransferKey(f"119 {2 * peer_budget.DROPPED_NAMES - 1}")) == "push_stopped"
    assert dropped.take(TransferKey("119 0")) is None


def test_transfer_that_two_peers_dropped_is_forgotten_once() -> None:
    dropped, key = DroppedTransfers(), TransferKey("t")
    for peer in (1, 2, 1):
        dropped.add(peer, key, "push_stopped")
    for number in range(peer_budget.DROPPED_NAMES):
        dropped.add(1, TransferKey(f"{number}"), "push_stopped")
    assert dropped.take(key) == "push_stopped", "the other peer's share has it"
    assert dropped.take(key) is None
    dropped.peer_gone(2)
    assert len(dropped) == peer_budget.DROPPED_NAMES


# ---- memory ----


class Greedy:
    """A peer that takes each limit at a prefill engine. Its messages share no object, as if they came from the wire."""

    def __init__(self, prefill: Prefill) -> None:
        self._outgoing = prefill.outgoing
        self._number = 0
        self._blocks: Sequence[int] = range(2**62, 2**62 + peer_budget.WANT_BLOCKS)
        self._same_blocks = list(self._blocks)

    def _want(self, name: str, blocks: int) -> int:
        self._number += 1
        words: dict[str, Any] = {"transfer": name, "number": self._number}
        start = 0
        while blocks - start > MAX_BLOCKS:
            self._outgoing.more(LIAR, More(**words, into=tuple(self._blocks[start : start + MAX_BLOCKS])))
            start += MAX_BLOCKS
        is_kept = self._number <= peer_budget.WANTS  # the others' are not kept
        layout = {name[:-1] + name[-1]: value[:-1] + value[-1] for name, value in LAYOUT.items() if is_kept}
        whole: dict[str, Any] = {
            "prompt": PROMPT,
            "first": 2**62,
            "into": tuple(self._blocks[start:blocks]),
            "caches": 2**62,
        }
        self._outgoing.want(LIAR, Want(**words, **whole, count=blocks, layout={**layout}))
        return self._number

    def _drop(self, name: str, number: int = 0) -> None:
        self._outgoing.drop(LIAR, Drop(transfer=name, number=number, prompt=PROMPT))

    async def take_all(self) -> None:
        """Take the peer's whole budget: wants, block numbers in them, and dropped names."""
        for number in range(peer_budget.WANTS):
            self._want(f"{number:0256d}", peer_budget.WANT_BLOCKS // peer_budget.WANTS)
        for number in range(peer_budget.DROPPED_NAMES):
            self._drop(f"{number:0255d}d")
        await settled()

    async def take_no_answers(self) -> None:
        """Cause answers that it never takes: to wants that it drops, and to wants that are refused.

        They share their numbers, so that 8 bytes kept of each would show.
        """
        self._blocks = self._same_blocks
        for number in range(4):
            dropped = self._want(f"{number:0256d}", peer_budget.WANT_BLOCKS)
            await settled()
            self._drop(f"{number:0256d}", dropped)
            await settled()
        for number in range(peer_budget.WANTS):
            self._want(f"{number:0256d}", 1)
        for number in range(peer_budget.ANSWERS):
            self._want(f"{number:0255d}r", MAX_BLOCKS if number % 16 == 0 else 1)
            if number % 256 == 0:
                await settled()
        await settled()


async def settled() -> None:
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("share", [8, at_night(1)])
@pytest.mark.parametrize("how", [Greedy.take_all, Greedy.take_no_answers])
async def test_memory_of_what_a_peer_wants_is_bounded(
    how: Callable[[Greedy], Awaitable[None]], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is proportional to the limits, so by day they and the bound are an eighth."""
    for name in ("WANTS", "WANT_BLOCKS", "DROPPED_NAMES", "ANSWERS"):
        monkeypatch.setattr(peer_budget, name, getattr(peer_budget, name) // share)
    async with computing() as prefill:
        prefill.reads = anyio.Event()
        peer = Greedy(prefill)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            await how(peer)
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert taken <= peer_budget.PUSH_BYTES // share, f"{taken / 2**20:.1f} MiB"
