"""The limits on what one proved peer may have under way, or kept for it: one table, with the reason for each number.

Each peer has its own limits. A peer that reaches a limit is refused, or waits for its own earlier requests; others are
unaffected. Refusals are counted under the limit's name, in ``Figures.budget_refusals``.

A peer is an engine with all of its clients, and one client can ask for data that never comes to exist. So among entries
that wait for the other end's request, the oldest gives way: an honest request only needs to outlast its own lateness.
"""

from __future__ import annotations

from enum import StrEnum


class Budget(StrEnum):
    """The limits that refuse, with the names under which refusals are counted."""

    EARLY_CLAIMS = "early_claims"
    WANTS = "wants"
    WANT_BLOCKS = "want_blocks"
    REQUEST_BLOCKS = "request_blocks"


EARLY_CLAIMS = 256
"""Claims of leases that are not known yet: the number of requests that a decode engine begins in one step.

Each keeps a timer. The oldest gives way to a further one.
"""
EARLY_CLAIM_SECONDS = 60.0
"""Seconds for which such a claim is kept at most, whatever patience the peer asks for.

A prefill engine finishes a request within that time, or its peer claims again.
"""
RELEASED_NAMES = 256
"""Leases that a peer released before they existed, and that are refused when they do: the same number as early claims."""
RELEASED_BY_GONE = 4096
"""Such leases of all peers together whose links have ended: those of sixteen peers."""
WANTS = 1024
"""Pushes that a peer may ask for while their requests are not known here, and others that it has begun to ask for.

This is four times the requests of a step. The oldest gives way to a further one. Another 1024 may be wanted whose
requests are known.
"""
WANT_BLOCKS = 1 << 20
"""Block numbers in all of a peer's pushes, 8 MiB: 1024 for each push."""
ANSWERS = 4096
"""Answers about its pushes that a peer has not accepted yet; it gets no further ones."""
PUSH_BYTES = 24 << 20
"""Memory for all of that, for a peer that reaches each limit, without what this engine's own requests take.

Together with notes that were not taken it is below 32 MiB.
"""
DROPPED_NAMES = 1024
"""Pushes that a peer dropped before this engine named them: the number that it may want.

Once named, they wait less for a peer.
"""
DROPPED_BY_GONE = 4096
"""Such pushes of all peers together whose links have ended: those of four peers."""
REQUEST_BLOCKS = 1 << 23
"""Block numbers in requests that wait here (request/response mode), 64 MiB.

This allows 256 pulls, which an engine of this version sends at a time, of 16384 blocks each. Their plans take another
four times as much.
"""
REQUEST_TASKS = 32
"""Requests of one priority that wait here and have a task: enough to keep a stream and the checksums busy.

A task is some seventy objects to the garbage collector. A request in line behind it is one.
"""
HELD_CACHES = 16384
"""Caches that a peer may announce: each is two objects, which every garbage collection visits.

An engine has a few, and a caller that makes one for each request has as many as its requests.
"""
HELD_TENSORS = 1 << 21
"""Tensors in all of these, 16 MiB of addresses: 512 caches of the largest kind."""
WATCHED_CACHES = HELD_CACHES
"""The most caches whose layers a peer may watch. Each takes one object, and two once layers have landed."""
OPENING_CHANNELS = 8
"""Channels that a peer may make this end open at a time. Each has a thread, and waits for the peer for up to 20 s.

One is usual. An NPU that waits for a peer cannot be told to stop, so a peer that failed to open its half needs a few more.
"""
CHECKSUM_CACHES = 4
"""Bytes that are being summed up for a peer, in sizes of the caches that it knows.

This allows two pulls of all blocks to be compared while two more arrive. Further questions wait for these; older peers
do not limit what they ask for.
"""
LOOK_UPS = 8
"""Concurrent look-ups of host names for a peer that this end's user named, or for an entry of ``peers`` that has a ``*``."""
WAITING_LOOK_UPS = 256
"""Names that wait for these, at most: the number of requests that a decode engine begins in one step."""
ALL_LOOK_UPS = 64
"""Concurrent look-ups for all of these together. Names that are listed literally may have the same number again."""
SHARE_LOOK_UP_THREADS = 16
"""Threads of a share's look-ups, including those for which no task waits any longer.

A question to the name service cannot be taken back. So there is room for the same number of earlier names as of current
ones.
"""
LOOK_UP_THREADS = 128
"""The most threads of all look-ups together, including those for which no task waits.

Each lasts for as long as the name service gives no answer, usually half a minute.
"""
KNOWN_NAMES = 64
"""Names that were answered last. They are looked up again beyond the other limits, with at most one thread per name."""
