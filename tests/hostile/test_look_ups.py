"""Host names that clients invent, where a name of ``peers`` has a ``*`` and the name service does not answer.

Look-ups are counted where their threads begin. Names that begin with "silent" get no answer before the test lets them go.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from anyio import wait_all_tasks_blocked

from aiodatadist._cluster import host_names
from aiodatadist._values import peer_budget
from tests.hostile.test_dials import ends, keep
from tests.hostile.test_offers import End, pull
from tests.test_host_names import answer

__all__ = ["ends"]

LISTED = "prefill.kv.svc"
LASTING = {"link_seconds": 3600, "patience_seconds": 3600}
"""For pulls that wait for a silent name until it is let go: one that gives up makes room for another."""
PEERS = ["127.0.0.0/8", LISTED, "*.wild.svc", "*.other.svc"]


class Service:
    """A name service.

    Attributes:
        asked: names, in the order of the questions.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.let_go = threading.Event()
        self.silent = {"silent"}

        def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
            self.asked.append(host)
            if host.lower().startswith(tuple(self.silent)):
                self.let_go.wait(30)
            return answer(["127.0.0.1"])

        monkeypatch.setattr(host_names, "getaddrinfo", look_up)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    made = Service(monkeypatch)
    yield made
    made.let_go.set()


def invent(end: End, requests: int) -> list[Any]:
    """Make offers of names that match an entry, each under its own cluster id."""
    return [
        pull(f"lie{number}", end.place(host=f"silent{number}.wild.svc", cluster_id=10**6 + number))
        for number in range(requests)
    ]


@pytest.mark.parametrize("host", [LISTED, "new.other.svc"], ids=["is listed", "matches another entry"])
def test_names_that_match_one_entry_keep_no_other_name_from_being_found(
    ends: Callable[..., End], service: Service, host: str
) -> None:
    true, puller = ends(0), ends(1, peers=PEERS, **LASTING)
    for lie in invent(true, 200):
        puller.service.pull(lie)
    puller.pass_turns()
    keep(true, puller, "honest", host=host)
    assert puller.received("honest").outcomes["honest"] == "pull_done"
    assert len(service.asked) <= peer_budget.LOOK_UPS + 1, "a client invents cluster ids, and no entries"


def test_a_name_that_was_found_before_is_found_beside_names_that_match_its_entry(
    ends: Callable[..., End], service: Service
) -> None:
    true, puller = ends(0), ends(1, peers=PEERS, **LASTING)
    keep(true, puller, "first", host="true.wild.svc")
    puller.received("first")
    for lie in invent(true, 200):
        puller.service.pull(lie)
    other = ends(2)
    keep(other, puller, "honest", host="true.wild.svc")
    assert puller.received("honest").outcomes["honest"] == "pull_done"


def test_a_listed_name_is_one_name_however_it_is_written(ends: Callable[..., End], service: Service) -> None:
    service.silent.add("prefill")
    true, puller = ends(0), ends(1, peers=PEERS, **LASTING)
    for letters in range(2 ** len("prefill")):
        written = "".join(c.upper() if letters >> n & 1 else c for n, c in enumerate("prefill"))
        puller.service.pull(pull(f"lie{letters}", true.place(host=f"{written}.kv.svc", cluster_id=10**6 + letters)))
    puller.pass_turns()
    assert service.asked == [LISTED]


async def test_few_names_of_one_share_wait(service: Service) -> None:
    names, numbers = host_names.HostNames(), count()

    async def ask() -> None:
        await names.addresses_of(f"silent{next(numbers)}", lambda _: None, "an entry")

    most = peer_budget.LOOK_UPS + peer_budget.WAITING_LOOK_UPS
    asking = [asyncio.ensure_future(ask()) for _ in range(2 * most)]
    await wait_all_tasks_blocked()
    refused = [task for task in asking if task.done()]
    assert len(refused) == most
    assert {str(task.exception()) for task in refused} == {
        f"[Errno 11] {peer_budget.WAITING_LOOK_UPS} other names wait to be looked up"
    }
    assert await names.addresses_of("another", lambda _: None, "another entry") == ["127.0.0.1"]
    service.let_go.set()
    await asyncio.gather(*asking, return_exceptions=True)
    assert sum(task.exception() is None for task in asking) == most
