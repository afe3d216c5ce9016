"""The way of a link's bytes: one decision, from what both ends said in their hellos. Functions without I/O.

Nothing is negotiated: both ends compute it, and come to the same. An end with ``transport="auto"`` says ``hccl``, and how
many data connections it can use, so an older end takes it for one with ``transport="hccl"``.

============  =============  =====================================================================================
one end       the other      the way
============  =============  =====================================================================================
hccl          hccl or auto   hccl
tcp           tcp            tcp
tcp           auto           tcp, if both ends proved a key or a certificate
loopback      loopback       loopback
auto          auto           hccl, where it reaches the other end; or else tcp, if both ends proved a key or a
                             certificate; or else hccl, which says why it cannot
others                       none
============  =============  =====================================================================================

HCCL reaches another end of the same runtime. softnpu's reaches another device of the same user, on the same machine, that it
finds in the same ``meeting``. An end that lies can only turn its own link from one of the two into the other, and only if
this end allows both.
"""

from __future__ import annotations

from typing import Final, Protocol

AUTO: Final = "auto"
HCCL: Final = "hccl"
TCP: Final = "tcp"


class Place(Protocol):
    """The properties of an endpoint that say where its process is, and how bytes can leave it."""

    @property
    def transport(self) -> str: ...
    @property
    def runtime(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def device_id(self) -> str: ...
    @property
    def process(self) -> int: ...
    @property
    def streams(self) -> int: ...
    @property
    def meeting(self) -> str: ...


def option_of(end: Place) -> str:
    """Return the option ``transport`` of an end."""
    return AUTO if end.transport == HCCL and end.streams else end.transport


def ways_of(end: Place, is_proved: bool = True) -> tuple[str, ...]:
    """Return the ways that an end allows, the preferred one first.

    Args:
        is_proved: True if both ends have proved a key or a certificate. Without that, bytes over TCP would be open to every
            user of the machine, so ``"auto"`` does not choose it.
    """
    option = option_of(end)
    if option != AUTO:
        return (option,)
    return (HCCL, TCP) if is_proved else (HCCL,)


def way_between(mine: Place, peer: Place, is_proved: bool) -> str:
    """Return the way of the bytes between two ends, the same for both of them; empty if they have none in common."""
    theirs = ways_of(peer, is_proved)
    both = [way for way in ways_of(mine, is_proved) if way in theirs]
    if TCP in both and not connections_between(TCP, mine, peer):
        both.remove(TCP)
    if len(both) > 1 and not _reaches(mine, peer):
        return TCP
    return both[0] if both else ""


def connections_between(way: str, mine: Place, peer: Place) -> int:
    """Return the number of data connections of a link whose bytes take this way: the smaller of both ends' numbers."""
    return 0 if way == HCCL else min(mine.streams, peer.streams)


def _reaches(mine: Place, peer: Place) -> bool:
    """Return True if HCCL can move bytes between two ends. On NPUs it says by itself, and with the cure, why it cannot."""
    if mine.runtime != peer.runtime or mine.runtime != "soft":
        return mine.runtime == peer.runtime
    is_one_place = bool(mine.meeting) and (mine.host, mine.meeting) == (peer.host, peer.meeting)
    return is_one_place and (mine.process, mine.device_id) != (peer.process, peer.device_id)
