"""The channels of a link: the one in use, the one that is being opened, and those that are being retired."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from aiodatadist._concurrency.loop_time import give_way
from aiodatadist._concurrency.signal import Signal
from aiodatadist._counting import Incident, Incidents
from aiodatadist._link.control.questions import PendingQuestions
from aiodatadist._link.data.data_connections import Losses
from aiodatadist._link.data.link_channel import LinkChannel
from aiodatadist._link.data.traits import Traits, traits_of
from aiodatadist._transport import EVERYTHING, Channel, ChannelOffer, Endpoint, OpenSockets, Reach, StillWritten
from aiodatadist._values import peer_budget
from aiodatadist._values.foreign import printable
from aiodatadist._wire.messages import Broken, Message, Outdated, Pong, Renew, Renewed, Retire
from aiodatadist._wire.reasons import reason_of
from aiodatadist.errors import LinkError, LinkTimeout, LLMException, NotLinked, ProtocolError

if TYPE_CHECKING:
    from aiodatadist._transport import Transport

logger = logging.getLogger(__name__)

MAX_OPEN_SECONDS = 60.0
"""The most seconds for opening a channel. The peer asks for a time, and this end cannot interrupt the call meanwhile."""
RENEWAL_TIMEOUT = 20.0
"""Seconds for opening a further channel."""
RENEWAL_MARGIN = 5.0
"""Extra seconds that the server waits: if the client's half cannot be interrupted, it ends only after the full timeout."""
MAX_FOLLOWING = 32
"""The most renewals of the peer's that are under way.

It is one unless some fail: undoing a failed renewal takes about a second, and others may begin meanwhile. A few are opened
at a time, see :data:`peer_budget.OPENING_CHANNELS`.
"""
MAX_OLD = 64
"""The most channels that were replaced and are not closed, because one end has transfers there, or says that it has.

Each keeps a file descriptor and mappings.
"""
EVERYTHING_EVER = 2**32 - 1
"""The epoch of a channel that reaches what is lent, whenever it was registered."""
FIRST_PAUSE, MOST_PAUSE = 0.05, 1.0
"""Seconds before another channel is opened for the peer after one that failed, doubled each time.

Otherwise a server that asks for what no channel reaches, or a client that gives up what it asked for, keeps this end busy.
A client that gives up meanwhile does not wait, and nothing is opened for it.
"""
MAX_OUTDATED = 65536
"""The most questions of the server's that wait for a further channel: one for each of its transfers that needs it."""


class _Renewal:
    """The opening of a further channel, and its outcome. ``epoch`` is the least that it will reach at this end."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.over = Signal()
        self.opened: LinkChannel | None = None
        self.error: str | None = None


class _Opening:
    """A further channel that is being opened or waits for its turn, with the peer's answer and what stops waiting for it."""

    def __init__(self) -> None:
        self.answer: Renewed | None = None
        self.scope: anyio.CancelScope | None = None

    @property
    def refusal(self) -> str:
        """The reason why the peer could not open its half; empty as long as it did not say so."""
        return self.answer.reason if self.answer is not None else ""


class Channels:
    """The channels of one link, and how one takes the place of another.

    Memory that is registered after a channel was opened is out of its reach, so a further channel takes its place::

        client                             server
                  <-  outdated             (if the server needs the channel; pong once all steps below have ended)
        renew     ->
        both open the channel; each sends renewed when its half is open, or with the reason why it could not be opened
        renewed  <->  renewed
        new transfers use the new channel; an end without transfers on the old one sends retire
        retire   <->  retire
        both close the old one

    Only the client begins, so two renewals never meet.

    If a channel has one queue, a transfer that was stopped half-way leaves requests in it. Then the channel goes out of use
    at once, and is closed before anything of that transfer is released::

        broken    ->                         from either end; the client begins to renew
        both let the transfers that run on it end; those that wait for it use the next one
        retire   <->  retire
        both close it

    Args:
        post: sends a message to the peer.
        questions: the link's questions to the peer.
        spawn: starts a task that ends with the link.
        name: returns the name for a new channel.

    Attributes:
        traits: the traits of the link's channels.
        begin_lending: called with the first channel if its peer reaches only what is lent. The session sets it.
        shows: returns what a channel that is opened now shows of this end. The session sets it.
        losses: the connections of channels that have ended.
        out_of_use: called when no transfer may start on a channel, not even one that waits for it. The transfers set it.
    """

    def __init__(
        self,
        transport: Transport,
        post: Callable[[Message], None],
        questions: PendingQuestions,
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        name: Callable[[], str],
        incidents: Incidents,
        opening: int = peer_budget.OPENING_CHANNELS,  # at a time, for the peer
    ) -> None:
        self._incidents = incidents
        self.out_of_use: Callable[[LinkChannel], object] = lambda _: None
        self._transport = transport
        self._post = post
        self._questions = questions
        self._spawn = spawn
        self._name = name
        self.shows: Callable[[], Reach] = lambda: EVERYTHING
        self.begin_lending: Callable[[Channel], object] = lambda _: None
        self.losses: Losses = Losses()
        self.traits: Traits = Traits()
        self._rank = 0
        self._ends: tuple[Endpoint, Endpoint] | None = None
        self._current: LinkChannel | None = None
        self._old: dict[str, LinkChannel] = {}
        self._closing: list[LinkChannel] = []
        self._changed = Signal()
        self._renewal: _Renewal | None = None
        self._openings: dict[str, _Opening] = {}  # by name of the channel
        self._turns = anyio.Semaphore(opening)  # of the peer's renewals
        self._outdated: deque[tuple[int, int, int]] = deque()  # as _renew_for_peer says
        self._heard: deque[str] = deque(maxlen=2 * MAX_FOLLOWING)
        self._pause, self._failure = 0.0, ""
        self._refused: LLMException | None = None

    # ---- the first one ----

    async def open(
        self,
        name: str,
        rank: int,
        ends: tuple[Endpoint, Endpoint],
        seconds: float,
        sockets: OpenSockets | None = None,
    ) -> None:
        """Open the first channel, together with the peer. The epoch that it reaches at the peer is not known yet.

        Args:
            sockets: opens its data connections, if it needs any. Channels that do are never replaced.

        Raises:
            LinkTimeout: if the peer did not come in time.
            LinkError: if the channel could not be made.
        """
        self._rank, self._ends = rank, ends
        epoch = self._transport.epoch
        channel = await self._transport.open_channel(
            ChannelOffer(name, rank, ends, self.shows(), sockets), min(seconds, MAX_OPEN_SECONDS)
        )
        channel.when_broken(self.losses.report)
        self._current = LinkChannel(name, channel, EVERYTHING_EVER if channel.needs_loans else epoch, 0)
        self.traits = traits_of(channel, ends[1 - rank])
        if channel.needs_loans:
            self.begin_lending(channel)

    @property
    def current(self) -> LinkChannel:
        """The channel that new transfers use. Raises NotLinked if there is none."""
        if self._current is None:
            raise NotLinked("the link has no channel")
        return self._current

    # ---- transfers ----

    def find(self, mine: int, theirs: int) -> LinkChannel | None:
        """Return the current channel, or None if it does not reach these epochs."""
        link_channel = self._current
        return link_channel if link_channel is not None and link_channel.reaches(mine, theirs) else None

    def release(self, link_channel: LinkChannel) -> None:
        """Note that a transfer on the channel has ended."""
        link_channel.uses -= 1
        self._retire(link_channel)

    def broken(self, link_channel: LinkChannel, over: Callable[[bool], object]) -> None:
        """Take a channel out of use on which a transfer of this end was stopped half-way.

        The transfer ends when the channel is closed: then ``over`` is called, as ``LinkChannel.unclean`` says.
        """
        link_channel.unclean.append(over)
        self._post(Broken(channel=link_channel.name))
        self._put_out_of_use(link_channel)
        self._retire(link_channel)

    def _put_out_of_use(self, link_channel: LinkChannel) -> None:
        """Start nothing more on a channel.

        Transfers may still wait for it even if another channel took its place before.
        """
        link_channel.is_broken = True
        self.out_of_use(link_channel)
        if link_channel is self._current:
            link_channel.is_current = False
            self._current = None
            self._old[link_channel.name] = link_channel

    async def open_next(self, link_channel: LinkChannel) -> None:
        """Open the channel that takes the place of one that is out of use. A server leaves that to the client."""
        try:
            if self._rank == 0:
                await self._renew(link_channel.mine, link_channel.theirs)
        except LinkError as error:  # a transfer that needs the channel tries again, and raises the error
            self._not_renewed("the next channel: %s", error)

    def _not_renewed(self, words: str, error: LinkError) -> None:
        self._incidents.add(Incident.CHANNEL_FAILED, logger, words, error, level=logging.INFO)

    async def wait_opened(self) -> None:
        """Wait until no channel is being opened.

        If this end left before, the other would wait for it in vain, in a call that cannot be interrupted.
        """
        while self._renewal is not None or self._openings:
            await self._changed.wait()

    # ---- further ones ----

    async def reach(self, mine: int, theirs: int) -> LinkChannel:
        """Return a channel that reaches these epochs. If there is none, open it.

        Raises:
            LinkError: if it could not be opened. The present channel stays in use.
        """
        while (link_channel := self.find(mine, theirs)) is None:
            if self._rank == 0:
                await self._renew(mine, theirs)
            else:
                await self._have_renewed(mine, theirs)
        return link_channel

    async def _have_renewed(self, mine: int, theirs: int) -> None:
        """Ask the client for a channel, as the server, and wait until the client has tried.

        Our half of an earlier attempt may still be in a call that cannot be interrupted, and meet the client's new half. Then
        ask once more, when both have ended.
        """
        is_last = not self._openings
        await self._ask_for_one(mine, theirs)
        if self.find(mine, theirs) is None and not is_last:
            await self._ask_for_one(mine, theirs)
        if self.find(mine, theirs) is None:
            raise LinkError(f"no further channel could be opened: {self._failure or 'the peer did not come'}")

    async def _ask_for_one(self, mine: int, theirs: int) -> None:
        self._failure = ""
        with anyio.move_on_after(RENEWAL_TIMEOUT + RENEWAL_MARGIN):
            await self._questions.ask(
                lambda call: Outdated(call=call, mine=mine, yours=theirs), Pong, is_repeated=False
            )

    async def _renew(self, mine: int, theirs: int) -> None:
        """Open a further channel, as the client.

        That happens in its own task, once for all callers, so that cancelling one of them does not stop it.
        """
        while self.find(mine, theirs) is None:
            renewal = self._renewal
            covers = renewal is not None and renewal.epoch >= mine
            is_ours = renewal is None
            if renewal is None:
                renewal = self._renewal = _Renewal(self._transport.epoch)
                covers = True
                self._spawn(partial(self._carry_out, renewal))
            await renewal.over.wait()
            if covers and renewal.error is not None:
                raise LinkError(renewal.error)
            # If the channel is not found though it reaches that far, it broke at once: then the loop opens another one.
            if is_ours and (renewal.opened is None or not renewal.opened.reaches(mine, theirs)):
                raise LinkError("a further channel was opened, but does not reach the memory that it is needed for")

    async def _carry_out(self, renewal: _Renewal) -> None:
        name = self._name()
        self._openings[name] = _Opening()
        try:
            self._post(Renew(channel=name, seconds=RENEWAL_TIMEOUT))
            renewal.opened = await self._open_further(name, RENEWAL_TIMEOUT)
        except LinkError as error:
            renewal.error = str(error.args[0])
        finally:
            self._renewal = None
            del self._openings[name]
            renewal.over.set()
            self._changed.wake()

    async def _open_further(self, name: str, seconds: float, pause: float = 0.0) -> LinkChannel:
        """Open our half after a pause, wait for the peer's, and use the channel once both are open."""
        if self._ends is None:
            raise NotLinked("the link has no channel yet")
        opening = self._openings[name]
        epoch = self._transport.epoch
        try:
            if self.traits.has_connections:  # it reaches all there is, and was chosen for the whole link
                raise LinkError("a channel with data connections is never replaced")
            if len(self._old) >= MAX_OLD:
                raise LinkError(f"{len(self._old)} channels that were replaced are still open: the limit is {MAX_OLD}")
            offer = ChannelOffer(name, self._rank, self._ends, self.shows())
            channel = await self._open_unless_refused(opening, offer, min(seconds, MAX_OPEN_SECONDS), pause)
            channel.when_broken(self.losses.report)
            self._post(Renewed(channel=name, epoch=epoch))
            # among the old ones until it is taken into use, so that it is closed if the link ends first
            link_channel = self._old[name] = LinkChannel(name, channel, epoch, 0)
            link_channel.theirs = await self._hear(opening, seconds)
            self._switch(self._old.pop(name))
        except LLMException as error:
            self._failure = str(error.args[0])
            if name in self._old:
                self._spawn(partial(self._close, self._old[name]))
            else:
                self._post(Renewed(channel=name, epoch=0, reason=reason_of(error)))
            raise LinkError(f"no further channel could be opened: {self._failure}") from error
        else:
            return link_channel

    async def _open_unless_refused(
        self, opening: _Opening, offer: ChannelOffer, seconds: float, pause: float
    ) -> Channel:
        """Open our half after a pause; stop waiting if the peer says that it cannot open its half."""
        with anyio.CancelScope() as opening.scope:
            if not opening.refusal:  # otherwise the peer said so while our half waited for its turn
                await anyio.sleep(pause)
                return await self._transport.open_channel(offer, seconds)
        raise LinkError(f"the peer could not open its half: {printable(opening.refusal)}")

    async def _hear(self, opening: _Opening, seconds: float) -> int:
        """Wait until the peer's half is open, and return the epoch that it reaches.

        Raises LinkTimeout if the peer could not open it, or did not say so in time.
        """
        with anyio.move_on_after(seconds):
            while opening.answer is None:
                await self._changed.wait()
        if opening.answer is None or opening.refusal:
            raise LinkTimeout(opening.refusal or "the peer did not say that its half is open")
        return opening.answer.epoch

    def _switch(self, link_channel: LinkChannel) -> None:
        old, self._current = self._current, link_channel
        if old is not None:
            old.is_current = False
            self._old[old.name] = old
            self._retire(old)
        if link_channel.is_broken:  # by the peer, which used it a moment earlier
            self._put_out_of_use(link_channel)
            self._retire(link_channel)
        self._changed.wake()

    def _retire(self, link_channel: LinkChannel) -> None:
        """Tell the peer once this end has no transfer left on an old channel, and close it once the peer has none either.

        Transfers that end only with the channel do not count.
        """
        if link_channel.is_current or link_channel.uses > len(link_channel.unclean):
            return
        if not link_channel.retired["mine"]:
            link_channel.retired["mine"] = True
            self._post(Retire(channel=link_channel.name))
        if link_channel.retired["theirs"] and link_channel.name in self._old and not link_channel.is_closing:
            link_channel.is_closing = True
            self._spawn(partial(self._close, link_channel))

    def close_broken(self) -> None:
        """Close broken channels without waiting for the peer's transfers on them, which are lost because the link ends."""
        for link_channel in list(self._old.values()):
            if link_channel.unclean and not link_channel.is_closing:
                link_channel.is_closing = True
                self._spawn(partial(self._close, link_channel))

    async def _close(self, link_channel: LinkChannel) -> None:
        """Close an old channel, and forget it. If the peer may still write through it, keep it until the link ends."""
        is_closed = True
        try:
            # shielded: the call cannot be interrupted anyway, and transfers wait for its end
            with anyio.CancelScope(shield=True):
                await link_channel.channel.aclose()
        except StillWritten as error:
            self._incidents.add(
                Incident.MEMORY_WITHHELD, logger, "an outdated channel stays open until its link ends: %s", error
            )
            return
        except LLMException as error:  # kept for aclose(): closing the channel again would not raise it
            self._incidents.add(Incident.CLOSE_FAILED, logger, "an outdated channel could not be closed: %s", error)
            self._refused = self._refused or error
            is_closed = False
        self._old.pop(link_channel.name, None)
        link_channel.closed(is_closed)

    # ---- what the peer says ----

    def on_first(self, theirs: int) -> None:
        """Note the epoch that the first channel reaches at the peer, whose half is open."""
        self.current.theirs = theirs

    def on_outdated(self, message: Outdated) -> None:
        """Open a further channel for the server. Raises ProtocolError if this end is the server, or if too many wait."""
        if self._rank != 0:
            raise ProtocolError("only the server says 'outdated'")
        if len(self._outdated) >= MAX_OUTDATED:
            raise ProtocolError(f"the peer asks {MAX_OUTDATED} times at once for a further channel")
        # at most what is registered now: no channel reaches what this end registers later
        self._outdated.append((message.call, min(message.yours, self._transport.epoch), message.mine))
        if len(self._outdated) == 1:
            self._spawn(self._renew_for_peer)

    async def _renew_for_peer(self) -> None:
        """Answer the server's questions, in one task for all of them: each is its number, and the epochs to be reached.

        A failed attempt answers all questions that it was made for, and those that came meanwhile and need no more. The
        loop goes round between answers: a peer may have asked thousands of questions.
        """
        while self._outdated:
            await anyio.sleep(self._pause)
            first, epoch, has_failed = self._outdated[0], self._transport.epoch, False
            try:
                await self._renew(*first[1:])
            except LinkError as error:  # the peer needs it: Renewed tells it the reason, which it raises
                has_failed = True
                self._not_renewed("for the peer: %s", error)
            self._pause = min(2 * self._pause or FIRST_PAUSE, MOST_PAUSE) if has_failed else 0.0
            for _ in range(len(self._outdated)):
                await give_way()
                question = self._outdated[0]  # which stays there until it is answered: an empty queue has no task
                call, mine, theirs = question
                is_over = question is first or (has_failed and mine <= epoch) or self.find(mine, theirs) is not None
                if is_over:
                    self._post(Pong(call=call))
                self._outdated.popleft()
                if not is_over:
                    self._outdated.append(question)

    def on_renew(self, message: Renew) -> None:
        """Open our half of a further channel, which the client has begun to open."""
        if self._rank != 1:
            raise ProtocolError("only the client says 'renew'")
        if message.channel in self._heard or self._named(message.channel) is not None:
            return  # a repeated message
        if len(self._openings) >= MAX_FOLLOWING:
            raise ProtocolError(f"the peer opens more than {MAX_FOLLOWING} channels at once")
        self._heard.append(message.channel)
        self._openings[message.channel] = _Opening()

        async def follow() -> None:
            try:
                async with self._turns:
                    await self._open_further(message.channel, min(message.seconds, RENEWAL_TIMEOUT), self._pause)
                self._pause = 0.0
            except LinkError as error:  # the same holds here
                self._pause = min(2 * self._pause or FIRST_PAUSE, MOST_PAUSE)
                self._not_renewed("for the peer: %s", error)
            finally:
                del self._openings[message.channel]
                self._changed.wake()

        self._spawn(follow)

    def on_renewed(self, message: Renewed) -> None:
        """Note that the peer's half is open; or that it could not be opened, and stop opening ours."""
        self._failure = message.reason
        if (opening := self._openings.get(message.channel)) is not None:
            opening.answer = message
            if message.reason and opening.scope is not None:
                opening.scope.cancel()
        self._changed.wake()

    def on_retire(self, message: Retire) -> None:
        """Note that the peer has no transfer left on a channel."""
        if (link_channel := self._named(message.channel)) is not None:
            link_channel.retired["theirs"] = True
            self._retire(link_channel)

    def on_broken(self, message: Broken) -> None:
        """Take a channel out of use on which one of the peer's transfers was stopped half-way."""
        link_channel = self._named(message.channel)
        if link_channel is not None and not link_channel.is_broken:  # otherwise this is known
            self._put_out_of_use(link_channel)
            self._retire(link_channel)

    def _named(self, name: str) -> LinkChannel | None:
        current = self._current
        return current if current is not None and current.name == name else self._old.get(name)

    # ---- the end ----

    async def aclose(self) -> None:
        """Close all channels. Their transfers must have ended.

        Raises:
            StillWritten: if the peer may still write for a while. Call this again after :meth:`wait_let_go`.
            LLMException: if a channel could not be closed. The first failure counts, which may be that of an outdated
                channel, long ago.
        """
        self._closing += [*self._old.values(), *([self._current] if self._current else [])]
        self._old.clear()
        self._current = None
        refused = self._refused
        held: StillWritten | None = None
        # a copy: channels leave the list when they are closed
        for link_channel in list(self._closing):
            is_closed = True
            try:
                await link_channel.channel.aclose()
            except StillWritten as error:  # this end's requests in it are gone all the same
                held = held or error
                link_channel.closed(True)
                continue
            except LLMException as error:
                refused = refused or error
                is_closed = False
            self._closing.remove(link_channel)
            link_channel.closed(is_closed)
        if refused is not None or held is not None:
            raise refused or held  # type: ignore[misc]

    async def wait_let_go(self) -> None:
        """Wait until the peer has let go of all channels, and close them. Call this after ``StillWritten``.

        There is no time limit.

        Raises:
            LLMException: if one could not be closed. Then it is never known when the peer lets go of it.
        """
        while self._closing:
            await self._closing[0].channel.wait_let_go()
            with suppress(StillWritten):
                await self.aclose()

    def abandon(self) -> None:
        """Stop waiting, after ``StillWritten``. The owner of the memory that the peer may write withholds it."""
        for link_channel in self._closing:
            link_channel.channel.abandon()
        self._closing.clear()


def channel_name(client: int, server: int) -> str:
    """Return a name that no other channel has, within the vendor's 127 characters."""
    return f"aiodatadist_{client}_{server}_{secrets.token_hex(8)}"
