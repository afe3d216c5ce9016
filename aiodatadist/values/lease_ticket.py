"""What a peer needs to pull blocks that are kept for it, as JSON carries it through a router."""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, WrapValidator
from pydantic_core import PydanticCustomError

from aiodatadist.errors import ParamInvalid
from aiodatadist.values import checks
from aiodatadist.values.descriptors import CacheKeyByIdAndIndex
from aiodatadist.values.foreign import Unreadable, read_foreign, shown

MAX_TICKET_BLOCKS = 1 << 16
"""Blocks of one lease: a million tokens in blocks of 16. Reading a ticket and starting its pull hold the event loop for 4 ms
then, 1.5 of them for the digest, and sixteen times as many would for 60."""
MAX_TICKET = 32 * MAX_TICKET_BLOCKS
"""Bytes of a ticket as JSON, with large block numbers and all that stands around them."""
MAX_TEXT = 256
"""Characters of a text in it."""

NAME = r"^[0-9a-f]{32}$"
LeaseName = Annotated[str, Field(pattern=NAME)]
Block = Annotated[int, Field(ge=0, lt=2**63)]


def _numbers(value: Any, _: object) -> tuple[int, ...]:
    """Block numbers as JSON has them, all checked in a few calls of C: ``True``, ``1.0`` and ``"1"`` are none.

    The first one that is wrong is told: telling of all takes seconds."""
    if not isinstance(value, (list, tuple)):
        raise PydanticCustomError("blocks", "must be a list of block numbers")
    if not 1 <= len(value) <= MAX_TICKET_BLOCKS:
        words = {"count": len(value), "limit": MAX_TICKET_BLOCKS}
        raise PydanticCustomError("blocks", "{count} block numbers: there must be 1 to {limit}", words)
    try:
        if set(map(type, value)) == {int}:
            array("Q", value), array("q", value)  # no negative one, and none of 2**63 or more
            return tuple(value)
    except OverflowError:
        pass
    at = next(i for i, each in enumerate(value) if type(each) is not int or not 0 <= each < 2**63)
    told: dict[str, Any] = {"at": at, "value": shown(value[at])}
    raise PydanticCustomError("blocks", "number {at} is {value}: a block number is an int from 0 to 2**63 - 1", told)


Blocks = Annotated[tuple[Block, ...], WrapValidator(_numbers)]


def new_lease_name() -> str:
    """One that no other lease has, and that cannot be guessed: a peer that knows it may end the lease."""
    return secrets.token_hex(16)


def check_lease_name(name: str | None) -> str | None:
    """Raises TypeError, ParamInvalid: it is no name of a lease."""
    if name is not None and not re.fullmatch(NAME, checks.instance(name, "name", str)):
        raise ParamInvalid(f"name is {name[:64]!r}: must be 32 hexadecimal digits, in small letters")
    return name


class LeaseTicket(BaseModel):
    """Blocks of one cache that their owner keeps for a peer. JSON-safe: ``model_dump(mode="json")`` is a dictionary of
    integers, strings, lists and one float, and calls that take a ticket take such a dictionary.

    Attributes:
        cluster_id: the owner.
        lease: its name there.
        cache_id: of the owner's cache.
        blocks: their numbers, in the order in which they are pulled.
        seconds: that were left when the ticket was written. Clocks of two processes are not comparable: it tells a router
            how long it may take, and the owner alone decides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    cluster_id: Annotated[int, Field(ge=0, lt=2**64)]
    lease: LeaseName
    cache_id: Annotated[int, Field(ge=1, lt=2**63)]
    blocks: Blocks
    seconds: Annotated[FiniteFloat, Field(ge=0)]

    @classmethod
    def of(cls, value: LeaseTicket | Mapping[str, Any]) -> Self:
        """Raises TypeError, ParamInvalid: it is no ticket."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"ticket is a {type(value).__name__}: must be a LeaseTicket, or what model_dump() gave")
        try:
            return read_foreign(dict(value), cls, limit_bytes=MAX_TICKET, limit_chars=MAX_TEXT)
        except Unreadable as error:
            raise ParamInvalid(f"ticket: {error}") from None

    @property
    def key(self) -> CacheKeyByIdAndIndex:
        """What the owner's cache is called."""
        return CacheKeyByIdAndIndex(self.cluster_id, self.cache_id, 0)
