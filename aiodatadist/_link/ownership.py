"""Owners: which ends own a link, and what the ends tell each other about that.

Only some backends have links with owners. Such a link first belongs to the end that asked for it, and the other end may
come to own it, too. A link without an owner is ended.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

from aiodatadist._link.lifecycle import Event, Ownership
from aiodatadist._wire.messages import Own, Owned
from aiodatadist.errors import LinkClosed, LinkError, LinkTimeout

if TYPE_CHECKING:
    from aiodatadist._link.session import Session


class Owners:
    """The owners of one link.

    Args:
        disconnect: ends the link in good order, for a reason. Raises LinkError if the peer does not agree.
    """

    __slots__ = ("_own_heard", "_owned_heard", "disconnect", "session")

    def __init__(self, session: Session, disconnect: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self.session: Session = session
        self.disconnect: Callable[[str], Coroutine[Any, Any, None]] = disconnect
        self._own_heard = self._owned_heard = 0  # the number of the latest message of its kind

    async def own(self) -> None:
        """Make this end an owner of the link, too. If that is cancelled, or the link ends, this end owns nothing.

        Raises what ended the link.
        """
        try:
            await self._tell(True)
        # The caller does not learn that it owns the link, so it must not own it. The peer is told so.
        except BaseException:
            self.session.life.on(Event.DISOWN)
            if self.session.is_ready:
                self.session.spawn(self._tell_of_none)
            raise

    async def disown(self, seconds: float) -> bool:
        """Give up ownership. Return True if the link must be closed, because the peer does not own it either.

        Raises LinkTimeout if the peer does not confirm in time, or what ended the link, unless that was an orderly end.
        """
        with anyio.move_on_after(seconds) as limit:
            try:
                await self._tell(False)
            except LinkClosed:  # both ends unlink at the same moment
                return True
        if limit.cancelled_caught:
            peer = self.session.cluster_id
            raise LinkTimeout(f"cluster {peer} did not answer within {seconds:.3f} s", peer=peer)
        return not self.session.life.ownership.is_peers

    async def _tell_of_none(self) -> None:
        """Tell the peer that this end owns nothing. If the link ends first, the end tells it."""
        with suppress(LinkError):
            await self._tell(False)

    async def _tell(self, on: bool) -> None:
        session = self.session
        session.life.on(Event.OWN if on else Event.DISOWN)
        await session.while_it_lasts(lambda: session.questions.ask(lambda call: Own(call=call, on=on), Owned))

    def on_own(self, message: Own) -> None:
        """Note that the peer owns the link, or no longer does, and answer.

        A link that is being ended gets no new owner: the peer hears of the end instead of an answer. A message older than the
        last one that came is out of date.
        """
        life = self.session.life
        if message.call >= self._own_heard:
            self._own_heard = message.call
            life.on(Event.PEER_OWNS if message.on else Event.PEER_DISOWNS)
        if self.session.is_ready or not message.on:
            self.session.post(Owned(call=message.call, on=life.ownership.is_ours))

    def on_owned(self, message: Owned, is_awaited: bool) -> None:
        """Note what the peer answers about itself. If no caller awaits the answer, end a link that has no owner."""
        if message.call < self._owned_heard:
            return
        self._owned_heard = message.call
        life = self.session.life
        life.on(Event.PEER_OWNS if message.on else Event.PEER_DISOWNS)
        is_unowned = life.ownership is Ownership.NEITHER
        if not is_awaited and is_unowned and self.session.is_ready:  # its last owner did not wait for this
            self.session.spawn(self._end)

    async def _end(self) -> None:
        with suppress(LinkError):
            await self.disconnect("it belongs to neither end")
