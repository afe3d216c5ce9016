"""Answers to a peer about a request that failed here."""

from __future__ import annotations

import pytest

from aiodatadist._link.transfers.responder import _refusal, status_error
from aiodatadist.errors import (
    CacheNotFound,
    LLMException,
    LLMStatusCode,
    ParamInvalid,
    ProtocolError,
    TransferError,
    TransferTimeout,
)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (CacheNotFound("x"), CacheNotFound, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
        (ParamInvalid("x"), ParamInvalid, LLMStatusCode.LLM_PARAM_INVALID),
        (TransferTimeout("x"), TransferTimeout, LLMStatusCode.LLM_TIMEOUT),
        # its status is that of a wrong argument, which the peer's caller did not give
        (ProtocolError("x"), TransferError, LLMStatusCode.LLM_LINK_FAILED),
    ],
)
def test_a_refusal_is_raised_at_the_peer_as_what_it_is(
    error: LLMException, kind: type[LLMException], status: LLMStatusCode
) -> None:
    told = status_error(_refusal(7, error))
    assert type(told) is kind
    assert told.status_code is status
