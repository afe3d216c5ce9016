"""Addresses of hosts, by their names.

The name service is asked in the cluster's own threads. A question cannot be taken back, and if no name service answers,
it may last for a minute. In the event loop's pool of threads, a few of them would hold up everything else that runs
there, and the end of the process. So the number of these threads is limited, for one share and for all, even while no
task waits for an answer.

Whose share it is
    The caller names the share. It must be something that those who choose the host names cannot invent. Names that this
    end's user listed have a reserve beside all shares. Names that were answered before are looked up in any case, so
    names that get no answer do not keep these from being found.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Hashable, Sequence
from socket import getaddrinfo
from typing import Any

from aiodatadist._concurrency.fair_queue import FairQueue
from aiodatadist._concurrency.threads import DaemonThread
from aiodatadist._values import peer_budget
from aiodatadist._values.addresses import is_address
from aiodatadist._values.foreign import printable

LOCALHOST = "localhost"
"""The host name that is found without a name service."""
KEPT_SECONDS = 5.0
"""Seconds for which an answer is kept that came after its askers had given up, for the next one. Failures are not kept."""


class _Share:
    """Look-ups of one share, of all shares, or of the reserve.

    Args:
        awaited: the largest number of look-ups for which tasks wait.
        threads: the largest number of these together with those for which no task waits any longer.
    """

    def __init__(self, awaited: int, threads: int) -> None:
        self.line = FairQueue()
        self._limits = awaited, threads
        self._awaited = self._threads = 0

    @property
    def is_idle(self) -> bool:
        return not self._threads and not len(self.line)

    def take(self) -> bool | None:
        most_awaited, most_threads = self._limits
        if self._awaited >= most_awaited or self._threads >= most_threads:
            return None
        self._awaited += 1
        self._threads += 1
        return True

    def forsaken(self) -> None:
        self._awaited -= 1
        self.line.call()

    def answered(self) -> None:
        self._threads -= 1
        self.line.call()


class _Place:
    """The places in shares that a look-up has taken. ``ended`` is called when all have been released."""

    def __init__(self, shares: Sequence[_Share] = (), ended: Callable[[], object] = lambda: None) -> None:
        self._shares = shares
        self._ended = ended
        self._is_awaited = True

    def forsake(self) -> None:
        """Note that no task waits for it. May be called again."""
        if self._is_awaited:
            self._is_awaited = False
            for share in self._shares:
                share.forsaken()

    def answer(self) -> None:
        """Note that its thread has ended."""
        self.forsake()
        for share in self._shares:
            share.answered()
        self._ended()


class _LookUp:
    """A question to the name service. ``askers`` is the number of tasks that wait for it."""

    def __init__(self, answer: asyncio.Future[list[str] | OSError], place: _Place) -> None:
        self.answer, self.place = answer, place
        self.askers = 0


class HostNames:
    """Questions to the name service, on one event loop.

    Who owns what
        Each question has a daemon thread, which may outlive its askers, the loop and this object. It ends with the answer.

    What cancellation means
        An asker that is cancelled leaves its question to those that ask for the same name, now or soon.

    Args:
        of_share: the concurrent look-ups of one share.
    """

    def __init__(self, of_share: int = peer_budget.LOOK_UPS) -> None:
        self.of_share: int = of_share
        self._asked: dict[str, _LookUp] = {}
        self._rooms: dict[Hashable, _Share] = {}  # shares that look something up, or wait to
        self._all = _Share(peer_budget.ALL_LOOK_UPS, peer_budget.LOOK_UP_THREADS)
        self._reserve = _Share(peer_budget.ALL_LOOK_UPS, peer_budget.LOOK_UP_THREADS)
        self._known: dict[str, None] = {}

    async def addresses_of(
        self, host: str, waits_for: Callable[[str], object] = lambda _: None, share: Hashable = None
    ) -> list[str]:
        """Return the addresses of a host: an address itself, or all addresses of a name.

        IPv4 comes first, otherwise the order is the name service's.

        Args:
            waits_for: called with what has not happened yet, in words.
            share: the share towards which the look-up counts. A share has a limited number of look-ups at a time, and
                ``WAITING_LOOK_UPS`` more that wait; shares take turns. If None, the look-up counts towards the reserve
                for names that this end's user listed.

        Raises OSError if there is no such host, no name service or no thread to ask it in, or if too many names wait.
        """
        if is_address(host):
            return [host]
        host = host.lower()  # a client can write one name in many ways
        if host not in self._asked:
            waits_for(f"{peer_budget.ALL_LOOK_UPS} other names were being looked up")
            place = _Place() if host in self._known or host == LOCALHOST else await self._take(share)
            if host in self._asked:
                # another task has asked while this one waited for its place
                place.answer()
            else:
                self._asked[host] = self._ask(host, place)
        waits_for("the name service did not answer")
        look_up = self._asked[host]
        look_up.askers += 1
        try:
            # not awaited itself: cancelling one asker would cancel the answer for all
            await asyncio.wait([look_up.answer])
        finally:
            look_up.askers -= 1
            if not look_up.askers:
                look_up.place.forsake()  # its thread may continue
        self._forget(host, look_up)
        found = look_up.answer.result()
        if isinstance(found, OSError):
            raise found
        return found

    async def _take(self, share: Hashable) -> _Place:
        """Wait for a place in the share, and for one among all shares."""
        if share is None:
            await self._reserve.line.take(self._reserve.take)
            return _Place([self._reserve])
        room = self._rooms.get(share)
        if room is None:
            room = self._rooms[share] = _Share(self.of_share, peer_budget.THREADS_OF_LOOK_UP * self.of_share)
        if len(room.line) >= peer_budget.WAITING_LOOK_UPS:
            raise OSError(errno.EAGAIN, f"{peer_budget.WAITING_LOOK_UPS} other names wait to be looked up")
        own = _Place([room], lambda: self._leave(share, room))
        try:
            await room.line.take(room.take)
        except BaseException:
            self._leave(share, room)
            raise
        try:
            await self._all.line.take(self._all.take, line=share)
        except BaseException:
            own.answer()
            raise
        return _Place([self._all, room], lambda: self._leave(share, room))

    def _leave(self, share: Hashable, room: _Share) -> None:
        if room.is_idle and self._rooms.get(share) is room:
            del self._rooms[share]

    def _ask(self, host: str, place: _Place) -> _LookUp:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str] | OSError] = loop.create_future()
        look_up = _LookUp(answer, place)

        def settle(found: list[str] | OSError) -> None:
            if not answer.done():
                answer.set_result(found)
                place.answer()
                self._learn(host, found)
                kept = 0.0 if isinstance(found, OSError) else KEPT_SECONDS
                loop.call_later(kept, self._forget, host, look_up)

        def run() -> None:
            found = _looked_up(host)
            try:
                loop.call_soon_threadsafe(settle, found)
            except RuntimeError:  # the loop is closed, and none of its tasks waits any longer
                return

        def not_begun(error: RuntimeError) -> None:
            settle(OSError(errno.EAGAIN, f"no thread can be started for the name service: {error}"))

        try:
            begun_by = DaemonThread(run, f"aiodatadist looks up {host}").start_soon(loop, not_begun)
        except RuntimeError as error:
            not_begun(error)
        else:
            answer.add_done_callback(lambda _: begun_by.cancel())
        return look_up

    def _learn(self, host: str, found: list[str] | OSError) -> None:
        self._known.pop(host, None)
        if not isinstance(found, OSError):
            self._known[host] = None
        if len(self._known) > peer_budget.KNOWN_NAMES:
            del self._known[next(iter(self._known))]

    def _forget(self, host: str, look_up: _LookUp) -> None:
        if self._asked.get(host) is look_up:
            del self._asked[host]


def _as_text(family: int, address: tuple[Any, ...]) -> str:
    """Return an address as text; a link-local one with the network card that leads to it."""
    scope = address[3] if family == socket.AF_INET6 else 0
    return f"{address[0]}%{scope}" if scope and "%" not in address[0] else str(address[0])


def _looked_up(host: str) -> list[str] | OSError:
    """Look a host up, in a thread. Return the addresses, or the error for the tasks that asked."""
    try:
        found = sorted(getaddrinfo(host, None, type=socket.SOCK_STREAM), key=lambda each: each[0] != socket.AF_INET)
        addresses = [_as_text(family, address) for family, *_, address in found]
    except OSError as error:
        return error
    except Exception as error:
        return socket.gaierror(socket.EAI_FAIL, f"the name service failed with {printable(repr(error))}")
    return list(dict.fromkeys(addresses)) or socket.gaierror(socket.EAI_NONAME, "the name has no address")
