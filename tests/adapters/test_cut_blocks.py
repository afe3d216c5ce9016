"""Engines that cut their KV caches differently: blocks of another size, heads in another number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count
from typing import Any

import numpy as np
import pytest

from aiodatadist import BlockParts, new_lease_name
from aiodatadist._adapters import leased_blocks
from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.cuts import parts_of
from aiodatadist._adapters.ended import Ended
from aiodatadist._adapters.pull_orders import KeptOrder, PullOrder
from aiodatadist._adapters.regions import Heads, Memory, heads_by_rank
from aiodatadist._adapters.settings import Settings
from aiodatadist._link.transfers import transfers
from aiodatadist.testing import soft_fault, soft_faults_cleared
from tests.adapters.kv_memory import Order, ended_of, opaque
from tests.adapters.test_block_service import PROMPT

HEADS, HEAD, LAYERS, BLOCKS = 4, 8, 2, 12
HEAD_MAJOR: Order = ("heads", 2, "tokens", HEAD)
TOKEN_MAJOR: Order = ("tokens", "heads", HEAD)
PATIENCE: dict[str, Any] = {"patience_seconds": 60, "link_seconds": 60}
"""Seconds in which no peer fails to do what it does: eight services link in one interpreter."""


class Worker:
    """Rank ``rank`` of ``ranks``, whose tokens are elements of ``kv[layer][block]`` in the order of ``axes``."""

    def __init__(self, device: int, rank: int, ranks: int, tokens: int, axes: Order) -> None:
        sizes = {"tokens": tokens, "heads": HEADS // ranks}
        self.axes, self.tokens, self.first_head = axes, tokens, HEADS // ranks * rank
        self.kv = np.full((LAYERS, BLOCKS, *(sizes.get(str(axis)) or int(axis) for axis in axes)), -1, np.int32)
        self.service = BlockService(Settings(device_id=device, **PATIENCE), rank, ranks)
        self.address = self.service.open(
            opaque(
                [[layer] for layer in self.kv], BLOCKS, tokens, axes, tuple(heads_by_rank(ranks, ranks, HEADS)), rank
            ),
            {"engine": "a"},
        )

    def at(self, blocks: tuple[int, ...], token: int) -> np.ndarray:
        """Return a token's elements, by layer, head, and the rest."""
        axis = self.axes.index("tokens")
        found: np.ndarray = self.kv[:, blocks[token // self.tokens]]
        found = np.moveaxis(found, 1 + axis, 0)[token % self.tokens]
        moved: np.ndarray = np.moveaxis(found, 1 + [axis for axis in self.axes if axis != "tokens"].index("heads"), 1)
        return moved

    def fill(self, blocks: tuple[int, ...], tokens: int) -> None:
        for token in range(tokens):
            self.at(blocks, token)[...] = self.wanted(token)

    def wanted(self, token: int) -> np.ndarray:
        """By layer, head, and the rest: a number that says all of it."""
        count = len(self.heads)
        rest = tuple(int(axis) for axis in self.axes if axis not in {"tokens", "heads"})
        layers, heads = np.arange(LAYERS)[:, None], np.array(self.heads)[None, :]
        first = (token * 10 + layers) * 10 + heads
        made: np.ndarray = first.reshape(LAYERS, count, *[1] * len(rest)) * 1000
        return made + np.arange(np.prod(rest)).reshape(rest)

    @property
    def heads(self) -> range:
        axis = 1 + self.axes.index("heads")
        return range(self.first_head, self.first_head + self.kv.shape[1:][axis])

    def until(self, request: str) -> Ended:
        return ended_of(self.service, request)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def engine(stack: ExitStack, number: int, ranks: int, tokens: int, axes: Order) -> list[Worker]:
    workers = [Worker(4 * number, rank, ranks, tokens, axes) for rank in range(ranks)]
    for worker in workers:
        stack.enter_context(closing(worker.service))
    return workers


@pytest.mark.parametrize("axes", [HEAD_MAJOR, TOKEN_MAJOR], ids=["heads outside", "tokens outside"])
@pytest.mark.parametrize(
    ("there", "here"),
    [((1, 16), (1, 8)), ((1, 8), (1, 16)), ((2, 16), (1, 16)), ((1, 16), (2, 16)), ((4, 8), (2, 12)), ((1, 6), (4, 4))],
    ids=lambda end: f"{end[0]} workers with blocks of {end[1]}",
)
def test_blocks_are_pulled_by_an_engine_that_cuts_them_differently(
    stack: ExitStack, there: tuple[int, int], here: tuple[int, int], axes: Order
) -> None:
    prefill, decode = engine(stack, 0, *there, axes), engine(stack, 1, *here, axes)
    prompt, cached = 43, 2 * here[1]  # the decode engine has the beginning
    blocks = tuple(range(11, 11 - -(-prompt // there[1]), -1))
    into = tuple(range(-(-prompt // here[1])))
    lease, skipped = new_lease_name(), cached // there[1]
    for worker in prefill:
        worker.fill(blocks, prompt)
        worker.service.keep("r", lease, blocks, PROMPT)
    order = PullOrder(
        "r", tuple(worker.address for worker in prefill), lease, blocks, into[2:], PROMPT, first=skipped,
        skip=cached - skipped * there[1], tokens=prompt - cached,
    )  # fmt: skip
    for worker in decode:
        worker.service.pull(order)
    for worker in decode:
        assert worker.until("r").outcomes == {"r": "pull_done"}
        for token in range(cached, prompt):
            assert (worker.at(into, token) == worker.wanted(token)).all()
        assert (worker.kv[:, list(into[:2])] == -1).all()
        assert (worker.kv[:, len(into) :] == -1).all()
    for worker in prefill:
        assert worker.until("r").outcomes == {"r": "lease_taken"}


def test_one_of_two_workers_that_share_blocks_is_cancelled(stack: ExitStack) -> None:
    (prefill,), decode = engine(stack, 0, 1, 16, HEAD_MAJOR), engine(stack, 1, 2, 16, HEAD_MAJOR)
    lease = new_lease_name()
    prefill.service.keep("r", lease, [1, 2], PROMPT)
    order = PullOrder("r", (prefill.address,), lease, (1, 2), (3, 4), PROMPT)
    decode[0].service.pull(order)
    assert decode[0].until("r").outcomes == {"r": "pull_done"}
    assert not prefill.service.take().outcomes, "the other worker has not come yet"
    decode[1].service.release(KeptOrder("released", (prefill.address,), lease, (1, 2), PROMPT))
    assert prefill.until("r").outcomes == {"r": "lease_released"}


def test_a_shape_that_the_peer_does_not_have_costs_no_units(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may name any shape: units are numbered once the peer has said that it is its own."""
    made: list[object] = []

    def counted(*about: Any) -> BlockParts:
        made.append(about)
        return parts_of(*about)

    monkeypatch.setattr(leased_blocks, "parts_of", counted)
    (prefill,), (decode,) = engine(stack, 0, 1, 16, HEAD_MAJOR), engine(stack, 1, 1, 16, HEAD_MAJOR)
    lease = new_lease_name()
    prefill.service.keep("r", lease, [1, 2], PROMPT)
    claimed = prefill.address.model_copy(update={"memory": said_of(15)})
    decode.service.pull(PullOrder("claimed", (claimed,), lease, (1, 2), (3, 4), PROMPT))
    assert decode.until("claimed").outcomes == {"claimed": "pull_refused"}
    assert made == []
    decode.service.pull(PullOrder("r", (prefill.address,), lease, (1, 2), (3, 4), PROMPT))
    assert decode.until("r").outcomes == {"r": "pull_done"}
    assert made == [], "blocks of one shape have no units"


def test_engines_that_do_not_fit_are_refused_by_name(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    (prefill,), (decode,) = engine(stack, 0, 1, 16, HEAD_MAJOR), engine(stack, 1, 1, 8, TOKEN_MAJOR)
    decode.service.incidents.clock = count(0.0, 1.0).__next__
    odd = prefill.address.model_copy(update={"layout": {"engine": "b"}})
    fewer = prefill.address.model_copy(update={"memory": said_of(16, Heads(0, 2, 4), TOKEN_MAJOR)})
    cases = [
        (
            (prefill.address,),
            f"block_shape is 8 of 4 bytes here and 2x8 of 4 bytes at 127.0.0.1:{prefill.address.port}",
        ),
        ((odd,), "engine is a here and b"),
        ((fewer, fewer), "layers.0.0: no worker of the other engine has head 2"),
    ]
    for number, (sources, words) in enumerate(cases):
        request = f"r{number}"
        decode.service.pull(PullOrder(request, sources, new_lease_name(), (1,), (2, 3), PROMPT))
        assert decode.until(request).failed == {request: (2, 3)}
        assert words in caplog.text
        caplog.clear()


WHOLE = Heads(0, HEADS, HEADS)


def said_of(tokens: int, heads: Heads = WHOLE, order: Order = HEAD_MAJOR) -> Memory:
    """Return what a worker with such blocks says."""
    layers = [[np.zeros((BLOCKS, 2 * tokens * heads.number * HEAD), np.int32)] for _ in range(LAYERS)]
    return opaque(layers, BLOCKS, tokens, order, (heads,)).memory


def test_blocks_that_came_before_a_pull_failed_are_no_failures(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prefill,), (decode,) = engine(stack, 0, 1, 16, HEAD_MAJOR), engine(stack, 1, 1, 16, HEAD_MAJOR)
    monkeypatch.setattr(transfers, "PORTION_BYTES", 1)
    blocks, into = (5, 7, 2, 8), (1, 0, 3, 2)
    prefill.fill(blocks, 64)
    for request, fault in (("warm", ""), ("r", "HcclBatchGet:exec=507053@3")):
        lease = new_lease_name()
        prefill.service.keep(request, lease, blocks, PROMPT)
        with soft_faults_cleared():
            soft_fault(fault)
            decode.service.pull(PullOrder(request, (prefill.address,), lease, blocks, into, PROMPT))
            ended = decode.until(request)
    assert ended.outcomes == {"r": "pull_failed"}
    assert ended.failed == {"r": (3, 2)}
    for token in range(32):
        assert (decode.at(into, token) == decode.wanted(token)).all()
