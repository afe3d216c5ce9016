"""A client that came to a listener, until it is known. Before that it is not a link, and affects no decision about links."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio

from aiodatadist._cluster.client_slots import ClientSlots
from aiodatadist._cluster.half_links import HalfLinks
from aiodatadist._config.certificates import Certificates
from aiodatadist._link import AwaitedConnections, Connection, FirstWords
from aiodatadist._values.addresses import host_port
from aiodatadist._wire.frames import Unknown
from aiodatadist._wire.handshake import Handshake
from aiodatadist._wire.key_proof import KeyProof, SessionKeys
from aiodatadist._wire.messages import AttachData, AttachHeartbeats, Hello, Hello1, Message
from aiodatadist._wire.proved import Proved, Vouch
from aiodatadist._wire.tls_pipe import FIRST_BYTE, TlsPipe
from aiodatadist.errors import LinkError, LinkTimeout, ProtocolError

HANDSHAKE_TIMEOUT = 60.0
"""Seconds from when a client asks for a link until the link is made."""
ASKING_TIMEOUT = 5.0
"""Seconds from a client's proof until it asks for a link."""
CLIENT_TIMEOUT = 5.0
"""Seconds that a client has to identify itself, and to prove its identity if there is a key."""
LAST_LOOK = 0.2
"""Further seconds until the client must leave: a busy event loop first reads what came in the meantime."""
MADE_ROOM = "before it had to make room for others"
MAPPED_IPV4 = "::ffff:"
"""The prefix of an IPv4 client's address on a socket of both families."""


class Reception(Protocol):
    """The properties of a listener that its clients need."""

    @property
    def protocol(self) -> int:
        """The major version that it speaks."""
        ...

    async def certificates(self) -> Certificates:
        """Return the certificates for a client that begins TLS. Raises LinkError if there are none that can be used."""
        ...

    async def proof(self, first: Hello1 | None) -> KeyProof | None:
        """Return the server's end of a proof; None if nothing is to be proved.

        Args:
            first: the client's first message; None if it does not begin a proof.

        Raises LinkError if there is no key for it.
        """
        ...

    def awaited(self, asked: AttachData) -> AwaitedConnections:
        """Return the channel for which a data connection comes. Raises LinkError if none waits for it."""
        ...

    def handshake(self, peer: int | None, vouch: Vouch | None) -> Handshake:
        """Return a handshake for a client that says it is the cluster ``peer``; None if it does not say that.

        Args:
            vouch: says what the client's proof is worth; None if it has proved nothing.
        """
        ...

    def gave_up(self) -> LinkError:
        """Return the error for a client that is no longer waited for."""
        ...


@dataclass(frozen=True)
class BringsLink:
    """A client that wants a link. ``first`` is its next message."""

    handshake: Handshake
    first: Message | Unknown


@dataclass(frozen=True)
class BringsHeartbeats:
    """A client that brings heartbeats for the link of this name. ``keys`` seal ours and check theirs."""

    link: str
    keys: tuple[bytes, bytes] | None


@dataclass(frozen=True)
class BringsData:
    """A client that brings a connection for bytes of a channel that waits for it."""

    channel: AwaitedConnections
    asked: AttachData
    answered: AttachData

    def pass_on(self, sock: socket.socket) -> None:
        """Pass the client's socket to the channel, which owns it from here on."""
        self.channel.take(sock, self.asked, self.answered)


Introduced = BringsLink | BringsHeartbeats | BringsData
"""A client's request."""


class PendingClient:
    """A client that has not identified itself yet. Its time limit is short, and it makes room if many others come.

    Attributes:
        host: its address.
        who: its address, its port and the cluster that it claims to be.
        scope: cancelled when it must leave.
        step: what it must do next, in words.
    """

    def __init__(self, sock: socket.socket, slots: ClientSlots, reception: Reception) -> None:
        self.host, self.who = _place(sock)
        self.scope = anyio.CancelScope()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(CLIENT_TIMEOUT, self._look_once_more)
        self.step = "identify itself"
        self._limit = f"within {CLIENT_TIMEOUT:g} s"
        self._reception = reception
        self._words = FirstWords(sock, reception.protocol)
        self._slots = slots
        self._slot: int | None = slots.enter(self.host, self._give_way)

    def _look_once_more(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LAST_LOOK, self._leave)

    def _give_way(self) -> None:
        self._limit = MADE_ROOM
        # In a callback of the loop: inside a task, anyio would describe that task in words, which costs most here.
        asyncio.get_running_loop().call_soon(self._leave)

    def _leave(self) -> None:
        if self._slot is not None:
            self.scope.cancel()

    def is_known(self) -> None:
        """Note that it has room for its link, or heartbeats, or is gone: it no longer takes room from other clients."""
        self._timer.cancel()
        slot, self._slot = self._slot, None
        if slot is not None:
            self._slots.leave(slot)

    def _has_longer(self, step: str, seconds: float) -> None:
        """Give the client more time for its next step."""
        self._timer.cancel()
        self.step, self._limit = step, f"within {seconds:g} s"
        self.scope.deadline = anyio.current_time() + seconds

    @asynccontextmanager
    async def room_in(self, half_links: HalfLinks) -> AsyncIterator[None]:
        """Wait for room for the link of a client that is known, and keep it inside this context.

        Until then the client may have to make room for others, as an unknown one does, so few clients wait.
        """

        def give_way() -> None:
            self._limit = f"{MADE_ROOM}: {half_links.words}"
            self.scope.cancel()

        self._has_longer(f"find room for its link ({half_links.words})", HANDSHAKE_TIMEOUT)
        try:
            async with half_links.room_for(self.host, give_way):
                self.has_proved()
                self.is_known()
                self.step = "open its channel"
                yield
        except asyncio.CancelledError:
            if self._slot is not None:  # it was waiting; otherwise its link has told it
                self._words.refuse(self._reception.gave_up())
            raise

    def has_proved(self) -> None:
        """Note that the client proved what it is. It no longer counts towards the rate of its address."""
        if self._slot is not None:
            self._slots.proved(self._slot)

    async def _wait_for_turn(self) -> None:
        """Wait while too many clients of the same address have come, and proved nothing."""
        if self._slot is not None and (seconds := self._slots.wait(self._slot)) > 0:
            await anyio.sleep(seconds)

    async def introduce(self) -> Introduced:
        """Receive the client's proof, if there is a key, and its identity.

        Raises:
            LinkError: if it gets no link; it was told the reason.
        """
        try:
            await self._wait_for_turn()
            return await self._introduce()
        except LinkError as error:
            self._words.refuse(error)
            raise
        except asyncio.CancelledError:
            self._words.refuse(self._reception.gave_up())
            raise

    async def _introduce(self) -> Introduced:
        if await self._words.first_byte() == FIRST_BYTE:
            return await self._introduce_over_tls()
        message = await self._words.hear()
        if isinstance(message, AttachData):
            return await self._attach_data(message)
        proof = await self._reception.proof(message if isinstance(message, Hello1) else None)
        if proof is None:
            if isinstance(message, AttachHeartbeats):
                return BringsHeartbeats(message.token, None)
            return await self._meet(message, None)
        keys = await self._welcome(proof, message)
        if isinstance(message, Hello1) and message.opens == "heartbeats":
            return BringsHeartbeats(proof.credential, keys.beats("server"))
        message = await self._words.hear()  # raises unless its seal is right
        proof.sealed()
        self._proves_itself()
        name, key_hash = proof.credential, proof.key_hash  # the link keeps nothing else of the proof
        return await self._meet(message, lambda *_: Proved(name, keys.heartbeats, key_hash=key_hash))

    async def _attach_data(self, asked: AttachData) -> BringsData:
        """Answer a client that brings a data connection. Its first message is its proof."""
        channel = self._reception.awaited(asked)
        answer = channel.answer(asked)
        self.has_proved()
        await self._words.say(answer)
        return BringsData(channel, asked, answer)

    async def _introduce_over_tls(self) -> Introduced:
        pipe = TlsPipe("server", await self._reception.certificates())
        await self._words.start_tls(pipe)
        self._proves_itself()
        return await self._meet(await self._words.hear(), pipe.vouch)

    def _proves_itself(self) -> None:
        self.has_proved()
        self._has_longer("ask for a link", ASKING_TIMEOUT)  # and makes room if many others come

    async def _meet(self, message: Message | Unknown, vouch: Vouch | None) -> BringsLink:
        """Answer a client's hello, and hear what it asks for."""
        claimed = message.cluster_id if isinstance(message, Hello) else None
        if claimed is not None:
            self.who += f", cluster {claimed}"
        handshake = self._reception.handshake(claimed, vouch)
        await self._words.say(*handshake.receive(message))
        return BringsLink(handshake, await self._words.hear())

    async def _welcome(self, proof: KeyProof, message: Message | Unknown) -> SessionKeys:
        """Answer a client's first message, and seal everything from then on."""
        welcome = proof.receive(message)
        if welcome is None or proof.keys is None:
            raise ProtocolError("the client proved no key")
        await self._words.say(welcome)
        self._words.seal_with(*proof.keys.frames("server"))
        return proof.keys

    async def connection(self) -> Connection:
        """Make a stream of the client's socket, which belongs to it from here on, even if this raises."""
        return await self._words.connection()

    def too_late(self) -> LinkTimeout:
        """Return the error with which it had to leave."""
        return LinkTimeout(f"the client did not {self.step} {self._limit}")


def _place(sock: socket.socket) -> tuple[str, str]:
    """Return a client's address, without and with its port; it may be gone already."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "", "gone already"
    host = str(host).removeprefix(MAPPED_IPV4)
    return host, host_port(host, port)
