"""Orders to pull blocks, the workers that they name, and what both ends make of their words. Pure.

Of an order only this end's own prompt is trusted, because the rest comes through a router. The owner compares the
blocks, and a digest. The digest covers the prompt, the description of the worker's memory, and the owner's rank and number of
ranks: an order that is wrong about any of these would put the right bytes into the wrong places.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Annotated, Self

from pydantic import FailFast, Field, Strict, model_validator

from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.regions import MAX_PLANES, Layout, Memory
from aiodatadist._values.digests import DIGEST_BYTES
from aiodatadist._values.lease_ticket import LeaseTicket


class WorkerAddress(PeerAddress):
    """The place of a worker's blocks, as JSON has it.

    Attributes:
        cache_ids: one for each plane.
        layout: properties that must be the same at both ends, in words and numbers.
        memory: the regions of its KV cache.
    """

    cache_ids: Annotated[
        tuple[Annotated[int, Field(ge=1, lt=2**63)], ...],
        Strict(False),
        Field(min_length=1, max_length=MAX_PLANES),
        FailFast(),
    ]
    layout: Layout
    memory: Memory

    @model_validator(mode="after")
    def _has_a_cache_for_each_plane(self) -> Self:
        if len(self.cache_ids) != len(self.memory.planes):
            raise ValueError(f"{len(self.cache_ids)} cache_ids for {len(self.memory.planes)} planes: must be as many")
        return self


@dataclass(frozen=True)
class GroupOrder:
    """The blocks of one group of layers in an order.

    Attributes:
        blocks: all blocks of the lease, in order. The peer refuses the pull if the lease has others; this end does if
            it has no room for all from ``first`` on.
        into: the local blocks; if blocks have the same size, the same number as there are from ``first`` on.
        first: index of the first of ``blocks`` that is wanted.
        skip: unwanted tokens at the beginning of that block.
        tokens: number of wanted tokens; None for as many as both have room for.
    """

    blocks: tuple[int, ...]
    into: tuple[int, ...]
    first: int = 0
    skip: int = 0
    tokens: int | None = None


@dataclass(frozen=True)
class PullOrder:
    """An order to pull blocks that a peer keeps.

    Attributes:
        request: the engine's name for it.
        sources: the peer's workers that have the blocks, by rank.
        lease: name of the lease there.
        prompt_digest: digest of the tokens of this end's own request that the lease's blocks hold. The peer refuses the
            pull if its request had others, because nothing that a router carries is trusted.
        blocks, into, first, skip, tokens: those of the first group of layers, see :class:`GroupOrder`.
        takers: number of requests that may take the blocks.
        others: the other groups, in order.
    """

    request: str
    sources: tuple[WorkerAddress, ...]
    lease: str
    blocks: tuple[int, ...]
    into: tuple[int, ...]
    prompt_digest: bytes
    first: int = 0
    skip: int = 0
    tokens: int | None = None
    takers: int = 1
    others: tuple[GroupOrder, ...] = ()

    @property
    def groups(self) -> tuple[GroupOrder, ...]:
        """All groups."""
        return (GroupOrder(self.blocks, self.into, self.first, self.skip, self.tokens), *self.others)

    @property
    def kept(self) -> KeptOrder:
        """The lease that it pulls."""
        others = tuple(group.blocks for group in self.others)
        return KeptOrder(self.request, self.sources, self.lease, self.blocks, self.prompt_digest, self.takers, others)

    def missing(self, landed: int) -> tuple[int, ...]:
        """Return the local blocks without the first ``landed`` ones of the first group."""
        return (*self.into[landed:], *(block for group in self.others for block in group.into))


@dataclass(frozen=True)
class KeptOrder:
    """An order about a lease that a request holds, or lets go of. The fields are those of a :class:`PullOrder`.

    ``others`` has the blocks of further groups of layers.
    """

    request: str
    sources: tuple[WorkerAddress, ...]
    lease: str
    blocks: tuple[int, ...]
    prompt_digest: bytes
    takers: int = 1
    others: tuple[tuple[int, ...], ...] = ()

    @property
    def named(self) -> list[tuple[int, ...]]:
        """The blocks of the lease, by group."""
        return [self.blocks, *self.others]


def turn_of(lease: str) -> int:
    """Return the number by which replicas take turns: all workers of an engine know it, and it is at random."""
    return int(lease[:8], 16)


def prompt_as_kept(
    prompt_digest: bytes, layout: Mapping[str, str | int], memory: Memory, rank: int, ranks: int, takers: int = 1
) -> bytes:
    """Return the digest that a worker compares with a peer's: of the prompt, and of how the worker's blocks hold it.

    ``takers`` is in it, too: how many requests may take the blocks is the owner's word, and not a router's.
    """
    made = blake2b(prompt_digest, digest_size=DIGEST_BYTES, person=b"adist layout")
    made.update(json.dumps([layout, rank, ranks, takers], sort_keys=True).encode())
    made.update(memory.said)
    return made.digest()


def lease_name(lease: str, number: int) -> str:
    """Return the name of the lease in a cache."""
    return sha256(f"{lease} {number}".encode()).hexdigest()[: len(lease)] if number else lease


Tickets = dict[int, LeaseTicket]
"""The tickets of one worker's leases, by plane. A plane has none if its group has no blocks."""


def tickets(sources: Sequence[WorkerAddress], lease: str, blocks: Sequence[Sequence[int]]) -> list[Tickets]:
    """Return the tickets for each of the sources. Raises ValidationError if there is no such ticket.

    Args:
        blocks: those of the lease, by group.
    """
    validated: dict[int, LeaseTicket] = {}  # by group; the copies below are not validated again
    made: list[Tickets] = []
    for source in sources:
        mine: Tickets = {}
        for number, (plane, cache_id) in enumerate(zip(source.memory.planes, source.cache_ids, strict=True)):
            group = plane.group
            if group >= len(blocks) or not blocks[group]:
                continue
            if group not in validated:
                validated[group] = LeaseTicket(
                    cluster_id=source.cluster_id,
                    lease=lease,
                    cache_id=cache_id,
                    blocks=tuple(blocks[group]),
                    seconds=0.0,
                )
            named = {"cluster_id": source.cluster_id, "lease": lease_name(lease, number), "cache_id": cache_id}
            mine[number] = validated[group].model_copy(update=named)
        made.append(mine)
    return made
