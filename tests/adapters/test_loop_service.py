"""The door to a life on a loop: whatever threads open and close it, in whatever order, each open life is closed once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext

import anyio
import anyio.to_thread
import pytest

from aiodatadist import LLMException
from aiodatadist._blocking.loop_door import LoopDoor


class Life:
    """A life that opens when it is told to."""

    def __init__(self) -> None:
        self.opening = threading.Event()
        self.closes = 0
        self._may_open = threading.Event()

    async def open(self) -> str:
        self.opening.set()
        await anyio.to_thread.run_sync(self._may_open.wait)
        return "open"

    def let_open(self) -> None:
        self._may_open.set()

    async def close(self) -> None:
        self.closes += 1


class Lock:
    """A lock that tells when a thread has to wait for it."""

    def __init__(self, waits: Callable[[], object]) -> None:
        self._lock = _RLOCK()
        self._waits = waits

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waits()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_RLOCK = threading.RLock


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


@pytest.fixture
def user() -> Iterator[LoopDoor[Life]]:
    """Make a door that keeps the thread that doors share."""
    with closing(LoopDoor[Life]("User")) as made:
        yield made


@pytest.mark.usefixtures("user")
def test_a_life_that_one_thread_opens_while_another_closes_is_closed(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_waited_or_returned = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "RLock", lambda: Lock(has_waited_or_returned.set))
        door: LoopDoor[Life] = LoopDoor("Door")
    life = Life()
    opened = threads.submit(door.open, life, life.open)
    assert life.opening.wait(30)
    closed = threads.submit(door.close)
    closed.add_done_callback(lambda _: has_waited_or_returned.set())
    assert has_waited_or_returned.wait(30)
    has_waited = not closed.done()
    life.let_open()
    assert opened.result(30) == "open"
    closed.result(30)
    assert has_waited
    assert (life.closes, door.opened) == (1, None)


@pytest.mark.parametrize("own_thread", [None, "door"])
@pytest.mark.parametrize("fails", [False, True], ids=["it opens", "it fails to open"])
def test_a_life_is_closed_if_a_signal_handler_of_the_thread_that_opens_it_closes_the_door(
    own_thread: str | None, fails: bool
) -> None:
    """The handler cannot wait for the life to open, as another thread would: its own thread opens it."""
    door: LoopDoor[Life] = LoopDoor("Door", own_thread)
    life = Life()

    async def open_life() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        await life.open()
        if fails:
            raise LookupError

    def close(*_: object) -> None:
        life.let_open()
        door.close()

    before = signal.signal(signal.SIGUSR1, close)
    try:
        with pytest.raises(LookupError) if fails else nullcontext():
            door.open(life, open_life)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (life.closes, door.opened) == (0 if fails else 1, None)
    assert not {each.name for each in threading.enumerate()} & {
        "door",
        "aiodatadist loop",
    }  # the door was its only user


def test_a_life_is_closed_if_an_interrupt_comes_when_it_is_open() -> None:
    """The thread that opens it has no result, so it cannot know by the result that there is something to close."""
    door: LoopDoor[Life] = LoopDoor("Door", own_thread="door")
    life = Life()

    async def open_life() -> None:
        life.let_open()
        await life.open()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(InterruptedError):
            door.open_or_close(life, open_life)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (life.closes, door.opened) == (1, None)
    assert "door" not in {each.name for each in threading.enumerate()}


def test_a_door_that_is_open_opens_no_second_life() -> None:
    first, second = Life(), Life()
    first.let_open()
    second.let_open()
    with closing(LoopDoor[Life]("Door", own_thread="door")) as door:
        door.open(first, first.open)
        with pytest.raises(LLMException, match="this Door is open already"):
            door.open(second, second.open)
        assert not second.opening.is_set()
        assert door.life is first
    assert (first.closes, second.closes) == (1, 0)


@pytest.mark.usefixtures("user")
def test_a_door_that_was_closed_opens_no_life() -> None:
    door: LoopDoor[Life] = LoopDoor("Door")
    door.close()
    life = Life()
    life.let_open()
    with pytest.raises(LLMException, match="this Door is closed"):
        door.open(life, life.open)
    assert not life.opening.is_set()


def test_a_close_on_the_loops_own_thread_is_refused_and_leaves_the_life_open() -> None:
    life = Life()
    life.let_open()
    with closing(LoopDoor[Life]("Door", own_thread="door")) as door:
        door.open(life, life.open)
        refused: Future[None] = Future()

        def close() -> None:
            try:
                door.close()
            except LLMException as error:
                refused.set_exception(error)
            else:
                refused.set_result(None)

        door.thread.post(close)
        with pytest.raises(LLMException, match="on the thread that must carry it out"):
            refused.result(30)
        assert (door.life, life.closes) == (life, 0)
    assert life.closes == 1
