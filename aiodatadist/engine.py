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
from aiodatadist.link import DRAIN, Link, Wire, channel_name
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
"""Connections that have not said so yet, before the next one gets a fiftieth of the time."""
ACCEPT_PAUSE = 0.1
"""Seconds before accepting is tried again when the process has run out of file descriptors."""


class _Attempt:
    """A link that is being made because somebody here asked for it."""

    def __init__(self, deadline: float) -> None:
        self.scope = anyio.CancelScope(deadline=deadline)
        self.settled = anyio.Event()
        self.error: LinkError | None = None


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
        self._attempts: dict[int, _Attempt] = {}
        self._opening = 0
        self._refusals: dict[int, str] = {}  # why the last attempt of ours at a cluster failed
        self._group: anyio.abc.TaskGroup | None = None
        self._stopping = anyio.Event()
        self._strangers = 0

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
            self._linked.set()
            for attempt in self._attempts.values():
                attempt.scope.cancel()
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
        """Serve clients; running out of file descriptors makes them wait, no more."""
        async with listener:
            while True:
                try:
                    await listener.serve(self._serve_client, self._tasks())
                except OSError as error:
                    logger.error("cluster %d cannot accept a client: %s", self.cluster_id, error)  # noqa: TRY400
                    await anyio.sleep(ACCEPT_PAUSE)

    async def _serve_client(self, stream: anyio.abc.SocketStream) -> None:
        link = Link(Wire(stream), self.device, self.transport)
        handshake = Handshake("server", self._hello(), self._key())
        try:
            await self._make(link, handshake, None, self._stranger_deadline())
        except LinkError as error:
            logger.warning("cluster %d: a client was not linked: %s", self.cluster_id, error)
        except Exception:
            logger.exception("cluster %d: a client was not linked", self.cluster_id)
        else:
            await self._serve(link)

    def _stranger_deadline(self) -> anyio.CancelScope:
        """A client has little time for saying who it is, and less when many others do not say it either."""
        crowd = self._strangers >= MAX_STRANGERS
        return anyio.CancelScope(deadline=anyio.current_time() + (STRANGER / 50 if crowd else STRANGER))

    async def _make(
        self, link: Link, handshake: Handshake, connect: Connect | None, stranger: anyio.CancelScope | None = None
    ) -> None:
        """From the first word to a filed link. Raises LinkError: there is none, and nothing is left of it."""
        known = stranger is None
        self._strangers += not known

        def admit(peer: Hello) -> None:
            nonlocal known
            self._admit(peer, handshake.side)
            if stranger is not None:
                stranger.deadline = anyio.current_time() + HANDSHAKE
                self._strangers -= 1
            known = True

        self._opening += 1
        try:
            with stranger or anyio.CancelScope() as scope:
                await link.shake_hands(handshake, connect, self.cache_manager.published, admit)
            if scope.cancelled_caught:
                seconds, what = (HANDSHAKE, "open its channel") if known else (STRANGER, "say who it is")
                raise LinkTimeout(f"the client did not {what} within {seconds:g} s")
            self._file(link)
        finally:
            self._opening -= 1
            self._strangers -= not known
            if self._links.get(link.cluster_id) is not link:
                await link.discard()

    def _admit(self, peer: Hello, side: Side) -> None:
        """Decide whether a peer may have a link with us now."""
        old = self._links.get(peer.cluster_id)
        if old is not None and old.is_ready and old.instance == peer.instance:
            raise LinkError(f"cluster {peer.cluster_id} is linked already", status_code=LLMStatusCode.LLM_ALREADY_LINK)
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
        """Until the link is over. Whatever goes wrong on it is its own affair."""
        try:
            await link.serve()
        except Exception:
            logger.exception("cluster %d: the link to cluster %d failed", self.cluster_id, link.cluster_id)
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
        if cluster_id in self._attempts:
            raise LinkError(
                f"a link to cluster {cluster_id} is being made", status_code=LLMStatusCode.LLM_PROCESSING_LINK
            )
        attempt = _Attempt(anyio.current_time() + timeout)
        self._tasks().start_soon(self._client, address, cluster_id, timeout, attempt)
        self._attempts[cluster_id] = attempt
        try:
            await attempt.settled.wait()
        except asyncio.CancelledError:
            attempt.scope.cancel()
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + DRAIN):
                await attempt.settled.wait()
            raise
        if attempt.error is not None:
            self._refusals[cluster_id] = str(attempt.error.args[0])
            raise attempt.error
        self._refusals.pop(cluster_id, None)

    async def _client(self, address: tuple[str, int], cluster_id: int, timeout: float, attempt: _Attempt) -> None:
        """One link that we ask for. Before it is ready its errors go to the caller; afterwards it runs on its own."""
        link: Link | None = None
        try:
            with attempt.scope:
                link = await self._ask(address, cluster_id, timeout)
        except LinkError as error:
            attempt.error = error
        except Exception as error:
            logger.exception("cluster %d: cluster %d was not linked", self.cluster_id, cluster_id)
            attempt.error = LinkError(f"cluster {cluster_id} was not linked: {error!r}")
        finally:
            if link is None and attempt.error is None:  # out of time, or the engine stops
                attempt.error = self._why_not(address, cluster_id, timeout)
            self._attempts.pop(cluster_id, None)
            attempt.settled.set()
        if link is not None:
            await self._serve(link)

    async def _ask(self, address: tuple[str, int], cluster_id: int, timeout: float) -> Link:
        link = Link(Wire(await self._connect(address)), self.device, self.transport)
        handshake = Handshake("client", self._hello(), self._key(), cluster_id)
        connect = Connect(channel=channel_name(self.cluster_id, cluster_id), timeout=min(timeout, HANDSHAKE))
        await self._make(link, handshake, connect)
        return link

    def _why_not(self, address: tuple[str, int], cluster_id: int, timeout: float) -> LinkError:
        if self._stopping.is_set():
            return LinkError(
                f"cluster {self.cluster_id} is being finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
            )
        return LinkTimeout(f"cluster {cluster_id} at {address[0]}:{address[1]} was not linked within {timeout} s")

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
            refusal = self._refusals.get(cluster_id)
            if refusal is not None:
                raise NotLinked(
                    f"cluster {cluster_id} is not linked; the last attempt failed: {refusal}", peer=cluster_id
                )
            raise NotLinked(f"cluster {cluster_id} is not linked", peer=cluster_id, hint="link_clusters() first")
        return link

    @property
    def has_links(self) -> bool:
        """There are links, or some are being made."""
        return bool(self._links) or self._opening > 0

    async def wait_linked(self, cluster_id: int) -> None:
        """Raises NotLinked: the engine stops before there is such a link."""
        while not (cluster_id in self._links and self._links[cluster_id].is_ready):
            if self._stopping.is_set():
                raise NotLinked(
                    f"cluster {self.cluster_id} is finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
                )
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
