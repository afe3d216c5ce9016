"""What the scheduler's half tells the worker's halves with each step, and what those tell it once."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from aiodatadist.adapters.leased_blocks import WorkerAddress
from aiodatadist.adapters.vllm.offer import MAX_OFFER, MAX_OFFER_TEXT, Offer, PushOffer
from aiodatadist.values.foreign import read_foreign


@dataclass
class Address(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM has no types here
    """Where a worker's blocks are: a :class:`WorkerAddress` as JSON, which every executor can carry."""

    text: str


def address_of(said: Address) -> WorkerAddress:
    """Return where a worker of this engine is. Raises Unreadable: it says something else."""
    return read_foreign(said.text.encode(), WorkerAddress, limit_bytes=MAX_OFFER, limit_chars=MAX_OFFER_TEXT)


@dataclass(frozen=True)
class Load:
    """``tokens`` tokens of the offer's blocks, from ``first`` on, into ``into``: from the first token of that block but
    ``skip``. ``prompt_digest``: of this engine's own request, up to the last token that is offered."""

    request_id: str
    offer: Offer
    first: int
    into: tuple[int, ...]
    prompt_digest: bytes
    skip: int = 0
    tokens: int | None = None


@dataclass(frozen=True)
class Release:
    """The offer's blocks are not needed. ``prompt_digest``: as of a :class:`Load`."""

    offer: Offer
    prompt_digest: bytes


@dataclass(frozen=True)
class Keep:
    """Blocks of a finished request. ``prompt_digest``: up to the last token that they are offered for."""

    request_id: str
    lease: str
    blocks: tuple[int, ...]
    prompt_digest: bytes


@dataclass(frozen=True)
class Transfer:
    """A request that is pushed. ``name``: the router's; ``prompt_digest``: of all of this engine's own prompt."""

    name: str
    request_id: str
    prompt_digest: bytes


@dataclass(frozen=True)
class Push:
    """Blocks ``first``, ``first + 1``, ... of a request, which this step completes."""

    transfer: Transfer
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Expect:
    """Blocks ``first``, ``first + 1``, ... of a request, which another engine will push, belong into these."""

    request_id: str
    offer: PushOffer
    first: int
    into: tuple[int, ...]
    prompt_digest: bytes


@dataclass(frozen=True)
class Decline:
    """What another engine computes is not needed. ``prompt_digest``: of this engine's own request, all of its prompt."""

    offer: PushOffer
    prompt_digest: bytes


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """Of one step.

    Attributes:
        pushes: what it computes for other engines; ``pushed``: requests that have been computed whole;
            ``abandons``: those that will not be.
        expects: what other engines compute for this one; ``declines``: what is not needed of it.
    """

    loads: list[Load] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    pushed: list[Transfer] = field(default_factory=list)
    abandons: list[Transfer] = field(default_factory=list)
    expects: list[Expect] = field(default_factory=list)
    declines: list[Decline] = field(default_factory=list)
