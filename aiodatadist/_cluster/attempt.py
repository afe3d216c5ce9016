"""An attempt at a link that a caller here asked for: its progress, and its turn to ask the peer. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import anyio

from aiodatadist._cluster.dial import Steps
from aiodatadist._wire.messages import Hello
from aiodatadist.errors import LinkError

ANY = "any"
"""Stands for the instance of a peer that was asked before it said which instance it is."""


class Attempt:
    """A link that is being made because a caller here asked for it.

    Attributes:
        asks: the instance of the cluster that is being asked for the link; empty while none is, ``ANY`` while it is not
            known which.
        steps: told how far the attempt is, and what it waits for.
        patience: seconds in which the process that accepted the connection should prove that it is the peer. After
            that, further connections to the address look for the peer.
    """

    def __init__(self, cluster_id: int, deadline: float, steps: Steps | None, patience: float = math.inf) -> None:
        self.cluster_id = cluster_id
        self.scope = anyio.CancelScope(deadline=deadline)
        self.settled = anyio.Event()
        self.error: LinkError | None = None
        self.waits_for = ""
        self.asks = ""
        self.steps = steps or Steps(cluster_id)
        self.patience = patience

    def now_waits_for(self, what: str) -> None:
        """Note what has not happened yet, in words."""
        self.waits_for = what


class NotItsTurn(LinkError):
    """Another attempt is asking the same instance of the peer, or the peer itself is asking.

    ``settled`` is set when that attempt is settled; None if the peer asks.
    """

    def __init__(self, cluster_id: int, settled: anyio.Event | None) -> None:
        super().__init__(f"a link to cluster {cluster_id} is being made over another connection")
        self.settled = settled


class Met(LinkError):
    """The peer is known, and was asked for nothing. ``instance`` is the peer's."""

    def __init__(self, instance: str) -> None:
        super().__init__("the peer only asked which cluster listens here")
        self.instance = instance


class Turn(NamedTuple):
    """The moment from which an attempt may ask its peer for the link.

    ``take`` is called with the peer's hello, and raises LinkError if the peer must not be asked. ``may_ask_at_once``
    returns True if the attempt may ask before that hello comes.
    """

    take: Callable[[Hello], None]
    may_ask_at_once: Callable[[], bool]


def never() -> bool:
    return False
