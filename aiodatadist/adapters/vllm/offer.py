"""What a prefill engine says of a finished request, through the router, to the decode engine: ``kv_transfer_params``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aiodatadist.adapters.block_service import WorkerAddress
from aiodatadist.values.lease_ticket import LeaseName

logger = logging.getLogger(__name__)


class Offer(BaseModel):
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

    model_config = ConfigDict(extra="ignore", frozen=True)

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_request_id: str
    remote_block_ids: tuple[int, ...] = Field(min_length=1)
    remote_num_tokens: int = Field(ge=1)
    remote_block_size: int = Field(ge=1)
    lease: LeaseName
    lease_seconds: float
    workers: tuple[WorkerAddress, ...] = Field(min_length=1)

    @classmethod
    def of(cls, request_id: str, params: Mapping[str, Any] | None) -> Self | None:
        """None: the request brings no blocks, or what it brings makes no sense, which is logged."""
        if not params or not params.get("do_remote_prefill"):
            return None
        try:
            return cls.model_validate(params)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            logger.warning("request %s: kv_transfer_params: %s: %s", request_id, where, first["msg"])
            return None
