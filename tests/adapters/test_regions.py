"""Descriptions of workers' memory and the plans that are made of them, against an oracle that knows each element."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from itertools import count

import pytest
from pydantic import ValidationError

from aiodatadist._adapters.cuts import parts_of
from aiodatadist._adapters.plans import Misfit, Plan, plan
from aiodatadist._adapters.regions import (
    MAX_NAMES,
    Axis,
    Composition,
    Heads,
    Memory,
    Plane,
    Region,
    Regions,
    described,
    folded,
    heads_by_rank,
    names_of,
)
from tests.adapters.kv_memory import EMPTY, Layer, Worker, check, fill, worker_of

BLOCKS = 24


def carried_out(
    made: Plan, sources: list[Worker], target: Worker, blocks: list[int], into: list[int], begin: int, stop: int
) -> None:
    """Move the bytes of a plan, as a device would."""
    for pull in made.pulls:
        source = sources[pull.source]
        there, here = source.memory.planes[pull.plane].stride, target.memory.planes[pull.into].stride
        cut = pull.cuts[0]
        first, skip = divmod(begin, cut.src.tokens)
        chosen, places = blocks[first:], into[begin // cut.dst.tokens :]
        for src, dst in zip(pull.tensors, pull.into_tensors, strict=True):
            old, new = source.arrays[pull.plane][src], target.arrays[pull.into][dst]
            if pull.is_whole and not skip:
                for a, b in zip(chosen, places, strict=False):
                    new[b] = old[a]
                continue
            parts = parts_of(pull.cuts, there, here, skip, stop - begin)
            each = parts.nbytes // 4
            assert parts.nbytes % 4 == 0
            rows, into_rows = old.reshape(-1, each), new.reshape(-1, each)
            for a, b in zip(parts.src, parts.dst, strict=True):
                (block, part), (to, at) = divmod(a, there // parts.nbytes), divmod(b, here // parts.nbytes)
                into_rows[places[to] * (here // parts.nbytes) + at] = rows[
                    chosen[block] * (there // parts.nbytes) + part
                ]


def served(sources: list[Worker], targets: list[Worker], turn: int, begin: int, stop: int) -> list[Plan]:
    """Pull a prompt from one engine into another, and check all of it; return the plans."""
    rng = random.Random(turn)
    there, here = (each[0].memory.regions[0].tokens for each in (sources, targets))
    blocks = rng.sample(range(BLOCKS), -(-stop // there))
    into = rng.sample(range(BLOCKS), -(-stop // here))
    for worker in sources:
        for name in worker.regions:
            fill(worker, name, blocks, range(stop))
    memories = [worker.memory for worker in sources], [worker.memory for worker in targets]
    plans = [plan(*memories, rank, turn) for rank in range(len(targets))]
    for made, target in zip(plans, targets, strict=True):
        carried_out(made, sources, target, blocks, into, begin, stop)
        for name in target.regions:
            if any(name in source.regions for source in sources):
                check(target, name, into, range(begin, stop))
        untouched = [block for block in range(BLOCKS) if block not in into[begin // here :]]
        for array in (each for plane in target.arrays for each in plane):
            assert (array[untouched] == EMPTY).all()
    takers = Counter((pull.source, pull.plane) for made in plans for pull in made.pulls)
    assert all(pull.takers == takers[pull.source, pull.plane] for made in plans for pull in made.pulls)
    told = Counter((left.source, left.plane) for made in plans for left in made.left)
    planes = {(number, plane) for number, memory in enumerate(memories[0]) for plane in range(len(memory.planes))}
    assert set(takers) | set(told) == planes
    assert not set(takers) & set(told)
    assert set(told.values()) <= {1}
    return plans


ORDERS: list[tuple[str | int, ...]] = [
    ("tokens", "heads", 0), ("heads", "tokens", 0), (0, "tokens", "heads", 1), ("heads", 0, "tokens", 1),
    ("tokens", 0, "heads", 1), (0, "heads", "tokens", 1),
]  # fmt: skip


SEEDS = 1000 if os.environ.get("AIODATADIST_NIGHTLY") else 25


@pytest.mark.parametrize("share", range(3))
def test_any_two_engines_move_what_they_need(share: int) -> None:
    for seed in range(SEEDS * share, SEEDS * (share + 1)):
        check_engines(seed)


def check_engines(seed: int) -> None:
    rng = random.Random(seed)
    of = rng.choice([1, 2, 4])
    order = rng.choice(ORDERS)
    other = rng.choice([order, rng.choice([each for each in ORDERS if len(each) == len(order)])])
    parts = (rng.choice([1, 2, 3]), 2)[-(len(order) - 2) :]
    latent = frozenset(["model.layers.0.k"]) if rng.random() < 0.3 else frozenset()
    names = [f"model.layers.{i}.{name}" for i in range(rng.randint(1, 3)) for name in rng.choice(["k", "kv"])]
    wanted = [name for name in names if rng.random() < 0.8] or names
    ends: list[list[Worker]] = []
    for each, needed in ((order, names), (other, wanted)):
        shards = rng.choice([shard for shard in (1, 2, 4) if of % shard == 0])
        ranks = shards * rng.choice([1, 1, 2, 4])
        tokens = rng.choice([1, 2, 4, 6, 8, 16])
        layers = [Layer(name, parts, each) for name in needed]
        options = rng.random() < 0.3, rng.choice([0, 0, 0, 3]), latent
        stages = rng.choice([1, 1, 2]) if needed is names and len(names) > 1 else 1
        made: list[Worker] = []
        for stage in range(stages):
            mine = layers[stage * len(layers) // stages : (stage + 1) * len(layers) // stages]
            made += [worker_of(mine, heads, tokens, BLOCKS, *options) for heads in heads_by_rank(shards, ranks, of)]
        ends.append(made)
    sources, targets = ends
    tokens = min(targets[0].memory.regions[0].tokens, 16)
    most = min(BLOCKS * each[0].memory.regions[0].tokens for each in ends)
    stop = rng.randint(1, min(60, most))
    begin = rng.choice(range(0, stop, tokens))
    served(sources, targets, rng.randrange(64), begin, stop)


def engine(ranks: int, heads: list[Heads], layers: list[Layer], tokens: int = 16, **options: object) -> list[Worker]:
    return [worker_of(layers, heads[rank], tokens, BLOCKS, **options) for rank in range(ranks)]  # type: ignore[arg-type]


LATENT = [Layer(f"layers.{i}", (6,), ("tokens", 0)) for i in range(4)]
PLAIN = [Layer(f"layers.{i}.{part}") for i in range(4) for part in "kv"]
WHOLE = Heads(0, 1, 1)


def test_replicas_share_the_load_of_one_taker() -> None:
    """Latent attention: eight prefill workers have all of it, and one decode worker needs it."""
    taken: Counter[int] = Counter()
    for turn in range(16):
        sources, targets = engine(8, [WHOLE] * 8, LATENT), engine(1, [WHOLE], LATENT)
        (made,) = served(sources, targets, turn, 0, 40)
        assert len(made.pulls) == 1
        assert made.pulls[0].is_whole
        assert len(made.left) == 7
        taken.update(made.sources)
    assert taken == dict.fromkeys(range(8), 2)


@pytest.mark.parametrize(("there", "here"), [(8, 8), (8, 4), (4, 8), (8, 2), (2, 1), (1, 4), (3, 2)])
def test_workers_that_need_the_same_take_it_from_different_replicas(there: int, here: int) -> None:
    for turn in range(3):
        sources, targets = engine(there, [WHOLE] * there, LATENT), engine(here, [WHOLE] * here, LATENT)
        plans = served(sources, targets, turn, 0, 40)
        taken = Counter(pull.source for made in plans for pull in made.pulls)
        assert max(taken.values()) == -(-here // there)
    if there == here:
        assert [made.sources for made in plans] == [[rank] for rank in range(here)]


def test_fewer_heads_than_workers() -> None:
    """Two heads at eight workers, of which four each have the same one, become one worker's or another eight's."""
    sources = engine(8, heads_by_rank(2, 8, 2), PLAIN)
    for ranks, shards in ((1, 1), (2, 2), (4, 2), (8, 2)):
        targets = engine(ranks, heads_by_rank(shards, ranks, 2), PLAIN)
        plans = served(sources, targets, 5, 16, 43)
        assert {len(made.sources) for made in plans} == {2 // shards}


def test_a_pipeline_is_pulled_from_all_its_stages() -> None:
    stages = [engine(2, heads_by_rank(2, 2, 2), PLAIN[:4]), engine(2, heads_by_rank(2, 2, 2), PLAIN[4:])]
    sources = [worker for stage in stages for worker in stage]
    targets = engine(1, heads_by_rank(1, 1, 2), PLAIN)
    (made,) = served(sources, targets, 0, 0, 30)
    assert made.sources == [0, 1, 2, 3]
    assert [pull.into_tensors for pull in made.pulls] == [range(4), range(4), range(4, 8), range(4, 8)]


def test_a_draft_model_at_one_end_only() -> None:
    draft = [Layer("draft.layers.0", (4,), ("tokens", "heads", 0), is_optional=True)]
    heads = heads_by_rank(1, 1, 2)
    served(engine(1, heads, PLAIN), engine(1, heads, PLAIN + draft), 0, 0, 40)
    (made,) = served(engine(1, heads, PLAIN + draft), engine(1, heads, PLAIN), 0, 0, 40)
    assert [left.plane for left in made.left] == [1], "the owner is told that the draft's blocks are not needed"


def test_a_draft_model_and_an_indexer_of_other_sizes_travel_too() -> None:
    others = [Layer("draft.layers.0", (4,), ("tokens", "heads", 0)), Layer("layers.0.indexer", (3,), ("tokens", 0))]
    latent = frozenset(["layers.0.indexer"])
    sources = engine(2, heads_by_rank(2, 2, 2), PLAIN + others, latent=latent)
    plans = served(sources, engine(1, heads_by_rank(1, 1, 2), PLAIN + others, latent=latent), 0, 0, 40)
    assert len({pull.into for pull in plans[0].pulls}) == 3


def test_what_cannot_be_is_refused_by_name() -> None:
    heads = heads_by_rank(1, 1, 2)
    whole = engine(1, heads, PLAIN)[0].memory
    for other, words in (
        (engine(1, heads, PLAIN[1:]), "layers.0.k is a region here, and none of the other engine's"),
        (engine(1, heads_by_rank(1, 1, 4), PLAIN), "layers.0.k: number of heads is 2 here and 4"),
        (engine(1, heads_by_rank(2, 2, 2)[:1], PLAIN), "layers.0.k: no worker of the other engine has head 1"),
        (engine(1, heads, [Layer(each.name, (16,)) for each in PLAIN]), "block_shape is 8 of 4 bytes here and 16 of 4"),
        (
            engine(1, heads, [Layer(each.name, group=1) for each in PLAIN]),
            "layers.0.k is in group 0 here and in group 1",
        ),
    ):
        with pytest.raises(Misfit, match=words):
            plan([worker.memory for worker in other], [whole], 0, 0)


def test_axes_that_a_block_does_not_say_are_moved_whole_or_not_at_all() -> None:
    opaque = [Layer(each.name, hides=("tokens",), order=("heads", "tokens", 0)) for each in PLAIN]
    two, one = heads_by_rank(2, 2, 2), heads_by_rank(1, 1, 2)
    served(engine(2, two, opaque), engine(1, one, opaque), 0, 0, 43)
    with pytest.raises(Misfit, match="unknown, and block_size is 8 here and 16"):
        served(engine(1, one, opaque), engine(1, one, opaque, tokens=8), 0, 0, 43)
    with pytest.raises(Misfit, match="packing is plain here and own"):
        served(engine(1, one, opaque), engine(1, one, PLAIN), 0, 0, 43)
    deaf = [Layer(each.name, hides=("heads",)) for each in PLAIN]
    served(engine(1, one, deaf), engine(1, one, deaf), 0, 0, 43)
    with pytest.raises(Misfit, match=r"block_shape is .*2 heads among them here and"):
        served(engine(2, two, deaf), engine(1, one, deaf), 0, 0, 43)


def test_sizes_that_are_equal_are_no_guesses() -> None:
    """128 tokens and a head of 128; 2 heads beside the 2 of keys and values."""
    for order in ORDERS[2:]:
        layers = [Layer("layers.0", (2, 4), order)]
        served(
            engine(2, heads_by_rank(2, 2, 4), layers, tokens=4),
            engine(1, heads_by_rank(1, 1, 4), layers, tokens=2),
            0,
            4,
            11,
        )


def test_equal_blocks_are_pulled_whole_and_others_in_the_largest_pieces() -> None:
    heads = heads_by_rank(1, 1, 8)
    hnd = [Layer("layers.0", (64,), ("heads", "tokens", 0))]
    (same,) = served(engine(1, heads, hnd), engine(1, heads, hnd), 0, 0, 40)
    assert same.pulls[0].is_whole
    (half,) = [
        plan(
            [w.memory for w in engine(1, heads, hnd)], [w.memory for w in engine(2, heads_by_rank(2, 2, 8), hnd)], 1, 0
        )
    ]
    made = parts_of(half.pulls[0].cuts, 8 * 16 * 64 * 4, 4 * 16 * 64 * 4, 0, 32)
    assert (made.nbytes, list(made.src), list(made.dst)) == (4 * 16 * 64 * 4, [1, 3], [0, 1])


def test_numbers_of_a_long_prompt_take_few_steps() -> None:
    """C writes them; Python's part does not grow with the prompt."""
    one, two = heads_by_rank(1, 1, 8), heads_by_rank(2, 2, 8)
    nhd = [Layer("layers.0", (64,), ("tokens", "heads", 0))]
    memories = [w.memory for w in engine(1, one, nhd)], [w.memory for w in engine(2, two, nhd)]
    cuts = plan(*memories, 0, 0).pulls[0].cuts
    made = parts_of(cuts, 8 * 16 * 64 * 4, 4 * 16 * 64 * 4, 0, 1 << 16)
    assert (made.nbytes, len(made.src)) == (4 * 64 * 4, 1 << 16)


# ---- what is said ----


def region(name: str, tensor: int, offset: int = 0, **changes: object) -> Region:
    given: dict[str, object] = {
        "plane": 0, "tokens": 16, "heads": Heads(0, 2, 2), "itemsize": 2, "dtype": "bfloat16",
        "axes": (Axis("tokens", 16, 256), Axis("heads", 2, 128), Axis("part", 64, 2)),
    }  # fmt: skip
    return Region(name, tensor, offset, Composition(**{**given, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "entries"),
    [
        ([f"model.layers.{i}.self_attn.attn" for i in range(61)], 1),
        ([f"model.layers.{i}.attn" for i in range(3, 48, 4)], 1),
        ([f"model.layers.{i}.attn" for i in (0, 1, 2, 4, 5, 6, 8, 9, 10)], 1),
        ([f"model.layers.{i}.attn.{part}" for i in range(9) for part in "kv"], 2),
        (["cache"], 1),
        (["odd*name.3", "007", "x9999999999999"], 3),
    ],
)
def test_names_of_many_layers_are_few_words(names: list[str], entries: int) -> None:
    regions = [region(name, at) for at, name in enumerate(names)]
    memory = Memory(planes=(Plane(stride=4096, tensors=len(names)),), regions=folded(regions))
    assert len(memory.regions) == entries
    again = Memory.model_validate_json(memory.model_dump_json())
    assert again == memory == Memory.model_validate(json.loads(memory.model_dump_json()), strict=False)
    assert sorted(again.by_name().items()) == sorted((each.name, each) for each in regions)
    assert hash(again) == hash(memory)


def test_regions_at_uneven_places_are_apart() -> None:
    regions = [
        region(f"l.{i}", tensor, offset) for i, tensor, offset in ((0, 0, 0), (1, 0, 4096), (2, 0, 8192), (3, 2, 0))
    ]
    memory = Memory(planes=(Plane(stride=16384, tensors=3),), regions=folded(regions))
    assert len(memory.regions) == 2
    assert list(memory.by_name().values()) == regions


def test_a_memory_that_contradicts_itself_is_refused() -> None:
    numbers = count()

    def memory(*regions: Region, stride: int = 4096) -> Memory:
        next(numbers)
        return Memory(planes=(Plane(stride=stride, tensors=2),), regions=folded(regions))

    for made, words in (
        (memory(region("a", 2)), "a is in tensor 2: its plane has 2"),
        (memory(region("a", 0, 8)), "a ends 4104 bytes behind its block's first byte: a block has 4096"),
        (memory(region("a", 0, plane=1)), "a is in plane 1: there are 1"),
        (memory(region("a", 0, heads=Heads(1, 3, 2))), "a has heads 1 to 2 of 2"),
        (memory(region("a", 0, tokens=8)), r"a has axes of \[16\] tokens: must have one of 8, or none"),
        (memory(region("a", 0, heads=Heads(0, 1, 2))), r"a has axes of \[2\] heads: must have one of 1, or none"),
    ):
        with pytest.raises(ValueError, match=words):
            made.by_name()
    twice = Memory(planes=(Plane(stride=4096, tensors=2),), regions=folded([region("a", 0)]) * 2)
    with pytest.raises(ValueError, match="two regions have the name a"):
        twice.by_name()


def test_what_a_peer_may_claim_is_bounded() -> None:
    with pytest.raises(ValueError, match=f"more than {MAX_NAMES} numbers"):
        list(names_of("l.*", "0-999999"))
    for numbers in ("x", "3-", "1,,2", "1" * 200):
        with pytest.raises(ValidationError):
            Regions.model_validate(
                {"template": "l.*", "numbers": numbers, "tensor": 0, "tokens": 1, "heads": (0, 1, 1), "axes": (),
                 "itemsize": 1, "dtype": "u8"}
            )  # fmt: skip
    assert list(names_of("l.*", "5-1")) == []
    with pytest.raises(ValueError, match="no range of numbers"):
        list(names_of("l.*", "1/2"))


def test_heads_of_workers() -> None:
    assert heads_by_rank(8, 8, 8)[3] == Heads(3, 4, 8)
    assert heads_by_rank(2, 8, 2) == [Heads(0, 1, 2)] * 4 + [Heads(1, 2, 2)] * 4
    assert heads_by_rank(1, 8, 1) == [Heads(0, 1, 1)] * 8
    assert heads_by_rank(2, 2, 8)[1] == Heads(4, 8, 8)
    for shards, ranks, of in ((3, 8, 3), (2, 2, 3), (0, 1, 1)):
        with pytest.raises(ValueError, match="cannot be in"):
            heads_by_rank(shards, ranks, of)


def test_words_for_ends_that_must_be_the_same() -> None:
    assert described([region("a", 0), region("b", 1)]) == {
        "regions": 2, "block_size": 16, "heads": "0 to 1 of 2", "dtype": "bfloat16", "packing": "",
        "block_shape": "tokensxheadsx64",
    }  # fmt: skip
