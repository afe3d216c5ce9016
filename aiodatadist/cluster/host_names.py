"""Addresses of hosts, by their names.

The name service is asked in threads of the cluster's own. A question cannot be taken back, and where no name service answers
it may last for a minute: in the event loop's pool of threads a few of them would hold up all that is run there, and the end
of the process.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from socket import getaddrinfo
from typing import Any

from aiodatadist.concurrency.threads import DaemonThread
from aiodatadist.values.addresses import is_address
from aiodatadist.values.foreign import printable

AT_A_TIME = 64
"""Names that are looked up: each takes a thread."""
KEPT_SECONDS = 5.0
"""For which an answer is kept that came when its askers had given up: the next one may have it. A failure is not kept."""


class HostNames:
    """Questions to the name service, on one event loop.

    Who owns what
        Each question has a daemon thread, which may outlive its askers, the loop and this object. It ends with the answer.

    What cancellation means
        An asker that is cancelled leaves its question to those that ask for the same name, now or soon.
    """

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[list[str] | OSError]] = {}
        self._room = asyncio.Semaphore(AT_A_TIME)

    async def addresses_of(self, host: str, waits_for: Callable[[str], object] = lambda _: None) -> list[str]:
        """An address stands for itself, a name for all that it has: IPv4 first, else in the order of the name service.

        Args:
            waits_for: told what has not happened yet, in words.

        Raises OSError: there is no such host, or no name service, or no thread to ask it in.
        """
        if is_address(host):
            return [host]
        if host not in self._asked:
            waits_for(f"{AT_A_TIME} other names were being looked up")
            await self._room.acquire()
            if host in self._asked:
                self._room.release()
            else:
                self._asked[host] = self._ask(host)
        waits_for("the name service did not answer")
        answer = self._asked[host]
        await asyncio.wait([answer])
        if self._asked.get(host) is answer:
            del self._asked[host]
        found = answer.result()
        if isinstance(found, OSError):
            raise found
        return found

    def _ask(self, host: str) -> asyncio.Future[list[str] | OSError]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str] | OSError] = loop.create_future()

        def settle(found: list[str] | OSError) -> None:
            if not answer.done():
                answer.set_result(found)
                self._room.release()
                kept = 0.0 if isinstance(found, OSError) else KEPT_SECONDS
                loop.call_later(kept, self._forget, host, answer)

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
        return answer

    def _forget(self, host: str, answer: asyncio.Future[list[str] | OSError]) -> None:
        if self._asked.get(host) is answer:
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
