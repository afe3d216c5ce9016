"""The event loop's side of heartbeats: it hands connections to a native thread, and hears what the thread finds.

TCP does not notice a stopped peer. A process whose event loop is busy, or whose interpreter is held inside a call of an
extension, must not look dead. So a thread that needs no interpreter (``native/heartbeats.h``) sends and receives the
beats. It reports silence, and the event loop decides what that means.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable

from aiodatadist._concurrency import forks
from aiodatadist._native.library import Handle, ffi, ring

CLOSED = "its heartbeat connection was closed"
FORGED = "a heartbeat has a wrong seal: it was changed or added on its way"
_CLOSED_UNREAD = {errno.ECONNRESET, errno.EPIPE}
"""Errors of the kernel if the peer closed the connection before it had read the last beats."""


class HeartbeatThread:
    """The heartbeats of one LLMDataDist, called on its event loop. The thread starts with the first watch.

    Args:
        interval: seconds between two beats of this end.

    Raises:
        ValueError: if ``interval`` is not positive.
    """

    def __init__(self, interval: float) -> None:
        if not interval > 0:
            raise ValueError(f"interval is {interval}: must be more than 0 s")
        self.closed = False
        self._interval = interval
        self._native: Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._generation = forks.generation
        self._watches: dict[int, HeartbeatWatch] = {}
        self._news = ffi.new("heartbeats_news *")

    def watch(
        self,
        sock: socket.socket,
        silence: float,
        lost: Callable[[str], object],
        begun: Callable[[], object] | None = None,
        patience: float = 0.0,
        elsewhere: Callable[[], float | None] = lambda: None,
        keys: tuple[bytes, bytes] | None = None,
    ) -> HeartbeatWatch:
        """Beat on a connected stream socket and listen to the peer's beats.

        The caller must not use the socket from now on, even if this call fails, and no event loop may read from it any
        longer.

        Args:
            silence: seconds without a beat from the peer after which it is lost; must be well above the peer's
                interval.
            lost: called at most once, on the running event loop, with the reason in plain words.
            begun: called there, too, when the peer's first beat has come.
            patience: additional seconds for that beat, because the peer's event loop must accept the connection first.
            elsewhere: called when the peer is silent. Returns the seconds since it gave a sign of life on another
                connection, or None.
            keys: seal this end's beats, and check the peer's, of 32 bytes each; None if beats are not sealed.

        Raises:
            RuntimeError: if this is closed, or no event loop is running.
            ValueError: if ``silence`` is not positive.
            OSError: if there are no file descriptors, memory or threads left, or the socket was closed already.
        """
        with sock:
            if self.closed:
                raise RuntimeError("the heartbeats have ended: this HeartbeatThread is closed")
            if not silence > 0:
                raise ValueError(f"silence is {silence}: must be more than 0 s")
            native = self._open()
            if sock.family in {socket.AF_INET, socket.AF_INET6}:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a beat waits for no acknowledgement
            line = ffi.new("uint64_t *")
            times = _nanoseconds(silence), _nanoseconds(patience)
            both = ffi.NULL if keys is None else ffi.from_buffer("uint8_t[]", b"".join(keys))
            _check(ring.heartbeats_watch(native, sock.fileno(), *times, both, line))
            # the thread owns the descriptor now, and the end of this context must not close it
            sock.detach()
        watch = self._watches[line[0]] = HeartbeatWatch(self, line[0], silence, lost, begun, elsewhere)
        return watch

    def _open(self) -> Handle:
        if self._native is not None:
            return self._native
        loop, out = asyncio.get_running_loop(), ffi.new("heartbeats **")
        _check(ring.heartbeats_open(_nanoseconds(self._interval), out))
        try:
            _check(ring.heartbeats_start(out[0]))
            loop.add_reader(ring.heartbeats_fd(out[0]), self._hear)
        except BaseException:
            ring.heartbeats_close(out[0])
            raise
        self._loop, self._native = loop, out[0]
        return self._native

    def _hear(self) -> None:
        """Pass on what the thread found. A callback may stop watches, or close all of it."""
        while self._native is not None and ring.heartbeats_reap(self._native, self._news):
            if (watch := self._watches.get(self._news.line)) is not None:
                watch._hear(self._news)

    def _excuse(self, line: int, ago: float) -> bool:
        """Count a sign of life that the peer gave elsewhere. Return False if it does not count."""
        return self._native is not None and bool(ring.heartbeats_excuse(self._native, line, _nanoseconds(ago)))

    def _let_go(self, line: int) -> None:
        if self._watches.pop(line, None) is not None and self._native is not None:
            ring.heartbeats_stop(self._native, line)

    def close(self) -> None:
        """Stop all watches, end the thread and close all sockets. Waits for the thread, for microseconds. Idempotent."""
        self.closed = True
        native, self._native = self._native, None
        self._watches.clear()
        if native is None:
            return
        if self._loop is not None and self._generation == forks.generation:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(ring.heartbeats_fd(native))
        ring.heartbeats_close(native)


class HeartbeatWatch:
    """A peer that is being watched. Used only on its event loop."""

    def __init__(
        self,
        heartbeats: HeartbeatThread,
        line: int,
        silence: float,
        lost: Callable[[str], object],
        begun: Callable[[], object] | None,
        elsewhere: Callable[[], float | None],
    ) -> None:
        self._heartbeats = heartbeats
        self._line = line
        self._silence = silence
        self._elsewhere = elsewhere
        self._lost = lost
        self._begun = begun

    def stop(self) -> None:
        """Close the socket, and call neither ``lost`` nor ``begun`` from now on. Idempotent."""
        self._heartbeats._let_go(self._line)

    def _hear(self, news: Handle) -> None:
        if news.kind == ring.HEARTBEATS_BEGUN:
            if self._begun is not None:
                self._begun()
            return
        if news.kind == ring.HEARTBEATS_SILENT and self._is_excused():
            return
        reason = self._reason(news)
        self.stop()
        self._lost(reason)

    def _is_excused(self) -> bool:
        ago = self._elsewhere()
        return ago is not None and ago < self._silence and self._heartbeats._excuse(self._line, ago)

    @staticmethod
    def _reason(news: Handle) -> str:
        if news.kind == ring.HEARTBEATS_SILENT:
            return f"no heartbeat for {news.silent_ns / 1e9:.2f} s"
        if news.kind == ring.HEARTBEATS_FORGED:
            return FORGED
        if news.kind == ring.HEARTBEATS_BROKEN and news.code not in _CLOSED_UNREAD:
            return f"its heartbeat connection failed: {os.strerror(news.code)}"
        return CLOSED


def _nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 1) if seconds else 0


def _check(status: int) -> None:
    if status:
        raise OSError(-status, os.strerror(-status))
