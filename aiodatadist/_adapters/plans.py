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
from typing import NamedTuple

from aiodatadist._adapters.cuts import Cut, shared, why_uncut
from aiodatadist._adapters.regions import Composition, Memory, Region

MAX_PLANS = 256
"""Most plans that are remembered."""
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
        Misfit: if a target needs something that no source has, or that cannot be cut, with both values.
        ValueError: if a memory contradicts itself.
    """
    return _plan(tuple(sources), tuple(targets), rank, turn % TURNS)


@lru_cache(maxsize=MAX_PLANS)
def _plan(sources: tuple[Memory, ...], targets: tuple[Memory, ...], rank: int, turn: int) -> Plan:
    there, here = _regions_of(sources), _regions_of(targets)
    chosen = _Choice(there, here, turn)
    all_pulls = [tuple(_pulls_of(list(chosen.of(number)), sources, memory)) for number, memory in enumerate(targets)]
    takers = Counter((pull.source, pull.plane) for pulls in all_pulls for pull in pulls)
    unused = [
        Left(number, plane)
        for number, memory in enumerate(sources)
        for plane in range(len(memory.planes))
        if not takers[number, plane]
    ]
    shares = Counter(source for pulls in all_pulls for source in {pull.source for pull in pulls})
    return Plan(
        tuple(_shared_by(pull, takers[pull.source, pull.plane]) for pull in all_pulls[rank]),
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


def _shared_by(pull: Pull, takers: int) -> Pull:
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
    )


class _Choice:
    """The choice of a source for each region and each head."""

    def __init__(self, there: list[dict[str, Region]], here: list[dict[str, Region]], turn: int) -> None:
        self._there, self._here, self._turn = there, here, turn
        self._holders: defaultdict[str, list[int]] = defaultdict(list)
        for number, regions in enumerate(there):
            for name in regions:
                self._holders[name].append(number)
        self._rivals: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for number, regions in enumerate(here):
            for name, region in regions.items():
                for head in range(region.composed.heads.first, region.composed.heads.stop):
                    self._rivals[name, head].append(number)

    def of(self, target: int) -> Iterator[_Take]:
        """Yield what a target takes. Raises Misfit if it cannot have what it needs."""
        for name, region in self._here[target].items():
            if not (holders := self._holders.get(name)):
                if region.composed.is_optional:
                    continue
                raise Misfit(f"{name} is a region here, and none of the other engine's")
            head, heads = region.composed.heads.first, region.composed.heads
            while head < heads.stop:
                source, stop = self._source_of(target, name, head, region.composed, holders)
                yield _Take(source, self._there[source][name], region, range(head, stop))
                head = stop

    def _source_of(
        self, target: int, name: str, head: int, needed: Composition, holders: Sequence[int]
    ) -> tuple[int, int]:
        """Return a worker that has a head, and the first head behind those that it has."""
        stops: dict[int, int] = {}
        why = ""
        for number in holders:
            composed = self._there[number][name].composed
            if (found := why_uncut(composed, needed)) or composed.heads.of != needed.heads.of:
                why = why or found
            elif head in (both := shared(composed.heads, needed.heads)):
                stops[number] = both.stop
        if not stops:
            raise Misfit(f"{name}: {why or f'no worker of the other engine has head {head}'}")
        stop = max(stops.values())
        choices = [number for number in stops if stops[number] == stop]
        rivals = self._rivals[name, head]
        turns = max(len(choices) // len(rivals), 1)
        place = rivals.index(target) + len(rivals) * (self._turn % turns)
        return choices[place % len(choices)], stop


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
