"""Orders and the links that they are carried out over: one that broke and is still being given back is not the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aiodatadist import new_lease_name
from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.pull_orders import KeptOrder, PullOrder
from aiodatadist._adapters.settings import Settings
from aiodatadist._cluster.engine import Engine
from aiodatadist._link.link import Link
from aiodatadist._testing.views import call_on_loop, life_of
from aiodatadist.testing import inside
from tests.adapters import test_block_service
from tests.adapters.test_block_service import PROMPT
from tests.adapters.test_pushes import End


def engine_of(service: BlockService) -> Engine:
    return inside(service)


class Closing:
    """Holds the closing of links of some clusters, as HcclCommDestroy does while a peer hangs."""

    def __init__(self) -> None:
        self._held: dict[Engine, anyio.Event] = {}
        self._services: list[BlockService] = []
        self._links: list[Link] = []

    async def shut(self, link: Link, shut: Callable[[Link], Any]) -> bool:
        held = self._held.get(link._host)  # type: ignore[call-overload]
        if held is not None:
            await held.wait()
        done: bool = await shut(link)
        return done

    def break_link(self, service: BlockService, peer: int, held: BlockService | None = None) -> None:
        """Break one end's half of the link, and hold the closing of that half or of the other one from here on."""

        async def on_loop() -> None:
            engine = engine_of(held or service)
            self._held[engine] = anyio.Event()
            link = engine_of(service).links.peek(peer)
            assert link is not None
            link.session.lost("its network is gone")
            await self._turns()
            self._links += engine.links.current

        self._services.append(held or service)
        call_on_loop(service, on_loop)

    def let_go(self, service: BlockService) -> None:
        """Wait until the held links have been closed and all ends have noticed."""

        async def on_loop() -> None:
            self._held.pop(engine_of(service)).set()
            self._services.remove(service)
            for link in self._links:
                await link.wait_closed()
            await self._turns()

        call_on_loop(service, on_loop)

    def close(self) -> None:
        for service in list(self._services):
            self.let_go(service)

    def pass_turns(self, service: BlockService) -> None:
        """Pass enough turns of the event loop for everything that waits for nothing."""
        call_on_loop(service, self._turns)

    @staticmethod
    async def _turns() -> None:
        for _ in range(200):
            await anyio.lowlevel.checkpoint()


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[Closing]:
    made, shut = Closing(), Link._shut
    monkeypatch.setattr(Link, "_shut", lambda link: made.shut(link, shut))
    with closing(made):
        yield made


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """Prefill and decode, which do not take each other for dead."""
    with ExitStack() as stack:
        made = tuple(End(number, heartbeat_interval=20.0) for number in range(2))
        for each in made:
            stack.enter_context(closing(each.service))
        yield made[0], made[1]


def test_a_link_that_is_given_back_late_takes_no_order_of_the_next_one_with_it(
    ends: tuple[End, End], links: Closing
) -> None:
    prefill, decode = ends
    decode.expect("a", prefill.address)
    prefill.until(lambda ended: "a" in ended.wanted)
    links.break_link(decode.service, prefill.address.cluster_id, held=prefill.service)
    assert decode.received("a").outcomes == {"a": "push_missed"}
    decode.expect("b", prefill.address, into=(2, 3))
    prefill.until(lambda ended: "b" in ended.wanted)
    links.let_go(prefill.service)
    prefill.service.pushed("a", "a")
    assert prefill.sent("a").outcomes == {"a": "push_stopped"}
    prefill.step("b")
    prefill.service.pushed("b", "b")
    assert decode.received("b").outcomes == {"a": "push_missed", "b": "push_arrived"}
    assert prefill.sent("b").outcomes == {"a": "push_stopped", "b": "push_done"}
    assert [decode.holds(block) for block in range(4)] == [{16}, {17}, {3}, {9}]


def test_what_was_asked_over_a_link_does_not_go_out_over_the_next_one(ends: tuple[End, End], links: Closing) -> None:
    """The decode engine has given those blocks to another request."""
    prefill, decode = ends
    decode.expect("a", prefill.address)
    prefill.until(lambda ended: "a" in ended.wanted)
    links.break_link(decode.service, prefill.address.cluster_id, held=prefill.service)
    decode.received("a")
    decode.expect("b", prefill.address, into=(2, 3))
    prefill.until(lambda ended: "b" in ended.wanted)
    prefill.step("a")  # while the prefill engine has not heard yet that the first link is gone
    prefill.service.pushed("a", "a")
    prefill.sent("a")
    assert [decode.holds(block) for block in range(2)] == [{16}, {17}]
    links.let_go(prefill.service)


def test_the_next_link_is_watched_though_the_first_one_is_given_back_late(
    ends: tuple[End, End], links: Closing
) -> None:
    prefill, decode = ends
    decode.expect("a", prefill.address)
    prefill.until(lambda ended: "a" in ended.wanted)
    links.break_link(decode.service, prefill.address.cluster_id, held=prefill.service)
    decode.received("a")
    decode.expect("b", prefill.address, into=(2, 3))
    prefill.until(lambda ended: "b" in ended.wanted)
    links.let_go(prefill.service)
    links.break_link(prefill.service, decode.address.cluster_id)
    links.let_go(prefill.service)
    prefill.service.pushed("b", "b")  # of which nothing was computed: it would wait for the rest
    assert prefill.sent("b").outcomes["b"] == "push_stopped"


def test_a_request_that_is_cancelled_while_its_link_is_given_back_keeps_its_blocks_until_then(
    ends: tuple[End, End], links: Closing
) -> None:
    prefill, decode = ends
    decode.expect("a", prefill.address)
    prefill.until(lambda ended: "a" in ended.wanted)
    links.break_link(decode.service, prefill.address.cluster_id)
    decode.service.cancel("a")
    links.pass_turns(decode.service)
    assert decode.take().received == set(), "the prefill engine may still write there"
    links.let_go(decode.service)
    assert decode.received("a").outcomes == {"a": "push_cancelled"}


def test_an_order_to_push_waits_while_a_broken_link_is_given_back(ends: tuple[End, End], links: Closing) -> None:
    prefill, decode = ends
    prefill.step("a")
    prefill.service.pushed("a", "a")
    decode.expect("a", prefill.address)
    decode.received("a")
    links.break_link(decode.service, prefill.address.cluster_id)
    prefill.step("b")
    prefill.service.pushed("b", "b")
    decode.expect("b", prefill.address, into=(2, 3))
    links.pass_turns(decode.service)
    assert decode.take().received == {"a"}
    links.let_go(decode.service)
    assert decode.received("b").outcomes == {"a": "push_arrived", "b": "push_arrived"}


def test_orders_to_pull_and_to_release_wait_while_a_broken_link_is_given_back(links: Closing) -> None:
    settings = Settings(link_seconds=5, patience_seconds=2, heartbeat_interval=20.0)
    owner, puller = (test_block_service.End(number, settings, test_block_service.LAYOUT) for number in range(2))
    with closing(owner.service), closing(puller.service):
        leases = [new_lease_name() for _ in range(3)]
        for number, lease in enumerate(leases):
            owner.service.keep(f"r{number}", lease, [3, 9], PROMPT)
        sources = (owner.address,)
        puller.service.pull(PullOrder("r0", sources, leases[0], (3, 9), (0, 1), PROMPT))
        puller.until("received", "r0")
        links.break_link(puller.service, owner.address.cluster_id)
        puller.service.pull(PullOrder("r1", sources, leases[1], (3, 9), (2, 3), PROMPT))
        puller.service.release(KeptOrder("released", sources, leases[2], (3, 9), PROMPT))
        links.pass_turns(puller.service)
        assert puller.service.take().received == set()
        links.let_go(puller.service)
        assert puller.until("received", "r1").failed == {}
        assert (puller.holds(2), puller.holds(3)) == ({3}, {9})
        assert owner.until("sent", "r2").counters["lease_released"] == 1


def test_a_peer_that_neither_answers_nor_agrees_to_part_loses_its_link_before_blocks_come_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its event loop stands still, its heartbeats and its device go on: a push of it may go on, too."""
    prefill, decode = (End(number, link_seconds=2) for number in range(2))
    with closing(prefill.service), closing(decode.service):
        decode.expect("a", prefill.address)
        prefill.until(lambda ended: "a" in ended.wanted)
        host, parting = engine_of(prefill.service), Link._say_bye

        async def say_bye(link: Link) -> None:
            if link._host is host:
                await anyio.sleep_forever()
            await parting(link)

        monkeypatch.setattr(Link, "_say_bye", say_bye)
        monkeypatch.setattr(life_of(prefill.service).outgoing, "drop", lambda *_: None)
        decode.service.cancel("a")
        assert decode.received("a").outcomes == {"a": "push_cancelled"}
        assert not engine_of(decode.service).links.has_any
