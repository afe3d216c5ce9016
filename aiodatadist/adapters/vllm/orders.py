"""What the scheduler's half tells the worker's halves with each step, and what those tell it once."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from aiodatadist.adapters.vllm.offer import Offer


@dataclass
class Address(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM has no types here
    """Where a worker's blocks are: a :class:`WorkerAddress` as JSON, which every executor can carry."""

    text: str


@dataclass(frozen=True)
class Load:
    """``blocks[i]`` of the offer's engine into ``into[i]``."""

    request_id: str
    offer: Offer
    blocks: tuple[int, ...]
    into: tuple[int, ...]


@dataclass(frozen=True)
class Keep:
    """Blocks of a finished request."""

    request_id: str
    lease: str
    blocks: tuple[int, ...]


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """Of one step."""

    loads: list[Load] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    releases: list[Offer] = field(default_factory=list)
