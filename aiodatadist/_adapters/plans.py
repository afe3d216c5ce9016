"""Plans of who sends what to whom, made from what the workers of two engines say of their memory. Pure.

A worker needs each of its regions, with the heads that it has. Its source is any worker of the other engine that has them.
Replicas share the load: workers that need the same take it from different ones, and one order after the other. Each worker
computes the plan of the whole engine and pulls its part of it. So all workers agree on how many of them share a lease, and on
who releases the workers that none of them needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from math import lcm
from typing import NamedTuple

from aiodatadist._adapters.cuts import Cut, shared, why_uncut
from aiodatadist._adapters.regions import Composition, Memory, Region

MAX_PLANS = 256
"""Most plans that are remembered."""
MAX_CHOICES = 4
"""Most pairs of engines whose regions are remembered: each may have many."""
TURNS = 64
"""After this number of orders, replicas have had their turns."""
MAX_SAID = 1 << 14
"""Most regions of all workers of an engine that say different things."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A pull of one worker from a plane of another's: tensors in a row, in which the same cuts are made.

    Attributes:
        source: rank of the other engine's worker.
        plane, tensors: its plane, and the tensors there.
        into, into_tensors: the plane here, and the tensors.
        group: the group of layers, whose blocks these are.
        cuts: what travels of each block; one for each region of a tensor.
        is_whole: True if that is all of a block, in the same places.
        takers: the number of pulls that share the lease of the source's plane, over all workers.
        tells: True if this worker tells the source if none of the blocks is needed: one does, of those that pull from the
            plane.
    """

    source: int
    plane: int
    tensors: range
    into: int
    into_tensors: range
    group: int
    cuts: tuple[Cut, ...]
    is_whole: bool
    takers: int = 1
    tells: bool = False


class Misfit(ValueError):
    """A worker needs something that the workers of the other engine do not have, or not so that it can be cut."""


class Left(NamedTuple):
    """A plane that no worker takes anything of: its owner is told, by one of them."""

    source: int
    plane: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The part of one worker in an order.

    Attributes:
        shares: how many workers pull something from each of its sources.
    """

    pulls: tuple[Pull, ...]
    left: tuple[Left, ...]
    shares: Mapping[int, int] = field(default_factory=dict)

    @property
    def sources(self) -> list[int]:
        """The workers that something is pulled from."""
        return list(dict.fromkeys(pull.source for pull in self.pulls))


class _Take(NamedTuple):
    """A region that a worker takes from another, whole or some of its heads."""

    source: int
    there: Region
    here: Region
    heads: range


def plan(sources: Sequence[Memory], targets: Sequence[Memory], rank: int, turn: int) -> Plan:
    """Return what the target of this rank does.

    Args:
        sources, targets: the memory of all workers of either engine, by rank.
        turn: a number of the order, which all targets know: replicas take turns.

    Raises:
        Misfit: if a target needs something that no source has, or that cannot be cut, with both values; or if a memory
            contradicts itself.
    """
    engines = tuple(sources), tuple(targets)
    found: Plan | str | int = _turns(*engines)
    if isinstance(found, int):
        found = _plan(*engines, rank, turn % found)
    if isinstance(found, str):
        raise Misfit(found)
    return found


@lru_cache(maxsize=MAX_PLANS)
def _turns(sources: tuple[Memory, ...], targets: tuple[Memory, ...]) -> int | str:
    """Return after how many orders replicas have had their turns, or why there is no plan."""
    try:
        return _choice(sources, targets).turns
    except ValueError as error:
        return str(error)


@lru_cache(maxsize=MAX_CHOICES)
def _choice(sources: tuple[Memory, ...], targets: tuple[Memory, ...]) -> _Choice:
    return _Choice(_regions_of(sources), _regions_of(targets))


@lru_cache(maxsize=MAX_PLANS)
def _plan(sources: tuple[Memory, ...], targets: tuple[Memory, ...], rank: int, turn: int) -> Plan | str:
    """Return a plan, or why there is none: a router may name the same workers again and again."""
    try:
        return _made(sources, targets, rank, turn)
    except ValueError as error:
        return str(error)


def _made(sources: tuple[Memory, ...], targets: tuple[Memory, ...], rank: int, turn: int) -> Plan:
    chosen = _choice(sources, targets)
    all_pulls = [
        tuple(_pulls_of(list(chosen.of(number, turn)), sources, memory)) for number, memory in enumerate(targets)
    ]
    takers = Counter((pull.source, pull.plane) for pulls in all_pulls for pull in pulls)
    tellers = {(pull.source, pull.plane): number for number, pulls in enumerate(all_pulls) for pull in pulls}
    unused = [
        Left(number, plane)
        for number, memory in enumerate(sources)
        for plane in range(len(memory.planes))
        if not takers[number, plane]
    ]
    shares = Counter(source for pulls in all_pulls for source in {pull.source for pull in pulls})
    return Plan(
        tuple(
            _shared_by(pull, takers[where], tellers[where] == rank)
            for pull in all_pulls[rank]
            for where in [(pull.source, pull.plane)]
        ),
        tuple(each for each in unused if each.source % len(targets) == rank),
        shares,
    )


def _regions_of(memories: Sequence[Memory]) -> list[dict[str, Region]]:
    """Return the regions of each worker by name. Workers that say the same have the same dictionary.

    Raises ValueError if there are more than a router may claim at the cost of this end's time.
    """
    known: dict[Memory, dict[str, Region]] = {}
    for memory in memories:
        if memory not in known:
            known[memory] = memory.by_name()
        if sum(map(len, known.values())) > MAX_SAID:
            raise ValueError(f"the workers have more than {MAX_SAID} regions")
    return [known[memory] for memory in memories]


def _shared_by(pull: Pull, takers: int, tells: bool) -> Pull:
    return Pull(
        pull.source,
        pull.plane,
        pull.tensors,
        pull.into,
        pull.into_tensors,
        pull.group,
        pull.cuts,
        pull.is_whole,
        takers,
        tells,
    )


class _Kind:
    """Regions that the same workers have, composed in the same way: a source is chosen once for all of them.

    Args:
        holders: the workers of the other engine that have them, with their compositions.
        targets: those of this engine.
    """

    def __init__(
        self, name: str, holders: Sequence[tuple[int, Composition]], targets: Sequence[tuple[int, Composition]]
    ) -> None:
        self.name = name
        self.targets = targets
        self.is_held = bool(holders)
        self._holders: defaultdict[Composition, list[int]] = defaultdict(list)
        for number, composed in holders:
            self._holders[composed].append(number)
        self._sources: dict[tuple[Composition, int], tuple[list[int], int]] = {}
        self._rivals: dict[int, list[int]] = {}

    def of(self, target: int, needed: Composition, turn: int) -> Iterator[tuple[int, range]]:
        """Yield the workers that a target takes heads from, with the heads."""
        for head, stop, sources, rivals in self._pieces(needed):
            place = rivals.index(target) + len(rivals) * (turn % _turns_of(sources, rivals))
            yield sources[place % len(sources)], range(head, stop)

    def turns(self) -> Iterator[int]:
        """Yield after how many orders the replicas of each piece have had their turns."""
        for needed in {composed for _, composed in self.targets}:
            for _, _, sources, rivals in self._pieces(needed):
                yield _turns_of(sources, rivals)

    def _pieces(self, needed: Composition) -> Iterator[tuple[int, int, list[int], list[int]]]:
        """Yield the first head, the one behind the last, the workers that have them, and the targets that need the first.

        Raises Misfit if no worker has a head.
        """
        head = needed.heads.first
        while head < needed.heads.stop:
            sources, stop = self._sources_of(head, needed)
            if head not in self._rivals:
                self._rivals[head] = [
                    n for n, composed in self.targets if composed.heads.first <= head < composed.heads.stop
                ]
            yield head, stop, sources, self._rivals[head]
            head = stop

    def _sources_of(self, head: int, needed: Composition) -> tuple[list[int], int]:
        """Return the workers that have a head and the most behind it, and the first head behind those that they have."""
        known = self._sources.get((needed, head))
        if known is not None:
            return known
        stops: dict[int, int] = {}
        why = ""
        for composed, numbers in self._holders.items():
            if (found := why_uncut(composed, needed)) or composed.heads.of != needed.heads.of:
                why = why or found
            elif head in (both := shared(composed.heads, needed.heads)):
                stops.update(dict.fromkeys(numbers, both.stop))
        if not stops:
            raise Misfit(f"{self.name}: {why or f'no worker of the other engine has head {head}'}")
        stop = max(stops.values())
        found_sources = sorted(number for number in stops if stops[number] == stop), stop
        self._sources[needed, head] = found_sources
        return found_sources


def _turns_of(sources: Sequence[int], rivals: Sequence[int]) -> int:
    return max(len(sources) // len(rivals), 1)


class _Choice:
    """The choice of a source for each region and each head.

    Attributes:
        turns: the number of orders after which replicas have had their turns.
    """

    def __init__(self, there: list[dict[str, Region]], here: list[dict[str, Region]]) -> None:
        self._there, self._here = there, here
        names = dict.fromkeys(name for regions in here for name in regions)
        kinds: dict[tuple[tuple[tuple[int, int], ...], ...], _Kind] = {}
        self._kinds: dict[str, _Kind] = {}
        equal: dict[Composition, int] = {}
        numbers: dict[int, int] = {}  # by identity: a worker has few compositions, and many regions
        for name in names:
            ends = [
                [(n, regions[name].composed) for n, regions in enumerate(end) if name in regions]
                for end in (there, here)
            ]
            for _, composed in chain(*ends):
                if id(composed) not in numbers:
                    numbers[id(composed)] = equal.setdefault(composed, len(equal))
            key = tuple(tuple((n, numbers[id(composed)]) for n, composed in end) for end in ends)
            if key not in kinds:
                kinds[key] = _Kind(name, *ends)
            self._kinds[name] = kinds[key]
        self.turns = min(lcm(*(turns for kind in kinds.values() for turns in self._turns_of(kind))), TURNS)

    @staticmethod
    def _turns_of(kind: _Kind) -> Iterator[int]:
        if kind.is_held:
            yield from kind.turns()
        elif not all(composed.is_optional for _, composed in kind.targets):
            raise Misfit(f"{kind.name} is a region here, and none of the other engine's")

    def of(self, target: int, turn: int) -> Iterator[_Take]:
        """Yield what a target takes."""
        chosen: dict[tuple[int, int], list[tuple[int, range]]] = {}
        for name, region in self._here[target].items():
            kind = self._kinds[name]
            if not kind.is_held:
                continue
            key = id(kind), id(region.composed)
            if key not in chosen:
                chosen[key] = list(kind.of(target, region.composed, turn))
            for source, heads in chosen[key]:
                yield _Take(source, self._there[source][name], region, heads)


def _pulls_of(takes: Sequence[_Take], sources: Sequence[Memory], target: Memory) -> Iterator[Pull]:
    """Yield the pulls for what one target takes: tensors in a row that are cut in the same way are one."""
    cuts: defaultdict[tuple[int, int, int], dict[tuple[int, int], list[Cut]]] = defaultdict(dict)
    for take in takes:
        src, dst = take.there.composed, take.here.composed
        groups = [
            memory.planes[plane].group for memory, plane in ((sources[take.source], src.plane), (target, dst.plane))
        ]
        if groups[0] != groups[1]:
            raise Misfit(f"{take.here.name} is in group {groups[1]} here and in group {groups[0]}")
        cut = Cut(src, dst, take.there.offset, take.here.offset, take.heads.start, take.heads.stop)
        pairs = cuts[take.source, src.plane, dst.plane]
        pairs.setdefault((take.here.tensor, take.there.tensor), []).append(cut)
    for (source, plane, into), pairs in cuts.items():
        same = sources[source].planes[plane].stride == target.planes[into].stride
        for run in _rows_of(pairs):
            (here, there), made = run[0], pairs[run[0]]
            yield Pull(
                source, plane, range(there, there + len(run)), into, range(here, here + len(run)),
                target.planes[into].group, tuple(made), same and all(cut.is_same for cut in made),
            )  # fmt: skip


def _rows_of(pairs: dict[tuple[int, int], list[Cut]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of tensors in rows: both numbers ascend by one, and the cuts are the same."""
    row: list[tuple[int, int]] = []
    for here, there in sorted(pairs):
        if row and (row[-1] != (here - 1, there - 1) or pairs[row[-1]] != pairs[here, there]):
            yield row
            row = []
        row.append((here, there))
    if row:
        yield row
