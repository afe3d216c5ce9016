"""The limits on what strangers and one proved peer may have under way, or kept for them, with the reason for each number.

Each peer has its own limits. A peer that reaches a limit is refused, or waits for its own earlier requests; others are
unaffected. Refusals are counted under the limit's name in ``Figures.budget_refusals``, waits in ``Figures.budget_waits``.

The limits that users set are fields of :class:`~aiodatadist.Quotas`, whose defaults stand here. :class:`Budget` has their
names. The others follow from them, or from what a machine is.

A peer is an engine with all of its clients, and one client can ask for data that never comes to exist. So among entries
that wait for the other end's request, the oldest gives way: an honest request only needs to outlast its own lateness.
"""

from __future__ import annotations

from enum import StrEnum


class Budget(StrEnum):
    """The names of the limits, as refusals and waits are counted, and as ``Quotas`` and the metrics have them."""

    UNPROVED = "unproved"
    UNPROVED_OF_ONE = "unproved_of_one"
    UNPROVED_PER_SECOND = "unproved_per_second"
    FRAMES = "frames"
    FRAME_BYTES = "frame_bytes"
    REVOCATIONS = "revocations"
    NOTES = "notes"
    NOTE_BYTES = "note_bytes"
    CACHES = "caches"
    TENSORS = "tensors"
    LOOK_UPS = "look_ups"
    EARLY_CLAIMS = "early_claims"
    RELEASED_NAMES = "released_names"
    WANTS = "wants"
    WANT_BLOCKS = "want_blocks"
    REQUESTS = "requests"
    CRITICAL_REQUESTS = "critical_requests"
    CRITICAL_SHARE = "critical_share"
    REQUEST_BLOCKS = "request_blocks"
    CHECKSUM_CACHES = "checksum_caches"
    CHANNELS = "channels"


REFUSALS = (
    Budget.UNPROVED,
    Budget.UNPROVED_OF_ONE,
    Budget.EARLY_CLAIMS,
    Budget.WANTS,
    Budget.WANT_BLOCKS,
    Budget.REQUEST_BLOCKS,
)
"""Limits beyond which a request is refused, or it or a connection gives way. Each time is counted."""
WAITS = (
    Budget.UNPROVED_PER_SECOND,
    Budget.FRAMES,
    Budget.FRAME_BYTES,
    Budget.REVOCATIONS,
    Budget.NOTES,
    Budget.NOTE_BYTES,
    Budget.REQUESTS,
    Budget.CRITICAL_REQUESTS,
    Budget.CRITICAL_SHARE,
)
"""Limits beyond which a peer or its request waits, or a critical request is served as a normal one. Each time is counted."""

UNPROVED = 1024
"""Connections without a proof, of all addresses; fewer if the process may not open four times as many files.

Each costs 16 KiB and 5 s at most. If there is no room, the oldest one of the address with the most of them gives way.
"""
UNPROVED_OF_ONE = 64
"""Such connections of one address, or of one /64 network with IPv6: enough for a machine on which all engines restart."""
UNPROVED_PER_SECOND = 20
"""Connections of one address that may prove nothing, for each second; ``UNPROVED_OF_ONE`` may come together.

A connection that is proved does not count.
"""
FRAMES = 20_000
"""Messages of a peer in a second: what an event loop reads in half a second. An engine that is busy sends a tenth."""
FRAME_BYTES = 64 << 20
"""Bytes of a peer's messages in a second: 200 messages of the largest kind, or half a second of an event loop."""
REVOCATIONS = 1024
"""Caches that a peer may take back in a second. Each may stop transfers."""
NOTES = 64
"""Notifications of a peer, over all its links, that this end's user has not taken: as many as one link carries."""
NOTE_BYTES = 4 << 20
"""Bytes of these: 64 notifications of the largest kind."""
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
"""The memory that a peer takes if it reaches each of these limits, apart from what this engine's own requests take.

Together with notes that were not taken, it is below 32 MiB.
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
REQUESTS = 256
"""Requests of a peer that are served at a time: what an engine of this version sends at a time."""
CRITICAL_REQUESTS = 4
"""Critical requests among these: they go before the work of all others, so a peer may not fill the device with them."""
CRITICAL_SHARE = 0.25
"""The share of the time in which critical requests of one peer run: three peers may do so and leave time for others."""
HELD_CACHES = 4096
"""Caches that a peer may announce: each is two objects, which every garbage collection visits.

An engine has a few, and a caller that makes one for each request has as many as its requests.
"""
HELD_TENSORS = 1 << 18
"""Tensors in all of these, 2 MiB of addresses: 64 caches of the largest kind, or 64 tensors in each."""
WATCHED_CACHES = 16384
"""The most caches whose layers a peer may watch. Each takes one object, and two once layers have landed."""
OPENING_CHANNELS = 2
"""Channels that a peer may make this end open at a time. Each has a thread, and waits for the peer for up to 20 s.

One is usual. An NPU that waits for a peer cannot be told to stop, so a peer that failed to open its half needs another.
"""
MAX_STREAMS = 32
"""Data connections of one link. Each has a file, and buffers of the kernel: enough for networks that lose packets."""
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
THREADS_OF_LOOK_UP = 2
"""Threads of a share for each of its look-ups, including those for which no task waits any longer.

A question to the name service cannot be taken back. So there is room for the same number of earlier names as of current
ones.
"""
LOOK_UP_THREADS = 128
"""The most threads of all look-ups together, including those for which no task waits.

Each lasts for as long as the name service gives no answer, usually half a minute.
"""
KNOWN_NAMES = 64
"""Names that were answered last. They are looked up again beyond the other limits, with at most one thread per name."""
