"""Random offers: whatever a client writes, a pull that succeeds has brought what was computed for that very prompt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from aiodatadist import new_lease_name, prompt_digest
from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.pull_orders import PullOrder, WorkerAddress
from aiodatadist._adapters.regions import Heads
from aiodatadist._adapters.vllm.prompts import as_offered
from tests.adapters import test_cut_blocks
from tests.adapters.kv_memory import Order
from tests.adapters.matrix import Side
from tests.adapters.test_block_service import ended_in
from tests.adapters.test_cut_blocks import HEAD_MAJOR, HEADS, TOKEN_MAJOR, Worker, said_of
from tests.adapters.windows import BOTH_ORDERS, FULL, WINDOW, moved
from tests.hostile.vllm_names import both_halves
from tests.profiles import at_night

PROMPT, ANOTHER = prompt_digest([1]), prompt_digest([2])
TOKENS = 43
INTO = (0, 1, 2)

Offer = dict[str, Any]


class Prefill:
    """An engine that keeps one prompt in some of its blocks, and another prompt in others."""

    def __init__(self, device: int, ranks: int, tokens: int, axes: Order) -> None:
        self.workers = [Worker(device, rank, ranks, tokens, axes) for rank in range(ranks)]
        self.tokens = tokens
        count = -(-TOKENS // tokens)
        self.blocks = tuple(range(11, 11 - count, -1))
        self.others = tuple(range(count))
        for worker in self.workers:
            worker.fill(self.blocks, TOKENS)
            worker.fill(self.others, TOKENS)
            worker.kv[:, list(self.others)] += 7
        self.leases = [self.keep(self.blocks, PROMPT), self.keep(self.others, ANOTHER)]

    def keep(self, blocks: tuple[int, ...], prompt: bytes) -> str:
        lease = new_lease_name()
        for worker in self.workers:
            worker.service.keep(lease, lease, blocks, prompt)
        return lease

    def offer(self) -> Offer:
        """Return the offer of the decode engine's prompt, as its router would pass it on."""
        if any(self.leases[0] in worker.service.take().sent for worker in self.workers):
            self.leases[0] = self.keep(self.blocks, PROMPT)
        workers = [worker.address.model_dump(mode="json") for worker in self.workers]
        return {
            "workers": workers,
            "lease": self.leases[0],
            "leases": self.leases,
            "blocks": list(self.blocks),
            "tokens": TOKENS,
            "size": self.tokens,
        }


def other_blocks(chance: random.Random, offer: Offer, _: list[Offer]) -> None:
    blocks = offer["blocks"]
    blocks[chance.randrange(len(blocks))] = chance.randrange(12)


def fewer_blocks(chance: random.Random, offer: Offer, _: list[Offer]) -> None:
    offer["blocks"] = offer["blocks"][: chance.randrange(1, len(offer["blocks"]) + 1)]


def another_size(chance: random.Random, offer: Offer, _: list[Offer]) -> None:
    offer["size"] = chance.choice([4, 8, 16, 32])
    if chance.random() < 0.5:
        for each in offer["workers"]:
            each["memory"]["regions"][0]["tokens"] = offer["size"]


def one_more_worker(chance: random.Random, offer: Offer, others: list[Offer]) -> None:
    place = chance.randrange(len(offer["workers"]) + 1)
    offer["workers"].insert(place, dict(chance.choice(chance.choice(others)["workers"])))


def another_worker(chance: random.Random, offer: Offer, others: list[Offer]) -> None:
    place = chance.randrange(len(offer["workers"]))
    offer["workers"][place] = dict(chance.choice(chance.choice(others)["workers"]))


def other_axes(chance: random.Random, offer: Offer, _: list[Offer]) -> None:
    worker = chance.choice(offer["workers"])
    other = chance.choice([HEAD_MAJOR, TOKEN_MAJOR])
    worker["memory"] = said_of(chance.choice([8, 16]), order=other).model_dump(mode="json")


def other_heads(chance: random.Random, offer: Offer, _: list[Offer]) -> None:
    worker, heads = chance.choice(offer["workers"]), chance.choice([1, 2, 4, 8])
    worker["memory"] = said_of(16, Heads(0, heads, max(heads, HEADS))).model_dump(mode="json")


def another_word(chance: random.Random, offer: Offer, _: list[Offer]) -> None:
    worker = chance.choice(offer["workers"])
    name = chance.choice(["engine", "block_size", "more"])
    worker["layout"] = {**worker["layout"], name: chance.choice([1, 2, 16])}


FORGERIES: list[Callable[[random.Random, Offer, list[Offer]], object]] = [
    other_blocks,
    fewer_blocks,
    another_size,
    one_more_worker,
    another_worker,
    other_axes,
    other_heads,
    another_word,
    lambda chance, offer, _: chance.shuffle(offer["blocks"]),
    lambda chance, offer, _: offer["blocks"].append(chance.randrange(12)),
    lambda chance, offer, _: chance.shuffle(offer["workers"]),
    lambda chance, offer, _: offer.update(tokens=chance.randrange(1, 2 * TOKENS)),
    lambda chance, offer, others: offer.update(lease=chance.choice(chance.choice(others)["leases"])),
    lambda chance, offer, others: offer["workers"][0].update(
        cluster_id=chance.choice(others)["workers"][0]["cluster_id"]
    ),
]
"""Each changes one thing."""


def order_of(name: str, offer: Offer, cached: int, size: int) -> PullOrder | None:
    """Make an order as vLLM's scheduler does, or return None if it refuses the offer."""
    sources = tuple(WorkerAddress.model_validate(each) for each in offer["workers"])
    if any(each.memory.block_sizes(0) != {offer["size"]} for each in sources):
        return None
    stop = min(TOKENS, offer["tokens"], offer["size"] * len(offer["blocks"]))
    if stop <= cached:
        return None
    first, skip = divmod(cached, offer["size"])
    digest = PROMPT if stop == TOKENS else prompt_digest([1, stop])
    into = INTO[cached // size : -(-stop // size)]
    return PullOrder(name, sources, offer["lease"], tuple(offer["blocks"]), into, digest, first, skip, stop - cached)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def outcome_of(service: BlockService, name: str) -> str:
    return ended_in(service, "outcomes", name).outcomes[name]


@pytest.mark.parametrize("axes", [HEAD_MAJOR, TOKEN_MAJOR], ids=["heads outside", "tokens outside"])
@pytest.mark.parametrize("seed", [1, *(at_night(seed) for seed in range(2, 13))])
def test_a_pull_that_succeeds_has_the_prompt_s_bytes(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, axes: Order, seed: int
) -> None:
    monkeypatch.setitem(test_cut_blocks.PATIENCE, "patience_seconds", 0)
    chance = random.Random(seed)
    prefills = [Prefill(0, 1, 16, axes), Prefill(1, 2, 16, axes), Prefill(3, 1, 8, axes)]
    decode = Worker(4, 0, 1, 16, axes)
    for worker in (*(worker for prefill in prefills for worker in prefill.workers), decode):
        stack.enter_context(closing(worker.service))
    outcomes: Counter[str] = Counter()
    for number in range(200):
        prefill, cached = chance.choice(prefills), chance.choice([0, 16, 32])
        offer = prefill.offer()
        for _ in range(chance.randrange(4)):
            chance.choice(FORGERIES)(chance, offer, [each.offer() for each in prefills])
        order = order_of(f"r{number}", offer, cached, 16)
        if order is None:
            outcomes["no order"] += 1
            continue
        decode.kv[...] = -1
        decode.service.pull(order)
        outcome = outcome_of(decode.service, order.request)
        outcomes[outcome] += 1
        if outcome == "pull_done":
            for token in range(cached, TOKENS):
                assert (decode.at(INTO, token) == decode.wanted(token)).all(), (number, token, offer)
            assert (decode.kv[:, : cached // 16] == -1).all(), (number, offer)
        assert (decode.kv[:, 3:] == -1).all(), (number, offer)
    assert outcomes["pull_done"] > 20, outcomes
    assert outcomes["pull_refused"] > 20, outcomes


# ---- blocks that are shifted within their prompt, at vLLM's schedulers ----


@pytest.mark.parametrize("kinds", BOTH_ORDERS, ids=", then ".join)
def test_blocks_that_a_client_shifts_within_a_prompt_are_not_used(kinds: tuple[str, str]) -> None:
    """Shift a group by a block: the other group still bounded the tokens, so that the prompt's digest was right."""

    def changed(offer: Offer) -> None:
        if kinds[0] == WINDOW:
            offer["remote_first_block"] += 1
        else:
            offer["remote_groups"][0]["first"] += 1
        offer["remote_num_tokens"] = 96

    there, here = {WINDOW: [1, 2, 3], FULL: [4, 5, 6]}, {WINDOW: [0, 5, 8], FULL: [6, 7, 9]}
    with both_halves() as vllm:
        sides = Side(1, tokens=16), Side(1, tokens=32)
        found = moved(vllm, sides, kinds, there, here, 48, prompt=96, changed=changed)
    assert (found.matched, found.outcomes) == (0, [])


def test_the_digest_says_where_each_group_begins() -> None:
    firsts = [[0], [1], [2], [0, 1], [1, 0], [1, 1], [2**31]]
    assert len({as_offered(PROMPT, each) for each in firsts}) == len(firsts)
    assert as_offered(PROMPT, [0, 0]) == PROMPT, "as older engines have it"
