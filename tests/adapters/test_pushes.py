"""Requests that are pushed while they are computed: layers travel as they become ready, and each request comes out once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from typing import Any

import numpy as np
import pytest

from aiodatadist import AwaitableLayerSynchronizer
from aiodatadist._adapters import push_messages
from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.ended import Ended
from aiodatadist._adapters.kv_cache import TensorGroup
from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.sendings import Portion
from aiodatadist._adapters.settings import Settings
from aiodatadist._values import peer_budget
from aiodatadist.testing import soft_fault, soft_faults_cleared
from tests.adapters.kv_memory import opaque
from tests.stopwatch import lasting

BLOCKS, BYTES, LAYERS = 16, 4096, 3
LAYOUT: dict[str, str | int] = {"block_size": 16, "dtype": "uint8"}
WORDS = {**opaque([[np.zeros((BLOCKS, BYTES), np.uint8)] for _ in range(LAYERS)], BLOCKS).words(), **LAYOUT}
"""The layout that a peer compares: what the KV cache says of itself, too."""
PATIENCE: dict[str, Any] = {"link_seconds": 5, "patience_seconds": 0.2}


class End:
    """A service and its arrays, one per layer; those of end ``n`` hold ``16 * n + block``."""

    def __init__(self, number: int, layout: dict[str, str | int] = LAYOUT, **settings: Any) -> None:
        self.service = BlockService(Settings(**{**PATIENCE, "device_id": number, **settings}))
        self.arrays = [np.zeros((BLOCKS, BYTES), np.uint8) for _ in range(LAYERS)]
        for array in self.arrays:
            array[:] = (16 * number + np.arange(BLOCKS))[:, None]
        made = self.service.open(opaque([[array] for array in self.arrays], BLOCKS), layout)
        self.address = PeerAddress(cluster_id=made.cluster_id, host=made.host, port=made.port)
        self.found = Ended()

    def holds(self, block: int, layer: int | None = None) -> set[int]:
        arrays = self.arrays if layer is None else [self.arrays[layer]]
        return {int(value) for array in arrays for value in np.unique(array[block])}

    def take(self) -> Ended:
        """Return all that came out so far."""
        ended = self.service.take()
        self.found.sent |= ended.sent
        self.found.received |= ended.received
        self.found.failed |= ended.failed
        self.found.counters += ended.counters
        self.found.outcomes |= ended.outcomes
        self.found.wanted |= ended.wanted
        return self.found

    def until(self, is_so: Callable[[Ended], bool]) -> Ended:
        while not is_so(self.take()):
            time.sleep(0.001)
        return self.found

    def received(self, *requests: str) -> Ended:
        return self.until(lambda ended: ended.received >= set(requests))

    def sent(self, *requests: str) -> Ended:
        return self.until(lambda ended: ended.sent >= set(requests))

    def expect(self, request: str, source: PeerAddress, into: tuple[int, ...] = (0, 1), first: int = 0) -> None:
        self.service.expect(ExpectOrder(request, source, request, first, into))

    def step(
        self, transfer: str, blocks: tuple[int, ...] = (3, 9), first: int = 0, layers: int = LAYERS
    ) -> AwaitableLayerSynchronizer:
        """Push a step of the model, or the beginning of one."""
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        self.service.push(transfer, Portion(first, blocks, synchronizer))
        for layer in range(layers):
            self.service.layer_ready(synchronizer, layer)
        return synchronizer


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """Prefill and decode."""
    with ExitStack() as stack:
        made = End(0), End(1)
        for each in made:
            stack.enter_context(closing(each.service))
        yield made


@pytest.fixture
def make_end() -> Iterator[Callable[..., End]]:
    with ExitStack() as stack:

        def make(*words: Any, **settings: Any) -> End:
            end = End(*words, **settings)
            stack.enter_context(closing(end.service))
            return end

        yield make


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.001)


@pytest.mark.parametrize("is_early", [True, False], ids=["decode first", "prefill first"])
def test_a_request_in_one_step(ends: tuple[End, End], is_early: bool) -> None:
    prefill, decode = ends
    if is_early:
        decode.expect("r", prefill.address)
    prefill.step("r")
    prefill.service.pushed("r", "p")
    if not is_early:
        decode.expect("r", prefill.address)
    assert decode.received("r").counters == {"push_arrived": 1}
    assert (decode.holds(0), decode.holds(1), decode.holds(2)) == ({3}, {9}, {18})
    ended = prefill.sent("p")
    assert ended.counters == {"push_done": 1, "pushed_blocks": 2, "pushed_bytes": 2 * LAYERS * BYTES}


def test_layers_travel_as_they_become_ready(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    decode.expect("r", prefill.address)
    synchronizer = prefill.step("r", layers=0)
    for layer in range(LAYERS):
        assert decode.holds(0, layer) == {16}
        prefill.arrays[layer][3] = 100 + layer
        prefill.service.layer_ready(synchronizer, layer)
        until(lambda: decode.holds(0, layer) == {100 + layer})  # noqa: B023
    assert decode.take().received == set()
    prefill.service.pushed("r", "p")
    decode.received("r")
    prefill.sent("p")


def test_portions_of_several_steps_and_blocks_that_the_decode_engine_has(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    decode.expect("r", prefill.address, into=(4, 5, 6), first=1)
    prefill.step("r", (7, 8))
    prefill.step("r", (10, 11), first=2)
    prefill.service.pushed("r", "p")
    decode.received("r")
    assert [decode.holds(block) for block in (4, 5, 6, 0, 7)] == [{8}, {10}, {11}, {16}, {23}]
    assert prefill.sent("p").counters["pushed_blocks"] == 3


def test_what_is_computed_again_after_a_preemption_counts(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    decode.expect("r", prefill.address)
    prefill.step("r", (3,))
    until(lambda: decode.holds(0) == {3})
    prefill.step("r", (12, 13))
    prefill.service.pushed("r", "p")
    assert decode.received("r").failed == {}
    assert (decode.holds(0), decode.holds(1)) == ({12}, {13})


def test_blocks_that_were_not_computed_are_missed(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    decode.expect("r", prefill.address, into=(0, 1, 2))
    prefill.step("r")
    prefill.service.pushed("r", "p")
    assert decode.received("r").failed == {"r": (0, 1, 2)}
    assert prefill.sent("p").counters["push_failed"] == 1


def test_layouts_that_differ_name_both_values(make_end: Callable[..., End], caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = make_end(0), make_end(1, {**LAYOUT, "dtype": "float16"})
    decode.expect("r", prefill.address)
    prefill.step("r")
    prefill.service.pushed("r", "p")
    decode.received("r")
    prefill.sent("p")
    assert "dtype is uint8 at the prefill engine and float16 at the decode engine" in caplog.text
    assert decode.holds(0) == {16}


def test_an_abort_at_the_decode_engine(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    decode.expect("r", prefill.address)
    synchronizer = prefill.step("r", layers=1)
    until(lambda: decode.holds(0, 0) == {3})
    decode.service.cancel("r")
    assert decode.received("r").counters == {"push_cancelled": 1}
    before = decode.holds(0, 1)
    for layer in (1, 2):
        prefill.service.layer_ready(synchronizer, layer)
    prefill.service.pushed("r", "p")
    assert prefill.sent("p").counters["push_stopped"] == 1
    assert decode.holds(0, 1) == before == {16}


@pytest.mark.parametrize(("name", "other"), [("r\n0", "r"), ("r", "r\n0")])
def test_a_request_whose_name_has_a_line_break_is_cancelled_alone(ends: tuple[End, End], name: str, other: str) -> None:
    prefill, decode = ends
    for number, request in enumerate((name, other)):
        decode.service.expect(ExpectOrder(request, prefill.address, f"t{number}", 0, (number,)))
    decode.service.cancel(name)
    assert decode.received(name).outcomes == {name: "push_cancelled"}
    decode.service.cancel(other)
    assert decode.received(other).outcomes == {name: "push_cancelled", other: "push_cancelled"}


def test_an_abort_before_the_prefill_engine_has_heard_of_it(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    decode.expect("r", prefill.address)
    decode.service.cancel("r")
    decode.received("r")
    decode.service.decline(prefill.address, "q")
    for name in ("r", "q"):
        prefill.step(name)
        prefill.service.pushed(name, name)
    assert prefill.sent("r", "q").counters == {"push_stopped": 2}


def test_an_abort_at_the_prefill_engine(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    for is_late in (False, True):
        request = f"r{is_late}"
        if not is_late:
            decode.expect(request, prefill.address)
            prefill.step(request, layers=1)
        prefill.service.abandon(request)
        if is_late:
            decode.expect(request, prefill.address)
        assert decode.received(request).failed[request] == (0, 1)
    assert prefill.take().sent == set()


def test_a_transfer_that_fails(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    decode.expect("r", prefill.address)
    with soft_faults_cleared():
        soft_fault("HcclBatchPut:exec=507053")
        prefill.step("r")
        prefill.service.pushed("r", "p")
        assert decode.received("r").failed == {"r": (0, 1)}
        assert prefill.sent("p").counters["push_failed"] == 1
    decode.expect("again", prefill.address)
    prefill.step("again")
    prefill.service.pushed("again", "a")
    assert "again" not in decode.received("again").failed


def test_no_engine_asks(make_end: Callable[..., End]) -> None:
    prefill = make_end(0, lease_seconds=0.05)
    prefill.step("r")
    prefill.service.pushed("r", "p")
    assert prefill.sent("p").counters == {"push_expired": 1}


def test_nothing_comes(make_end: Callable[..., End]) -> None:
    prefill, decode = make_end(0), make_end(1, pull_seconds=0.2)
    link_with_requests(prefill, decode)
    decode.expect("r", prefill.address)
    assert decode.received("r").outcomes["r"] == "push_missed"
    prefill.step("r")
    prefill.service.pushed("r", "p")
    assert prefill.sent("p").outcomes["p"] == "push_stopped"
    assert decode.holds(0) == {16}


def link_with_requests(prefill: End, decode: End) -> None:
    """Link by a request that arrives: on a busy machine the time of the first ones is over before there is a link."""
    for number in count():
        request = f"first{number}"
        prefill.step(request)
        prefill.service.pushed(request, request)
        decode.expect(request, prefill.address, (2, 3))
        if decode.received(request).outcomes[request] == "push_arrived":
            return


def test_one_end_is_gone(make_end: Callable[..., End]) -> None:
    prefill, decode = make_end(0), make_end(1)
    decode.expect("r", prefill.address)
    prefill.step("r", layers=1)
    until(lambda: decode.holds(0, 0) == {3})
    prefill.service.close()
    assert decode.received("r").failed == {"r": (0, 1)}
    prefill = make_end(2)
    decode.expect("s", prefill.address)
    synchronizer = prefill.step("s", layers=1)
    until(lambda: decode.holds(0, 0) == {32 + 3})
    decode.service.close()
    for layer in (1, 2):
        prefill.service.layer_ready(synchronizer, layer)
    prefill.service.pushed("s", "p")
    prefill.sent("p")
    decode = make_end(3)
    decode.expect("refused", PeerAddress(cluster_id=7, host="127.0.0.1", port=1))
    assert decode.received("refused").counters == {"push_missed": 1}


def test_names_that_are_used_twice(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    decode.expect("r", prefill.address)
    decode.service.expect(ExpectOrder("other", prefill.address, "r", 0, (5,)))
    assert decode.received("other").failed == {"other": (5,)}
    prefill.step("r")
    prefill.service.pushed("r", "p")
    assert "r" not in decode.received("r").failed
    assert prefill.sent("p").outcomes == {"p": "push_done"}
    for array in decode.arrays:
        array[:] = 0
    decode.expect("r", prefill.address)  # a finished name may be used again
    prefill.step("r")
    prefill.service.pushed("r", "q")
    assert "r" not in decode.received("r").failed
    assert prefill.sent("q").outcomes["q"] == "push_done"
    assert decode.holds(0) != {0}


def test_many_requests(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    names = [f"r{i}" for i in range(200)]
    for i, name in enumerate(names):
        block = i % BLOCKS
        if i % 3:
            decode.expect(name, prefill.address, (block,))
        prefill.step(name, (block,))
        prefill.service.pushed(name, name)
        if not i % 3:
            decode.expect(name, prefill.address, (block,))
    assert decode.received(*names).failed == {}
    assert prefill.sent(*names).counters["push_done"] == 200
    assert [decode.holds(block) for block in range(BLOCKS)] == [{block} for block in range(BLOCKS)]


GROUPS = ((2, 512), (1, 96))
"""Tensors, and bytes of a block."""
ITEMS = ((1, 64), (2, 8))


class Grouped(End):
    """A service over tensors of several block sizes, with what goes with each request."""

    def __init__(self, number: int, layout: dict[str, str | int] = LAYOUT) -> None:  # of its own: no layers
        self.service = BlockService(Settings(device_id=number, **PATIENCE))
        self.found = Ended()
        self.kinds = [
            [[np.zeros((BLOCKS, nbytes), np.uint8) for _ in range(count)] for count, nbytes in groups]
            for groups in (GROUPS, ITEMS)
        ]
        for array in self._all():
            array[:] = (16 * number + np.arange(BLOCKS))[:, None]
        blocks, aux = (
            [TensorGroup(tuple(array.ctypes.data for array in group), BLOCKS, group[0].shape[1]) for group in kind]
            for kind in self.kinds
        )
        self.address = self.service.open_groups(blocks, aux, layout)

    def _all(self) -> list[Any]:
        return [array for kind in self.kinds for group in kind for array in group]

    def held(self, kind: int, block: int) -> set[int]:
        return {int(value) for group in self.kinds[kind] for array in group for value in np.unique(array[block])}


def test_tensors_of_several_sizes_and_what_goes_with_a_request() -> None:
    with ExitStack() as stack:
        prefill, decode = Grouped(0), Grouped(1)
        for each in (prefill, decode):
            stack.enter_context(closing(each.service))
        decode.service.expect(ExpectOrder("r", prefill.address, "r", 0, (4, 5, 6), aux=7))
        prefill.service.push("r", Portion(0, (1, 2)))
        prefill.service.push("r", Portion(2, (9,)))
        prefill.until(lambda ended: ended.wanted == {"r"})
        prefill.service.pushed("r", "p", aux=11)
        assert decode.received("r").outcomes == {"r": "push_arrived"}
        assert prefill.sent("p").outcomes == {"p": "push_done"}
        assert [decode.held(0, block) for block in (4, 5, 6, 7)] == [{1}, {2}, {9}, {23}]
        assert [decode.held(1, item) for item in (7, 4)] == [{11}, {20}]
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:exec=507053")
            decode.service.expect(ExpectOrder("s", prefill.address, "s", 0, (4,), aux=7))
            prefill.service.push("s", Portion(0, (1,)))
            prefill.service.pushed("s", "q", aux=11)
            assert decode.received("s").outcomes["s"] == "push_missed"
            assert prefill.sent("q").outcomes["q"] == "push_failed"


# ---- names that come twice, long prompts, and an end in the middle ----


def test_a_second_request_of_a_transfer_comes_out_at_once(ends: tuple[End, End]) -> None:
    """Refuse a router's retry at once and keep the first request."""
    prefill, decode = ends
    prefill.step("t")
    prefill.service.pushed("t", "first")
    prefill.service.pushed("t", "retry")
    assert prefill.sent("retry").outcomes == {"retry": "push_refused"}
    decode.expect("t", prefill.address)
    assert decode.received("t").outcomes == {"t": "push_arrived"}
    assert prefill.sent("first").outcomes["first"] == "push_done"


def test_a_second_order_of_a_request_is_ignored(ends: tuple[End, End]) -> None:
    prefill, decode = ends
    decode.expect("t", prefill.address, (0, 1))
    prefill.until(lambda ended: ended.wanted == {"t"})
    decode.expect("t", prefill.address, (2, 3))
    decode.expect("u", prefill.address, (4, 5))  # behind it
    for request in ("t", "u"):
        prefill.step(request)
        prefill.service.pushed(request, request)
    assert decode.received("t", "u").outcomes == {"t": "push_arrived", "u": "push_arrived"}
    assert (decode.holds(0), decode.holds(2), decode.holds(4)) == ({3}, {18}, {3})


@pytest.mark.parametrize("pages", [2048, 2049, 50_000])
def test_blocks_that_one_message_has_no_room_for(pages: int) -> None:
    with ExitStack() as stack:
        made = []
        for number in range(2):
            service = BlockService(Settings(device_id=number, **PATIENCE))
            stack.enter_context(closing(service))
            array = np.full((60_000, 64), number, np.uint8)
            groups = [TensorGroup((array.ctypes.data,), len(array), 64)]
            made.append((service, array, service.open_groups(groups, [], {})))
        (prefill, fro, address), (decode, into, _) = made
        fro[:pages, :4] = np.arange(pages, dtype=np.uint32).view(np.uint8).reshape(-1, 4)
        decode.expect(ExpectOrder("r", address, "r", 0, tuple(range(59_999, 59_999 - pages, -1))))
        prefill.push("r", Portion(0, tuple(range(pages))))
        prefill.pushed("r", "r")
        while "r" not in (ended := decode.take()).received:
            time.sleep(0.001)
        assert ended.outcomes == {"r": "push_arrived"}
        assert (into[59_999 : 59_999 - pages : -1] == fro[:pages]).all()
        assert (into[: 60_000 - pages] == 1).all()


def test_a_want_that_is_not_whole_is_refused(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_budget, "WANT_BLOCKS", 0)
    monkeypatch.setattr(push_messages, "MAX_BLOCKS", 1)
    prefill, decode = ends
    decode.expect("t", prefill.address, (0, 1))
    assert decode.received("t").outcomes == {"t": "push_missed"}


def test_a_decode_engine_that_waits_is_closed_at_once() -> None:
    """Close without waiting for an answer that the engine no longer listens for."""
    prefill, decode = End(0, link_seconds=100), End(1, link_seconds=100)
    with closing(prefill.service), ExitStack() as ending, closing(decode.service):
        decode.expect("r", prefill.address)
        prefill.until(lambda ended: ended.wanted == {"r"})
        ending.enter_context(lasting(10))
