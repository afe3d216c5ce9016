"""Links that this end asks for: from a call, or the relinker's attempt, to a link that both ends have.

Who owns what
    An :class:`Attempt` is one link that is being made, by one of the engine's tasks. The caller waits for the attempt to
    be settled, and ends it if it no longer wants to wait.

Several attempts at one cluster
    They have different addresses, some of which may be wrong. Until an attempt has met its peer, which has proved its
    key if there is one, it does not hold up any other. Then it takes its turn: one attempt at a time asks the same
    instance of a cluster for a link. The others have closed their connections by then, and wait for its result. The
    attempt that makes the link ends all that have not met their peer. A cluster that links to itself makes one attempt
    at a time, because only its listener finds out whom it met.

    An attempt that has no rival when the peer has proved its key asks at once, before the peer says which instance it is.
    That saves a round trip. Until the peer says so, the attempt counts as asking each instance.

What cancellation means
    A caller that is cancelled waits until nothing is left of the attempt, for ``DRAIN_TIMEOUT`` at most. So no half of
    a link stays that the peer may never have.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.abc
import anyio.lowlevel

from aiodatadist._cluster.attempt import ANY, Attempt, Met, NotItsTurn, Turn, never
from aiodatadist._cluster.dial import Steps, dial
from aiodatadist._cluster.half_links import HalfLinks
from aiodatadist._cluster.host_names import HostNames
from aiodatadist._cluster.pending_client import HANDSHAKE_TIMEOUT
from aiodatadist._concurrency.scope import Scope
from aiodatadist._counting import Incident
from aiodatadist._link import DRAIN_TIMEOUT, Connection, Link, LinkRequest, channel_name, prover_of
from aiodatadist._transport.soft_reach import doubts
from aiodatadist._values.addresses import host_port
from aiodatadist._values.foreign import printable
from aiodatadist._wire.handshake import Handshake
from aiodatadist._wire.messages import Connect, Ping, Pong
from aiodatadist._wire.ways import HCCL
from aiodatadist.errors import AuthError, LinkClosed, LinkError, LinkTimeout, LLMException, LLMStatusCode

if TYPE_CHECKING:
    from aiodatadist._cluster.key_ring import KeyRing
    from aiodatadist._cluster.link_table import LinkTable
    from aiodatadist._cluster.liveness import Heartbeats
    from aiodatadist._cluster.relinker import Relinker
    from aiodatadist._config.trust import Key
    from aiodatadist._counting import Totals
    from aiodatadist._wire.messages import Hello

logger = logging.getLogger(__name__)


class InitiatorHost(Protocol):
    """The properties of the engine that the initiator needs."""

    @property
    def cluster_id(self) -> int: ...
    @property
    def totals(self) -> Totals: ...
    @property
    def key_ring(self) -> KeyRing: ...
    @property
    def is_stopping(self) -> bool: ...
    def tasks(self) -> anyio.abc.TaskGroup: ...
    def hello(self, has_key: bool, peer: int | None) -> Hello: ...
    def gave_up(self) -> LinkClosed: ...
    def new_link(self, connection: Connection) -> Link: ...
    async def make(self, link: Link, handshake: Handshake, request: LinkRequest | None = None) -> None: ...


class LinkInitiator:
    """The initiator of one engine: it makes links to peers that listen.

    Attributes:
        met_itself: True if the last attempt found that the peer is this cluster.
        host_names: looks up the names of hosts.
        half_links: the links that are being made.
    """

    def __init__(
        self, engine: InitiatorHost, links: LinkTable, relinker: Relinker, heartbeats: Heartbeats, tries: int
    ) -> None:
        """Make an initiator. ``tries`` is the number of attempts of one call, each with an equal share of its time."""
        self._engine = engine
        self._links = links
        self._relinker = relinker
        self._heartbeats = heartbeats
        self._tries = tries
        self.host_names: HostNames = HostNames()
        self.half_links: HalfLinks = HalfLinks()
        self._attempts: dict[tuple[int, tuple[str, int]], Attempt] = {}
        self.met_itself: bool = False

    def cancel(self) -> None:
        """Cancel all attempts, because the engine stops."""
        for attempt in self._attempts.values():
            attempt.scope.cancel()

    async def wait_settled(self, peer: Hello) -> bool:
        """Wait until this end's attempt that asks that instance of a cluster has ended. Return False if there is none."""
        attempt = self._asking(peer)
        if attempt is None:
            return False
        await attempt.settled.wait()
        return True

    def _at(self, cluster_id: int) -> list[Attempt]:
        """Return the attempts at a cluster."""
        return [each for each in self._attempts.values() if each.cluster_id == cluster_id]

    def _asking(self, peer: Hello) -> Attempt | None:
        return next((each for each in self._at(peer.cluster_id) if each.asks in {peer.instance, ANY}), None)

    def linked(self, link: Link) -> None:
        """End the attempts that have not met their peer: both ends have this link, whichever made it."""
        if not link.life.ownership.is_ours:
            return
        for attempt in self._at(link.cluster_id):
            if not attempt.asks:
                attempt.error = LinkError(
                    f"cluster {link.cluster_id} was linked in the meantime", status_code=LLMStatusCode.LLM_ALREADY_LINK
                )
                attempt.scope.cancel()

    async def link(
        self,
        address: tuple[str, int],
        cluster_id: int,
        timeout: float,
        key: Key | None = None,
        relink_timeout: float | None = None,
        steps: Steps | None = None,
    ) -> None:
        """Link to a peer that listens.

        Args:
            key: used instead of the cluster's own, also beyond this machine.
            relink_timeout: seconds for each attempt to make the link again, once it broke. If None, it is not made
                again.
            steps: told how far the attempt is, and what it waits for.

        Raises:
            LinkError: if no link was made.
        """
        linking, began = self._engine.totals.linking, anyio.current_time()
        linking.running += 1
        try:
            await self._link(address, cluster_id, timeout, key, relink_timeout, steps)
            linking.took(anyio.current_time() - began)
        except LLMException as error:
            linking.failed(error.status_code.name)
            raise
        except asyncio.CancelledError:
            linking.failed("CANCELLED")
            raise
        finally:
            linking.running -= 1

    async def link_once(self, address: tuple[str, int], cluster_id: int, seconds: float, patience: float) -> None:
        """Link as :meth:`link` does, but do not count it as a caller's link.

        It also raises LinkTimeout if the process that accepts the connection does not prove within ``patience`` that it
        is the cluster, and the cluster is met at the address over another connection.
        """
        await self._link(address, cluster_id, seconds, None, None, patience=patience)

    async def meet(self, address: tuple[str, int], cluster_id: int, timeout: float, steps: Steps | None = None) -> str:
        """Return the instance of the cluster that listens at an address, without making a link.

        The cluster has proved that it has the key, if there is one. An existing link continues.

        Args:
            steps: as in :meth:`link`.

        Raises LinkError if nothing listens there, or another cluster does.
        """

        def learn(peer: Hello) -> None:
            raise Met(peer.instance)

        attempt = Attempt(cluster_id, anyio.current_time() + timeout, steps)
        with attempt.scope:
            try:
                await self._ask_now(address, cluster_id, timeout, None, attempt, Turn(learn, never))
            except Met as found:
                return found.instance
        raise self._why_not(address, cluster_id, timeout, attempt.waits_for)

    async def _link(
        self,
        address: tuple[str, int],
        cluster_id: int,
        timeout: float,
        key: Key | None,
        relink_timeout: float | None,
        steps: Steps | None = None,
        patience: float = math.inf,
    ) -> None:
        is_itself = cluster_id == self._engine.cluster_id
        if (cluster_id, address) in self._attempts or (is_itself and self._at(cluster_id)):
            raise LinkError(
                f"a link to cluster {cluster_id} is being made",
                status_code=LLMStatusCode.LLM_PROCESSING_LINK,
                hint="await wait_linked()",
            )
        self._links.check_not_linked(cluster_id)
        attempt = Attempt(cluster_id, anyio.current_time() + timeout, steps, patience)
        self._engine.tasks().start_soon(self._client, address, cluster_id, timeout, attempt, key, relink_timeout)
        self._attempts[cluster_id, address] = attempt
        try:
            await attempt.settled.wait()
        except asyncio.CancelledError:
            attempt.scope.cancel()
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + DRAIN_TIMEOUT):  # no half is left
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
        attempt: Attempt,
        key: Key | None,
        relink_timeout: float | None,
    ) -> None:
        """Make one link that this end asks for. Errors go to the caller until the link is ready; then it runs on its own."""
        link: Link | None = None
        is_linked = self.met_itself = False
        try:
            with attempt.scope:
                await self._outlast(cluster_id, timeout / 2)
                link = await self._ask_in_turn(address, cluster_id, timeout, key, attempt)
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
            # for the caller alone: raised in this task, it would end the engine's task group with all links
            logger.debug("cluster %d: cluster %d was not linked", self._engine.cluster_id, cluster_id, exc_info=True)
            attempt.error = LinkError(f"cluster {cluster_id} was not linked: {printable(repr(error))}")
            attempt.error.__cause__ = error
        finally:
            if not is_linked and attempt.error is None:  # out of time, or the engine is stopping
                attempt.error = self._why_not(address, cluster_id, timeout, attempt.waits_for)
            # before the caller continues, because it may try again at once
            del self._attempts[cluster_id, address]
            attempt.settled.set()

    async def _confirm(self, link: Link, remember: Callable[[], None]) -> None:
        """Wait until the peer has the link, too, and sends something on it; then announce the link.

        If cancelled before that, the link ends, unless the cluster does, which parts with every peer.

        Raises LinkError if the link broke before that.
        """

        def heard() -> None:
            call.answered.set()
            if self._links.peek(link.cluster_id) is link:  # otherwise another link has replaced it
                self._links.tell_of(link)
                remember()
                self.linked(link)

        try:
            with link.session.questions.open(_ping, Pong) as call:
                link.call_when_mutual(heard)
                await link.session.while_it_lasts(lambda: link.session.questions.persist(call, _ping))
        except LinkError as error:
            if self._links.peek(link.cluster_id) not in {None, link}:
                self._links.check_not_linked(link.cluster_id)
            if not link.life.is_mutual:
                raise LinkError(f"cluster {link.cluster_id} did not accept the link: {error.args[0]}") from error
        except BaseException:  # whatever it was: keep no half of a link that the peer may never have
            if not (link.life.is_mutual or self._engine.is_stopping):
                why = LinkError(*self._engine.gave_up().args)  # not an orderly end, so relinking continues
                await link.refuse(why)
                link.session.break_off(why)
            raise
        finally:
            if link.session.failure is not None:
                with anyio.CancelScope(shield=True, deadline=anyio.current_time() + DRAIN_TIMEOUT):  # no half is left
                    await link.wait_closed()

    async def _outlast(self, cluster_id: int, seconds: float) -> None:
        """Wait at most ``seconds`` until the old link, if it is being ended, has ended.

        The peer refuses another link until it has agreed to that end. A peer that is gone never agrees.
        """
        old = self._links.peek(cluster_id)
        if old is not None and not old.session.is_ready:
            with anyio.move_on_after(seconds):
                await old.wait_closed()

    async def _ask_in_turn(
        self, address: tuple[str, int], cluster_id: int, timeout: float, key: Key | None, attempt: Attempt
    ) -> Link | None:
        """Ask for a link while no other attempt does; return None if the peer's link now belongs to this end, too.

        While the peer makes a link with this cluster, or another attempt asks the peer, this waits; it asks only if
        those fail. If the peer says that there is a link, its half may have been ready before ours: no caller is told
        of a link that it cannot use yet.
        """
        turn = Turn(partial(self._take_turn, attempt), partial(self._may_ask_at_once, attempt))
        while True:
            while self._links.coming[cluster_id]:
                await self._links.news.wait()
            if await self._join(cluster_id, timeout):
                return None
            self._links.check_not_linked(cluster_id)
            made = self._engine.totals.generations
            before = made[cluster_id]
            try:
                return await self._ask(address, cluster_id, timeout, key, attempt, turn)
            except NotItsTurn as other:
                if other.settled is not None:
                    await other.settled.wait()
            except LinkError as error:
                is_coming = self._links.coming[cluster_id] or self._joinable(cluster_id) is not None
                existing = self._links.peek(cluster_id)
                # the peer means a link that came meanwhile, and has ended here: it refuses another until it knows
                has_gone = made[cluster_id] != before and (existing is None or not existing.session.is_ready)
                if error.status_code is not LLMStatusCode.LLM_ALREADY_LINK or not (is_coming or has_gone):
                    raise
                if has_gone:
                    await self._outlast(cluster_id, timeout / 2)
            attempt.asks = ""

    def _take_turn(self, attempt: Attempt, peer: Hello) -> None:
        """Let this attempt ask a peer that is known. Raises LinkError if another one does, or it must not be asked now."""
        if attempt.asks == ANY:  # it has asked already
            attempt.asks = peer.instance
            return
        other = self._asking(peer)
        if other is not None:
            raise NotItsTurn(peer.cluster_id, other.settled)
        if self._links.coming[peer.cluster_id]:
            raise NotItsTurn(peer.cluster_id, None)
        self._links.check_not_linked(peer.cluster_id)
        attempt.asks = peer.instance

    def _may_ask_at_once(self, attempt: Attempt) -> bool:
        """Return True if an attempt may ask now, before its peer has said which instance of the cluster it is."""
        cluster_id = attempt.cluster_id
        has_rival = len(self._at(cluster_id)) > 1 or self._links.coming[cluster_id] > 0
        if has_rival or cluster_id == self._engine.cluster_id or self._links.peek(cluster_id) is not None:
            return False
        attempt.asks = ANY
        return True

    def _joinable(self, cluster_id: int) -> Link | None:
        """Return a ready link that belongs only to its initiator, the peer; None if there is none."""
        link = self._links.peek(cluster_id)
        return link if link is not None and link.session.is_ready and not link.life.ownership.is_ours else None

    async def _join(self, cluster_id: int, timeout: float) -> bool:
        """Own the peer's link, too. Return False if there is none, or no longer."""
        link = self._joinable(cluster_id)
        if link is None:
            return False
        try:
            await link.owners.own()
        except LinkError:  # the peer ended it in the meantime
            await self._outlast(cluster_id, timeout / 2)
            return False
        return True

    async def _ask(
        self,
        address: tuple[str, int],
        cluster_id: int,
        timeout: float,
        key: Key | None,
        attempt: Attempt,
        turn: Turn,
    ) -> Link:
        """Dial, and ask for a link, once there is room for one more half-made link.

        It keeps that room until the link is made, or nothing is left of it.

        Args:
            turn: says when the peer may be asked.
        """
        scope, half_links, room = anyio.CancelScope(), self.half_links, AsyncExitStack()

        async def take_room() -> None:
            before = attempt.waits_for
            attempt.now_waits_for(f"it found no room, {half_links.words}")
            await room.enter_async_context(half_links.room_for(address[0], scope.cancel))
            attempt.now_waits_for(before)

        with scope:
            async with room:
                return await self._ask_now(address, cluster_id, timeout, key, attempt, turn, take_room)
        place = host_port(*address)
        raise LinkTimeout(
            f"cluster {cluster_id} at {place} was not linked before it had to make room for others: {half_links.words}",
            hint="link to fewer clusters at a time, or raise the limit of open files (ulimit -n)",
        )

    async def _ask_now(
        self,
        address: tuple[str, int],
        cluster_id: int,
        timeout: float,
        key: Key | None,
        attempt: Attempt,
        turn: Turn,
        take_room: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
    ) -> Link:
        if not attempt.steps.are_limited:
            await take_room()
        ring = self._engine.key_ring
        await ring.look()
        certificates = ring.certificates()
        keys = () if certificates is not None else ring.keys() if key is None else (key,)
        is_proved = certificates is not None or bool(keys)
        # Made before dialling: otherwise a link that the peer makes in the meantime would count as one that was lost.
        hello = self._engine.hello(is_proved, cluster_id)

        def met(peer: Hello) -> None:
            looking.cancel()
            if is_proved:
                attempt.steps.met()
            what = f"{host_port(*address)} is cluster {cluster_id}, but the two did not open a channel"
            attempt.now_waits_for(what + (doubts(hello.endpoint, peer.endpoint) if handshake.way == HCCL else ""))
            turn.take(peer)

        waits_for = attempt.now_waits_for
        rule = ring.why_not if key is None else lambda _: ""
        connection, host = await dial(*address, self.host_names, rule, attempt.scope.deadline, waits_for, attempt.steps)
        looking = Scope()
        link = self._engine.new_link(connection)
        link.dialled = address
        handshake = Handshake("client", hello, None, cluster_id, met, ring.hint)
        channel = channel_name(self._engine.cluster_id, cluster_id)
        connect = Connect(channel=channel, timeout=min(timeout, HANDSHAKE_TIMEOUT))

        async def attach(token: str) -> None:
            await self._heartbeats.attach(link, (host, address[1]), token, self._engine.tasks())

        try:
            if attempt.steps.are_limited:
                await take_room()
            prove = prover_of(connection, keys, ring.hint, certificates, cluster_id)
            at_once = turn.may_ask_at_once if is_proved else never
            request = LinkRequest(connect, attach, prove, at_once, (host, address[1]))
            make = partial(self._engine.make, link, handshake, request)
            await self._unless_met_elsewhere(make, looking, address, cluster_id, attempt.patience)
            self._keep(link)
        except LinkError as error:
            await link.refuse(error)
            raise
        except asyncio.CancelledError:
            await link.refuse(self._engine.gave_up())
            raise
        finally:
            await self._links.settle(link)
        return link

    async def _unless_met_elsewhere(
        self,
        make: Callable[[], Awaitable[None]],
        looking: Scope,
        address: tuple[str, int],
        cluster_id: int,
        patience: float,
    ) -> None:
        """Make a link, and look for the cluster over other connections until this one has proved to be it.

        A process that proves nothing may be an impostor that keeps the connection. It may also be the cluster with a
        busy event loop. Giving up the connection would make that cluster begin from the start, and it might never
        finish.

        Args:
            looking: cancelled when the peer is known.

        Raises:
            LinkTimeout: if the cluster accepted another connection, and has proved itself there.

        It also raises whatever ``make`` raises.
        """
        making, failure = anyio.CancelScope(), None

        async def look() -> None:
            with looking:
                await self._look_for(address, cluster_id, patience)
                making.cancel()

        async with anyio.create_task_group() as group:
            if patience < math.inf:
                group.start_soon(look)
            try:
                with making:
                    await make()
            except Exception as error:  # raised below: the task group would wrap it in an ExceptionGroup
                failure = error
            looking.cancel()
        if failure is not None:
            raise failure
        if making.cancelled_caught:
            place = host_port(*address)
            raise LinkTimeout(f"{place} did not prove within {patience:g} s that it is cluster {cluster_id}")

    async def _look_for(self, address: tuple[str, int], cluster_id: int, patience: float) -> None:
        """Wait until the cluster has proved at an address that it is there, over one connection at a time.

        After a connection that was kept in vain, the next one has twice its time, and comes as soon, because the
        cluster may listen by then.
        """
        seconds = patience
        while True:
            await anyio.sleep(patience)
            try:
                await self.meet(address, cluster_id, seconds)
            except LinkError as error:
                logger.debug("cluster %d: cluster %d was not found: %s", self._engine.cluster_id, cluster_id, error)
                seconds *= 2 if isinstance(error, LinkTimeout) else 1
            else:
                return

    def _keep(self, link: Link) -> None:
        tasks = self._engine.tasks()
        self._links.file(link)
        tasks.start_soon(self._links.serve, link)

    def _why_not(self, address: tuple[str, int], cluster_id: int, timeout: float, waits_for: str) -> LinkError:
        if self._engine.is_stopping:
            return LinkError(
                f"cluster {self._engine.cluster_id} is being finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED
            )
        what = f"cluster {cluster_id} at {host_port(*address)} was not linked within {timeout:g} s"
        return LinkTimeout(f"{what}: {waits_for}" if waits_for else what)

    async def link_in_attempts(
        self,
        address: tuple[str, int],
        cluster_id: int,
        timeout: float,
        steps: Steps | None = None,
    ) -> None:
        """Link in ``link_retry_count`` attempts, each with an equal share of the timeout.

        From then on the link is re-established whenever it breaks, if the policy says so. ``steps`` is that of
        :meth:`link`.
        """
        async with self._relinker.paused(cluster_id, timeout):
            await self._link_in_attempts(address, cluster_id, timeout, steps)

    async def _link_in_attempts(
        self, address: tuple[str, int], cluster_id: int, timeout: float, steps: Steps | None
    ) -> None:
        attempts = self._tries
        for left in reversed(range(attempts)):
            try:
                await self.link(address, cluster_id, timeout / attempts, relink_timeout=timeout, steps=steps)
            except LinkError as error:
                again = error.status_code in {LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_TIMEOUT}
                if not left or not again or isinstance(error, AuthError):
                    raise
                told = "cluster %d retries a link: %s", self._engine.cluster_id, error
                self._engine.totals.incidents.add(Incident.LINK_RETRIED, logger, *told, level=logging.INFO)
            else:
                return


def _ping(call: int) -> Ping:
    return Ping(call=call)
