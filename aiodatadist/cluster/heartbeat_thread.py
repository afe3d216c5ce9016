"""Whether peers are alive: both ends of a link beat on a connection of their own, from a thread of their own.

TCP does not notice a peer that is stopped, and a caller that keeps its event loop busy must not look dead. (One that keeps
the interpreter's lock for longer than the peer's patience, inside a call of an extension, does look dead.)
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import math
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from aiodatadist.concurrency.threads import DaemonThread

logger = logging.getLogger(__name__)

BEAT = b"\0"
READ = 4096
"""Bytes that are read of one connection at a time: thousands of beats."""
LONGEST_SLEEP = 3600.0
"""Seconds. epoll takes no more than some weeks."""
JOIN_SECONDS = 1.0
"""Seconds that the thread has for its end. It needs some milliseconds."""
CLOSED = "its heartbeat connection was closed"

_libc = ctypes.PyDLL(None, use_errno=True)
"""Calls that keep the interpreter's lock: they do not block, and take microseconds. The socket module's calls give it up, and
beside a busy event loop each may wait 5 ms for it: seconds for a round of 512 links, and these would look dead."""
_libc.send.argtypes = _libc.recv.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_libc.send.restype = _libc.recv.restype = ctypes.c_ssize_t


class HeartbeatThread:
    """The heartbeats of one LLMDataDist. All of it is called on the event loop.

    The thread, which starts with the first watch, runs ``_HeartbeatLoop``. The two share nothing but its queue of connections
    to take up and to let go. A socket is the thread's from watch() on: no other code closes a descriptor that the thread is
    about to use.
    """

    def __init__(self, interval: float) -> None:
        """``interval``: seconds between two beats of this end. Raises ValueError if it is not positive."""
        if not interval > 0:
            raise ValueError(f"interval is {interval}: it has to be more than 0 s")
        self._interval = interval
        self._loop: _HeartbeatLoop | None = None
        self.closed = False

    def watch(
        self,
        sock: socket.socket,
        silence: float,
        lost: Callable[[str], object],
        begun: Callable[[], object] | None = None,
        patience: float = 0.0,
    ) -> HeartbeatWatch:
        """Beat on a connected stream socket and listen to the peer's beats. The socket is ours now, whatever is raised: no
        event loop may read from it any more.

        Args:
            silence: seconds without a byte of the peer after which it is lost. Has to be well above the peer's interval.
            lost: called at most once, on the running event loop, with the reason in plain words. The socket is closed then.
            begun: called there, too, when the peer's first byte came.
            patience: so many seconds more for that: the peer's event loop has to take the connection up.

        Raises:
            RuntimeError: this is closed, or no event loop is running.
            ValueError: ``silence`` is not positive.
            OSError: out of file descriptors.
        """
        try:
            if self.closed:
                raise RuntimeError("the heartbeats have ended: this HeartbeatThread is closed")
            if not silence > 0:
                raise ValueError(f"silence is {silence}: it has to be more than 0 s")
            watch = HeartbeatWatch(self, lost, begun)
            connection = _Connection(
                sock, sock.fileno(), silence, asyncio.get_running_loop(), watch._deliver, monotonic(), patience
            )
            watch._on = (self._post(connection), connection)
        except BaseException:
            sock.close()
            raise
        return watch

    def _post(self, connection: _Connection) -> _HeartbeatLoop:
        """To the thread, which is a new one at first and after a failure."""
        if self._loop is None or not self._loop.post(connection, watched=True):
            self._loop = _HeartbeatLoop(self._interval)
            self._loop.post(connection, watched=True)
        return self._loop

    def close(self) -> None:
        """Stop all watches, end the thread and close all sockets. Waits for the thread, for milliseconds. Idempotent."""
        self.closed = True
        heartbeat_loop, self._loop = self._loop, None
        if heartbeat_loop is not None:
            heartbeat_loop.close()


class HeartbeatWatch:
    """A peer that is watched. Touched on its event loop only."""

    def __init__(
        self, heartbeats: HeartbeatThread, lost: Callable[[str], object], begun: Callable[[], object] | None
    ) -> None:
        self._owner = heartbeats
        self._lost: Callable[[str], object] | None = lost
        self._begun = begun
        self._on: tuple[_HeartbeatLoop, _Connection] | None = None

    def stop(self) -> None:
        """Never call ``lost`` or ``begun`` from now on; the thread closes the socket presently. Idempotent."""
        on, self._on, self._lost, self._begun = self._on, None, None, None
        if on is not None:
            heartbeat_loop, connection = on
            heartbeat_loop.post(connection, watched=False)

    def _deliver(self, reason: str | None) -> None:
        """What the thread has queued on the loop: why the peer is lost, or None for its first byte. By now the watch may have
        been stopped, or everything closed."""
        if reason is None:
            if self._begun is not None and not self._owner.closed:
                self._begun()
            return
        lost, self._on, self._lost = self._lost, None, None
        if lost is not None and not self._owner.closed:
            lost(reason)


@dataclass(eq=False, slots=True)
class _Connection:
    """A connection as the thread knows it. Made on the event loop, touched by the thread only."""

    sock: socket.socket
    fd: int
    silence: float
    loop: asyncio.AbstractEventLoop
    tell: Callable[[str | None], None]
    heard: float
    """When the last byte came, or from when on silence counts."""
    patience: float
    has_begun: bool = False


class _HeartbeatLoop:
    """The thread. post() and close() are called on the event loop, everything else by the thread.

    Shared under the lock: the queue (the thread empties it without: a deque's popleft is atomic), ``_ended`` and the life of
    the eventfd. What is posted before ``_ended`` is seen by the thread; afterwards nothing is posted, and nothing is written
    to a descriptor that is in other use by then. ``_closing`` is set by close() and only read elsewhere.
    """

    def __init__(self, interval: float) -> None:
        """Starts the thread. Raises OSError if there is no file descriptor left, RuntimeError if there is no thread."""
        self._closing = False
        self._interval = interval
        self._lock = threading.Lock()
        self._posted: deque[tuple[_Connection, bool]] = deque()
        self._ended = False
        self._connections: dict[int, _Connection] = {}
        self._buffer = ctypes.create_string_buffer(READ)
        self._next_beat = math.inf
        self._next_judgement = math.inf
        self._epoll = select.epoll()
        self._wake = -1
        try:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._wake, select.EPOLLIN)
            self._thread = DaemonThread(self._run, "aiodatadist heartbeats")
            self._thread.start()
        except BaseException:
            self._close_own()
            raise

    # ---- on the event loop ----

    def post(self, connection: _Connection, *, watched: bool) -> bool:
        """Have a connection taken up or let go. False if the thread has ended, and with it all connections."""
        with self._lock:
            if not self._ended:
                self._posted.append((connection, watched))
                os.eventfd_write(self._wake, 1)
            return not self._ended

    def close(self) -> None:
        with self._lock:
            self._closing = True
            if not self._ended:
                os.eventfd_write(self._wake, 1)
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            logger.error("the heartbeat thread did not end within %g s", JOIN_SECONDS)

    # ---- the thread ----

    def _run(self) -> None:
        reason = None
        try:
            self._beat_until_closing()
        except Exception as error:
            logger.exception("the heartbeat thread failed")
            reason = f"the heartbeat thread failed: {error!r}"
        finally:
            self._end(reason)

    def _beat_until_closing(self) -> None:
        """Poll, read everything that is there, and only then judge: a process that was stopped finds its peers' beats."""
        before = monotonic()
        while not self._closing:
            due = min(self._next_beat, self._next_judgement)
            events = self._epoll.poll(min(max(due - monotonic(), 0), LONGEST_SLEEP))
            now = monotonic()
            self._forgive(now - max(due, before), now)
            before = now
            for fd, _ in events:
                if fd == self._wake:
                    self._obey()
                elif fd in self._connections:
                    self._read(self._connections[fd])
            if now >= self._next_judgement:
                self._judge(now)
            if now >= self._next_beat:
                self._beat(now)

    def _forgive(self, late: float, now: float) -> None:
        """Do not hold against peers the time in which this thread did not run: they may have been stopped together with it.

        Measured by each one's silence, so that small hiccups, however many, do not put off the news of a peer that is dead.
        """
        for connection in self._connections.values() if late > 0 else ():
            if late > connection.silence / 2:
                connection.heard = max(connection.heard, now)

    def _obey(self) -> None:
        os.eventfd_read(self._wake)  # before the queue: what is posted from here on wakes the thread again
        while self._posted:
            connection, watched = self._posted.popleft()
            if watched:
                self._take_up(connection)
            else:
                self._let_go(connection)

    def _take_up(self, connection: _Connection) -> None:
        self._connections[connection.fd] = connection
        try:
            connection.sock.setblocking(False)
            if connection.sock.family in {socket.AF_INET, socket.AF_INET6}:
                # A beat waits for no acknowledgement.
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._epoll.register(connection.fd, select.EPOLLIN)
        except (OSError, ValueError):  # it came closed or broken
            self._lose(connection, CLOSED)
            return
        now = monotonic()
        connection.heard = now + connection.patience
        self._next_judgement = min(self._next_judgement, connection.heard + connection.silence)
        self._next_beat = min(self._next_beat, now + self._interval)
        self._send(connection)

    def _read(self, connection: _Connection) -> None:
        count = _libc.recv(connection.sock.fileno(), self._buffer, READ, socket.MSG_DONTWAIT)
        if count > 0:
            connection.heard = monotonic()  # not earlier: the thread may have been stopped right before it read
            if not connection.has_begun:
                connection.has_begun = True
                self._next_judgement = min(self._next_judgement, connection.heard + connection.silence)
                self._say(connection, None)
        elif count == 0:
            self._lose(connection, CLOSED)
        elif (error := ctypes.get_errno()) != errno.EAGAIN:
            self._lose(connection, f"its heartbeat connection failed: {os.strerror(error)}")

    def _judge(self, now: float) -> None:
        """Give up who has been silent for too long, at ``now`` and, as its buffer is empty, still."""
        for connection in list(self._connections.values()):
            if now - connection.heard >= connection.silence:
                self._read(connection)
                if now - connection.heard >= connection.silence:
                    self._lose(connection, f"no heartbeat for {now - connection.heard:.2f} s")
        self._next_judgement = min(
            (connection.heard + connection.silence for connection in self._connections.values()), default=math.inf
        )

    def _beat(self, now: float) -> None:
        for connection in self._connections.values():
            self._send(connection)
        self._next_beat = now + self._interval if self._connections else math.inf

    def _send(self, connection: _Connection) -> None:
        """A beat that cannot be sent is left out: the buffer of a stopped peer is full, and a broken socket tells _read."""
        _libc.send(connection.sock.fileno(), BEAT, 1, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _lose(self, connection: _Connection, reason: str) -> None:
        if self._let_go(connection):
            self._say(connection, reason)

    @staticmethod
    def _say(connection: _Connection, reason: str | None) -> None:
        try:
            connection.loop.call_soon_threadsafe(connection.tell, reason)
        except RuntimeError:  # the loop is closed: no link is left to be told
            logger.debug("a peer was %s after its event loop", "heard" if reason is None else f"lost ({reason})")

    def _let_go(self, connection: _Connection) -> bool:
        """False if it was let go before."""
        if self._connections.get(connection.fd) is not connection:
            return False
        del self._connections[connection.fd]
        with contextlib.suppress(OSError, ValueError):  # a forked child may keep the socket open, and so polled
            self._epoll.unregister(connection.fd)
        connection.sock.close()
        return True

    def _end(self, reason: str | None) -> None:
        """Close everything. With a reason, all peers are lost."""
        with self._lock:
            self._ended = True
            self._close_own()
        for connection in [
            *self._connections.values(),
            *(connection for connection, watched in self._posted if watched),
        ]:
            self._connections[connection.fd] = connection
            if reason is None:
                self._let_go(connection)
            else:
                self._lose(connection, reason)

    def _close_own(self) -> None:
        self._epoll.close()
        if self._wake >= 0:
            os.close(self._wake)
