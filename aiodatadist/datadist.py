"""LLMDataDist: one cluster. Its life, its links, and the tasks that serve them."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import ClassVar, Self

import anyio

from aiodatadist._native.runtime import Runtime
from aiodatadist.cache.pool import PoolUsage
from aiodatadist.cache_manager import CacheManager
from aiodatadist.cluster.engine import Engine
from aiodatadist.cluster.link_changes import LinkChanges
from aiodatadist.cluster.listen_address import find_listen_address
from aiodatadist.cluster.rank_groups import RankGroups
from aiodatadist.concurrency.resident import Misuse, Resident
from aiodatadist.config.llm_config import LLMConfig
from aiodatadist.counting import Call, Ended, Figures, Incident, Observer, Totals, figures_of, tell
from aiodatadist.device import Device
from aiodatadist.errors import (
    FeatureNotEnabled,
    ForkError,
    InternalError,
    LLMException,
    LLMStatusCode,
    ParamInvalid,
    explained,
)
from aiodatadist.link import LinkStatistics, Notification
from aiodatadist.link.notifications import check_payload
from aiodatadist.values import checks
from aiodatadist.values.cluster_info import LLMClusterInfo
from aiodatadist.values.descriptors import LLMRole, Placement, RegisterMemStatus
from aiodatadist.values.link_results import LinkResults

logger = logging.getLogger(__name__)

LINKS_AT_A_TIME = 16
FINALIZE_SECONDS = 30.0
"""Seconds after which a cancelled finalize() gives up waiting for the device."""

Linking = tuple[int, Callable[[], Awaitable[None]]]
"""A peer, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a cluster has done: one :class:`LinkStatistics` per link, how many caches there are, and its memory pools."""

    links: tuple[LinkStatistics, ...]
    caches: int
    pools: dict[Placement, PoolUsage]


class LLMDataDist:
    """One cluster: usually one process that drives one device.

    ``async with LLMDataDist(role, cluster_id, config) as datadist:`` or :meth:`init` and :meth:`finalize`. Everything on
    it belongs to the event loop on which it was initialised; several may live in one process, and on one loop.

    Args:
        role: informational.
        cluster_id: unique among all clusters that may ever be linked.
        config: what :meth:`init` uses when it is given no options.
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
        self._observer: Observer | None = None
        self.totals = Totals()  # for the engine, which goes; figures() shows them

    # ---- life ----

    async def init(self, options: Mapping[str, str] | LLMConfig | None = None) -> None:
        """Open the device and start listening. A second call on an initialised object, with the same options or none, does
        nothing.

        Raises:
            TypeError, ValueError, ParamInvalid: an option is wrong, or not that of the first call; or another cluster of this
                process has the same id, and is not finalized.
            LLMException: the device cannot be opened, or the port is in use. Nothing is left behind. It is initialised on
                another event loop.
            ForkError: this is a child of the process in which it was initialised.
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
            engine = Engine(self, config, resident, self._serving_a_request)
            _claim_id(self._cluster_id, resident)
            try:
                await resident.start(engine.run)
            except OSError as error:
                what = f"cluster {self._cluster_id} cannot be opened: {explained(error)}"
                raise LLMException(what, operation="init") from error
            self._engine = engine
            self._cache_manager = CacheManager(engine)
            self._rank_groups = RankGroups(engine, config.link_total_time)

    def _new_resident(self) -> Resident:
        """Raises LLMException: no event loop runs in this thread."""
        name = f"cluster {self._cluster_id}"
        return Resident(
            f"aiodatadist {name}",
            partial(_refusal, name),
            what=name,
            unfinished=f"{name} was never finalized: use async with, or await finalize()",
            patience=FINALIZE_SECONDS,
        )

    def _check_same(self, options: LLMConfig | None) -> None:
        """Raises ParamInvalid: these are not the options with which it was initialised."""
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
        """What the engine works with: a copy, so that what is changed in ours afterwards changes nothing there.

        Raises ParamInvalid, FeatureNotEnabled: options do not go together, or their mode is not here.
        """
        self._config.check_mode()
        return self._config.model_copy(deep=True)

    async def finalize(self) -> None:
        """End all links and give everything back. Does nothing when not initialised; may be called twice.

        Transfers under way are cancelled. If cancelled itself, it finishes its work first. On an NPU it waits for a link that
        is being made as long as HCCL does: see :meth:`link_clusters`.
        """
        if self._engine is None:
            return
        resident = self._engine.resident
        if resident.is_reachable:
            resident.check_here()
        self._engine = None
        if resident.loop.is_closed():
            logger.error("cluster %d was never finalized: its event loop is closed", self._cluster_id)
        elif await resident.stop():  # else the parent of this process has it
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
            raise InternalError("the engine of this LLMDataDist has ended by itself: finalize() tells why")
        return engine

    def _running_here(self) -> Engine:
        """Raises as :meth:`_running`; LLMException: no event loop runs in this thread."""
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
        """Return the context in which a request of that peer is answered, or None if requests run beside all else."""
        return None

    # ---- what it is ----

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def role(self) -> LLMRole:
        return self._role

    @property
    def instance(self) -> str:
        """New for every object: a restarted cluster is told from its former self."""
        return self._instance

    @property
    def config(self) -> LLMConfig:
        return self._config

    @property
    def cache_manager(self) -> CacheManager:
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
        """Where peers can link to us, with the real port; None when not listening."""
        return self._running().listen_address

    def statistics(self) -> Statistics:
        """What has been done so far, per link, and what the memory pools hold. Costs nothing to ask often."""
        engine = self._running()
        return Statistics(tuple(engine.links.statistics()), len(engine.registry.table), engine.registry.pool_usage())

    def figures(self) -> Figures[PoolUsage]:
        """All that was counted since this object was made, over all its links: what a metrics endpoint needs.

        From any thread, and at any time: before :meth:`init` and after :meth:`finalize` there are no links, caches and pools.
        """
        engine, totals = self._engine, self.totals
        is_there = engine is not None and not engine.resident.has_ended
        pools = engine.registry.pool_usage() if engine is not None and is_there else {}
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
        )

    @property
    def observer(self) -> Observer | None:
        """Is told of each transfer and of each call that makes or ends links; see :class:`~aiodatadist.telemetry.Observer`.
        None, the default, costs nothing."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        if self._engine is not None:
            self._engine.observer = observer

    async def switch_role(self, role: LLMRole, switch_options: Mapping[str, str] | None = None) -> None:
        """Take another role, and listen as the options say: on ``llm.listenIpInfo``, or, without it, not at all.

        Raises:
            LLMException: ``LLM_EXIST_LINK``: unlink everything first. ``LLM_FAILED``: the port cannot be listened on;
                everything is as it was. ``LLM_FEATURE_NOT_ENABLED``: another address, with ``transfer_backend`` ``"hixl"``.
            TypeError, ParamInvalid: an argument is wrong, or a host name is not found.
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
            raise FeatureNotEnabled("with transfer_backend 'hixl' a cluster listens where it was initialised to listen")
        if is_elsewhere:
            await engine.listen_elsewhere(address)
        self._config = config
        self._role = role

    # ---- notifications ----

    async def notify(self, cluster_id: int, payload: bytes) -> None:
        """Tell a linked cluster something: it arrives through its :meth:`notifications`, in order and exactly once, when all
        that was pushed there before is in place.

        Returns when it is on its way. While 64 have not been taken at the other end, it waits.

        Args:
            payload: at most 64 KiB.

        Raises:
            TypeError, ParamInvalid: the payload is no bytes, or too long.
            NotLinked, PeerLost, LinkClosed: there is no link, or it ended before the notification was sent.
        """
        link = self._running_here().links.find(checks.integer(cluster_id, "cluster_id", checks.UINT64))
        await link.notify(check_payload(payload))

    def notifications(self) -> AsyncIterator[Notification]:
        """What peers notify this cluster of: ``async for note in datadist.notifications()``. Ends with :meth:`finalize`.

        Each has ``cluster_id`` and ``payload``. Several iterators share them: each notification goes to one.
        """
        return self._running_here().notification_inbox.take()

    # ---- links ----

    def link_changes(self) -> LinkChanges:
        """What becomes of links from now on: ``async for change in datadist.link_changes()``; see
        :class:`~aiodatadist.LinkChange`. Ends with :meth:`finalize`.

        Each iterator gets all changes, whether they concern links of this end's or of a peer's. 1024 wait for a reader; if it
        is slower than that, the oldest are dropped, and counted in its ``dropped``. :meth:`statistics` says how links are.
        """
        return self._running_here().changes.open()

    async def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Link to the other members of a communicator, which all call this at about the same time with the same arguments.

        No member has to listen, and no address is needed: the members meet through HCCL. Returns when all have come; the
        links are made from then on: ask :meth:`query_register_mem_status`, or await :meth:`wait_register_mem_status`.
        Cancelled, it waits on an NPU until HCCL gives up by itself, as :meth:`link_clusters` does.

        ``LLMConfig.relink`` has no effect on these links: making one again takes all members.

        Args:
            comm_name: 1 to 127 characters.
            cluster_rank_info: rank of each of the 2 to 4 clusters, from 0 upwards and none left out.
            rank_table: the vendor's rank table, version 1.0 or 1.2, as JSON.

        Returns:
            A number for :meth:`unlink`, from 1.

        Raises:
            TypeError, ValueError, ParamInvalid: an argument is wrong. Nothing was started.
            FeatureNotEnabled: ``transfer_backend`` is ``"hixl"``.
            LinkTimeout: a member did not come within ``link_total_time``, or ``HCCL_CONNECT_TIMEOUT``, or 120 seconds.
            LinkError: the communicator could not be made.
        """
        groups = self._groups_here()
        if self._config.links_have_owners:
            raise FeatureNotEnabled(
                "there are no links by rank table with transfer_backend 'hixl': link_clusters() makes one"
            )
        with self._observed("link", None):
            return await groups.link(comm_name, cluster_rank_info, rank_table)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Whether the links of a communicator are made: PREPARING, then OK or FAILED. Raises NotLinked: there is none."""
        return self._groups().status(checks.integer(comm_id, "comm_id", checks.UINT64))

    async def wait_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Until the links of a communicator are made, or cannot be: OK or FAILED. Raises NotLinked: there is none."""
        return await self._groups_here().wait_settled(checks.integer(comm_id, "comm_id", checks.UINT64))

    async def unlink(self, comm_id: int) -> None:
        """End the links of a communicator, at this end if the other one is gone. Raises NotLinked: there is none."""
        groups = self._groups_here()
        checks.integer(comm_id, "comm_id", checks.UINT64)
        with self._observed("unlink", None):
            await groups.unlink(comm_id)

    async def check_link_status(self, remote_cluster_id: int) -> None:
        """Exchange a word with a peer.

        Raises:
            NotLinked, PeerLost, LinkClosed: there is no link (any more).
            LinkTimeout: no answer within ``sync_kv_timeout``.
        """
        engine = self._running_here()
        await engine.links.find(checks.integer(remote_cluster_id, "remote_cluster_id", checks.UINT64)).ping(
            engine.timeout
        )

    async def link_clusters(
        self,
        clusters: Sequence[LLMClusterInfo],
        timeout: int = 3000,
    ) -> LinkResults:
        """Link to peers that listen, up to 16 at a time. Where it succeeded the peer has the link, too, and may use it.

        HCCL cannot be told to stop waiting for a peer. On an NPU a link whose caller was cancelled, or whose time is over, is
        given back when ``HcclCommPrepare`` gave up by itself: it has three phases (connecting, exchanging descriptors,
        opening memory) and gives each what is left of the timeout, in whole seconds, at most 60. A cancellation is raised
        after 5 seconds at the latest and leaves that to the cluster, where another call for the same peer gets
        ``LLM_PROCESSING_LINK`` meanwhile; :meth:`finalize` waits for it. softnpu that is not strict stops at once.

        A link belongs to both ends: one of them makes it. With ``transfer_backend="hixl"`` it belongs to its initiator, who
        alone may use it: both ends call this, and each ends its own. One that links to itself succeeds, and may not pull.

        Calls that name several addresses of one cluster hold up each other only while they ask the same process for the link.
        The first link counts; the other calls end with ``LLM_ALREADY_LINK``, also those whose address does not answer.

        With ``LLMConfig.relink`` a link that this made, and that broke, is made again, whenever that happens, until a call of
        either end's ends it. Attempts at it stop while this call makes it, and go on if it fails.

        Args:
            timeout: milliseconds for each peer, from connecting to ready; shared by ``link_retry_count`` attempts.

        Returns:
            The last failure, or success; and one status per peer, in order. Failures of single links are not raised: they are
            the ``errors`` of what is returned, one per peer, and in the log. ``LLM_PARAM_INVALID`` for a peer that has not
            exactly one address; and ``(LLM_PARAM_INVALID, [])`` for an empty list.

        Raises:
            TypeError, ValueError, ParamInvalid: another argument is wrong. Nothing was started.
        """
        engine, seconds = self._running_here(), _seconds(timeout)
        ids = [_cluster_id(info) for info in checks.sequence(clusters, "clusters", LLMClusterInfo)]

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
        """End links, and attempts to make them again. Transfers under way on them may finish within ``timeout`` milliseconds,
        then they are stopped.

        With ``transfer_backend="hixl"`` this end's link alone: the peer's, if it made one, stays. ``force`` has no effect
        then, as upstream.

        Args:
            force: end only this half, at once: the peer is told, and not asked.

        Returns:
            As :meth:`link_clusters`. A cluster that is not linked counts as success.
        """
        engine, seconds = self._running_here(), _seconds(timeout)
        checks.instance(force, "force", bool)
        ids = [_cluster_id(info) for info in checks.sequence(clusters, "clusters", LLMClusterInfo)]

        async def unlink(info: LLMClusterInfo, cluster_id: int) -> None:
            self._check_unlink(info, force)
            await engine.unlink(cluster_id, seconds, force)

        calls: list[Linking] = [(i, partial(unlink, info, i)) for info, i in zip(clusters, ids, strict=True)]
        return await self._for_each("unlink_clusters", calls)

    def _check_unlink(self, info: LLMClusterInfo, force: bool) -> None:
        """Raises ParamInvalid: a link to this cluster is not ended. Its id is enough: the link knows its peer."""

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
                    self.totals.incidents.add(Incident.LINK_FAILED, logger, "cluster %d: %s%s", *told)
                    errors[index] = error

        async with anyio.create_task_group() as group:
            for index, (peer, call) in enumerate(calls):
                group.start_soon(one, index, peer, call)
        return LinkResults.of(errors)

    @contextmanager
    def _observed(self, operation: str, peer: int | None) -> Iterator[None]:
        """The observer is told of what is called inside."""
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
        """Until a link to that cluster is ready, whichever end made it; for ever, if none is made."""
        await self._running_here().links.wait_linked(checks.integer(cluster_id, "cluster_id", checks.UINT64))

    async def wait_link_closed(self, cluster_id: int) -> str:
        """Until the link to that cluster is gone; in words, why: the peer died, or one end unlinked.

        Raises:
            NotLinked: there is no such link, or none any more; the error says why the last one ended.
        """
        link = self._running().links.any(checks.integer(cluster_id, "cluster_id", checks.UINT64))
        return str((await link.wait_closed()).args[0])


_live: weakref.WeakValueDictionary[int, Resident] = weakref.WeakValueDictionary()
"""The clusters of this process that are initialised, by id; also those of processes from which this one was forked."""
_live_lock = threading.Lock()


def _claim_id(cluster_id: int, resident: Resident) -> None:
    """Raises ParamInvalid: another cluster of this process has this id, and is live."""
    with _live_lock:
        other = _live.get(cluster_id)
        if other is not None and other.is_alive:
            raise ParamInvalid(
                f"cluster {cluster_id} is initialised in this process already: ids must be unique",
                hint="finalize() the other one first, or choose another id",
            )
        _live[cluster_id] = resident


def _refusal(name: str, misuse: Misuse, reason: str | None) -> LLMException:
    """What is raised where a cluster is used in the wrong place."""
    match misuse:
        case Misuse.FORKED:
            return ForkError(f"this LLMDataDist was initialised {reason}", hint="start processes with spawn")
        case Misuse.LOOP_CLOSED:
            return LLMException(
                f"the event loop on which {name} was initialised is closed",
                hint="init() and use it under one asyncio.run(), and finalize() before that ends",
            )
        case Misuse.OTHER_LOOP:
            return LLMException(f"{name} belongs to another event loop", hint="use it where it was initialised")
        case Misuse.NO_LOOP:
            return LLMException(
                f"no event loop runs in this thread: {name} is used on the event loop on which it was initialised",
                hint="from another thread use asyncio.run_coroutine_threadsafe() and that loop, or aiodatadist.blocking",
            )
    return InternalError(f"{name} cannot be used: {misuse.value}{'' if reason is None else f': {reason}'}")


def _seconds(timeout: int) -> float:
    if checks.integer(timeout, "timeout", checks.INT32) <= 0:
        raise ParamInvalid(f"timeout is {timeout}: must be above 0 milliseconds")
    return timeout / 1000


def _cluster_id(info: LLMClusterInfo) -> int:
    return checks.integer(info.remote_cluster_id, "remote_cluster_id", checks.UINT64)


def only_address(info: LLMClusterInfo) -> tuple[str, int]:
    """Where a cluster listens. Raises ParamInvalid: it has not exactly one remote address."""
    addresses = info.remote_addresses
    if len(addresses) != 1:
        raise ParamInvalid(
            f"cluster {info.remote_cluster_id} has {len(addresses)} remote addresses: exactly one is needed",
            hint="append_remote_ip_info(host, port)",
        )
    return addresses[0]
