"""What an initialised LLMDataDist consists of: device, transport, listener, links, and the tasks that serve them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
from contextlib import AsyncExitStack
from typing import Protocol

import anyio
import anyio.abc

from aiodatadist.cache_manager import CacheManager
from aiodatadist.config import LLMConfig
from aiodatadist.descriptors import LLMRole
from aiodatadist.device import Device
from aiodatadist.errors import LinkClosed, LinkError, LinkTimeout, LLMException, LLMStatusCode, NotLinked
from aiodatadist.link import Link, Wire, channel_name
from aiodatadist.transport import Transport, open_transport
from aiodatadist.wire.auth import Side
from aiodatadist.wire.handshake import Handshake
from aiodatadist.wire.messages import Connect, EndpointInfo, Hello

logger = logging.getLogger(__name__)

MAX_LINKS = 512
HANDSHAKE = 60.0
"""Seconds that a client has, from connecting to the end of the handshake, whatever it asks for."""
STRANGER = 5.0
"""Seconds that a client has for saying who it is."""
MAX_STRANGERS = 64
"""Connections that have not said so yet."""


class Owner(Protocol):
    """What the engine has to know of its LLMDataDist."""

    @property
    def cluster_id(self) -> int: ...
    @property
    def role(self) -> LLMRole: ...
    @property
    def instance(self) -> str: ...


class Engine:
    """What an initialised LLMDataDist consists of. Lives in one task, which owns the task group of everything else."""

    def __init__(self, owner: Owner, config: LLMConfig) -> None:
        self.pid = os.getpid()
        self.listen_address: tuple[str, int] | None = None
        self.device: Device
        self.transport: Transport
        self.cache_manager: CacheManager
        self._owner = owner
        self._config = config
        self._links: dict[int, Link] = {}
        self._linked = anyio.Event()
        self._attempts: dict[int, int] = {}
        self._group: anyio.abc.TaskGroup | None = None
        self._stopping = anyio.Event()
        self._strangers = anyio.CapacityLimiter(MAX_STRANGERS)

    # ---- life ----

    async def run(self, started: asyncio.Future[None]) -> None:
        """From opening to the end. What goes wrong while opening is raised; afterwards nothing is."""
        async with AsyncExitStack() as stack:
            self.device = await stack.enter_async_context(await Device.open(self._config.device_id))
            self.transport = open_transport(self._config.transport, self.device, self._config.local_comm_res or None)
            stack.push_async_callback(self.transport.aclose)
            self.cache_manager = CacheManager(self)
            listener = await self._listen()
            self._group = await stack.enter_async_context(anyio.create_task_group())
            if listener is not None:
                self._group.start_soon(self._accept, listener)
            started.set_result(None)
            await self._stopping.wait()
            for link in list(self._links.values()):
                self._group.start_soon(self._part, link)
            with anyio.move_on_after(1.0):
                while self._links:
                    await next(iter(self._links.values())).wait_closed()
            self._group.cancel_scope.cancel()

    def stop(self) -> None:
        self._stopping.set()

    @property
    def cluster_id(self) -> int:
        return self._owner.cluster_id

    @property
    def timeout(self) -> float:
        """Seconds for one transfer."""
        return self._config.sync_kv_timeout / 1000

    # ---- peers that come to us ----

    async def _listen(self) -> anyio.abc.Listener[anyio.abc.SocketStream] | None:
        address = self._config.listen_address
        if address is None:
            return None
        host, port = address
        try:
            listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
            raise LLMException(
                f"port {port} on {host} {reason}", operation="init", hint="choose another one, or 0 for any free port"
            ) from error
        self.listen_address = (host, listener.extra(anyio.abc.SocketAttribute.local_port))
        return listener

    async def _accept(self, listener: anyio.abc.Listener[anyio.abc.SocketStream]) -> None:
        async with listener:
            await listener.serve(self._serve_client)

    async def _serve_client(self, stream: anyio.abc.SocketStream) -> None:
        link = Link(Wire(stream), self.device, self.transport)
        handshake = Handshake("server", self._hello(), self._key())
        try:
            if self._strangers.borrowed_tokens >= MAX_STRANGERS:
                raise LinkError(f"{MAX_STRANGERS} connections are being set up already")
            async with self._strangers:
                with (
                    anyio.fail_after(HANDSHAKE),
                    anyio.CancelScope(deadline=anyio.current_time() + STRANGER) as stranger,
                ):
                    await self._shake(link, handshake, None, stranger)
            if not link.is_ready:
                raise LinkTimeout(f"the client did not say who it is within {STRANGER} s")
        except (LinkError, TimeoutError) as error:
            logger.warning("cluster %d: a client was not linked: %s", self.cluster_id, error)
            return
        finally:
            if not link.is_ready:
                await link.discard()
        self._file(link)
        await self._serve(link)

    async def _shake(
        self, link: Link, handshake: Handshake, connect: Connect | None, stranger: anyio.CancelScope | None = None
    ) -> None:
        def admit(peer: Hello) -> None:
            self._admit(peer, handshake.side)
            if stranger is not None:
                stranger.deadline = float("inf")

        await link.shake_hands(handshake, connect, self.cache_manager.published, admit)

    def _admit(self, peer: Hello, side: Side) -> None:
        """Decide whether a peer may have a link with us now. A restarted peer's old link is dropped."""
        old = self._links.get(peer.cluster_id)
        if old is not None and old.is_ready:
            if old.instance == peer.instance:
                raise LinkError(
                    f"cluster {peer.cluster_id} is linked already", status_code=LLMStatusCode.LLM_ALREADY_LINK
                )
            gone = LinkClosed(f"cluster {peer.cluster_id} was started anew")
            self._tasks().start_soon(old.abandon, gone)
        if len(self._links) >= MAX_LINKS:
            raise LinkError(
                f"{len(self._links)} links: the limit is {MAX_LINKS}", status_code=LLMStatusCode.LLM_PARAM_INVALID
            )
        if side == "server" and peer.cluster_id in self._attempts and self.cluster_id < peer.cluster_id:
            raise LinkError(
                f"clusters {self.cluster_id} and {peer.cluster_id} link to each other at the same time: ours goes first",
                status_code=LLMStatusCode.LLM_ALREADY_LINK,
            )

    def _file(self, link: Link) -> None:
        """A link became ready. One that it replaces is dropped."""
        old = self._links.get(link.cluster_id)
        if old is not None:
            self._tasks().start_soon(old.abandon, LinkClosed(f"cluster {link.cluster_id} was linked anew"))
        self._links[link.cluster_id] = link
        self._linked.set()
        self._linked = anyio.Event()
        logger.info("cluster %d is linked to %d", self.cluster_id, link.cluster_id)

    async def _serve(self, link: Link) -> None:
        try:
            await link.serve()
        finally:
            if self._links.get(link.cluster_id) is link:
                del self._links[link.cluster_id]

    def _tasks(self) -> anyio.abc.TaskGroup:
        if self._group is None or self._stopping.is_set():
            raise LinkClosed(f"cluster {self.cluster_id} is being finalized")
        return self._group

    # ---- peers that we go to ----

    async def link(self, address: tuple[str, int], cluster_id: int, timeout: float) -> None:
        """Raises LinkError: no link was made."""
        existing = self._links.get(cluster_id)
        if existing is not None and existing.is_ready:
            raise LinkError(f"cluster {cluster_id} is linked already", status_code=LLMStatusCode.LLM_ALREADY_LINK)
        self._attempts[cluster_id] = self._attempts.get(cluster_id, 0) + 1
        try:
            with anyio.fail_after(timeout):
                await self._tasks().start(self._client, address, cluster_id, timeout)
        except TimeoutError as error:
            raise LinkTimeout(
                f"cluster {cluster_id} at {address[0]}:{address[1]} was not linked within {timeout} s"
            ) from error
        finally:
            self._attempts[cluster_id] -= 1
            if not self._attempts[cluster_id]:
                del self._attempts[cluster_id]

    async def _client(
        self,
        address: tuple[str, int],
        cluster_id: int,
        timeout: float,
        *,
        task_status: anyio.abc.TaskStatus[None],
    ) -> None:
        """One link that we ask for. Before it is ready its errors go to the caller; afterwards it runs on its own."""
        stream = await self._connect(address)
        link = Link(Wire(stream), self.device, self.transport)
        handshake = Handshake("client", self._hello(), self._key(), cluster_id)
        connect = Connect(channel=channel_name(self.cluster_id, cluster_id), timeout=min(timeout, HANDSHAKE))
        try:
            await self._shake(link, handshake, connect)
        finally:
            if not link.is_ready:
                await link.discard()
        self._file(link)
        task_status.started()
        await self._serve(link)

    async def _connect(self, address: tuple[str, int]) -> anyio.abc.SocketStream:
        try:
            return await anyio.connect_tcp(*address)
        except OSError as error:
            raise LinkError(f"nobody can be reached at {address[0]}:{address[1]}: {error}") from error

    # ---- ends ----

    async def unlink(self, cluster_id: int, timeout: float, force: bool) -> None:
        """Raises LinkError: the peer did not agree; the link's local half is gone only with ``force``."""
        link = self._links.get(cluster_id)
        if link is None:
            return
        if force:
            await link.abandon(LinkClosed(f"the link to cluster {cluster_id} was unlinked by force"))
            return
        try:
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
        """Raises NotLinked: there is no such link."""
        link = self._links.get(cluster_id)
        if link is None:
            raise NotLinked(f"cluster {cluster_id} is not linked", peer=cluster_id, hint="link_clusters() first")
        return link

    @property
    def has_links(self) -> bool:
        return bool(self._links)

    async def wait_linked(self, cluster_id: int) -> None:
        while not (cluster_id in self._links and self._links[cluster_id].is_ready):
            await self._linked.wait()

    def _hello(self) -> Hello:
        end = self.transport.endpoint
        names = EndpointInfo.model_fields
        return Hello(
            cluster_id=self.cluster_id,
            role=self._owner.role.value,
            instance=self._owner.instance,
            nonce=secrets.token_hex(32),
            one_sided=self._config.enable_remote_cache_accessible,
            has_key=self._config.auth_key is not None,
            endpoint=EndpointInfo(**{name: getattr(end, name) for name in names}),
        )

    def _key(self) -> bytes | None:
        return None if self._config.auth_key is None else self._config.auth_key.get_secret_value()
