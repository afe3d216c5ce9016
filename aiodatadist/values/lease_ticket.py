"""What a peer needs to pull blocks that are kept for it, as JSON carries it through a router."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, FiniteFloat, ValidationError

from aiodatadist.errors import ParamInvalid
from aiodatadist.values import checks
from aiodatadist.values.descriptors import CacheKeyByIdAndIndex

MAX_TICKET_BLOCKS = 1 << 20

NAME = r"^[0-9a-f]{32}$"
LeaseName = Annotated[str, Field(pattern=NAME)]
Block = Annotated[int, Field(ge=0, lt=2**63)]
Blocks = Annotated[tuple[Block, ...], Field(min_length=1, max_length=MAX_TICKET_BLOCKS), FailFast()]
"""The first one that is wrong is told: telling of a million takes ten seconds."""


def new_lease_name() -> str:
    """One that no other lease has, and that cannot be guessed: a peer that knows it may end the lease."""
    return secrets.token_hex(16)


def check_lease_name(name: str | None) -> str | None:
    """Raises TypeError, ParamInvalid: it is no name of a lease."""
    if name is not None and not re.fullmatch(NAME, checks.instance(name, "name", str)):
        raise ParamInvalid(f"name is {name[:64]!r}: it has to be 32 hexadecimal digits, in small letters")
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

    model_config = ConfigDict(frozen=True, extra="forbid")

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
            raise TypeError(
                f"ticket is a {type(value).__name__}: it has to be a LeaseTicket, or what model_dump() gave"
            )
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise ParamInvalid(f"ticket: {where}: {first['msg']}") from None

    @property
    def key(self) -> CacheKeyByIdAndIndex:
        """What the owner's cache is called."""
        return CacheKeyByIdAndIndex(self.cluster_id, self.cache_id, 0)
