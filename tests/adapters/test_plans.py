"""The steps that plans of large engines take: they are made on the loop that moves bytes, from what a router carries."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aiodatadist._adapters.kv_cache import Placed, kv_cache_of
from aiodatadist._adapters.plans import Misfit, plan
from aiodatadist._adapters.regions import Axis, Composition, Memory, Plane, Region, Regions, folded, heads_by_rank
from aiodatadist._adapters.settings import Settings
from tests.hostile.test_offers import offer, worker
from tests.hostile.vllm_names import both_halves

TOKENS, LAYERS = 16, 94


@pytest.fixture(scope="module")
def vllm() -> Iterator[SimpleNamespace]:
    with both_halves() as found:
        yield found


def steps_of(operation: Callable[[], object]) -> int:
    """Return how many Python functions an operation calls."""
    found = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(note)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return found


def engine(ranks: int, heads: int, salt: int = 0, layers: int = LAYERS) -> tuple[Memory, ...]:
    """Return the memory of each worker of a large model. Another ``salt`` makes another description of the same."""
    said = tuple(heads_by_rank(min(ranks, heads), ranks, heads))
    axes = (Axis("heads", said[0].number, TOKENS * 8), Axis("tokens", TOKENS, 8), Axis("part", 8, 1))
    composed = Composition(0, TOKENS, said[0], axes, 1, "uint8")
    stride, start = composed.content + salt, 1 << 32
    placed = [
        Placed(f"layers.{layer}.attn", start + layer * stride * 8, stride, 8, composed, said, 0, layer)
        for layer in range(layers)
    ]
    return kv_cache_of(placed, 0).mates


@pytest.mark.parametrize(("ranks", "heads"), [(8, 8), (32, 4)])
def test_a_plan_of_many_layers_takes_few_steps(ranks: int, heads: int) -> None:
    """Choose a source once for layers that are alike: each layer of each worker compared all workers, for a second."""
    there, here = engine(ranks, heads, 1), engine(ranks, heads, 2)
    regions = 2 * ranks * LAYERS
    assert steps_of(lambda: plan(there, here, 0, 0)) < 20 * regions
    assert steps_of(lambda: plan(there, here, 0, 1)) < 20 * ranks, "no worker has a choice, so there are no turns"


def test_replicas_take_as_many_turns_as_there_are() -> None:
    there, here = engine(8, 1, 3), engine(2, 1, 4)
    plans = [plan(there, here, 0, turn) for turn in range(9)]
    assert len({id(each) for each in plans}) == 4
    assert plans[0] is plans[4] is plans[8]
    assert {each.sources[0] for each in plans} == {0, 2, 4, 6}


@pytest.mark.parametrize(("there", "here"), [(1, 1), (1, 2), (2, 2), (4, 2), (8, 2), (8, 4), (4, 8)])
def test_one_worker_tells_each_source_that_its_blocks_are_not_needed(there: int, here: int) -> None:
    engines = engine(there, 8, 12, 3), engine(here, 8, 13, 3)
    plans = [plan(*engines, rank, 0) for rank in range(here)]
    told = {(rank, pull.source, pull.plane) for rank, made in enumerate(plans) for pull in made.pulls if pull.tells}
    assert sorted((source, plane) for _, source, plane in told) == [(source, 0) for source in range(there)]


def test_many_copies_of_a_worker_cost_no_more_than_one() -> None:
    """Name a worker that has all heads 64 times: each of the engine's workers compared all of them for each head."""
    whole, here = engine(1, 8, 5), engine(8, 8, 6)
    one = steps_of(lambda: plan(whole, here, 0, 0))
    many = steps_of(lambda: plan(engine(1, 8, 7) * 64, here, 0, 0))
    assert many < 4 * one


def test_what_does_not_fit_is_found_out_once() -> None:
    there, here = engine(8, 8, 8), engine(8, 16, 9)

    def refused() -> None:
        with pytest.raises(Misfit, match="number of heads is 16 here and 8"):
            plan(there, here, 0, 0)

    refused()
    assert steps_of(refused) < 100


def test_a_memory_that_says_the_same_is_the_same() -> None:
    one, other = engine(2, 2, 10), engine(2, 2, 10)
    assert one == other
    assert hash(one) == hash(other)
    assert one != engine(2, 2, 11)
    assert one[0] != "another thing"
    again = Memory.model_validate_json(one[0].said)
    assert (again, hash(again)) == (one[0], hash(one[0]))


def test_an_offer_of_many_groups_is_read_in_few_steps(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at each worker's regions once: each group of layers looked at all of them again."""
    composed = [Composition(n, TOKENS, heads_by_rank(1, 1, 1)[0], (Axis("tokens", 16, 1),), 1, "u") for n in range(64)]
    memory = Memory(
        planes=tuple(Plane(group=n, stride=16, tensors=1) for n in range(64)),
        regions=folded(Region(f"r{n}", 0, 0, each) for n, each in enumerate(composed)),
    )
    said = worker(memory=json.loads(memory.model_dump_json()), cache_ids=list(range(1, 65)))
    groups = [{"blocks": [1, 2], "size": TOKENS} for _ in range(63)]
    offers = vllm.offer.Offers(1, Settings().allowed_peers(), 64)
    params = offer(workers=[{**said, "cluster_id": 7 + n} for n in range(4)], remote_groups=groups)
    looked_at = 0

    def note(regions: Regions, name: str) -> Any:
        nonlocal looked_at
        looked_at += name == "plane"
        return object.__getattribute__(regions, name)

    monkeypatch.setattr(Regions, "__getattribute__", note)
    assert offers.offer_of("r", params, 32) is not None
    assert looked_at <= 2 * 4 * 64
