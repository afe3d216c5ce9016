"""Addresses of hosts, by their names.

The name service is asked in threads of the cluster's own. A question cannot be taken back, and where no name service answers
it may last for a minute: in the event loop's pool of threads a few of them would hold up all that is run there, and the end
of the process.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Hashable
from socket import getaddrinfo
from typing import Any

from aiodatadist.concurrency.fair_queue import FairQueue
from aiodatadist.concurrency.threads import DaemonThread
from aiodatadist.values import peer_budget
from aiodatadist.values.addresses import is_address
from aiodatadist.values.foreign import printable

KEPT_SECONDS = 5.0
"""For which an answer is kept that came when its askers had given up: the next one may have it. A failure is not kept."""


class _LookUp:
    """A question to the name service. ``askers``: tasks that wait for it; ``give`` gives its places back, once."""

    def __init__(self, answer: asyncio.Future[list[str] | OSError], give: Callable[[], None]) -> None:
        self.answer, self.give = answer, give
        self.askers = 0


class _Room:
    """One peer's look-ups. ``users``: those under way, and tasks that wait for one."""

    def __init__(self) -> None:
        self.line = FairQueue()
        self.users = 0
        self._taken = 0

    def place(self) -> bool | None:
        if self._taken >= peer_budget.LOOK_UPS:
            return None
        self._taken += 1
        return True

    def give(self) -> None:
        self._taken -= 1
        self.line.call()


class HostNames:
    """Questions to the name service, on one event loop.

    Who owns what
        Each question has a daemon thread, which may outlive its askers, the loop and this object. It ends with the answer.

    What cancellation means
        An asker that is cancelled leaves its question to those that ask for the same name, now or soon.
    """

    def __init__(self) -> None:
        self._asked: dict[str, _LookUp] = {}
        self._rooms: dict[Hashable, _Room] = {}  # of peers that look something up, or wait to
        self._taken = 0
        self._line = FairQueue()

    async def addresses_of(
        self, host: str, waits_for: Callable[[str], object] = lambda _: None, peer: Hashable = None
    ) -> list[str]:
        """An address stands for itself, a name for all that it has: IPv4 first, else in the order of the name service.

        Args:
            waits_for: told what has not happened yet, in words.
            peer: whose name it is. A peer has ``LOOK_UPS`` at a time, and peers take turns.

        Raises OSError: there is no such host, or no name service, or no thread to ask it in.
        """
        if is_address(host):
            return [host]
        if host not in self._asked:
            waits_for(f"{peer_budget.ALL_LOOK_UPS} other names were being looked up")
            give = await self._take(peer)
            if host in self._asked:
                give()
            else:
                self._asked[host] = self._ask(host, give)
        waits_for("the name service did not answer")
        look_up = self._asked[host]
        look_up.askers += 1
        try:
            await asyncio.wait([look_up.answer])
        finally:
            look_up.askers -= 1
            if not look_up.askers:
                look_up.give()  # its thread may go on: no task waits for it
        self._forget(host, look_up)
        found = look_up.answer.result()
        if isinstance(found, OSError):
            raise found
        return found

    async def _take(self, peer: Hashable) -> Callable[[], None]:
        """Wait for a place of the peer's own, and for one of all. Return what gives both back, once."""
        room = self._rooms.setdefault(peer, _Room())
        room.users += 1
        try:
            await room.line.take(room.place)
            try:
                await self._line.take(self._place, line=peer)
            except BaseException:
                room.give()
                raise
        except BaseException:
            self._leave(peer, room)
            raise
        is_given = False

        def give() -> None:
            nonlocal is_given
            if not is_given:
                is_given = True
                self._taken -= 1
                self._line.call()
                room.give()
                self._leave(peer, room)

        return give

    def _place(self) -> bool | None:
        if self._taken >= peer_budget.ALL_LOOK_UPS:
            return None
        self._taken += 1
        return True

    def _leave(self, peer: Hashable, room: _Room) -> None:
        room.users -= 1
        if not room.users:
            del self._rooms[peer]

    def _ask(self, host: str, give: Callable[[], None]) -> _LookUp:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str] | OSError] = loop.create_future()
        look_up = _LookUp(answer, give)

        def settle(found: list[str] | OSError) -> None:
            if not answer.done():
                answer.set_result(found)
                give()
                kept = 0.0 if isinstance(found, OSError) else KEPT_SECONDS
                loop.call_later(kept, self._forget, host, look_up)

        def run() -> None:
            found = _looked_up(host)
            try:
                loop.call_soon_threadsafe(settle, found)
            except RuntimeError:  # the loop is closed, and no task of it waits any more
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

    def _forget(self, host: str, look_up: _LookUp) -> None:
        if self._asked.get(host) is look_up:
            del self._asked[host]


def _as_text(family: int, address: tuple[Any, ...]) -> str:
    """Of a link-local address with the network card that leads to it."""
    scope = address[3] if family == socket.AF_INET6 else 0
    return f"{address[0]}%{scope}" if scope and "%" not in address[0] else str(address[0])


def _looked_up(host: str) -> list[str] | OSError:
    """In a thread: whatever goes wrong there, its askers are told."""
    try:
        found = sorted(getaddrinfo(host, None, type=socket.SOCK_STREAM), key=lambda each: each[0] != socket.AF_INET)
        addresses = [_as_text(family, address) for family, *_, address in found]
    except OSError as error:
        return error
    except Exception as error:
        return socket.gaierror(socket.EAI_FAIL, f"the name service failed with {printable(repr(error))}")
    return list(dict.fromkeys(addresses)) or socket.gaierror(socket.EAI_NONAME, "the name has no address")
