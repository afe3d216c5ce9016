"""LLMDataDist: one cluster, with its life, its links, and the tasks that serve them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import ClassVar, Self

import anyio

from aiodatadist._cache.pool import PoolUsage
from aiodatadist._cache_manager import CacheManager
from aiodatadist._cluster.cluster_ids import claim_id, refusal
from aiodatadist._cluster.engine import Engine
from aiodatadist._cluster.link_changes import LinkChanges
from aiodatadist._cluster.listen_address import find_listen_address
from aiodatadist._cluster.peer import Peer
from aiodatadist._cluster.rank_groups import RankGroups
from aiodatadist._concurrency.resident import Resident
from aiodatadist._config.llm_config import LLMConfig, check_mode
from aiodatadist._counting import Call, Ended, Figures, Incident, Observer, Totals, figures_of, tell
from aiodatadist._device import Device
from aiodatadist._link import LinkStatistics, Notification
from aiodatadist._link.control.notifications import check_payload
from aiodatadist._native.runtime import Runtime
from aiodatadist._values import checks
from aiodatadist._values.cluster_info import LLMClusterInfo, one_peer, only_address
from aiodatadist._values.descriptors import LLMRole, Placement, RegisterMemStatus
from aiodatadist._values.durations import check_milliseconds, check_seconds, suspicion
from aiodatadist._values.link_results import LinkResults
from aiodatadist.errors import (
    FeatureNotEnabled,
    InternalError,
    LLMException,
    LLMStatusCode,
    ParamInvalid,
    explained,
)

logger = logging.getLogger(__name__)

LINKS_AT_A_TIME = 16
"""Links that one call makes or ends at the same time."""
FINALIZE_SECONDS = 30.0
"""Seconds after which a cancelled finalize() gives up waiting for the device."""

Linking = tuple[int, Callable[[], Awaitable[None]]]
"""A peer's cluster id, and the call that makes or ends the link to that peer."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of a cluster: one :class:`LinkStatistics` per link, the number of caches, and the memory pools."""

    links: tuple[LinkStatistics, ...]
    caches: int
    pools: dict[Placement, PoolUsage]


class LLMDataDist:
    """A cluster: usually one process that drives one device.

    Use ``async with LLMDataDist(role, cluster_id, config) as datadist:``, or call :meth:`init` and :meth:`finalize`. A
    cluster belongs to the event loop on which it was initialised. Several clusters may live in one process, and on one
    loop.

    Args:
        role: informational.
        cluster_id: unique among all clusters that may ever be linked.
        config: used if :meth:`init` is given no options.
    """

    _config_type: ClassVar[type[LLMConfig]] = LLMConfig

    def __init__(self, role: LLMRole, cluster_id: int, config: LLMConfig | None = None) -> None:
        self._role = checks.instance(role, "role", LLMRole)
        self._cluster_id = checks.integer(cluster_id, "cluster_id", checks.UINT64)
        self._config = config if config is not None else self._config_type()
        checks.instance(self._config, "config", LLMConfig)
        self._first_config = self._config
        self._instance = secrets.token_hex(32)
        self._engine: Engine | None = None
        self._cache_manager: CacheManager
        self._rank_groups: RankGroups
        self._starting = anyio.Lock()
        self._suspected: set[str] = set()
        self._observer: Observer | None = None
        self._totals = Totals()  # kept here because figures() needs them after the engine has ended

    def __repr__(self) -> str:
        engine = self._engine
        if engine is None or engine.resident.has_ended:
            state = "being finalized" if engine is not None else "not initialised"
        else:
            links = sum(engine.links.states().values())
            state = f"{links} links, {len(engine.registry.table)} caches"
        return f"<{type(self).__name__} {self._cluster_id}, {self._role.name}: {state}>"

    # ---- life ----

    async def init(self, options: Mapping[str, str] | LLMConfig | None = None) -> None:
        """Open the device and start listening.

        Calling it again with the same options, or with none, has no effect.

        Raises:
            TypeError, ValueError, ParamInvalid: if an option is wrong, or differs from that of the first call; or if
                another cluster of this process has the same id and is not finalized.
            LLMException: if the device cannot be opened, if the port is in use, or if the cluster is initialised on
                another event loop.
            ForkError: if this process was forked from the one in which the cluster was initialised.

        After failure and cancellation nothing is left open.
        """
        if self._engine is not None:
            self._engine.resident.check_process()
        resident = self._new_resident()
        async with self._starting:
            if options is not None and not isinstance(options, LLMConfig):
                options = self._config_type.from_options(options)
            if self._engine is not None:
                self._engine.resident.check_loop()
                self._check_same(options)
                return
            if options is not None:
                self._config = options
            self._first_config = self._config.model_copy(deep=True)
            config = self._engine_config()
            engine = Engine(self, self._totals, config, resident, self._serving_a_request)
            claim_id(self._cluster_id, resident)
            try:
                await resident.start(engine.run)
            except OSError as error:
                what = f"cluster {self._cluster_id} cannot be opened: {explained(error)}"
                raise LLMException(what, operation="init") from error
            self._engine = engine
            self._cache_manager = CacheManager(engine)
            self._rank_groups = RankGroups(engine, config.link_total_time)

    def _new_resident(self) -> Resident:
        """Return what keeps the engine's task alive. Raises LLMException if no event loop runs in this thread."""
        name = f"cluster {self._cluster_id}"
        return Resident(
            f"aiodatadist {name}",
            partial(refusal, name),
            what=name,
            unfinished=f"{name} was never finalized: use async with, or await finalize()",
            patience=FINALIZE_SECONDS,
        )

    def _check_same(self, options: LLMConfig | None) -> None:
        """Raise ParamInvalid if these are not the options with which the cluster was initialised."""
        if options is None:
            return
        names = [
            name
            for name in type(options).model_fields
            if getattr(options, name) != getattr(self._first_config, name, None)
        ]
        if names:
            raise ParamInvalid(
                f"cluster {self._cluster_id} is initialised already, with other values of {', '.join(names)}",
                hint="finalize() it first",
            )

    def _engine_config(self) -> LLMConfig:
        """Return a copy of the configuration for the engine, which later changes to ours do not reach.

        Raises ParamInvalid if options do not go together, and FeatureNotEnabled if their mode is not available here.
        """
        check_mode(self._config)
        return self._config.model_copy(deep=True)

    async def finalize(self) -> None:
        """End all links and release everything. Has no effect if the cluster is not initialised; can be called twice.

        Transfers under way are cancelled. If cancelled itself, it finishes its work first. On an NPU it waits for a
        link that is being made as long as HCCL does: see :meth:`link_clusters`.
        """
        if self._engine is None:
            return
        resident = self._engine.resident
        if resident.is_reachable:
            resident.check_here()
        self._engine = None
        if resident.loop.is_closed():
            logger.error("cluster %d was never finalized: its event loop is closed", self._cluster_id)
        elif await resident.stop():  # otherwise the engine belongs to the parent of this process
            resident.result()

    async def __aenter__(self) -> Self:
        await self.init()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.finalize()

    def _running(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise RuntimeError("this LLMDataDist is not initialised: use async with, or await init() first")
        engine.resident.check_process()
        engine.resident.check_no_other_loop()
        if engine.resident.has_ended:
            raise InternalError("the engine of this LLMDataDist has ended by itself: finalize() raises the reason")
        return engine

    def _running_here(self) -> Engine:
        """Return the engine.

        Raises what :meth:`_running` raises, and LLMException if no event loop runs in this thread.
        """
        engine = self._running()
        engine.check_here()
        return engine

    def _groups(self) -> RankGroups:
        self._running()
        return self._rank_groups

    def _groups_here(self) -> RankGroups:
        self._running_here()
        return self._rank_groups

    def _serving_a_request(self, cluster_id: int) -> AbstractContextManager[None] | None:
        """Return the context in which a request of that peer is answered; None if requests run beside everything else."""
        return None

    # ---- what it is ----

    @property
    def cluster_id(self) -> int:
        """The id of this cluster."""
        return self._cluster_id

    @property
    def role(self) -> LLMRole:
        return self._role

    @property
    def instance(self) -> str:
        """An identifier that is new for every object, so that peers recognise a restarted cluster."""
        return self._instance

    @property
    def config(self) -> LLMConfig:
        return self._config

    @property
    def cache_manager(self) -> CacheManager:
        """The caches of the cluster. Raises RuntimeError if the cluster is not initialised."""
        self._running()
        return self._cache_manager

    @property
    def device(self) -> Device:
        return self._running().device

    @property
    def runtime(self) -> Runtime:
        """The accelerator runtime: ``name``, ``libraries``, ``version``, ``device_count``."""
        return self._running().device.runtime

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """The address at which peers can link to this cluster, with the real port; None if it does not listen."""
        return self._running().listen_address

    def statistics(self) -> Statistics:
        """Return what has been done so far, per link, and what the memory pools hold. Cheap enough to call often."""
        engine = self._running()
        return Statistics(tuple(engine.links.statistics()), len(engine.registry.table), engine.registry.pools.usage())

    def figures(self) -> Figures[PoolUsage]:
        """Return all that was counted since this object was made, over all its links: what a metrics endpoint needs.

        It can be called from any thread and at any time. Before :meth:`init` and after :meth:`finalize` there are no
        links, caches and pools.
        """
        engine, totals = self._engine, self._totals
        is_there = engine is not None and not engine.resident.has_ended
        pools = engine.registry.pools.usage() if engine is not None and is_there else {}
        return Figures(
            self._cluster_id,
            figures_of(totals.transfers),
            totals.linking.figures(),
            engine.links.states() if engine is not None and is_there else {},
            totals.links_made,
            dict(totals.links_ended),
            totals.relinking.figures(),
            totals.relinks_given_up,
            totals.link_changes_dropped,
            totals.leases_opened - sum(totals.leases_ended.copy().values()),
            totals.leases_opened,
            dict(totals.leases_ended),
            len(engine.registry.table) if engine is not None and is_there else 0,
            {placement.name.lower(): usage for placement, usage in pools.items()},
            dict(totals.failure_causes),
            totals.messages_repeated,
            totals.answers_late,
            dict(totals.claims_refused),
            dict(totals.budget_refusals),
            dict(totals.incidents.counts),
            engine.links.credentials() if engine is not None and is_there else {},
            dict(totals.budget_waits),
            engine.quotas.model_dump() if engine is not None and is_there else {},
            engine.links.certificates() if engine is not None and is_there else {},
            engine.key_ring.certificate_seconds() if engine is not None and is_there else None,
        )

    @property
    def observer(self) -> Observer | None:
        """The object that is notified of each transfer, and of each call that makes or ends links; None by default.

        See :class:`~aiodatadist.telemetry.Observer`. Without an observer nothing is spent on it.
        """
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        if self._engine is not None:
            self._engine.observer = observer

    async def switch_role(self, role: LLMRole, switch_options: Mapping[str, str] | None = None) -> None:
        """Take another role, and listen as the options say: on ``llm.listenIpInfo``, or, without it, not at all.

        Raises:
            LLMException: with ``LLM_EXIST_LINK`` if there are links: unlink everything first. With ``LLM_FAILED`` if
                the cluster cannot listen on the port. With ``LLM_FEATURE_NOT_ENABLED`` if the address changes and
                ``transfer_backend`` is ``"hixl"``.
            TypeError, ParamInvalid: if an argument is wrong, a host name is not found, or the keys for links cannot be used.

        After failure, role and address are as they were.
        """
        engine = self._running_here()
        checks.instance(role, "role", LLMRole)
        options = {} if switch_options is None else checks.instance(switch_options, "switch_options", dict)
        text = next((value for key, value in options.items() if str(key).lower() == "llm.listenipinfo"), None)
        config = self._config.model_copy()
        config.listen_ip_info = text
        address = await find_listen_address(config)
        await engine.links.wait_parted()
        if engine.links.has_any:
            raise LLMException(
                f"cluster {self._cluster_id} has links",
                status_code=LLMStatusCode.LLM_EXIST_LINK,
                operation="switch_role",
                hint="unlink_clusters() first",
            )
        is_elsewhere = address is None or address != engine.listen_address
        if is_elsewhere and self._config.links_have_owners:
            raise FeatureNotEnabled(
                "with transfer_backend 'hixl' a cluster keeps the address on which it was initialised to listen"
            )
        if is_elsewhere:
            await engine.listen_elsewhere(address)
        self._config = config
        self._role = role

    # ---- notifications ----

    async def notify(self, cluster_id: int, payload: bytes) -> None:
        """Send a notification to a linked cluster, whose :meth:`notifications` yield it in order and exactly once.

        It arrives when everything that was pushed there before is in place. The call returns once the notification is
        on its way; it waits while the other end has 64 that were not taken.

        Args:
            payload: at most 64 KiB.

        Raises:
            TypeError, ParamInvalid: if the payload is not bytes, or too long.
            NotLinked, PeerLost, LinkClosed: if there is no link, or it ended before the notification was sent.
        """
        link = self._running_here().links.find(checks.integer(cluster_id, "cluster_id", checks.UINT64))
        await link.session.notify(check_payload(payload))

    def notifications(self) -> AsyncIterator[Notification]:
        """Return an iterator over the notifications from peers: ``async for note in datadist.notifications()``.

        Each has ``cluster_id`` and ``payload``. If there are several iterators, each notification goes to one of them.
        They end with :meth:`finalize`.
        """
        return self._running_here().notification_inbox.take()

    # ---- links ----

    def link_changes(self) -> LinkChanges:
        """Return an iterator over link changes from now on: ``async for change in datadist.link_changes()``.

        See :class:`~aiodatadist.LinkChange`. Each iterator gets all changes, of links that this end made and of those
        that a peer made. Up to 1024 changes wait for a reader. If it is slower than that, the oldest are dropped, and
        its ``dropped`` counts them; :meth:`statistics` then shows how the links are. The iterators end with
        :meth:`finalize`.
        """
        return self._running_here().changes.open()

    async def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Link to the other members of a communicator, which all call this at about the same time with the same arguments.

        No member needs to listen, and no address is needed: the members meet through HCCL. The call returns when all have
        come. The links are made from then on: ask :meth:`query_register_mem_status`, or await
        :meth:`wait_register_mem_status`. If cancelled, it waits on an NPU until HCCL gives up by itself, as
        :meth:`link_clusters` does.

        ``LLMConfig.relink`` has no effect on these links, because re-establishing one takes all members.

        Args:
            comm_name: 1 to 127 characters.
            cluster_rank_info: the rank of each of the 2 to 4 clusters, from 0 upwards without a gap.
            rank_table: the vendor's rank table, version 1.0 or 1.2, as JSON.

        Returns:
            A number for :meth:`unlink`, at least 1.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong. Nothing was started.
            FeatureNotEnabled: if ``transfer_backend`` is ``"hixl"``.
            LinkTimeout: if a member did not come in time: within ``link_total_time``, or ``HCCL_CONNECT_TIMEOUT``, or
                120 seconds.
            LinkError: if the communicator could not be made.
        """
        groups = self._groups_here()
        if self._config.links_have_owners:
            raise FeatureNotEnabled(
                "there are no links by rank table with transfer_backend 'hixl': use link_clusters()"
            )
        with self._observed("link", None):
            return await groups.link(comm_name, cluster_rank_info, rank_table)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Return PREPARING until the links of a communicator are made, then OK or FAILED.

        Raises NotLinked if there is no such communicator.
        """
        return self._groups().status(checks.integer(comm_id, "comm_id", checks.UINT64))

    async def wait_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Wait until the links of a communicator are made, or have failed; return OK or FAILED.

        Raises NotLinked if there is no such communicator.
        """
        return await self._groups_here().wait_settled(checks.integer(comm_id, "comm_id", checks.UINT64))

    async def unlink(self, comm_id: int) -> None:
        """End the links of a communicator, at this end even if the other one is gone. Raises NotLinked if there are none."""
        groups = self._groups_here()
        checks.integer(comm_id, "comm_id", checks.UINT64)
        with self._observed("unlink", None):
            await groups.unlink(comm_id)

    async def check_link_status(self, remote_cluster_id: int) -> None:
        """Send a peer a message and wait for its answer.

        Raises:
            NotLinked, PeerLost, LinkClosed: if the cluster is not linked, or no longer.
            LinkTimeout: if no answer came within ``sync_kv_timeout``.
        """
        engine = self._running_here()
        link = engine.links.find(checks.integer(remote_cluster_id, "remote_cluster_id", checks.UINT64))
        await link.session.ping(engine.timeout)

    async def link_clusters(
        self,
        clusters: Sequence[LLMClusterInfo],
        timeout: int = 3000,
    ) -> LinkResults:
        """Link to peers that listen, up to 16 at a time. If a link succeeded, the peer has it, too, and may use it.

        HCCL cannot be told to stop waiting for a peer. So on an NPU, a link whose caller was cancelled, or whose time
        is over, is released only when ``HcclCommPrepare`` has given up by itself. That function has three phases
        (connecting, exchanging descriptors, opening memory) and gives each what is left of the timeout, in whole
        seconds, at most 60. A cancellation is raised after at most 5 seconds; the cluster then waits for HCCL. Until
        that is over, another call for the same peer gets ``LLM_PROCESSING_LINK``, and :meth:`finalize` waits. softnpu
        stops at once unless it is strict.

        A link belongs to both ends, and one of them makes it. With ``transfer_backend="hixl"`` it belongs to its
        initiator, and only the initiator may use it: both ends call this, and each ends its own link. A cluster that
        links to itself succeeds, and may not pull.

        Several calls may name different addresses of one cluster. They delay each other only while they ask the same
        process for the link. The first link counts; the other calls end with ``LLM_ALREADY_LINK``, even if their
        address does not answer.

        With ``LLMConfig.relink``, a link that this call made reconnects whenever it breaks, until a call at either end
        ends it. Such attempts pause while this call makes the link, and continue if it fails.

        Args:
            timeout: milliseconds for each peer, from connecting to ready; shared by ``link_retry_count`` attempts. The
                log warns once if it is below 50, because then seconds were probably meant.

        Returns:
            The last failure, or success; and one status per peer, in order. Failures of single links are not raised:
                ``errors`` of the result has them, one per peer, and so has the log. A peer without exactly one address
                gets ``LLM_PARAM_INVALID``. For an empty list the result is ``(LLM_PARAM_INVALID, [])``.

        Raises:
            TypeError, ValueError, ParamInvalid: if another argument is wrong. Nothing was started.
        """
        engine, seconds = self._running_here(), check_milliseconds(timeout, "timeout")
        ids = [_cluster_id(info) for info in checks.sequence(clusters, "clusters", LLMClusterInfo)]
        self._suspect(timeout, "timeout of link_clusters()")

        async def link(info: LLMClusterInfo, cluster_id: int) -> None:
            await engine.initiator.link_in_attempts(only_address(info), cluster_id, seconds)

        calls: list[Linking] = [(i, partial(link, info, i)) for info, i in zip(clusters, ids, strict=True)]
        return await self._for_each("link_clusters", calls)

    async def unlink_clusters(
        self,
        clusters: Sequence[LLMClusterInfo],
        timeout: int = 3000,
        force: bool = False,
    ) -> LinkResults:
        """End links, and attempts to re-establish them.

        Transfers under way on them may finish within ``timeout`` milliseconds; then they are stopped.

        With ``transfer_backend="hixl"`` only this end's link ends; the peer's own link, if it made one, stays.
        ``force`` then has no effect, as upstream.

        Args:
            force: end only this end's half, at once: the peer is notified, but its answer is not awaited.

        Returns:
            As :meth:`link_clusters`. A cluster that is not linked counts as success.
        """
        self._running_here()
        seconds = check_milliseconds(timeout, "timeout")
        checks.instance(force, "force", bool)
        self._suspect(timeout, "timeout of unlink_clusters()")
        return await self._unlink_each(clusters, seconds, force)

    async def _unlink_each(self, clusters: Sequence[LLMClusterInfo], seconds: float, force: bool) -> LinkResults:
        engine = self._running_here()
        ids = [_cluster_id(info) for info in checks.sequence(clusters, "clusters", LLMClusterInfo)]

        async def unlink(info: LLMClusterInfo, cluster_id: int) -> None:
            self._check_unlink(info, force)
            await engine.unlink(cluster_id, seconds, force)

        calls: list[Linking] = [(i, partial(unlink, info, i)) for info, i in zip(clusters, ids, strict=True)]
        return await self._for_each("unlink_clusters", calls)

    def _suspect(self, milliseconds: int, name: str) -> None:
        """Warn once if a time limit is so short that seconds were probably meant."""
        sentence = suspicion(milliseconds, name)
        if sentence is not None and name not in self._suspected:
            self._suspected.add(name)
            logger.warning("cluster %d: %s", self._cluster_id, sentence)

    async def link_to(
        self,
        peer: int | LLMClusterInfo,
        address: str | tuple[str, int] | None = None,
        *,
        timeout: float = 3.0,
    ) -> Peer:
        """Link to one peer that listens: ``await datadist.link_to(1, "host:26001")``. Raises the reason if that fails.

        Otherwise the same as :meth:`link_clusters`, which has statuses instead, and takes milliseconds.

        Args:
            peer: the peer's cluster id, or an ``LLMClusterInfo`` that has its address.
            address: ``"host:port"``, ``"[ipv6]:port"`` or ``(host, port)``.
            timeout: seconds, from connecting to ready; shared by ``link_retry_count`` attempts.

        Returns:
            The peer, with the calls that concern its link. Other calls name it by its cluster id.

        Raises:
            TypeError, ValueError, RuntimeError, ParamInvalid: if an argument is wrong. Nothing was started.
            LinkTimeout: if the link was not ready in time.
            AuthError, IncompatiblePeer, LinkError: if the peer refused the link, another cluster listens there, or none
                does. With ``LLM_ALREADY_LINK`` if the peer is linked already, with ``LLM_PROCESSING_LINK`` if another
                call is making the link.
        """
        engine, seconds = self._running_here(), check_seconds(timeout, "timeout")
        cluster_id, where = one_peer(peer, address)
        with self._observed("link_to", cluster_id):
            await engine.initiator.link_in_attempts(where, cluster_id, seconds)
        return Peer(self, cluster_id, where)

    async def unlink_from(self, cluster_id: int, *, timeout: float = 3.0, force: bool = False) -> None:
        """End the link to one peer, and attempts to re-establish it. Has no effect if the cluster is not linked.

        Args:
            timeout: seconds that transfers under way have to finish; then they are stopped.
            force: as in :meth:`unlink_clusters`.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong.
            LinkError: if the peer did not agree in time. Unless ``force``, this end's half of the link then stays.
        """
        engine, seconds = self._running_here(), check_seconds(timeout, "timeout")
        checks.integer(cluster_id, "cluster_id", checks.UINT64)
        checks.instance(force, "force", bool)
        with self._observed("unlink_from", cluster_id):
            await engine.unlink(cluster_id, seconds, force)

    def _check_unlink(self, info: LLMClusterInfo, force: bool) -> None:
        """Raise ParamInvalid if the link to this cluster must not be ended.

        Here the cluster's id is enough, because the link knows its peer's addresses.
        """

    async def _for_each(self, operation: str, calls: Sequence[Linking]) -> LinkResults:
        if not calls:
            return LinkResults(LLMStatusCode.LLM_PARAM_INVALID, [])
        errors: list[LLMException | None] = [None] * len(calls)
        limit = anyio.CapacityLimiter(LINKS_AT_A_TIME)

        async def one(index: int, peer: int, call: Callable[[], Awaitable[None]]) -> None:
            async with limit:
                try:
                    with self._observed(operation, peer):
                        await call()
                except LLMException as error:
                    is_named = any(f"cluster {peer}{mark}" in str(error) for mark in " :,;")
                    told = self._cluster_id, "" if is_named else f"cluster {peer}: ", error
                    self._totals.incidents.add(Incident.LINK_FAILED, logger, "cluster %d: %s%s", *told)
                    errors[index] = error

        async with anyio.create_task_group() as group:
            for index, (peer, call) in enumerate(calls):
                group.start_soon(one, index, peer, call)
        return LinkResults.of(errors)

    @contextmanager
    def _observed(self, operation: str, peer: int | None) -> Iterator[None]:
        """Report the call that runs inside this context to the observer."""
        if self._observer is None:
            yield
            return
        end = tell(self._observer, Call("link", operation, self._cluster_id, peer))
        ended = Ended("CANCELLED")
        try:
            yield
            ended = Ended(LLMStatusCode.LLM_SUCCESS.name)
        except LLMException as error:
            ended = Ended(error.status_code.name, error)
            raise
        except Exception as error:
            ended = Ended(type(error).__name__, error)
            raise
        finally:
            end(ended)

    async def wait_linked(self, cluster_id: int) -> None:
        """Wait until a link to the cluster is ready, whichever end made it. There is no time limit."""
        await self._running_here().links.wait_linked(checks.integer(cluster_id, "cluster_id", checks.UINT64))

    async def wait_link_closed(self, cluster_id: int) -> str:
        """Wait until the link to the cluster has ended, and return the reason: the peer died, or one end unlinked.

        If there is no longer a link, return at once why the last one ended.

        Raises:
            NotLinked: if this cluster was never linked to that one, or thousands of others were linked since.
        """
        return await self._running().links.wait_closed(checks.integer(cluster_id, "cluster_id", checks.UINT64))


def _cluster_id(info: LLMClusterInfo) -> int:
    return checks.integer(info.remote_cluster_id, "remote_cluster_id", checks.UINT64)
