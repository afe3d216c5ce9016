"""Blocks of a busy loop's KV cache: each order comes out once, however it ended, and no call waits."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import chain
from typing import Any

import anyio
import numpy as np
import pytest

from aiodatadist import CacheManager, LeaseTicket, LLMException, ParamInvalid, new_lease_name, prompt_digest
from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.ended import Ended
from aiodatadist._adapters.peer_links import PeerLinks
from aiodatadist._adapters.pull_orders import KeptOrder, PullOrder, WorkerAddress, lease_name, tickets
from aiodatadist._adapters.regions import ALL_HEADS, Heads
from aiodatadist._adapters.settings import Settings
from aiodatadist.testing import soft_fault, soft_faults_cleared
from tests import children
from tests.adapters.kv_memory import Order, opaque
from tests.held import held_transfer

BLOCKS, BYTES = 16, 4096
LAYOUT: dict[str, str | int] = {"block_size": 16, "dtype": "uint8"}
PROMPT = prompt_digest([1, 2, 3])


def ended_in(service: BlockService, wanted: str, request: str) -> Ended:
    """Return all that came out of a service up to a request's end, which is in the field ``wanted``."""
    found = Ended()
    while request not in getattr(found, wanted):
        ended = service.take()
        found.sent |= ended.sent
        found.received |= ended.received
        found.failed |= ended.failed
        found.outcomes |= ended.outcomes
        found.counters += ended.counters
        time.sleep(0.001)
    return found


class End:
    """A service and its arrays; those of end ``n`` hold ``16 * n + block``."""

    def __init__(
        self,
        number: int,
        settings: Settings,
        layout: dict[str, str | int],
        axes: Order | None = None,
        heads: tuple[Heads, ...] = (ALL_HEADS,),
        tokens: int = 16,
    ) -> None:
        self.service = BlockService(settings.model_copy(update={"device_id": number}))
        self.arrays = [np.zeros((BLOCKS, BYTES), np.uint8) for _ in range(2)]
        for array in self.arrays:
            array[:] = (16 * number + np.arange(BLOCKS))[:, None]
        self.address = self.service.open(
            opaque([[array] for array in self.arrays], BLOCKS, tokens, axes, heads), layout
        )

    def holds(self, block: int) -> set[int]:
        return {int(value) for array in self.arrays for value in np.unique(array[block])}

    def until(self, wanted: str, request: str) -> Ended:
        """Return all that came out up to a request's end."""
        return ended_in(self.service, wanted, request)


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with ExitStack() as stack:
        made = [End(n, Settings(link_seconds=5, patience_seconds=2), LAYOUT) for n in range(2)]
        for each in made:
            stack.enter_context(closing(each.service))
        yield made[0], made[1]


def order(request: str, lease: str, source: WorkerAddress, **changes: Any) -> PullOrder:
    return PullOrder(
        **{
            "request": request,
            "sources": (source,),
            "lease": lease,
            "blocks": (3, 9),
            "into": (0, 1),
            "prompt_digest": PROMPT,
            **changes,
        }
    )


def test_blocks_that_are_kept_are_pulled(ends: tuple[End, End]) -> None:
    owner, puller = ends
    lease = new_lease_name()
    puller.service.pull(order("r", lease, owner.address))  # a router is faster than a scheduler's next step
    owner.service.keep("r", lease, [3, 9], PROMPT)
    ended = puller.until("received", "r")
    assert ended.failed == {}
    assert ended.counters == {"pull_done": 1, "pulled_blocks": 2, "pulled_bytes": 2 * 2 * BYTES}
    assert (puller.holds(0), puller.holds(1), puller.holds(2)) == ({3}, {9}, {18})
    assert owner.until("sent", "r").counters == {"lease_taken": 1}
    assert puller.service.take().received == set()


def test_a_pull_that_fails_names_its_blocks_and_releases_the_owners(ends: tuple[End, End]) -> None:
    owner, puller = ends
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT)
    with soft_faults_cleared():
        soft_fault("HcclBatchGet:exec=507053")
        puller.service.pull(order("r", lease, owner.address))
        ended = puller.until("received", "r")
    assert ended.failed == {"r": (0, 1)}
    assert ended.counters == {"pull_failed": 1}
    assert owner.until("sent", "r").counters == {"lease_released": 1}


def test_a_byte_that_changes_on_its_way_fails_its_block_where_checksums_are_compared() -> None:
    settings = Settings(link_seconds=5, patience_seconds=2, transfer_checksum=True)
    owner, puller = (End(n, settings, LAYOUT) for n in range(2))
    with closing(owner.service), closing(puller.service), soft_faults_cleared():
        lease = new_lease_name()
        owner.service.keep("r", lease, [3, 9], PROMPT)
        soft_fault("HcclBatchGet:flip=-1")
        puller.service.pull(order("r", lease, owner.address))
        assert puller.until("received", "r").failed == {"r": (1,)}


def test_a_pull_that_is_cancelled_comes_out_and_releases_the_owners(ends: tuple[End, End]) -> None:
    owner, puller = ends
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT)
    with held_transfer() as copy:
        puller.service.pull(order("r", lease, owner.address))
        anyio.run(copy.arrived)
        anyio.run(copy.stopped, lambda: puller.service.cancel("r"))
        ended = puller.until("received", "r")
    assert ended.failed == {"r": (0, 1)}
    assert ended.counters == {"pull_cancelled": 1}
    assert owner.until("sent", "r").counters == {"lease_released": 1}
    puller.service.cancel("r")  # it has ended


def test_a_request_of_one_worker_waits_in_one_task(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may wait, and each task is some thirty objects, which every collection of garbage looks at."""
    owner, puller = ends
    tasks: dict[str, object] = {}
    link, pull_leased = PeerLinks.link, CacheManager.pull_leased

    async def linking(links: PeerLinks, peer: WorkerAddress, *told: Any) -> object:
        tasks["links"] = asyncio.current_task()
        return await link(links, peer, *told)

    def pulling(*told: Any, **options: Any) -> object:
        tasks["pulls"] = asyncio.current_task()
        return pull_leased(*told, **options)

    monkeypatch.setattr(PeerLinks, "link", linking)
    monkeypatch.setattr(CacheManager, "pull_leased", pulling)
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT)
    puller.service.pull(order("r", lease, owner.address))
    assert puller.until("received", "r").failed == {}
    assert tasks["links"] is tasks["pulls"] is not None


def test_tickets_of_many_workers_look_at_the_blocks_once(ends: tuple[End, End]) -> None:
    looks = 0

    class Blocks(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    source, lease = ends[0].address, new_lease_name()
    planes = source.memory.model_copy(update={"planes": source.memory.planes * 2})
    changes: dict[str, Any] = {"memory": planes}
    sources = [source.model_copy(update={**changes, "cluster_id": n, "cache_ids": (n + 1, n + 2)}) for n in range(8)]
    made = tickets(sources, lease, [Blocks(range(100))])
    assert looks == 1
    assert [[(t.cluster_id, t.cache_id, t.lease) for t in each.values()] for each in made] == [
        [(n, n + 1, lease), (n, n + 2, lease_name(lease, 1))] for n in range(8)
    ]
    for ticket in chain(*(each.values() for each in made)):
        assert ticket == LeaseTicket.of(ticket.model_dump(mode="json")), "as if it had been read"
    assert tickets([], lease, [(1,)]) == []


def test_an_engine_that_does_not_want_the_blocks(ends: tuple[End, End]) -> None:
    owner, puller = ends
    lease = new_lease_name()
    puller.service.release(
        KeptOrder("released", (owner.address,), lease, (3, 9), PROMPT)
    )  # before the owner's scheduler has said so
    owner.service.keep("r", lease, [3, 9], PROMPT)
    assert owner.until("sent", "r").counters == {"lease_released": 1}


def test_no_engine_comes(ends: tuple[End, End]) -> None:
    owner, _ = ends
    owner.service.keep("r", new_lease_name(), [3, 9], PROMPT, 0.05)
    assert owner.until("sent", "r").counters == {"lease_expired": 1}


def test_an_owner_that_is_gone(ends: tuple[End, End]) -> None:
    owner, puller = ends
    owner.service.close()
    puller.service.pull(order("r", new_lease_name(), owner.address))
    assert puller.until("received", "r").failed == {"r": (0, 1)}


def test_layouts_that_differ_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(link_seconds=5, patience_seconds=2)
    owner, puller = End(0, settings, {**LAYOUT, "dtype": "float16"}), End(1, settings, LAYOUT)
    with closing(owner.service), closing(puller.service):
        lease = new_lease_name()
        owner.service.keep("r", lease, [3, 9], PROMPT)
        puller.service.pull(order("r", lease, owner.address))
        assert puller.until("received", "r").failed == {"r": (0, 1)}
        assert f"dtype is uint8 here and float16 at 127.0.0.1:{owner.address.port}" in caplog.text
        assert owner.until("sent", "r").counters == {"lease_released": 1}


def test_tensors_of_two_sizes_in_a_layer() -> None:
    """Pull all tensors or none: no tensor counts alone."""
    layers = [
        [[np.full((BLOCKS, nbytes), 16 * number, np.uint8) for nbytes in (BYTES, 96)] for _ in range(3)]
        for number in (0, 1)
    ]
    with ExitStack() as stack:
        owner, puller = (BlockService(Settings(device_id=number, patience_seconds=2)) for number in (0, 1))
        for service in (owner, puller):
            stack.enter_context(closing(service))
        address, _ = (
            each.open(opaque(mine, BLOCKS), LAYOUT) for each, mine in zip((owner, puller), layers, strict=True)
        )
        for number, fault in enumerate(["", "HcclBatchGet:exec=507053"]):
            lease, request = new_lease_name(), f"r{number}"
            owner.keep(request, lease, [3, 9], PROMPT)
            with soft_faults_cleared():
                soft_fault(fault)
                puller.pull(PullOrder(request, (address,), lease, (3, 9), (0, 1 + number), PROMPT))
                pulled, kept = Ended(), Ended()
                while not (pulled.received and kept.sent):
                    pulled, kept = (
                        found if found.outcomes else service.take()
                        for found, service in ((pulled, puller), (kept, owner))
                    )
            assert pulled.outcomes == {request: "pull_failed" if fault else "pull_done"}
            if fault:
                assert pulled.failed == {request: (0, 2)}
            else:
                assert kept.outcomes == {request: "lease_taken"}
                assert pulled.counters["pulled_bytes"] == 2 * 3 * (BYTES + 96)
                assert {int(value) for layer in layers[1] for array in layer for value in array[:2].ravel()} == {0}
                assert {int(value) for layer in layers[1] for array in layer for value in array[2:].ravel()} == {16}


def test_what_cannot_be_kept_or_pulled_comes_out_all_the_same(ends: tuple[End, End]) -> None:
    owner, puller = ends
    for number, block in enumerate((BLOCKS, -1, 1.5)):
        owner.service.keep(f"k{number}", new_lease_name(), [block], PROMPT)  # type: ignore[list-item]
        assert owner.until("sent", f"k{number}").counters == {"lease_failed": 1}
    puller.service.pull(order("r", new_lease_name(), owner.address, into=(0, BLOCKS)))
    assert puller.until("received", "r").failed == {"r": (0, BLOCKS)}


@pytest.mark.parametrize(("digest", "error"), [(None, TypeError), ("0" * 16, TypeError), (b"prompt", ValueError)])
def test_a_digest_that_is_none_is_refused_at_once(ends: tuple[End, End], digest: Any, error: type[Exception]) -> None:
    owner, _ = ends
    lease = new_lease_name()
    calls: list[Callable[[], None]] = [
        lambda: owner.service.keep("r", lease, [3], digest),
        lambda: owner.service.pull(order("r", lease, owner.address, prompt_digest=digest)),
        lambda: owner.service.release(KeptOrder("released", (owner.address,), lease, (3,), digest)),
    ]
    for call in calls:
        with pytest.raises(error, match="prompt_digest"):
            call()
    assert owner.service.take() == Ended()


def test_many_requests(ends: tuple[End, End]) -> None:
    owner, puller = ends
    leases = {f"r{i}": new_lease_name() for i in range(200)}
    for i, (request, lease) in enumerate(leases.items()):
        owner.service.keep(request, lease, [i % BLOCKS], PROMPT)
        puller.service.pull(order(request, lease, owner.address, blocks=(i % BLOCKS,), into=(i % BLOCKS,)))
    received: set[str] = set()
    sent: set[str] = set()
    while (len(received), len(sent)) != (200, 200):
        received |= puller.service.take().received
        sent |= owner.service.take().sent
        time.sleep(0.001)
    assert received == sent == set(leases)
    assert [puller.holds(block) for block in range(BLOCKS)] == [{block} for block in range(BLOCKS)]


def test_a_service_that_is_not_open_or_badly_set_up() -> None:
    with closing(BlockService(Settings())) as service, pytest.raises(LLMException, match="not open"):
        service.keep("r", new_lease_name(), [1], PROMPT)
    settings = Settings(host="0.0.0.0", advertise_host="10.0.0.7")
    with closing(BlockService(settings)) as service, pytest.raises(LLMException, match="auth_key"):
        service.open(opaque([[np.zeros((4, 8), np.uint8)]], 4), {})
    service.close()


# ---- orders that make no sense, and peers that are not there ----


WRONG: dict[str, dict[str, Any]] = {
    "a name that is no host": {"host": "no-such-host.invalid", "cluster_id": 5},
    "no address": {"host": "300.1.1.1", "cluster_id": 5},
    "its own cluster": {"cluster_id": 0},
    "a cache id that is none": {"cache_ids": (0,)},
    "a negative block": {"blocks": (-1, 9)},
    "no blocks": {"blocks": ()},
    "fewer blocks": {"blocks": (3,)},
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_order_that_makes_no_sense_comes_out_and_others_go_on(ends: tuple[End, End], kind: str) -> None:
    owner, puller = ends
    wrong = dict(WRONG[kind])
    if "cluster_id" in wrong:
        wrong["cluster_id"] = wrong["cluster_id"] or puller.address.cluster_id
    blocks = wrong.pop("blocks", (3, 9))
    puller.service.pull(
        order("wrong", new_lease_name(), owner.address.model_copy(update=wrong), blocks=blocks, into=(4, 5))
    )
    assert puller.until("received", "wrong").failed == {"wrong": (4, 5)}
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT)
    puller.service.pull(order("r", lease, owner.address))
    assert puller.until("received", "r").failed == {}


def test_a_peer_may_be_named(ends: tuple[End, End]) -> None:
    owner, puller = ends
    lease = new_lease_name()
    owner.service.keep("r", lease, [3, 9], PROMPT)
    puller.service.pull(order("r", lease, owner.address.model_copy(update={"host": "localhost"})))
    assert puller.until("received", "r").failed == {}


def test_a_second_order_of_a_request_is_ignored(ends: tuple[End, End]) -> None:
    owner, puller = ends
    lease = new_lease_name()
    with held_transfer() as copy:
        owner.service.keep("r", lease, [3, 9], PROMPT)
        puller.service.pull(order("r", lease, owner.address))
        anyio.run(copy.arrived)
        puller.service.pull(order("r", lease, owner.address, into=(2, 3)))
        copy.release()
        assert puller.until("received", "r").counters["pull_done"] == 1
    assert puller.holds(2) == {18}


def test_requests_to_a_peer_that_does_not_answer_wait_side_by_side() -> None:
    settings = Settings(link_seconds=1, pull_seconds=1)
    puller = End(1, settings, LAYOUT)
    with closing(puller.service), socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        source = puller.address.model_copy(update={"cluster_id": 9, "port": silent.getsockname()[1]})
        for n in range(8):
            puller.service.pull(order(f"r{n}", new_lease_name(), source))
        received: set[str] = set()
        while len(received) < 8:
            received |= puller.service.take().received
            time.sleep(0.001)
        silent.setblocking(False)
        dials = 0
        with suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                dials += 1
        assert dials == 1, "all of them wait for one attempt"


STUCK = """
import os, sys, time
from aiodatadist import InternalError
from aiodatadist._link.transfers import transfers
from aiodatadist.testing import soft_fault
from tests.adapters.test_block_service import *
settings = Settings(link_seconds=5, patience_seconds=1, sync_kv_timeout=300)
owner, puller = End(0, settings, LAYOUT), End(1, settings, LAYOUT)
lease = new_lease_name()
owner.service.keep("r", lease, [3, 9], PROMPT)
if "portions" in sys.argv:
    transfers.PORTION_BYTES = 1
soft_fault("HcclBatchGet:hang;aclrtStreamAbort:fail=507000@*")
puller.service.pull(order("r", lease, owner.address))
if "cancelled" in sys.argv:
    links = puller.service._door.life._datadist._engine.links
    while not any(each.transfers.running.transfers for each in links.current):
        time.sleep(0.001)
    puller.service.cancel("r")
for call in (lambda: puller.until("received", "r"), lambda: puller.service.keep("k", new_lease_name(), [1], PROMPT)):
    try:
        call()
    except InternalError as error:
        print(error, flush=True)
for end in (puller, owner):
    end.service.close()
print("closed", flush=True)
os._exit(0)  # not as Python ends: a thread of softnpu never does
"""


@pytest.mark.parametrize("words", [(), ("cancelled",), ("portions",), ("cancelled", "portions")], ids=" ".join)
def test_a_cache_that_the_device_does_not_let_go_of_is_told(words: tuple[str, ...]) -> None:
    """The engine would go on to use blocks that may be written to at any time."""
    done = children.run([sys.executable, "-c", STUCK, *words], capture_output=True, text=True, timeout=60, check=False)
    told = done.stdout.splitlines()
    assert (len(told), told[-1]) == (3, "closed"), done.stderr
    assert all("the KV cache is lost" in each and "start the engine again" in each for each in told[:2])


def test_a_rank_that_is_none() -> None:
    with pytest.raises(ParamInvalid, match="rank is 2: must be from 0 to 1"):
        BlockService(Settings(), 2, 2)
