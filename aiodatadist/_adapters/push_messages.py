"""Messages between two workers about a request that is pushed while it is computed: JSON, in their link's notifications.

The messages of one request::

    decode                                  prefill
      More(where blocks are)      ------->                        (what one message has no room for)
      Want(where its blocks are)  ------->
                                  <=======  layers, as they are computed
                                  <-------  Sent | Refused(why)
      Drop                        ------->                        (the request was aborted here, or takes too long)
                                  <-------  Refused

The name of a transfer is the router's, or a client's, and anyone may use it. So both engines name the prompt, by the
digest of their own request: a transfer has one name *and* one prompt. The decode engine numbers its wants, so that an
answer to an earlier use of a name settles nothing of a later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, TypeAdapter

from aiodatadist._adapters.hold_messages import Hold, LetGo
from aiodatadist._adapters.regions import Layout
from aiodatadist._values.foreign import printable, read_foreign

MAX_NAME = 256
MAX_BLOCKS = 2048
"""Most block numbers in one message, of up to 19 digits each."""
TransferName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
"""The router's name of a request, the same for both engines."""
BlockNumber = Annotated[int, Field(ge=0, lt=2**63)]
MAX_WANTED = 1 << 20
"""Most blocks of one request: the sum over its messages, each with at most :data:`MAX_BLOCKS`."""
BlockNumbers = Annotated[tuple[BlockNumber, ...], Strict(False), Field(max_length=MAX_WANTED), FailFast()]
MAX_MESSAGE = 64 << 10
"""Most bytes of a message: those of a notification."""
MAX_TEXT = 2048
"""Most characters of a text."""


class TransferKey(NamedTuple):
    """The name on which two engines must agree.

    ``prompt`` is the hexadecimal digest of the request's prompt, or empty if the engine does not know prompts.
    """

    name: str
    prompt: str = ""

    def __str__(self) -> str:
        return printable(self.name)

    @classmethod
    def of(cls, name: str, prompt: bytes | None) -> TransferKey:
        """Return the key of a request whose prompt has this digest."""
        return cls(name, "" if prompt is None else prompt.hex())


class _Message(BaseModel):
    """A message. ``number`` is the decode engine's number of the want, from 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    transfer: TransferName
    number: Annotated[int, Field(ge=0, lt=2**63)] = 0


class _Asking(_Message):
    """A message of an engine that asks. ``prompt`` is the digest of its own request."""

    prompt: Annotated[str, Field(pattern="^([0-9a-f]{32})?$", max_length=32)] = ""

    @property
    def key(self) -> TransferKey:
        """The key of the transfer."""
        return TransferKey(self.transfer, self.prompt)


class More(_Message):
    """The first block numbers of a ``want`` that follows."""

    kind: Literal["more"] = "more"
    into: BlockNumbers


class Want(_Asking):
    """A request for blocks ``first``, ``first + 1``, ... with the places where they belong.

    Attributes:
        count: number of blocks, in this message and in those before it.
        caches: the name of the first cache that they are in; the others' follow.
        aux: place of what goes with them, if anything does.
        layout: layout of the asking end: both must have the same.
    """

    kind: Literal["want"] = "want"
    first: BlockNumber
    into: BlockNumbers
    count: BlockNumber
    caches: BlockNumber
    aux: BlockNumber | None = None
    layout: Layout


class Drop(_Asking):
    """The request's blocks are no longer wanted. ``number`` is that of the ``want`` that ends; 0 for none."""

    kind: Literal["drop"] = "drop"


class Sent(_Message):
    """All blocks are in place."""

    kind: Literal["sent"] = "sent"


class Refused(_Message):
    """The blocks will not come, and no more bytes of them land."""

    kind: Literal["refused"] = "refused"
    reason: Annotated[str, Field(max_length=MAX_TEXT)]


PushMessage = More | Want | Drop | Sent | Refused
WorkerMessage = PushMessage | Hold | LetGo
"""All that workers say to each other in notifications."""
_ADAPTER: TypeAdapter[WorkerMessage] = TypeAdapter(Annotated[WorkerMessage, Field(discriminator="kind")])


def split(message: WorkerMessage) -> Iterator[WorkerMessage]:
    """Yield messages that fit into notifications."""
    if isinstance(message, Want):
        while len(message.into) > MAX_BLOCKS:
            yield More(transfer=message.transfer, number=message.number, into=message.into[:MAX_BLOCKS])
            message = message.model_copy(update={"into": message.into[MAX_BLOCKS:]})
    yield message


def encode(message: WorkerMessage) -> bytes:
    """Return the bytes of a message."""
    return message.model_dump_json().encode()


def decode(payload: bytes) -> WorkerMessage:
    """Return the message in these bytes. Raises Unreadable if there is none."""
    return read_foreign(payload, _ADAPTER, limit_bytes=MAX_MESSAGE, limit_chars=MAX_TEXT)
