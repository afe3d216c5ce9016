"""What one proved peer may have under way, or have kept for it: one table, with the reason for each number.

Each limit is a peer's own. A peer that is at a limit is refused, or waits for its own earlier requests; others are
unaffected. Refusals are counted under the limit's name, in ``Figures.budget_refusals``.

A peer is an engine with all of its clients, and one of them can ask for what never comes to be. So of what waits for the
other end's request, the oldest gives way: an honest request only has to outlast its own lateness.
"""

from __future__ import annotations

from enum import StrEnum


class Budget(StrEnum):
    """The limits that refuse, by the names under which refusals are counted."""

    EARLY_CLAIMS = "early_claims"
    WANTS = "wants"
    WANT_BLOCKS = "want_blocks"
    REQUEST_BLOCKS = "request_blocks"


EARLY_CLAIMS = 256
"""Claims of leases that are not known yet: as many as a decode engine begins requests in one step. Each keeps a timer. The
oldest gives way to a further one."""
EARLY_CLAIM_SECONDS = 60.0
"""Seconds for which such a claim is kept at most, whatever patience the peer asks for. A prefill engine finishes a request
within that, or its peer claims once more."""
RELEASED_NAMES = 256
"""Leases that a peer released before they came to be, and that are refused when they do: as many as it may claim early."""
RELEASED_BY_GONE = 4096
"""The same of all peers together whose links have ended: of sixteen such peers."""
WANTS = 1024
"""Pushes that a peer may ask for while their requests are not known here, and others that it has begun to ask for: four
times the requests of a step. The oldest gives way to a further one. Those whose requests are known are as many as these."""
WANT_BLOCKS = 1 << 20
"""Numbers of blocks in all of its pushes, 8 MiB: 1024 for each."""
ANSWERS = 4096
"""What a peer is told of its pushes and has not taken yet; further answers it does not get."""
PUSH_BYTES = 24 << 20
"""Memory of all that, of a peer that takes each limit, beside what this engine's own requests take. With notes
that were not taken it is below 32 MiB."""
DROPPED_NAMES = 1024
"""Pushes that a peer dropped before this engine named them, and that wait less for a peer then: as many as it may want."""
DROPPED_BY_GONE = 4096
"""The same of all peers together whose links have ended: of four such peers."""
REQUEST_BLOCKS = 1 << 23
"""Numbers of blocks in requests that wait here (request/response mode), 64 MiB: 256 pulls, which an engine of this version
sends at a time, of 16384 blocks each. What is planned for them takes four times as much beside it."""
CHECKSUM_CACHES = 4
"""Bytes that are being summed up for a peer, in sizes of the caches that it was told of: two pulls of all blocks that are
compared while two more arrive. Further questions wait for these; older peers do not count what they ask for."""
LOOK_UPS = 8
"""Look-ups of host names at a time for a peer that this end's user named, or for an entry of ``peers`` that has a ``*``."""
WAITING_LOOK_UPS = 256
"""Names that wait for these, at most: as many as a decode engine begins requests in one step."""
ALL_LOOK_UPS = 64
"""Look-ups for all of these, and as many for names that are listed as they are."""
SHARE_LOOK_UP_THREADS = 16
"""Threads of a share's look-ups, those included for which no task waits any longer: a question to the name service cannot be
taken back. As many earlier names as there are current ones."""
LOOK_UP_THREADS = 128
"""Threads of all look-ups, likewise. Each lasts for as long as the name service gives no answer, half a minute usually."""
KNOWN_NAMES = 64
"""Names that were answered last. They are looked up again beyond the other limits: one thread for a name at most."""
