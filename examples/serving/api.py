"""Messages between the three processes: OpenAI's completions, with ``kv_transfer_params`` as in vLLM."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from aiodatadist import LeaseTicket

LeaseName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
DONE = b"data: [DONE]\n\n"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Keep(_Message):
    """A message from the router to prefill: keep the blocks for a decode service, under this name."""

    do_remote_decode: Literal[True] = True
    lease: LeaseName


class Kept(_Message):
    """A message from prefill through the router to decode: the kept blocks, and the first token of the answer."""

    ticket: LeaseTicket
    first_token: Annotated[int, Field(ge=0, le=255)]


class _Completion(_Message):
    prompt: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    seed: Annotated[int, Field(ge=0)] = 0
    stream: bool = False

    @property
    def tokens(self) -> bytes:
        """The prompt's bytes, which are the model's tokens."""
        return self.prompt.encode()


class PrefillJob(_Completion):
    kv_transfer_params: Keep


class DecodeJob(_Completion):
    kv_transfer_params: Kept


def completion(text: str, kept: Kept | None = None) -> bytes:
    """Encode a whole answer."""
    answer: dict[str, object] = {"choices": [{"index": 0, "text": text, "finish_reason": "length"}]}
    if kept is not None:
        answer["kv_transfer_params"] = kept.model_dump(mode="json")
    return json.dumps(answer).encode()


def event(text: str) -> bytes:
    """Encode a part of a streamed answer."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def failure(reason: str) -> bytes:
    """Encode a failure in place of the rest of a streamed answer. DONE does not follow."""
    return b"data: " + json.dumps({"error": {"message": reason}}).encode() + b"\n\n"
