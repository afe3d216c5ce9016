"""One peer: the connection that carries control messages, the channel that carries bytes, and what is under way."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from aiodatadist.cache.catalogue import Catalogue
from aiodatadist.device import Program, Stream, Transfer, TransferState
from aiodatadist.errors import (
    LinkClosed,
    LinkError,
    LinkTimeout,
    LLMException,
    LLMStatusCode,
    NotLinked,
    PeerLost,
    ProtocolError,
    StuckError,
)
from aiodatadist.transport import Channel, ChannelOffer, Endpoint
from aiodatadist.wire.framing import MAX_BODY, Decoder, encode
from aiodatadist.wire.handshake import Handshake, refusal
from aiodatadist.wire.messages import Bye, CacheEntry, Connect, Disconnect, Hello, Message

if TYPE_CHECKING:
    from aiodatadist.cache.table import Entry
    from aiodatadist.device import Device
    from aiodatadist.layout import Grid
    from aiodatadist.transport import Transport

logger = logging.getLogger(__name__)

RECEIVE = 1 << 16
UNVERIFIED_BODY = 1 << 14
"""Bytes of a message before the peer is known."""

LONGEST = 60.0
"""Seconds for opening a channel, at most: the peer says how long, but not how long we cannot be stopped."""

DRAIN = 5.0
"""Seconds that a peer has for ending its transfers when a link is closed in good order."""


class LinkState(Enum):
    """::

    OPENING -> READY -> CLOSING -> CLOSED
       |         |         |
       +---------+---------+----> BROKEN     the peer died, or broke the protocol
    """

    OPENING = "opening"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"
    BROKEN = "broken"


class Wire:
    """Messages over a byte stream. One reader, one writer at a time."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._decoder = Decoder(UNVERIFIED_BODY)
        self._ready: list[Message] = []
        self._sending = anyio.Lock()

    def trust(self) -> None:
        """The peer is known: full-sized messages are fine from now on."""
        self._decoder.max_body = MAX_BODY

    async def send(self, *messages: Message) -> None:
        """Raises PeerLost: nobody is there any more."""
        try:
            async with self._sending:
                for message in messages:
                    await self._stream.send(encode(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise PeerLost("the peer's process is gone, or its connection broke") from error

    async def receive(self) -> Message:
        """The next message.

        Raises:
            PeerLost: nobody is there any more.
            ProtocolError: what came is no message.
        """
        while not self._ready:
            self._ready = self._decoder.feed(b"")  # what came behind an earlier message may have been wrong
            try:
                data = await self._stream.receive(RECEIVE)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
                raise PeerLost("the peer's process is gone, or its connection broke") from error
            self._ready = self._decoder.feed(data)
        return self._ready.pop(0)

    async def aclose(self) -> None:
        await anyio.aclose_forcefully(self._stream)


class Link:
    """A link to one peer. Transfers on it run one after the other.

    Attributes:
        cluster_id: the peer's; known once the link is ready.
        failure: why it is closed or broken.
    """

    def __init__(self, wire: Wire, device: Device, transport: Transport) -> None:
        self._wire = wire
        self._device = device
        self._transport = transport
        self._channel: Channel | None = None
        self._stream: Stream | None = None
        self._transfers: set[Transfer] = set()
        self._idle = anyio.Event()
        self._closed = anyio.Event()
        self._leaving = anyio.Event()
        self._broken = anyio.Event()
        self._reason = ""
        self._patience = 0.0
        self._vanished = False
        self.cluster_id = 0
        self.instance = ""
        self.state = LinkState.OPENING
        self.failure: LinkError | None = None
        self.catalogue = Catalogue(0, [])

    @property
    def is_ready(self) -> bool:
        return self.state is LinkState.READY

    # ---- opening ----

    async def shake_hands(
        self,
        handshake: Handshake,
        connect: Connect | None,
        catalogue: Callable[[], list[CacheEntry]],
        admit: Callable[[Hello], None],
    ) -> None:
        """Agree with the peer and open the channel. ``connect`` makes us the client. The caller sets the deadline.

        Raises:
            LinkError: it cannot be; the peer was told, if it was our doing.
        """
        try:
            if connect is not None:
                await self._wire.send(*handshake.start(connect))
            peer, connect = await self._converse(handshake, admit)
            caches = catalogue()  # at the same moment at which the channel takes the regions
            self._channel = await self._open_channel(handshake, peer, connect)
            await self._wire.send(*handshake.opened(caches))
            while not handshake.is_done:
                handshake.receive(await self._wire.receive())
        except LinkError as error:
            await self._refuse(error)
            raise
        except LLMException as error:
            failure = LinkError(str(error), status_code=error.status_code)
            await self._refuse(failure)
            raise failure from error
        self.catalogue = Catalogue(self.cluster_id, handshake.caches or [])
        self.state = LinkState.READY

    async def _converse(self, handshake: Handshake, admit: Callable[[Hello], None]) -> tuple[Hello, Connect]:
        """Until both ends know who the other is and what the channel is called."""
        while True:
            answers = handshake.receive(await self._wire.receive())
            agreed = handshake.agreed
            if agreed is not None:
                self.cluster_id = agreed[0].cluster_id
                self.instance = agreed[0].instance
                admit(agreed[0])
                self._wire.trust()
            await self._wire.send(*answers)
            if agreed is not None:
                return agreed

    async def _open_channel(self, handshake: Handshake, peer: Hello, connect: Connect) -> Channel:
        theirs = Endpoint(**peer.endpoint.model_dump())
        mine = self._transport.endpoint
        rank = 0 if handshake.side == "client" else 1
        ends = (mine, theirs) if rank == 0 else (theirs, mine)
        seconds = min(connect.timeout, LONGEST)
        try:
            return await self._transport.open_channel(ChannelOffer(connect.channel, rank, ends), seconds)
        except LinkTimeout:
            await self._hear_refusal(handshake)
            raise

    async def _hear_refusal(self, handshake: Handshake) -> None:
        """The peer did not come to open the channel. If it said why, that is the error."""
        with anyio.move_on_after(0.1):
            handshake.receive(await self._wire.receive())

    async def _refuse(self, error: LinkError) -> None:
        if isinstance(error, PeerLost):
            return
        with anyio.move_on_after(1, shield=True):  # a peer that does not read is none of our business
            try:
                await self._wire.send(refusal(error))
            except PeerLost:
                logger.debug("the peer was gone before it could be told: %s", error)

    # ---- use ----

    def check_ready(self) -> None:
        """Raises NotLinked or what ended the link."""
        if self.state is LinkState.READY:
            return
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args, peer=self.cluster_id, hint="link again")
        raise NotLinked(f"the link to cluster {self.cluster_id} is {self.state.value}", peer=self.cluster_id)

    def get(self, grid: Grid, entry: Entry, timeout: float) -> Transfer:
        """Start reading the peer's memory into a local cache, which is leased until the transfer ends."""
        self.check_ready()
        channel = self._channel
        if channel is None:
            raise NotLinked(f"the link to cluster {self.cluster_id} has no channel", peer=self.cluster_id)
        program = Program()
        channel.add_get(program, grid)
        if self._stream is None:
            self._stream = self._device.open_stream(f"link to {self.cluster_id}")
        transfer = self._stream.submit(program, timeout)
        entry.lease()
        self._transfers.add(transfer)

        def ended(ended_transfer: Transfer) -> None:
            self._transfers.discard(ended_transfer)
            self._settle(ended_transfer, entry)

        transfer.add_done_callback(ended)
        return transfer

    def _settle(self, transfer: Transfer, entry: Entry) -> None:
        if transfer.state is TransferState.STUCK:
            entry.poison()
            for region in entry.regions():
                self._device.mark_stuck(region.address, region.nbytes)
            why = transfer.error.args[0] if transfer.error is not None else "a transfer is stuck"
            self._break(LinkError(f"cluster {self.cluster_id}: {why}"))
        else:
            entry.release()
        suspect = transfer.error is not None and transfer.error.status_code is LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR
        if self.failure is not None and (suspect or transfer.state is TransferState.CANCELLED):
            transfer.replace_outcome(type(self.failure)(*self.failure.args, peer=self.cluster_id))
        elif suspect and transfer.error is not None:
            died = f"cluster {self.cluster_id}: the peer's process is gone, or gave up its memory: {transfer.error.args[0]}"
            self._break(PeerLost(died))
            transfer.replace_outcome(PeerLost(died, peer=self.cluster_id))
        elif transfer.error is not None:
            transfer.error.peer = self.cluster_id
        if not self._transfers:
            self._idle.set()
            self._idle = anyio.Event()

    # ---- until it ends ----

    async def serve(self) -> None:
        """Until the link is over: listen to the peer and, when asked to, part from it. Then give everything back."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._part)
                group.start_soon(self._watch, group.cancel_scope)
                await self._listen()
                group.cancel_scope.cancel()
        finally:
            await self._give_back()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        await self._broken.wait()
        scope.cancel()

    async def _listen(self) -> None:
        try:
            await self._hear()
        except LinkError as error:
            if self.state is LinkState.READY:
                self._end(type(error)(f"cluster {self.cluster_id}: {error.args[0]}"), LinkState.BROKEN)
                self._stop()
            elif self.state is LinkState.CLOSING:
                self._vanished = True

    async def _hear(self) -> None:
        """Until one end has had the last word."""
        message = await self._wire.receive()
        if isinstance(message, Disconnect):
            self._end(LinkClosed(f"cluster {self.cluster_id} unlinked: {message.reason}"), LinkState.CLOSED)
            await self._drain(DRAIN)
            await self._wire.send(Bye())
        elif not isinstance(message, Bye) or self.state is not LinkState.CLOSING:
            raise ProtocolError(f"cluster {self.cluster_id} said {message.type!r} on a {self.state.value} link")

    async def _part(self) -> None:
        """When asked to: drain, and tell the peer. In the link's own task, so that no caller can be cancelled half-way."""
        await self._leaving.wait()
        await self._drain(self._patience)
        try:
            await self._wire.send(Disconnect(reason=self._reason))
        except PeerLost:
            logger.debug("cluster %d went away while the link was closed", self.cluster_id)

    def _end(self, failure: LinkError, state: LinkState) -> None:
        """Decide that it is over, and why: no new transfer starts."""
        if self.failure is None:
            self.failure = failure
            logger.info("link to cluster %d: %s", self.cluster_id, failure)
        self.state = state

    def _break(self, failure: LinkError) -> None:
        """Nothing can be trusted on it from here on: the link ends itself."""
        if self.state is LinkState.READY:
            self._end(failure, LinkState.BROKEN)
            self._stop()
            self._broken.set()

    def _stop(self) -> None:
        """Ask the transfers under way to stop; they end with ``failure``."""
        for transfer in list(self._transfers):
            transfer.cancel()

    async def _drain(self, seconds: float) -> None:
        """Let the transfers under way finish; stop those that take longer."""
        with anyio.move_on_after(seconds):
            while self._transfers:
                await self._idle.wait()
        self._stop()
        while self._transfers:  # bounded: the stream answers a cancellation within its grace
            await self._idle.wait()

    async def disconnect(self, reason: str, timeout: float) -> None:
        """End it in good order: no new transfers, those under way end, the peer agrees.

        If cancelled, the link is ended all the same.

        Raises:
            LinkTimeout: the peer did not answer in time; the link stays half closed until it does, or is abandoned.
            PeerLost: the peer was gone already. Our half is ended.
        """
        if self.state is LinkState.READY:
            self._end(LinkClosed(f"the link to cluster {self.cluster_id} was unlinked: {reason}"), LinkState.CLOSING)
            self._reason, self._patience = reason, timeout
            self._leaving.set()
        with anyio.move_on_after(timeout) as limit:
            await self._closed.wait()
        if limit.cancelled_caught:
            raise LinkTimeout(f"cluster {self.cluster_id} did not answer within {timeout:.3f} s", peer=self.cluster_id)
        if self._vanished:
            raise PeerLost(f"cluster {self.cluster_id} went away without a word", peer=self.cluster_id)

    async def abandon(self, failure: LinkError) -> None:
        """End this half at once, without telling anybody."""
        if self.failure is None:
            self._end(failure, LinkState.CLOSED)
        self._stop()
        await self._wire.aclose()
        await self._closed.wait()

    async def _give_back(self) -> None:
        """Stream, channel, connection, in this order; each in bounded time. Runs once, also when cancelled."""
        if self.failure is None:
            self._end(LinkClosed(f"the link to cluster {self.cluster_id} was closed"), LinkState.CLOSED)
        elif self.state is LinkState.CLOSING:
            self.state = LinkState.CLOSED
        self._stop()
        with anyio.move_on_after(DRAIN + 3 * self._device.limits.grace, shield=True):
            if await self._quietly(self._stream):  # else the device may still use the channel
                await self._quietly(self._channel)
            await self._quietly(self._wire)
        self._closed.set()

    async def _quietly(self, part: Any) -> bool:
        """Close a part; False when the device would not let go of it."""
        try:
            if part is not None:
                await part.aclose()
        except StuckError as error:
            logger.error("link to cluster %d: %s", self.cluster_id, error)  # noqa: TRY400 - the message says it all
            return False
        except LLMException as error:
            logger.warning("link to cluster %d: %s", self.cluster_id, error)
        return True

    async def discard(self) -> None:
        """Give back a link that never became ready."""
        if self.failure is None:
            self.failure = LinkClosed("the link was never made")
        self.state = LinkState.CLOSED
        await self._give_back()

    async def wait_closed(self) -> LinkError:
        """Until everything was given back; why it ended."""
        await self._closed.wait()
        return self.failure or LinkClosed(f"the link to cluster {self.cluster_id} was closed")

    def __repr__(self) -> str:
        return f"<Link to cluster {self.cluster_id} {self.state.value} {len(self._transfers)} transfers>"


def channel_name(client: int, server: int) -> str:
    """A name that no other channel has, within the vendor's 127 characters."""
    return f"aiodatadist_{client}_{server}_{secrets.token_hex(8)}"
