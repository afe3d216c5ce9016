"""Heartbeats of all links of a cluster: who brings the connection for them, and what their silence means.

A link is made only when both ends beat: the client connects once more before it says its last word of the handshake. Neither
end's event loop reads that connection as a stream, so that no beat is lost to it.
"""

from __future__ import annotations

import socket

import anyio
import anyio.abc

from aiodatadist.cluster.heartbeat_thread import CLOSED, HeartbeatThread
from aiodatadist.concurrency.signal import Signal
from aiodatadist.errors import LinkError
from aiodatadist.link import Cause, Link, connected
from aiodatadist.wire.frames import encode
from aiodatadist.wire.messages import AttachHeartbeats

FIRST_BEAT_TIMEOUT = 10.0
"""Seconds that the server's event loop has for taking up the heartbeats of a new link."""
EOF_PATIENCE = 1.0
"""Seconds between the end of a link's heartbeat connection and, if that goes on, the end of the link."""


class Heartbeats:
    """A native thread sends and receives them (``HeartbeatThread``): a busy event loop or a held interpreter must not look
    dead.

    Args:
        interval: seconds between two beats of this end.
        misses: of the peer's, before it is lost with the next.
    """

    def __init__(self, interval: float, misses: int) -> None:
        self._thread = HeartbeatThread(interval)
        self._misses = misses
        self._expected: dict[str, Link] = {}
        self._watched: set[Link] = set()

    def close(self) -> None:
        self._thread.close()

    def check(self, link: Link) -> None:
        """Before it counts as made. Raises LinkError: it has no heartbeats, or they ended already."""
        if link not in self._watched:
            raise LinkError(f"cluster {link.cluster_id} exchanges no heartbeats")

    # ---- the server's end ----

    def expect(self, link: Link) -> None:
        """A client may bring them from now on: it knows the link's token as soon as the handshake says it."""
        self._expected[link.heartbeat_token] = link

    def forget(self, link: Link) -> None:
        self._expected.pop(link.heartbeat_token, None)

    def accept(self, message: AttachHeartbeats) -> Link:
        """The link that a connection brings heartbeats for. Raises LinkError: there is none that waits for them."""
        link = self._expected.pop(message.token, None)
        if link is None:
            raise LinkError("heartbeats came for a link that there is not")
        return link

    # ---- the client's end ----

    async def attach(self, link: Link, address: tuple[str, int], token: str, group: anyio.abc.TaskGroup) -> None:
        """Connect once more to where a link's connection goes, and exchange heartbeats in a task of the group.

        Returns when the server's first came: a link that is made is watched.

        Raises:
            LinkError: the server took no connection for them.
        """
        try:
            sock = await connected(*address, encode(AttachHeartbeats(token=token)))
        except OSError as error:
            raise LinkError(f"the peer took no connection for heartbeats: {error}") from error
        await group.start(self.beat, link, sock, FIRST_BEAT_TIMEOUT)

    # ---- both ----

    async def beat(
        self,
        link: Link,
        sock: socket.socket,
        patience: float = 0.0,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Exchange them until the link is over; started when the peer's first came.

        Args:
            sock: connected, and the thread's from here on, whatever is raised.
            patience: seconds more for the peer's first.

        Raises:
            LinkError: none came, or none can be exchanged.
        """
        news, why, has_begun = Signal(), "", False

        def lost(reason: str) -> None:
            nonlocal why
            why = reason
            self._watched.discard(link)
            news.wake()

        def begun() -> None:
            nonlocal has_begun
            has_begun = True
            news.wake()

        try:
            silence = link.heartbeat * (self._misses + 1)
            watch = self._thread.watch(sock, silence, lost, begun, patience, link.quiet_seconds)
        except (OSError, RuntimeError) as error:  # out of descriptors or threads, or the end of the engine
            raise LinkError(f"no heartbeats can be exchanged: {error}") from error
        self._watched.add(link)
        link.call_when_closed(news.wake)
        try:
            while not (has_begun or why or link.is_closed):
                await news.wait()
            has_begun &= not why
            if has_begun:
                task_status.started()
                while not (why or link.is_closed):
                    await news.wait()
                await _let_it_tell(link, why)
            if why and not link.is_closed:
                link.lost(why, None if why == CLOSED else Cause.HEARTBEATS_MISSED)
        finally:
            self._watched.discard(link)
            watch.stop()
        if why and not has_begun:
            raise LinkError(f"the peer's heartbeats never began: {why}")


async def _let_it_tell(link: Link, why: str) -> None:
    """The peer that closed its connection died, or parted: that for messages knows which."""
    if why == CLOSED:
        with anyio.move_on_after(EOF_PATIENCE):
            await link.wait_closed()
