"""Heartbeats of all links of a cluster: who brings the connection for them, and what their silence means."""

from __future__ import annotations

import os
import socket

import anyio
import anyio.abc

from aiodatadist.errors import LinkError
from aiodatadist.link import Link, Wire
from aiodatadist.pulse import CLOSED, Pulse
from aiodatadist.wire.messages import Pulse as PulseMessage

FIRST_BEAT = 10.0
"""Seconds in which the event loops of both ends have to set the heartbeats of a new link going."""
EOF_PATIENCE = 1.0
"""Seconds between the end of a link's heartbeat connection and, if that goes on, the end of the link."""


class Heartbeats:
    """The beating itself is a thread's business (``pulse``): a busy event loop must not look dead.

    Args:
        interval: seconds between two beats of ours.
        misses: of the peer's, before it is lost with the next.
    """

    def __init__(self, interval: float, misses: int) -> None:
        self._pulse = Pulse(interval)
        self._misses = misses
        self._expected: dict[str, Link] = {}

    def close(self) -> None:
        self._pulse.close()

    # ---- the server's end ----

    def expect(self, link: Link) -> None:
        """A client may bring them from now on: it knows the link's token as soon as the handshake says it."""
        self._expected[link.pulse] = link

    def forget(self, link: Link) -> None:
        self._expected.pop(link.pulse, None)

    def claim(self, message: PulseMessage) -> Link:
        """The link that a connection brings heartbeats for. Raises LinkError: there is none that waits for them."""
        link = self._expected.pop(message.token, None)
        if link is None:
            raise LinkError("heartbeats came for a link that there is not")
        return link

    async def insist(self, link: Link) -> None:
        """The link is made: without heartbeats it is lost."""
        with anyio.move_on_after(FIRST_BEAT):
            await link.wait_closed()
        if self._expected.pop(link.pulse, None) is not None:
            link.lost("it never began to send heartbeats")

    # ---- the client's end ----

    @staticmethod
    async def bring(stream: anyio.abc.SocketStream, token: str) -> None:
        """Say whose they are, and wait for the server's first: a link that is made is watched.

        Raises:
            LinkError: it took none. The connection is closed.
        """
        try:
            await Wire(stream).send(PulseMessage(token=token))
            await stream.receive(1)
        except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
            await anyio.aclose_forcefully(stream)
            raise LinkError(f"the peer took no connection for heartbeats: {error!r}") from error
        except BaseException:
            await anyio.aclose_forcefully(stream)
            raise

    # ---- both ----

    async def beat(self, link: Link, stream: anyio.abc.SocketStream, patience: float = 0.0) -> None:
        """Exchange them until the link is over, then close the connection. ``patience``: seconds more for the first."""
        raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
        silence = link.heartbeat * (self._misses + 1)
        lost, why = anyio.Event(), ""

        def tell(reason: str) -> None:
            nonlocal why
            why = reason
            lost.set()

        try:
            watch = self._pulse.watch(socket.socket(fileno=os.dup(raw.fileno())), silence, tell, patience)
        except (OSError, RuntimeError) as error:  # out of descriptors or threads, or the end of the engine
            link.lost(f"no heartbeats can be exchanged: {error}")
            await anyio.aclose_forcefully(stream)
            return
        try:
            async with stream, anyio.create_task_group() as group:
                group.start_soon(_until_closed, link, group.cancel_scope)
                await lost.wait()
                if why == CLOSED:  # the peer died, or it parted: the connection for messages will tell
                    with anyio.move_on_after(EOF_PATIENCE):
                        await link.wait_closed()
                link.lost(why)
        finally:
            watch.stop()


async def _until_closed(link: Link, scope: anyio.CancelScope) -> None:
    await link.wait_closed()
    scope.cancel()
