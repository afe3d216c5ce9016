"""Offers in ``kv_transfer_params`` from clients of an engine: whom they make it dial, and what they make it log.

Connections, look-ups and threads are counted where they begin; log lines in bytes.
"""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

from aiodatadist import ParamInvalid, new_lease_name, prompt_digest
from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.ended import Ended
from aiodatadist._adapters.pull_orders import KeptOrder, PullOrder, WorkerAddress
from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.regions import ALL_HEADS, Heads
from aiodatadist._adapters.settings import Settings
from aiodatadist._cluster import dial, host_names
from aiodatadist._testing.views import call_on_loop
from aiodatadist.testing import inside
from tests.adapters.kv_memory import Order, opaque, opaque_memory
from tests.adapters.test_block_service import ended_in
from tests.hostile.vllm_names import asking_manager, both_halves, sglang_manager

BLOCKS, BYTES = 8, 4096
LAYOUT: dict[str, str | int] = {"block_size": 16, "dtype": "uint8"}
PROMPT = prompt_digest([1, 2, 3])
PATIENCE: dict[str, Any] = {"link_seconds": 5, "patience_seconds": 1}
ELSEWHERE = [
    ("198.51.100.1", 22),
    ("10.0.0.9", 6379),
    ("169.254.169.254", 80),
    ("0.0.0.0", 26000),
    ("::ffff:198.51.100.1", 26000),
    ("2001:db8::1", 26000),
    ("fe80::1%lo", 26000),
    ("metadata.internal", 80),
    ("localhost.example.com", 26000),
]


class Reached:
    """Dials, look-ups and threads that an engine began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dialled: list[tuple[str, int]] = []
        self.looked_up: list[str] = []
        self.threads = 0
        connected: Callable[..., Awaitable[socket.socket]] = vars(dial)["connected"]
        thread = vars(host_names)["DaemonThread"]

        async def connect(host: str, port: int, first: bytes = b"") -> socket.socket:
            self.dialled.append((host, port))
            if host != "127.0.0.1":
                raise ConnectionRefusedError("not from a test")
            return await connected(host, port, first)

        def look_up(host: str, *_: Any, **__: Any) -> Any:
            self.looked_up.append(host)
            raise socket.gaierror(socket.EAI_NONAME, "not from a test")

        def start(*args: Any) -> Any:
            self.threads += 1
            return thread(*args)

        monkeypatch.setattr(dial, "connected", connect)
        monkeypatch.setattr(host_names, "getaddrinfo", look_up)
        monkeypatch.setattr(host_names, "DaemonThread", start)

    @property
    def total(self) -> int:
        return len(self.dialled) + len(self.looked_up) + self.threads


class End:
    """A worker."""

    def __init__(self, number: int, order: Order | None = None, heads: Heads = ALL_HEADS, **settings: Any) -> None:
        self.service = BlockService(Settings(**{**PATIENCE, "device_id": number, **settings}))
        self.arrays = [np.zeros((BLOCKS, BYTES), np.uint8)]
        self.address = self.service.open(
            opaque([[array] for array in self.arrays], BLOCKS, 16, order, (heads,)), LAYOUT
        )

    def place(self, **changes: Any) -> WorkerAddress:
        return WorkerAddress.model_validate({**self.address.model_dump(), **changes})

    def received(self, request: str) -> Ended:
        return ended_in(self.service, "received", request)

    def sent(self, request: str) -> Ended:
        return ended_in(self.service, "sent", request)

    def pass_turns(self) -> None:
        """Pass enough turns of the event loop for all work to begin that waits for nothing."""

        async def turns() -> None:
            for _ in range(200):
                await anyio.lowlevel.checkpoint()

        call_on_loop(self.service, turns)

    def links(self) -> int:
        links = inside(self.service).links
        return len(links.current) + len(links.opening)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Reached:
    return Reached(monkeypatch)


@pytest.fixture
def ends() -> Iterator[Callable[..., End]]:
    with ExitStack() as stack:

        def made(number: int, **settings: Any) -> End:
            end = End(number, **settings)
            stack.enter_context(closing(end.service))
            return end

        yield made


@pytest.fixture(scope="module")
def vllm() -> Iterator[SimpleNamespace]:
    with both_halves() as halves:
        yield halves


def pull(request: str, *sources: WorkerAddress) -> PullOrder:
    return PullOrder(request, sources, new_lease_name(), (3,), (0,), PROMPT)


# ---- whom a worker dials ----


@pytest.mark.parametrize(("host", "port"), ELSEWHERE)
def test_a_worker_reaches_nothing_but_its_peers(
    ends: Callable[..., End], reached: Reached, host: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    end = ends(0)
    elsewhere = end.place(cluster_id=7, host=host, port=port)
    end.service.release(KeptOrder("r", (elsewhere,), new_lease_name(), (3,), PROMPT))
    end.service.decline(elsewhere, "transfer")
    end.service.pull(pull("pulled", elsewhere))
    assert end.received("pulled").failed == {"pulled": (0,)}
    end.service.expect(ExpectOrder("pushed", elsewhere, "t", 0, (1,)))
    assert end.received("pushed").failed == {"pushed": (1,)}
    end.pass_turns()
    assert reached.total == 0, vars(reached)
    assert f"offer refused: {host} is not in peers" in caplog.text


@pytest.mark.parametrize(
    ("peers", "is_one"),
    [
        (["127.0.0.0/8"], True),
        (["127.0.0.1"], True),
        ([{"host": "127.0.0.1", "cluster_ids": "0-18446744073709551615"}], True),
        ([], False),
        (["127.0.0.2", "localhost", "10.0.0.0/8"], False),
        ([{"host": "127.0.0.1", "ports": 1}], False),
        ([{"host": "127.0.0.1", "cluster_ids": "1-9"}], False),
    ],
)
def test_a_true_engine_is_dialled_if_it_is_one_of_peers(
    ends: Callable[..., End], reached: Reached, peers: list[Any], is_one: bool
) -> None:
    owner, puller = ends(0, cluster_id=1000), ends(1, peers=peers)
    order = pull("r", owner.address)
    owner.service.keep("r", order.lease, [3], PROMPT)
    puller.service.pull(order)
    assert puller.received("r").failed == ({} if is_one else {"r": (0,)})
    assert bool(reached.dialled) == is_one
    assert reached.looked_up == []


def test_a_name_is_looked_up_if_it_matches_as_it_is_written(ends: Callable[..., End], reached: Reached) -> None:
    end = ends(0, peers=["prefill-*.kv.svc"])
    for number, host in enumerate(("prefill-1.kv.svc", "prefill-1.evil.kv.svc", "prefill-1.kv.svc.evil.com", "kv.svc")):
        end.service.pull(pull(f"r{number}", end.place(cluster_id=7, host=host)))
        end.received(f"r{number}")
    assert reached.looked_up == ["prefill-1.kv.svc"]
    assert reached.dialled == []


def test_of_many_workers_few_are_told_at_a_time(ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch) -> None:
    end, most, open_now = ends(0), 0, 0
    go_on, begun = anyio.Event(), threading.Semaphore(0)

    async def connect(*_: Any) -> socket.socket:
        nonlocal most, open_now
        begun.release()
        open_now += 1
        most = max(most, open_now)
        await go_on.wait()
        open_now -= 1
        raise ConnectionRefusedError("not from a test")

    monkeypatch.setattr(dial, "connected", connect)
    workers = [end.place(cluster_id=100 + number) for number in range(64)]
    end.service.release(KeptOrder("r", tuple(workers), new_lease_name(), (3,), PROMPT))
    assert all(begun.acquire(timeout=30) for _ in range(8))
    end.pass_turns()
    assert open_now == most == 8

    async def let_go() -> None:
        go_on.set()

    call_on_loop(end.service, let_go)
    end.pass_turns()
    assert most == 8


# ---- where a link leads ----


def test_a_link_that_leads_elsewhere_is_not_used(
    ends: Callable[..., End], reached: Reached, caplog: pytest.LogCaptureFixture
) -> None:
    """The id of a cluster that is linked, at the address of another one."""
    true, other, puller = ends(0), ends(2), ends(1)
    order = pull("true", true.address)
    true.service.keep("true", order.lease, [3], PROMPT)
    puller.service.pull(order)
    assert puller.received("true").failed == {}
    begun = list(reached.dialled)
    puller.service.pull(pull("relayed", true.place(port=other.address.port)))
    assert puller.received("relayed").failed == {"relayed": (0,)}
    puller.service.expect(ExpectOrder("pushed", true.place(port=other.address.port), "t", 0, (1,)))
    assert puller.received("pushed").failed == {"pushed": (1,)}
    assert reached.dialled == begun + [("127.0.0.1", other.address.port)] * 2, "another cluster listens there"
    place = f"127.0.0.1:{true.address.port}, not to 127.0.0.1:{other.address.port}"
    assert f"offer refused: the link to cluster {true.address.cluster_id} leads to {place}" in caplog.text
    again = pull("again", true.address)
    true.service.keep("again", again.lease, [3], PROMPT)
    puller.service.pull(again)
    assert puller.received("again").failed == {}, "the true engine's link continues"


def test_an_order_of_more_blocks_than_it_has_room_for_keeps_none_of_their_numbers(
    ends: Callable[..., End], reached: Reached, caplog: pytest.LogCaptureFixture
) -> None:
    """Each number costs memory for as long as the order waits: for a lease that does not exist, say."""
    owner, puller = ends(0), ends(1)
    order = pull("r", owner.address)
    many = replace(order, blocks=tuple(range(42_000)))
    puller.service.pull(many)
    assert puller.received("r").failed == {"r": (0,)}
    assert "42000 blocks are offered from number 0 on: there is only room for 1" in caplog.text
    puller.service.pull(replace(many, request="rest", blocks=many.blocks[:8], first=7))
    owner.service.keep("rest", order.lease, many.blocks[:8], PROMPT)
    assert puller.received("rest").failed == {}, "those before the first one are not wanted"


# ---- what an engine's scheduler makes of it ----


def offer(**changes: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "p", "remote_block_ids": [1, 2],
        "remote_num_tokens": 32, "remote_block_size": 16, "lease": new_lease_name(), "lease_seconds": 60.0,
        "workers": [worker()], **changes,
    }  # fmt: skip


def worker(**changes: Any) -> dict[str, Any]:
    return {
        "cluster_id": 7, "host": "127.0.0.1", "port": 26000, "cache_ids": [1], "layout": dict(LAYOUT),
        "memory": json.loads(opaque_memory().model_dump_json()), **changes,
    }  # fmt: skip


def region(**changes: Any) -> dict[str, Any]:
    """Return a memory with one region, which differs in something."""
    memory: dict[str, Any] = json.loads(opaque_memory().model_dump_json())
    memory["regions"][0].update(changes)
    return memory


def pushed(**changes: Any) -> dict[str, Any]:
    prefill = {"cluster_id": 7, "host": "127.0.0.1", "port": 26000, **changes}
    return {"do_remote_prefill": True, "transfer_id": "t", "prefill": prefill}


class Scheduler:
    """The scheduler's half over a request, and the bytes that it logs."""

    def __init__(self, vllm: SimpleNamespace, **settings: Any) -> None:
        self.side = vllm.scheduler_side.SchedulerSide(Settings(**settings), 16, BLOCKS)
        self.log = io.StringIO()
        self._handler = logging.StreamHandler(self.log)
        self._status = vllm.scheduler_side.RequestStatus.FINISHED_ABORTED

    def go_through(self, params: Any, name: str = "r") -> tuple[int, bool]:
        """Let a request wait for a while, and then be scheduled or not."""
        request = SimpleNamespace(
            request_id=name, kv_transfer_params=params, num_prompt_tokens=32, num_computed_tokens=0,
            status=self._status, prompt_token_ids=[0] * 32, lora_request=None, cache_salt=None, mm_features=[],
        )  # fmt: skip
        logger = logging.getLogger()
        before = logger.level
        logger.addHandler(self._handler)
        logger.setLevel(logging.DEBUG)
        try:
            self.side.arrived(request)
            for _ in range(10):
                found: tuple[int, bool] = self.side.matched_tokens(request, 0)
            if not found[0]:
                self.side.allocated(request, [1, 2], 0)
            self.side.finished(request, [1, 2])
        finally:
            logger.removeHandler(self._handler)
            logger.setLevel(before)
        return found

    def orders(self) -> Any:
        none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[])
        return self.side.take_orders(SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=none))


@pytest.mark.parametrize(("host", "port"), ELSEWHERE)
@pytest.mark.parametrize("kind", ["pulled", "pushed"])
def test_an_offer_of_elsewhere_is_refused_before_anything_is_ordered(
    vllm: SimpleNamespace, kind: str, host: str, port: int
) -> None:
    scheduler = Scheduler(vllm)
    place = {"host": host, "port": port}
    params = pushed(**place) if kind == "pushed" else offer(workers=[worker(), worker(**place)])
    assert scheduler.go_through(params) == (0, False)
    orders = scheduler.orders()
    assert (orders.holds, orders.loads, orders.releases, orders.expects, orders.declines) == ([], [], [], [], [])
    assert scheduler.log.getvalue() == f"request r: offer refused: {host} is not in peers\n"


def test_an_offer_of_a_peer_is_taken_and_released_if_it_is_not_needed(vllm: SimpleNamespace) -> None:
    scheduler = Scheduler(vllm)
    assert scheduler.go_through(offer()) == (32, True)
    assert len(scheduler.orders().releases) == 1
    assert scheduler.log.getvalue() == ""


@pytest.fixture
def read(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the list of what the scheduler's half has read."""
    found: list[object] = []
    original = vllm.offer.read_foreign

    def counted(data: object, *arguments: Any, **limits: Any) -> Any:
        found.append(data)
        return original(data, *arguments, **limits)

    monkeypatch.setattr(vllm.offer, "read_foreign", counted)
    return found


@pytest.mark.parametrize("made", [offer, pushed])
def test_an_offer_is_read_once_however_long_its_request_waits(
    vllm: SimpleNamespace, read: list[object], made: Callable[[], dict[str, Any]]
) -> None:
    scheduler = Scheduler(vllm)
    params = made()
    assert scheduler.go_through(params) == (32, True)
    assert read == [params]
    assert scheduler.go_through(made()) == (32, True), "another request of the same name"
    assert len(read) == 2
    params["do_remote_prefill"] = True
    assert scheduler.go_through(params) == (32, True), "the first one has ended"
    assert len(read) == 3


def test_another_offer_or_prompt_under_the_same_name_is_read(vllm: SimpleNamespace, read: list[object]) -> None:
    offers, true = vllm.offer.Offers(1, Settings().allowed_peers(), 64), offer()
    for params, tokens, count in ((true, 32, 1), (true, 32, 1), (offer(), 32, 2), (true, 32, 3), (true, 16, 4)):
        found = offers.offer_of("r", params, tokens)
        assert (found is None) == (tokens == 16), "it has more blocks than a prompt of 16 tokens"
        assert len(read) == count


def test_of_the_offers_that_wait_a_few_are_kept(vllm: SimpleNamespace, read: list[object]) -> None:
    offers = vllm.offer.Offers(1, Settings().allowed_peers(), 64)
    params = [offer() for _ in range(vllm.offer.MAX_WAITING + 1)]
    for number, each in enumerate(params):
        assert offers.offer_of(f"r{number}", each, 32) is not None
    offers.offer_of("r1", params[1], 32)
    assert len(read) == len(params), "it was kept"
    offers.offer_of("r0", params[0], 32)
    assert len(read) == len(params) + 1, "it made room for the last one"


@pytest.mark.parametrize(("place", "why"), [
    ({"cluster_id": 2**64 - 1}, "there cannot be 2 workers from this address upwards"),
    ({"port": 65535}, "there cannot be 2 workers from this address upwards"),
    ({"cluster_id": 6}, "cluster 7 is one of this engine's workers"),
])  # fmt: skip
def test_each_worker_that_a_rank_may_ask_is_looked_at(vllm: SimpleNamespace, place: dict[str, Any], why: str) -> None:
    """Name fewer workers than this engine has: its second one asked for an address that cannot be, and ended vLLM."""
    scheduler = Scheduler(vllm)
    scheduler.side = vllm.scheduler_side.SchedulerSide(Settings(), 16, BLOCKS, ranks=2)
    scheduler.side.meet({rank: WorkerAddress.model_validate(worker(cluster_id=7 + rank)) for rank in range(2)})
    params = {**pushed(**{"cluster_id": 100, **place}), "prefill_workers": 1}
    assert scheduler.go_through(params) == (0, False)
    assert why in scheduler.log.getvalue()
    orders = scheduler.orders()
    assert (orders.expects, orders.declines) == ([], [])
    true = {**pushed(cluster_id=100), "prefill_workers": 1}
    assert scheduler.go_through(true) == (32, True)


@pytest.mark.parametrize("theirs", [1, 2, 4, 8])
@pytest.mark.parametrize("mine", [1, 2, 4, 8])
def test_no_rank_asks_for_another_worker_than_the_offer_was_read_for(
    vllm: SimpleNamespace, mine: int, theirs: int
) -> None:
    read = vllm.offer.PushOffer.model_validate({**pushed(), "prefill_workers": theirs})
    asked = {rank for each in range(mine) for rank in (each, *range(each, theirs, mine))}
    assert asked == set(range(read.asked(mine)))


def test_an_engine_on_the_network_dials_no_address_that_it_was_not_given(vllm: SimpleNamespace) -> None:
    for settings, found in (
        ({"host": "10.0.0.7"}, (0, False)),
        ({"host": "10.0.0.7", "peers": ["10.0.0.0/24"]}, (32, True)),
        ({"host": "10.0.0.7", "peers": []}, (0, False)),
    ):
        scheduler = Scheduler(vllm, **settings)
        assert scheduler.go_through(offer(workers=[worker(host="10.0.0.8")])) == found


LINES = "\r\nWARNING: all is well\x1b[2J\u2028\u202e\x00"
HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "4096 workers": lambda: offer(workers=[worker(cluster_id=n) for n in range(4096)]),
    "65 workers": lambda: offer(workers=[worker(cluster_id=n) for n in range(65)]),
    "a megabyte of layout": lambda: offer(workers=[worker(layout={f"{n}": "x" * 1024 for n in range(1024)})]),
    "a layout of a megabyte": lambda: offer(workers=[worker(layout={"dtype": "x" * (1 << 20)})]),
    "33 entries of layout": lambda: offer(workers=[worker(layout={f"{n}": n for n in range(33)})]),
    "a long word in a layout": lambda: offer(workers=[worker(layout={"dtype": "x" * 65})]),
    "2.6 MB": lambda: offer(remote_block_ids=list(range(400_000))),
    "a large offer": lambda: offer(remote_block_ids=list(range(100_000, 165_536))),
    "a block more than the prompt has": lambda: offer(remote_block_ids=[1, 2, 3], remote_num_tokens=48),
    "a block more than the tokens that it names": lambda: offer(remote_num_tokens=16),
    "42000 blocks of a short prompt": lambda: offer(remote_block_ids=list(range(42_000)), remote_num_tokens=1 << 30),
    "huge numbers": lambda: offer(remote_block_ids=[1 << 100_000] * 100),
    "lines in the name": lambda: offer(remote_request_id=LINES * 100),
    "lines in the host": lambda: offer(workers=[worker(host=LINES)]),
    "lines in a name of a layout": lambda: offer(workers=[worker(layout={LINES: LINES * 100})]),
    "lines in an unknown field": lambda: offer(workers=[{**worker(), LINES: LINES}]),
    "lines behind an address": lambda: offer(workers=[worker(host=f"fe80::1%{LINES}")]),
    "a long host": lambda: offer(workers=[worker(host="a." * 127)]),
    "a host that is none": lambda: offer(workers=[worker(host="a b")]),
    "nested workers": lambda: offer(workers=[[[[[[]]]]]] * 10_000),
    "a deep memory": lambda: offer(workers=[worker(memory=region(axes=[[["x"] * 1000] * 1000]))]),
    "many axes": lambda: offer(workers=[worker(memory=region(axes=[["part", 1, 1]] * 17))]),
    "a huge axis": lambda: offer(workers=[worker(memory=region(tokens=1 << 40))]),
    "no memory": lambda: offer(workers=[worker(memory=None)]),
    "more planes than caches": lambda: offer(workers=[worker(cache_ids=[1, 2])]),
    "lines in the name of a region": lambda: offer(workers=[worker(memory=region(template=LINES * 3, numbers="x"))]),
    "65 caches": lambda: offer(workers=[worker(cache_ids=list(range(1, 66)))]),
    "endless seconds": lambda: offer(lease_seconds=float("inf")),
    "no seconds": lambda: offer(lease_seconds=-1.0),
    "a huge block": lambda: offer(remote_block_size=1 << 31),
    "many names": lambda: offer(**{f"x{n}": 1 for n in range(100_000)}),
    "lines in a transfer's host": lambda: pushed(host=LINES),
    "a long transfer": lambda: {**pushed(), "transfer_id": "x" * 100_000},
    "a transfer of lines": lambda: {**pushed(host="10.0.0.9"), "transfer_id": LINES},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_offer_is_refused_in_one_short_line(vllm: SimpleNamespace, reached: Reached, name: str) -> None:
    scheduler = Scheduler(vllm)
    assert scheduler.go_through(HOSTILE[name](), name=f"cmpl-{LINES}") == (0, False)
    orders = scheduler.orders()
    assert (orders.holds, orders.loads, orders.releases, orders.expects, orders.declines) == ([], [], [], [], [])
    text = scheduler.log.getvalue()
    assert 0 < len(text.encode()) <= 400
    assert text.count("\n") == 1
    assert all(" " <= char <= "~" for char in text.rstrip("\n")), text
    assert reached.total == 0


@pytest.mark.parametrize(
    "params", ["do_remote_prefill", LINES * 100, 7, 0, 0.5, [], ["do_remote_decode"] * 10_000, True]
)
def test_parameters_that_are_no_object_are_refused_once_and_end_no_scheduler(
    vllm: SimpleNamespace, params: Any
) -> None:
    """vLLM compares their type, but not if they come in ``vllm_xargs``."""
    scheduler = Scheduler(vllm)
    assert scheduler.go_through(params) == (0, False)
    assert scheduler.side.take_counters() == {"offer_unreadable": 1}
    text = scheduler.log.getvalue()
    assert len(text) <= 400
    assert text.startswith("request r: kv_transfer_params: it is ")
    assert text.endswith(": must be an object\n")
    assert text.count("\n") == 1
    assert all(" " <= char <= "~" for char in text.rstrip("\n"))


def test_many_hostile_offers_are_one_line_a_second(vllm: SimpleNamespace) -> None:
    scheduler, now = Scheduler(vllm), 0.0
    scheduler.side.incidents.clock = lambda: now
    for number in range(257):
        assert scheduler.go_through(offer(workers=[worker(host=f"10.0.0.{number % 255}")]), f"r{number}") == (0, False)
    assert scheduler.log.getvalue() == "request r0: offer refused: 10.0.0.0 is not in peers\n"
    now = 1.0
    scheduler.go_through(offer(workers=[worker(host="10.0.0.9")]), "last")
    assert scheduler.log.getvalue().splitlines()[1:] == [
        "request last: offer refused: 10.0.0.9 is not in peers (and 256 more)"
    ]
    assert scheduler.side.take_counters() == {"offer_elsewhere": 258}
    assert scheduler.side.take_counters() == {}


def test_a_transfer_id_that_is_refused_is_counted_once(vllm: SimpleNamespace) -> None:
    """Read the id when the request gets blocks, and again when it ends. The blocks are kept for a pull instead."""
    scheduler = Scheduler(vllm)
    scheduler.side.meet({0: WorkerAddress.model_validate(worker())})
    request = SimpleNamespace(
        request_id="r", num_prompt_tokens=16, num_computed_tokens=16, prompt_token_ids=[0] * 16, lora_request=None,
        kv_transfer_params={"do_remote_decode": True, "transfer_id": "x" * 10_000}, cache_salt=None, mm_features=[],
        status=vllm.scheduler_side.RequestStatus.FINISHED_LENGTH_CAPPED, prompt_embeds=None,
    )  # fmt: skip
    scheduler.side.allocated(request, [3], 0)
    assert scheduler.side.finished(request, [3])[0]
    assert scheduler.side.take_counters() == {"offer_unreadable": 1}


def computed(vllm: SimpleNamespace, side: Any, name: str, blocks: int) -> tuple[bool, Any]:
    """Finish a request that was computed whole, for another engine."""
    request = SimpleNamespace(
        request_id=name, kv_transfer_params={"do_remote_decode": True}, num_prompt_tokens=16 * blocks,
        num_computed_tokens=16 * blocks, status=vllm.scheduler_side.RequestStatus.FINISHED_LENGTH_CAPPED,
        prompt_token_ids=[0] * 16 * blocks, lora_request=None, cache_salt=None, mm_features=[], prompt_embeds=None,
    )  # fmt: skip
    found: tuple[bool, Any] = side.finished(request, range(10_000, 10_000 + blocks))
    return found


@pytest.mark.parametrize("name", ["r", LINES, "x" * 100_000, "\ud800"], ids=["plain", "lines", "long", "surrogate"])
def test_whatever_a_client_calls_its_request_the_offer_can_be_read(vllm: SimpleNamespace, name: str) -> None:
    side = vllm.scheduler_side.SchedulerSide(Settings(), 16, 1 << 20)
    side.meet({0: WorkerAddress.model_validate(worker())})
    is_kept, params = computed(vllm, side, name, 3)
    assert is_kept
    read = vllm.offer.Offers(1, Settings().allowed_peers(), 64).offer_of("r", params, 1 << 30)
    assert read.remote_block_ids == (10_000, 10_001, 10_002)


def test_blocks_whose_offer_no_engine_would_read_are_not_kept(
    vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    side = vllm.scheduler_side.SchedulerSide(Settings(), 16, 1 << 20)
    side.meet({0: WorkerAddress.model_validate(worker())})
    is_kept, params = computed(vllm, side, "long", 40_000)
    assert is_kept
    assert vllm.offer.Offers(1, Settings().allowed_peers(), 64).offer_of("r", params, 1 << 30) is not None
    assert computed(vllm, side, "longer", 50_000) == (False, None)
    words = "request longer: its blocks are not kept: the offer: it has more than 262144 bytes"
    assert words in caplog.messages


# ---- SGLang's requests ----


@pytest.mark.parametrize(
    ("address", "is_asked"),
    [
        ("127.0.0.1:8998", True),
        ("[::1]:8998", True),
        ("localhost:8998", True),
        *((f"{host}:{port}", False) for host, port in ELSEWHERE),
        ("127.0.0.1", False),
        (f"127.0.0.1:{LINES}", False),
        (f"{LINES}:8998", False),
        (f"[::1%{LINES}]:8998", False),
        ("[::1%a card with a long name]:8998", False),
        (":8998", False),
        ("", False),
    ],
)
def test_a_request_sends_no_engine_to_a_bootstrap_server_that_is_none_of_peers(
    address: str, is_asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[str, int]] = []
    with sglang_manager() as module:

        def ask(host: str, port: int, *_: Any) -> Any:
            asked.append((host, port))
            raise ParamInvalid("not from a test")

        manager = asking_manager(module, Settings().allowed_peers(), SimpleNamespace(ask=ask))
        assert manager.try_ensure_parallel_info(address) is False
    assert bool(asked) == is_asked
    (line,) = caplog.messages
    assert len(line) <= 400
    assert all(" " <= char <= "~" for char in line)


@pytest.mark.parametrize(
    "room",
    ["", "\ud800", "7\r\nWARNING: all is well", "\u0667", "x" * 257, 10**5000, [1] * 1000],
    ids=["empty", "surrogate", "lines", "another digit", "long", "digits", "list"],
)
def test_a_room_that_no_engine_could_be_told_is_refused_in_one_short_line(room: object) -> None:
    with sglang_manager() as module, pytest.raises(ValueError, match=r".") as refused:
        module.name_of_room(room)
    text = str(refused.value)
    assert len(text) <= 300
    assert all(" " <= char <= "~" for char in text)


def test_a_room_is_a_number_of_any_sign_or_a_word() -> None:
    with sglang_manager() as module:
        assert [module.name_of_room(room) for room in (0, -1, 2**64, "7-a b")] == ["0", "-1", str(2**64), "7-a b"]
