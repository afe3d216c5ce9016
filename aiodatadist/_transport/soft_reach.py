"""The reach of softnpu, checked first: beyond it, the two ends of a link would wait for each other in vain.

softnpu moves bytes between processes of one user on one machine. They find each other by names of sockets, which each network
namespace, and so each container, has for itself, unless ``SOFTNPU_RENDEZVOUS`` names a folder for them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from aiodatadist._values.foreign import printable
from aiodatadist._wire.ways import Place
from aiodatadist.errors import IncompatiblePeer

FOLDER: Final = "SOFTNPU_RENDEZVOUS"
PROC: Final = Path("/proc")


def meeting_place() -> str:
    """Return where other processes of softnpu can find this one, on this machine; empty if that cannot be known.

    Two processes with one such place find each other: they are in the same namespaces of users, process ids and networks, or
    have one folder instead of the network.
    """
    names, folder = PROC / "self" / "ns", os.environ.get(FOLDER)
    try:
        found = [str((names / name).readlink()) for name in ("user", "pid")]
        if folder:
            entry = Path(folder).stat()
            found.append(f"folder:[{entry.st_dev}:{entry.st_ino}]")
        else:
            found.append(str((names / "net").readlink()))
    except OSError:
        return ""
    return " ".join(found)


def check_reach(mine: Place, peer: Place) -> None:
    """Raise IncompatiblePeer if softnpu cannot move bytes between the two.

    The peer gets the message, so its words are true at both ends, and it has the cure.
    """
    if peer.host != mine.host:
        raise IncompatiblePeer(
            "softnpu moves bytes only between processes of one user on one machine: "
            f"one end is {_words(mine)}, and the other is {_words(peer)}",
            hint="run both ends there, or use transport='tcp' at both ends, or NPUs",
        )
    if (apart := networks_of(mine, peer)) and not os.environ.get(FOLDER):
        raise IncompatiblePeer(
            f"softnpu finds no process in another network namespace, and {apart}: {FOLDER} must name one folder at both ends"
        )


def doubts(mine: Place, peer: Place) -> str:
    """Return a question to add to a link's timeout if softnpu may not have found the peer; otherwise nothing."""
    if any((end.transport, end.runtime) != ("hccl", "soft") for end in (mine, peer)):
        return ""
    apart = networks_of(mine, peer)
    return f" ({apart}: is {FOLDER} one folder at both ends?)" if apart else ""


def networks_of(mine: Place, peer: Place) -> str:
    """Return both ends' network namespaces, in words, if the kernel says that there are two; otherwise nothing."""
    ours, theirs = _network(mine), _network(peer)
    if not ours or not theirs or ours == theirs:
        return ""
    return f"process {mine.process} is in {ours}, process {peer.process} in {theirs}"


def _network(place: Place) -> str:
    """Return the network namespace of a process on this machine; empty if that cannot be known."""
    found, ours = PROC / str(place.process) / "ns", PROC / "self" / "ns"
    try:
        # A peer in a container says its number there, which here may be that of a process in any other container.
        if (found / "pid").readlink() != (ours / "pid").readlink():
            return ""
        return str((found / "net").readlink())
    except OSError:  # it has ended, or is another user's
        return ""


def _words(place: Place) -> str:
    boot, _, user = place.host.rpartition(":")
    return f"process {place.process} of user {printable(user)} on the machine with boot id {printable(boot)}"
