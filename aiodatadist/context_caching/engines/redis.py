"""Redis and Valkey as a pool: one server or a cluster, every call exactly as long as its deadline allows.

The key of a value is ``namespace:{distribute_key}:attribute_key``. What stands in braces is a *hash tag*: a cluster routes by
it alone, so one distribute key is one slot on one node. A value is stored with ``SET NX``, so the first writer wins, and read
with ``GETRANGE`` of one byte more than it should have: its length is proven, and one of another length costs no memory.

Calls are coroutines down to the socket. One that is cancelled or late drops its connection, and the memory that it sent from
is not used again: nothing that such a call left behind, here or at the server, can meet a later one.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, Final

import anyio
import anyio.lowlevel

from aiodatadist.context_caching.engines import addresses, lending
from aiodatadist.context_caching.engines.buffers import Buffer, Buffers
from aiodatadist.context_caching.engines.keys import flat
from aiodatadist.context_caching.engines.redis_nodes import (
    SLOTS,
    Account,
    Node,
    NodeDown,
    SSLConnection,
    View,
    key_slot,
    parse_nodes,
    parse_url,
)
from aiodatadist.context_caching.engines.resp import LARGEST, Filled, Reply, Request, ResponseError, request, storing
from aiodatadist.context_caching.pool import (
    Capabilities,
    GetStatus,
    KVPool,
    NodeInfo,
    PoolKey,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)

logger = logging.getLogger(__name__)

OPTIONS: Final = frozenset({"cluster", "connections", "memory"})
SILENT: Final = frozenset(
    {"decode_responses", "encoding", "protocol", "retry", "socket_timeout", "socket_connect_timeout"}
)
"""Options of redis-py that are ours to decide."""
ASKED: Final = 4
"""Servers that are asked at the same time what the cluster looks like: one that hangs holds nobody up."""
AGE: Final = 1.0
"""Seconds for which the view of a cluster is good enough while one of its servers is missing."""
REDIRECTS: Final = 3
"""How often a command follows a slot that moves."""


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
    """Made by :meth:`open`."""

    def __init__(self, account: Account, seed: Node, *, is_cluster: bool, memory: int) -> None:
        self.capabilities = Capabilities(
            "redis cluster" if is_cluster else "redis",
            placement=is_cluster,
            auth=bool(account.options.get("password")),
        )
        self._account = account
        self._seed = seed
        self._is_cluster = is_cluster
        self._nodes: dict[tuple[str, int], Node] = {(seed.host, seed.port): seed}
        self._view = View([(seed.host, seed.port)] * SLOTS)
        self._seen = -math.inf  # when the view was asked for
        self._is_doubtful = is_cluster
        self._learning = anyio.Lock(fast_acquire=True)
        self._buffers = Buffers(memory)
        self._is_closed = False

    @classmethod
    async def open(cls, url: str, *, timeout: float = 5.0) -> RedisPool:
        """Connect to ``redis://[[user]:password@]host[:port][/db]``, or with TLS to ``rediss://...``.

        Options of ours in the query: ``cluster=yes|no`` (asked for if absent), ``connections=8`` to each server at most,
        ``memory=256MiB`` for stages and values at most. Others are redis-py's, for instance ``ssl_ca_certs``.

        Args:
            timeout: seconds.

        Raises:
            TypeError, ValueError: the URL.
            PoolTimeout, PoolUnreachable: nobody answers; the account is refused; a cluster was named that is none.
        """
        account, host, port, memory, wanted = _read_url(url)
        seed = Node(host, port, account)
        try:
            with lending.until(anyio.current_time() + timeout, f"connecting to redis at {seed.name}"):
                (info,) = await seed.ask(request("INFO", "cluster"))
        except NodeDown as error:
            raise PoolUnreachable(str(error)) from error
        if not isinstance(info, bytes):
            await seed.aclose()
            raise PoolUnreachable(f"redis at {seed.name}: {info}")
        is_cluster = b"cluster_enabled:1" in info
        if wanted is not None and wanted != is_cluster:
            await seed.aclose()
            raise PoolUnreachable(
                f"redis at {seed.name} is {'' if is_cluster else 'not '}part of a cluster: see ?cluster="
            )
        return cls(account, seed, is_cluster=is_cluster, memory=memory)

    # ---- the contract ----

    async def stage(self, sizes: Sequence[int], *, deadline: float) -> list[Stage | None]:
        fits = lending.fitting(sizes, LARGEST, self._buffers.capacity)
        with lending.until(deadline, "memory for values"):
            lent = iter(await self._buffers.lend([size for size, fit in zip(sizes, fits, strict=True) if fit]))
        return [next(lent) if fit else None for fit in fits]

    async def put_many(self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float) -> list[PutStatus]:
        try:
            lending.same_length(keys, stages, "stages")
            buffers = [_buffer(stage) for stage in stages]
            requests = [storing(flat(key), buffer) for key, buffer in zip(keys, buffers, strict=True)]
            for buffer in buffers:
                buffer.is_idle = False
            statuses = [_put_status(reply) for reply in await self._run(requests, deadline, "put")]
            for buffer, status in zip(buffers, statuses, strict=True):
                buffer.is_idle = status >= PutStatus.STORED  # the server has read all of it
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
        requests = [
            request("GETRANGE", flat(key), 0, buffer.nbytes, into=buffer.with_tail())
            for key, buffer in zip(wanted, buffers, strict=True)
        ]
        try:
            replies = await self._run(requests, deadline, "get")
        except BaseException:
            for buffer in buffers:
                buffer.release()
            raise
        found = (_value(reply, buffer) for reply, buffer in zip(replies, buffers, strict=True))
        return [next(found) if fit else GetStatus.NO_ROOM for fit in fits]

    async def exists_many(self, keys: Sequence[PoolKey], *, lease_ms: int = 0, deadline: float) -> list[bool]:
        replies = await self._run([request("EXISTS", flat(key)) for key in keys], deadline, "exists", at_once=True)
        return [reply == 1 for reply in replies]

    async def remove_many(self, keys: Sequence[PoolKey], *, deadline: float) -> int:
        replies = await self._run([request("UNLINK", flat(key)) for key in keys], deadline, "remove", at_once=True)
        return sum(reply == 1 for reply in replies)

    async def nodes(self, *, deadline: float) -> list[NodeInfo]:
        with lending.until(deadline, "asking for the nodes"):
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            await self._refresh()
        found: dict[str, NodeInfo] = {node.name: NodeInfo(node.name, is_alive=False) for node in self._owners()}

        async def look(node: Node) -> None:
            try:
                (info,) = await node.ask(request("INFO", "memory"))
            except NodeDown:
                return
            if isinstance(info, bytes):
                facts = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
                found[node.name] = NodeInfo(
                    node.name, int(facts.get("maxmemory", 0)) or None, int(facts["used_memory"])
                )

        with anyio.CancelScope(deadline=deadline) as scope:
            async with anyio.create_task_group() as group:
                for node in self._owners():
                    group.start_soon(look, node)
        if not any(node.is_alive for node in found.values()):
            if scope.cancelled_caught:
                raise PoolTimeout(f"no answer from redis at {', '.join(found)} by the deadline")
            raise PoolUnreachable(f"no answer from redis at {', '.join(found)}")
        return list(found.values())

    async def healthy(self, *, deadline: float) -> bool:
        try:
            with lending.until(deadline, "ping"):
                self._check_open()
                return await self._first_answer(self._owners(), request("PING")) is not None
        except (PoolTimeout, PoolUnreachable):
            return False

    async def aclose(self) -> None:
        self._is_closed = True
        for node in [*self._nodes.values(), self._seed]:
            await node.aclose()

    # ---- requests to where their keys are ----

    async def _run(self, requests: list[Request], deadline: float, what: str, *, at_once: bool = False) -> list[Any]:
        """A reply for each request; a ``NodeDown`` where its server is gone, a ``ResponseError`` where it refused.

        Args:
            at_once: the requests for one server travel together; for small ones.

        Raises:
            PoolTimeout, PoolUnreachable: see :class:`KVPool`.
        """
        try:
            with lending.until(deadline, f"redis: {what} of {len(requests)} keys"):
                await anyio.lowlevel.checkpoint_if_cancelled()
                await self._refresh_if_doubtful()
                replies = await self._send(requests, at_once=at_once)
                again = [i for i, reply in enumerate(replies) if isinstance(reply, NodeDown) or _is_redirect(reply)]
                if again:
                    await self._mend([replies[i] for i in again], is_all=len(again) == len(replies))
                    for i, reply in zip(again, await self._send([requests[i] for i in again]), strict=True):
                        replies[i] = reply
                return replies
        except BaseException:  # somebody may hang: the others may have noticed by the next call
            self._is_doubtful = self._is_cluster
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
                    down = NodeDown("nobody has its slot" if node is None else f"redis at {node.name} is down")
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
        """One request, wherever its slot goes meanwhile."""
        before: tuple[Request, ...] = ()
        reply: Any = None
        for _ in range(REDIRECTS):
            try:
                reply = (await node.ask(*before, wanted))[-1]
            except NodeDown as error:
                return error
            if not _is_redirect(reply):
                return reply
            kind, _, place = str(reply).split()[:3]
            host, _, port = place.rpartition(":")
            node = self._node((host or node.host, int(port)))
            before = (request("ASKING"),) if kind == "ASK" else ()
            self._is_doubtful = True
        return reply

    async def _mend(self, failures: list[Any], *, is_all: bool) -> None:
        """Something is not where it was. Raises PoolUnreachable: and nobody else is there, either."""
        if not self._is_cluster:
            raise PoolUnreachable(str(failures[0])) from failures[0]
        is_old = anyio.current_time() > self._seen + AGE
        if is_all or is_old or any(_is_redirect(failure) for failure in failures):
            await self._refresh()

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
        is_old = anyio.current_time() > self._seen + AGE
        if self._is_doubtful or (is_old and self._is_cluster and self._view.failed):
            await self._refresh()

    async def _refresh(self) -> None:
        """Ask what the cluster looks like now. Raises PoolUnreachable: nobody answers."""
        if not self._is_cluster:
            return
        asked = anyio.current_time()
        async with self._learning:
            if self._seen >= asked:
                return
            node, text = await self._first_answer([*self._owners(), self._seed], request("CLUSTER", "NODES"))
            self._view = parse_nodes(text.decode(), node.host)
            self._seen, self._is_doubtful = anyio.current_time(), False
            for address in self._nodes.keys() - set(self._view.owners):
                self._nodes.pop(address).drop()

    async def _first_answer(self, nodes: list[Node], wanted: Request) -> tuple[Node, Any]:
        """Ask some servers, those first that are known to work, and take the first answer.

        Raises:
            PoolUnreachable: none of them answers, and none of the others.
        """
        nodes = list(dict.fromkeys(nodes))
        random.shuffle(nodes)
        nodes.sort(key=lambda node: node.is_down or self._is_given_up(node))
        answers: list[tuple[Node, Any]] = []
        failures: list[Exception] = []
        queue = iter(nodes)

        async def ask(scope: anyio.CancelScope) -> None:
            for node in queue:
                try:
                    (reply,) = await node.ask(wanted)
                except NodeDown as error:
                    failures.append(error)
                    continue
                if isinstance(reply, ResponseError):
                    failures.append(reply)
                    continue
                answers.append((node, reply))
                scope.cancel()
                return

        async with anyio.create_task_group() as group:
            for _ in range(ASKED):
                group.start_soon(ask, group.cancel_scope)
        if not answers:
            raise PoolUnreachable("; ".join(str(failure) for failure in failures)) from failures[-1]
        return answers[0]


def _read_url(url: str) -> tuple[Account, str, int, int, bool | None]:
    """Account, host, port, bytes for stages, and whether a cluster is wanted."""
    address = addresses.parse(url, ("redis", "rediss"), 6379, OPTIONS, others=True)
    options: dict[str, Any] = dict(parse_url(address.url))
    is_tls = options.pop("connection_class", None) is SSLConnection
    options.pop("host", None)
    options.pop("port", None)
    for name in sorted(SILENT & options.keys()):
        raise ValueError(f"option {name} is not for the URL: deadlines, retries and bytes are the pool's")
    cluster = address.options.get("cluster")
    if cluster not in {None, "yes", "no", "true", "false"}:
        raise ValueError(f"cluster is {cluster!r}: it has to be yes or no")
    wanted = None if cluster is None else cluster in {"yes", "true"}
    if wanted and options.get("db"):
        raise ValueError(f"db is {options['db']}: a cluster has only 0")
    memory = addresses.byte_size(address.options.get("memory", "256MiB"), "memory")
    connections = addresses.number(address.options.get("connections", "8"), "connections", 1, 1024)
    account = Account(options, is_tls, connections)
    try:
        account.wire(address.host, address.port)
    except TypeError as error:
        raise ValueError(f"redis-py refuses an option of the URL: {error}") from error
    return account, address.host, address.port, memory, wanted


def _buffer(stage: Stage) -> Buffer:
    if not isinstance(stage, Buffer):
        raise TypeError(f"a stage is a {type(stage).__name__}: it has to be one of this pool's")
    return stage


def _is_redirect(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and str(reply).startswith(("MOVED ", "ASK "))


def _put_status(reply: Any) -> PutStatus:
    if reply == b"OK":
        return PutStatus.STORED
    if reply is None:
        return PutStatus.PRESENT
    logger.debug("put: %s", reply)
    return PutStatus.REJECTED if _is_full(reply) else PutStatus.FAILED


def _is_full(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and ("maxmemory" in str(reply) or str(reply).startswith("OOM"))


def _value(reply: Reply, buffer: Buffer) -> Value | GetStatus:
    if reply is Filled.FILLED:
        return RedisValue(buffer)
    buffer.release()
    if isinstance(reply, bytes):
        return GetStatus.WRONG_LENGTH if reply else GetStatus.MISS
    logger.debug("get: %s", reply)
    return GetStatus.MISS if isinstance(reply, NodeDown) else GetStatus.FAILED
