"""What an initialised LLMDataDist consists of: device, transport, listener, links, and the tasks that serve them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.abc

from aiodatadist.cache.digester import Digester
from aiodatadist.cache.local_copy import LocalCopies
from aiodatadist.cache.registry import CacheRegistry
from aiodatadist.cluster.dial import dial
from aiodatadist.cluster.host_names import HostNames
from aiodatadist.cluster.link_changes import ChangeFeed
from aiodatadist.cluster.listen_address import find_listen_address
from aiodatadist.cluster.listener import Listener
from aiodatadist.cluster.liveness import Heartbeats
from aiodatadist.cluster.relinker import Relinker
from aiodatadist.concurrency.blocking_calls import in_thread
from aiodatadist.concurrency.deadlines import Deadlines
from aiodatadist.concurrency.resident import Resident
from aiodatadist.concurrency.signal import Signal
from aiodatadist.concurrency.spawner import Spawner
from aiodatadist.config.llm_config import LLMConfig, PoolConfig
from aiodatadist.config.option_rules import SERVICE_LEVELS, TRAFFIC_CLASSES, known
from aiodatadist.counting import Observer, Totals, forget_oldest
from aiodatadist.device import Device
from aiodatadist.errors import (
    AuthError,
    LinkClosed,
    LinkError,
    LinkTimeout,
    LLMException,
    LLMStatusCode,
    NotLinked,
)
from aiodatadist.layered import LayeredTransfer
from aiodatadist.link import (
    DRAIN_TIMEOUT,
    BlockLeases,
    Connection,
    Link,
    LinkStatistics,
    Notification,
    NotificationInbox,
    channel_name,
    hear_first,
)
from aiodatadist.transport import RdmaConfig, Transport, open_transport
from aiodatadist.values.addresses import host_port
from aiodatadist.values.descriptors import LLMRole, Placement
from aiodatadist.wire.auth import Side
from aiodatadist.wire.frames import Unknown
from aiodatadist.wire.handshake import Handshake, OwnListener
from aiodatadist.wire.messages import MINOR, AttachHeartbeats, Connect, EndpointInfo, Hello, Message, Ping, Pong

logger = logging.getLogger(__name__)

MAX_LINKS = 512
HANDSHAKE_TIMEOUT = 60.0
"""Seconds that a client has, from connecting to the end of the handshake, whatever it asks for."""
CLIENT_TIMEOUT = 5.0
"""Seconds that a client has for saying who it is."""
MAX_PENDING_CLIENTS = 64
"""Connections that have not said so yet, before the next one gets a fiftieth of the time."""
PART_TIMEOUT = 2 * DRAIN_TIMEOUT
"""Seconds that links which are being ended have for it, before a caller that needs them gone is told that they are not."""


class _Attempt:
    """A link that is being made because a caller here asked for it."""

    def __init__(self, deadline: float) -> None:
        self.scope = anyio.CancelScope(deadline=deadline)
        self.settled = anyio.Event()
        self.error: LinkError | None = None
        self.waits_for = ""

    def now_waits_for(self, what: str) -> None:
        """What has not happened yet, in words."""
        self.waits_for = what


class PendingClient:
    """A client that has not said yet who it is: it has little time for that, and less when many others have not either."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seconds = CLIENT_TIMEOUT / 50 if engine.pending_clients >= MAX_PENDING_CLIENTS else CLIENT_TIMEOUT
        self._is_known = False
        self.scope = anyio.CancelScope(deadline=anyio.current_time() + self._seconds)
        engine.pending_clients += 1

    def is_known(self) -> None:
        """It proved who it is, or is gone: from here on it has the time of a handshake."""
        if not self._is_known:
            self._is_known = True
            self._engine.pending_clients -= 1
            self.scope.deadline = anyio.current_time() + HANDSHAKE_TIMEOUT

    @property
    def wanted(self) -> str:
        if self._is_known:
            return f"open its channel within {HANDSHAKE_TIMEOUT:g} s"
        return f"say who it is within {self._seconds:g} s"


class Owner(Protocol):
    """What the engine has to know of its LLMDataDist."""

    @property
    def cluster_id(self) -> int: ...
    @property
    def role(self) -> LLMRole: ...
    @property
    def instance(self) -> str: ...
    @property
    def totals(self) -> Totals: ...
    @property
    def observer(self) -> Observer | None: ...


class Engine:
    """What an initialised LLMDataDist consists of. Lives in its resident's task, which owns the task group of all else.

    Args:
        serving_a_request: entered, with the peer's cluster id, around the answer to each request of that peer's
            to move bytes.
    """

    def __init__(
        self,
        owner: Owner,
        config: LLMConfig,
        resident: Resident,
        serving_a_request: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self.resident = resident
        self.check_here = resident.check_here
        self.device: Device
        self.transport: Transport
        self.registry: CacheRegistry
        self.digester: Digester
        self.local_copies: LocalCopies
        self.notification_inbox = NotificationInbox(resident.check_here)
        self.totals = owner.totals
        self.observer = owner.observer
        self.block_leases = BlockLeases(self.totals, resident.check_here)
        self.changes = ChangeFeed(self.totals, resident.check_here)
        self.deadlines = Deadlines()
        self.layered: set[LayeredTransfer] = set()
        self.transfer_checksum = config.transfer_checksum
        self.serving_a_request = serving_a_request
        self._owner = owner
        self._config = config
        self._links: dict[int, Link] = {}
        self.peek_link = self._links.get
        self.relinker = Relinker(config.relink_policy, self, self.changes)
        self._heartbeats = Heartbeats(config.heartbeat_interval / 1000, config.heartbeat_misses)
        self._host_names = HostNames()
        self._linked = Signal()
        self._coming: Counter[int] = Counter()  # links that these clusters are making with us
        self._attempts: dict[int, _Attempt] = {}
        self._opening: set[Link] = set()
        self._replaced: set[Link] = set()  # which are still being given back
        self._met_itself = self._is_linked_to_itself = False
        self._refusals: dict[int, str] = {}  # why this end's last attempt at a cluster failed
        self._group: anyio.abc.TaskGroup | None = None
        self._listener: Listener | None = None
        self._listeners: set[Listener] = set()
        self._stopping = resident.stopping
        self._is_over = False
        self.pending_clients = 0

    # ---- life ----

    async def run(self, started: asyncio.Future[None]) -> None:
        """From opening to the end. What goes wrong while opening is raised; afterwards nothing is."""
        async with AsyncExitStack() as stack:
            self.device = await stack.enter_async_context(await Device.open(self._config.device))
            self.transport = await in_thread(self._open_transport)
            stack.push_async_callback(self.transport.aclose)
            self.registry = CacheRegistry(self.device, self.transport, self.spawn, self.cluster_id)
            await self._open_pools()
            self.local_copies = LocalCopies(self.device)
            stack.push_async_callback(self.local_copies.aclose)
            self.digester = Digester(self.device)
            stack.push_async_callback(self.digester.aclose)
            stack.callback(self._heartbeats.close)
            address = await find_listen_address(self._config)
            listener = None if address is None else await Listener.open(*address, self.auth_key, "init")
            self._group = await stack.enter_async_context(anyio.create_task_group())
            self._replace_listener(listener)
            started.set_result(None)
            try:
                await self._stopping.wait()
                self.registry.end_allocating()
                await self._part_from_all()
            finally:  # also after a bug: no caller may wait for what cannot come any more
                self._end_all()
            self._group.cancel_scope.cancel()
        for transfer in list(self.layered):  # those whose task never began
            transfer.abandon()
        self.registry.end()

    def _end_all(self) -> None:
        """Nothing new begins from here on, and who waits for it is told."""
        self._is_over = True
        self._stopping.set()
        self._linked.set()
        self.relinker.end()
        self.changes.close()
        self.notification_inbox.close()
        self.registry.end_allocating()
        self.block_leases.end()
        for transfer in list(self.layered):
            transfer.fail(LinkClosed("the cluster was finalized"))
        for listener in list(self._listeners):
            self.close_listener(listener)

    def start_layered(self, transfer: LayeredTransfer) -> None:
        """Start a layered transfer; it ends when we do, at the latest."""
        tasks = Spawner(self._tasks())
        self.layered.add(transfer)
        transfer.add_done_callback(self.layered.discard)
        transfer.start(tasks.start_soon)

    def _open_transport(self) -> Transport:
        config = self._config
        for line in config.without_effect():
            logger.warning("cluster %d: %s", self.cluster_id, line)
        rdma = RdmaConfig(
            known(config.rdma_traffic_class, TRAFFIC_CLASSES), known(config.rdma_service_level, SERVICE_LEVELS)
        )
        return open_transport(config.transport, self.device, config.local_comm_res or None, rdma)

    async def _open_pools(self) -> None:
        for placement, name in ((Placement.DEVICE, "mem_pool_cfg"), (Placement.HOST, "host_mem_pool_cfg")):
            text = getattr(self._config, name)
            if text:
                await self.registry.open_pool(placement, PoolConfig.parse(text, name))

    async def _part_from_all(self) -> None:
        self._linked.set()
        self.relinker.end()
        for attempt in self._attempts.values():
            attempt.scope.cancel()
        for link in list(self._links.values()):
            self.spawn(self._part, link)
        with anyio.move_on_after(1.0):
            while self._links:
                await next(iter(self._links.values())).wait_closed()

    def check_running(self) -> None:
        """Raises LLMException: it is being finalized, or was. ForkError: this is a child of its process."""
        self.resident.check_process()
        if self._stopping.is_set():
            raise LLMException(
                f"cluster {self.cluster_id} is finalized",
                status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
                hint="init() it again, and take its cache_manager anew",
            )

    def spawn(self, call: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> bool:
        """Start a task that ends with the engine; False if that is over already."""
        if self._group is None or self._is_over:
            return False
        Spawner(self._group).start_soon(call, *args)
        return True

    @property
    def cluster_id(self) -> int:
        return self._owner.cluster_id

    @property
    def timeout(self) -> float:
        """Seconds for one transfer."""
        return self._config.sync_kv_timeout / 1000

    @property
    def one_sided(self) -> bool:
        """The end that wants bytes moves them; else the peer is asked to."""
        return self._config.enable_remote_cache_accessible

    def heard(self, cluster_id: int, generation: int, payload: bytes, taken: Callable[[], None]) -> None:
        self.notification_inbox.put(Notification(cluster_id, payload, generation), taken)

    # ---- peers that come to us ----

    def _replace_listener(self, fresh: Listener | None) -> None:
        """From now on, and no more on the old one."""
        old, self._listener = self._listener, fresh
        if old is not None:
            self.close_listener(old)
        if fresh is not None:
            self._serve_on(fresh)

    def _serve_on(self, listener: Listener) -> None:
        self._listeners.add(listener)
        self._tasks().start_soon(listener.serve, self._serve_client, self._tasks())

    def close_listener(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        listener.close()

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Where clients find us, with the real port."""
        return None if self._listener is None else self._listener.address

    async def listen_elsewhere(self, address: tuple[str, int] | None) -> None:
        """Listen on this address from now on; None: do not listen.

        Raises LLMException: the port cannot be had; the old one goes on."""
        self._replace_listener(None if address is None else await Listener.open(*address, self.auth_key, "switch_role"))

    async def listen_for_members(self, host: str, key: bytes) -> Listener:
        """Serve clients that have this key, on a port of their own, until :meth:`close_listener`."""
        listener = await Listener.open(host, 0, key, "link")
        self._serve_on(listener)
        return listener

    async def _serve_client(self, sock: socket.socket, listener: Listener) -> None:
        """A connection came: a cluster that wants a link, or the heartbeats of one that is being made."""
        client, who = PendingClient(self), _place(sock)
        link: Link | None = None
        try:
            first: Message | Unknown | None = None
            with client.scope:
                first = await hear_first(sock)
                if isinstance(first, Hello):
                    who += f", cluster {first.cluster_id}"
                if not isinstance(first, AttachHeartbeats):
                    link = await self._welcome(sock, first, client, listener)
            if client.scope.cancelled_caught:
                raise LinkTimeout(f"the client did not {client.wanted}")
            if isinstance(first, AttachHeartbeats):  # not within the scope: heartbeats go on for as long as their link
                client.is_known()
                beating = self._heartbeats.accept(first)
                await self._heartbeats.beat(beating, socket.socket(fileno=sock.detach()))
        except OwnListener:
            logger.debug("cluster %d was asked for a link by itself", self.cluster_id)
        except LinkError as error:
            logger.warning("cluster %d: a client was not linked: %s: %s", self.cluster_id, who, error)
        except Exception:
            logger.exception("cluster %d: a client was not linked: %s", self.cluster_id, who)
        finally:
            client.is_known()
            if link is None:
                sock.close()
        if link is not None:
            await self._serve(link)

    async def _welcome(
        self, sock: socket.socket, first: Message | Unknown, client: PendingClient, listener: Listener
    ) -> Link:
        """Make a link with a client, which said this. Raises LinkError: there is none, and the socket is closed."""
        link = Link((await Connection.over(sock)).wire(), self.device, self.transport, self)
        self._heartbeats.expect(link)
        try:
            peer = first.cluster_id if isinstance(first, Hello) else None
            handshake = Handshake("server", self._hello(listener.key, peer), listener.key)
            await self._make(link, handshake, first=first, client=client, listener=listener)
            self._tasks()  # raises where no new link may begin
            link.is_owned = not self._config.links_have_owners
            self._file(link)
            link.is_mutual = True
            self._tell_of(link)
        except LinkError as error:
            self._met_itself |= isinstance(error, OwnListener)
            await link.refuse(error)
            raise
        except asyncio.CancelledError:
            await link.refuse(self._gave_up())
            raise
        finally:
            self._heartbeats.forget(link)
            await self._settle(link)
        return link

    async def _make(
        self,
        link: Link,
        handshake: Handshake,
        connect: Connect | None = None,
        first: Message | Unknown | None = None,
        client: PendingClient | None = None,
        listener: Listener | None = None,
        attach: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """From the first word to a ready link, whose heartbeats are exchanged.

        Raises LinkError: there is no link. The caller discards what there is of it.
        """

        comes_from: list[int] = []

        async def admit(peer: Hello) -> None:
            if client is not None:
                client.is_known()
            await self._admit(peer, handshake.side)
            if client is not None:
                comes_from.append(peer.cluster_id)
                self._coming[peer.cluster_id] += 1

        self._opening.add(link)
        try:
            await link.shake_hands(handshake, connect, first, admit, attach)
            self._heartbeats.check(link)
            if listener is not None and listener.is_over:
                raise LinkClosed(f"cluster {self.cluster_id} does not listen any more")
        finally:
            self._coming.subtract(comes_from)
            self._linked.wake()  # or it will not be

    async def _settle(self, link: Link) -> None:
        """A link that was being made is ready, or nothing is left of it when this returns: its half of a channel may wait in
        a call that cannot be interrupted long after the peer gave up."""
        try:
            if not link.is_registered:
                await link.discard()
        finally:
            self._opening.discard(link)
            self._linked.wake()

    async def _admit(self, peer: Hello, side: Side) -> None:
        """Decide whether a peer may have a link with us now. Of two that ask each other at the same moment the one with the
        smaller id goes first: its own attempt has ended before it answers the other."""
        self._check_not_linked(peer.cluster_id, peer)
        if len(self._links) + len(self._opening) > MAX_LINKS:
            raise LinkError(
                f"{len(self._links)} links: the limit is {MAX_LINKS}", status_code=LLMStatusCode.LLM_PARAM_INVALID
            )
        attempt = self._attempts.get(peer.cluster_id)
        if side == "server" and attempt is not None and self.cluster_id < peer.cluster_id:
            await attempt.settled.wait()
            self._check_not_linked(peer.cluster_id, peer)

    def _file(self, link: Link) -> None:
        """A link became ready. One that it replaces is dropped."""
        old = self._links.get(link.cluster_id)
        if old is not None:
            self._replaced.add(old)
            self._tasks().start_soon(old.abandon, LinkClosed(f"cluster {link.cluster_id} was linked anew"))
            if old.is_mutual:
                self.relinker.replaced(old)
        self._links[link.cluster_id] = link
        link.is_registered = True
        link.generation = self.totals.linked(link.cluster_id)

    def _tell_of(self, link: Link) -> None:
        """Of a link that both ends have. A client's half is ready first: a caller that is told of that, and tells the peer in
        words of its own, may be quicker than the link."""
        self.relinker.linked(link)
        self._linked.wake()
        logger.info("cluster %d is linked to %d", self.cluster_id, link.cluster_id)

    async def _serve(self, link: Link) -> None:
        """Until the link is over. Whatever goes wrong on it is its own affair."""
        try:
            await link.serve()
        except Exception:
            logger.exception("cluster %d: the link to cluster %d failed", self.cluster_id, link.cluster_id)
        finally:
            self.totals.links_ended[link.cause] += 1
            self._replaced.discard(link)
            if self._links.get(link.cluster_id) is link:
                del self._links[link.cluster_id]
                if link.failure is not None:
                    self._remember(link.cluster_id, f"the last link ended: {link.failure.args[0]}")
                if link.is_mutual:
                    self.relinker.ended(link)
            self._linked.wake()

    def _tasks(self) -> anyio.abc.TaskGroup:
        if self._group is None or self._stopping.is_set():
            raise LinkClosed(f"cluster {self.cluster_id} is being finalized")
        return self._group

    # ---- peers that we go to ----

    async def link(
        self,
        address: tuple[str, int],
        cluster_id: int,
        timeout: float,
        key: bytes | None = None,
        relink_timeout: float | None = None,
    ) -> None:
        """Link to a peer that listens.

        Args:
            key: instead of the configured one.
            relink_timeout: seconds for each attempt to make it again, once it broke. None: it is not made again.

        Raises:
            LinkError: no link was made.
        """
        linking, began = self.totals.linking, anyio.current_time()
        linking.running += 1
        try:
            await self._link(address, cluster_id, timeout, key, relink_timeout)
            linking.took(anyio.current_time() - began)
        except LLMException as error:
            linking.failed(error.status_code.name)
            raise
        except asyncio.CancelledError:
            linking.failed("CANCELLED")
            raise
        finally:
            linking.running -= 1

    async def link_once(self, address: tuple[str, int], cluster_id: int, seconds: float) -> None:
        """For the relinker: as :meth:`link`, and not counted as a caller's."""
        await self._link(address, cluster_id, seconds, None, None)

    async def _link(
        self,
        address: tuple[str, int],
        cluster_id: int,
        timeout: float,
        key: bytes | None,
        relink_timeout: float | None,
    ) -> None:
        if cluster_id in self._attempts:
            raise LinkError(
                f"a link to cluster {cluster_id} is being made",
                status_code=LLMStatusCode.LLM_PROCESSING_LINK,
                hint="await wait_linked()",
            )
        self._check_not_linked(cluster_id)
        attempt = _Attempt(anyio.current_time() + timeout)
        key = key or self.auth_key
        self._tasks().start_soon(self._client, address, cluster_id, timeout, attempt, key, relink_timeout)
        self._attempts[cluster_id] = attempt
        try:
            await attempt.settled.wait()
        except asyncio.CancelledError:
            attempt.scope.cancel()
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + DRAIN_TIMEOUT):
                await attempt.settled.wait()
            raise
        if attempt.error is not None:
            attempt.error.peer = cluster_id
            self._remember(cluster_id, f"the last attempt failed: {attempt.error.args[0]}")
            raise attempt.error
        self._refusals.pop(cluster_id, None)

    def _remember(self, cluster_id: int, why: str) -> None:
        """For callers that use it later: why there is no link."""
        self._refusals.pop(cluster_id, None)
        self._refusals[cluster_id] = why
        forget_oldest(self._refusals)

    def _check_not_linked(self, cluster_id: int, peer: Hello | None = None) -> None:
        """``peer``: a cluster that asks. A link to another instance of it is out of date, and so is one that it has had and
        lost; without, one that is not this end's is none."""
        existing = self._links.get(cluster_id)
        is_linked = existing is not None and existing.is_ready
        if existing is not None and peer is None:
            is_linked &= existing.is_owned
        elif existing is not None and peer is not None:
            is_linked &= existing.is_mutual and existing.instance == peer.instance and existing.peer_links >= peer.links
        if is_linked or (cluster_id == self.cluster_id and self._is_linked_to_itself):
            raise LinkError(
                f"cluster {cluster_id} is linked already",
                status_code=LLMStatusCode.LLM_ALREADY_LINK,
                hint="use that link, or unlink_clusters() first",
            )

    async def _client(
        self,
        address: tuple[str, int],
        cluster_id: int,
        timeout: float,
        attempt: _Attempt,
        key: bytes | None,
        relink_timeout: float | None,
    ) -> None:
        """One link that we ask for. Before it is ready its errors go to the caller; afterwards it runs on its own."""
        link: Link | None = None
        is_linked = self._met_itself = False
        try:
            with attempt.scope:
                await self._outlast(cluster_id, timeout / 2)
                link = await self._ask_in_turn(address, cluster_id, timeout, key)
                remember = partial(self.relinker.remember, cluster_id, address, relink_timeout)
                if link is None:
                    remember()
                else:
                    await self._confirm(link, remember)
                is_linked = True
        except LinkError as error:
            if cluster_id == self.cluster_id and self._met_itself:
                is_linked = self._is_linked_to_itself = True
            else:
                attempt.error = error
        except Exception as error:
            logger.debug("cluster %d: cluster %d was not linked", self.cluster_id, cluster_id, exc_info=True)
            attempt.error = LinkError(f"cluster {cluster_id} was not linked: {error!r}")
            attempt.error.__cause__ = error
        finally:
            if not is_linked and attempt.error is None:  # out of time, or the engine stops
                attempt.error = self._why_not(address, cluster_id, timeout, attempt.waits_for)
            self._attempts.pop(cluster_id, None)
            attempt.settled.set()

    async def _confirm(self, link: Link, remember: Callable[[], None]) -> None:
        """Until the peer has the link, too, and says something on it: then it is told of. If cancelled before, it ends,
        unless the cluster does, which parts with every peer.

        Raises LinkError: it broke before that.
        """

        def heard() -> None:
            call.answered.set()
            if self.peek_link(link.cluster_id) is link:  # else another one came in its place
                self._tell_of(link)
                remember()

        try:
            with link.questions.open(_ping, Pong) as call:
                link.call_when_mutual(heard)
                await link.while_it_lasts(lambda: link.questions.persist(call, _ping))
        except LinkError as error:
            if self.peek_link(link.cluster_id) not in {None, link}:
                self._check_not_linked(link.cluster_id)
            if not link.is_mutual:
                raise LinkError(f"cluster {link.cluster_id} did not take the link: {error.args[0]}") from error
        except BaseException:  # whatever it was: no half stays that the peer may never have
            if not (link.is_mutual or self._stopping.is_set()):
                why = LinkError(str(self._gave_up().args[0]))  # no end in good order: what makes it again goes on
                await link.refuse(why)
                link.break_off(why)
            raise
        finally:
            if link.failure is not None:
                with anyio.CancelScope(shield=True, deadline=anyio.current_time() + DRAIN_TIMEOUT):
                    await link.wait_closed()

    async def _outlast(self, cluster_id: int, seconds: float) -> None:
        """Wait for the end of a link that is being ended: the peer refuses another one until it has agreed to that. But not
        for longer than this, because a peer that is gone never agrees."""
        old = self._links.get(cluster_id)
        if old is not None and not old.is_ready:
            with anyio.move_on_after(seconds):
                await old.wait_closed()

    async def _ask_in_turn(
        self, address: tuple[str, int], cluster_id: int, timeout: float, key: bytes | None
    ) -> Link | None:
        """Not while the peer makes a link with us; if none comes of that we ask. Where the peer says that there is a link,
        its half may have been ready before ours: no caller is told of a link that it cannot use yet. None: the peer's link
        belongs to this end, too, now."""
        while True:
            while self._coming[cluster_id]:
                await self._linked.wait()
            if await self._join(cluster_id, timeout):
                return None
            self._check_not_linked(cluster_id)
            try:
                return await self._ask(address, cluster_id, timeout, key)
            except LinkError as error:
                is_coming = self._coming[cluster_id] or self._joinable(cluster_id) is not None
                if error.status_code is not LLMStatusCode.LLM_ALREADY_LINK or not is_coming:
                    raise

    def _joinable(self, cluster_id: int) -> Link | None:
        """A link that belongs to its initiator, the peer."""
        link = self._links.get(cluster_id)
        return link if link is not None and link.is_ready and not link.is_owned else None

    async def _join(self, cluster_id: int, timeout: float) -> bool:
        """Own the peer's link, too; False: there is none (any more)."""
        link = self._joinable(cluster_id)
        if link is None:
            return False
        try:
            await link.own()
        except LinkError:  # the peer ended it meanwhile
            await self._outlast(cluster_id, timeout / 2)
            return False
        return True

    async def _ask(self, address: tuple[str, int], cluster_id: int, timeout: float, key: bytes | None) -> Link:
        hello = self._hello(key, cluster_id)  # at once: a link that the peer makes meanwhile is not one that was lost
        attempt = self._attempts[cluster_id]
        connection, host = await dial(*address, self._host_names, attempt.scope.deadline, attempt.now_waits_for)
        link = Link(connection.wire(), self.device, self.transport, self)
        handshake = Handshake("client", hello, key, cluster_id)
        connect = Connect(channel=channel_name(self.cluster_id, cluster_id), timeout=min(timeout, HANDSHAKE_TIMEOUT))

        async def attach(token: str) -> None:
            await self._heartbeats.attach(link, (host, address[1]), token, self._tasks())

        try:
            await self._make(link, handshake, connect, attach=attach)
            tasks = self._tasks()
            link.is_peers = not self._config.links_have_owners
            self._file(link)
            tasks.start_soon(self._serve, link)
        except LinkError as error:
            await link.refuse(error)
            raise
        except asyncio.CancelledError:
            await link.refuse(self._gave_up())
            raise
        finally:
            await self._settle(link)
        return link

    def _gave_up(self) -> LinkClosed:
        what = "is being finalized" if self._stopping.is_set() else "does not wait any longer"
        return LinkClosed(f"cluster {self.cluster_id} {what}")

    def _why_not(self, address: tuple[str, int], cluster_id: int, timeout: float, waits_for: str) -> LinkError:
        if self._stopping.is_set():
            return LinkError(
                f"cluster {self.cluster_id} is being finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
            )
        what = f"cluster {cluster_id} at {host_port(*address)} was not linked within {timeout:g} s"
        return LinkTimeout(f"{what}: {waits_for}" if waits_for else what)

    async def link_in_attempts(self, address: tuple[str, int], cluster_id: int, timeout: float) -> None:
        """As often as ``link_retry_count`` says, each time with an equal share of the timeout. From then on the link is made
        again whenever it broke, if the policy says so."""
        async with self.relinker.paused(cluster_id, timeout):
            await self._link_in_attempts(address, cluster_id, timeout)

    async def _link_in_attempts(self, address: tuple[str, int], cluster_id: int, timeout: float) -> None:
        attempts = self._config.link_retry_count
        for left in reversed(range(attempts)):
            try:
                await self.link(address, cluster_id, timeout / attempts, relink_timeout=timeout)
            except LinkError as error:
                again = error.status_code in {LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_TIMEOUT}
                if not left or not again or isinstance(error, AuthError):
                    raise
                logger.info("cluster %d tries again: %s", self.cluster_id, error)
            else:
                return

    # ---- ends ----

    async def unlink(self, cluster_id: int, timeout: float, force: bool) -> None:
        """A link that belongs to the peer as well only stops to belong to this end.

        Raises LinkError: the peer did not agree; the link's local half is gone only with ``force``.
        """
        if cluster_id == self.cluster_id:
            self._is_linked_to_itself = False
        await self.relinker.forget(cluster_id, timeout)
        link = self._links.get(cluster_id)
        if link is None or not link.is_owned:
            return
        if force:
            await link.abandon(LinkClosed(f"the link to cluster {cluster_id} was unlinked by force"))
            return
        try:
            if self._config.links_have_owners and link.is_ready and not await link.disown(timeout):
                return
            await link.disconnect("unlink_clusters", timeout)
        except LinkTimeout:
            raise
        except LinkError as error:
            raise LinkError(str(error.args[0]), status_code=LLMStatusCode.LLM_UNLINK_FAILED) from error

    async def _part(self, link: Link) -> None:
        try:
            await link.disconnect("finalize", 1.0)
        except LinkError as error:
            logger.debug("cluster %d, finalizing: %s", self.cluster_id, error)

    # ---- questions ----

    def find_link(self, cluster_id: int) -> Link:
        """One that may be used. Raises as :meth:`any_link`; NotLinked: it is the peer's alone."""
        link = self.any_link(cluster_id)
        if not link.is_owned:
            raise NotLinked(
                f"cluster {cluster_id} is not linked from here: with transfer_backend 'hixl' its link is its own",
                peer=cluster_id,
                hint="link_clusters() at this end, too",
            )
        return link

    def any_link(self, cluster_id: int) -> Link:
        """Raises NotLinked: there is no such link. ForkError, LLMException: the caller is not on our event loop."""
        self.check_here()
        link = self._links.get(cluster_id)
        if link is None:
            refusal = self._refusals.get(cluster_id)
            if refusal is not None:
                is_making = self.relinker.is_making(cluster_id)
                hint = "it is being made again: await wait_linked()" if is_making else "link_clusters() again"
                raise NotLinked(f"cluster {cluster_id} is not linked; {refusal}", peer=cluster_id, hint=hint)
            raise NotLinked(f"cluster {cluster_id} is not linked", peer=cluster_id, hint="link_clusters() first")
        return link

    async def wait_parted(self) -> None:
        """Until the links that are over, because the peer said so, are gone altogether; but not for ever."""
        with anyio.move_on_after(PART_TIMEOUT):
            for link in [*self._replaced, *(link for link in self._links.values() if not link.is_ready)]:
                await link.wait_closed()

    @property
    def has_links(self) -> bool:
        """There are links, or some are being made, or made again, or given back."""
        return (
            bool(self._links or self._opening or self._replaced)
            or self._is_linked_to_itself
            or self.relinker.is_at_work
        )

    async def wait_opened(self) -> None:
        """Until no link is being made, and nothing is left of those that could not be made, or that others replaced."""
        while self._opening or self._replaced:
            await self._linked.wait()

    def statistics(self) -> list[LinkStatistics]:
        return [
            link.counters.snapshot(link.cluster_id, link.state.value, link.generation)
            for link in list(self._links.values())
        ]

    def link_states(self) -> Counter[str]:
        """How many links there are in each state, those that are being made among them. From any thread."""
        return Counter(link.state.value for link in (*self._links.values(), *self._opening, *self._replaced))

    async def wait_linked(self, cluster_id: int) -> None:
        """Raises NotLinked: the engine stops before there is such a link."""
        while not ((link := self._links.get(cluster_id)) and link.is_ready and link.is_mutual):
            if self._stopping.is_set():
                raise NotLinked(
                    f"cluster {self.cluster_id} is finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
                )
            await self._linked.wait()

    def _hello(self, key: bytes | None, peer: int | None) -> Hello:
        end = self.transport.endpoint
        names = EndpointInfo.model_fields
        return Hello(
            cluster_id=self.cluster_id,
            role=self._owner.role.value,
            instance=self._owner.instance,
            nonce=secrets.token_hex(32),
            one_sided=self._config.enable_remote_cache_accessible,
            has_key=key is not None,
            backend=self._config.transfer_backend or "",
            heartbeat=self._config.heartbeat_interval / 1000,
            links=0 if peer is None else self.totals.generations[peer],
            endpoint=EndpointInfo(**{name: getattr(end, name) for name in names}),
            minor=MINOR,
        )

    @property
    def auth_key(self) -> bytes | None:
        return None if self._config.auth_key is None else self._config.auth_key.get_secret_value()


def _place(sock: socket.socket) -> str:
    """Where a client is; it may be gone already."""
    try:
        return host_port(*sock.getpeername()[:2])
    except OSError:
        return "gone already"


def _ping(call: int) -> Ping:
    return Ping(call=call)
