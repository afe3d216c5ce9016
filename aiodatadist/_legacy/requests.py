"""Requests to a model, and the room for them. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiodatadist._values import checks
from aiodatadist._values.descriptors import UNSET


class LLMReq:
    """A request. A ``req_id`` of 2**64-1 is an idle slot of a batch; a ``prefix_id`` names a shared prefix.

    All five are uint64, and may be set. ``prompt_length`` is in tokens; 0 means "unknown". The constructor and setting
    a property raise TypeError or ValueError if a value is no uint64.
    """

    __slots__ = ("_decoder_cluster_id", "_prefix_id", "_prompt_cluster_id", "_prompt_length", "_req_id")

    def __init__(
        self,
        req_id: int = 2**64 - 1,
        prompt_length: int = 0,
        prompt_cluster_id: int = 0,
        decoder_cluster_id: int = 0,
        prefix_id: int = 2**64 - 1,
    ) -> None:
        self.req_id = req_id
        self.prompt_length = prompt_length
        self.prompt_cluster_id = prompt_cluster_id
        self.decoder_cluster_id = decoder_cluster_id
        self.prefix_id = prefix_id

    @property
    def req_id(self) -> int:
        """The number of the request."""
        return self._req_id

    @req_id.setter
    def req_id(self, req_id: int) -> None:
        self._req_id = checks.integer(req_id, "req_id", checks.UINT64)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt; 0 if unknown."""
        return self._prompt_length

    @prompt_length.setter
    def prompt_length(self, prompt_length: int) -> None:
        self._prompt_length = checks.integer(prompt_length, "prompt_length", checks.UINT64)

    @property
    def prompt_cluster_id(self) -> int:
        """The cluster that has the request's cache."""
        return self._prompt_cluster_id

    @prompt_cluster_id.setter
    def prompt_cluster_id(self, prompt_cluster_id: int) -> None:
        self._prompt_cluster_id = checks.integer(prompt_cluster_id, "prompt_cluster_id", checks.UINT64)

    @property
    def decoder_cluster_id(self) -> int:
        """The cluster that decodes the request."""
        return self._decoder_cluster_id

    @decoder_cluster_id.setter
    def decoder_cluster_id(self, decoder_cluster_id: int) -> None:
        self._decoder_cluster_id = checks.integer(decoder_cluster_id, "decoder_cluster_id", checks.UINT64)

    @property
    def prefix_id(self) -> int:
        """The shared prefix with which the request begins; 2**64-1 for none."""
        return self._prefix_id

    @prefix_id.setter
    def prefix_id(self, prefix_id: int) -> None:
        self._prefix_id = checks.integer(prefix_id, "prefix_id", checks.UINT64)

    @property
    def is_idle(self) -> bool:
        """True for an idle slot."""
        return self._req_id == UNSET

    @property
    def has_prefix(self) -> bool:
        """True if the request begins with a shared prefix."""
        return self._prefix_id != UNSET

    def __repr__(self) -> str:
        where = f"from {self._prompt_cluster_id} to {self._decoder_cluster_id}"
        return f"<LLMReq {self._req_id} prefix {self._prefix_id}, {self._prompt_length} tokens, {where}>"


def check_requests(llm_req: Any) -> list[LLMReq]:
    """Return a request, or a list or tuple of them, as a list. Raises TypeError if it is neither."""
    if isinstance(llm_req, LLMReq):
        return [llm_req]
    if not isinstance(llm_req, (list, tuple)):
        raise TypeError(f"llm_req is of type {type(llm_req).__name__}: must be an LLMReq, or a list of them")
    return list(checks.sequence(llm_req, "llm_req", LLMReq))


@dataclass(frozen=True, slots=True)
class CapacityState:
    """The room for a request: if it can be cached, and the most tokens of one request.

    ``free_tokens_num`` counts the room now, ``total_tokens_num`` the room if nothing were cached.
    """

    is_available: bool
    free_tokens_num: int
    total_tokens_num: int
