"""Orders of the scheduler's half to the workers' halves, with each step, and what the workers tell it once."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from aiodatadist._adapters.pull_orders import GroupOrder, KeptOrder, PullOrder, WorkerAddress
from aiodatadist._adapters.vllm.offer import MAX_OFFER, MAX_OFFER_TEXT, Offer, PushOffer
from aiodatadist._values.foreign import read_foreign


@dataclass
class Address(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM has no types here
    """The place of a worker's blocks: a :class:`WorkerAddress` as JSON, which every executor can carry."""

    text: str


def address_of(said: Address) -> WorkerAddress:
    """Return the address of a worker of this engine. Raises Unreadable if the text is none."""
    return read_foreign(said.text.encode(), WorkerAddress, limit_bytes=MAX_OFFER, limit_chars=MAX_OFFER_TEXT)


@dataclass(frozen=True)
class Load:
    """An order to load ``tokens`` tokens of the offer's blocks into ``into``.

    They start in block ``first``, after ``skip`` tokens of it. ``prompt_digest`` is that of this engine's own request,
    up to the last offered token, and of where each group's blocks begin. ``others`` says the same of further
    groups of layers.
    """

    request_id: str
    offer: Offer
    first: int
    into: tuple[int, ...]
    prompt_digest: bytes
    skip: int = 0
    tokens: int | None = None
    others: tuple[GroupOrder, ...] = ()

    @property
    def order(self) -> PullOrder:
        """The order to a worker."""
        offer = self.offer
        return PullOrder(
            self.request_id,
            offer.workers,
            offer.lease,
            offer.remote_block_ids,
            self.into,
            self.prompt_digest,
            self.first,
            self.skip,
            self.tokens,
            offer.takers,
            self.others,
        )


@dataclass(frozen=True)
class _About:
    """An order about the offer's blocks. ``prompt_digest`` as in a :class:`Load`."""

    request_id: str
    offer: Offer
    prompt_digest: bytes

    @property
    def order(self) -> KeptOrder:
        """The order to a worker."""
        offer = self.offer
        named, *others = offer.blocks_by_group
        return KeptOrder(
            self.request_id, offer.workers, offer.lease, named, self.prompt_digest, offer.takers, tuple(others)
        )


@dataclass(frozen=True)
class Release(_About):
    """An order to release the offer's blocks, which are not needed."""


@dataclass(frozen=True)
class Hold(_About):
    """An order to keep the offer's blocks alive while the request waits."""


@dataclass(frozen=True)
class Keep:
    """An order to keep blocks of a finished request, for ``takers`` requests of other engines.

    ``prompt_digest`` covers the tokens that are offered. ``others`` has the blocks of further groups of layers.
    """

    request_id: str
    lease: str
    blocks: tuple[int, ...]
    prompt_digest: bytes
    takers: int = 1
    others: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Transfer:
    """A request that is pushed. ``name`` is the router's; ``prompt_digest`` covers all of this engine's own prompt."""

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
    """An order for blocks ``first``, ``first + 1``, ... of a request, which another engine pushes into these."""

    request_id: str
    offer: PushOffer
    first: int
    into: tuple[int, ...]
    prompt_digest: bytes


@dataclass(frozen=True)
class Decline:
    """A refusal of what another engine computes. ``prompt_digest`` covers all of this engine's own prompt."""

    offer: PushOffer
    prompt_digest: bytes


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """The orders of one step.

    Attributes:
        holds: requests that have an offer, and wait for room.
        pushes: what the step computes for other engines.
        pushed: requests that have been computed completely.
        abandons: requests that will not be.
        expects: what other engines compute for this one.
        declines: what is not needed of it.
    """

    loads: list[Load] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    pushed: list[Transfer] = field(default_factory=list)
    abandons: list[Transfer] = field(default_factory=list)
    expects: list[Expect] = field(default_factory=list)
    declines: list[Decline] = field(default_factory=list)
