"""A client that came to a listener, until it is known. Before that it is not a link, and affects no decision about links."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from aiodatadist._cluster.client_slots import ClientSlots
from aiodatadist._cluster.half_links import HalfLinks
from aiodatadist._link import FirstWords
from aiodatadist._values.addresses import host_port
from aiodatadist._wire.frames import Unknown
from aiodatadist._wire.handshake import Handshake
from aiodatadist._wire.messages import AttachHeartbeats, Hello, Message
from aiodatadist.errors import LinkError, LinkTimeout

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

Introduced = AttachHeartbeats | tuple[Handshake, Message | Unknown]
"""A client's request: to bring heartbeats, or a link, with its handshake and its next message."""


class PendingClient:
    """A client that has not identified itself yet. Its time limit is short, and it makes room if many others come.

    Attributes:
        host: its address.
        who: its address, its port and the cluster that it claims to be.
        scope: cancelled when it must leave.
        step: what it must do next, in words.
    """

    def __init__(self, sock: socket.socket, slots: ClientSlots) -> None:
        self.host, self.who = _place(sock)
        self.scope = anyio.CancelScope()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(CLIENT_TIMEOUT, self._look_once_more)
        self.step = "identify itself"
        self._limit = f"within {CLIENT_TIMEOUT:g} s"
        self._words = FirstWords(sock)
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
    async def room_in(self, half_links: HalfLinks, gave_up: Callable[[], LinkError]) -> AsyncIterator[None]:
        """Wait for room for the link of a client that is known, and keep it inside this context.

        Until then the client may have to make room for others, as an unknown one does, so few clients wait.

        Args:
            gave_up: returns the error for the client if the wait is cancelled.
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
                self._words.refuse(gave_up())
            raise

    def has_proved(self) -> None:
        """Note that the client proved what it is. It no longer counts to the rate of its address."""
        if self._slot is not None:
            self._slots.proved(self._slot)

    async def _wait_for_turn(self) -> None:
        """Wait while too many clients of the same address have come, and proved nothing."""
        if self._slot is not None and (seconds := self._slots.wait(self._slot)) > 0:
            await anyio.sleep(seconds)

    async def introduce(
        self, handshake: Callable[[int | None], Awaitable[Handshake]], gave_up: Callable[[], LinkError]
    ) -> Introduced:
        """Receive the client's identity, and its proof.

        Args:
            handshake: makes a handshake for the cluster that the client claims to be; for None if it names none.
            gave_up: returns the error for the client if this is cancelled.

        Raises:
            LinkError: if it gets no link; it was told the reason.
        """
        try:
            await self._wait_for_turn()
            message = await self._words.hear()
            if isinstance(message, AttachHeartbeats):
                return message
            claimed = message.cluster_id if isinstance(message, Hello) else None
            if claimed is not None:
                self.who += f", cluster {claimed}"
            made = await handshake(claimed)
            while made.is_introducing:
                answers = made.receive(message)
                if made.proved is not None:
                    self.has_proved()
                    self._has_longer("ask for a link", ASKING_TIMEOUT)  # and makes room if many others come
                await self._words.say(*answers)
                message = await self._words.hear()
        except LinkError as error:
            self._words.refuse(error)
            raise
        except asyncio.CancelledError:
            self._words.refuse(gave_up())
            raise
        return made, message

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
