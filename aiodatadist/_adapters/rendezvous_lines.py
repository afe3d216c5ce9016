"""Messages of a rendezvous: lines of JSON, sealed with the group's key. No I/O.

A question and its answer::

    greet           ->
                    <-   greeted | refused     (the server's id)
    register, ask   ->
                    <-   ranks | refused

With a key a line is ``SEAL JSON``. The seal is an HMAC-SHA256 over the JSON, and in an answer over its question, too. A
line is parsed only if its seal fits, so a process without the key reaches no parser. A question may have the seal of any
key of the group's; its answer has one of the same key. Without a key a line is the JSON alone.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, model_validator

from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.regions import Layout
from aiodatadist._values.foreign import SHOWN, read_foreign

MAX_QUESTION = 16 << 10
"""Most bytes of a line that the server reads."""
MAX_ANSWER = 512 << 10
"""Most bytes of a line that the server writes: addresses of ``MAX_RANKS``, and one layout."""
MAX_RANKS = 1024
"""The most ranks of one engine. An answer lists all of them, in one line."""
MAX_TEXT = 253
"""Most characters of a text: a host's name may have that many."""
FRESH_SECONDS = 60.0
"""Most seconds between the clocks of the two ends."""

Random = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""A text that was drawn at random."""

_SEAL = 2 * sha256().digest_size
T = TypeVar("T")


class Registered(BaseModel):
    """A rank of a prefill engine, of ``ranks``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rank: int = Field(ge=0, lt=MAX_RANKS)
    ranks: int = Field(ge=1, le=MAX_RANKS)
    address: PeerAddress
    layout: Layout

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if self.rank >= self.ranks:
            raise ValueError(f"rank is {self.rank}: must be below ranks, {self.ranks}")
        return self


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Register(_Line):
    """A registration.

    Attributes:
        at: the time when it was sent, in seconds since 1970.
        server: the id of the server that it is for: a stranger who repeats it elsewhere, or later, is refused.
    """

    type: Literal["register"] = "register"
    at: float
    server: Random
    worker: Registered


class Greet(_Line):
    """A question for the server's id. ``nonce`` ties an answer to one question."""

    type: Literal["greet"] = "greet"
    at: float
    nonce: Random


class Ask(_Line):
    """A question for the ranks. ``nonce`` as in :class:`Greet`."""

    type: Literal["ask"] = "ask"
    at: float
    nonce: Random


class Greeted(_Line):
    """The id of the server, which it drew when it was made."""

    type: Literal["greeted"] = "greeted"
    server: Random


class Ranks(_Line):
    """The addresses of all ranks of the engine, in order, and their layout; none if some have not registered."""

    type: Literal["ranks"] = "ranks"
    layout: Layout = Field(default_factory=dict)
    addresses: Annotated[list[PeerAddress], Field(max_length=MAX_RANKS), FailFast()] = Field(default_factory=list)


class Refused(_Line):
    type: Literal["refused"] = "refused"
    reason: Annotated[str, Field(max_length=SHOWN, pattern=r"^[\x20-\x7e]*$")]


Question = Greet | Register | Ask
Answer = Greeted | Ranks | Refused
QUESTION: TypeAdapter[Question] = TypeAdapter(Annotated[Question, Field(discriminator="type")])
ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="type")])


class Unsealed(ValueError):
    """A line has no seal, or one of a key that this end does not have."""


def written(key: bytes | None, said: _Line, question: bytes | None = None) -> bytes:
    """Return the line for a message, without its end. ``question`` is the line that it answers."""
    content = said.model_dump_json().encode()
    return content if key is None else seal_of(key, content, question) + b" " + content


def read(key: bytes | None, line: bytes, kind: TypeAdapter[Any], limit: int, question: bytes | None = None) -> Any:
    """Return the message of a line.

    Raises:
        Unsealed: if its seal is not of this key; it was not parsed.
        Unreadable: if it is another line.
    """
    _, content = opened(() if key is None else (key,), line, question)
    return parsed(content, kind, limit)


def opened(keys: Sequence[bytes], line: bytes, question: bytes | None = None) -> tuple[bytes | None, bytes]:
    """Return the key that sealed a line, and the content, which is not parsed. Without keys both ends have none.

    Raises:
        Unsealed: if the seal is of none of the keys.
    """
    if not keys:
        if not line.startswith(b"{") and line[_SEAL : _SEAL + 1] == b" ":
            raise Unsealed("it has a seal: only the other end has a key")
        return None, line
    seal, _, content = line.partition(b" ")
    for key in keys if len(seal) == _SEAL else ():
        if hmac.compare_digest(seal, seal_of(key, content, question)):
            return key, content
    is_plain = line.startswith(b"{")
    raise Unsealed("it has no seal: only this end has a key" if is_plain else "its seal is of another key")


def parsed(content: bytes, kind: TypeAdapter[Any], limit: int) -> Any:
    """Return the message in a line that was opened.

    Raises:
        Unreadable: if there is none.
    """
    return read_foreign(content, kind, limit_bytes=limit, limit_chars=max(MAX_TEXT, SHOWN))


def seal_of(key: bytes, content: bytes, question: bytes | None) -> bytes:
    """Return the seal of a message."""
    mac = hmac.new(key, b"aiodatadist rendezvous 1 " + (b"question " if question is None else b"answer "), sha256)
    if question is not None:
        mac.update(sha256(question).digest())
    mac.update(content)
    return mac.hexdigest().encode()
