"""What two workers say to each other of a request that is pushed while it is computed. JSON, in notifications of their link.

::

    decode                                  prefill
      More(where blocks are)      ------->                        (what one message has no room for)
      Want(where its blocks are)  ------->
                                  <=======  layers, as they are computed
                                  <-------  Sent | Refused(why)
      Drop                        ------->                        (the request was aborted here, or takes too long)
                                  <-------  Refused

The name of a transfer is the router's, or a client's, and anyone may use it. So both engines say which prompt they mean, by
the digest of their own request: a transfer is what has the same name *and* the same prompt. The decode engine numbers its
wants: what is said of an earlier use of a name settles nothing of a later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, TypeAdapter

from aiodatadist.adapters.block_shapes import Layout
from aiodatadist.values.foreign import printable, read_foreign

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


class TransferKey(NamedTuple):
    """What two engines have to agree on: ``prompt`` is the hexadecimal digest of the request's prompt, or empty if the engine
    does not know prompts."""

    name: str
    prompt: str = ""

    def __str__(self) -> str:
        return printable(self.name)

    @classmethod
    def of(cls, name: str, prompt: bytes | None) -> TransferKey:
        """Return the key of a request whose prompt has this digest."""
        return cls(name, "" if prompt is None else prompt.hex())


class _Message(BaseModel):
    """``number``: the decode engine's number of what it wants, from 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    transfer: TransferName
    number: Annotated[int, Field(ge=0, lt=2**63)] = 0


class _Asking(_Message):
    """``prompt``: digest of the asking engine's own request."""

    prompt: Annotated[str, Field(pattern="^([0-9a-f]{32})?$", max_length=32)] = ""

    @property
    def key(self) -> TransferKey:
        """Which transfer is meant."""
        return TransferKey(self.transfer, self.prompt)


class More(_Message):
    """Of a ``want`` that follows: the first of its blocks belong into these."""

    kind: Literal["more"] = "more"
    into: BlockNumbers


class Want(_Asking):
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


class Drop(_Asking):
    """The request's blocks are no longer wanted. ``number``: of the ``want`` that this ends; 0: there was none."""

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
            yield More(transfer=message.transfer, number=message.number, into=message.into[:MAX_BLOCKS])
            message = message.model_copy(update={"into": message.into[MAX_BLOCKS:]})
    yield message


def encode(message: PushMessage) -> bytes:
    return message.model_dump_json().encode()


def decode(payload: bytes) -> PushMessage:
    """Raises Unreadable: it is none."""
    return read_foreign(payload, _ADAPTER, limit_bytes=MAX_MESSAGE, limit_chars=MAX_TEXT)
