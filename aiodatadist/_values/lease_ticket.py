"""The ticket by which a peer pulls blocks that are kept for it, as JSON carries it through a router."""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, WrapValidator
from pydantic_core import PydanticCustomError

from aiodatadist._values import checks
from aiodatadist._values.descriptors import CacheKeyByIdAndIndex
from aiodatadist._values.foreign import Unreadable, read_foreign, shown
from aiodatadist._values.signatures import readable
from aiodatadist.errors import ParamInvalid

MAX_TICKET_BLOCKS = 1 << 16
"""The largest number of blocks in one lease: a million tokens in blocks of 16.

Reading such a ticket and starting its pull hold the event loop for 4 ms, of which the digest takes 1.5. A ticket
sixteen times as large would hold it for 60.
"""
MAX_TICKET = 32 * MAX_TICKET_BLOCKS
"""The largest ticket as JSON, in bytes: large block numbers, and everything around them."""
MAX_TEXT = 256
"""The longest text in a ticket, in characters."""
MAX_TAKERS = 4096
"""Peers that share kept blocks."""

NAME = r"^[0-9a-f]{32}$"
LeaseName = Annotated[str, Field(pattern=NAME)]
Block = Annotated[int, Field(ge=0, lt=2**63)]


def _numbers(value: Any, _: object) -> tuple[int, ...]:
    """Check block numbers as JSON has them, in a few calls of C. ``True``, ``1.0`` and ``"1"`` are refused.

    Only the first wrong number is reported, because reporting all takes seconds.
    """
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


def check_takers(takers: object) -> None:
    """Raise TypeError, ValueError or ParamInvalid if this is no number of peers that can share kept blocks."""
    if not 1 <= checks.integer(takers, "takers", checks.UINT32) <= MAX_TAKERS:
        raise ParamInvalid(f"takers is {takers}: must be from 1 to {MAX_TAKERS}")


def new_lease_name() -> str:
    """Return a name that no other lease has. It cannot be guessed, because a peer that knows it may end the lease."""
    return secrets.token_hex(16)


def check_lease_name(name: str | None) -> str | None:
    """Return the name. Raises TypeError or ParamInvalid if it is not the name of a lease, or None."""
    if name is not None and not re.fullmatch(NAME, checks.instance(name, "name", str)):
        raise ParamInvalid(f"name is {name[:64]!r}: must be 32 hexadecimal digits, in small letters")
    return name


@readable
class LeaseTicket(BaseModel):
    """The blocks of one cache that their owner keeps for a peer.

    A ticket is JSON-safe: ``model_dump(mode="json")`` returns a dictionary of integers, strings, lists and one float.
    Calls that take a ticket accept that dictionary, too.

    Attributes:
        cluster_id: the owner.
        lease: the name of the lease at the owner.
        cache_id: the id of the owner's cache.
        blocks: block numbers, in the order in which they are pulled.
        seconds: the time that was left when the ticket was written. Clocks of two processes are not comparable, so this
            only tells a router how long it may take; the owner alone decides.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    cluster_id: Annotated[int, Field(ge=0, lt=2**64)]
    lease: LeaseName
    cache_id: Annotated[int, Field(ge=1, lt=2**63)]
    blocks: Blocks
    seconds: Annotated[FiniteFloat, Field(ge=0)]

    @classmethod
    def of(cls, value: LeaseTicket | Mapping[str, Any]) -> Self:
        """Return the ticket. Raises TypeError or ParamInvalid if the value is not one."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"ticket is a {type(value).__name__}: must be a LeaseTicket, or what model_dump() returned")
        try:
            return read_foreign(dict(value), cls, limit_bytes=MAX_TICKET, limit_chars=MAX_TEXT)
        except Unreadable as error:
            raise ParamInvalid(f"ticket: {error}") from None

    @property
    def key(self) -> CacheKeyByIdAndIndex:
        """The key of the owner's cache."""
        return CacheKeyByIdAndIndex(self.cluster_id, self.cache_id, 0)
