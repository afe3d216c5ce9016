"""The option ``quotas``: how much one peer, or one stranger, may use."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from aiodatadist._config.option_rules import WholeOption
from aiodatadist._values import peer_budget
from aiodatadist._values.signatures import readable

_Count = Annotated[int, Field(ge=1, le=2**31)]


@readable
class Quotas(WholeOption):
    """The option ``quotas``: how much one peer, or one stranger, may use of this cluster.

    Limits that are not given have defaults that suit engines. A peer that reaches one waits or is refused, and
    others are unaffected. ``figures()`` and the metrics have the same names.

    Attributes:
        unproved: connections without a proof, of all addresses; at most a quarter of the files that the process may open.
        unproved_of_one: those of one address, or of one /64 network. Addresses of this machine share ``unproved``.
        unproved_per_second: connections of such an address, for each second, that may end without a proof.
        frames: messages of a peer in a second. Beyond that it is not read until the second has passed.
        frame_bytes: bytes of these messages, at least 1 MiB.
        revocations: caches that a peer may take back in a second. Beyond that it is not read until the second has passed.
        notes: notifications of a peer that were not taken, over all its links; at least 64. Further ones wait at the peer.
        note_bytes: bytes of these, at least 4 MiB.
        caches: caches of a peer that it has announced. A further one ends its link.
        tensors: tensors in all of these caches.
        look_ups: concurrent look-ups of host names that a peer, or an entry of ``peers``, causes. Further ones wait.
        early_claims: claims of leases that do not exist yet. A further one makes the oldest give way.
        released_names: leases that a peer released before they existed. A further one replaces the oldest.
        wants: pushes that a peer wants and whose requests are not known here (engine adapters). A further one makes the
            oldest give way.
        want_blocks: block numbers in all pushes that a peer wants. A push that finds no room is refused.
        requests: requests of a peer that are served at a time (request/response mode). Further ones wait in line.
        critical_requests: those of the priority ``CRITICAL`` among them. Further ones are served as normal ones.
        critical_share: the share of each second, in [0.01, 1], in which a peer's critical requests run. Further ones
            are served as normal ones.
        request_blocks: block numbers in the requests of a peer that wait. A further request is refused.
        checksum_caches: bytes of checksums that are computed for a peer at a time, in sizes of its caches. Further
            questions wait.
        channels: channels that are opened for a peer at a time. Further ones wait.

    Raises ParamInvalid if a value breaks its rule, or an unknown field is given.
    """

    unproved: Annotated[int, Field(ge=1, le=65_536)] = peer_budget.UNPROVED
    unproved_of_one: Annotated[int, Field(ge=1, le=65_536)] = peer_budget.UNPROVED_OF_ONE
    unproved_per_second: Annotated[int, Field(ge=1, le=65_536)] = peer_budget.UNPROVED_PER_SECOND
    frames: Annotated[int, Field(ge=100, le=2**31)] = peer_budget.FRAMES
    frame_bytes: Annotated[int, Field(ge=1 << 20, le=2**40)] = peer_budget.FRAME_BYTES
    revocations: _Count = peer_budget.REVOCATIONS
    notes: Annotated[int, Field(ge=64, le=2**31)] = peer_budget.NOTES
    note_bytes: Annotated[int, Field(ge=4 << 20, le=2**40)] = peer_budget.NOTE_BYTES
    caches: _Count = peer_budget.HELD_CACHES
    tensors: _Count = peer_budget.HELD_TENSORS
    look_ups: Annotated[int, Field(ge=1, le=peer_budget.ALL_LOOK_UPS)] = peer_budget.LOOK_UPS
    early_claims: _Count = peer_budget.EARLY_CLAIMS
    released_names: _Count = peer_budget.RELEASED_NAMES
    wants: _Count = peer_budget.WANTS
    want_blocks: _Count = peer_budget.WANT_BLOCKS
    requests: Annotated[int, Field(ge=1, le=4096)] = peer_budget.REQUESTS
    critical_requests: Annotated[int, Field(ge=1, le=4096)] = peer_budget.CRITICAL_REQUESTS
    critical_share: Annotated[float, Field(ge=0.01, le=1)] = peer_budget.CRITICAL_SHARE
    request_blocks: _Count = peer_budget.REQUEST_BLOCKS
    checksum_caches: Annotated[int, Field(ge=1, le=1024)] = peer_budget.CHECKSUM_CACHES
    channels: Annotated[int, Field(ge=1, le=64)] = peer_budget.OPENING_CHANNELS


DEFAULT_QUOTAS: Final = Quotas()
