"""Heartbeats of all links of a cluster: which end brings the connection for them, and what their silence means.

A link is made only when both ends beat: the client connects again before it sends its last message of the handshake. With
a key it does so while the channel opens, because it needs no token of the server's.
Neither end's event loop reads that connection as a stream, so no beat is lost to it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import anyio
import anyio.abc

from aiodatadist._cluster.heartbeat_thread import CLOSED, FORGED, HeartbeatThread
from aiodatadist._concurrency.signal import Signal
from aiodatadist._config.trust import BOTH_ENDS, Key
from aiodatadist._link import Cause, FirstWords, Link, agree_on_key, connected
from aiodatadist._wire.frames import encode
from aiodatadist._wire.messages import AttachHeartbeats
from aiodatadist.errors import LinkError, ProtocolError

UNEXPECTED = "heartbeats came for a link that does not exist"
FIRST_BEAT_TIMEOUT = 10.0
"""Seconds that the server's event loop has to accept the heartbeats of a new link."""
EOF_PATIENCE = 1.0
"""Seconds from the end of a link's heartbeat connection to the end of the link, if no other end comes first."""


class Heartbeats:
    """The heartbeats of a cluster's links.

    A native thread sends and receives them (``HeartbeatThread``), because a busy event loop or a held interpreter must
    not look dead.

    Args:
        interval: seconds between two beats of this end.
        misses: the number of its own beats that the peer may miss; with the next one it is lost.
    """

    def __init__(self, interval: float, misses: int) -> None:
        self._thread = HeartbeatThread(interval)
        self._misses = misses
        self._expected: dict[str, Link] = {}
        self._watched: set[Link] = set()

    def close(self) -> None:
        self._thread.close()

    def check(self, link: Link) -> None:
        """Check that a new link has heartbeats. Raises LinkError if it has none, or they have ended already."""
        if link not in self._watched:
            raise LinkError(f"cluster {link.cluster_id} exchanges no heartbeats")

    # ---- the server's end ----

    def expect(self, link: Link) -> None:
        """Accept heartbeats for this link from now on: its client knows the link's name as soon as both ends are proved."""
        self._expected[_name_of(link)] = link

    def forget(self, link: Link) -> None:
        self._expected.pop(_name_of(link), None)

    def keys_of(self, names: Sequence[str]) -> list[Key]:
        """Return the keys of expected links with these names, to prove the connection for their heartbeats.

        Raises LinkError if no link has such a name.
        """
        proofs = [self._expected[name].proved for name in names if name in self._expected]
        keys = [proved.heartbeats for proved in proofs if proved is not None]
        if not keys:
            raise LinkError(UNEXPECTED)
        return keys

    def accept(self, name: str) -> Link:
        """Return the link for which a connection brings heartbeats. Raises LinkError if no link waits for them."""
        link = self._expected.pop(name, None)
        if link is None:
            raise LinkError(UNEXPECTED)
        return link

    # ---- the client's end ----

    async def attach(self, link: Link, address: tuple[str, int], token: str, group: anyio.abc.TaskGroup) -> None:
        """Connect again to the address of a link's connection, and exchange heartbeats in a task of the group.

        Returns when the server's first beat has come, so every link that is made is watched.

        Args:
            token: what the connection must present if the link has no key.

        Raises:
            LinkError: if the server did not accept the connection.
        """
        first = encode(AttachHeartbeats(token=token)) if link.proved is None else b""
        try:
            sock = await connected(*address, first)
        except OSError as error:
            raise LinkError(f"the peer accepted no connection for heartbeats: {error}") from error
        keys: tuple[bytes, bytes] | None = None
        if link.proved is not None:
            try:
                words = FirstWords(sock)
                proof = [link.proved.heartbeats]
                _, session = await agree_on_key(words, words.say, words.hear, proof, BOTH_ENDS, "heartbeats")
                keys = session.beats("client")
            except BaseException:
                sock.close()
                raise
        await group.start(self.beat, link, sock, FIRST_BEAT_TIMEOUT, keys)

    # ---- both ----

    async def beat(
        self,
        link: Link,
        sock: socket.socket,
        patience: float = 0.0,
        keys: tuple[bytes, bytes] | None = None,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Exchange heartbeats until the link has ended; the task counts as started when the peer's first beat has come.

        Args:
            sock: a connected socket; it belongs to the thread from here on, whatever is raised.
            patience: additional seconds for the peer's first beat.
            keys: seal this end's beats, and check the peer's; None if the link has no key.

        Raises:
            LinkError: if none came, or none can be exchanged.
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
            silence = link.session.heartbeat * (self._misses + 1)
            link.session.wire.allow_silence(silence)
            watch = self._thread.watch(sock, silence, lost, begun, patience, link.session.wire.quiet_seconds, keys)
        except (OSError, RuntimeError) as error:  # out of descriptors or threads, or the end of the engine
            raise LinkError(f"no heartbeats can be exchanged: {error}") from error
        self._watched.add(link)
        link.call_when_closed(news.wake)
        try:
            while not (has_begun or why or link.is_closed):
                await news.wait()
            has_begun &= not why  # lost in the same round: nothing was watched
            if has_begun:
                task_status.started()
                while not (why or link.is_closed):
                    await news.wait()
                await _let_it_tell(link, why)
            if why == FORGED and not link.is_closed:
                link.session.break_off(ProtocolError(f"cluster {link.cluster_id}: {why}"))
            elif why and not link.is_closed:
                link.session.lost(why, None if why == CLOSED else Cause.HEARTBEATS_MISSED)
        finally:
            self._watched.discard(link)
            watch.stop()
        if why and not has_begun:
            raise LinkError(f"the peer's heartbeats never began: {why}")


def _name_of(link: Link) -> str:
    return link.heartbeat_token if link.proved is None else link.proved.heartbeats.name


async def _let_it_tell(link: Link, why: str) -> None:
    """Give a peer that closed its heartbeats time to say why.

    It died, or parted: the connection for messages knows which.
    """
    if why == CLOSED:
        with anyio.move_on_after(EOF_PATIENCE):
            await link.wait_closed()
