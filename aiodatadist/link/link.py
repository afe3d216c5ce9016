"""The link to one peer: its life, from the handshake until everything has been released."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.abc
from anyio.lowlevel import checkpoint

from aiodatadist.concurrency.signal import Signal
from aiodatadist.concurrency.spawner import Spawner
from aiodatadist.counting import Incident
from aiodatadist.device import StreamTransfer, TransferCompletion, TransferState, give_way
from aiodatadist.errors import (
    FeatureNotEnabled,
    LinkClosed,
    LinkError,
    LinkTimeout,
    LLMException,
    PeerLost,
    ProtocolError,
    StuckError,
)
from aiodatadist.link.control.layer_events import LayerReceiver
from aiodatadist.link.control.notifications import IncomingNotifications, check_payload
from aiodatadist.link.control.questions import AGAIN_SECONDS, MOST_AGAIN_SECONDS
from aiodatadist.link.control.wire import Wire
from aiodatadist.link.data.remote_operation import RemoteOperation, TransferSpec, failed
from aiodatadist.link.data.shortcut import Shortcuts
from aiodatadist.link.host import LinkHost
from aiodatadist.link.lifecycle import Cause, End, Event, LinkState, Reach, Service
from aiodatadist.link.link_handshake import LinkHandshake, refuse
from aiodatadist.link.ownership import Owners
from aiodatadist.link.reactions import REACTIONS, Reactions
from aiodatadist.link.session import Session
from aiodatadist.link.transfers.checksums import check_peer
from aiodatadist.link.transfers.leased_pull import KeptBlocks, LeasedPull
from aiodatadist.link.transfers.requester import Requester
from aiodatadist.link.transfers.responder import Responder
from aiodatadist.transport import StillWritten
from aiodatadist.values.digests import UNSAID, LeaseDigests
from aiodatadist.values.foreign import printable
from aiodatadist.wire.frames import Unknown
from aiodatadist.wire.handshake import Handshake
from aiodatadist.wire.messages import (
    DIGESTS_SINCE,
    PROTOCOL,
    Bye,
    Connect,
    Disconnect,
    Hello,
    Message,
    Ping,
    Pong,
    Refuse,
    Unclaim,
)

if TYPE_CHECKING:
    from aiodatadist.cache.table import Entry
    from aiodatadist.device import Device
    from aiodatadist.transport import Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

DRAIN_TIMEOUT = 5.0
"""Seconds that a peer has for ending its transfers when a link is closed in good order."""
PORTION_BYTES = 64 << 20
"""The size of one portion of a leased pull. Portions that have landed stay valid if a later one fails."""
LAST_WORD_SECONDS = 1.0
"""Seconds for receiving what a peer sent before its connection broke."""


class Link(Session):
    """A link to one peer, from the handshake to the end.

    Attributes:
        heartbeat_token: the token that a connection for this link's heartbeats must present.
        owners: the ends that own the link.
        requester: the transfers for which the peer must be asked.
        shortcuts: the short way for small transfers that are repeated.
        generation: how many times the link to this peer has been made, this one included; 0 until it is filed.
        peer_links: the number of links with this cluster that the peer had before.
        dialled: the place where this end asked for the link, as its caller named it; None if the peer asked.
        place: the address and port of the other end of the connection.
    """

    def __init__(self, wire: Wire, device: Device, transport: Transport, host: LinkHost) -> None:
        super().__init__(wire, device, transport, host)
        self._transport = transport
        self._is_heard_out = Signal()
        self._closed = Signal()
        self._at_end: list[Callable[[], object]] = []
        self._when_mutual: Callable[[], object] | None = None
        self._reason = ""
        self._patience = 0.0
        incoming = IncomingNotifications(
            self._say_while_open,
            lambda payload, taken: host.heard(self.cluster_id, self.generation, payload, taken),
        )
        self.requester = Requester(self)
        self.shortcuts = Shortcuts(self)
        self._responder = Responder(self, host.registry, self.shortcuts)
        self.owners = Owners(self, lambda reason: self.disconnect(reason, DRAIN_TIMEOUT))
        self._reactions = Reactions(self, host, self.owners, self.requester, self._responder, incoming)
        self.heartbeat_token = secrets.token_hex(32)
        self.generation = self.peer_links = 0
        self.dialled: tuple[str, int] | None = None
        self.place = "", 0

    # ---- opening ----

    async def shake_hands(
        self,
        handshake: Handshake,
        connect: Connect | None,
        first: Message | Unknown | None,
        admit: Callable[[Hello], Awaitable[None]],
        attach: Callable[[str], Awaitable[None]] | None,
    ) -> None:
        """Agree with the peer and open the channel. The caller sets the deadline.

        Args:
            connect: the introduction to send if this end is the client; None if it is the server.
            first: the message that the client has sent already, if any.
            admit: called with the peer's proved hello. It may wait, and may raise LinkError to refuse the peer.
            attach: called at the client with the token for heartbeats, to make a connection for them. Raises LinkError.

        Raises:
            LinkError: if there can be no link. The peer has been told if this end refused.
        """

        async def met(peer: Hello) -> None:
            self.cluster_id, self.instance, self.heartbeat = peer.cluster_id, peer.instance, peer.heartbeat
            self.peer_links = peer.links
            self._names = (handshake.me, peer.cluster_id)
            await admit(peer)

        def check(peer: Hello) -> None:
            if self._host.transfer_checksum:
                check_peer(peer.minor, handshake.me, peer.cluster_id)

        link_handshake = LinkHandshake(handshake, self._wire, self.channels, self._transport, check, met)
        ready = await link_handshake.agree(connect, first, self.heartbeat_token, attach)
        self.channels.on_first(ready.epoch)
        self.life.on(Event.AGREE)

    # ---- transfers ----

    def start(self, spec: TransferSpec, what: str) -> StreamTransfer | RemoteOperation:
        """Start a transfer. Never raises for what goes wrong with it: the completion reports that.

        If the peer's cache is known and within reach, the transfer is on its stream when this returns. Otherwise the peer is
        asked first.
        """
        if spec.is_request or spec.checksum:
            return self.requester.begin(spec, what)
        known = self.running.within_reach(spec.entry, spec.key)
        if known is None:
            return self.requester.begin(spec, what)
        remote, slot, link_channel = known
        try:
            grid = spec.grid(remote, slot)
            transfer = self.running.submit(
                spec.direction, link_channel, spec.entry, remote, grid, spec.seconds, "ours", spec.priority
            )
        except LLMException as error:
            error.peer = self.cluster_id
            return failed(what, error)
        if transfer.state is TransferState.DONE and spec.selection.is_whole_blocks:
            self.shortcuts.learn(spec)
        return transfer

    def begin(self, spec: TransferSpec, what: str, notify: bytes | None) -> StreamTransfer | RemoteOperation:
        """Start a transfer, as :meth:`start` does, and notify the peer if it succeeds.

        Raises:
            TypeError, ParamInvalid: if ``notify`` cannot be a notification's payload.
            FeatureNotEnabled: if the peer is too old for checksums.
        """
        self._check_knows(spec)
        pending = None if notify is None else self.notification_queue.reserve(check_payload(notify))
        transfer = self.start(spec, what)
        if pending is not None:
            transfer.add_done_callback(
                lambda done: pending.drop() if done.error or done.is_cancelled else pending.ready()
            )
        return transfer

    def start_leased(self, spec: TransferSpec, kept: KeptBlocks, seconds: float, what: str) -> LeasedPull:
        """Start a pull of blocks that the peer keeps, and claim them. ``seconds`` is the limit for both together.

        In one-sided mode the claim costs no time: this end reads meanwhile, and uses nothing before it is confirmed. The
        transfer starts only after the confirmation if the peer writes, or if ``kept.parts`` names the parts then.

        Raises:
            FeatureNotEnabled: if the peer is too old for checksums, or for comparing the prompt.
        """
        self._check_knows(spec)
        self._check_compares(kept.digests)

        def start() -> list[tuple[TransferCompletion, int]]:
            portions = kept.parts_of(spec).portions(PORTION_BYTES)
            return [(self.start(portion, what), len(portion.selection.dst_blocks)) for portion in portions]

        pull = LeasedPull(self, kept, seconds, what, start)
        if spec.is_request or kept.parts is not None:  # no transfer leases the destination until the claim is confirmed
            spec.entry.lease()
            pull.add_done_callback(lambda _: spec.entry.release())
        else:
            pull.begin()
        return pull

    def _check_compares(self, digests: LeaseDigests) -> None:
        """Raise FeatureNotEnabled if the caller's prompt must be compared, and the peer's version has no digests."""
        if self.peer_minor >= DIGESTS_SINCE:
            return
        version = f"{PROTOCOL}.{self.peer_minor}"
        if digests.prompt:
            raise FeatureNotEnabled(
                f"cluster {self.cluster_id} cannot compare prompts: its protocol has version {version}, and digests came "
                f"with {PROTOCOL}.{DIGESTS_SINCE}",
                hint="update that cluster",
            )
        self._host.block_leases.warn_of(self.cluster_id, version)

    def _check_knows(self, spec: TransferSpec) -> None:
        if spec.checksum:
            self.requester.checks.want_peer()

    def _say_while_open(self, message: Message) -> None:
        if self.life.is_open:
            self._wire.post(message)

    def release_lease(self, lease: str, digests: LeaseDigests = UNSAID) -> None:
        """Tell the peer that this end does not want the blocks of a lease."""
        blocks, prompt = digests
        self._wire.post(Unclaim(call=0, lease=lease, end="released", blocks_digest=blocks, prompt_digest=prompt))

    # ---- words ----

    async def ping(self, seconds: float = math.inf) -> None:
        """Wait until the peer has received everything that was sent before.

        Raises LinkTimeout if there is no answer in time, or what ended the link.
        """
        with anyio.move_on_after(seconds) as limit:
            await self.while_it_lasts(lambda: self.questions.ask(lambda call: Ping(call=call), Pong))
        if limit.cancelled_caught:
            raise LinkTimeout(f"cluster {self.cluster_id} did not answer within {seconds:g} s", peer=self.cluster_id)

    async def announce(self, receiver: LayerReceiver) -> None:
        """Wait until the peer knows that the receiver's layers are watched. Raises what ended the link."""
        await self.while_it_lasts(lambda: self.layer_events.announce(receiver))

    async def notify(self, payload: bytes) -> None:
        """Send a notification behind all earlier ones, and wait until it is sent. If cancelled, it may be sent or not."""
        self.check_ready()
        pending = self.notification_queue.reserve(payload)
        pending.ready()
        try:
            await self._or_the_end(pending.sent)
        finally:
            if not pending.sent.is_set():
                pending.drop()

    async def _or_the_end(self, event: Signal) -> None:
        """Wait until the event is set. Raises what ended the link, if that comes first."""
        async with anyio.create_task_group() as group:

            async def end() -> None:
                await self._closed.wait()
                group.cancel_scope.cancel()

            group.start_soon(end)
            await event.wait()
            group.cancel_scope.cancel()
        if not event.is_set():
            raise self.copy_of_failure()

    # ---- until it ends ----

    async def serve(self) -> None:
        """Serve the link until it ends, then release everything.

        This end listens to the peer and, when asked to, parts from it.
        """
        try:
            async with anyio.create_task_group() as group:
                self._tasks, self._scope = Spawner(group), group.cancel_scope
                self._wire.react_at_once(self._reactions.at_once)
                self._wire.pump_with(lambda: self.spawn(self._pump))
                while self._to_start:
                    group.start_soon(self._to_start.pop(0))
                if self.life.service is Service.STOPPED:
                    group.cancel_scope.cancel()
                try:
                    await self._listen()
                finally:
                    self._is_heard_out.set()
                    self.questions.end()
                    self.close_broken()
                    # a group without tasks does not wait for those that start while it ends
                    group.start_soon(checkpoint)
                group.cancel_scope.cancel()
        except Exception as error:
            if self.failure is None:
                why = f"the link to cluster {self.cluster_id} failed: {printable(repr(error))}"
                self._end(Event.BREAK, LinkError(why))
            raise
        finally:
            self._tasks = None
            self._wire.react_at_once(None)
            await self._give_back()

    async def _pump(self) -> None:
        try:
            await self._wire.pump()
        except PeerLost as error:
            with anyio.move_on_after(LAST_WORD_SECONDS):
                await self._is_heard_out.wait()  # the peer may have sent before why it leaves: the link ends with that
                return
            self.lost(str(error.args[0]))

    async def _listen(self) -> None:
        try:
            await self._hear()
        except LinkError as error:
            if self.is_ready:
                self._end(Event.BREAK, type(error)(f"cluster {self.cluster_id}: {error.args[0]}"))
                self.running.stop()
            elif self.life.is_open:
                self.life.on(Event.FALL_SILENT)

    async def _hear(self) -> None:
        """Listen until one end has sent its last word."""
        while True:
            message = await self._wire.receive()
            if (react := REACTIONS.get(type(message))) is not None:
                self.heard()
                react(self._reactions, message)
                if self._wire.is_congested:
                    await self._wire.flush()
                await give_way()  # many messages come in one piece
                continue
            is_news = self.life.end is not End.LEAVING
            if not self.is_ready and isinstance(message, (Bye, Disconnect, Refuse)):
                self.life.on(Event.LAST_WORD)
            if isinstance(message, Bye) and self.life.state is LinkState.CLOSING:
                return
            if isinstance(message, Refuse):  # the peer ended before it had the link: its channel is closed
                if self.is_ready:
                    why = f"cluster {self.cluster_id} ended the link: {printable(message.reason)}"
                    self._end(Event.LAST_WORD, LinkClosed(why), Cause.REFUSED)
                return
            self.heard()
            if not (isinstance(message, Disconnect) and self.life.is_open):
                state = self.life.state.value
                raise ProtocolError(f"cluster {self.cluster_id} said {message.type!r} on a {state} link")
            if is_news:  # the peer repeats the message until it hears our last word
                if self.is_ready:
                    why = f"cluster {self.cluster_id} unlinked: {printable(message.reason)}"
                    self._end(Event.LAST_WORD, LinkClosed(why))
                self.spawn(self._say_bye)
            await give_way()

    async def _say_bye(self) -> None:
        """Answer a peer that leaves, once our transfers have ended. It listens until then."""
        await self._drain(DRAIN_TIMEOUT)
        self._wire.post(Bye())
        with anyio.move_on_after(DRAIN_TIMEOUT):
            await self._wire.flush()
        self._end_serving()

    async def _part(self) -> None:
        """Let transfers end, then tell the peer that this end leaves, and repeat that in case a message is lost.

        This runs in the link's own task, so that it does not stop half-way when a caller is cancelled.
        """
        await self._drain(self._patience)
        self._wire.post(Disconnect(reason=self._reason))
        pause = AGAIN_SECONDS
        while True:  # the end of the link ends this
            await anyio.sleep(pause)
            self.post_again(Disconnect(reason=self._reason))
            pause = min(2 * pause, MOST_AGAIN_SECONDS)

    async def _drain(self, seconds: float) -> None:
        """Let what is under way finish for ``seconds``, then stop the rest."""
        with anyio.move_on_after(seconds):
            await self._responder.wait_served()
            await self.running.wait_idle()
            await self.channels.wait_opened()
            await self.notification_queue.wait_empty()
        self._responder.refuse_line()
        self.running.stop()
        await self.running.wait_idle()  # bounded: they answer a cancellation within their grace

    async def disconnect(self, reason: str, timeout: float) -> None:
        """End the link in good order: no transfer starts, those under way end, and the peer agrees.

        If cancelled, the link is ended all the same.

        Raises:
            LinkTimeout: if the peer did not answer in time. The link stays half closed until it does, or is abandoned.
            PeerLost: if the peer went away without an answer. Our half has ended.
        """
        if self.is_ready:
            why = f"the link to cluster {self.cluster_id} was unlinked: {reason}"
            self._end(Event.UNLINK, LinkClosed(why))
            self._reason, self._patience = reason, timeout
            self.spawn(self._part)
        with anyio.move_on_after(timeout) as limit:
            await self._closed.wait()
        if limit.cancelled_caught:
            raise LinkTimeout(f"cluster {self.cluster_id} did not answer within {timeout:.3f} s", peer=self.cluster_id)
        if self.life.is_unanswered:
            raise PeerLost(f"cluster {self.cluster_id} went away without a word", peer=self.cluster_id)

    async def abandon(self, failure: LinkError) -> None:
        """End this half at once, without waiting for the peer. It is told, but may not receive the message."""
        if self.failure is None:
            self._wire.post(Disconnect(reason=str(failure.args[0])))
            self._wire.hurry()
            self._end(Event.CLOSE, failure)
        self.running.stop()
        await self._wire.aclose()
        self._end_serving()
        await self._closed.wait()

    async def _give_back(self) -> None:
        """Release streams, channels and connection, in this order, in bounded time. Runs once, also when cancelled."""
        has_failed = self.failure is not None
        self._end(Event.GIVE_BACK, LinkClosed(f"the link to cluster {self.cluster_id} was closed"))
        self.running.stop()
        if not has_failed:
            await self.refuse(LinkClosed("its cluster has ended"))
            self.running.stop()
        try:
            with anyio.move_on_after(DRAIN_TIMEOUT + self.quiesce_seconds, shield=True):
                is_quiet = [await self._quietly(stream) for stream in self.running.streams.values()]
                if all(is_quiet):  # else the device may still use a channel
                    await self._shut()
            with anyio.move_on_after(1, shield=True):
                await self._quietly(self._wire)
        finally:
            self.running.end_unclean()
            self._end_peer_leases()  # before the requests fail, because their callbacks may use the blocks again
            self._responder.end()
            self._reactions.end()
            self.requester.end(self.copy_of_failure())
            self._host.block_leases.peer_gone(self)
            self.layer_events.end(self.copy_of_failure())
            self.notification_queue.end()
            self._closed.set()
            for call in self._at_end:
                call()

    async def _shut(self) -> None:
        """Close the channels. If that fails, it is not known what the peer can still reach."""
        try:
            await self.channels.aclose()
        except StillWritten as error:
            told = "link to cluster %d: caches that it held are withheld until it lets go: %s", self.cluster_id, error
            self.incidents.add(Incident.MEMORY_WITHHELD, logger, *told)
            self.life.on(Event.WITHHOLD)
        except LLMException as error:
            self.incidents.add(Incident.CLOSE_FAILED, logger, "link to cluster %d: %s", self.cluster_id, error)
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
            self.peer_leases.end(written.append)
            self._host.registry.withhold(written, self, self.channels)
        else:
            self.peer_leases.end(None if self.life.is_shut else self.running.lose)

    async def _quietly(self, part: Any) -> bool:
        """Close a part of the link. Return False if it may still be in use."""
        try:
            await part.aclose()
        except LLMException as error:
            is_stuck = isinstance(error, StuckError)
            kind, level = (
                (Incident.MEMORY_LOST, logging.ERROR) if is_stuck else (Incident.CLOSE_FAILED, logging.WARNING)
            )
            self.incidents.add(kind, logger, "link to cluster %d: %s", self.cluster_id, error, level=level)
            return False
        except Exception:  # out of threads, for instance
            self._failed_to_close("a part of it")
            return False
        return True

    def _failed_to_close(self, what: str) -> None:
        told = "link to cluster %d: %s could not be closed", self.cluster_id, what
        self.incidents.add(Incident.DEFECT, logger, *told, level=logging.ERROR, exc_info=True)

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
        return self._closed.is_set()

    def call_when_mutual(self, call: Callable[[], object]) -> None:
        """Call ``call`` when the peer's first message comes, before this end reacts to it. ``call`` must not raise."""
        self._when_mutual = call

    def file(self, generation: int) -> None:
        """Note that the link is in this end's table. If links have owners, it belongs to the end that asked for it."""
        self.generation = generation
        self.life.on(Event.FILE)
        if self._host.links_have_owners:
            self.life.on(Event.DISOWN if self.dialled is None else Event.PEER_DISOWNS)

    def remake_if_lost(self, is_wanted: bool) -> None:
        """Set whether this end makes the link again if it breaks. If so, the errors of its transfers are retryable."""
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
        await self._closed.wait()
        return self.failure or LinkClosed(f"the link to cluster {self.cluster_id} was closed")

    def __repr__(self) -> str:
        busy = len(self.running.transfers) + len(self.operations)
        return f"<Link to cluster {self.cluster_id} {self.life.state.value} {busy} transfers>"
