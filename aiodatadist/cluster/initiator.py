"""Links that this end asks for: from a call, or the relinker's attempt, to a link that both ends have.

Who owns what
    A :class:`_Attempt` is one link that is being made, by a task of the engine's. The caller waits for the attempt to be
    settled, and ends it if it does not want to wait any longer.

What cancellation means
    A caller that is cancelled waits until nothing is left of the attempt, for ``DRAIN_TIMEOUT`` at most: no half stays that
    the peer may never have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.abc

from aiodatadist.cluster.dial import dial
from aiodatadist.cluster.host_names import HostNames
from aiodatadist.cluster.pending_client import HANDSHAKE_TIMEOUT
from aiodatadist.counting import Incident
from aiodatadist.errors import AuthError, LinkClosed, LinkError, LinkTimeout, LLMException, LLMStatusCode
from aiodatadist.link import DRAIN_TIMEOUT, Connection, Link, channel_name
from aiodatadist.values.addresses import host_port
from aiodatadist.values.foreign import printable
from aiodatadist.wire.handshake import Handshake
from aiodatadist.wire.messages import Connect, Ping, Pong

if TYPE_CHECKING:
    from aiodatadist.cluster.link_table import LinkTable
    from aiodatadist.cluster.liveness import Heartbeats
    from aiodatadist.cluster.relinker import Relinker
    from aiodatadist.counting import Totals
    from aiodatadist.wire.messages import Hello

logger = logging.getLogger(__name__)


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


class InitiatorHost(Protocol):
    """What the initiator has to know of the engine."""

    @property
    def cluster_id(self) -> int: ...
    @property
    def totals(self) -> Totals: ...
    @property
    def auth_key(self) -> bytes | None: ...
    @property
    def links_have_owners(self) -> bool: ...
    @property
    def is_stopping(self) -> bool: ...
    def tasks(self) -> anyio.abc.TaskGroup: ...
    def hello(self, key: bytes | None, peer: int | None) -> Hello: ...
    def gave_up(self) -> LinkClosed: ...
    def new_link(self, connection: Connection) -> Link: ...
    async def make(
        self, link: Link, handshake: Handshake, connect: Connect, *, attach: Callable[[str], Awaitable[None]]
    ) -> None: ...


class LinkInitiator:
    """Of one engine: makes links to peers that listen.

    Attributes:
        met_itself: the last attempt found that the peer is this cluster.
    """

    def __init__(
        self, engine: InitiatorHost, links: LinkTable, relinker: Relinker, heartbeats: Heartbeats, tries: int
    ) -> None:
        """``tries``: of one call, each with an equal share of its time."""
        self._engine = engine
        self._links = links
        self._relinker = relinker
        self._heartbeats = heartbeats
        self._tries = tries
        self._host_names = HostNames()
        self._attempts: dict[int, _Attempt] = {}
        self.met_itself = False

    def cancel(self) -> None:
        """The engine stops: so does each attempt."""
        for attempt in self._attempts.values():
            attempt.scope.cancel()

    async def wait_settled(self, cluster_id: int) -> bool:
        """Until this end's own attempt at that cluster is over; False: there is none."""
        attempt = self._attempts.get(cluster_id)
        if attempt is None:
            return False
        await attempt.settled.wait()
        return True

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
        linking, began = self._engine.totals.linking, anyio.current_time()
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
        """As :meth:`link`, and not counted as a caller's."""
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
        self._links.check_not_linked(cluster_id)
        attempt = _Attempt(anyio.current_time() + timeout)
        key = key or self._engine.auth_key
        self._engine.tasks().start_soon(self._client, address, cluster_id, timeout, attempt, key, relink_timeout)
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
            self._links.remember(cluster_id, f"the last attempt failed: {attempt.error.args[0]}")
            raise attempt.error
        self._links.forget_refusal(cluster_id)

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
        is_linked = self.met_itself = False
        try:
            with attempt.scope:
                await self._outlast(cluster_id, timeout / 2)
                link = await self._ask_in_turn(address, cluster_id, timeout, key)
                remember = partial(self._relinker.remember, cluster_id, address, relink_timeout)
                if link is None:
                    remember()
                else:
                    await self._confirm(link, remember)
                is_linked = True
        except LinkError as error:
            if cluster_id == self._engine.cluster_id and self.met_itself:
                is_linked = self._links.is_to_itself = True
            else:
                attempt.error = error
        except Exception as error:
            logger.debug("cluster %d: cluster %d was not linked", self._engine.cluster_id, cluster_id, exc_info=True)
            attempt.error = LinkError(f"cluster {cluster_id} was not linked: {printable(repr(error))}")
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
            if self._links.peek(link.cluster_id) is link:  # else another one came in its place
                self._links.tell_of(link)
                remember()

        try:
            with link.questions.open(_ping, Pong) as call:
                link.call_when_mutual(heard)
                await link.while_it_lasts(lambda: link.questions.persist(call, _ping))
        except LinkError as error:
            if self._links.peek(link.cluster_id) not in {None, link}:
                self._links.check_not_linked(link.cluster_id)
            if not link.is_mutual:
                raise LinkError(f"cluster {link.cluster_id} did not take the link: {error.args[0]}") from error
        except BaseException:  # whatever it was: no half stays that the peer may never have
            if not (link.is_mutual or self._engine.is_stopping):
                why = LinkError(*self._engine.gave_up().args)  # no end in good order: what makes it again goes on
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
        old = self._links.peek(cluster_id)
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
            while self._links.coming[cluster_id]:
                await self._links.news.wait()
            if await self._join(cluster_id, timeout):
                return None
            self._links.check_not_linked(cluster_id)
            try:
                return await self._ask(address, cluster_id, timeout, key)
            except LinkError as error:
                is_coming = self._links.coming[cluster_id] or self._joinable(cluster_id) is not None
                if error.status_code is not LLMStatusCode.LLM_ALREADY_LINK or not is_coming:
                    raise

    def _joinable(self, cluster_id: int) -> Link | None:
        """A link that belongs to its initiator, the peer."""
        link = self._links.peek(cluster_id)
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
        # At once: a link that the peer makes meanwhile is not one that was lost.
        hello = self._engine.hello(key, cluster_id)
        attempt = self._attempts[cluster_id]
        waits_for = attempt.now_waits_for
        connection, host = await dial(*address, self._host_names, attempt.scope.deadline, waits_for, cluster_id)
        link = self._engine.new_link(connection)
        link.dialled = address
        handshake = Handshake("client", hello, key, cluster_id)
        connect = Connect(
            channel=channel_name(self._engine.cluster_id, cluster_id), timeout=min(timeout, HANDSHAKE_TIMEOUT)
        )

        async def attach(token: str) -> None:
            await self._heartbeats.attach(link, (host, address[1]), token, self._engine.tasks())

        try:
            await self._engine.make(link, handshake, connect, attach=attach)
            tasks = self._engine.tasks()
            link.is_peers = not self._engine.links_have_owners
            self._links.file(link)
            tasks.start_soon(self._links.serve, link)
        except LinkError as error:
            await link.refuse(error)
            raise
        except asyncio.CancelledError:
            await link.refuse(self._engine.gave_up())
            raise
        finally:
            await self._links.settle(link)
        return link

    def _why_not(self, address: tuple[str, int], cluster_id: int, timeout: float, waits_for: str) -> LinkError:
        if self._engine.is_stopping:
            return LinkError(
                f"cluster {self._engine.cluster_id} is being finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
            )
        what = f"cluster {cluster_id} at {host_port(*address)} was not linked within {timeout:g} s"
        return LinkTimeout(f"{what}: {waits_for}" if waits_for else what)

    async def link_in_attempts(self, address: tuple[str, int], cluster_id: int, timeout: float) -> None:
        """As often as ``link_retry_count`` says, each time with an equal share of the timeout. From then on the link is made
        again whenever it broke, if the policy says so."""
        async with self._relinker.paused(cluster_id, timeout):
            await self._link_in_attempts(address, cluster_id, timeout)

    async def _link_in_attempts(self, address: tuple[str, int], cluster_id: int, timeout: float) -> None:
        attempts = self._tries
        for left in reversed(range(attempts)):
            try:
                await self.link(address, cluster_id, timeout / attempts, relink_timeout=timeout)
            except LinkError as error:
                again = error.status_code in {LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_TIMEOUT}
                if not left or not again or isinstance(error, AuthError):
                    raise
                told = "cluster %d tries again: %s", self._engine.cluster_id, error
                self._engine.totals.incidents.add(Incident.LINK_RETRIED, logger, *told, level=logging.INFO)
            else:
                return


def _ping(call: int) -> Ping:
    return Ping(call=call)
