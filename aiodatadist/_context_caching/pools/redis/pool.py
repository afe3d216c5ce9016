"""Redis and Valkey as a pool: one server or a cluster. No call takes longer than its deadline allows.

The key of a value is ``namespace:{distribute_key}:attribute_key``. The part in braces is a *hash tag*: a cluster routes
by it alone, so one distribute key is one slot on one node. A value is stored with ``SET NX``, so the first writer wins,
and read with ``GETRANGE`` of one byte more than expected: that proves its length, and a value of another length costs
no memory.

Calls are coroutines down to the socket. A cancelled or late call drops its connection, and the memory that it sent from
is not reused: nothing that such a call left behind, here or at the server, can meet a later one.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import anyio.lowlevel

from aiodatadist._context_caching.pools import lending
from aiodatadist._context_caching.pools.buffers import Buffer, Buffers
from aiodatadist._context_caching.pools.contract import (
    Capabilities,
    GetStatus,
    KVPool,
    NodeInfo,
    PoolKey,
    PoolRefused,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)
from aiodatadist._context_caching.pools.keys import flat
from aiodatadist._context_caching.pools.redis.nodes import (
    REFUSALS,
    SLOTS,
    Address,
    Node,
    NodeDown,
    View,
    key_slot,
)
from aiodatadist._context_caching.pools.redis.redirects import Redirect, redirect_in
from aiodatadist._context_caching.pools.redis.refusals import Refusals
from aiodatadist._context_caching.pools.redis.resp import (
    LARGEST,
    Filled,
    OtherLength,
    Reply,
    Request,
    ResponseError,
    keyed,
    reading,
    request,
    storing,
)
from aiodatadist._context_caching.pools.redis.tls_port import SpeaksTLS, or_tls
from aiodatadist._context_caching.pools.redis.topology import Shape, is_in_cluster, is_not_allowed, master_of, view_in
from aiodatadist._context_caching.pools.redis.url import RedisPlace, read_url
from aiodatadist._context_caching.pools.remarks import remarks_on
from aiodatadist._context_caching.pools.turns import Turns
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.foreign import printable

logger = logging.getLogger(__name__)

S = TypeVar("S")

ASKED: Final = 4
"""Servers that are asked for the cluster's view at the same time: one that hangs does not delay the others' answers."""
MAP_AGE_SECONDS: Final = 1.0
"""Seconds for which the view of a cluster is used without asking again while one of its servers is missing."""
REDIRECTS: Final = 3
"""The most times that a command follows a moving slot."""
TOLD: Final = 3
"""Most different refusals of one call that a message repeats."""
PROBE: Final = "?writes"
"""Suffix of a refused key for the probe: no value has that name, and it is on the same server under the same rules."""
NO_SERVER: Final = "no server of the cluster has a slot"


class RedisValue:
    """Memory with a value in it."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.address = buffer.address
        self.nbytes = buffer.nbytes

    def view(self) -> memoryview:
        return self._buffer.view().toreadonly()

    def release(self) -> None:
        self._buffer.release()


class RedisPool(KVPool):
    """A pool over Redis or Valkey, opened with :meth:`open`."""

    def __init__(self, place: RedisPlace, seeds: Sequence[Node], shape: Shape) -> None:
        account = place.account
        self.capabilities = Capabilities(
            "redis cluster" if shape is Shape.CLUSTER else "redis",
            placement=shape is Shape.CLUSTER,
            auth=bool(account.options.get("password")),
            private_values=True,
        )
        self._account = account
        self._seeds = list(seeds)
        self._service = place.service
        self._shape = shape
        self._is_cluster = shape is Shape.CLUSTER
        self._moves = shape is not Shape.SINGLE
        own = [] if shape is Shape.SENTINELS else [(seed.host, seed.port) for seed in seeds]
        self._nodes: dict[Address, Node] = dict(zip(own, seeds, strict=False))
        self._view = View([own[0] if own else None] * SLOTS)
        self._seen = -math.inf  # time of the last question for the view
        self._is_doubtful = self._moves
        self._learning = anyio.Lock(fast_acquire=True)
        self._buffers = Buffers(place.memory)
        self._turns = Turns()
        self._is_closed = False
        self.refusals = Refusals()
        self._incidents = Incidents()
        self._refusing: dict[str, str] = {}  # a refused key for each server that refused to write

    @classmethod
    async def open(cls, url: str, *, timeout: float = 5.0) -> RedisPool:
        """Connect to ``redis://[[user]:password@]host[:port][/db]``, or with TLS to ``rediss://...``.

        ``redis+sentinel://host[:port],.../service`` and ``rediss+sentinel://`` ask sentinels for the server,
        ``unix:///path`` names a socket. Options of this library in the query: ``cluster=yes|no`` (the server is asked
        by default), ``connections=8`` (most connections to each server for values; two more for everything else),
        ``memory=256MiB`` (most memory for stages and values), ``nat=announced:port=reached:port,...``, and
        ``sentinel_username`` and ``sentinel_password``. Other options are redis-py's, for instance ``ssl_ca_certs``.

        Args:
            timeout: seconds.

        Raises:
            TypeError, ValueError: if the URL is wrong.
            PoolTimeout, PoolUnreachable: if no server answers.
            PoolRefused: if the account is refused, the server is not Redis or expects TLS, or ``cluster=`` is wrong.
        """
        place = read_url(url)
        account, host, port = place.account, place.host, place.port
        watcher = place.watcher
        seeds = [Node(host, port, account)] if watcher is None else [Node(*each, watcher) for each in place.sentinels]
        names = ", ".join(seed.name for seed in seeds)
        for remark in remarks_on(url):
            logger.warning("redis at %s: %s", printable(names), remark)
        if watcher is not None:
            return await cls._open_behind(place, seeds, timeout)
        (seed,) = seeds
        how = " with TLS" if account.is_tls else ""
        try:
            with lending.until(anyio.current_time() + timeout, f"connecting to redis at {seed.name}{how}"):
                ask = partial(is_in_cluster, seed)
                is_tested = account.is_tls or account.path is not None
                said = await (ask() if is_tested else or_tls(ask, host, port, seed.name))
        except SpeaksTLS as error:
            raise PoolRefused(str(error)) from error
        except NodeDown as error:
            raise (PoolRefused if isinstance(error.__cause__, REFUSALS) else PoolUnreachable)(str(error)) from error
        refusal = printable(said) if isinstance(said, ResponseError) else ""
        is_cluster = said is True or (said is None and bool(place.wanted))  # None: the account may not ask
        if not refusal and place.wanted is not None and place.wanted != is_cluster:
            refusal = f"it is {'' if is_cluster else 'not '}part of a cluster: see ?cluster="
        if refusal:
            await seed.aclose()
            raise PoolRefused(f"redis at {seed.name}: {refusal}")
        return cls(place, [seed], Shape.CLUSTER if is_cluster else Shape.SINGLE)

    @classmethod
    async def _open_behind(cls, place: RedisPlace, sentinels: Sequence[Node], timeout: float) -> RedisPool:
        """Ask sentinels for the server, and see if it takes the account. Raises as :meth:`open`."""
        pool = cls(place, sentinels, Shape.SENTINELS)
        try:
            with lending.until(anyio.current_time() + timeout, f"asking for {place.service} at its sentinels"):
                await pool._refresh()
                for node in pool._owners():
                    (reply,) = await node.ask(request("PING"))
                    if isinstance(reply, ResponseError):
                        raise PoolRefused(f"redis at {node.name}: {printable(reply)}")
        except NodeDown as error:
            await pool.aclose()
            raise (PoolRefused if isinstance(error.__cause__, REFUSALS) else PoolUnreachable)(str(error)) from error
        except BaseException:
            await pool.aclose()
            raise
        return pool

    # ---- the contract ----

    async def stage(self, sizes: Sequence[int], *, deadline: float) -> list[Stage | None]:
        fits = lending.fitting(sizes, LARGEST, self._buffers.capacity)
        with lending.until(deadline, "memory for values"):
            lent = iter(await self._buffers.lend([size for size, fit in zip(sizes, fits, strict=True) if fit]))
        return [next(lent) if fit else None for fit in fits]

    def why_no_room(self, nbytes: int) -> str:
        if nbytes > LARGEST:
            return f"a value has {LARGEST} at most"
        if nbytes > self._buffers.capacity:
            return f"values on their way have {self._buffers.capacity} bytes: see memory= in the URL"
        return "the server is full: see its maxmemory and maxmemory-policy"

    async def put_many(self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float) -> list[PutStatus]:
        try:
            lending.same_length(keys, stages, "stages")
            buffers = [_buffer(stage) for stage in stages]
            pairs = zip(keys, buffers, strict=True)
            requests = await self._prepared(lambda pair: storing(flat(pair[0]), pair[1]), pairs, deadline, "put")
            for buffer in buffers:
                buffer.is_idle = False
            replies = await self._run(requests, deadline, "put")
            self._note_refusals("put", requests, replies)
            statuses = [_put_status(reply) for reply in replies]
            for buffer, status in zip(buffers, statuses, strict=True):
                # True if the server has read all of it: then the memory can be reused
                buffer.is_idle = status >= PutStatus.STORED
            return statuses
        finally:
            for stage in stages:
                stage.release()

    async def get_many(
        self, keys: Sequence[PoolKey], sizes: Sequence[int], *, deadline: float
    ) -> list[Value | GetStatus]:
        lending.same_length(keys, sizes, "sizes")
        fits = lending.fitting(sizes, LARGEST, self._buffers.capacity)
        with lending.until(deadline, "memory for values"):
            buffers = await self._buffers.lend([size for size, fit in zip(sizes, fits, strict=True) if fit])
        wanted = [key for key, fit in zip(keys, fits, strict=True) if fit]
        try:
            pairs = zip(wanted, buffers, strict=True)
            requests = await self._prepared(lambda pair: reading(flat(pair[0]), pair[1]), pairs, deadline, "get")
            replies = await self._run(requests, deadline, "get")
            self._note_refusals("get", requests, replies)
        except BaseException:
            for buffer in buffers:
                buffer.release()
            raise
        found = (_value(reply, buffer) for reply, buffer in zip(replies, buffers, strict=True))
        return [next(found) if fit else GetStatus.NO_ROOM for fit in fits]

    async def exists_many(self, keys: Sequence[PoolKey], *, lease: float = 0.0, deadline: float) -> list[bool]:
        exists = keyed("EXISTS")
        requests = await self._prepared(lambda key: exists(flat(key)), keys, deadline, "exists")
        replies = await self._run(requests, deadline, "exists", at_once=True)
        if refused := [reply for reply in replies if isinstance(reply, ResponseError)]:
            told = "%d of %d keys count as absent: %s", len(refused), len(keys), _in_words(refused)
            self._incidents.add(Incident.LOOKUP_FAILED, logger, *told)
        return [reply == 1 for reply in replies]

    async def remove_many(self, keys: Sequence[PoolKey], *, deadline: float) -> int:
        unlink = keyed("UNLINK")
        requests = await self._prepared(lambda key: unlink(flat(key)), keys, deadline, "remove")
        replies = await self._run(requests, deadline, "remove", at_once=True)
        if failed := [reply for reply in replies if not isinstance(reply, int)]:  # they can still be found
            raise PoolUnreachable(f"{len(failed)} of {len(keys)} keys were not removed: {_in_words(failed)}")
        return sum(reply == 1 for reply in replies)

    async def nodes(self, *, deadline: float) -> list[NodeInfo]:
        with lending.until(deadline, "asking for the nodes"):
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            await self._refresh()
        found: dict[str, NodeInfo] = {node.name: NodeInfo(node.name, is_alive=False) for node in self._owners()}
        if not found:
            raise PoolUnreachable(NO_SERVER)

        async def look(node: Node) -> None:
            try:
                (info,) = await node.ask(request("INFO", "memory"))
            except NodeDown:
                return
            if isinstance(info, bytes):
                found[node.name] = NodeInfo(node.name, _fact(info, b"maxmemory") or None, _fact(info, b"used_memory"))
            elif is_not_allowed(info):
                found[node.name] = NodeInfo(node.name)

        with anyio.CancelScope(deadline=deadline) as scope:
            async with anyio.create_task_group() as group:
                for node in self._owners():
                    group.start_soon(look, node)
        if not any(node.is_alive for node in found.values()):
            if scope.cancelled_caught:
                raise PoolTimeout(f"no answer from redis at {printable(', '.join(found))} by the deadline")
            raise PoolUnreachable(f"no answer from redis at {printable(', '.join(found))}")
        return list(found.values())

    async def healthy(self, *, deadline: float) -> bool:
        try:
            with lending.until(deadline, "ping"):
                self._is_doubtful |= self._shape is Shape.SENTINELS  # a former master still answers to reads
                await self._refresh_if_doubtful()
                await self._first_answer(self._owners(), request("PING"))
                return await self._takes_writes()
        except (PoolTimeout, PoolUnreachable):
            self._is_doubtful = self._moves  # a caller that only checks health must notice a moved slot, too
            return False

    def _note_refusals(self, what: str, requests: Sequence[Request], replies: Sequence[Any]) -> None:
        """Count and log refused commands, and remember the servers that refuse to write."""
        for asked, reply in zip(requests, replies, strict=True):
            if not isinstance(reply, ResponseError) and not (self._refusing and what == "put"):
                continue
            server = "no server" if (node := self._owner(asked)) is None else node.name
            if isinstance(reply, ResponseError):
                self.refusals.note(what, server, str(reply), anyio.current_time())
                if what == "put" and not _is_full(reply):
                    self._refusing[server] = asked.key.decode()
            elif not isinstance(reply, NodeDown):
                self._refusing.pop(server, None)

    async def _takes_writes(self) -> bool:
        """Ask each server that refused to write again, with a ``SET`` that can store nothing; return True if none refuses.

        A full server counts as healthy: it keeps what it has.
        """
        refusing = dict(self._refusing)
        probes = [request("SET", f"{key}{PROBE}", "", "XX") for key in refusing.values()]
        for server, reply in zip(refusing, await self._send(probes, at_once=True), strict=True):
            if isinstance(reply, NodeDown) or (isinstance(reply, ResponseError) and not _is_full(reply)):
                logger.debug("redis at %s does not write: %s", printable(server), printable(reply))
            elif self._refusing.get(server) == refusing[server]:
                del self._refusing[server]
        return not self._refusing

    async def aclose(self) -> None:
        self._is_closed = True
        for node in [*self._nodes.values(), *self._seeds]:
            await node.aclose()

    # ---- requests to where their keys are ----

    async def _prepared(
        self, make: Callable[[S], Request], items: Iterable[S], deadline: float, what: str
    ) -> list[Request]:
        """Make the requests of a call when its turn has come. Raises PoolTimeout at the deadline."""
        made: list[Request] = []
        with lending.until(deadline, f"redis: preparing {what}"):
            await self._turns.make(make, items, made)
        return made

    async def _run(self, requests: list[Request], deadline: float, what: str, *, at_once: bool = False) -> list[Any]:
        """Return a reply for each request: a ``NodeDown`` if its server has gone, a ``ResponseError`` if it refused.

        Args:
            at_once: if true, the requests for one server travel together; for small requests.

        Raises:
            PoolTimeout, PoolUnreachable: see :class:`KVPool`.
        """
        try:
            with lending.until(deadline, f"redis: {what} of {len(requests)} keys"):
                await anyio.lowlevel.checkpoint_if_cancelled()
                await self._refresh_if_doubtful()
                replies = await self._send(requests, at_once=at_once)
                again = [i for i, reply in enumerate(replies) if isinstance(reply, NodeDown) or self._is_moved(reply)]
                if again:
                    await self._mend([replies[i] for i in again], is_all=len(again) == len(replies))
                    for i, reply in zip(again, await self._send([requests[i] for i in again]), strict=True):
                        replies[i] = reply
                    if self._shape is Shape.SENTINELS and all(isinstance(reply, NodeDown) for reply in replies):
                        raise PoolUnreachable(str(replies[0])) from replies[0]
                return replies
        except BaseException:  # a server may hang, and another may have taken its place by the next call
            self._is_doubtful = self._moves
            raise

    async def _send(self, requests: Sequence[Request], *, at_once: bool = False) -> list[Any]:
        replies: list[Any] = [None] * len(requests)
        by_node: dict[Node | None, list[int]] = {}
        for i, each in enumerate(requests):
            by_node.setdefault(self._owner(each), []).append(i)

        async def together(node: Node, wanted: list[int]) -> None:
            answers: Sequence[Any]
            try:
                answers = await node.ask(*(requests[i] for i in wanted))
            except NodeDown as error:
                answers = [error] * len(wanted)
            for i, answer in zip(wanted, answers, strict=True):
                replies[i] = answer

        async def one_by_one(node: Node, wanted: Iterable[int]) -> None:
            for i in wanted:
                replies[i] = await self._follow(node, requests[i])

        async with anyio.create_task_group() as group:
            for node, wanted in by_node.items():
                if node is None or self._is_given_up(node):
                    down = NodeDown("no server has its slot" if node is None else f"redis at {node.name} is down")
                    for i in wanted:
                        replies[i] = down
                elif at_once:
                    group.start_soon(together, node, wanted)
                else:
                    queue = iter(wanted)
                    for _ in range(min(len(wanted), self._account.connections)):
                        group.start_soon(one_by_one, node, queue)
        return replies

    async def _follow(self, node: Node, wanted: Request) -> Any:
        """Send one request, and follow its slot if that moves meanwhile."""
        before: tuple[Request, ...] = ()
        reply: Any = None
        for _ in range(REDIRECTS):
            try:
                reply = (await node.ask(*before, wanted))[-1]
            except NodeDown as error:
                return error
            if (redirect := self._redirect(reply)) is None:
                return reply
            address = self._account.reached((redirect.host or node.host, redirect.port))
            if not await self._is_member(address):
                return reply
            node = self._node(address)
            if redirect.has_moved:
                self._is_doubtful = True
            before = () if redirect.has_moved else (request("ASKING"),)
        return reply

    async def _mend(self, failures: list[Any], *, is_all: bool) -> None:
        """Look at the cluster again if slots moved or connections broke.

        Args:
            is_all: True if no request was answered.

        Raises:
            PoolUnreachable: if there is no other server.
        """
        if self._shape is Shape.SINGLE:
            if is_all:
                raise PoolUnreachable(str(failures[0])) from failures[0]
            return  # other requests were answered: only a connection broke
        if self._shape is Shape.SENTINELS:
            await self._refresh()
            return
        redirects = [self._redirect(failure) for failure in failures]
        is_old = anyio.current_time() > self._seen + MAP_AGE_SECONDS
        if any(r.has_moved if r else is_all or is_old for r in redirects):
            await self._refresh()

    def _is_moved(self, reply: Any) -> bool:
        """Return True if another server has the key now: its slot moved, or sentinels chose another master."""
        is_replica = self._shape is Shape.SENTINELS and isinstance(reply, ResponseError)
        return self._redirect(reply) is not None or (is_replica and str(reply).startswith("READONLY"))

    def _redirect(self, reply: Any) -> Redirect | None:
        """Return the redirect in a reply; None if there is none. From a server outside a cluster a redirect is a fault."""
        return redirect_in(reply) if self._is_cluster else None

    async def _is_member(self, address: tuple[str, int]) -> bool:
        """Return True if the cluster's own list has this address. The password is sent only to such an address."""
        if address not in self._view.members:
            await self._refresh()
        return address in self._view.members

    # ---- who is where ----

    def _check_open(self) -> None:
        if self._is_closed:
            raise PoolUnreachable("this pool is closed")

    def _owner(self, wanted: Request) -> Node | None:
        address = self._view.owners[key_slot(wanted.key) if self._is_cluster else 0]
        return None if address is None else self._node(address)

    def _owners(self) -> list[Node]:
        return [self._node(address) for address in dict.fromkeys(self._view.owners) if address is not None]

    def _node(self, address: tuple[str, int]) -> Node:
        if address not in self._nodes:
            self._nodes[address] = Node(*address, self._account)
        return self._nodes[address]

    def _is_given_up(self, node: Node) -> bool:
        return (node.host, node.port) in self._view.failed

    async def _refresh_if_doubtful(self) -> None:
        self._check_open()
        is_old = anyio.current_time() > self._seen + MAP_AGE_SECONDS
        if self._is_doubtful or (is_old and self._view.failed):
            await self._refresh()

    async def _refresh(self) -> None:
        """Ask for the cluster's view, or sentinels for the server. Raises PoolUnreachable if none answers."""
        if self._shape is Shape.SINGLE:
            return
        asked = anyio.current_time()
        async with self._learning:
            if self._seen >= asked:
                return
            if self._is_cluster:
                node, said = await self._first_answer([*self._owners(), *self._seeds], request("CLUSTER", "NODES"))
            else:
                node, said = await self._first_answer(self._seeds, master_of(self._service))
            self._view = view_in(said, node, self._account)
            owners = set(self._view.owners)
            self._seen, self._is_doubtful = anyio.current_time(), owners == {None}
            for address in self._nodes.keys() - owners:
                self._nodes.pop(address).drop()

    async def _first_answer(self, nodes: list[Node], wanted: Request) -> tuple[Node, Any]:
        """Ask several servers, working ones first, and return the first answer.

        Raises:
            PoolUnreachable: if no server answers, or there is none.
        """
        if not nodes:
            raise PoolUnreachable(NO_SERVER)
        nodes = list(dict.fromkeys(nodes))
        random.shuffle(nodes)
        nodes.sort(key=lambda node: node.is_down or self._is_given_up(node))
        answers: list[tuple[Node, Any]] = []
        failures: list[Exception] = []
        queue = iter(nodes)

        async def ask(scope: anyio.CancelScope) -> None:
            for node in queue:
                try:
                    replies = await node.ask(wanted, answers=answers)
                except NodeDown as error:
                    failures.append(error)
                    continue
                reply = tuple(replies) if wanted.has_pair else replies[0]
                if isinstance(replies[0], ResponseError):
                    failures.append(ResponseError(f"redis at {node.name}: {replies[0]}"))
                    continue
                if reply == (None,):
                    failures.append(ResponseError(f"sentinel at {node.name} knows no {self._service}"))
                    continue
                answers.append((node, reply))
                scope.cancel()
                return

        async with anyio.create_task_group() as group:
            for _ in range(ASKED):
                group.start_soon(ask, group.cancel_scope)
        if not answers:
            raise PoolUnreachable(_in_words(failures)) from failures[-1]
        return answers[0]


def _buffer(stage: Stage) -> Buffer:
    if not isinstance(stage, Buffer):
        raise TypeError(f"a stage is a {type(stage).__name__}: must be one of this pool's")
    return stage


def _in_words(failures: Iterable[object]) -> str:
    """Return the different reasons why servers failed."""
    return "; ".join(list(dict.fromkeys(map(printable, failures)))[:TOLD])


def _fact(info: bytes, name: bytes) -> int | None:
    """Return a number from an answer to ``INFO``, or None if it is missing."""
    found = re.search(rb"^%b:([0-9]{1,20})\r?$" % name, info, re.MULTILINE)
    return None if found is None else int(found[1])


def _put_status(reply: Any) -> PutStatus:
    if reply == b"OK":
        return PutStatus.STORED
    if reply is None:
        return PutStatus.PRESENT
    logger.debug("put: %s", printable(reply))
    return PutStatus.REJECTED if _is_full(reply) else PutStatus.FAILED


def _is_full(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and ("maxmemory" in str(reply) or str(reply).startswith("OOM"))


def _value(reply: Reply, buffer: Buffer) -> Value | GetStatus:
    if reply is Filled.FILLED:
        return RedisValue(buffer)
    buffer.release()
    if isinstance(reply, OtherLength):
        return GetStatus.WRONG_LENGTH if reply.nbytes else GetStatus.MISS
    logger.debug("get: %s", printable(reply))
    return GetStatus.MISS if isinstance(reply, NodeDown) else GetStatus.FAILED
