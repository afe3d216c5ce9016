"""Heartbeats: who is alive is left alone, who is not is told once and in time, and the thread leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest

from aiodatadist._cluster.heartbeat_thread import HeartbeatThread
from aiodatadist._native.library import ring
from tests import children
from tests.conftest import open_files
from tests.stopwatch import lasting

pytestmark = pytest.mark.measures

INTERVAL = 0.02
SLACK = 0.4
"""Seconds by which something may come late on a busy machine."""
FOREVER = 30.0


class News:
    """A callback for ``watch()`` that collects the reasons of lost links."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._event = asyncio.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self._event.set()

    async def come(self) -> str:
        async with asyncio.timeout(20):
            await self._event.wait()
        return self.reasons[0]


@pytest.fixture
def heartbeats(no_leaks: None) -> Iterator[HeartbeatThread]:
    heartbeats = HeartbeatThread(INTERVAL)
    yield heartbeats
    heartbeats.close()


@pytest.fixture
def pair(no_leaks: None) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of TCP; the first one is for watch()."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def heartbeat_threads() -> int:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("heartbeats")


def spin(until: Callable[[], bool]) -> None:
    """Keep the event loop busy."""
    deadline = monotonic() + 5
    while not until():
        assert monotonic() < deadline


def spin_until_there_is_news(heartbeats: HeartbeatThread) -> None:
    """Wait until the thread has found something. The event loop has not heard it yet."""
    assert select.select([ring.heartbeats_fd(heartbeats._native)], [], [], 5)[0]


async def until_closed(sock: socket.socket) -> None:
    """Read until the other end has closed the connection, or reset it."""
    with contextlib.suppress(ConnectionResetError):
        while await asyncio.get_running_loop().sock_recv(sock, 4096):
            pass


async def count_beats(sock: socket.socket, number: int) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(20):
        for _ in range(number):
            assert len(await loop.sock_recv(sock, 1)) == 1


async def what_is_queued(heartbeats: HeartbeatThread) -> None:
    """Wait until the loop has heard all that the thread queued so far: news of a silent peer comes behind that."""
    ours, theirs = socket.socketpair()
    with theirs:
        silent = News()
        heartbeats.watch(ours, 0.01, silent)
        await silent.come()


# ---- alive ----


async def test_two_that_beat_live_even_if_their_loop_is_busy(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    news, other = News(), HeartbeatThread(INTERVAL)
    try:
        heartbeats.watch(pair[0], 0.15, news)
        other.watch(pair[1], 0.15, news)
        end = monotonic() + 0.2
        spin(lambda: monotonic() >= end)
        await asyncio.sleep(0.3)
        assert news.reasons == []
    finally:
        other.close()


async def test_the_first_beat_comes_at_once_and_the_others_at_intervals(
    no_leaks: None, pair: tuple[socket.socket, socket.socket]
) -> None:
    heartbeats = HeartbeatThread(0.1)
    try:
        with lasting(0.3 + SLACK, 0.29):
            with lasting(0.09):
                heartbeats.watch(pair[0], FOREVER, News())
                await count_beats(pair[1], 1)
            await count_beats(pair[1], 3)
    finally:
        heartbeats.close()


async def test_the_peers_first_byte_is_told_once_and_the_others_are_not(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    begun: list[threading.Thread] = []
    news, last, told = News(), News(), asyncio.Event()

    def begins() -> None:
        begun.append(threading.current_thread())
        told.set()

    heartbeats.watch(pair[0], 0.2, news, begins, patience=60)
    await count_beats(pair[1], 3)
    assert begun == []
    pair[1].send(b"x")
    async with asyncio.timeout(20):
        await told.wait()
    for _ in range(2):
        pair[1].send(b"x")
        await count_beats(pair[1], 2)  # each is read by the thread before its next beat
    assert begun == [threading.main_thread()]
    assert "no heartbeat" in await news.come()  # from its first byte on it has the time that all have
    silent = socket.socketpair()
    with silent[1]:
        heartbeats.watch(silent[0], 0.05, last, lambda: begun.append(threading.current_thread()))
        await last.come()
    assert len(begun) == 1


async def test_who_stopped_watching_is_not_told_of_the_first_byte(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    begun: list[int] = []
    pair[1].send(b"x")
    watch = heartbeats.watch(pair[0], FOREVER, News(), lambda: begun.append(1))
    spin_until_there_is_news(heartbeats)
    watch.stop()
    await what_is_queued(heartbeats)
    assert begun == []


async def test_any_bytes_are_a_beat_however_many(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    news, loop = News(), asyncio.get_running_loop()
    heartbeats.watch(pair[0], 0.25, news)
    await count_beats(pair[1], 6)
    await loop.sock_sendall(pair[1], b"anything " * 100_000)
    with lasting(0.25 + SLACK, 0.2):  # from then on, and not from the beginning
        await news.come()


async def test_a_peer_that_does_not_read_holds_up_no_other(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    full, _unread = pair
    full.setblocking(False)
    with pytest.raises(BlockingIOError):  # noqa: PT012
        while True:
            full.send(bytes(65536))
    news, others = News(), socket.socketpair()
    others[1].setblocking(False)
    with others[1]:
        heartbeats.watch(full, 0.2, news)
        heartbeats.watch(others[0], FOREVER, news)
        await count_beats(others[1], 5)
        assert news.reasons == []
        assert "no heartbeat" in await news.come()
        await count_beats(others[1], 5)


# ---- lost ----


async def test_a_silent_peer_is_told_when_its_time_is_over(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    news = News()
    with lasting(0.2 + SLACK, 0.2):
        heartbeats.watch(pair[0], 0.2, news)
        reason = await news.come()
    assert re.fullmatch(r"no heartbeat for 0\.[2-5]\d s", reason)
    await until_closed(pair[1])


async def test_a_silence_that_ended_before_the_loop_had_time_is_not_told(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    news = News()
    heartbeats.watch(pair[0], 0.2, news)
    spin_until_there_is_news(heartbeats)
    pair[1].send(b"x")
    with lasting(0.2 + SLACK, 0.15):  # from that byte on
        assert "no heartbeat" in await news.come()


async def test_a_peer_that_gives_signs_of_life_elsewhere_is_alive(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    news, ages = News(), [0.05, 0.0, 0.03, None]
    heartbeats.watch(pair[0], 0.1, news, elsewhere=lambda: ages.pop(0))
    with lasting(0.1 + 0.05 + 0.1 + 0.07 + SLACK, 0.3):
        assert "no heartbeat" in await news.come()
    assert ages == []


async def test_a_sign_of_life_that_is_older_than_the_silence_does_not_count(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    news = News()
    heartbeats.watch(pair[0], 0.1, news, elsewhere=lambda: 0.11)
    assert "no heartbeat" in await news.come()


async def test_each_has_its_own_time(heartbeats: HeartbeatThread) -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    order: list[int] = []
    done = News()
    for number, silence in ((2, 0.3), (0, 0.1), (1, 0.2)):
        heartbeats.watch(pairs[number][0], silence, lambda _, number=number: order.append(number))  # type: ignore[misc]
    last = socket.socketpair()
    heartbeats.watch(last[0], 0.4, done)
    await done.come()
    assert order == [0, 1, 2]
    for _, theirs in (*pairs, last):
        theirs.close()


async def test_the_end_of_a_connection_is_told_at_once(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    news = News()
    heartbeats.watch(pair[0], FOREVER, news)
    await count_beats(pair[1], 1)
    pair[1].shutdown(socket.SHUT_WR)
    with lasting(SLACK):
        assert await news.come() == "its heartbeat connection was closed"


async def test_a_reset_is_told_at_once(heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]) -> None:
    """The peer closed it, and had not read our last beat: what it said before on the link's connection counts."""
    news = News()
    heartbeats.watch(pair[0], FOREVER, news)
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    pair[1].close()
    assert await news.come() == "its heartbeat connection was closed"


async def test_a_socket_that_comes_closed_is_refused(heartbeats: HeartbeatThread) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    ours.close()
    with pytest.raises(OSError, match="Invalid argument"):
        heartbeats.watch(ours, FOREVER, News())


async def test_without_a_descriptor_the_next_watch_is_refused_and_later_ones_are_served(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    others = socket.socketpair()
    others[1].setblocking(False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            heartbeats.watch(others[0], FOREVER, News())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await until_closed(others[1])
    others[1].close()
    assert heartbeat_threads() == 0
    heartbeats.watch(pair[0], FOREVER, News())
    await count_beats(pair[1], 3)


async def test_lost_is_called_once_on_the_loop(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    threads: list[threading.Thread] = []
    news = News()
    watch = heartbeats.watch(pair[0], 0.05, lambda _: threads.append(threading.current_thread()))
    pair[1].close()
    spin_until_there_is_news(heartbeats)
    later = socket.socketpair()
    heartbeats.watch(later[0], 0.2, news)
    await news.come()
    assert threads == [threading.current_thread()]
    watch.stop()
    later[1].close()


def test_a_loop_that_is_closed_is_not_told(no_leaks: None) -> None:
    heartbeats, news = HeartbeatThread(INTERVAL), News()
    ours, theirs = socket.socketpair()

    async def watch() -> None:
        heartbeats.watch(ours, FOREVER, news)

    asyncio.run(watch())
    theirs.close()
    spin_until_there_is_news(heartbeats)
    heartbeats.close()
    assert news.reasons == []


# ---- stop and close ----


async def test_stop_closes_and_tells_no_callback(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    news, last = News(), News()
    watch = heartbeats.watch(pair[0], 0.05, news)
    watch.stop()
    watch.stop()
    other = socket.socketpair()
    heartbeats.watch(other[0], 0.1, last)
    await last.come()
    assert news.reasons == []
    await until_closed(pair[1])
    other[1].close()


async def test_stop_prevents_what_the_thread_has_queued_already(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    news = News()
    watch = heartbeats.watch(pair[0], FOREVER, news)
    pair[1].close()
    spin_until_there_is_news(heartbeats)
    watch.stop()
    await what_is_queued(heartbeats)
    assert news.reasons == []


async def test_close_prevents_it_too(heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]) -> None:
    news = News()
    heartbeats.watch(pair[0], FOREVER, news)
    pair[1].close()
    spin_until_there_is_news(heartbeats)
    heartbeats.close()
    await asyncio.sleep(0)
    assert news.reasons == []


async def test_close_leaves_no_thread_and_no_file(no_leaks: None) -> None:
    files = open_files()
    heartbeats, news = HeartbeatThread(INTERVAL), News()
    pairs = [socket.socketpair() for _ in range(64)]
    for ours, _ in pairs:
        heartbeats.watch(ours, FOREVER, news)
    assert heartbeat_threads() == 1
    with lasting(0.1):
        heartbeats.close()
    heartbeats.close()
    assert heartbeat_threads() == 0
    for ours, theirs in pairs:
        assert ours.fileno() == -1
        theirs.close()
    assert open_files() - files == set()
    await asyncio.sleep(0)
    assert news.reasons == []


def test_without_a_watch_there_is_no_thread(no_leaks: None) -> None:
    heartbeats = HeartbeatThread(INTERVAL)
    assert heartbeat_threads() == 0
    heartbeats.close()


async def test_after_close_a_socket_is_refused_and_closed(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    heartbeats.close()
    with pytest.raises(RuntimeError, match="closed"):
        heartbeats.watch(pair[0], 1, News())
    assert pair[0].fileno() == -1


def test_without_a_loop_a_socket_is_refused_and_closed(
    heartbeats: HeartbeatThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        heartbeats.watch(pair[0], 1, print)
    assert pair[0].fileno() == -1


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
async def test_times_are_positive(heartbeats: HeartbeatThread, seconds: float) -> None:
    with pytest.raises(ValueError, match="interval"):
        HeartbeatThread(seconds)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(ValueError, match="silence"):
        heartbeats.watch(ours, seconds, News())
    assert ours.fileno() == -1


# ---- processes that are stopped ----

CHILD = """
import asyncio, socket, sys
from aiodatadist._cluster.heartbeat_thread import HeartbeatThread

async def main(fd, interval, silence):
    lost, heartbeats = [], HeartbeatThread(interval)
    print("ready", flush=True)
    sys.stdin.readline()
    heartbeats.watch(socket.socket(fileno=fd), silence, lost.append)
    print("watching", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(lost, flush=True)
    sys.stdin.readline()
    heartbeats.close()

asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
"""


class Child:
    """A process that watches one end. Each line that it gets makes it go on: watch; say whom it has lost; end."""

    def __init__(self, sock: socket.socket, silence: float) -> None:
        arguments = [sys.executable, "-c", CHILD, str(sock.fileno()), str(INTERVAL), str(silence)]
        self.process = children.Popen(
            arguments, pass_fds=[sock.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        sock.close()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        spin(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def start_watching(*children: Child) -> None:
    assert [child.says() for child in children] == ["ready"] * len(children)
    for child in children:
        child.go_on()
    assert [child.says() for child in children] == ["watching"] * len(children)


@pytest.fixture
def start_child(no_leaks: None) -> Iterator[Callable[[socket.socket, float], Child]]:
    children: list[Child] = []

    def start(sock: socket.socket, silence: float) -> Child:
        children.append(Child(sock, silence))
        return children[-1]

    yield start
    for child in children:
        child.end()


async def test_a_stopped_process_is_told(
    heartbeats: HeartbeatThread,
    pair: tuple[socket.socket, socket.socket],
    start_child: Callable[[socket.socket, float], Child],
) -> None:
    news = News()
    child = start_child(pair[1], FOREVER)
    await asyncio.to_thread(start_watching, child)
    heartbeats.watch(pair[0], 0.2, news)
    await asyncio.sleep(0.3)
    assert news.reasons == []
    with lasting(0.2 + SLACK, 0.2 - 2 * INTERVAL):
        child.freeze()
        reason = await news.come()
    assert "no heartbeat for 0." in reason


def test_who_was_stopped_itself_finds_its_peer_alive(
    pair: tuple[socket.socket, socket.socket], start_child: Callable[[socket.socket, float], Child]
) -> None:
    stopped, living = start_child(pair[0], 0.2), start_child(pair[1], FOREVER)
    start_watching(stopped, living)
    stopped.freeze()
    time.sleep(0.5)
    stopped.thaw()
    time.sleep(0.3)
    stopped.go_on()
    assert stopped.says() == "[]"


def test_two_that_were_stopped_together_find_each_other_alive(
    pair: tuple[socket.socket, socket.socket], start_child: Callable[[socket.socket, float], Child]
) -> None:
    one, two = start_child(pair[0], 0.3), start_child(pair[1], 0.3)
    start_watching(one, two)
    two.freeze()
    one.freeze()
    time.sleep(0.5)
    one.thaw()
    time.sleep(0.1)
    two.thaw()
    time.sleep(0.35)
    for child in (one, two):
        child.go_on()
        assert child.says() == "[]"
