"""Messages about blocks that a worker keeps for requests which wait at another engine: JSON, in their link's notifications.

::

    decode                                 prefill
      Hold(leases)      ------->                              (its requests wait for room: keep the blocks)
      Hold(leases)      ------->                              (again and again, as long as they wait)
      LetGo(leases)     ------->                              (these requests have the blocks, or do not want them)

Who names a lease must name its blocks and its prompt, too, by the digests that a claim has.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict

from aiodatadist._values.lease_ticket import MAX_TAKERS, LeaseName

MAX_HELD = 128
"""Most leases in one message: 32 KiB."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Held(BaseModel):
    """A request of the sender's, and the lease whose blocks it wants.

    Attributes:
        blocks, prompt: digests of the lease, as in a claim of it.
        holder: the sender's number for the request.
        share: the number of workers of the sender's engine that name the same request here.
        has_taken: if it has let go, True if it has the blocks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    lease: LeaseName
    blocks: Digest
    prompt: Digest
    holder: Annotated[int, Field(ge=0, lt=2**63)]
    share: Annotated[int, Field(ge=1, le=MAX_TAKERS)] = 1
    has_taken: bool = False


HeldLeases = Annotated[tuple[Held, ...], Strict(False), Field(min_length=1, max_length=MAX_HELD), FailFast()]


class Hold(BaseModel):
    """Requests of the sender's that wait for the blocks of these leases."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["hold"] = "hold"
    held: HeldLeases


class LetGo(BaseModel):
    """Requests of the sender's that have the blocks of these leases, or do not want them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["let_go"] = "let_go"
    held: HeldLeases
