"""Where the ranks of a prefill engine tell their addresses, and decode engines ask for them: one line of JSON either way.

Nothing that is secret goes through it, and what it answers is not trusted: two workers that have a secret prove it to each
other when they link.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from aiodatadist.adapters.peer_links import PeerAddress
from aiodatadist.blocking import shared_loop
from aiodatadist.concurrency.resident import Misuse, Resident
from aiodatadist.errors import InternalError, LinkTimeout, ProtocolError

logger = logging.getLogger(__name__)

MAX_LINE = 1 << 20
MAX_RANKS = 4096
MAX_CLIENTS = 256
"""That are served at the same time; others wait."""
SECONDS = 5.0
"""That one question may take."""


class Registered(BaseModel):
    """One rank of a prefill engine, of ``ranks``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rank: int = Field(ge=0, lt=MAX_RANKS)
    ranks: int = Field(ge=1, le=MAX_RANKS)
    address: PeerAddress
    layout: dict[str, str | int]


class _Register(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    op: Literal["register"]
    worker: Registered


class _Ask(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    op: Literal["ask"]


_QUESTION: TypeAdapter[_Register | _Ask] = TypeAdapter(_Register | _Ask)
_ANSWER = TypeAdapter(list[Registered])


class RendezvousServer:
    """Listens until it is closed. Construction and :meth:`close` wait.

    Attributes:
        port: on which it listens, a free one if 0 was asked for.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        self._thread = shared_loop.acquire()
        self._life: _Life | None = None
        life = _Life()
        try:
            self.port: int = self._thread.call(lambda: life.open(host, port))
        except BaseException:
            shared_loop.release(self._thread)
            raise
        self._life = life

    def close(self) -> None:
        """May be called twice."""
        life, self._life = self._life, None
        if life is not None:
            try:
                self._thread.call(life.close)
            finally:
                shared_loop.release(self._thread)


def _refusal(misuse: Misuse, reason: str | None) -> Exception:
    return InternalError(f"rendezvous: {reason or misuse.value}")


class _Life:
    """On the loop: a listener, and a task for each client."""

    def __init__(self) -> None:
        self._known: dict[int, Registered] = {}
        self._resident: Resident
        self._clients: anyio.Semaphore
        self._port = 0

    async def open(self, host: str, port: int) -> int:
        self._resident = Resident(
            "aiodatadist rendezvous", _refusal, what="rendezvous", unfinished="a RendezvousServer was not closed"
        )

        async def live(started: asyncio.Future[None]) -> None:
            self._clients = anyio.Semaphore(MAX_CLIENTS)
            listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
            self._port = listener.extra(anyio.abc.SocketAttribute.local_port)
            async with listener, anyio.create_task_group() as group:
                group.start_soon(listener.serve, self._serve)
                started.set_result(None)
                await self._resident.stopping.wait()
                group.cancel_scope.cancel()

        await self._resident.start(live)
        return self._port

    async def close(self) -> None:
        await self._resident.stop()
        self._resident.result()

    async def _serve(self, client: anyio.abc.ByteStream) -> None:
        try:
            async with client, self._clients:
                with anyio.move_on_after(SECONDS):
                    await client.send(self._answer(await _line(client)))
        except (
            OSError,
            anyio.BrokenResourceError,
            anyio.EndOfStream,
            anyio.IncompleteRead,
            anyio.DelimiterNotFound,
        ) as error:
            logger.debug("a client of the rendezvous: %r", error)

    def _answer(self, line: bytes) -> bytes:
        try:
            question = _QUESTION.validate_json(line)
        except ValidationError as error:
            logger.warning("a client of the rendezvous said what is no question: %s", error.errors()[0]["msg"])
            return b"\n"
        if isinstance(question, _Register):
            self._known[question.worker.rank] = question.worker
        return _ANSWER.dump_json([self._known[rank] for rank in sorted(self._known)]) + b"\n"


async def _line(stream: anyio.abc.ByteReceiveStream) -> bytes:
    return await BufferedByteReceiveStream(stream).receive_until(b"\n", MAX_LINE)


async def _tell(host: str, port: int, question: BaseModel) -> list[Registered]:
    try:
        with anyio.fail_after(SECONDS):
            async with await anyio.connect_tcp(host, port) as server:
                await server.send(question.model_dump_json().encode() + b"\n")
                return _ANSWER.validate_json(await _line(server))
    except ValidationError:
        raise ProtocolError(f"{host}:{port} does not answer as a rendezvous of aiodatadist does") from None
    except (
        OSError,
        anyio.BrokenResourceError,
        anyio.EndOfStream,
        anyio.IncompleteRead,
        anyio.DelimiterNotFound,
    ) as error:
        raise LinkTimeout(f"the rendezvous at {host}:{port} does not answer: {error!r}") from error


async def register(host: str, port: int, worker: Registered) -> None:
    """Tell where a rank listens, in place of what it told before.

    Raises:
        LinkTimeout, ProtocolError: no rendezvous answers there.
    """
    await _tell(host, port, _Register(op="register", worker=worker))


async def ask(host: str, port: int) -> list[Registered]:
    """All ranks of the engine there; empty: not all have registered.

    Raises:
        LinkTimeout, ProtocolError: no rendezvous answers there.
    """
    known = await _tell(host, port, _Ask(op="ask"))
    is_whole = bool(known) and [each.rank for each in known] == list(range(known[0].ranks))
    return known if is_whole else []
