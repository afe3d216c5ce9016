"""Leases that live as long as the request that waits for their blocks, and that several requests may take."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from pydantic import ValidationError

from aiodatadist import LinkTimeout, new_lease_name, prompt_digest
from aiodatadist._adapters import push_messages
from aiodatadist._adapters.ended import Ended
from aiodatadist._adapters.hold_messages import MAX_HELD, Held, Hold, LetGo
from aiodatadist._adapters.holds import Holds
from aiodatadist._adapters.kept_leases import KeptLeases
from aiodatadist._adapters.lease_holders import LeaseHolders
from aiodatadist._adapters.order_tasks import OrderTasks
from aiodatadist._adapters.peer_links import LinkedPeer, PeerAddress
from aiodatadist._adapters.pull_orders import KeptOrder
from aiodatadist._adapters.settings import Settings
from aiodatadist._counting import Incidents
from aiodatadist._link import BlockLease
from aiodatadist._testing.views import held_leases
from aiodatadist._values.digests import LeaseDigests
from tests.adapters.test_block_service import LAYOUT, PROMPT, End, order
from tests.clock import took
from tests.test_block_leases import BLOCKS, Pair, pair_of

ONE, OTHER = LinkedPeer(7, 1), LinkedPeer(8, 1)
DIGEST = prompt_digest([4, 5, 6])


class Heard(Ended):
    """The news of a worker. ``over`` is set with the first report."""

    def __init__(self) -> None:
        super().__init__()
        self.over = anyio.Event()

    def tell(self, change: Callable[[Ended], object]) -> None:
        change(self)
        self.over.set()


Owned = tuple[KeptLeases, Heard, Pair]


# ---- who holds, as arithmetic ----


def test_a_lease_is_over_when_all_that_may_take_it_have_let_go() -> None:
    holders = LeaseHolders(3)
    for number in range(3):
        assert holders.hold(ONE, number)
        assert not holders.is_over
        holders.let_go(ONE, number, 1, has_taken=number == 1)
    assert holders.is_over
    assert holders.has_taken


def test_each_worker_of_an_engine_lets_go_of_a_share() -> None:
    holders = LeaseHolders(2)
    for request in range(2):
        for worker in range(2):
            assert not holders.is_over
            holders.let_go(LinkedPeer(worker, 1), request, 2, has_taken=False)
    assert holders.is_over
    assert not holders.has_taken


def test_a_request_that_lets_go_twice_counts_once() -> None:
    holders = LeaseHolders(2)
    for _ in range(3):
        holders.let_go(ONE, 5, 1, has_taken=False)
    assert not holders.is_over
    assert not holders.hold(ONE, 5), "a message that comes late holds nothing"


def test_a_peer_has_no_more_holders_than_the_owner_expects() -> None:
    holders = LeaseHolders(2)
    assert [holders.hold(ONE, number) for number in range(4)] == [True, True, False, False]
    holders.let_go(ONE, 3, 1, has_taken=True)
    assert not holders.has_taken, "it was refused"
    assert holders.hold(OTHER, 0)


def test_what_only_a_lost_peer_held_is_held_by_none() -> None:
    holders = LeaseHolders(2)
    holders.hold(ONE, 1)
    holders.hold(OTHER, 1)
    assert not holders.lost(ONE)
    assert not holders.lost(ONE)
    assert holders.lost(OTHER)
    assert not holders.is_over


# ---- the owner ----


@asynccontextmanager
async def owning(**options: float) -> AsyncIterator[Owned]:
    ended = Heard()
    limits = {"pull_seconds": 60.0, "hold_seconds": 100.0, "patience_seconds": 5.0, **options}
    async with pair_of() as pair, anyio.create_task_group() as group:
        tasks = OrderTasks(group, Incidents())
        kept = KeptLeases(
            pair.owner,
            [pair.theirs],
            tasks=tasks,
            tell=ended.tell,
            incidents=Incidents(),
            groups=None,
            **limits,
        )
        yield kept, ended, pair
        group.cancel_scope.cancel()


def held_of(pair: Pair, lease: str, holder: int = 1, **changes: Any) -> Held:
    blocks, prompt = LeaseDigests.of(pair.theirs.cache_id, BLOCKS, DIGEST)
    return Held(**{"lease": lease, "blocks": blocks, "prompt": prompt, "holder": holder, **changes})


def keep(owned: Owned, takers: int = 1, seconds: float = 10) -> str:
    lease = new_lease_name()
    owned[0].keep("r", lease, list(BLOCKS), DIGEST, seconds, takers)
    return lease


async def end_of(owned: Owned) -> dict[str, int]:
    await owned[1].over.wait()
    return dict(owned[1].counters)


@pytest.mark.autojump
async def test_a_lease_lives_as_long_as_a_request_waits() -> None:
    async with owning() as owned:
        held = held_of(owned[2], keep(owned))
        with took(50):
            for _ in range(8):
                await anyio.sleep(5)
                owned[0].held(ONE, [held])
            assert await end_of(owned) == {"lease_expired": 1}


@pytest.mark.autojump
async def test_no_request_holds_a_lease_for_longer_than_the_owner_says() -> None:
    async with owning(hold_seconds=20) as owned:
        held = held_of(owned[2], keep(owned))
        for _ in range(4):
            await anyio.sleep(4)
            owned[0].held(ONE, [held])
        with took(4):
            await end_of(owned)


@pytest.mark.autojump
async def test_a_lease_whose_last_holder_is_lost_ends_within_seconds() -> None:
    async with owning() as owned:
        held = held_of(owned[2], keep(owned, seconds=60))
        for peer in (ONE, OTHER):
            owned[0].held(peer, [held])
        with took(20):
            await anyio.sleep(10)
            owned[0].lost(ONE)
            await anyio.sleep(5)
            assert not owned[1].sent, "the other one waits"
            owned[0].lost(OTHER)
            assert await end_of(owned) == {"lease_expired": 1}


@pytest.mark.autojump
@pytest.mark.parametrize("wrong", [{"blocks": "0" * 32}, {"prompt": "0" * 32}, {"lease": "0" * 32}])
async def test_only_a_peer_with_the_blocks_and_the_prompt_holds_a_lease_or_lets_go(wrong: dict[str, Any]) -> None:
    async with owning() as owned:
        held = held_of(owned[2], keep(owned)).model_copy(update=wrong)
        with took(10):
            await anyio.sleep(5)
            owned[0].held(ONE, [held])
            owned[0].let_go(ONE, [held])
            owned[0].lost(ONE)
            assert await end_of(owned) == {"lease_expired": 1}


@pytest.mark.autojump
async def test_a_shared_lease_ends_with_the_last_request_that_may_take_it() -> None:
    async with owning() as owned:
        lease = keep(owned, takers=3)
        owned[0].held(ONE, [held_of(owned[2], lease, number) for number in range(3)])
        with took(3):
            for number in range(3):
                await anyio.sleep(1)
                assert not owned[1].sent
                owned[0].let_go(ONE, [held_of(owned[2], lease, number, has_taken=number == 0)])
            assert await end_of(owned) == {"lease_taken": 1}


async def test_a_lease_that_is_over_is_withdrawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start one task for each lease: each repeated message that a request lets go started as many again."""
    withdraw, begun = BlockLease.withdraw, []

    async def counted(lease: BlockLease) -> None:
        begun.append(lease)
        await withdraw(lease)

    monkeypatch.setattr(BlockLease, "withdraw", counted)
    async with owning() as owned:
        lease = keep(owned)
        for _ in range(3):
            owned[0].let_go(ONE, [held_of(owned[2], lease, 5)] * 16)
        assert await end_of(owned) == {"lease_released": 1}
    assert len(begun) == 1


@pytest.mark.autojump
async def test_requests_that_never_come_strand_nothing() -> None:
    async with owning() as owned:
        lease = keep(owned, takers=2, seconds=60)
        with took(5):
            owned[0].let_go(ONE, [held_of(owned[2], lease, has_taken=True)])
            assert await end_of(owned) == {"lease_taken": 1}


# ---- the holder ----


class Told:
    """Messages as a peer gets them, and links of which some cannot be made."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Hold | LetGo]] = []
        self.unreachable: set[int] = set()

    async def link_to_tell(self, peer: PeerAddress) -> LinkedPeer:
        if peer.cluster_id in self.unreachable:
            raise LinkTimeout("no link")
        return LinkedPeer(peer.cluster_id, 1)

    async def post(self, peer: LinkedPeer, message: Hold | LetGo) -> None:
        self.messages.append((peer.cluster_id, message))

    def holders(self, kind: type[Hold | LetGo] = Hold) -> list[list[int]]:
        return [[each.holder for each in message.held] for _, message in self.messages if isinstance(message, kind)]


@asynccontextmanager
async def holding() -> AsyncIterator[tuple[Holds, Told]]:
    told = Told()
    async with anyio.create_task_group() as group:
        links: Any = told
        yield Holds(links, OrderTasks(group, Incidents()), told.post), told
        group.cancel_scope.cancel()


def lease(holder: int, cluster: int = 7) -> tuple[PeerAddress, Held]:
    held = Held(lease=new_lease_name(), blocks="0" * 32, prompt="1" * 32, holder=holder)
    return PeerAddress(cluster_id=cluster, host="127.0.0.1", port=1), held


@pytest.mark.autojump
async def test_requests_that_wait_are_named_again_until_they_let_go() -> None:
    async with holding() as (holds, told):
        for number in range(2):
            holds.hold(f"r{number}", [lease(number)], 30)
        await anyio.sleep(25)
        assert told.holders() == [[0, 1]] * 3, "in one message, each 10 seconds"
        holds.let_go("r0")
        await anyio.sleep(10)
        assert told.holders()[3:] == [[1]]
        holds.let_go("r1")
        await anyio.sleep(100)
        assert told.holders()[4:] == []
        assert len(holds) == 0


@pytest.mark.autojump
async def test_a_burst_goes_out_in_bounded_messages() -> None:
    async with holding() as (holds, told):
        for number in range(MAX_HELD + 1):
            holds.hold(f"r{number}", [lease(number)], 30)
        await anyio.sleep(1)
        assert list(map(len, told.holders())) == [MAX_HELD, 1]
        assert all(len(push_messages.encode(message)) <= push_messages.MAX_MESSAGE for _, message in told.messages)


@pytest.mark.autojump
async def test_a_router_does_not_decide_how_often_a_lease_is_named() -> None:
    async with holding() as (holds, told):
        holds.hold("often", [lease(1)], 0.001)
        holds.hold("seldom", [lease(2, cluster=8)], 800_000)
        await anyio.sleep(9.9)
        assert sum(cluster == 7 for cluster, _ in told.messages) == 20
        await anyio.sleep(30.2)
        assert sum(cluster == 8 for cluster, _ in told.messages) == 3


@pytest.mark.autojump
async def test_an_owner_whose_link_broke_is_told_at_once_and_one_that_cannot_be_linked_delays_no_other() -> None:
    async with holding() as (holds, told):
        told.unreachable.add(8)
        holds.hold("r", [lease(1), lease(2, cluster=8)], 30)
        await anyio.sleep(1)
        assert told.holders() == [[1]]
        told.unreachable.clear()
        holds.lost(LinkedPeer(8, 1))
        await anyio.sleep(1)
        assert sorted(told.holders()) == [[1], [1], [2]]


@pytest.mark.autojump
async def test_only_requests_that_share_a_lease_say_that_they_let_go() -> None:
    async with holding() as (holds, told):
        holds.hold("r", [lease(1)], 30)
        holds.let_go("r", [lease(1), lease(1, cluster=8)])
        holds.let_go("alone")
        await anyio.sleep(1)
        assert told.holders(LetGo) == [[1], [1]]
        assert told.holders() == []


# ---- both ends ----


@pytest.fixture
def ends() -> Iterator[Callable[..., End]]:
    with ExitStack() as stack:

        def made(number: int, **settings: Any) -> End:
            end = End(number, Settings(**{"link_seconds": 5, "patience_seconds": 2, **settings}), LAYOUT)
            stack.enter_context(closing(end.service))
            return end

        yield made


def kept_order(request: str, lease: str, owner: End, takers: int = 1) -> KeptOrder:
    return KeptOrder(request, (owner.address,), lease, (3, 9), PROMPT, takers)


def holders_at(owner: End) -> int:
    return held_leases(owner.service)


def until(look: Callable[[], bool]) -> None:
    while not look():
        time.sleep(0.001)


def test_an_owner_hears_of_a_request_that_waits_again_and_again(
    ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    held = KeptLeases.held

    def counted(self: KeptLeases, peer: LinkedPeer, leases: Sequence[Held]) -> None:
        held(self, peer, leases)
        heard.append(len(leases))

    monkeypatch.setattr(KeptLeases, "held", counted)
    owner, puller = ends(0, lease_seconds=3600), ends(1)
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT)
    puller.service.hold(kept_order("r", lease, owner), 0.001)  # a router wrote that the lease is short
    until(lambda: len(heard) >= 3)
    assert set(heard) == {1}
    assert holders_at(owner) == 1
    puller.service.pull(order("r", lease, owner.address))
    assert puller.until("received", "r").counters["pull_done"] == 1
    assert owner.until("sent", "r").counters == {"lease_taken": 1}


def test_the_lease_of_a_request_whose_engine_ends_is_over_within_seconds(ends: Callable[..., End]) -> None:
    owner, puller = ends(0, lease_seconds=3600, patience_seconds=0), ends(1)
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT)
    puller.service.hold(kept_order("r", lease, owner), 3600)
    until(lambda: holders_at(owner) == 1)
    puller.service.close()
    assert owner.until("sent", "r").counters == {"lease_expired": 1}


def test_three_samples_of_one_prompt_load_three_times(ends: Callable[..., End]) -> None:
    owner, puller = ends(0), ends(1)
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT, takers=3)
    for sample in range(3):
        into = (2 * sample, 2 * sample + 1)
        puller.service.pull(order(f"{sample}_r", lease, owner.address, into=into, takers=3))
    found = Ended()
    while len(found.received) < 3:
        ended = puller.service.take()
        found.received |= ended.received
        found.counters += ended.counters
    assert found.counters["pull_done"] == 3
    assert [puller.holds(block) for block in range(6)] == [{3}, {9}] * 3
    assert owner.until("sent", "r").counters == {"lease_taken": 1}


@pytest.mark.parametrize("order_of", [("pull", "release", "release"), ("release", "release", "pull"), ("release",) * 3])
def test_samples_that_need_no_blocks_strand_none(ends: Callable[..., End], order_of: tuple[str, ...]) -> None:
    owner, puller = ends(0, lease_seconds=3600), ends(1)
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT, takers=3)
    for sample, what in enumerate(order_of):
        if what == "pull":
            puller.service.pull(order(f"{sample}_r", lease, owner.address, takers=3))
            puller.until("received", f"{sample}_r")
        else:
            puller.service.release(kept_order(f"{sample}_r", lease, owner, takers=3))
    how = "lease_taken" if "pull" in order_of else "lease_released"
    assert owner.until("sent", "r").counters == {how: 1}


def test_what_a_client_writes_does_not_decide_how_many_may_take_a_lease(ends: Callable[..., End]) -> None:
    owner, puller = ends(0), ends(1)
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT, takers=2)
    for takers in (1, 3, 4):
        puller.service.pull(order(f"forged{takers}", lease, owner.address, takers=takers))
        ended = puller.until("received", f"forged{takers}")
        assert ended.failed == {f"forged{takers}": (0, 1)}
        assert ended.counters == {"pull_refused": 1}
    for sample in range(2):
        puller.service.pull(order(f"{sample}_r", lease, owner.address, takers=2))
        assert puller.until("received", f"{sample}_r").counters["pull_done"] == 1
    assert owner.until("sent", "r").counters == {"lease_taken": 1, "claims_refused": 3}


@pytest.mark.parametrize(
    ("name", "value"), [("max_takers", 0), ("max_takers", 65), ("hold_seconds", -1), ("hold_seconds", 86_401)]
)
def test_bad_limits(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings.model_validate({name: value})
