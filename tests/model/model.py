"""A model of clusters' contents and names, without any machinery: bytearrays, dictionaries and lists of pages.

Every operation is data. :meth:`Model.apply` says what becomes of it: a :class:`Plan`, or :class:`Refused` with the status
codes that are right answers. What is wrong in several ways may be refused for any of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, fields
from typing import NamedTuple

PAGE = 1024
GAP = 8
"""Bytes before, between and behind the tensors of the caller's memory: no transfer may write there."""

PARAM = "LLM_PARAM_INVALID"
MISSING = "LLM_KV_CACHE_NOT_EXIST"
UNLINKED = "LLM_NOT_YET_LINK"
DISABLED = "LLM_FEATURE_NOT_ENABLED"
FULL = "LLM_OUT_OF_MEMORY"

Pair = tuple[int, int]


class Refused(Exception):
    """An answer of the model's, no mistake."""

    def __init__(self, codes: Iterable[str]) -> None:
        super().__init__(sorted(codes))
        self.codes = frozenset(codes)


class Name(NamedTuple):
    kind: str
    id: int
    model: int


class Key(NamedTuple):
    """``kind``: request, prefix, blocks or id; placeholder and both are keys that cannot be pulled."""

    kind: str
    cluster: int
    id: int = 0
    model: int = 0
    """For an id: the batch index."""

    @property
    def name(self) -> Name:
        if self.kind == "blocks":
            return Name("blocks", 0, self.model)
        return Name("prefix" if self.kind == "both" else self.kind, self.id, self.model)

    def __str__(self) -> str:
        return f"<{self.kind} {self.id}/{self.model} of {self.cluster}>"


NO_KEY = Key("placeholder", 0)


# ---- operations ----


@dataclass(frozen=True)
class Op:
    at: int

    def __str__(self) -> str:
        default = {f.name: f.default for f in fields(self)}
        words = [
            f"{name}={value if isinstance(value, (Key, int)) else _plain(value)}"
            for name, value in vars(self).items()
            if name != "at" and value != default[name]
        ]
        return f"cluster {self.at}: {type(self).__name__}({', '.join(words)})"


def _plain(value: object) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], Key):
        return f"[{', '.join(map(str, value))}]"
    return repr(value)


@dataclass(frozen=True)
class Make(Op):
    """A cache of pool memory, or of the caller's: ``memory`` is pool, numpy, bytearray, address or cpu.

    ``same_as``: over the memory of that cache. ``slip``: what is wrong with the addresses.
    """

    memory: str = ""
    blocks: bool = False
    tensors: int = 0
    pieces: int = 0
    stride: int = 0
    host: bool = False
    keys: tuple[Key, ...] = ()
    accessible: bool | None = None
    same_as: int = 0
    slip: str = ""
    fill: int = 0


@dataclass(frozen=True)
class Pull(Op):
    key: Key = NO_KEY
    blocks: bool = False
    cache: int = 0
    slot: int = 0
    size: int = -1
    src_blocks: tuple[int, ...] = ()
    dst_blocks: tuple[int, ...] = ()
    src_layers: Pair | None = None
    dst_layers: Pair | None = None
    per_layer: int = 2


@dataclass(frozen=True)
class Push(Pull):
    """``slot`` is that of the source."""


@dataclass(frozen=True)
class CopyCache(Op):
    dst: int = 0
    src: int = 0
    dst_slot: int = 0
    src_slot: int = 0
    offset: int = 0
    size: int = -1


@dataclass(frozen=True)
class CopyBlocks(Op):
    cache: int = 0
    pairs: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class SwapBlocks(Op):
    src: int = 0
    dst: int = 0
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class RemoveKey(Op):
    key: Key = NO_KEY


@dataclass(frozen=True)
class Deallocate(Op):
    """``hold_arrays``: try it first while there are arrays over the memory."""

    cache: int = 0
    blocks: bool = False
    hold_arrays: bool = False


@dataclass(frozen=True)
class Unregister(Op):
    cache: int = 0


@dataclass(frozen=True)
class Link(Op):
    to: int = 0


@dataclass(frozen=True)
class Unlink(Op):
    to: int = 0
    force: bool = False


@dataclass(frozen=True)
class Together(Op):
    """Started one after the other, each after the event loop went round so many times. Any order has the same result."""

    parts: tuple[tuple[int, Op], ...] = ()

    def __str__(self) -> str:
        return "together:" + "".join(f"\n        after {turns} turns, {op}" for turns, op in self.parts)


# ---- what there is ----


class Move(NamedTuple):
    source: bytearray
    at: int
    target: bytearray
    to: int
    nbytes: int


@dataclass
class Plan:
    """Effects of an operation. ``frees``: a pull may let go of pool memory, which happens a little later."""

    moves: list[Move] = field(default_factory=list)
    frees: bool = False

    @property
    def nbytes(self) -> int:
        return sum(move.nbytes for move in self.moves)


@dataclass(eq=False)
class Pool:
    memory: bytearray
    pages: list[bool]

    def allocate(self, nbytes: int) -> int | None:
        """Allocate the first of the smallest free extents that are large enough, and return its offset."""
        wanted = -(-nbytes // PAGE)
        fitting = [(length, first) for first, length in self.extents() if length >= wanted]
        if not fitting:
            return None
        first = min(fitting)[1]
        self.pages[first : first + wanted] = [True] * wanted
        return first * PAGE

    def free(self, offset: int, nbytes: int) -> None:
        wanted = -(-nbytes // PAGE)
        self.pages[offset // PAGE : offset // PAGE + wanted] = [False] * wanted

    def extents(self) -> list[Pair]:
        """Return the first page and the number of pages of each free extent."""
        found: list[Pair] = []
        for page, used in enumerate(self.pages):
            if used:
                continue
            if found and sum(found[-1]) == page:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((page, 1))
        return found

    @property
    def usage(self) -> tuple[int, int, int]:
        """The total, the free and the largest number of bytes."""
        lengths = [length for _, length in self.extents()]
        return len(self.pages) * PAGE, sum(lengths) * PAGE, max(lengths, default=0) * PAGE


@dataclass(eq=False)
class Held:
    """A cache. Its tensors are (memory, offset)."""

    cluster: int
    handle: int
    blocks: bool
    host: bool
    tensors: list[tuple[bytearray, int]]
    pieces: int
    stride: int
    accessible: bool
    pooled: bool
    may_receive: bool
    is_known: bool
    """To the transport: peers may reach its memory while there are links."""
    has_id: bool = True
    present: bool = True

    @property
    def size(self) -> int:
        return self.pieces * self.stride


@dataclass
class Binding:
    cache: Held
    slot: int
    covered: frozenset[int] = frozenset()


@dataclass
class Cluster:
    pools: dict[bool, Pool]
    """By "is it the host's"."""
    next_id: int
    next_cpu: int = -1
    caches: dict[int, Held] = field(default_factory=dict)
    """All that ever were; negative numbers are CPU caches, which have no id."""
    names: dict[Name, Binding] = field(default_factory=dict)

    def names_of(self, cache: Held) -> list[Name]:
        return [name for name, binding in self.names.items() if binding.cache is cache]


def layout(tensors: int, size: int) -> list[int]:
    """Return the offsets of the tensors in memory of the caller's."""
    return [GAP + i * (size + GAP) for i in range(tensors)]


class Model:
    """Some clusters, their links, and all their bytes."""

    def __init__(self, one_sided: bool, pools: dict[int, dict[bool, int]]) -> None:
        self.one_sided = one_sided
        self.clusters = {
            number: Cluster(
                {host: Pool(bytearray(pages * PAGE), [False] * pages) for host, pages in sizes.items()}, len(sizes) + 1
            )
            for number, sizes in pools.items()
        }
        self.links: set[frozenset[int]] = set()
        self._is_fork = False

    def fork(self) -> Model:
        """Copy keys, pages and links, to try something out. The bytes are shared, and stay."""
        other = copy(self)
        other._is_fork = True
        other.links = set(self.links)
        other.clusters = {number: _fork(cluster) for number, cluster in self.clusters.items()}
        return other

    def apply(self, op: Op) -> Plan:
        """Do it. When it is refused nothing has changed."""
        actions = {
            Make: self._make,
            Pull: self._pull,
            Push: self._push,
            CopyCache: self._copy_cache,
            CopyBlocks: self._copy_blocks,
            SwapBlocks: self._swap_blocks,
            RemoveKey: self._remove_key,
            Deallocate: self._deallocate,
            Unregister: self._unregister,
            Link: self._link,
            Unlink: self._unlink,
        }
        if isinstance(op, Together):
            plans = [self.apply(part) for _, part in op.parts]
            return Plan([move for plan in plans for move in plan.moves], frees=not self.one_sided)
        plan: Plan = actions[type(op)](op)  # type: ignore[operator]
        for move in [] if self._is_fork else plan.moves:
            move.target[move.to : move.to + move.nbytes] = move.source[move.at : move.at + move.nbytes]
        return plan

    # ---- making caches ----

    def _make(self, op: Make) -> Plan:
        cluster, why = self.clusters[op.at], set[str]()
        names = self._new_names(op, why)
        if op.tensors == 0 or op.slip:
            why.add(PARAM)
        if op.memory == "pool" and op.host not in cluster.pools:
            why.add(PARAM if cluster.pools else DISABLED)
        _check(why)
        size = op.pieces * op.stride
        tensors = self._pool_tensors(cluster.pools[op.host], op.tensors, size) if op.memory == "pool" else None
        if tensors is None and op.same_as:
            tensors = cluster.caches[op.same_as].tensors
        elif tensors is None:
            memory = bytearray(layout(op.tensors + 1, size)[-1])
            tensors = [(memory, at) for at in layout(op.tensors, size)]
        accessible = op.memory == "pool" or (not op.host if op.accessible is None else op.accessible)
        handle = cluster.next_cpu if op.memory == "cpu" else cluster.next_id
        made = Held(
            op.at, handle, op.blocks, op.host, tensors, op.pieces, op.stride, accessible, op.memory == "pool",
            may_receive=accessible or op.accessible is None, is_known=accessible,
        )  # fmt: skip
        if op.memory == "cpu":
            cluster.next_cpu -= 1
        else:
            cluster.next_id += 1
        cluster.caches[handle] = made
        cluster.names.update({name: Binding(made, slot) for name, slot in names.items()})
        if not self._is_fork and not op.same_as:
            for (memory, at), data in zip(tensors, contents(op), strict=True):
                memory[at : at + size] = data
        return Plan()

    def _new_names(self, op: Make, why: set[str]) -> dict[Name, int]:
        names: dict[Name, int] = {}
        taken = self.clusters[op.at].names
        if not op.blocks and len(op.keys) > op.pieces:
            why.add(PARAM)
        for slot, key in enumerate(op.keys):
            if key.kind == "placeholder":
                continue
            if key.name in taken or key.name in names:
                why.add(PARAM)
            names[key.name] = slot
        return names

    @staticmethod
    def _pool_tensors(pool: Pool, count: int, size: int) -> list[tuple[bytearray, int]]:
        before = list(pool.pages)
        places = [pool.allocate(size) for _ in range(count)]
        if None in places:
            pool.pages = before
            raise Refused({FULL})
        return [(pool.memory, place) for place in places if place is not None]

    # ---- transfers ----

    def _local(self, at: int, handle: int, why: set[str], remote: bool = False) -> Held | None:
        held = self.clusters[at].caches.get(handle)
        if held is None or handle < 0 or not held.present or not held.has_id:
            why.add(MISSING)
            return None
        if remote and not held.accessible:
            why.add(PARAM)
        return held

    def _peer(self, op: Pull, why: set[str]) -> Held | None:
        """Return the cache at the other end."""
        key = op.key
        if key.cluster == op.at or key.kind in {"placeholder", "both"}:
            why.add(PARAM)
        if frozenset({op.at, key.cluster}) not in self.links:
            why.add(UNLINKED)
        cluster = self.clusters.get(key.cluster)
        if cluster is None:
            return None
        if key.kind == "id":
            held = cluster.caches.get(key.id)
        else:
            held = cluster.names[key.name].cache if key.name in cluster.names else None
        if held is None or held.handle < 0 or not held.present or not held.accessible:
            why.add(MISSING)
            return None
        return held

    def _slot(self, key: Key) -> int:
        return key.model if key.kind == "id" else self.clusters[key.cluster].names[key.name].slot

    def _pull(self, op: Pull) -> Plan:
        why = set[str]()
        wanted = {"request", "prefix", "both", "placeholder", "id"} | ({"blocks"} if op.blocks else set())
        if op.key.kind not in wanted:
            why.add("TypeError")
        target = self._local(op.at, op.cache, why)
        if target is not None and (target.blocks != op.blocks or not target.may_receive):
            why.add(PARAM)
        self._check_words(op, why)
        source = self._peer(op, why)
        if target is not None:
            _tensors(target, op.dst_layers, op.per_layer, why)
            if max((op.slot, *op.dst_blocks)) >= target.pieces or op.size > target.stride:
                why.add(PARAM)
            target.is_known |= not why - {MISSING}
        if target is None or source is None or "TypeError" in why:
            raise Refused(why)
        slot = self._slot(op.key)
        if slot >= (1 if source.blocks else source.pieces):
            why.add(MISSING)
        if op.src_blocks:
            moves = _blocks_to_blocks(op, source, target, why)
        elif op.blocks:
            moves = _slot_to_blocks(op, source, slot, target, why)
        else:
            moves = _slot_to_slot(op, (source, slot), (target, op.slot), op.size, why)
        _check(why)
        tensors = _tensors(source, op.src_layers, op.per_layer, why)
        return Plan(moves, self._consume(op.key, source, slot, tensors))

    @staticmethod
    def _check_words(op: Pull, why: set[str]) -> None:
        """Check the rules about the arguments alone."""
        _check_layers(op, why)
        if op.blocks:
            _check_numbers((*op.src_blocks, *op.dst_blocks), why)
            _check_once(op.dst_blocks, why)
            if not op.dst_blocks or (op.src_blocks and len(op.src_blocks) != len(op.dst_blocks)):
                why.add(PARAM)
            if (op.key.kind == "blocks" and not op.src_blocks) or (
                op.key.kind not in {"blocks", "id"} and op.src_blocks
            ):
                why.add(PARAM)
        elif op.size == 0 or op.size < -1:
            why.add(PARAM)

    def _consume(self, key: Key, source: Held, slot: int, tensors: range) -> bool:
        """Consume the request of a key. Return True if memory goes back to the pool with it."""
        if self.one_sided or source.blocks or not source.pooled:
            return False
        cluster = self.clusters[source.cluster]
        if key.kind == "id":
            names = [n for n in cluster.names_of(source) if n.kind == "request" and cluster.names[n].slot == slot]
        else:
            names = [key.name] if key.kind == "request" else []
        for name in names:
            binding = cluster.names[name]
            binding.covered |= set(tensors)
            if len(binding.covered) == len(source.tensors):
                del cluster.names[name]
        return self._collect(source)

    def _collect(self, cache: Held) -> bool:
        cluster = self.clusters[cache.cluster]
        if not cache.present or cache.has_id or (cluster.names_of(cache) and not cache.blocks):
            return False
        for name in cluster.names_of(cache):
            del cluster.names[name]
        cache.present = False
        for _, place in cache.tensors:
            cluster.pools[cache.host].free(place, cache.size)
        return True

    def _push(self, op: Push) -> Plan:
        why = set[str]()
        if not self.one_sided:
            why.add(DISABLED)
        if op.key.kind not in ({"blocks", "id"} if op.blocks else {"id"}):
            why.add("TypeError")
        _check(why)
        source = self._local(op.at, op.cache, why, remote=True)
        if source is not None and (
            source.blocks != op.blocks or op.per_layer == 0 or len(source.tensors) % op.per_layer
        ):
            why.add(PARAM)
        if op.blocks:
            _check_numbers((*op.src_blocks, *op.dst_blocks), why)
            _check_once(op.dst_blocks, why)
            if not op.dst_blocks or len(op.src_blocks) != len(op.dst_blocks):
                why.add(PARAM)
        elif op.size != -1:
            why.add(PARAM)
        target = self._peer(op, why)
        _check_layers(op, why)
        if source is not None:
            _tensors(source, op.src_layers, op.per_layer, why)
            if max((op.slot, *op.src_blocks)) >= source.pieces:
                why.add(PARAM)
        if source is None or target is None:
            raise Refused(why)
        slot = self._slot(op.key)
        if op.blocks:
            if slot:
                why.add(PARAM)
            moves = _blocks_to_blocks(op, source, target, why)
        else:
            moves = _slot_to_slot(op, (source, op.slot), (target, slot), source.stride, why)
        _check(why)
        return Plan(moves)

    # ---- copies ----

    def _copy_cache(self, op: CopyCache) -> Plan:
        why = set[str]()
        target, source = self._local(op.at, op.dst, why), self._local(op.at, op.src, why)
        if op.size == 0 or op.size < -1:
            why.add(PARAM)
        if source is None or target is None:
            raise Refused(why)
        nbytes = source.stride - op.offset if op.size == -1 else op.size
        if nbytes < 1 or op.offset >= target.stride:
            why.add(PARAM)
        words = Pull(op.at)
        moves = _slot_to_slot(words, (source, op.src_slot), (target, op.dst_slot), op.offset + nbytes, why)
        _check(why)
        skip = op.offset
        return Plan([Move(m.source, m.at + skip, m.target, m.to + skip, m.nbytes - skip) for m in moves])

    def _copy_blocks(self, op: CopyBlocks) -> Plan:
        why = set[str]()
        held = self._local(op.at, op.cache, why)
        pairs = [(source, target) for source, targets in op.pairs for target in targets]
        return self._copy_pairs(op.at, held, held, pairs, why)

    def _swap_blocks(self, op: SwapBlocks) -> Plan:
        why = set[str]()
        caches = self.clusters[op.at].caches
        source = caches[op.src] if op.src < 0 else self._local(op.at, op.src, why)
        target = caches[op.dst] if op.dst < 0 else self._local(op.at, op.dst, why)
        if source is not None and target is not None and source.host == target.host:
            why.add(PARAM)
        return self._copy_pairs(op.at, source, target, list(op.pairs), why)

    @staticmethod
    def _copy_pairs(at: int, source: Held | None, target: Held | None, pairs: list[Pair], why: set[str]) -> Plan:
        if not pairs:
            why.add(PARAM)
        words = Pull(at, src_blocks=tuple(s for s, _ in pairs), dst_blocks=tuple(t for _, t in pairs))
        _check_numbers((*words.src_blocks, *words.dst_blocks), why)
        if source is None or target is None:
            raise Refused(why)
        moves = _blocks_to_blocks(words, source, target, why)
        _check(why)
        return Plan(moves)

    # ---- giving up ----

    def _remove_key(self, op: RemoveKey) -> Plan:
        cluster = self._with_pools(op)
        binding = cluster.names.get(op.key.name)
        if binding is not None and binding.cache.pooled:
            del cluster.names[op.key.name]
            self._collect(binding.cache)
        return Plan()

    def _deallocate(self, op: Deallocate) -> Plan:
        cluster = self._with_pools(op)
        held = cluster.caches[op.cache]
        if held.blocks != op.blocks:
            raise Refused({PARAM})
        if held.pooled and held.has_id:
            held.has_id = False
            self._collect(held)
        return Plan()

    def _with_pools(self, op: Op) -> Cluster:
        cluster = self.clusters[op.at]
        if not cluster.pools:
            raise Refused({DISABLED})
        return cluster

    def _unregister(self, op: Unregister) -> Plan:
        cluster = self.clusters[op.at]
        held = cluster.caches.get(op.cache)
        if held is None or op.cache < 0 or not held.present:
            return Plan()
        if held.pooled:
            raise Refused({PARAM})
        if held.is_known and self.peers(op.at):
            raise Refused({"LLM_EXIST_LINK"})
        held.present = held.has_id = False
        for name in cluster.names_of(held):
            del cluster.names[name]
        return Plan()

    # ---- links ----

    def peers(self, at: int) -> list[int]:
        return [number for number in self.clusters if frozenset({at, number}) in self.links]

    def _link(self, op: Link) -> Plan:
        pair = frozenset({op.at, op.to})
        if pair in self.links:
            raise Refused({"LLM_ALREADY_LINK"})
        self.links.add(pair)
        return Plan()

    def _unlink(self, op: Unlink) -> Plan:
        self.links.discard(frozenset({op.at, op.to}))
        return Plan()


def _fork(cluster: Cluster) -> Cluster:
    caches = {handle: copy(held) for handle, held in cluster.caches.items()}
    names = {name: Binding(caches[b.cache.handle], b.slot, b.covered) for name, b in cluster.names.items()}
    pools = {host: Pool(pool.memory, list(pool.pages)) for host, pool in cluster.pools.items()}
    return Cluster(pools, cluster.next_id, cluster.next_cpu, caches, names)


def contents(op: Make) -> list[bytes]:
    """Return the initial contents of a new cache's tensors."""
    source = random.Random(op.fill)
    return [source.randbytes(op.pieces * op.stride) for _ in range(op.tensors)]


def _check(why: set[str]) -> None:
    if why:
        raise Refused(why)


def _check_numbers(numbers: Iterable[int], why: set[str]) -> None:
    if min(numbers, default=0) < 0:
        why.add("ValueError")


def _check_once(targets: Iterable[int], why: set[str]) -> None:
    targets = list(targets)
    if len(set(targets)) < len(targets):
        why.add(PARAM)


def _check_layers(op: Pull, why: set[str]) -> None:
    if any(layers is not None and not 0 <= layers[0] < layers[1] for layers in (op.src_layers, op.dst_layers)):
        why.add(PARAM)
    if op.src_layers and op.dst_layers and len(range(*op.src_layers)) != len(range(*op.dst_layers)):
        why.add(PARAM)


def _tensors(held: Held, layers: Pair | None, per_layer: int, why: set[str]) -> range:
    count = len(held.tensors)
    if per_layer == 0:
        why.add(PARAM)
        return range(0)
    if layers is None:
        return range(count)
    first, last = layers[0] * per_layer, layers[1] * per_layer
    if count % per_layer or not 0 <= first < last <= count:
        why.add(PARAM)
        return range(0)
    return range(first, last)


def _tensor_pairs(
    op: Pull, source: Held, target: Held, why: set[str]
) -> list[tuple[tuple[bytearray, int], tuple[bytearray, int]]]:
    src = _tensors(source, op.src_layers, op.per_layer, why)
    dst = _tensors(target, op.dst_layers, op.per_layer, why)
    if len(src) != len(dst):
        why.add(PARAM)
    return [(source.tensors[s], target.tensors[t]) for s, t in zip(src, dst, strict=False)]


def _blocks_to_blocks(op: Pull, source: Held, target: Held, why: set[str]) -> list[Move]:
    stride = source.stride
    if not (source.blocks and target.blocks) or target.stride != stride:
        why.add(PARAM)
    if max(op.src_blocks, default=0) >= source.pieces or max(op.dst_blocks, default=0) >= target.pieces:
        why.add(PARAM)
    _check_once(op.dst_blocks, why)
    return [
        Move(memory, at + s * stride, other, to + t * stride, stride)
        for (memory, at), (other, to) in _tensor_pairs(op, source, target, why)
        for s, t in zip(op.src_blocks, op.dst_blocks, strict=False)
    ]


def _slot_to_blocks(op: Pull, source: Held, slot: int, target: Held, why: set[str]) -> list[Move]:
    whole, block = source.stride, target.stride
    chunks = [(start, min(block, whole - start)) for start in range(0, whole, block)]
    if source.blocks or not target.blocks or len(op.dst_blocks) != len(chunks):
        why.add(PARAM)
    if max(op.dst_blocks, default=0) >= target.pieces:
        why.add(PARAM)
    _check_once(op.dst_blocks, why)
    return [
        Move(memory, at + slot * whole + start, other, to + t * block, nbytes)
        for (memory, at), (other, to) in _tensor_pairs(op, source, target, why)
        for (start, nbytes), t in zip(chunks, op.dst_blocks, strict=False)
    ]


def _slot_to_slot(op: Pull, src: tuple[Held, int], dst: tuple[Held, int], size: int, why: set[str]) -> list[Move]:
    """Return the moves from slot to slot. ``size`` -1 is the whole destination slot."""
    (source, src_slot), (target, dst_slot) = src, dst
    nbytes = target.stride if size == -1 else size
    if source.blocks or target.blocks or src_slot >= source.pieces or dst_slot >= target.pieces:
        why.add(PARAM)
    if nbytes > min(source.stride, target.stride):
        why.add(PARAM)
    return [
        Move(memory, at + src_slot * source.stride, other, to + dst_slot * target.stride, nbytes)
        for (memory, at), (other, to) in _tensor_pairs(op, source, target, why)
    ]
