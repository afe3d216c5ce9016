"""One peer: the connection that carries control messages, the channels that carry bytes, and what is under way."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.abc

from aiodatadist.cache.catalogue import Catalogue, RemoteCache
from aiodatadist.cache.names import Key, Name, name_of
from aiodatadist.device import Program, Stream, Transfer, TransferState
from aiodatadist.errors import (
    CacheNotFound,
    InternalError,
    LinkClosed,
    LinkError,
    LinkTimeout,
    LLMException,
    LLMStatusCode,
    NotLinked,
    ParamInvalid,
    PeerLost,
    ProtocolError,
    StuckError,
    TransferTimeout,
)
from aiodatadist.link.arrivals import Arrivals
from aiodatadist.link.grants import Grants
from aiodatadist.link.notes import Outbox, Slip, decode
from aiodatadist.link.operation import Job, Operation, failed
from aiodatadist.link.service import Service, status_error
from aiodatadist.link.statistics import LinkCounters
from aiodatadist.link.ways import Way, Ways
from aiodatadist.link.wire import Wire
from aiodatadist.overlap import Estimate
from aiodatadist.transport import Endpoint
from aiodatadist.wire.handshake import Handshake, refusal
from aiodatadist.wire.messages import (
    Bye,
    CacheEntry,
    Connect,
    Disconnect,
    Found,
    Grant,
    Hello,
    KeyName,
    Landed,
    Lookup,
    Message,
    Note,
    Outdated,
    Ping,
    Pong,
    Pull,
    Pulled,
    Renew,
    Renewed,
    Retire,
    Revoke,
    Revoked,
    Stop,
    Taken,
    Watch,
)

if TYPE_CHECKING:
    from aiodatadist.cache.keeper import Keeper
    from aiodatadist.cache.table import Entry
    from aiodatadist.device import Device
    from aiodatadist.layout import Grid
    from aiodatadist.transport import Transport

logger = logging.getLogger(__name__)

DRAIN = 5.0
"""Seconds that a peer has for ending its transfers when a link is closed in good order."""
STOP = 5.0
"""Seconds that a peer has for answering that it stopped writing, before it loses its link."""
ALONE = 1e-4
"""Seconds in the queue of its stream: a transfer that waited less had the stream to itself, and says what the link costs."""
MAX_HELD = 1 << 20
"""Caches that a peer may tell us of."""


_DONE = {"get": "pulled", "put": "pushed"}


class LinkState(Enum):
    """::

    OPENING -> READY -> CLOSING -> CLOSED
       |         |         |
       +---------+---------+----> BROKEN     the peer died, or broke the protocol
    """

    OPENING = "opening"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"
    BROKEN = "broken"


class Home(Protocol):
    """What a link has to know of the cluster that it belongs to."""

    @property
    def keeper(self) -> Keeper: ...
    @property
    def timeout(self) -> float: ...
    def heard(self, link: Link, payload: bytes, taken: Callable[[], None]) -> None:
        """A notification came."""


class _Call:
    """A question to the peer that is not answered yet; ``name`` if it is about a cache."""

    def __init__(self, name: Name | None = None) -> None:
        self.name = name
        self.answered = anyio.Event()
        self.answer: Message | None = None


class Link:
    """A link to one peer. Transfers that we ask for run one after the other, and so do those that the peer asks us for.

    Attributes:
        cluster_id: the peer's; known once the link is ready.
        failure: why it is closed or broken.
        instance, heartbeat: the peer's, from its hello.
        pulse: what a connection for this link's heartbeats has to say to us.
        is_filed: it was made, and somebody serves it.
    """

    def __init__(self, wire: Wire, device: Device, transport: Transport, home: Home) -> None:
        self._wire = wire
        self._device = device
        self._transport = transport
        self._home = home
        self._group: anyio.abc.TaskGroup | None = None
        self._streams: dict[str, Stream] = {}
        self._transfers: dict[Transfer, RemoteCache] = {}
        self._operations: set[Operation] = set()
        self._is_shut = False
        self._taken_back: set[Transfer] = set()
        self._idle = anyio.Event()
        self._closed = anyio.Event()
        self._leaving = anyio.Event()
        self._broken = anyio.Event()
        self._reason = ""
        self._patience = 0.0
        self._vanished = False
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._untaken = 0
        self.ways = Ways(transport, wire.post, self._ask, self._spawn, self._channel_name)
        self._grants = Grants(self, home.timeout, wire.post, self._spawn, self._give_up)
        self._service = Service(self, home.keeper)
        self._names = ("", "")
        self.cluster_id = 0
        self.instance = ""
        self.heartbeat = 0.0
        self.pulse = secrets.token_hex(32)
        self.is_filed = False
        self.state = LinkState.OPENING
        self.failure: LinkError | None = None
        self.catalogue = Catalogue()
        self.outbox = Outbox(wire.post)
        self.arrivals = Arrivals(wire.post)
        self.counters = LinkCounters()
        self.estimate = Estimate()

    @property
    def is_ready(self) -> bool:
        return self.state is LinkState.READY

    def _channel_name(self) -> str:
        return channel_name(*self._names)

    def _spawn(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start something that ends with the link."""
        if self._group is not None:
            self._group.start_soon(call)

    # ---- opening ----

    async def hear_first(self) -> Message:
        """What a client says first.

        Raises:
            LinkError: nothing that we understand; it was told.
        """
        try:
            return await self._wire.receive()
        except LinkError as error:
            await self.refuse(error)
            raise

    async def shake_hands(
        self, handshake: Handshake, connect: Connect | None, first: Message | None, admit: Callable[[Hello], None]
    ) -> str:
        """Agree with the peer and open the channel. The caller sets the deadline.

        Args:
            connect: makes us the client.
            first: what the client said already.

        Returns:
            What a connection for heartbeats has to say to the server.

        Raises:
            LinkError: it cannot be; the peer was told, if it was our doing.
        """
        try:
            if connect is not None:
                await self._wire.send(*handshake.start(connect))
            peer, connect = await self._converse(handshake, first, admit)
            mine = await self._open_channel(handshake, peer, connect)
            await self._wire.send(*handshake.opened(mine, self.pulse))
            while not handshake.is_done:
                handshake.receive(await self._wire.receive())
        except LinkError as error:
            await self.refuse(error)
            raise
        except LLMException as error:
            failure = LinkError(str(error), status_code=error.status_code)
            await self.refuse(failure)
            raise failure from error
        if handshake.ready is None:
            raise InternalError("a handshake is done without a word from the peer")
        self.ways.on_first(handshake.ready.epoch)
        self.state = LinkState.READY
        return handshake.ready.pulse

    async def _converse(
        self, handshake: Handshake, first: Message | None, admit: Callable[[Hello], None]
    ) -> tuple[Hello, Connect]:
        """Until both ends know who the other is and what the channel is called."""
        while True:
            message, first = first or await self._wire.receive(), None
            answers = handshake.receive(message)
            agreed = handshake.agreed
            if agreed is not None:
                self.cluster_id = agreed[0].cluster_id
                self.instance = agreed[0].instance
                self.heartbeat = agreed[0].heartbeat
                admit(agreed[0])
                self._wire.trust()
            await self._wire.send(*answers)
            if agreed is not None:
                return agreed

    async def _open_channel(self, handshake: Handshake, peer: Hello, connect: Connect) -> int:
        """Open our half; the epoch that it reaches."""
        theirs = Endpoint(**peer.endpoint.model_dump())
        mine = self._transport.endpoint
        rank = 0 if handshake.side == "client" else 1
        ends = (mine, theirs) if rank == 0 else (theirs, mine)
        self._names = (str(handshake.me), str(peer.cluster_id))
        await self._open_unless_refused(handshake, connect, rank, ends)
        return self.ways.current.mine

    async def _open_unless_refused(
        self, handshake: Handshake, connect: Connect, rank: int, ends: tuple[Endpoint, Endpoint]
    ) -> None:
        """Open our half, but do not wait for a peer that says that it cannot."""
        refused: LinkError | None = None
        async with anyio.create_task_group() as group:

            async def hear() -> None:
                nonlocal refused
                try:
                    handshake.receive(await self._wire.receive())
                except LinkError as error:
                    refused = error
                    group.cancel_scope.cancel()

            group.start_soon(hear)
            failure: LLMException | None = None
            try:
                await self.ways.open(connect.channel, rank, ends, connect.timeout)
            except LinkError as error:
                failure = error
                with anyio.move_on_after(0.1):  # its reason may be on the way
                    await anyio.sleep_forever()
            group.cancel_scope.cancel()
        reason = refused or failure
        if reason is not None:
            raise reason

    async def refuse(self, error: LinkError) -> None:
        """Tell the peer why there is no link."""
        if isinstance(error, PeerLost):
            return
        with anyio.move_on_after(1, shield=True):  # a peer that does not read is none of our business
            try:
                await self._wire.send(refusal(error))
            except PeerLost:
                logger.debug("the peer was gone before it could be told: %s", error)

    # ---- transfers ----

    def check_ready(self) -> None:
        """Raises NotLinked or what ended the link."""
        if self.state is LinkState.READY:
            return
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args, peer=self.cluster_id, hint="link again")
        raise NotLinked(f"the link to cluster {self.cluster_id} is {self.state.value}", peer=self.cluster_id)

    def start(self, job: Job, what: str) -> Transfer | Operation:
        """Start a job. Whatever goes wrong with it, it is in the outcome.

        When all is known and within reach it is on the stream when this returns. Else a task of the link's talks to the
        peer first.
        """
        if job.request is not None:
            return self._operate(job, what, self._request)
        found = self.catalogue.find(job.key)
        way = None if found is None else self.ways.find(job.entry.epoch, found[0].epoch)
        if found is None or way is None:
            return self._operate(job, what, self._arrange)
        try:
            return self.submit(job.direction, way, job.entry, found[0], job.plan(*found), job.seconds, "ours")
        except LLMException as error:
            error.peer = self.cluster_id
            return failed(what, error)

    def submit(
        self, direction: str, way: Way, entry: Entry, remote: RemoteCache, grid: Grid, seconds: float, stream: str
    ) -> Transfer:
        """Hand bytes to the device; the destination is the grid's local side."""
        program = Program()
        if direction == "get":
            way.channel.add_get(program, grid)
        else:
            way.channel.add_put(program, grid.mirrored())
        return self.launch(program, direction, way, entry, remote, seconds, stream)

    def launch(
        self, program: Program, direction: str, way: Way, entry: Entry, remote: RemoteCache, seconds: float, stream: str
    ) -> Transfer:
        """Start a program on one of the link's streams: both caches are leased until the device let go."""
        if stream not in self._streams:
            self._streams[stream] = self._device.open_stream(f"link to {self.cluster_id}, {stream}")
        transfer = self._streams[stream].submit(program, seconds)
        entry.lease()
        remote.use()
        way.uses += 1
        self._transfers[transfer] = remote
        self.counters.started()

        def ended(done: Transfer) -> None:
            self._settle(done, entry)
            del self._transfers[transfer]
            remote.release()
            self.ways.release(way)
            if done.state is TransferState.DONE and done.queue_seconds < ALONE:
                self.estimate.add(done.nbytes, done.transfer_seconds)
            self.counters.ended("served" if stream == "served" else _DONE[direction], done)
            self._check_idle()

        transfer.add_done_callback(ended)
        return transfer

    def _settle(self, transfer: Transfer, entry: Entry) -> None:
        """Give the lease back, if the device let go, and say what a failure means for the link."""
        if transfer.state is TransferState.STUCK:
            self._lose(entry)
            why = transfer.error.args[0] if transfer.error is not None else "a transfer is stuck"
            self._break(LinkError(f"cluster {self.cluster_id}: {why}"))
        else:
            entry.release()
        if transfer in self._taken_back:
            self._taken_back.discard(transfer)
            if transfer.is_cancelled:
                transfer.replace_outcome(
                    CacheNotFound(f"cluster {self.cluster_id} took its cache back", peer=self.cluster_id)
                )
        suspect = transfer.error is not None and transfer.error.status_code is LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR
        if self.failure is not None and (suspect or transfer.state is TransferState.CANCELLED):
            transfer.replace_outcome(self._copy_of_failure())
        elif suspect and transfer.error is not None:
            died = f"cluster {self.cluster_id}: the peer's process is gone, or gave up its memory: {transfer.error.args[0]}"
            self._break(PeerLost(died))
            transfer.replace_outcome(PeerLost(died, peer=self.cluster_id))
        elif transfer.error is not None:
            transfer.error.peer = self.cluster_id

    def _lose(self, entry: Entry) -> None:
        """Nobody knows when bytes stop to land in it: it is never used again."""
        entry.poison()
        for region in entry.regions():
            self._device.mark_stuck(region.address, region.nbytes)

    def _copy_of_failure(self) -> LinkError:
        failure = self.failure or LinkClosed(f"the link to cluster {self.cluster_id} was closed")
        return type(failure)(*failure.args, peer=self.cluster_id)

    @property
    def _is_idle(self) -> bool:
        """Nothing is under way, apart from what only the end of the channel can end."""
        return not self._transfers and all(operation.is_doubtful for operation in self._operations)

    def _check_idle(self) -> None:
        if self._is_idle:
            self._idle.set()
            self._idle = anyio.Event()

    # ---- transfers that need words ----

    def _operate(self, job: Job, what: str, body: Callable[[Operation, Job], Coroutine[Any, Any, None]]) -> Operation:
        operation = Operation(f"{what} of cluster {self.cluster_id}", STOP + 2 * DRAIN + 6 * self._device.limits.grace)
        job.entry.lease()
        self._operations.add(operation)
        is_request = job.request is not None
        if is_request:
            self.counters.started()

        def ended(done: Operation) -> None:
            self._operations.discard(operation)
            if done.state is TransferState.STUCK or (operation.is_doubtful and not self._is_shut):
                self._lose(job.entry)
            else:
                job.entry.release()
            if self.failure is not None and done.state is TransferState.CANCELLED:
                done.replace_outcome(self._copy_of_failure())
            elif done.error is not None:
                done.error.peer = self.cluster_id
            if is_request:
                self.counters.ended("pulled", done)
            self._check_idle()

        operation.add_done_callback(ended)

        async def run() -> None:
            try:
                with operation.scope:
                    await body(operation, job)
                if operation.scope.cancelled_caught and not operation.is_doubtful:
                    operation.finish(TransferState.CANCELLED)
            except LLMException as error:
                operation.finish(TransferState.FAILED, error)
            except Exception as error:
                logger.exception("%s failed", what)
                operation.finish(TransferState.FAILED, InternalError(repr(error)))

        self._spawn(run)
        return operation

    async def _arrange(self, operation: Operation, job: Job) -> None:
        """One-sided, with something to be found out: where the peer's cache is, or a channel that reaches it."""
        wanted = ""
        with anyio.move_on_after(job.seconds) as limit:
            while True:
                wanted = "say where its cache is"
                remote, slot = await self._find(job.key)
                grid = job.plan(remote, slot)
                wanted = "open a channel that reaches both caches"
                way = await self.ways.reach(job.entry.epoch, remote.epoch)
                if not remote.is_withdrawn:
                    break
        if limit.cancelled_caught:
            raise TransferTimeout(f"cluster {self.cluster_id} did not {wanted} within {job.seconds:g} s")
        operation.follow(self.submit(job.direction, way, job.entry, remote, grid, job.seconds, "ours"))

    async def locate(self, entry: Entry, key: Key, seconds: float) -> tuple[RemoteCache, int]:
        """What a key stands for at the peer, and a channel that reaches it from a cache of ours.

        Raises:
            CacheNotFound, TransferTimeout, LinkError: there is no such cache; the peer is too slow; no channel can be had.
        """
        with anyio.move_on_after(seconds):
            while True:
                remote, slot = await self._find(key)
                await self.ways.reach(entry.epoch, remote.epoch)
                if not remote.is_withdrawn:
                    return remote, slot
        raise TransferTimeout(f"cluster {self.cluster_id} did not say where {key} is within {seconds:g} s")

    async def _find(self, key: Key) -> tuple[RemoteCache, int]:
        """What a key stands for at the peer, which is asked if we do not know.

        Raises:
            CacheNotFound: the peer has no such cache.
        """
        name = name_of(key)
        while (known := self.catalogue.find(key)) is None:
            found = await self._ask(lambda call: Lookup(call=call, name=KeyName(**name._asdict())), name)
            if not isinstance(found, Found) or found.cache is None:
                raise CacheNotFound(
                    f"cluster {self.cluster_id} offers no cache for {key}",
                    hint="has it been made there? Host memory is only for peers with remote_accessible=True",
                )
        return known

    async def _ask(self, question: Callable[[int], Message], name: Name | None = None) -> Message | None:
        """Say something and wait for the answer. The caller sets the deadline."""
        number, call = next(self._numbers), _Call(name)
        self._calls[number] = call
        try:
            self._wire.post(question(number))
            await call.answered.wait()
        finally:
            del self._calls[number]
        return call.answer

    async def _request(self, operation: Operation, job: Job) -> None:
        """Request/response: the peer writes. Until it said that it is done, or stopped, the destination is not free."""
        if job.request is None:
            raise InternalError("a request without words")
        await self._grant(job.entry)
        number, call = next(self._numbers), _Call()
        self._say(job.request(number))
        self._calls[number] = call
        try:
            with anyio.move_on_after(job.seconds):
                await call.answered.wait()
        finally:
            if call.answer is None:
                await self._stop_call(number, call, operation)
            del self._calls[number]
            self._conclude(operation, call.answer, job)

    def _say(self, request: Pull) -> None:
        """Raises ParamInvalid: it is too long."""
        try:
            self._wire.post(request)
        except ProtocolError as error:
            raise ParamInvalid(
                f"{len(request.dst_blocks)} blocks: {error.args[0]}", hint="pull them with several calls"
            ) from error

    async def _grant(self, entry: Entry) -> None:
        """Tell the peer where a cache of ours is."""
        await self._grants.wait_settled(entry)
        if not entry.is_live:
            raise CacheNotFound(f"cache {entry.cache_id} is being given up")
        if self._grants.told(entry):
            self._wire.post(Grant(cache=entry.message()))

    async def _stop_call(self, number: int, call: _Call, operation: Operation) -> None:
        """The peer is too slow, or nobody wants it any more: until it says that it stopped, or the link is given up."""
        if self.state not in {LinkState.READY, LinkState.CLOSING}:
            self._doubt(operation)
            return
        self._wire.post(Stop(call=number))
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + STOP):
            await call.answered.wait()
        if call.answer is None:
            self._doubt(operation)
            self._break(
                LinkError(
                    f"cluster {self.cluster_id} did not stop writing within {STOP:g} s", hint="link_clusters() again"
                )
            )

    def _doubt(self, operation: Operation) -> None:
        """The peer may still write: it ends when the channel is closed, and not before."""
        operation.is_doubtful = True
        self._check_idle()

    def _conclude(self, operation: Operation, answer: Message | None, job: Job) -> None:
        if operation.is_doubtful:
            return
        if not isinstance(answer, Pulled):
            if not operation.scope.cancel_called and self.failure is not None:
                operation.finish(TransferState.FAILED, self._copy_of_failure())
            elif not operation.scope.cancel_called:
                operation.finish(TransferState.FAILED, TransferTimeout(f"no answer within {job.seconds:g} s"))
            return
        operation.nbytes, operation.ranges = answer.nbytes, answer.ranges
        operation.queue_seconds, operation.transfer_seconds = answer.queue_seconds, answer.transfer_seconds
        if answer.status == LLMStatusCode.LLM_SUCCESS:
            operation.finish(TransferState.DONE)
        elif answer.stopped and not operation.scope.cancel_called:
            operation.finish(TransferState.FAILED, TransferTimeout(f"not done within {job.seconds:g} s"))
        elif not answer.stopped:
            operation.finish(TransferState.FAILED, self._refused(answer, job.key))

    def _refused(self, answer: Pulled, key: Key) -> LLMException:
        if answer.status == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            return CacheNotFound(
                f"cluster {self.cluster_id} offers no cache for {key}",
                hint="has it been made there, or has its key been consumed by a pull?",
            )
        return status_error(answer)

    # ---- words ----

    async def ping(self, seconds: float) -> None:
        """Raises LinkTimeout: no answer in time."""
        self.check_ready()
        with anyio.move_on_after(seconds) as limit:
            await self._ask(lambda call: Ping(call=call))
        if limit.cancelled_caught:
            raise LinkTimeout(f"cluster {self.cluster_id} did not answer within {seconds:g} s", peer=self.cluster_id)
        self.check_ready()

    async def notify(self, payload: bytes) -> None:
        """Behind everything that was asked for before. If cancelled, it is sent or not."""
        self.check_ready()
        slip = self.outbox.reserve(payload)
        slip.ready()
        try:
            await self._or_the_end(slip.sent)
        finally:
            if not slip.sent.is_set():
                slip.drop()

    async def _or_the_end(self, event: anyio.Event) -> None:
        """Until it is set. Raises what ended the link."""
        async with anyio.create_task_group() as group:

            async def end() -> None:
                await self._closed.wait()
                group.cancel_scope.cancel()

            group.start_soon(end)
            await event.wait()
            group.cancel_scope.cancel()
        if not event.is_set():
            raise self._copy_of_failure()

    def slip(self, payload: bytes | None) -> Slip | None:
        """A place in the order of notifications."""
        return None if payload is None else self.outbox.reserve(payload)

    def revoke(self, entry: Entry) -> anyio.Event:
        """Take a cache back that the peer was told of; the event is set when it gave it back."""
        return self._grants.revoke(entry)

    def post(self, message: Message) -> None:
        self._wire.post(message)

    # ---- what the peer says ----

    def _reactions(self) -> dict[type, Callable[[Any], object]]:
        """What to do, without waiting, about each message of a ready link."""
        return {
            Lookup: self._on_lookup,
            Found: self._on_answer,
            Pulled: self._on_answer,
            Pong: self._on_answer,
            Grant: lambda message: self._hold(message.cache),
            Revoke: self._on_revoke,
            Revoked: lambda message: self._grants.on_revoked(message.cache_id),
            Pull: lambda message: self._spawn(self._service.begin(message)),
            Stop: lambda message: self._service.stop(message.call),
            Note: self._on_note,
            Watch: lambda message: self.arrivals.on_watch(message.cache_id, message.on),
            Landed: self.arrivals.on_landed,
            Taken: lambda _: self.outbox.taken(),
            Ping: lambda message: self._wire.post(Pong(call=message.call)),
            Renew: self.ways.on_renew,
            Renewed: self.ways.on_renewed,
            Retire: self.ways.on_retire,
            Outdated: self.ways.on_outdated,
        }

    def _on_lookup(self, message: Lookup) -> None:
        found = self._home.keeper.offered(Name(**message.name.model_dump())) if self.is_ready else None
        if found is None:
            self._wire.post(Found(call=message.call, cache=None))
        elif self._grants.is_settled(found[0]):
            self._grants.told(found[0])
            self._wire.post(Found(call=message.call, cache=found[0].message(), slot=found[1]))
        else:
            entry = found[0]

            async def later() -> None:
                await self._grants.wait_settled(entry)
                self._on_lookup(message)

            self._spawn(later)

    def _on_answer(self, message: Found | Pulled | Pong) -> None:
        """Learnt at once, in the order in which the peer speaks: it may take the cache back in its next message."""
        call = self._calls.get(message.call)
        if isinstance(message, Found) and message.cache is not None:
            self._hold(message.cache, call.name if call is not None else None, message.slot)
        if call is not None:
            call.answer = message
            call.answered.set()

    def _hold(self, cache: CacheEntry, name: Name | None = None, slot: int = 0) -> None:
        if len(self.catalogue) >= MAX_HELD:
            raise ProtocolError(f"the peer told us of more than {MAX_HELD} caches")
        self.catalogue.learn(cache, name, slot)

    def _on_revoke(self, message: Revoke) -> None:
        """The peer takes a cache back: say so when no transfer of ours touches it."""
        remote = self.catalogue.withdraw(message.cache_id)

        async def answer() -> None:
            if remote is not None:
                with anyio.move_on_after(message.seconds):
                    await remote.wait_idle()
                for transfer in [t for t, used in self._transfers.items() if used is remote]:
                    self._taken_back.add(transfer)
                    transfer.cancel()
                await remote.wait_idle()
            self._wire.post(Revoked(cache_id=message.cache_id))

        self._spawn(answer)

    def _on_note(self, message: Note) -> None:
        self._untaken += 1
        if self._untaken > 64:
            raise ProtocolError("the peer sends notifications faster than they are taken")

        def taken() -> None:
            self._untaken -= 1
            if self.state in {LinkState.READY, LinkState.CLOSING}:
                self._wire.post(Taken())

        self._home.heard(self, decode(message), taken)

    # ---- until it ends ----

    async def serve(self) -> None:
        """Until the link is over: listen to the peer and, when asked to, part from it. Then give everything back."""
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                group.start_soon(self._part)
                group.start_soon(self._pump)
                group.start_soon(self._watch, group.cancel_scope)
                await self._listen()
                group.cancel_scope.cancel()
        finally:
            self._group = None
            await self._give_back()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        await self._broken.wait()
        scope.cancel()

    async def _pump(self) -> None:
        try:
            await self._wire.pump()
        except PeerLost as error:
            self.lost(str(error.args[0]))

    async def _listen(self) -> None:
        try:
            await self._hear()
        except LinkError as error:
            if self.state is LinkState.READY:
                self._end(type(error)(f"cluster {self.cluster_id}: {error.args[0]}"), LinkState.BROKEN)
                self._stop()
            elif self.state is LinkState.CLOSING:
                self._vanished = True

    async def _hear(self) -> None:
        """Until one end has had the last word."""
        reactions = self._reactions()
        while True:
            message = await self._wire.receive()
            if isinstance(message, Bye) and self.state is LinkState.CLOSING:
                return
            if isinstance(message, Disconnect) and self.state in {LinkState.READY, LinkState.CLOSING}:
                self._end(LinkClosed(f"cluster {self.cluster_id} unlinked: {message.reason}"), LinkState.CLOSING)
                self._spawn(self._say_bye)
            elif (react := reactions.get(type(message))) is not None:
                react(message)
            else:
                raise ProtocolError(f"cluster {self.cluster_id} said {message.type!r} on a {self.state.value} link")
            if self._wire.is_congested:
                await self._wire.flush()

    async def _say_bye(self) -> None:
        """The peer leaves: it hears on while our transfers end."""
        await self._drain(DRAIN)
        self._wire.post(Bye())
        with anyio.move_on_after(DRAIN):
            await self._wire.flush()
        self._broken.set()

    async def _part(self) -> None:
        """When asked to: drain, and tell the peer. In the link's own task, so that no caller can be cancelled half-way."""
        await self._leaving.wait()
        await self._drain(self._patience)
        self._wire.post(Disconnect(reason=self._reason))

    def _end(self, failure: LinkError, state: LinkState) -> None:
        """Decide that it is over, and why: no new transfer starts."""
        if self.failure is None:
            self.failure = failure
            level = logging.WARNING if state is LinkState.BROKEN else logging.INFO
            logger.log(level, "link to cluster %d: %s", self.cluster_id, failure)
        self.state = state

    def lost(self, why: str) -> None:
        """The peer is dead, or might as well be."""
        self._break(PeerLost(f"cluster {self.cluster_id}: {why}"))

    def _give_up(self, why: str) -> None:
        self._break(LinkError(f"cluster {self.cluster_id} {why}"))

    def _break(self, failure: LinkError) -> None:
        """Nothing can be trusted on it from here on: the link ends itself."""
        if self.state in {LinkState.READY, LinkState.CLOSING}:
            self._vanished = self.state is LinkState.CLOSING
            self._end(failure, LinkState.BROKEN)
            self._stop()
            self._broken.set()

    def _stop(self) -> None:
        """Ask what is under way to stop; it ends with ``failure``."""
        for outcome in [*self._transfers, *self._operations]:
            outcome.cancel()

    async def _drain(self, seconds: float) -> None:
        """Let what is under way finish; stop what takes longer."""
        with anyio.move_on_after(seconds):
            while not self._is_idle:
                await self._idle.wait()
            await self.outbox.wait_empty()
        self._stop()
        while not self._is_idle:  # bounded: they answer a cancellation within their grace
            await self._idle.wait()

    async def disconnect(self, reason: str, timeout: float) -> None:
        """End it in good order: no new transfers, those under way end, the peer agrees.

        If cancelled, the link is ended all the same.

        Raises:
            LinkTimeout: the peer did not answer in time; the link stays half closed until it does, or is abandoned.
            PeerLost: the peer was gone already. Our half is ended.
        """
        if self.state is LinkState.READY:
            self._end(LinkClosed(f"the link to cluster {self.cluster_id} was unlinked: {reason}"), LinkState.CLOSING)
            self._reason, self._patience = reason, timeout
            self._leaving.set()
        with anyio.move_on_after(timeout) as limit:
            await self._closed.wait()
        if limit.cancelled_caught:
            raise LinkTimeout(f"cluster {self.cluster_id} did not answer within {timeout:.3f} s", peer=self.cluster_id)
        if self._vanished:
            raise PeerLost(f"cluster {self.cluster_id} went away without a word", peer=self.cluster_id)

    async def abandon(self, failure: LinkError) -> None:
        """End this half at once, without telling anybody."""
        if self.failure is None:
            self._end(failure, LinkState.CLOSED)
        self._stop()
        await self._wire.aclose()
        self._broken.set()
        await self._closed.wait()

    async def _give_back(self) -> None:
        """Streams, channels, connection, in this order; each in bounded time. Runs once, also when cancelled."""
        if self.failure is None:
            self._end(LinkClosed(f"the link to cluster {self.cluster_id} was closed"), LinkState.CLOSED)
        elif self.state is LinkState.CLOSING:
            self.state = LinkState.CLOSED
        self._stop()
        try:
            with anyio.move_on_after(DRAIN + 3 * self._device.limits.grace, shield=True):
                is_quiet = [await self._quietly(stream) for stream in self._streams.values()]
                if all(is_quiet):  # else the device may still use a channel
                    self._is_shut = await self._quietly(self.ways)
            with anyio.move_on_after(1, shield=True):
                await self._quietly(self._wire)
        finally:
            for operation in list(self._operations):  # the doubtful ones, and those whose task never began
                operation.finish(TransferState.FAILED, self._copy_of_failure())
            self._grants.end(None if self._is_shut else self._lose)
            self.arrivals.end(self._copy_of_failure())
            self._closed.set()

    async def _quietly(self, part: Any) -> bool:
        """Close a part; False when it may still be in use."""
        try:
            await part.aclose()
        except LLMException as error:
            level = logging.ERROR if isinstance(error, StuckError) else logging.WARNING
            logger.log(level, "link to cluster %d: %s", self.cluster_id, error)
            return False
        except Exception:  # out of threads, for instance
            logger.exception("link to cluster %d: a part of it could not be closed", self.cluster_id)
            return False
        return True

    async def discard(self) -> None:
        """Give back a link that never became ready."""
        if self.failure is None:
            self.failure = LinkClosed("the link was never made")
        self.state = LinkState.CLOSED
        await self._give_back()

    async def wait_closed(self) -> LinkError:
        """Until everything was given back; why it ended."""
        await self._closed.wait()
        return self.failure or LinkClosed(f"the link to cluster {self.cluster_id} was closed")

    def __repr__(self) -> str:
        busy = len(self._transfers) + len(self._operations)
        return f"<Link to cluster {self.cluster_id} {self.state.value} {busy} transfers>"


def channel_name(client: int | str, server: int | str) -> str:
    """A name that no other channel has, within the vendor's 127 characters."""
    return f"aiodatadist_{client}_{server}_{secrets.token_hex(8)}"
