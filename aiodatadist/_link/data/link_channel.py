"""A channel that is open: what it reaches at either end, and how many transfers use it."""

from __future__ import annotations

from collections.abc import Callable

from aiodatadist._transport import Channel


class LinkChannel:
    """An open channel, with what it reaches at either end and the transfers of this end that use it.

    Attributes:
        mine, theirs: the epochs that the channel reaches, at this end and at the peer.
        uses: the number of this end's transfers on it.
        is_current: True if new transfers use it, or will once both ends have opened it.
        is_broken: True if a transfer of either end was stopped half-way on it.
        unclean: callbacks of the transfers that were stopped half-way on it. They are called with True when the channel is
            closed, and with False if it is not known what may still be carried out on it.
    """

    __slots__ = (
        "channel",
        "is_broken",
        "is_closing",
        "is_current",
        "mine",
        "name",
        "retired",
        "theirs",
        "unclean",
        "uses",
    )

    def __init__(self, name: str, channel: Channel, mine: int, theirs: int) -> None:
        self.name: str = name
        self.channel: Channel = channel
        self.mine: int = mine
        self.theirs: int = theirs
        self.uses: int = 0
        self.is_current: bool = True
        self.is_broken: bool = False
        self.is_closing: bool = False
        self.retired: dict[str, bool] = {"mine": False, "theirs": False}
        self.unclean: list[Callable[[bool], object]] = []

    def closed(self, is_closed: bool) -> None:
        """Report the end to waiting transfers; ``is_closed`` is False if the close could not be confirmed."""
        unclean, self.unclean = self.unclean, []
        for call in unclean:
            call(is_closed)

    def reaches(self, mine: int, theirs: int) -> bool:
        """Return True if the channel reaches these epochs at both ends."""
        return self.mine >= mine and self.theirs >= theirs
