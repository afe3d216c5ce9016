"""The beginning of a link: two ends agree, and open their channel together."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from aiodatadist._concurrency.signal import Signal
from aiodatadist._link.control.proving import Prove
from aiodatadist._link.control.wire import Wire
from aiodatadist._link.data.channels import Channels
from aiodatadist._transport import Endpoint, OpenSockets
from aiodatadist._wire.frames import Unknown
from aiodatadist._wire.handshake import Handshake
from aiodatadist._wire.messages import Connect, EndpointInfo, Hello, Message, Ready
from aiodatadist._wire.reasons import discreet, refusal
from aiodatadist.errors import LinkError, PeerLost, ProtocolError

if TYPE_CHECKING:
    from aiodatadist._transport import Transport

logger = logging.getLogger(__name__)

REASON_SECONDS = 0.1
"""Seconds to wait for the peer's own reason if the channel could not be opened."""


async def refuse(wire: Wire, error: LinkError) -> None:
    """Tell the peer why there is no link. An unproved one is not told who this end is."""
    if isinstance(error, PeerLost):
        return
    if not wire.may_say_who:
        error = discreet(error)
    with anyio.move_on_after(1, shield=True):  # a peer that does not read need not hear it
        try:
            await wire.send(refusal(error))
        except PeerLost:
            logger.debug("the peer was gone before it could be told: %s", error)


@dataclass(frozen=True)
class LinkRequest:
    """A client's request for a link.

    Attributes:
        connect: names the channel.
        attach: called with the server's token, to make a connection for heartbeats. Raises LinkError.
        prove: proves both ends, before anything else is said; None if this end has no key.
        may_ask_at_once: called once both ends are proved. Returns True to ask before the peer has said who it is.
        address: where the peer has accepted this connection. Data connections of the link go there, too.
    """

    connect: Connect
    attach: Callable[[str], Awaitable[None]]
    prove: Prove | None
    may_ask_at_once: Callable[[], bool]
    address: tuple[str, int]


class LinkHandshake:
    """A handshake over a connection.

    Args:
        check: called with the peer's hello as soon as it comes, before either end opens anything. It may raise.
        admit: called with the peer's hello once that is proved. It may raise, and may wait.
    """

    def __init__(
        self,
        handshake: Handshake,
        wire: Wire,
        channels: Channels,
        transport: Transport,
        check: Callable[[Hello], None],
        admit: Callable[[Hello], Awaitable[None]],
    ) -> None:
        self._handshake = handshake
        self._wire = wire
        self._channels = channels
        self._transport = transport
        self._check = check
        self._admit = admit

    async def converse(self, request: LinkRequest | None, first: Message | Unknown | None) -> None:
        """Exchange messages until each end knows the other and the name of the channel. The caller sets the deadline.

        Args:
            request: the request to make if this end is the client; None if it is the server.
            first: the message that a client has sent after its introduction, if any.

        Raises LinkError if there can be no link.
        """
        if request is not None:
            await self._wire.send(*self._handshake.start(request.connect, request.may_ask_at_once()))
        await self._converse(first)

    async def open(
        self, heartbeat_token: str, attach: Callable[[str], Awaitable[None]] | None, sockets: OpenSockets | None
    ) -> Ready:
        """Open both halves of the channel, and wait for heartbeats. The caller sets the deadline.

        Args:
            heartbeat_token: the token that a connection for heartbeats must present to this end; empty if it proves a key.
            attach: called at the client with the server's token, to make such a connection. Raises LinkError. With a key,
                it is called while the channel opens.
            sockets: opens the channel's data connections; None if it needs none.

        Returns:
            The peer's last message of the handshake.

        Raises:
            LinkError: if there can be no link.
            LLMException: if the channel cannot be opened.
        """
        handshake, agreed = self._handshake, self._handshake.agreed
        if agreed is None:
            raise ProtocolError("the two ends have not agreed")
        early = attach if handshake.is_proved else None  # a token would come only with the server's ready
        await self._open_channel(*agreed, early, sockets)
        if attach is not None and early is None:
            await attach((await self._hear_ready()).heartbeat_token)
        await self._wire.send(*handshake.opened(self._channels.current.mine, heartbeat_token))
        return await self._hear_ready()

    async def _hear_ready(self) -> Ready:
        """Return the peer's last message of the handshake, which may have come already."""
        while self._handshake.ready is None:
            self._handshake.receive(await self._wire.receive())
        return self._handshake.ready

    async def _converse(self, first: Message | Unknown | None) -> None:
        if self._handshake.peer is not None:  # a client whose hello came before there was a link
            self._wire.meet(self._handshake.peer)
            self._check(self._handshake.peer)
        while True:
            message, first = first or await self._wire.receive(), None
            answers = self._handshake.receive(message)
            if isinstance(message, Hello):
                self._check(message)
            agreed = self._handshake.agreed
            if agreed is not None:
                await self._admit(agreed[0])
                self._wire.trust()
            await self._wire.send(*answers)
            if agreed is not None:
                return

    async def _open_channel(
        self,
        peer: Hello,
        connect: Connect,
        attach: Callable[[str], Awaitable[None]] | None,
        sockets: OpenSockets | None,
    ) -> None:
        """Open our half, and attach heartbeats meanwhile. Stop waiting if the peer says that it cannot open its half."""
        theirs, mine = (
            Endpoint(**peer.endpoint.model_dump(include=set(EndpointInfo.model_fields))),
            self._transport.endpoint,
        )
        rank = 0 if self._handshake.side == "client" else 1
        ends = (mine, theirs) if rank == 0 else (theirs, mine)
        refused: LinkError | None = None
        failure: LinkError | None = None
        attached = Signal()
        async with anyio.create_task_group() as group:

            async def hear() -> None:
                nonlocal refused
                try:
                    self._handshake.receive(await self._wire.receive())
                except LinkError as error:
                    refused = error
                    group.cancel_scope.cancel()

            async def bring_heartbeats(attach: Callable[[str], Awaitable[None]]) -> None:
                nonlocal refused
                try:
                    await attach("")
                    attached.set()
                except LinkError as error:
                    refused = refused or error
                    group.cancel_scope.cancel()

            # A peer that cannot open its half says so at once. Our half would wait for it until the time is over.
            group.start_soon(hear)
            if attach is not None:
                group.start_soon(bring_heartbeats, attach)
            try:
                await self._channels.open(connect.channel, rank, ends, connect.timeout, sockets)
                if attach is not None:
                    await attached.wait()
            except LinkError as error:
                failure = error
                # the peer's own reason may be on its way, and tells more than ours
                with anyio.move_on_after(REASON_SECONDS):
                    await anyio.sleep_forever()
            group.cancel_scope.cancel()
        # raised out here: leaving the task group would wrap it in an ExceptionGroup
        reason = refused or failure
        if reason is not None:
            raise reason
