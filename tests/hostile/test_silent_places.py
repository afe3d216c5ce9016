"""Requests that name silent places, at each of their workers or one request after the other: what waits, and who is next.

Dials are counted in their order. There are few at a time here, so that an honest place has to wait for its turn.
"""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from aiodatadist import LinkTimeout, new_lease_name
from aiodatadist._adapters import dials, peer_links
from aiodatadist._adapters.peer_links import PeerAddress, PeerLinks
from aiodatadist._adapters.peers import LOOPBACK, Peers
from aiodatadist._adapters.pull_orders import KeptOrder
from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.regions import Heads
from aiodatadist._cluster import dial, host_names
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._link import Connection
from aiodatadist._testing.views import call_on_loop
from aiodatadist.testing import open_cluster
from tests.adapters.kv_memory import Order, opaque_memory
from tests.clock import took
from tests.hostile.test_dials import SILENT, Released, Silence, ends, keep, silence
from tests.hostile.test_offers import PROMPT, End, pull
from tests.test_host_names import answer

__all__ = ["ends", "silence"]

ORDER: Order = ("tokens", "heads", 4)
HEADS = Heads(0, 64, 64)


def one_head(number: int) -> dict[str, Any]:
    """Return what a worker says that has one head."""
    return opaque_memory(16, ORDER, Heads(number, number + 1, 64)).model_dump()


def lies(end: End, request: int, workers: int = 64) -> list[Any]:
    """Return the workers of one request, with a head each, at silent places. Each place is named once."""
    first = 1 + request * workers
    said = [{"memory": one_head(number)} if workers == 64 else {} for number in range(workers)]
    return [
        end.place(host=SILENT, port=first + at, cluster_id=10**6 + first + at, **each) for at, each in enumerate(said)
    ]


def few(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    for name, limit in limits.items():
        monkeypatch.setattr(dials, name, limit)


def turn_of(end: End, silence: Silence) -> int:
    """Count the dials that began before the one of the end's place."""
    return silence.order.index(("127.0.0.1", end.address.port))


@contextmanager
def none_gives_way(monkeypatch: pytest.MonkeyPatch, end: End) -> Iterator[None]:
    """Let no dial give way in the body, nor until a dial of the end's place stands in line, which may take a while."""
    stands, wait_for_turn = threading.Event(), dials.Dial.wait_for_turn

    def noted(dial: dials.Dial, *turn: Any) -> None:
        wait_for_turn(dial, *turn)
        if dial.place.endswith(f":{end.address.port}"):
            stands.set()

    with monkeypatch.context() as patch:
        patch.setattr(dials, "SILENT_TICKS", math.inf)
        patch.setattr(dials.Dial, "wait_for_turn", noted)
        yield
        stands.wait()


@contextmanager
def closing_if_cancelled(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


# ---- whose turn it is ----


def test_the_workers_of_a_request_hold_up_another_request_by_one_dial(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, DIALS=4)
    true, puller = ends(0, ORDER, HEADS), ends(1, ORDER, HEADS, link_seconds=20)
    with none_gives_way(monkeypatch, true):
        for request in range(3):
            puller.service.pull(pull(f"lie{request}", *lies(true, request)))
        silence.wait_begun(4)
        keep(true, puller, "honest")
    assert puller.received("honest").outcomes["honest"] == "pull_done"
    assert turn_of(true, silence) <= 4 + 3, "four were under way, and three requests waited before this one"


def test_the_newest_request_has_a_place_in_the_line_however_many_wait(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dials, "WAITING", 4, raising=False)
    few(monkeypatch, DIALS=2)
    true, puller = ends(0), ends(1, link_seconds=20)
    with none_gives_way(monkeypatch, true):
        for request in range(100):
            puller.service.pull(pull(f"lie{request}", *lies(true, request, 1)))
        silence.wait_begun(2)
        keep(true, puller, "honest")
    assert puller.received("honest").outcomes["honest"] == "pull_done"
    assert turn_of(true, silence) <= 2 + 3, "the line has four places"


def test_a_true_place_that_is_the_last_one_of_a_lie_waits_for_the_honest_request_only(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both requests share its dial, which stands in the lines of both."""
    few(monkeypatch, DIALS=1)
    true, puller = ends(0, ORDER, HEADS), ends(1, ORDER, HEADS, link_seconds=20)
    named = lies(true, 0)
    named[7] = true.place(memory=one_head(7))
    puller.service.pull(pull("lie", *named))
    silence.wait_begun(1)
    keep(true, puller, "honest")
    assert puller.received("honest").outcomes["honest"] == "pull_done"
    assert turn_of(true, silence) <= 2
    assert silence.order.count(("127.0.0.1", true.address.port)) == 1


def test_places_that_were_silent_are_behind_those_that_were_not(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, DIALS=1)
    true, puller = ends(0), ends(1, link_seconds=20)
    for request in range(6):
        puller.service.pull(pull(f"lie{request}", *lies(true, request, 1)))
    silence.wait_begun(6)
    with none_gives_way(monkeypatch, true):
        for request in range(5):
            puller.service.pull(pull(f"again{request}", *lies(true, request, 1)))
        keep(true, puller, "honest")
    assert puller.received("honest").outcomes["honest"] == "pull_done"
    assert turn_of(true, silence) <= 6 + 2, "the five take the turns of one request"


# ---- how long a true place has ----


def test_a_peer_that_took_the_connection_has_time_to_prove_itself_while_silent_places_are_dialled(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, DIALS=2)
    true, puller, held = ends(0), ends(1, link_seconds=20), Released()

    class Late(Connection):
        @classmethod
        async def over(cls, sock: socket.socket, *_: Any) -> Any:
            with closing_if_cancelled(sock):
                await held.wait()
            return await Connection.over(sock)

    monkeypatch.setattr(dial, "Connection", Late)
    keep(true, puller, "honest")
    puller.pass_turns()
    for request in range(20):
        puller.service.pull(pull(f"lie{request}", *lies(true, request, 1)))
    silence.wait_begun(5)
    held.release()
    assert puller.received("honest").outcomes["honest"] == "pull_done"


def test_looking_up_a_true_name_costs_its_dial_no_time(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, DIALS=1)
    asked, let_go = threading.Event(), threading.Event()

    def look_up(*_: Any, **__: Any) -> list[Any]:
        asked.set()
        assert let_go.wait(30)
        return answer(["127.0.0.1"])

    monkeypatch.setattr(host_names, "getaddrinfo", look_up)
    true, puller = ends(0), ends(1, link_seconds=20, peers=["127.0.0.0/8", "prefill.kv.svc"])
    keep(true, puller, "honest", host="prefill.kv.svc")
    assert asked.wait(30)
    for request in range(20):
        puller.service.pull(pull(f"lie{request}", *lies(true, request, 1)))
    silence.wait_begun(3)
    let_go.set()
    assert puller.received("honest").outcomes["honest"] == "pull_done"


# ---- what waits ----


async def tasks_of_this_loop() -> int:
    return len(asyncio.all_tasks())


def outcomes_of(end: End, requests: Iterable[str]) -> dict[str, str]:
    """Wait until all requests have come out, and return how."""
    left, outcomes = set(requests), dict[str, str]()
    while left:
        ended = end.service.take()
        outcomes |= ended.outcomes
        left -= ended.received
        end.pass_turns()
    return outcomes


def lying_push(number: int, place: Any) -> ExpectOrder:
    return ExpectOrder(f"lie{number}", place, f"no-such-transfer-{number}", 0, (3,), prompt=PROMPT)


@pytest.mark.parametrize("is_linked", [True, False])
def test_requests_that_wait_for_a_dial_have_no_task(
    is_linked: bool, ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of tasks would make every collection of garbage hold the event loop. Each request comes out all the same."""
    few(monkeypatch, DIALS=1, SILENT_TICKS=10**9)
    true, puller = ends(0), ends(1, link_seconds=20, pull_seconds=600)
    if is_linked:
        keep(true, puller, "first")
        puller.received("first")
    named = {"cluster_id": true.address.cluster_id} if is_linked else {}
    puller.service.pull(pull("lie", *lies(true, 0, 1)))
    silence.wait_begun(1)
    before = call_on_loop(puller.service, tasks_of_this_loop)
    for request in range(1, 101):
        place = lies(true, request, 1)[0].model_copy(update=named)
        if request % 2:
            puller.service.pull(pull(f"lie{request}", place))
        else:
            puller.service.expect(lying_push(request, place))
    puller.pass_turns()
    assert call_on_loop(puller.service, tasks_of_this_loop) == before
    assert silence.begun == 1
    monkeypatch.setattr(peer_links, "SPARE", 0)
    for request in range(1, 101):
        puller.service.cancel(f"lie{request}")
    expected = {f"lie{request}": "pull_cancelled" if request % 2 else "push_cancelled" for request in range(1, 101)}
    assert outcomes_of(puller, expected) == expected
    assert silence.begun == 1


def test_requests_for_a_place_that_is_being_dialled_have_no_task(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client can name one silent place in all of its requests. Then few of them start, and end, in one turn of the loop."""
    few(monkeypatch, DIALS=1, SILENT_TICKS=10**9)
    true, puller = ends(0), ends(1, link_seconds=20, pull_seconds=600)
    puller.service.pull(pull("lie", *lies(true, 0, 1)))
    silence.wait_begun(1)
    before = call_on_loop(puller.service, tasks_of_this_loop)
    names = [f"lie{request}" for request in range(1, 101)]
    for name in names:
        puller.service.pull(pull(name, *lies(true, 0, 1)))
    puller.pass_turns()
    assert call_on_loop(puller.service, tasks_of_this_loop) == before
    started: list[int] = []
    monkeypatch.setattr(peer_links, "STARTED_AT_A_TIME", 8)
    true_start = peer_links.PeerLinks._start_those_in_line

    def start(links: peer_links.PeerLinks, attempt: Any) -> None:
        waiting = len(attempt.in_line)
        true_start(links, attempt)
        started.append(waiting - len(attempt.in_line))

    monkeypatch.setattr(peer_links.PeerLinks, "_start_those_in_line", start)
    monkeypatch.setattr(dials, "SILENT_TICKS", 0)
    puller.service.pull(pull("other", *lies(true, 1, 1)))  # the dial gives way to this one
    expected = dict.fromkeys(["lie", *names], "pull_failed")
    assert outcomes_of(puller, expected) == expected
    assert sum(started) >= len(expected)
    assert max(started) <= 8
    puller.service.cancel("other")


def test_requests_in_line_come_out_when_their_place_is_not_dialled(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, DIALS=0, WAITING=0)
    true, puller = ends(0), ends(1, link_seconds=20, pull_seconds=600)
    puller.service.pull(pull("lie1", *lies(true, 1, 1)))
    puller.service.expect(lying_push(2, lies(true, 2, 1)[0]))
    assert outcomes_of(puller, ("lie1", "lie2")) == {"lie1": "pull_failed", "lie2": "push_missed"}
    assert silence.begun == 0


def test_requests_in_line_come_out_when_the_service_closes(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, DIALS=0)
    true, puller = ends(0), ends(1, link_seconds=20, pull_seconds=600)
    for request in range(10):
        puller.service.expect(lying_push(request, lies(true, request, 1)[0]))
        puller.service.pull(pull(f"pull{request}", *lies(true, 10 + request, 1)))
    puller.pass_turns()
    puller.service.close()
    ended = puller.service.take()
    assert ended.outcomes == {f"lie{n}": "push_cancelled" for n in range(10)} | {
        f"pull{n}": "pull_cancelled" for n in range(10)
    }


def test_requests_in_line_share_a_dial_and_are_carried_out(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, DIALS=1)
    true, puller = ends(0), ends(1, link_seconds=20, pull_seconds=600)
    for request in range(3):
        puller.service.pull(pull(f"lie{request}", *lies(true, request, 1)))
    names = ("one", "two", "three")
    for name in names:
        keep(true, puller, name)
    outcomes = outcomes_of(puller, names)
    assert {name: outcomes[name] for name in names} == dict.fromkeys(names, "pull_done")
    assert silence.order.count(("127.0.0.1", true.address.port)) == 1


@pytest.mark.autojump
async def test_a_place_waits_for_its_dial_no_longer_than_a_link_may_take(
    silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, DIALS=0)
    async with open_cluster(1) as cluster, anyio.create_task_group() as group:
        links = PeerLinks(cluster.datadist, Spawner(group), 20, lambda _: None, Peers(LOOPBACK))
        for port in (26000, 26000, 26001):
            with took(20), pytest.raises(LinkTimeout, match="too many places were being dialled"):
                await links.link(PeerAddress(cluster_id=7, host=SILENT, port=port), "a request")
        assert silence.begun == 0
        group.cancel_scope.cancel()


@pytest.mark.autojump
async def test_a_dial_takes_no_longer_than_what_waiting_left_it(
    silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, DIALS=1, SILENT_TICKS=10**9)
    async with open_cluster(1) as cluster, anyio.create_task_group() as group:
        links = PeerLinks(cluster.datadist, Spawner(group), 20, lambda _: None, Peers(LOOPBACK))

        async def link(port: int) -> None:
            with pytest.raises(LinkTimeout):
                await links.link(PeerAddress(cluster_id=port, host=SILENT, port=port), f"{port}")

        with took(30):
            async with anyio.create_task_group() as both:
                both.start_soon(link, 26000)
                await anyio.sleep(10)
                both.start_soon(link, 26001)
                await anyio.sleep(5)
                assert silence.begun == 1
        assert silence.begun == 2, "the first one ended after 20 s, and the other one had 10 left"
        group.cancel_scope.cancel()


# ---- what peers may miss ----


def test_releases_wait_for_no_turn(ends: Callable[..., End], silence: Silence) -> None:
    """A lease that is not released ends by itself. So a release is dropped if there is no room for it at once."""
    true, puller = ends(0, ORDER, HEADS), ends(1, ORDER, HEADS, link_seconds=20)
    for request in range(100):
        puller.service.release(KeptOrder("released", tuple(lies(true, request)), new_lease_name(), (3,), PROMPT))
        puller.service.decline(lies(true, request)[8], f"transfer{request}")
    puller.pass_turns()
    assert silence.begun == 64
    keep(true, puller, "honest")
    assert puller.received("honest").outcomes["honest"] == "pull_done"
    assert turn_of(true, silence) == 64
    assert silence.begun == 64, "the others were dropped"


def test_a_release_at_a_linked_place_is_told_whatever_else_is_dialled(
    ends: Callable[..., End], silence: Silence
) -> None:
    true, puller = ends(0), ends(1, link_seconds=20)
    keep(true, puller, "first")
    puller.received("first")
    for request in range(100):
        puller.service.release(KeptOrder("released", tuple(lies(true, request, 1)), new_lease_name(), (3,), PROMPT))
    lease = new_lease_name()
    puller.service.release(KeptOrder("released", (true.address,), lease, (3,), PROMPT))
    true.service.keep("second", lease, [3], PROMPT)
    assert true.sent("second").outcomes["second"] == "lease_released"


def test_a_request_that_is_cancelled_leaves_the_line(
    ends: Callable[..., End], silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, DIALS=1)
    true, puller = ends(0), ends(1, link_seconds=20)
    for request in range(50):
        puller.service.pull(pull(f"lie{request}", *lies(true, request, 1)))
    puller.pass_turns()
    monkeypatch.setattr(peer_links, "SPARE", 0, raising=False)
    for request in range(1, 50):
        puller.service.cancel(f"lie{request}")
    keep(true, puller, "honest")
    assert puller.received("honest").outcomes["honest"] == "pull_done"
    assert turn_of(true, silence) == 1


async def test_a_place_that_was_silent_is_not_dialled_for_what_its_peer_may_miss(silence: Silence) -> None:
    async with open_cluster(1) as cluster, anyio.create_task_group() as group:
        links = PeerLinks(cluster.datadist, Spawner(group), 0.05, lambda _: None, Peers(LOOPBACK))
        place = PeerAddress(cluster_id=7, host=SILENT, port=26000)
        for call in (links.link_to_tell(place), links.link_to_tell(place)):
            with pytest.raises(LinkTimeout):
                await call
        assert silence.begun == 1
        assert not links.may_tell(place)
        with pytest.raises(LinkTimeout):
            await links.link(place, "a request")
        assert silence.begun == 2, "a request dials it: its engine may have started meanwhile"
        group.cancel_scope.cancel()
