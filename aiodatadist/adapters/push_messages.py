"""What two workers say to each other of a request that is pushed while it is computed. JSON, in notifications of their link.

::

    decode                                  prefill
      More(where blocks are)      ------->                        (what one message has no room for)
      Want(where its blocks are)  ------->
                                  <=======  layers, as they are computed
                                  <-------  Sent | Refused(why)
      Drop                        ------->                        (the request was aborted here, or takes too long)
                                  <-------  Refused
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, TypeAdapter

from aiodatadist.adapters.block_shapes import Layout
from aiodatadist.values.foreign import read_foreign

MAX_NAME = 256
MAX_BLOCKS = 2048
"""Numbers of blocks in one message, of up to 19 digits each."""
TransferName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
"""The router's name of a request, the same for both engines."""
BlockNumber = Annotated[int, Field(ge=0, lt=2**63)]
MAX_WANTED = 1 << 20
"""Blocks of one request: the sum over its messages, of which each has at most :data:`MAX_BLOCKS`."""
BlockNumbers = Annotated[tuple[BlockNumber, ...], Strict(False), Field(max_length=MAX_WANTED), FailFast()]
MAX_MESSAGE = 64 << 10
"""Bytes: those of a notification."""
MAX_TEXT = 2048
"""Characters of a text."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    transfer: TransferName


class More(_Message):
    """Of a ``want`` that follows: the first of its blocks belong into these."""

    kind: Literal["more"] = "more"
    into: BlockNumbers


class Want(_Message):
    """Blocks ``first``, ``first + 1``, ... of the request belong into these.

    Attributes:
        count: of blocks, in this message and in those before it.
        caches: the name of the first cache that they are in; the others' follow.
        aux: where what goes with them belongs, if something does.
        layout: of the asking end: both have to have the same.
    """

    kind: Literal["want"] = "want"
    first: BlockNumber
    into: BlockNumbers
    count: BlockNumber
    caches: BlockNumber
    aux: BlockNumber | None = None
    layout: Layout


class Drop(_Message):
    """The request's blocks are not wanted any more."""

    kind: Literal["drop"] = "drop"


class Sent(_Message):
    """All blocks are in place."""

    kind: Literal["sent"] = "sent"


class Refused(_Message):
    """The blocks do not come, and no further byte of them lands."""

    kind: Literal["refused"] = "refused"
    reason: Annotated[str, Field(max_length=MAX_TEXT)]


PushMessage = More | Want | Drop | Sent | Refused
_ADAPTER: TypeAdapter[PushMessage] = TypeAdapter(Annotated[PushMessage, Field(discriminator="kind")])


def split(message: PushMessage) -> Iterator[PushMessage]:
    """In messages that fit in notifications."""
    if isinstance(message, Want):
        while len(message.into) > MAX_BLOCKS:
            yield More(transfer=message.transfer, into=message.into[:MAX_BLOCKS])
            message = message.model_copy(update={"into": message.into[MAX_BLOCKS:]})
    yield message


def encode(message: PushMessage) -> bytes:
    return message.model_dump_json().encode()


def decode(payload: bytes) -> PushMessage:
    """Raises Unreadable: it is none."""
    return read_foreign(payload, _ADAPTER, limit_bytes=MAX_MESSAGE, limit_chars=MAX_TEXT)
