"""The link to one peer: its life, from the handshake until everything has been released."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from aiodatadist._concurrency.signal import Signal
from aiodatadist._counting import Incident
from aiodatadist._device import give_way
from aiodatadist._link.control.notifications import IncomingNotifications
from aiodatadist._link.control.questions import AGAIN_SECONDS, MOST_AGAIN_SECONDS
from aiodatadist._link.control.wire import Wire
from aiodatadist._link.data.data_connections import dialling
from aiodatadist._link.host import LinkHost
from aiodatadist._link.lifecycle import Cause, End, Event, Lifecycle, LinkState, Reach, Service
from aiodatadist._link.link_handshake import LinkHandshake, LinkRequest, refuse
from aiodatadist._link.ownership import Owners
from aiodatadist._link.reactions import REACTIONS, Reactions
from aiodatadist._link.session import Session
from aiodatadist._link.transfers.checksums import check_peer
from aiodatadist._link.transfers.transfers import Transfers
from aiodatadist._transport import StillWritten
from aiodatadist._values.foreign import printable
from aiodatadist._wire.data_proof import ChannelKey
from aiodatadist._wire.frames import Unknown
from aiodatadist._wire.handshake import Handshake
from aiodatadist._wire.messages import (
    Bye,
    Disconnect,
    Hello,
    Message,
    Refuse,
)
from aiodatadist._wire.proved import Proved
from aiodatadist._wire.ways import connections_between
from aiodatadist.errors import (
    LinkClosed,
    LinkError,
    LinkTimeout,
    LLMException,
    PeerLost,
    ProtocolError,
    StuckError,
)

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry
    from aiodatadist._device import Device
    from aiodatadist._transport import OpenSockets, Transport

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT = 5.0
"""Seconds that a peer has for ending its transfers when a link is closed in good order."""
ROUNDS_OF_OTHERS = 4
"""Rounds of the event loop for others after a peer's messages have held it for a millisecond.

What another peer waits for often takes a few rounds, such as a question for checksums. A round that has nothing to do takes
some hundredths of a millisecond.
"""
LAST_WORD_SECONDS = 1.0
"""Seconds for receiving what a peer sent before its connection broke."""


class Link:
    """A link to one peer: its life, from the handshake until everything has been released.

    Attributes:
        session: the peer, the conversation with it and the failure that ends it.
        transfers: the transfers of either end.
        owners: the ends that own the link.
        life: the state of the link, and why it ended.
        way: how its bytes travel; empty until the options of both ends have been compared.
        heartbeat_token: the token that a connection for this link's heartbeats must present; empty with a key.
        proved: the credential with which both ends have proved themselves; None without a key.
        generation: how many times the link to this peer has been made, this one included; 0 until it is filed.
        peer_links: the number of links with this cluster that the peer had before.
        dialled: the place where this end asked for the link, as its caller named it; None if the peer asked.
        place: the address and port of the other end of the connection.
    """

    def __init__(self, wire: Wire, device: Device, transport: Transport, host: LinkHost) -> None:
        self._host = host
        self._wire = wire
        self._transport = transport
        self._is_heard_out = Signal()
        self._at_end: list[Callable[[], object]] = []
        self._when_mutual: Callable[[], object] | None = None
        self._reason = ""
        self._patience = 0.0
        self.session: Session = Session(wire, transport, host)
        session = self.session
        self.life: Lifecycle = session.life
        self.transfers: Transfers = Transfers(session, device)
        self.owners: Owners = Owners(session, lambda reason: self.disconnect(reason, DRAIN_TIMEOUT))
        incoming = IncomingNotifications(
            session.post_if_open,
            self._heard_note,
            lambda: session.share.notes,
            asyncio.get_running_loop().call_soon,
        )
        self._reactions = Reactions(session, self.owners, self.transfers, incoming)
        self.way: str = ""
        self.heartbeat_token: str = ""
        self.proved: Proved | None = None
        self.generation: int = 0
        self.peer_links: int = 0
        self.dialled: tuple[str, int] | None = None
        self.place: tuple[str, int] = "", 0

    @property
    def cluster_id(self) -> int:
        """The peer's cluster id; 0 until it is known."""
        return self.session.cluster_id

    def _heard_note(self, payload: bytes, taken: Callable[[], None]) -> None:
        """Pass a notification on. That of a peer without the right to send any is discarded, and counts as taken."""
        if self.session.rights.notify:
            self._host.heard(self.session.cluster_id, self.generation, payload, taken)
        else:
            self.session.lacks_right("notify", "its notification is dropped")
            taken()

    @property
    def credential(self) -> str:
        """The name of the key that both ends have proved; empty without one."""
        return "" if self.proved is None else self.proved.credential

    # ---- opening ----

    async def shake_hands(
        self,
        handshake: Handshake,
        request: LinkRequest | None,
        first: Message | Unknown | None,
        admit: Callable[[Hello], Awaitable[None]],
    ) -> None:
        """Agree with the peer and open the channel. The caller sets the deadline.

        Args:
            request: the request to make if this end is the client; None if it is the server.
            first: the message that the client has sent already, if any.
            admit: called with the peer's proved hello. It may wait, and may raise LinkError to refuse the peer.

        Raises:
            LinkError: if there can be no link. The peer has been told if this end refused.
        """

        sockets: OpenSockets | None = None
        opening = ExitStack()

        async def met(peer: Hello) -> None:
            nonlocal sockets
            self.proved, self.way = handshake.proved, handshake.way
            rights = self._host.rights_of(self.proved, peer.cluster_id)
            self.session.meet(handshake.me, peer, rights)
            self.peer_links = peer.links
            await admit(peer)
            sockets = self._sockets(handshake, request, opening)

        def check(peer: Hello) -> None:
            if self._host.transfer_checksum:
                check_peer(peer.minor, handshake.me, peer.cluster_id)

        self._wire.speak(handshake.protocol)
        link_handshake = LinkHandshake(handshake, self._wire, self.session.channels, self._transport, check, met)
        try:
            with opening:
                if request is not None and request.prove is not None:
                    handshake.vouch = await request.prove(self._wire)
                await link_handshake.converse(request, first)
                attach = None if request is None else request.attach
                ready = await link_handshake.open(self.heartbeat_token, attach, sockets)
            self.session.channels.losses.check()
        except LinkError as error:
            await self.refuse(error)
            raise
        except LLMException as error:
            failure = LinkError(str(error), status_code=error.status_code)
            await self.refuse(failure)
            raise failure from error
        self.session.channels.on_first(ready.epoch)
        self.life.on(Event.AGREE)

    def _sockets(self, handshake: Handshake, request: LinkRequest | None, opening: ExitStack) -> OpenSockets | None:
        """Return what opens the data connections of the link's channel; None if it has none.

        Args:
            opening: left when the link is made, or cannot be. Until then the peer's connections are accepted.
        """
        agreed = handshake.agreed
        if agreed is None:
            return None
        count = connections_between(handshake.way, self._transport.endpoint, agreed[0].endpoint)
        if not count:
            return None
        key = ChannelKey.of(handshake.secret, agreed[1].channel)
        is_plain = self.proved is None or self.place[0] in self._host.plain_networks
        if request is not None:
            return dialling(request.address, key, is_plain)
        return opening.enter_context(self._host.expect_data(key, count, is_plain))

    # ---- until it ends ----

    async def serve(self) -> None:
        """Serve the link until it ends, then release everything.

        This end listens to the peer and, when asked to, parts from it.
        """
        try:
            async with anyio.create_task_group() as group:
                self._wire.react_at_once(self._reactions.at_once)
                self._wire.pump_with(lambda: self.session.spawn(self._pump))
                self.session.start_tasks(group)
                try:
                    await self._listen()
                finally:
                    self._is_heard_out.set()
                    self.session.stop_listening()
                    # a group without tasks does not wait for those that start while it ends
                    group.start_soon(checkpoint)
                group.cancel_scope.cancel()
        except Exception as error:
            if self.session.failure is None:
                why = f"the link to cluster {self.cluster_id} failed: {printable(repr(error))}"
                self.session.end(Event.BREAK, LinkError(why))
            raise
        finally:
            self.session.end_tasks()
            # before anything is released: what still arrives must start nothing
            self._wire.react_at_once(None)
            await self._give_back()

    async def _pump(self) -> None:
        try:
            await self._wire.pump()
        except PeerLost as error:
            with anyio.move_on_after(LAST_WORD_SECONDS):
                await self._is_heard_out.wait()  # the peer may have sent before why it leaves: the link ends with that
                return
            self.session.lost(str(error.args[0]))

    async def _listen(self) -> None:
        try:
            await self._hear()
        except LinkError as error:
            if self.session.is_ready:
                self.session.end(Event.BREAK, type(error)(f"cluster {self.cluster_id}: {error.args[0]}"))
                self.transfers.running.stop()
            elif self.life.is_open:
                self.life.on(Event.FALL_SILENT)

    async def _hear(self) -> None:
        """Listen until one end has sent its last word."""
        while True:
            message = await self._wire.receive()
            if (react := REACTIONS.get(type(message))) is not None:
                self.heard()
                react(self._reactions, message)
                # Otherwise a peer that asks and does not read would fill this end's memory with answers.
                if self._wire.is_congested:
                    await self._wire.flush()
                await give_way(ROUNDS_OF_OTHERS)  # many messages come in one piece
                continue
            is_news = self.life.end is not End.LEAVING
            if not self.session.is_ready and isinstance(message, (Bye, Disconnect, Refuse)):
                self.life.on(Event.LAST_WORD)
            if isinstance(message, Bye) and self.life.state is LinkState.CLOSING:
                return
            if isinstance(message, Refuse):  # the peer ended before it had the link: its channel is closed
                if self.session.is_ready:
                    why = f"cluster {self.cluster_id} ended the link: {printable(message.reason)}"
                    self.session.end(Event.LAST_WORD, LinkClosed(why), Cause.REFUSED)
                return
            self.heard()
            if not (isinstance(message, Disconnect) and self.life.is_open):
                state = self.life.state.value
                raise ProtocolError(f"cluster {self.cluster_id} said {message.type!r} on a {state} link")
            if is_news:  # the peer repeats the message until it hears our last word
                if self.session.is_ready:
                    why = f"cluster {self.cluster_id} unlinked: {printable(message.reason)}"
                    self.session.end(Event.LAST_WORD, LinkClosed(why))
                self.session.spawn(self._say_bye)
            await give_way()

    async def _say_bye(self) -> None:
        """Answer a peer that leaves, once our transfers have ended. It listens until then."""
        await self._drain(DRAIN_TIMEOUT)
        self._wire.post(Bye())
        with anyio.move_on_after(DRAIN_TIMEOUT):
            await self._wire.flush()
        self.session.stop_tasks()

    async def _part(self) -> None:
        """Let transfers end, then tell the peer that this end leaves, and repeat that in case a message is lost.

        This runs in the link's own task, so that it does not stop half-way when a caller is cancelled.
        """
        await self._drain(self._patience)
        self._wire.post(Disconnect(reason=self._reason))
        pause = AGAIN_SECONDS
        while True:  # the end of the link ends this
            await anyio.sleep(pause)
            self.session.post_again(Disconnect(reason=self._reason))
            pause = min(2 * pause, MOST_AGAIN_SECONDS)

    async def _drain(self, seconds: float) -> None:
        """Let transfers under way finish for ``seconds``, then stop the rest."""
        with anyio.move_on_after(seconds):
            await self.transfers.finish()
            await self.session.channels.wait_opened()
            # last, because a notification is sent when its transfer has ended
            await self.session.notification_queue.wait_empty()
        await self.transfers.stop()

    async def disconnect(self, reason: str, timeout: float) -> None:
        """End the link in good order: no transfer starts, those under way end, and the peer agrees.

        If cancelled, the link is ended all the same.

        Raises:
            LinkTimeout: if the peer did not answer in time. The link stays half closed until it does, or is abandoned.
            PeerLost: if the peer went away without an answer. Our half has ended.
        """
        if self.session.is_ready:
            why = f"the link to cluster {self.cluster_id} was unlinked: {reason}"
            self.session.end(Event.UNLINK, LinkClosed(why))
            self._reason, self._patience = reason, timeout
            self.session.spawn(self._part)
        with anyio.move_on_after(timeout) as limit:
            await self.session.closed.wait()
        if limit.cancelled_caught:
            raise LinkTimeout(f"cluster {self.cluster_id} did not answer within {timeout:.3f} s", peer=self.cluster_id)
        if self.life.is_unanswered:
            raise PeerLost(f"cluster {self.cluster_id} went away without a word", peer=self.cluster_id)

    async def abandon(self, failure: LinkError) -> None:
        """End this half at once, without waiting for the peer. It is told, but may not receive the message."""
        if self.session.failure is None:
            self._wire.post(Disconnect(reason=str(failure.args[0])))
            # The connection is aborted below, which drops what the kernel has not got.
            self._wire.hurry()
            self.session.end(Event.CLOSE, failure)
        self.transfers.running.stop()
        await self._wire.aclose()
        self.session.stop_tasks()
        await self.session.closed.wait()

    async def _give_back(self) -> None:
        """Release streams, channels and connection, in this order, in bounded time. Runs once, also when cancelled."""
        session = self.session
        has_failed = session.failure is not None
        session.end(Event.GIVE_BACK, LinkClosed(f"the link to cluster {self.cluster_id} was closed"))
        self.transfers.running.stop()
        if not has_failed:
            await self.refuse(LinkClosed("its cluster has ended"))
            self.transfers.running.stop()
        try:
            # Shielded: if a cancellation stopped this half-way, memory would be used again while bytes may still land in it.
            with anyio.move_on_after(DRAIN_TIMEOUT + self.transfers.running.quiesce_seconds, shield=True):
                # streams first: their transfers use the channels
                is_quiet = [await self._quietly(stream) for stream in self.transfers.running.streams.values()]
                if all(is_quiet):  # else the device may still use a channel
                    await self._shut()
            with anyio.move_on_after(1, shield=True):  # separately, because the time for the above may be over
                await self._quietly(self._wire)
        finally:
            self.transfers.running.end_unclean()
            self._end_peer_leases()  # before the requests fail, because their callbacks may use the blocks again
            self._reactions.end()
            self.transfers.end(session.copy_of_failure())
            # not before the channels are closed: until then the peer may read leased blocks
            self._host.block_leases.peer_gone(session)
            session.layer_events.end(session.copy_of_failure())
            session.notification_queue.end()
            # last: those who wait for this use the memory again
            session.closed.set()
            for call in self._at_end:
                call()

    async def _shut(self) -> None:
        """Close the channels. If that fails, it is not known what the peer can still reach."""
        try:
            await self.session.channels.aclose()
        except StillWritten as error:
            told = "link to cluster %d: caches that it held are withheld until it lets go: %s", self.cluster_id, error
            self.session.incidents.add(Incident.MEMORY_WITHHELD, logger, *told)
            self.life.on(Event.WITHHOLD)
        except LLMException as error:
            self.session.report(Incident.CLOSE_FAILED, error)
        except Exception:  # out of threads, for instance
            self._failed_to_close("a channel")
        else:
            self.life.on(Event.SHUT)

    def _end_peer_leases(self) -> None:
        """Free the caches that the peer held.

        They are withheld while the peer may still write there, and lost if it is not known when that ends.
        """
        written: list[Entry] = []
        if self.life.service is Service.WITHHELD:
            self.session.peer_leases.end(written.append)
            self._host.registry.withheld.withhold(written, self.session, self.session.channels)
        else:
            self.session.peer_leases.end(None if self.life.is_shut else self.transfers.running.lose)

    async def _quietly(self, part: Any) -> bool:
        """Close a part of the link. Return False if it may still be in use."""
        try:
            await part.aclose()
        except LLMException as error:
            is_stuck = isinstance(error, StuckError)
            kind, level = (
                (Incident.MEMORY_LOST, logging.ERROR) if is_stuck else (Incident.CLOSE_FAILED, logging.WARNING)
            )
            self.session.report(kind, error, level)
            return False
        except Exception:  # out of threads, for instance
            self._failed_to_close("a part of it")
            return False
        return True

    def _failed_to_close(self, what: str) -> None:
        told = "link to cluster %d: %s could not be closed", self.cluster_id, what
        self.session.incidents.add(Incident.DEFECT, logger, *told, level=logging.ERROR, exc_info=True)

    async def refuse(self, why: LinkError) -> None:
        """Tell the peer that there is no link, because it may believe that there is one. It may have been told before."""
        await refuse(self._wire, why)

    async def discard(self) -> None:
        """Release what a link holds that never became ready."""
        self.life.on(Event.CLOSE, LinkClosed("the link was never made"))
        await self._give_back()

    @property
    def is_closed(self) -> bool:
        """True once all resources have been released."""
        return self.session.closed.is_set()

    def call_when_mutual(self, call: Callable[[], object]) -> None:
        """Call ``call`` when the peer's first message comes, before this end reacts to it. ``call`` must not raise."""
        self._when_mutual = call

    def file(self, generation: int) -> None:
        """Note that the link is in this end's table. If links have owners, the link belongs to the end that asked for it."""
        self.generation = generation
        self.life.on(Event.FILE)
        if self._host.links_have_owners:
            self.life.on(Event.DISOWN if self.dialled is None else Event.PEER_DISOWNS)

    def remake_if_lost(self, is_wanted: bool) -> None:
        """Set if this end relinks when the link breaks. If so, the errors of its transfers are retryable."""
        self.life.on(Event.WANT if is_wanted else Event.STOP_WANTING)

    def heard(self) -> None:
        """Note that the peer has the link, too."""
        if self.life.reach is not Reach.MUTUAL and self.life.state is LinkState.READY:
            self.life.on(Event.MEET)
            if self._when_mutual is not None:
                self._when_mutual()

    def call_when_closed(self, call: Callable[[], object]) -> None:
        """Call ``call``, which must not raise, once all resources have been released. The link must not be closed yet."""
        self._at_end.append(call)

    async def wait_closed(self) -> LinkError:
        """Wait until all resources have been released, and return why the link ended."""
        await self.session.closed.wait()
        return self.session.failure or LinkClosed(f"the link to cluster {self.cluster_id} was closed")

    def __repr__(self) -> str:
        busy = len(self.transfers.running.transfers) + len(self.transfers.running.operations)
        return f"<Link to cluster {self.cluster_id} {self.life.state.value} {busy} transfers>"
