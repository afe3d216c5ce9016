"""Random programs on linked clusters: every outcome, every byte and every page is what a plain model says.

A failing program is printed, one line per operation. ``AIODATADIST_MODEL_EXAMPLES=3000 pytest tests/model`` runs longer, and
so does the night.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    DataType,
    LLMException,
    LLMStatusCode,
    NotLinked,
    Placement,
)
from aiodatadist._values.descriptors import UNSET
from aiodatadist.testing import Cluster, cluster_info, open_cluster, soft_counters
from tests.model.model import (
    DISABLED,
    PAGE,
    CopyBlocks,
    CopyCache,
    Deallocate,
    Held,
    Key,
    Link,
    Make,
    Model,
    Move,
    Op,
    Pair,
    Plan,
    Pull,
    Push,
    Refused,
    RemoveKey,
    SwapBlocks,
    Together,
    Unlink,
    Unregister,
    contents,
    layout,
)
from tests.profiles import examples
from tests.strict.marks import IS_HCCS, any_memory

EXAMPLES = int(os.environ.get("AIODATADIST_MODEL_EXAMPLES", examples(60)))
STEP = 15.0
"""Seconds after which an operation hangs."""
OK = "LLM_SUCCESS"

settings.register_profile(
    "model",
    settings(
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        max_examples=EXAMPLES,
    ),
)
settings.register_profile("model-ci", settings.get_profile("model"), derandomize=True)

T = TypeVar("T")

MEMORIES = ["pool", "pool", "pool", *(["numpy", "numpy", "bytearray", "address", "cpu"] if not IS_HCCS else [])]
"""Where caches are: over HCCS where it starts with a page."""


@dataclass(frozen=True)
class Program:
    """Everything that happens follows from these numbers. Each step draws its operation from its own; 0 is no step."""

    one_sided: bool
    world: int
    steps: tuple[int, ...]


programs = st.builds(
    Program, st.booleans(), st.integers(0, 2**16), st.lists(st.integers(0, 2**20), min_size=25, max_size=35).map(tuple)
)


# ---- what there is to begin with ----


class World:
    """Clusters, pools, and the few shapes that caches have, so that many of them fit each other."""

    def __init__(self, program: Program) -> None:
        rng = random.Random(f"world {program.world}")
        self.transport = "hccl" if rng.random() < 0.25 else "loopback"
        self.one_sided = program.one_sided
        self.is_tidy = rng.random() < 0.75
        self.is_about_keys = not self.one_sided and rng.random() < 0.5  # few things but layers pulled by keys
        self.pools = {number: self._pools(rng) for number in range(1, 4 if rng.random() < 0.25 else 3)}
        self.tensors = [rng.choice([2, 3])] * 2 if self.is_about_keys else rng.sample([1, 2, 3, 4, 6], 2)
        self.blocks = rng.sample([16, 17, 24, 50, 75, 100], 2)
        self.slots = rng.sample([17, 40, 100, 130, 257, 300], 2)

    @staticmethod
    def _pools(rng: random.Random) -> dict[bool, int]:
        """Choose the number of pages in the device's and in the host's pool."""
        sizes = {False: rng.choice([12, 24, 40]), True: rng.choice([8, 24])}
        return (
            {} if rng.random() < 0.03 else {host: sizes[host] for host in (False, True) if rng.random() < 1 - host / 2}
        )

    def __str__(self) -> str:
        mode = "one-sided" if self.one_sided else "request/response"
        return f"{mode}, {self.transport}, pages of the pools {self.pools}{', tidied up' if self.is_tidy else ''}"


# ---- operations that are right, or a little wrong ----

WEIGHTS = {
    "make": 5, "pull": 14, "push": 5, "copy_cache": 2, "copy_blocks": 2, "swap": 2, "remove": 2, "deallocate": 2,
    "unregister": 1, "link": 1, "unlink": 1, "together": 6,
}  # fmt: skip


class Draw:
    """An operation for a model's present state."""

    def __init__(self, seed: int, world: World, model: Model) -> None:
        self.rng = random.Random(seed)
        self.world = world
        self.model = model

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def operation(self) -> Op:
        weights = dict(WEIGHTS)
        caches = sum(held.present for cluster in self.model.clusters.values() for held in cluster.caches.values())
        weights["make"] *= 6 if caches < 5 else 1
        weights["link"] *= 12 if not self.model.links else 1
        weights["push"] = 5 if self.model.one_sided else 1
        if self.world.is_about_keys:
            weights |= {"pull": 60, "make": 3 + 25 * (caches < 5)}
        kind = self.rng.choices(list(weights), list(weights.values()))[0]
        drawn: Op = getattr(self, kind)(self.rng.choice(list(self.model.clusters)))
        return drawn

    # ---- making caches, and giving them up ----

    def make(self, at: int) -> Make:
        rng = self.rng
        memory = "pool" if self.world.is_about_keys and self.chance(0.6) else rng.choice(MEMORIES)
        blocks, host = (
            self.chance(0.1 if self.world.is_about_keys else 0.5) or memory == "cpu",
            (self.chance(0.3) and not IS_HCCS) or memory == "cpu",  # a peer's HOST memory is out of reach over HCCS
        )
        if memory == "pool" and host not in self.model.clusters[at].pools and self.chance(0.9):
            host = not host
        made = Make(
            at, memory, blocks, rng.choice(self.world.tensors), rng.randint(3, 8) if blocks else rng.randint(1, 4),
            rng.choice(self.world.blocks if blocks else self.world.slots), host, fill=rng.randrange(2**20),
        )  # fmt: skip
        if memory == "cpu":
            return made
        changes: dict[str, Any] = {"keys": self._new_keys(at, made)}
        if memory != "pool":
            changes["accessible"] = rng.choice([None, True, True, False])
            again = [h for h in self._held(at) if not h.pooled and h.handle > 0]
            if again and self.chance(0.2):
                same = rng.choice(again)
                changes |= {
                    "same_as": same.handle, "host": same.host, "tensors": len(same.tensors), "pieces": same.pieces,
                    "stride": same.stride, "keys": changes["keys"][: 1 if blocks else same.pieces],
                }  # fmt: skip
            elif self.chance(0.08):
                changes["slip"] = rng.choice(["few", "short"] if memory != "address" else ["few", "zero"])
        elif self.chance(0.02):
            changes["tensors"] = 0
        return Make(**{**vars(made), **changes})

    def _new_keys(self, at: int, made: Make) -> tuple[Key, ...]:
        taken = self.model.clusters[at].names
        if made.blocks:
            key = Key("blocks", at, 0, self.rng.randrange(4))
            return (key,) if self.chance(0.75) and (key.name not in taken or self.chance(0.2)) else ()
        keys: list[Key] = []
        for _ in range(max(self.rng.randint(0, made.pieces) for _ in range(2)) + self.chance(0.03)):
            others = [] if self.world.is_about_keys else ["prefix", "placeholder"]
            kind = self.rng.choice(["request", "request", "request", *others])
            key = Key(kind, at, self.rng.randrange(6) if kind != "placeholder" else 0, self.rng.randrange(2))
            is_taken = key.name in taken or key in keys
            keys.append(Key("placeholder", at) if is_taken and self.chance(0.95) else key)
        return tuple(keys)

    def remove(self, at: int) -> RemoveKey:
        names = [name for name in self.model.clusters[at].names if name.kind != "blocks"]
        if names and self.chance(0.9):
            kind, number, model = self.rng.choice(names)
            return RemoveKey(at, Key(kind, at, number, model))
        return RemoveKey(at, Key(self.rng.choice(["request", "prefix"]), at, self.rng.randrange(8)))

    def deallocate(self, at: int) -> Op:
        held = self._cache(at, lambda h: h.pooled and h.has_id)
        if held is None:
            return self.make(at)
        blocks = held.blocks != self.chance(0.05)
        hold = self.chance(0.2) and held.pooled and held.has_id and held.blocks == blocks
        return Deallocate(at, held.handle, blocks, hold)

    def unregister(self, at: int) -> Op:
        is_free = not self.model.peers(at)
        held = self._cache(at, lambda h: not h.pooled and h.handle > 0 and (is_free or not h.is_known))
        return self.make(at) if held is None else Unregister(at, held.handle if self.chance(0.95) else 999)

    # ---- links ----

    def link(self, at: int) -> Link:
        return Link(at, self.rng.choice([number for number in self.model.clusters if number != at]))

    def unlink(self, at: int) -> Unlink:
        return Unlink(at, self.link(at).to, self.chance(0.3))

    # ---- transfers ----

    def _held(self, at: int) -> list[Held]:
        return [held for held in self.model.clusters[at].caches.values() if held.present]

    def _cache(self, at: int, wanted: Callable[[Held], bool] = lambda _: True) -> Held | None:
        """Choose a cache of a cluster: seldom another one than wanted, or one that is gone."""
        every = list(self.model.clusters[at].caches.values())
        right = [held for held in every if held.present and wanted(held)]
        if right and self.chance(0.95):
            return self.rng.choice(right)
        return self.rng.choice(every) if every else None

    def _ends(self, at: int, peer: int, push: bool) -> tuple[Held, Held] | None:
        """Choose a source and a destination that fit, if there are some."""
        mine = [h for h in self._held(at) if (h.accessible if push else h.may_receive) and h.has_id]
        theirs = [held for held in self._held(peer) if held.accessible]
        fitting = [
            (source, target)
            for source in (mine if push else theirs)
            for target in (theirs if push else mine)
            if _fit(source, target, push)
        ]
        for least, chance in ((2, 0.8), (1, 0.5)):
            keyed = [ends for ends in fitting if self._consumption(ends[0]) >= least]
            if keyed and self.chance(chance):
                return self.rng.choice(keyed)
        if fitting and self.chance(0.95):
            return self.rng.choice(fitting)
        one, other = self._cache(at), self._cache(peer)
        if one is None or other is None or one.handle < 0:
            return None
        return (one, other) if push else (other, one)

    def _consumption(self, source: Held) -> int:
        """Return 1 if the cache has keys that end once all tensors were pulled by them, 2 if one has some tensors already."""
        if self.model.one_sided or source.blocks or not source.pooled or len(source.tensors) == 1:
            return 0
        bindings = self.model.clusters[source.cluster].names
        keys = [b for name, b in bindings.items() if b.cache is source and name.kind == "request"]
        return bool(keys) + any(binding.covered for binding in keys)

    def _peer(self, at: int) -> int:
        linked = self.model.peers(at)
        return self.rng.choice(linked if linked and self.chance(0.97) else [*self.model.clusters, 9])

    def _key(self, held: Held, slot: int) -> Key:
        """Choose a name of the slot, or of the blocks."""
        cluster = self.model.clusters[held.cluster]
        names = [name for name in cluster.names_of(held) if held.blocks or cluster.names[name].slot == slot]
        if names and self.chance(0.7):
            kind, number, model = self.rng.choice(names)
            return Key(kind, held.cluster, number, model)
        return Key("id", held.cluster, held.handle, 0 if held.blocks else slot)

    def pull(self, at: int) -> Op:
        peer = self._peer(at)
        if peer not in self.model.clusters or (ends := self._ends(at, peer, push=False)) is None:
            return self._astray(at, peer, Pull)
        source, target = ends
        slots = [b.slot for b in self.model.clusters[peer].names.values() if b.cache is source]
        slot = self.rng.choice(slots if slots and self.chance(0.7) else range(source.pieces))
        words: dict[str, Any] = {
            "at": at,
            "key": self._key(source, slot),
            "cache": target.handle,
            "blocks": target.blocks,
        }
        if target.blocks:
            words |= self._blocks(source, target)
        else:
            words["slot"] = self.rng.randrange(target.pieces)
            if source.stride < target.stride or self.chance(0.4):
                words["size"] = self.rng.randint(1, min(source.stride, target.stride))
        in_parts = bool(self._consumption(source)) and self.chance(0.8)
        words |= self._layers(len(source.tensors), len(target.tensors), in_parts)
        return Pull(**self._slip(words))

    def push(self, at: int) -> Op:
        peer = self._peer(at)
        if peer not in self.model.clusters or (ends := self._ends(at, peer, push=True)) is None:
            return self._astray(at, peer, Push)
        source, target = ends
        words: dict[str, Any] = {"at": at, "cache": source.handle, "blocks": source.blocks}
        if source.blocks:
            words |= {"key": self._key(target, 0), **self._blocks(source, target)}
        else:
            words["slot"] = self.rng.randrange(source.pieces)
            words["key"] = Key("id", peer, target.handle, self.rng.randrange(target.pieces))
        words |= self._layers(len(source.tensors), len(target.tensors))
        return Push(**self._slip(words))

    def _astray(self, at: int, peer: int, kind: type[Pull]) -> Op:
        """Make an operation that cannot work."""
        held = self._cache(at)
        if held is None or held.handle < 0:
            return self.make(at)
        key = self.rng.choice([Key("request", peer, 77), Key("blocks", peer, 0, 9), Key("id", peer, 99)])
        if held.blocks:
            return kind(at, key, blocks=True, cache=held.handle, src_blocks=(0,), dst_blocks=(1,))
        return kind(at, key, cache=held.handle)

    def _blocks(self, source: Held, target: Held) -> dict[str, Any]:
        if not source.blocks:
            count = min(-(-source.stride // target.stride), target.pieces)
            return {"dst_blocks": tuple(self.rng.sample(range(target.pieces), count))}
        count = self.rng.randint(1, min(target.pieces, 5))
        to, fro = self.rng.randint(0, target.pieces - count), self.rng.randrange(source.pieces)
        in_a_row = self.chance(0.3) and fro + count <= source.pieces
        if in_a_row:
            return {"src_blocks": tuple(range(fro, fro + count)), "dst_blocks": tuple(range(to, to + count))}
        return {
            "src_blocks": tuple(self.rng.choices(range(source.pieces), k=count)),
            "dst_blocks": tuple(
                self.rng.choices(range(target.pieces), k=count)
                if self.chance(0.04)
                else self.rng.sample(range(target.pieces), count)
            ),
        }

    def _layers(self, sources: int, targets: int, in_parts: bool = False) -> dict[str, Any]:
        if sources == targets and not in_parts and self.chance(0.55):
            return {"per_layer": 2 if sources % 2 == 0 else 1} if self.chance(0.9) else {}
        per_layer = self.rng.choice([n for n in (1, 2, 3) if sources % n == 0 and targets % n == 0])
        per_layer = 1 if in_parts else per_layer
        src, dst = sources // per_layer, targets // per_layer
        count = self.rng.randint(1, max(1, min(src, dst) - in_parts))
        first, to = self.rng.randint(0, src - count), self.rng.randint(0, dst - count)
        words: dict[str, Any] = {"per_layer": per_layer}
        if count < src or self.chance(0.5):
            words["src_layers"] = (first, first + count)
        if count < dst or self.chance(0.5):
            words["dst_layers"] = (to, to + count)
        return words

    def _slip(self, words: dict[str, Any]) -> dict[str, Any]:
        """Put in a mistake, once in a while."""
        if self.chance(0.88):
            return words
        key: Key = words["key"]
        slips: list[dict[str, Any]] = [
            {"key": key._replace(model=key.model + 5)},
            {"key": key._replace(id=key.id + 40)},
            {"key": Key("placeholder", key.cluster)},
            {"key": Key("both", key.cluster, 1)},
            {"key": key._replace(cluster=words["at"])},
            {"key": Key("blocks", key.cluster, 0, key.model)},
            {"per_layer": self.rng.choice([0, 3, 4])},
            {"src_layers": self.rng.choice([(0, 0), (0, 9), (1, 2)])},
            {"dst_layers": self.rng.choice([(0, 0), (0, 9), (1, 2)])},
        ]
        if words["blocks"]:
            slips += [
                {name: self._wrong(words.get(name, ()))} for name in ("src_blocks", "dst_blocks") for _ in range(3)
            ]
        else:
            slips += [{"slot": 9}, {"size": self.rng.choice([0, -2, 1000])}, {"size": 5}]
        return {**words, **self.rng.choice(slips)}

    def _wrong(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return self.rng.choice([(), (*numbers, 0), (*numbers[1:], 8), (*numbers[1:], -1)])

    # ---- copies ----

    def copy_cache(self, at: int) -> Op:
        source = self._cache(at, lambda h: not h.blocks and h.has_id)
        target = self._cache(
            at, lambda h: source is not None and not h.blocks and len(h.tensors) == len(source.tensors)
        )
        if source is None or target is None:
            return self.make(at)
        offset = self.rng.randrange(min(source.stride, target.stride)) if self.chance(0.5) else 0
        size = -1
        if source.stride > target.stride or self.chance(0.4):
            size = self.rng.randint(1, max(1, min(source.stride, target.stride) - offset))
        if self.chance(0.08):
            offset, size = self.rng.choice([(offset, 0), (offset, 500), (300, size)])
        slots = self.rng.randrange(target.pieces), self.rng.randrange(source.pieces) + 9 * self.chance(0.04)
        return CopyCache(at, target.handle, source.handle, *slots, offset, size)

    def copy_blocks(self, at: int) -> Op:
        held = self._cache(at, lambda h: h.blocks and h.has_id and h.handle > 0)
        if held is None or held.pieces < 3:
            return self.make(at)
        numbers = self.rng.sample(range(held.pieces), self.rng.randint(2, held.pieces))
        cut = self.rng.randint(1, len(numbers) - 1)
        pairs: dict[int, tuple[int, ...]] = {}
        for target in numbers[cut:]:
            source = self.rng.choice(numbers[:cut])
            pairs[source] = (*pairs.get(source, ()), target)
        if self.chance(0.08):
            pairs = self.rng.choice([{}, {0: (8,)}, {8: (0,)}, {0: (-1,)}, {0: ()}, {0: (1, 1)}, {0: (1,), 2: (1,)}])
        return CopyBlocks(at, held.handle, tuple(pairs.items()))

    def swap(self, at: int) -> Op:
        source = self._cache(at, lambda h: h.blocks and h.has_id)
        target = self._cache(
            at,
            lambda h: (
                source is not None and h.blocks and h.has_id and h.host != source.host and h.stride == source.stride
            ),
        )
        if source is None or target is None:
            return self.make(at)
        count = min(self.rng.randint(1, 4), source.pieces, target.pieces)
        numbers = self.rng.sample(range(source.pieces), count)
        pairs = list(zip(numbers, self.rng.sample(range(target.pieces), count), strict=True))
        if self.chance(0.08):
            pairs = self.rng.choice([[], [(0, 8)], [(8, 0)], [(0, -1)], [(0, 1), (2, 1)]])
        return SwapBlocks(at, source.handle, target.handle, tuple(pairs))

    # ---- together ----

    def together(self, at: int) -> Op:
        """Choose several that succeed in any order, none of which touches a byte that another one writes."""
        kinds = ["pull"] * 6 + ["push"] * 3 * self.model.one_sided
        kinds += ["copy_cache", "copy_blocks", "swap", "remove", "remove", "deallocate", "unregister", "make"]
        chosen: list[Op] = []
        for _ in range(10):
            candidate = getattr(self, self.rng.choice(kinds))(self.rng.choice(list(self.model.clusters)))
            if len(chosen) < 5 and self._commutes(chosen, candidate):
                chosen.append(candidate)
        if len(chosen) < 2:
            return self.pull(at)
        return Together(at, tuple((self.rng.choice([0, 0, 0, 1, 2, 3, 5, 9]), op) for op in chosen))

    def _commutes(self, others: list[Op], candidate: Op) -> bool:
        """Return True if the order does not matter: what succeeds first and last succeeds anywhere between."""
        every = [*others, candidate]
        makes = [op for op in every if isinstance(op, Make)]
        if len(makes) > 1 or any(op.memory == "pool" or op.same_as for op in makes):
            return False
        moves: dict[int, list[Move]] = {}
        for last in range(len(every)):
            fork = self.model.fork()
            try:
                self.model.fork().apply(every[last])
                for op in every[:last] + every[last + 1 :]:
                    fork.apply(op)
                moves[last] = fork.apply(every[last]).moves
            except Refused:
                return False
        newest = moves.pop(len(every) - 1)
        return not any(_touch(newest, other) for other in moves.values())


def _fit(source: Held, target: Held, push: bool) -> bool:
    if source.blocks and target.blocks:
        return source.stride == target.stride
    if source.blocks or (push and target.blocks):
        return False
    if target.blocks:
        return target.pieces * target.stride >= source.stride
    return not push or source.stride <= target.stride


def _touch(some: list[Move], others: list[Move]) -> bool:
    """Return True if one of the moves writes a byte that the other one writes or reads."""

    def overlap(a: bytearray, first: int, n: int, b: bytearray, second: int, m: int) -> bool:
        return a is b and first < second + m and second < first + n

    return any(
        overlap(a.target, a.to, a.nbytes, b.target, b.to, b.nbytes)
        or overlap(a.target, a.to, a.nbytes, b.source, b.at, b.nbytes)
        or overlap(a.source, a.at, a.nbytes, b.target, b.to, b.nbytes)
        for a in some
        for b in others
    )


# ---- the real thing ----


@dataclass
class Memory:
    """Real bytes and the model's. Of the pools, or of the caller's; those are kept alive."""

    what: str
    address: int
    model: bytearray
    keep: object = None

    def check(self) -> None:
        found = ctypes.string_at(self.address, len(self.model))
        if found != self.model:
            wrong = [i for i, (a, b) in enumerate(zip(found, self.model, strict=True)) if a != b]
            raise AssertionError(f"{self.what}: {len(wrong)} bytes differ from the model's, from byte {wrong[0]} on")


@dataclass
class Reality:
    """The same clusters, made of the library."""

    model: Model
    clusters: dict[int, Cluster]
    caches: dict[Pair, Cache] = field(default_factory=dict)
    memories: dict[int, Memory] = field(default_factory=dict)
    """By the id of the model's bytearray."""

    async def take_pools(self) -> None:
        """Find the pools: the first cache of each is all of it."""
        for number, cluster in self.model.clusters.items():
            for host, pool in cluster.pools.items():
                manager = self.clusters[number].datadist.cache_manager
                desc = CacheDesc(1, [len(pool.pages), PAGE], DataType.DT_UINT8, Placement(not host))
                whole = await manager.allocate_cache(desc)
                address = whole.tensor_addrs[0]
                ctypes.memset(address, 0, desc.size)
                await manager.deallocate_cache(whole)
                what = f"the {'host' if host else 'device'} pool of cluster {number}"
                self.memories[id(pool.memory)] = Memory(what, address, pool.memory)

    async def step(self, op: Op) -> None:
        """Do it here and in the model, and compare."""
        await self._before(op)
        try:
            plan = self.model.apply(op)
            wanted: frozenset[str] = frozenset({OK})
        except Refused as refused:
            plan, wanted = Plan(), refused.codes
        async with asyncio.timeout(STEP):
            if isinstance(op, Together):
                results = await asyncio.gather(*[self._later(turns, part) for turns, part in op.parts])
                outcomes = [outcome for outcome, _ in results]
                nbytes = sum(moved for _, moved in results)
            else:
                outcome, nbytes = await self._outcome(op)
                outcomes = [outcome]
        assert set(outcomes) <= wanted, f"came to {outcomes}, must be one of {sorted(wanted)}"
        assert nbytes == plan.nbytes, f"{nbytes} bytes were reported, it must be {plan.nbytes}"
        await self.compare(plan.frees)

    async def _later(self, turns: int, op: Op) -> tuple[str, int]:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await self._outcome(op)

    async def _outcome(self, op: Op) -> tuple[str, int]:
        """Return the status, and the bytes that a transfer reported."""
        try:
            done = await self._do(op)
        except LLMException as error:
            return error.status_code.name, 0
        except (TypeError, ValueError) as error:
            return type(error).__name__, 0
        if isinstance(done, LLMStatusCode):
            return done.name, 0
        return OK, done

    async def _do(self, op: Op) -> int | LLMStatusCode:
        actions: dict[type[Op], Callable[[Any], Awaitable[int | LLMStatusCode]]] = {
            Make: self._make, Pull: self._pull, Push: self._push, CopyCache: self._copy_cache,
            CopyBlocks: self._copy_blocks, SwapBlocks: self._swap_blocks, RemoveKey: self._remove_key,
            Deallocate: self._deallocate, Unregister: self._unregister, Link: self._link, Unlink: self._unlink,
        }  # fmt: skip
        return await actions[type(op)](op)

    def _manager(self, op: Op) -> Any:
        return self.clusters[op.at].datadist.cache_manager

    # ---- comparing ----

    async def compare(self, later: bool) -> None:
        """Compare memory and usage. With ``later``, a pull may still be about to release what it used."""
        until = monotonic() + (20 if later else 0)
        while (wrong := self._usage()) and monotonic() < until:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
        assert not wrong, wrong
        for memory in self.memories.values():
            memory.check()

    def _usage(self) -> str:
        for number, cluster in self.model.clusters.items():
            statistics = self.clusters[number].datadist.statistics()
            caches = sum(held.present for handle, held in cluster.caches.items() if handle > 0)
            if statistics.caches != caches:
                return f"cluster {number} has {statistics.caches} caches, it must be {caches}"
            for host, pool in cluster.pools.items():
                now = statistics.pools[Placement(not host)]
                if (now.total, now.free, now.largest) != pool.usage:
                    return f"cluster {number}: {now}, total, free and largest must be {pool.usage}"
        return ""

    # ---- caches ----

    async def _before(self, op: Op) -> None:
        """Check that memory with arrays cannot be given up at the first try."""
        if isinstance(op, Deallocate) and op.hold_arrays:
            manager = self._manager(op)
            arrays = manager.arrays(self.caches[op.at, op.cache])
            assert await self._outcome(Deallocate(op.at, op.cache, op.blocks)) == ("LLM_PARAM_INVALID", 0)
            del arrays

    async def _make(self, op: Make) -> int:
        desc = CacheDesc(op.tensors, [op.pieces, op.stride], DataType.DT_UINT8, Placement(not op.host))
        names: dict[str, Any] = {"cache_keys": [_real(key) for key in op.keys]}
        if op.blocks:
            names = {"blocks_cache_key": _real(op.keys[0]) if op.keys else None}
        kind, manager = "_blocks_cache" if op.blocks else "_cache", self._manager(op)
        if op.memory == "pool":
            cache = await getattr(manager, f"allocate{kind}")(desc, **names)
            for array, data in zip(manager.arrays(cache), contents(op), strict=True):
                array.reshape(-1)[:] = np.frombuffer(data, np.uint8)
            self._keep(op, cache, None)
            return 0
        backing, addresses = self._tensors(op, desc)
        if op.memory == "cpu":
            cache = Cache.create_cpu_cache(desc, addresses)
        else:
            cache = await getattr(manager, f"register{kind}")(desc, addresses, remote_accessible=op.accessible, **names)
        self._keep(op, cache, backing)
        return 0

    def _tensors(self, op: Make, desc: CacheDesc) -> tuple[Any, list[Any]]:
        """Memory of the caller's, and what is given of it."""
        size = desc.size - (op.slip == "short")
        if op.same_as:
            backing: Any = None
            addresses = list(self.caches[op.at, op.same_as].tensor_addrs)
            views: list[Any] = [(ctypes.c_char * size).from_address(address) for address in addresses]
        else:
            backing = np.zeros(layout(op.tensors + 1, desc.size)[-1], np.uint8)
            offsets = layout(op.tensors, desc.size)
            for offset, data in zip(offsets, contents(op), strict=True):
                backing[offset : offset + desc.size] = np.frombuffer(data, np.uint8)
            views = [backing[offset : offset + size] for offset in offsets]
            addresses = [backing.ctypes.data + offset for offset in offsets]
        if op.memory == "bytearray":
            views = [memoryview(view) for view in views]
        elif op.memory in {"address", "cpu"} or op.same_as:
            views = [0, *addresses[1:]] if op.slip == "zero" else addresses
        return backing, views[1:] if op.slip == "few" else views

    def _keep(self, op: Make, cache: Cache, backing: Any) -> None:
        handle, held = next(
            (handle, held)
            for handle, held in reversed(self.model.clusters[op.at].caches.items())
            if (handle < 0) == (op.memory == "cpu")
        )
        assert cache.cache_id == (handle if handle > 0 else -1), "ids count from 1"
        self.caches[op.at, handle] = cache
        memory, offset = held.tensors[0]
        if backing is not None:
            what = f"memory of cache {handle} of cluster {op.at}"
            self.memories[id(memory)] = Memory(what, backing.ctypes.data, memory, backing)
        base = self.memories[id(memory)].address
        assert cache.tensor_addrs == [base + at for _, at in held.tensors], f"at {base:#x}, not by best fit: {offset}"

    async def _remove_key(self, op: RemoveKey) -> int:
        await self._manager(op).remove_cache_key(_real(op.key))
        return 0

    async def _deallocate(self, op: Deallocate) -> int:
        manager, cache = self._manager(op), self.caches[op.at, op.cache]
        await (manager.deallocate_blocks_cache if op.blocks else manager.deallocate_cache)(cache)
        if self.model.clusters[op.at].caches[op.cache].pooled:
            assert cache.tensor_addrs == []
        return 0

    async def _unregister(self, op: Unregister) -> int:
        await self._manager(op).unregister_cache(op.cache)
        held = self.model.clusters[op.at].caches.get(op.cache)
        if held is not None and held.handle % 2 and not held.pooled:  # the memory of the others is watched for ever
            tensors = held.tensors[0][0]
            others = self.model.clusters[op.at].caches.values()
            if not any(other.present and other.tensors[0][0] is tensors for other in others):
                self.memories.pop(id(tensors), None)
        return 0

    # ---- transfers ----

    async def _pull(self, op: Pull) -> int:
        words: dict[str, Any] = {
            "src_layer_range": op.src_layers and range(*op.src_layers),
            "dst_layer_range": op.dst_layers and range(*op.dst_layers),
            "tensor_num_per_layer": op.per_layer,
        }
        manager, cache = self._manager(op), self.caches[op.at, op.cache]
        if op.blocks:
            return await _nbytes(
                manager.pull_blocks(_real(op.key), cache, list(op.src_blocks), list(op.dst_blocks), **words)
            )
        return await _nbytes(manager.pull_cache(_real(op.key), cache, op.slot, op.size, **words))

    async def _push(self, op: Push) -> int:
        layers = [pair and range(*pair) for pair in (op.src_layers, op.dst_layers)]
        manager, cache, key = self._manager(op), self.caches[op.at, op.cache], _real(op.key)
        if op.blocks:
            return await _nbytes(
                manager.push_blocks(key, cache, list(op.src_blocks), list(op.dst_blocks), *layers, op.per_layer)
            )
        return await _nbytes(manager.push_cache(key, cache, op.slot, *layers, op.size, op.per_layer))

    async def _copy_cache(self, op: CopyCache) -> int:
        dst, src = self.caches[op.at, op.dst], self.caches[op.at, op.src]
        return await _nbytes(self._manager(op).copy_cache(dst, src, op.dst_slot, op.src_slot, op.offset, op.size))

    async def _copy_blocks(self, op: CopyBlocks) -> int:
        pairs = {source: list(targets) for source, targets in op.pairs}
        return await _nbytes(self._manager(op).copy_blocks(self.caches[op.at, op.cache], pairs))

    async def _swap_blocks(self, op: SwapBlocks) -> int:
        src, dst = self.caches[op.at, op.src], self.caches[op.at, op.dst]
        return await _nbytes(self._manager(op).swap_blocks(src, dst, dict(op.pairs)))

    # ---- links ----

    async def _link(self, op: Link) -> LLMStatusCode:
        overall, _ = await self.clusters[op.at].datadist.link_clusters([cluster_info(self.clusters[op.to])], 10_000)
        await self.clusters[op.to].datadist.wait_linked(op.at)
        return overall

    async def _unlink(self, op: Unlink) -> LLMStatusCode:
        info = cluster_info(self.clusters[op.to])
        overall, _ = await self.clusters[op.at].datadist.unlink_clusters([info], 10_000, op.force)
        with suppress(NotLinked):
            await self.clusters[op.to].datadist.wait_link_closed(op.at)
        return overall


async def _nbytes(task: CacheTask) -> int:
    return (await task).bytes


def _real(key: Key) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "request": lambda: CacheKey(key.cluster, key.id, key.model),
        "prefix": lambda: CacheKey(key.cluster, UNSET, key.model, key.id),
        "placeholder": lambda: CacheKey(key.cluster, UNSET, key.model),
        "both": lambda: CacheKey(key.cluster, key.id, key.model, key.id),
        "blocks": lambda: BlocksCacheKey(key.cluster, key.model),
        "id": lambda: CacheKeyByIdAndIndex(key.cluster, key.id, key.model),
    }
    return makers[key.kind]()


# ---- the test ----


async def run(program: Program, log: list[str]) -> None:
    world = World(program)
    model = Model(world.one_sided, world.pools)
    log.append(str(world))
    async with AsyncExitStack() as stack:
        clusters: dict[int, Cluster] = {}
        for number, pools in world.pools.items():
            options: dict[str, Any] = {
                "host_mem_pool_cfg" if host else "mem_pool_cfg": json.dumps(
                    {"memory_size": pages * PAGE, "page_shift": 10}
                )
                for host, pages in pools.items()
            }
            clusters[number] = await stack.enter_async_context(
                open_cluster(
                    number, device_id=number - 1, transport=world.transport, sync_kv_timeout=60_000,
                    heartbeat_interval=10.0, enable_remote_cache_accessible=world.one_sided, **options,
                )
            )  # fmt: skip
        reality = Reality(model, clusters)
        await reality.take_pools()
        for seed in program.steps:
            if seed:
                await _step(reality, Draw(seed, world, model).operation(), log)
        for op in _tidying(model) if world.is_tidy else []:
            await _step(reality, op, log)
        if world.is_tidy:
            for number, cluster in clusters.items():
                usages = cluster.datadist.cache_manager.pool_usage()
                assert all(u.free == u.total == u.largest and not u.pinned for u in usages.values()), (number, usages)


async def _step(reality: Reality, op: Op, log: list[str]) -> None:
    log.append(f"{len(log):3}  {op}")
    await reality.step(op)


def _tidying(model: Model) -> list[Op]:
    """Give everything up, as it is when this is asked for."""
    operations: list[Op] = []
    for at, cluster in model.clusters.items():
        if cluster.pools:
            operations += [RemoveKey(at, Key(n.kind, at, n.id, n.model)) for n in cluster.names if n.kind != "blocks"]
            operations += [
                Deallocate(at, h.handle, h.blocks) for h in cluster.caches.values() if h.pooled and h.present
            ]
    operations += [Unlink(min(pair), max(pair)) for pair in model.links]
    for at, cluster in model.clusters.items():
        operations += [Unregister(at, h.handle) for h in cluster.caches.values() if not h.pooled and h.handle > 0]
    return operations


COUNTED_FOR_EVER = {"tasks_inline", "tasks_queued", "bytes_copied", "sync_timeouts"}


def live() -> dict[str, int]:
    gc.collect()
    return {name: count for name, count in soft_counters().items() if name not in COUNTED_FOR_EVER}


@pytest.mark.timeout(300 + EXAMPLES)
@settings(settings.get_profile("model-ci" if "CI" in os.environ else "model"))
@given(programs)
def test_what_clusters_do_is_what_the_model_says(program: Program) -> None:
    log: list[str] = []
    before = live()
    logging.disable(logging.ERROR)  # a program that fails is run very often
    try:
        asyncio.run(run(program, log))
        log.append("the end")
        assert live() == before
    except BaseException:
        note("\n".join(["", *log]))
        raise
    finally:
        logging.disable(logging.NOTSET)


@any_memory
def test_the_programs_do_everything() -> None:
    """Most operations succeed, and each kind is refused, too: what the model says of programs drawn as above."""
    seen: dict[str, set[str]] = {}
    counts = {"right": 0, "wrong": 0}
    for world in range(200):
        program = Program(bool(world % 2), world, tuple(range(1 + 40 * world, 31 + 40 * world)))
        setting = World(program)
        model = Model(program.one_sided, setting.pools)
        for seed in program.steps:
            op = Draw(seed, setting, model).operation()
            outcomes = seen.setdefault(type(op).__name__, set())
            try:
                model.apply(op)
                outcomes.add(OK)
                counts["right"] += 1
            except Refused as refused:
                outcomes |= refused.codes
                counts["wrong"] += 1
    assert all(OK in outcomes for outcomes in seen.values())
    assert len(seen) == len(WEIGHTS)
    assert DISABLED in seen["Push"]
    assert 0.6 < counts["right"] / (counts["right"] + counts["wrong"]) < 0.9, counts
