"""The contents of an initialised LLMDataDist: device, transport, listener, links, and the tasks that serve them."""

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

from aiodatadist._cache.digester import Digester
from aiodatadist._cache.local_copy import LocalCopies
from aiodatadist._cache.registry import CacheRegistry
from aiodatadist._cluster.client_slots import ClientSlots
from aiodatadist._cluster.half_links import HalfLinks
from aiodatadist._cluster.host_names import HostNames
from aiodatadist._cluster.initiator import LinkInitiator
from aiodatadist._cluster.key_ring import KeyRing, Keys
from aiodatadist._cluster.link_changes import ChangeFeed
from aiodatadist._cluster.link_table import LinkTable
from aiodatadist._cluster.listen_address import find_listen_address
from aiodatadist._cluster.listener import Listener
from aiodatadist._cluster.liveness import FIRST_BEAT_TIMEOUT, Heartbeats
from aiodatadist._cluster.pending_client import BringsData, BringsHeartbeats, BringsLink, Introduced, PendingClient
from aiodatadist._cluster.relinker import Relinker
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._concurrency.deadlines import Deadlines
from aiodatadist._concurrency.resident import Resident
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._config.certificates import Certificates
from aiodatadist._config.llm_config import LLMConfig, PoolConfig, credential_for
from aiodatadist._config.option_rules import SERVICE_LEVELS, TRAFFIC_CLASSES, known
from aiodatadist._config.plain_networks import PlainNetworks
from aiodatadist._config.quotas import Quotas
from aiodatadist._config.remarks import remarks
from aiodatadist._counting import Incident, Observer, Totals
from aiodatadist._device import Device
from aiodatadist._layered import LayeredTransfer
from aiodatadist._link import (
    AwaitedConnections,
    BlockLeases,
    Connection,
    DataConnections,
    Link,
    LinkRequest,
    Notification,
    NotificationInbox,
    PeerShares,
)
from aiodatadist._transport import OpenSockets, RdmaConfig, TcpConfig, Transport, open_transport
from aiodatadist._values.descriptors import LLMRole, Placement
from aiodatadist._values.peer_rights import PeerRights
from aiodatadist._wire.data_proof import ChannelKey
from aiodatadist._wire.frames import Unknown
from aiodatadist._wire.handshake import Handshake, OwnListener
from aiodatadist._wire.key_proof import KeyProof, Side
from aiodatadist._wire.messages import MINOR, PLAIN_PROTOCOL, PROTOCOL, AttachData, EndpointInfo, Hello, Hello1, Message
from aiodatadist._wire.proved import Proved, Vouch
from aiodatadist.errors import (
    AuthError,
    LinkClosed,
    LinkError,
    LinkTimeout,
    LLMException,
    LLMStatusCode,
)

logger = logging.getLogger(__name__)


class EngineHost(Protocol):
    """The properties of an LLMDataDist that its engine needs."""

    @property
    def cluster_id(self) -> int: ...
    @property
    def role(self) -> LLMRole: ...
    @property
    def instance(self) -> str: ...
    @property
    def observer(self) -> Observer | None: ...


class Engine:
    """The contents of an initialised LLMDataDist.

    It lives in its resident's task, which owns the task group of everything else.

    Attributes:
        cluster_id: the id of this cluster.
        timeout: seconds for one transfer.
        quotas: how much one peer, or one stranger, may use.
        peer_shares: the shares of all peers.
        key_ring: the keys with which the cluster proves itself.
        one_sided: True if the end that wants bytes moves them; otherwise it asks the peer to.

    Args:
        serving_a_request: called with a peer's cluster id. Returns the context in which the answer to a request of that
            peer to move bytes must run; None if it runs beside everything else.
    """

    def __init__(
        self,
        owner: EngineHost,
        totals: Totals,
        config: LLMConfig,
        resident: Resident,
        serving_a_request: Callable[[int], AbstractContextManager[None] | None],
    ) -> None:
        self.resident = resident
        self.check_here: Callable[[], None] = resident.check_here
        self.device: Device
        self.transport: Transport
        self.registry: CacheRegistry
        self.digester: Digester
        self.local_copies: LocalCopies
        self.notification_inbox: NotificationInbox = NotificationInbox(resident.check_here)
        self.totals: Totals = totals
        self.quotas: Quotas = config.peer_quotas
        self.peer_shares: PeerShares = PeerShares(self.quotas, asyncio.get_running_loop().time, totals.budget_waits)
        self.key_ring: KeyRing = KeyRing(
            credential_for(config), f"cluster {owner.cluster_id}", totals.incidents, owner.cluster_id
        )
        self.rights_of: Callable[[Proved | None, int], PeerRights] = self.key_ring.rights_of
        self.observer: Observer | None = owner.observer
        self.block_leases: BlockLeases = BlockLeases(self.totals, resident.check_here, self.quotas)
        self.changes: ChangeFeed = ChangeFeed(self.totals, resident.check_here)
        self.deadlines: Deadlines = Deadlines()
        self.layered: set[LayeredTransfer] = set()
        self.transfer_checksum: bool = config.transfer_checksum
        self.cluster_id: int = owner.cluster_id
        self.timeout: float = config.sync_kv_timeout / 1000
        self.one_sided: bool = config.enable_remote_cache_accessible
        self.serving_a_request = serving_a_request
        self._heartbeats = Heartbeats(config.heartbeat_interval, config.heartbeat_misses)
        self.relinker: Relinker = Relinker(config.relink_policy, self, self.changes)
        self.links: LinkTable = LinkTable(self, self.relinker)
        self.peek_link: Callable[[int], Link | None] = self.links.peek
        self.initiator: LinkInitiator = LinkInitiator(
            self, self.links, self.relinker, self._heartbeats, config.link_retry_count
        )
        self.initiator.host_names = HostNames(self.quotas.look_ups)
        self._clients = _client_slots(self.quotas, totals)
        self._half_links = HalfLinks()
        self.data_connections: DataConnections = DataConnections()
        self.expect_data: Callable[[ChannelKey, int, bool], AbstractContextManager[OpenSockets]]
        self.expect_data = self.data_connections.expected
        self.plain_networks: PlainNetworks = config.plain_networks
        self._owner = owner
        self._config = config
        self._group: anyio.abc.TaskGroup | None = None
        self._listener: Listener | None = None
        self._listeners: set[Listener] = set()
        self._stopping = resident.stopping
        self._is_over = False

    # ---- life ----

    async def run(self, started: asyncio.Future[None]) -> None:
        """Open everything, serve until stopped, and close. Errors of the opening are raised; later ones are not."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.key_ring.one_thread())
            if self._config.listen_ip_info is not None or self.key_ring.are_given:
                await self.key_ring.check()  # before anything is opened
            self.device = await stack.enter_async_context(await Device.open(self._config.device))
            self.transport = await in_thread(self._open_transport)
            stack.push_async_callback(self.transport.aclose)
            for half_links in (self._half_links, self.initiator.half_links):
                half_links.allow_for(self.transport.endpoint.streams)
            self.registry = CacheRegistry(
                self.device, self.transport, self.spawn, self.cluster_id, self.totals.incidents
            )
            await self._open_pools()
            self.local_copies = LocalCopies(self.device, self.cluster_id, self.check_here, self.totals)
            stack.push_async_callback(self.local_copies.aclose)
            self.digester = Digester(self.device)
            stack.push_async_callback(self.digester.aclose)
            # closed once the group has ended, because links exchange heartbeats until they have parted
            stack.callback(self._heartbeats.close)
            address = await find_listen_address(self._config)
            # before the group, so that a port in use is no ExceptionGroup
            listener = None if address is None else await self._listen(address, "init")
            self._group = await stack.enter_async_context(anyio.create_task_group())
            self._replace_listener(listener)
            if self.key_ring.may_change:
                self._group.start_soon(self.key_ring.watch)
            started.set_result(None)
            try:
                await self._stopping.wait()
                # callers that wait for room end first: parting may take a second
                self.registry.pools.end_allocating()
                await self._part_from_all()
            finally:  # also after a bug: no caller may wait for something that can no longer come
                self._end_all()
            self._group.cancel_scope.cancel()
        for transfer in list(self.layered):  # those whose task never began
            transfer.abandon()
        self.registry.end()

    def _end_all(self) -> None:
        """Refuse everything new from here on, and end what waits for it."""
        self._is_over = True
        self._stopping.set()  # also if the life ends by an error
        self.links.news.set()
        self.relinker.end()
        self.changes.close()
        self.notification_inbox.close()
        self.registry.pools.end_allocating()
        self.block_leases.end()
        for transfer in list(self.layered):
            transfer.fail(LinkClosed("the cluster was finalized"))
        for listener in list(self._listeners):
            self.close_listener(listener)

    def start_layered(self, transfer: LayeredTransfer) -> None:
        """Start a layered transfer; it ends with the engine at the latest."""
        tasks = Spawner(self.tasks())
        self.layered.add(transfer)
        transfer.add_done_callback(self.layered.discard)
        transfer.start(tasks.start_soon)

    def _open_transport(self) -> Transport:
        config = self._config
        for line in remarks(config):
            logger.warning("cluster %d: %s", self.cluster_id, line)
        rdma = RdmaConfig(
            known(config.rdma_traffic_class, TRAFFIC_CLASSES), known(config.rdma_service_level, SERVICE_LEVELS)
        )
        silence = config.heartbeat_interval * (config.heartbeat_misses + 1)
        tcp = TcpConfig(config.tcp_streams, config.tcp_threads, silence)
        return open_transport(config.transport, self.device, config.local_comm_res or None, rdma, tcp)

    async def _open_pools(self) -> None:
        for placement, name in ((Placement.DEVICE, "mem_pool_cfg"), (Placement.HOST, "host_mem_pool_cfg")):
            text = getattr(self._config, name)
            if text:
                await self.registry.pools.open(placement, PoolConfig.parse(text, name))

    async def _part_from_all(self) -> None:
        # first what makes links, so that no new one comes while the others part
        self.links.news.set()
        self.relinker.end()
        self.initiator.cancel()
        for link in self.links.current:
            self.spawn(self._part, link)
        with anyio.move_on_after(1.0):
            while left := self.links.current:
                await left[0].wait_closed()

    def check_running(self) -> None:
        """Raise LLMException if the engine is or was finalized, ForkError if this is a child of its process."""
        self.resident.check_process()
        if self._stopping.is_set():
            raise LLMException(
                f"cluster {self.cluster_id} is finalized",
                status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
                hint="init() it again, and use its new cache_manager",
            )

    def spawn(self, call: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> bool:
        """Start a task that ends with the engine; return False if the engine has ended already."""
        if self._group is None or self._is_over:
            return False
        Spawner(self._group).start_soon(call, *args)
        return True

    @property
    def is_stopping(self) -> bool:
        """True if nothing new may begin."""
        return self._stopping.is_set()

    @property
    def links_have_owners(self) -> bool:
        """True if a link belongs to its initiator, not to both ends."""
        return self._config.links_have_owners

    def heard(self, cluster_id: int, generation: int, payload: bytes, taken: Callable[[], None]) -> None:
        self.notification_inbox.put(Notification(cluster_id, payload, generation), taken)

    # ---- peers that come to us ----

    def _replace_listener(self, fresh: Listener | None) -> None:
        """Serve clients on the new listener from now on, and close the old one."""
        old, self._listener = self._listener, fresh
        if old is not None:
            self.close_listener(old)
        if fresh is not None:
            self._serve_on(fresh)

    def _serve_on(self, listener: Listener) -> None:
        self._listeners.add(listener)
        self.tasks().start_soon(listener.serve, self._serve_client, self.tasks(), self.totals.incidents)

    def close_listener(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        listener.close()

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """The address at which clients find this cluster, with the real port."""
        return None if self._listener is None else self._listener.address

    async def listen_elsewhere(self, address: tuple[str, int] | None) -> None:
        """Listen on this address from now on; None: stop listening.

        Raises LLMException if the port or the keys cannot be used; the old listener then continues.
        """
        if address is not None:
            await self.key_ring.check()
        self._replace_listener(None if address is None else await self._listen(address, "switch_role"))

    async def _listen(self, address: tuple[str, int], operation: str) -> Listener:
        return await Listener.open(*address, self.key_ring.keys, operation, self.key_ring.protocol)

    async def listen_for_members(self, host: str, keys: Keys) -> Listener:
        """Serve clients that have one of these keys, on a separate port, until :meth:`close_listener`."""
        listener = await Listener.open(host, 0, keys, "link")
        self._serve_on(listener)
        return listener

    async def _serve_client(self, sock: socket.socket, listener: Listener) -> None:
        """Serve a new connection: a cluster that wants a link, or heartbeats or bytes of a link that is being made."""
        serve = await self._receive(sock, listener)
        if serve is not None:  # as long as the link lasts, when nothing of its beginning is needed
            await serve()

    async def _receive(self, sock: socket.socket, listener: Listener) -> Callable[[], Awaitable[None]] | None:
        """Receive a new connection, until it is known what it is for. Return what serves it then, if anything does."""
        client = PendingClient(sock, self._clients, _Desk(self, listener, self._heartbeats))
        link: Link | None = None
        try:
            introduced: Introduced | None = None
            with client.scope:
                introduced = await client.introduce()
                if isinstance(introduced, BringsLink):
                    async with client.room_in(self._half_links):
                        link = await self._welcome(client, introduced, listener)
            if client.scope.cancelled_caught:
                raise client.too_late()
            if isinstance(introduced, BringsData):
                client.is_known()
                introduced.pass_on(socket.socket(fileno=sock.detach()))
            if isinstance(introduced, BringsHeartbeats):
                beating = self._heartbeats.accept(introduced.link)
                client.has_proved()
                # detached, so that closing the client below leaves the socket of the heartbeats open
                beats = socket.socket(fileno=sock.detach())
                return partial(self._beat, beating, beats, introduced.keys, client.who)
        except Exception as error:
            self._not_linked(client.who, error)
        finally:
            client.is_known()
            # otherwise the link's connection owns the socket
            if link is None:
                sock.close()
        return None if link is None else partial(self.links.serve, link)

    async def _beat(self, link: Link, sock: socket.socket, keys: tuple[bytes, bytes] | None, who: str) -> None:
        """Exchange the heartbeats that a client brought for a link, as long as the link lasts."""
        try:
            await self._heartbeats.beat(link, sock, FIRST_BEAT_TIMEOUT, keys)
        except Exception as error:
            self._not_linked(who, error)

    def _not_linked(self, who: str, error: Exception) -> None:
        """Log why a client was not linked. Raised, it would end the engine's task group with all links."""
        words = "cluster %d: a client was not linked: %s"
        if isinstance(error, OwnListener):
            self.initiator.met_itself = True
            logger.debug("cluster %d was asked for a link by itself", self.cluster_id)
        elif isinstance(error, LinkError):
            told = f"{words}: %s", self.cluster_id, who, error
            self.totals.incidents.add(Incident.CLIENT_REFUSED, logger, *told)
        else:
            told_all = words, self.cluster_id, who
            self.totals.incidents.add(Incident.DEFECT, logger, *told_all, level=logging.ERROR, exc_info=True)

    async def _welcome(self, client: PendingClient, wants: BringsLink, listener: Listener) -> Link:
        """Make a link with a client that is known.

        Raises LinkError if no link was made; the socket is then closed.
        """
        link = self.new_link(await client.connection())
        link.proved = wants.handshake.proved
        if link.proved is None:
            link.heartbeat_token = secrets.token_hex(32)
        self._heartbeats.expect(link)
        try:
            await self.make(link, wants.handshake, first=wants.first, listener=listener)
            self.tasks()  # raises if no new link may begin
            self.links.file(link)
            link.heard()
            self.links.tell_of(link)
            self.initiator.linked(link)
        except LinkError as error:
            await link.refuse(error)
            raise
        except asyncio.CancelledError:
            await link.refuse(self.gave_up())
            raise
        finally:
            self._heartbeats.forget(link)
            await self.links.settle(link)
        return link

    def new_link(self, connection: Connection) -> Link:
        """Return a link over a connection, before its handshake."""
        link = Link(connection.wire(), self.device, self.transport, self)
        link.place = connection.place
        return link

    async def make(
        self,
        link: Link,
        handshake: Handshake,
        request: LinkRequest | None = None,
        first: Message | Unknown | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Take a link from the first message to its being ready, with heartbeats in both directions.

        Raises LinkError if no link was made. The caller discards what was begun.
        """

        comes_from: list[int] = []

        async def admit(peer: Hello) -> None:
            await self._admit(peer, handshake.side, self._may_replace(handshake))
            if handshake.side == "server":
                comes_from.append(peer.cluster_id)
                self.links.coming[peer.cluster_id] += 1

        self.links.opening.add(link)
        try:
            await link.shake_hands(handshake, request, first, admit)
            self._heartbeats.check(link)
            if listener is not None and listener.is_over:
                raise LinkClosed(f"cluster {self.cluster_id} no longer listens")
            # again: others may have been made during the handshake
            self.links.check_room(link.cluster_id)
            if not self._may_replace(handshake):
                self.links.check_no_other(link.cluster_id, link.session.instance)
        finally:
            self.links.coming -= Counter(comes_from)  # not subtract(), which keeps a zero for each id that ever came
            self.links.news.wake()  # the link is ready, or will never be

    def _may_replace(self, handshake: Handshake) -> bool:
        """Return True if the peer may replace a live link of another process with its id: its certificate is for that id."""
        proved = handshake.proved
        return proved is not None and not proved.by_key and self.key_ring.trusts_restarts

    async def _admit(self, peer: Hello, side: Side, may_replace: bool) -> None:
        """Decide whether a peer may have a link with this cluster now.

        Of two clusters that ask each other at the same moment, the one with the smaller id goes first: its own attempt
        has ended before it answers the other. The peer does not wait for an attempt that has not met it yet, because
        that one may be dialling a place where no cluster is.
        """
        self.links.check_not_linked(peer.cluster_id, peer)
        if not may_replace:
            await self.links.outlive_other(peer)
        # again: a link may have been made while this waited
        self.links.check_not_linked(peer.cluster_id, peer)
        self.links.check_room(peer.cluster_id)
        is_first = side == "server" and self.cluster_id < peer.cluster_id
        if is_first and await self.initiator.wait_settled(peer):
            self.links.check_not_linked(peer.cluster_id, peer)

    def tasks(self) -> anyio.abc.TaskGroup:
        """Return the engine's task group. Raises LinkClosed if the engine is not running or is being finalized."""
        if self._group is None or self.is_stopping:
            raise LinkClosed(f"cluster {self.cluster_id} is being finalized")
        return self._group

    def gave_up(self) -> LinkClosed:
        """Return the error that is sent to the peer of a link that was being made."""
        what = "is being finalized" if self.is_stopping else "no longer waits"
        return LinkClosed(f"cluster {self.cluster_id} {what}")

    async def link_once(self, address: tuple[str, int], cluster_id: int, seconds: float, patience: float) -> None:
        """Make one attempt at a link, for the relinker. Raises LinkError if no link was made."""
        await self.initiator.link_once(address, cluster_id, seconds, patience)

    # ---- ends ----

    async def unlink(self, cluster_id: int, timeout: float, force: bool) -> None:
        """End this end's link. A link that belongs to the peer as well only stops belonging to this end.

        ``force`` has no effect on links that have owners, as upstream.

        Raises LinkError if the peer did not agree. The link's local half then stays, unless ``force``.
        """
        if cluster_id == self.cluster_id:
            self.links.is_to_itself = False
        # first, so that no attempt makes the link again afterwards
        await self.relinker.forget(cluster_id, timeout)
        link = self.links.peek(cluster_id)
        if link is None or not link.life.ownership.is_ours:
            return
        if force and not self._config.links_have_owners:
            await link.abandon(LinkClosed(f"the link to cluster {cluster_id} was unlinked by force"))
            return
        try:
            if self._config.links_have_owners and link.session.is_ready and not await link.owners.disown(timeout):
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

    def hello(self, has_key: bool, peer: int | None) -> Hello:
        """Return this end's first message on a link.

        Args:
            has_key: True if this end proves a key.
            peer: the cluster that is asked, or that asks; None if its own first message was another one.
        """
        end = self.transport.endpoint
        names = EndpointInfo.model_fields
        return Hello(
            cluster_id=self.cluster_id,
            role=self._owner.role.value,
            instance=self._owner.instance,
            protocol=PROTOCOL if has_key else PLAIN_PROTOCOL,
            nonce=secrets.token_hex(32),
            one_sided=self._config.enable_remote_cache_accessible,
            has_key=has_key,
            backend=self._config.transfer_backend or "",
            heartbeat=self._config.heartbeat_interval,
            links=0 if peer is None else self.totals.generations[peer],
            endpoint=EndpointInfo(**{name: getattr(end, name) for name in names}),
            minor=MINOR,
        )


def _client_slots(quotas: Quotas, totals: Totals) -> ClientSlots:
    return ClientSlots(
        quotas.unproved_of_one,
        quotas.unproved,
        quotas.unproved_per_second,
        True,
        asyncio.get_running_loop().time,
        totals.budget_refusals,
        totals.budget_waits,
    )


class _Desk:
    """The reception of one listener of an engine: it decides what clients must prove."""

    def __init__(self, engine: Engine, listener: Listener, heartbeats: Heartbeats) -> None:
        self._engine = engine
        self._listener = listener
        self._heartbeats = heartbeats
        self.gave_up: Callable[[], LinkError] = engine.gave_up
        self.awaited: Callable[[AttachData], AwaitedConnections] = engine.data_connections.awaited

    @property
    def protocol(self) -> int:
        return self._listener.protocol

    async def certificates(self) -> Certificates:
        ring = self._engine.key_ring
        await ring.look()
        certificates = ring.for_client(ring.certificates)
        if certificates is None:
            what = "has keys" if self._listener.protocol == PROTOCOL else "has no credential"
            raise AuthError(
                f"the client proves a certificate, the listener {what}: both must have the same", hint=ring.hint
            )
        return certificates

    async def proof(self, first: Hello1 | None) -> KeyProof | None:
        if first is not None and first.opens == "heartbeats":
            return KeyProof("server", self._heartbeats.keys_of(first.key_names))
        ring = self._engine.key_ring
        await ring.look()
        if ring.for_client(ring.certificates) is not None:
            raise AuthError("the listener proves a certificate: the client must begin TLS", hint=ring.hint)
        keys = ring.for_client(self._listener.keys)
        return KeyProof("server", keys, hint=ring.hint) if keys else None

    def handshake(self, peer: int | None, vouch: Vouch | None) -> Handshake:
        engine = self._engine
        return Handshake("server", engine.hello(vouch is not None, peer), vouch, hint=engine.key_ring.hint)
