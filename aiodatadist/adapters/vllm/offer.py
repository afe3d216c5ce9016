"""What engines are told of a request by the router, in ``kv_transfer_params``: what a prefill engine keeps of it, or that one
pushes it while it is computed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, FiniteFloat, Strict, TypeAdapter, ValidationError

from aiodatadist.adapters.leased_blocks import WorkerAddress
from aiodatadist.adapters.peer_links import PeerAddress
from aiodatadist.adapters.push_messages import TransferName
from aiodatadist.values.foreign import first_complaint
from aiodatadist.values.lease_ticket import Blocks, LeaseName
from aiodatadist.wire.messages import MAX_TAKERS

logger = logging.getLogger(__name__)


class _Params(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    @classmethod
    def read(cls, request_id: str, params: Mapping[str, Any]) -> Self | None:
        """None: it makes no sense, which is logged."""
        try:
            return cls.model_validate(params)
        except ValidationError as error:
            logger.warning("request %s: kv_transfer_params: %s", request_id, first_complaint(error))
            return None


class Offer(_Params):
    """Blocks of a finished request that a prefill engine keeps. JSON-safe.

    Attributes:
        do_remote_prefill, do_remote_decode: as vLLM's own connectors have them: the next engine is to decode.
        remote_request_id: the prefill engine's name of the request.
        remote_block_ids: in order, from the first token.
        remote_num_tokens: whose keys and values they have.
        remote_block_size: tokens.
        lease: the name under which each worker keeps them.
        lease_seconds: how long, from when this was written.
        workers: by tensor-parallel rank.
    """

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_request_id: str
    remote_block_ids: Blocks
    remote_num_tokens: int = Field(ge=1)
    remote_block_size: int = Field(ge=1)
    lease: LeaseName
    lease_seconds: FiniteFloat
    workers: Annotated[tuple[WorkerAddress, ...], Strict(False), Field(min_length=1, max_length=MAX_TAKERS), FailFast()]

    @property
    def tokens(self) -> int:
        """That are in the blocks."""
        return min(self.remote_num_tokens, self.remote_block_size * len(self.remote_block_ids))

    def blocks(self, begin: int, stop: int) -> tuple[tuple[int, ...], int]:
        """Those that have the tokens of this range, and how many of the first one's tokens are before it."""
        size = self.remote_block_size
        return self.remote_block_ids[begin // size : -(-stop // size)], begin % size


class PushOffer(_Params):
    """A prefill engine computes this request at the same time, and pushes it. JSON-safe.

    Attributes:
        transfer_id: the router's name of the request, which it gives both engines, and no other request.
        prefill: where rank 0 of that engine listens; rank r has the port and the cluster id behind it by r.
    """

    transfer_id: TransferName
    prefill: PeerAddress

    def has_workers(self, ranks: int) -> bool:
        """So many can be: their ports and cluster ids are numbers of such."""
        rank0 = self.prefill
        return rank0.port + ranks - 1 <= 65535 and rank0.cluster_id + ranks - 1 < 2**64

    def worker(self, rank: int) -> PeerAddress:
        rank0 = self.prefill
        return PeerAddress(cluster_id=rank0.cluster_id + rank, host=rank0.host, port=rank0.port + rank)


def offer_of(request_id: str, params: Mapping[str, Any] | None, ranks: int) -> Offer | PushOffer | None:
    """None: the request brings no blocks, or what it brings makes no sense, which is logged. ``ranks``: workers here."""
    if not params or not params.get("do_remote_prefill"):
        return None
    if "transfer_id" not in params:
        return Offer.read(request_id, params)
    offer = PushOffer.read(request_id, params)
    if offer is not None and not offer.has_workers(ranks):
        logger.warning("request %s: kv_transfer_params: prefill: there are no %d workers from there", request_id, ranks)
        return None
    return offer


_NAME: TypeAdapter[str] = TypeAdapter(TransferName)


def transfer_to_push(params: Mapping[str, Any] | None) -> str | None:
    """The router's name of a request that is to be pushed; None: it is not, and its blocks are kept for a pull."""
    if not params or not params.get("do_remote_decode") or "transfer_id" not in params:
        return None
    try:
        return _NAME.validate_python(params["transfer_id"])
    except ValidationError:
        logger.warning("kv_transfer_params: transfer_id is %r: it is ignored", params["transfer_id"])
        return None
