"""The server at which the ranks of a prefill engine register their addresses, and decode engines ask for them.

The server is for the members of a group: they seal their messages with a key, and it parses nothing else. The keys are
those of links: what is read when a link is made is read here for each question. Without keys of the group's own, the server
serves loopback addresses only. It has its own event loop, so its clients do not delay the KV cache's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import TypeVar

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from aiodatadist._adapters.engine_ranks import EngineRanks, contradiction
from aiodatadist._adapters.loop_service import LoopService
from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.peers import is_loopback
from aiodatadist._adapters.rendezvous_lines import (
    ANSWER,
    MAX_ANSWER,
    MAX_QUESTION,
    QUESTION,
    Answer,
    Ask,
    Greet,
    Greeted,
    Question,
    Ranks,
    Refused,
    Register,
    Registered,
    Unsealed,
    opened,
    parsed,
    read,
    written,
)
from aiodatadist._blocking.loop_door import LoopDoor
from aiodatadist._cluster.client_slots import MAX_CLIENTS_OF_ONE, ClientSlots
from aiodatadist._cluster.key_ring import KeyRing
from aiodatadist._cluster.listener import Listener
from aiodatadist._config.trust import Credential
from aiodatadist._counting import OF_PROCESS, Incident, Incidents
from aiodatadist._values.addresses import host_port, is_address, is_host_name
from aiodatadist._values.foreign import Unreadable, printable
from aiodatadist.errors import (
    AuthError,
    LinkError,
    LinkTimeout,
    LLMException,
    ParamInvalid,
    ProtocolError,
)

__all__ = ["Ranks", "Registered", "RendezvousServer", "ask", "register"]

logger = logging.getLogger(__name__)

CLIENT_SECONDS = 5.0
"""Seconds from the accept to the last byte of the answer."""
SECONDS = 5.0
"""Seconds for one question, at the end that asks."""
PROBE_SECONDS = 1.0
"""Seconds in which an address must accept a connection, or the rank there can be replaced."""
PROBES = 64
"""Addresses that are tried at the same time."""
RECEIVE = 4096
"""Bytes received at a time: a line of the usual length."""
KEY_HINT = "all engines need the same trust or auth_key_file; without these, all must be processes of one user"

Clock = Callable[[], float]
AnswerT = TypeVar("AnswerT", Greeted, Ranks)

_NO_ANSWER = (anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, anyio.DelimiterNotFound)


class RendezvousServer:
    """A server that listens until it is closed. Construction and :meth:`close` wait.

    Args:
        credential: the keys of the group. Unless they are the group's own, ``host`` must be a loopback address, and so
            must the addresses of ranks.
        clock: seconds since 1970.

    Attributes:
        port: the port on which it listens, a free one if 0 was asked for.
        incidents: counts of what its clients cause.

    Raises:
        OSError: if it cannot listen there.
        ParamInvalid: if ``host`` is neither an address nor a name, the keys cannot be used, or ``host`` is not a loopback
            address and they are too weak for that.
    """

    def __init__(self, host: str, port: int, credential: Credential, clock: Clock = time.time) -> None:
        _check_host(host, credential)
        self.incidents = Incidents()
        keys = KeyRing(credential, "the rendezvous", self.incidents)
        keys.read()
        self._door: LoopDoor[_Life] = LoopDoor("RendezvousServer", own_thread="aiodatadist rendezvous")
        life = _Life(keys, clock, self.incidents)
        self.port = self._door.open_or_close(life, lambda: life.open(host, port))

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._door.close()


class _Life:
    """The part on the server's loop: a listener, and a task for each client."""

    def __init__(self, keys: KeyRing, clock: Clock, incidents: Incidents) -> None:
        self._keys = keys
        self._clock = clock
        self._id = secrets.token_hex(16)
        self._ranks = EngineRanks()
        self._slots = ClientSlots(MAX_CLIENTS_OF_ONE)
        self._incidents = incidents
        self._service = LoopService("rendezvous")
        self.close = self._service.close

    async def open(self, host: str, port: int) -> int:
        """Start listening; return the port."""
        try:
            listener = await Listener.open(host, port, tuple, "rendezvous")
        except LLMException as error:
            raise error.__cause__ or error from None

        async def enter(stack: AsyncExitStack) -> None:
            stack.callback(listener.close)
            await stack.enter_async_context(self._keys.one_thread())

        await self._service.open(enter)
        self._service.group.start_soon(listener.serve, self._serve, self._service.group, self._incidents)
        if self._keys.may_change:
            self._service.group.start_soon(self._keys.watch)
        return listener.address[1]

    async def _serve(self, client: socket.socket, _: Listener) -> None:
        """Serve one client from the accept on. It has :data:`CLIENT_SECONDS`, or less if it must make room."""
        scope = anyio.CancelScope(deadline=anyio.current_time() + CLIENT_SECONDS)
        slot = None
        try:
            host = str(client.getpeername()[0])
            slot = self._slots.enter(host, scope.cancel)
            with scope:
                answer = await self._answer(await _line(client, MAX_QUESTION), host)
                await asyncio.get_running_loop().sock_sendall(client, answer + b"\n")
        except (OSError, Unreadable) as error:
            logger.debug("a client of the rendezvous: %s", printable(repr(error)))
        except Exception:
            told = "a client of the rendezvous was not answered"
            self._incidents.add(Incident.DEFECT, logger, told, level=logging.ERROR, exc_info=True)
        finally:
            if slot is not None:
                self._slots.leave(slot)
            client.close()

    def _refused(self, host: str, why: object) -> None:
        told = "the rendezvous refused %s: %s", printable(host), printable(why)
        self._incidents.add(Incident.RENDEZVOUS_REFUSED, logger, *told)

    async def _answer(self, line: bytes, host: str) -> bytes:
        await self._keys.look()
        try:
            key, content = opened([each.secret for each in self._keys.for_client(self._keys.keys)], line)
        except AuthError as error:  # which names no file
            return written(None, Refused(reason=str(error.args[0])))
        except Unsealed as error:
            self._refused(host, error)
            return written(None, Refused(reason=f"{error}; {KEY_HINT}"))
        try:
            question: Question = parsed(content, QUESTION, MAX_QUESTION)
        except Unreadable as error:
            self._refused(host, error)
            return written(key, Refused(reason=str(error)), line)
        why = await self._why_not(question, is_proved=key is not None)
        if why:
            self._refused(host, why)
            return written(key, Refused(reason=printable(why)), line)
        return written(key, Greeted(server=self._id) if isinstance(question, Greet) else self._ranks.told(), line)

    async def _why_not(self, question: Question, *, is_proved: bool) -> str:
        """Return why this is refused, or an empty text: then a rank is registered, or may ask."""
        if not isinstance(question, Register):
            return self._ranks.why_stale(None, question.at, self._clock())
        if question.server != self._id:
            return "it is for another bootstrap server, or for one that has ended"
        worker = question.worker
        rule = _why_no_place(worker.address.host, self._keys.why_not)
        if rule:
            return f"{printable(worker.address.host)} is not a loopback address: any other one {rule}"
        while True:  # again, because others may register while an address is tried
            stale = self._ranks.why_stale(worker.rank, question.at, self._clock())
            if stale:
                return stale
            if is_proved:  # without a key, a stranger could claim that
                self._ranks.forget_ended(worker)
            others = self._ranks.contradicting(worker)
            if not others:
                self._ranks.add(worker, question.at)
                return ""
            alive = await self._forget_gone(others[:PROBES])
            if alive is not None:
                return contradiction(worker, alive)

    async def _forget_gone(self, ranks: list[Registered]) -> Registered | None:
        """Try the addresses of ranks. Return one that answers, or None; ranks that do not answer are forgotten."""
        alive: list[Registered] = []

        async def probe(rank: Registered) -> None:
            if await is_answering(rank.address):
                alive.append(rank)
                group.cancel_scope.cancel()
            else:
                self._ranks.forget(rank)

        async with anyio.create_task_group() as group:
            for rank in ranks:
                group.start_soon(probe, rank)
        return alive[0] if alive else None


async def _line(client: socket.socket, limit: int) -> bytes:
    """Read a line. Raises OSError or Unreadable if there is none of at most ``limit`` bytes."""
    loop, said = asyncio.get_running_loop(), bytearray()
    while len(said) <= limit:
        data = await loop.sock_recv(client, min(RECEIVE, limit + 1 - len(said)))
        if not data:
            raise ConnectionResetError("it closed the connection in the middle of a line")
        said += data
        if b"\n" in data:
            return bytes(said.partition(b"\n")[0])
    raise Unreadable(f"it has a line of more than {limit} bytes")


async def is_answering(address: PeerAddress) -> bool:
    """Return True if something listens there."""
    with suppress(OSError, ValueError), anyio.move_on_after(PROBE_SECONDS):
        async with await anyio.connect_tcp(address.host, address.port):
            return True
    return False


def _why_no_place(host: str, rule: Callable[[str], str]) -> str:
    """Return the rule that keeps a member with these keys from a host, or an empty text. ``localhost`` is not an address."""
    return "" if is_loopback(host) else rule(host)


def _check_host(host: str, credential: Credential) -> None:
    if not is_address(host) and not is_host_name(host):
        raise ParamInvalid(f"the rendezvous is at {printable(host)}: must be an IP address or the name of a host")
    rule = _why_no_place(host, credential.why_not)
    if rule:
        raise ParamInvalid(
            f"the rendezvous is at {printable(host)}: what is not a loopback address {rule}", hint=KEY_HINT
        )


# ---- the other end ----


async def _tell(host: str, port: int, question: Question, credential: Credential, expected: type[AnswerT]) -> AnswerT:
    _check_host(host, credential)
    if not 0 < port < 1 << 16:
        raise ParamInvalid(f"the rendezvous is at port {printable(port)}: must be from 1 to 65535")
    ring = KeyRing(credential, "the rendezvous", OF_PROCESS)
    await ring.check()
    keys = ring.keys()
    key = keys[0].secret if keys else None
    place, line = host_port(printable(host), port), written(key, question)
    try:
        with anyio.fail_after(SECONDS):
            async with await anyio.connect_tcp(host, port) as server:
                await server.send(line + b"\n")
                said = await BufferedByteReceiveStream(server).receive_until(b"\n", MAX_ANSWER)
    except (OSError, ValueError, *_NO_ANSWER) as error:
        why = printable(repr(error))
        raise LinkTimeout(f"the rendezvous at {place} does not answer: {why}") from error
    try:
        answer: Answer = read(key, said, ANSWER, MAX_ANSWER, line)
    except Unsealed as error:
        with suppress(ValueError):
            unproved = read(None, said, ANSWER, MAX_QUESTION)
            if isinstance(unproved, Refused):
                raise AuthError(
                    f"an unproved rendezvous at {place} refused: {printable(unproved.reason)}", hint=credential.hint
                ) from None
        raise AuthError(f"the answer of the rendezvous at {place} is not used: {error}", hint=credential.hint) from None
    except Unreadable as error:
        raise ProtocolError(f"{place} is not a rendezvous of aiodatadist: {error}") from None
    if isinstance(answer, Refused):
        raise LinkError(f"the rendezvous at {place} refused: {printable(answer.reason)}")
    if not isinstance(answer, expected):
        raise ProtocolError(f"the rendezvous at {place} answered {question.type} with {answer.type}")
    return answer


async def register(host: str, port: int, worker: Registered, credential: Credential, clock: Clock = time.time) -> None:
    """Register where a rank listens, in place of what it registered before.

    Raises:
        LinkTimeout, ProtocolError: if no rendezvous answers there.
        AuthError: if the rendezvous has another key, or only one of the two ends has one.
        LinkError: if the rendezvous refuses the rank; the message says why.
        ParamInvalid: if ``host`` is neither an address nor a name, the keys cannot be used, or ``host`` is not a loopback
            address and they are too weak for that.
    """
    greeted = await _tell(host, port, Greet(at=clock(), nonce=secrets.token_hex(16)), credential, Greeted)
    await _tell(host, port, Register(at=clock(), server=greeted.server, worker=worker), credential, Ranks)


async def ask(host: str, port: int, credential: Credential, clock: Clock = time.time) -> Ranks | None:
    """Return the addresses of all ranks of the engine there, or None if not all have registered.

    Raises:
        As :func:`register`.
    """
    told = await _tell(host, port, Ask(at=clock(), nonce=secrets.token_hex(16)), credential, Ranks)
    return told if told.addresses else None
