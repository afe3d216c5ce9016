"""The LLMDataDist of v1: roles are enforced, a link serves one call at a time, and models run on it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, ClassVar, Final

import anyio

from aiodatadist import _datadist as datadist
from aiodatadist._cache_manager import CacheManager
from aiodatadist._cluster.peer import Peer
from aiodatadist._config import llm_config as configuration
from aiodatadist._counting.callbacks import current_task, is_delivered
from aiodatadist._legacy.config import LLMConfig, engine_config
from aiodatadist._legacy.kv_cache_manager import KvCacheManager
from aiodatadist._legacy.model import LLMModel
from aiodatadist._legacy.model_config import Layout
from aiodatadist._legacy.requests import CapacityState, LLMReq
from aiodatadist._legacy.runner import ModelRunner
from aiodatadist._legacy.running_models import RunningModels
from aiodatadist._legacy.statuses import v1_error, v1_errors
from aiodatadist._values import checks
from aiodatadist._values.cluster_info import LLMClusterInfo
from aiodatadist._values.descriptors import LLMRole, RegisterMemStatus
from aiodatadist._values.durations import check_milliseconds, check_seconds
from aiodatadist._values.link_results import LinkResults
from aiodatadist.errors import FeatureNotEnabled, LLMException, LLMStatusCode, NotLinked, ParamInvalid

logger = logging.getLogger(__name__)

MAX_CLUSTERS: Final = 16
"""The most clusters in one call, as upstream."""
OK: Final = LLMStatusCode.LLM_SUCCESS


class LLMDataDist(datadist.LLMDataDist):
    """A cluster in the KvCacheManager mode: ``enable_cache_manager`` is missing or off.

    It works like :class:`aiodatadist.LLMDataDist`, with these differences. PROMPT listens; DECODER links, unlinks and
    pulls. There is a ``kv_cache_manager`` and no ``cache_manager``; ``link``, ``unlink`` and
    ``query_register_mem_status`` belong to the other mode. With ``enable_cache_manager`` on, it is an
    :class:`aiodatadist.LLMDataDist`, and what belongs to v1 raises ``ParamInvalid``.

    Args:
        config: used by :meth:`init` if that is given no options. The default is an ``LLMConfig`` of this package.
    """

    _config_type: ClassVar[type[configuration.LLMConfig]] = LLMConfig

    def __init__(self, role: LLMRole, cluster_id: int, config: configuration.LLMConfig | None = None) -> None:
        super().__init__(role, cluster_id, config)
        self._is_v1 = False
        self._manager: KvCacheManager | None = None
        self._models: list[LLMModel] = []
        self._calls = RunningModels()
        self._linking = anyio.Lock()
        self._adding = anyio.Lock()

    # ---- life ----

    async def init(self, options: Mapping[str, str] | configuration.LLMConfig | None = None) -> None:
        """Open the cluster, like :meth:`aiodatadist.LLMDataDist.init`.

        Raises ParamInvalid also if the role is PROMPT and there is no ``listen_ip_info``.
        """
        await super().init(options)
        if self._is_v1 and self._manager is None:
            engine = self._running()
            self._manager = KvCacheManager(engine, self._role)

    def _engine_config(self) -> configuration.LLMConfig:
        self._is_v1 = not self._config.enable_cache_manager
        self._manager, self._models, self._calls = None, [], RunningModels()
        if not self._is_v1:
            return super()._engine_config()
        if self._role is LLMRole.PROMPT and not self._config.listen_ip_info:
            raise ParamInvalid("listen_ip_info is not set: PROMPT must listen")
        return engine_config(self._config)

    async def finalize(self) -> None:
        """End models, links and everything else. Calls that run a model are cancelled, and waited for.

        May be called twice.
        """
        engine = self._engine
        try:
            if engine is not None and self._is_v1 and engine.resident.is_reachable:
                engine.check_here()
                await self._end_models()
        finally:
            await super().finalize()

    async def _end_models(self) -> None:
        if not await self._calls.end():
            logger.error("cluster %d: a model still runs: its memory is never released", self.cluster_id)
            self._running().registry.pools.keep()
        models, self._models = self._models, []
        delivered: BaseException | None = None
        task = current_task()
        for model in models:
            try:
                await model.close()
            except BaseException as error:
                if is_delivered(error, task):
                    delivered = error  # raised once all models are closed
                else:
                    logger.exception("cluster %d: on_cache_deallocated() failed", self.cluster_id)
        if delivered is not None:
            raise delivered

    def _v1(self, what: str) -> KvCacheManager:
        """Return the manager. Raises RuntimeError if not initialised, and ParamInvalid in the other mode."""
        self._running()
        if self._manager is None:
            raise ParamInvalid(f"{what} belongs to the KvCacheManager mode: enable_cache_manager is on")
        return self._manager

    def _serving_a_request(self, cluster_id: int) -> AbstractContextManager[None] | None:
        if self._manager is None:
            return None
        return self._manager._v1_engine.link_locks.hold(cluster_id, "a pull that it asked for")

    def _v2(self, what: str) -> None:
        self._running()
        if self._is_v1:
            raise ParamInvalid(
                f"{what} belongs to the CacheManager mode: enable_cache_manager is off",
                hint="set enable_cache_manager=True before init()",
            )

    # ---- what it is ----

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The caches and transfers, with ``enable_cache_manager`` off.

        Raises RuntimeError if not initialised, and ParamInvalid if ``enable_cache_manager`` is on.
        """
        return self._v1("kv_cache_manager")

    @property
    def cache_manager(self) -> CacheManager:
        """The caches and transfers, with ``enable_cache_manager`` on.

        Raises RuntimeError if not initialised, and ParamInvalid if ``enable_cache_manager`` is off.
        """
        self._v2("cache_manager")
        return super().cache_manager

    async def switch_role(self, role: LLMRole, switch_options: Any = None) -> None:
        """Take another role, and listen as the options say; PROMPT must listen.

        Raises:
            TypeError, ParamInvalid: if an argument is wrong, the role is the same, or PROMPT has no
                ``llm.listenIpInfo``.
            FeatureNotEnabled: if ``enable_switch_role`` is off.
            LLMException: with ``LLM_EXIST_LINK`` if there are links (unlink them first), with ``LLM_FAILED`` if the
                port is in use.
        """
        self._running_here()
        if self._is_v1:
            checks.instance(role, "role", LLMRole)
            options = {} if switch_options is None else checks.instance(switch_options, "switch_options", dict)
            if not self._config.enable_switch_role:
                raise FeatureNotEnabled("switching roles is off", hint="set LLMConfig.enable_switch_role")
            if role is self._role:
                raise ParamInvalid(f"role is {role}: this cluster has that role")
            if role is LLMRole.PROMPT and not any(str(key).lower() == "llm.listenipinfo" for key in options):
                raise ParamInvalid("switch_options has no llm.listenIpInfo: PROMPT must listen")
        await super().switch_role(role, switch_options)
        if self._manager is not None:
            self._manager._v1_engine.role = role

    # ---- links ----

    async def link_clusters(self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000) -> LinkResults:
        """Link to peers that listen. For DECODER.

        Args:
            timeout: milliseconds for each peer; and the same time before that for another call of this kind to end.

        Returns:
            ``LLM_LINK_FAILED`` if a peer was not linked, otherwise success; and one status per peer, in order. Failed
                attempts have left nothing behind; ``errors`` and the log have the reasons. If nothing was started the
                list is empty, and the status is ``LLM_PARAM_INVALID`` (there are no clusters),
                ``LLM_CLUSTER_NUM_EXCEED_LIMIT`` (more than 16), ``LLM_REPEAT_REQUEST`` (one is listed twice) or
                ``LLM_PROCESSING_LINK`` (another call did not end in time).

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument or the role is wrong, or local addresses differ.
        """
        self._running_here()
        if not self._is_v1:
            return await super().link_clusters(clusters, timeout)
        self._v1("link_clusters")._v1_engine.want_role(LLMRole.DECODER, "link_clusters")
        refusal = _check(clusters)
        _check_local(clusters)
        if refusal is not None:
            return LinkResults(refusal, [])
        async with self._alone(check_milliseconds(timeout, "timeout")) as is_alone:
            if not is_alone:
                return LinkResults(LLMStatusCode.LLM_PROCESSING_LINK, [])
            linked = await super().link_clusters(clusters, timeout)
        each = LinkResults.of(error and v1_error(error) for error in linked.errors)
        return LinkResults(OK if each.status is OK else LLMStatusCode.LLM_LINK_FAILED, each.statuses, each.errors)

    async def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> LinkResults:
        """End links.

        Args:
            force: if true, end only this half, at once, whatever uses the link.

        Returns:
            The last failure, or success; and one status per peer, in order. ``LLM_NOT_YET_LINK`` counts as success.
                ``LLM_LINK_BUSY`` means that the link is in use and stays, ``LLM_NOTIFY_PROMPT_UNLINK_FAILED`` that this
                half is closed and the peer was not notified. An empty list means the same as in :meth:`link_clusters`.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong.
        """
        self._running_here()
        if not self._is_v1:
            return await super().unlink_clusters(clusters, timeout, force)
        checks.instance(force, "force", bool)
        refusal = _check(clusters)
        if refusal is not None:
            return LinkResults(refusal, [])
        seconds = check_milliseconds(timeout, "timeout")
        self._suspect(timeout, "timeout of unlink_clusters()")
        async with self._alone(seconds) as is_alone:
            if not is_alone:
                return LinkResults(LLMStatusCode.LLM_PROCESSING_LINK, [])
            each = LinkResults.of(await _gather([self._unlink(info, seconds, force) for info in clusters]))
        harmless = {OK, LLMStatusCode.LLM_NOT_YET_LINK}
        status = next((status for status in reversed(each.statuses) if status not in harmless), OK)
        return LinkResults(status, each.statuses, each.errors)

    async def check_link_status(self, remote_cluster_id: int) -> None:
        """Exchange a message with a peer. For DECODER.

        Raises:
            ParamInvalid: if the role is wrong.
            NotLinked, PeerLost, LinkClosed: if the cluster is not linked, or no longer.
            LLMException: with ``LLM_LINK_BUSY`` if the link is in use, with ``LLM_WAIT_PROCESS_TIMEOUT`` if there is no
                answer within ``sync_kv_timeout``.
        """
        self._running_here()
        if not self._is_v1:
            await super().check_link_status(remote_cluster_id)
            return
        manager = self._v1("check_link_status")
        manager._v1_engine.want_role(LLMRole.DECODER, "check_link_status")
        checks.integer(remote_cluster_id, "remote_cluster_id", checks.UINT64)
        with manager._v1_engine.link_locks.hold(remote_cluster_id, "check_link_status"), v1_errors():
            await super().check_link_status(remote_cluster_id)

    async def link_to(
        self, peer: int | LLMClusterInfo, address: str | tuple[str, int] | None = None, *, timeout: float = 3.0
    ) -> Peer:
        """Link to one peer that listens, for DECODER. See :meth:`aiodatadist.LLMDataDist.link_to`.

        Raises LLMException with ``LLM_PROCESSING_LINK`` if another call of this kind did not end in time.
        """
        self._running_here()
        if not self._is_v1:
            return await super().link_to(peer, address, timeout=timeout)
        self._v1("link_to")._v1_engine.want_role(LLMRole.DECODER, "link_to")
        async with self._alone(check_seconds(timeout, "timeout")) as is_alone:
            if not is_alone:
                raise _not_alone("link_to")
            with v1_errors():
                return await super().link_to(peer, address, timeout=timeout)

    async def unlink_from(self, cluster_id: int, *, timeout: float = 3.0, force: bool = False) -> None:
        """End the link to one peer. Has no effect if the cluster is not linked.

        Raises LLMException with the statuses of :meth:`unlink_clusters`.
        """
        self._running_here()
        if not self._is_v1:
            await super().unlink_from(cluster_id, timeout=timeout, force=force)
            return
        checks.instance(force, "force", bool)
        checks.integer(cluster_id, "cluster_id", checks.UINT64)
        seconds = check_seconds(timeout, "timeout")
        async with self._alone(seconds) as is_alone:
            if not is_alone:
                raise _not_alone("unlink_from")
            error = await self._unlink(LLMClusterInfo(cluster_id), seconds, force)
        if error is not None and error.status_code is not LLMStatusCode.LLM_NOT_YET_LINK:
            raise error

    async def _unlink(self, info: LLMClusterInfo, seconds: float, force: bool) -> LLMException | None:
        """End one link; return why that did not succeed, or None."""
        cluster_id = checks.integer(info.remote_cluster_id, "remote_cluster_id", checks.UINT64)
        if self._running().links.peek(cluster_id) is None:
            await self._running().relinker.forget(cluster_id, seconds)
            return NotLinked(f"cluster {cluster_id} is not linked", peer=cluster_id)
        if force:
            return (await self._unlink_each([info], seconds, True)).errors[0]
        try:
            with self._v1("unlink_clusters")._v1_engine.link_locks.hold(cluster_id, "unlink_clusters"):
                (error,) = (await self._unlink_each([info], seconds, False)).errors
                if error is None:
                    return None
                await self._unlink_each([info], seconds, True)
        except LLMException as busy:
            logger.warning("cluster %d: %s", self.cluster_id, busy)
            return busy
        return error.with_status(LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED)

    @asynccontextmanager
    async def _alone(self, seconds: float) -> AsyncIterator[bool]:
        """Keep other calls from linking and unlinking; yield False if another call did not end in time."""
        with anyio.move_on_after(seconds) as limit:
            await self._linking.acquire()
        if limit.cancelled_caught:
            yield False
            return
        try:
            yield True
        finally:
            self._linking.release()

    # ---- what the other mode has ----

    async def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        self._v2("link")
        return await super().link(comm_name, cluster_rank_info, rank_table)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        self._v2("query_register_mem_status")
        return super().query_register_mem_status(comm_id)

    async def wait_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        self._v2("wait_register_mem_status")
        return await super().wait_register_mem_status(comm_id)

    async def unlink(self, comm_id: int) -> None:
        self._v2("unlink")
        await super().unlink(comm_id)

    # ---- models ----

    async def add_model(self, model_options: dict[str, str], model_runner: ModelRunner | None = None) -> LLMModel:
        """Add a model. DECODER allocates its cache and notifies the runner; PROMPT allocates a cache for each request.

        If this raises or is cancelled, there is no model, and no memory is taken.

        Args:
            model_options: from a :class:`ModelConfig`, with the shapes and types of the KV cache. On PROMPT one
                dimension after the batch may be -1: the tokens, whose number each request gives.
            model_runner: required; the vendor's own runner, which runs model files, is not available here.

        Raises:
            TypeError, ParamInvalid: if an argument or the role is wrong.
            FeatureNotEnabled: if there is no runner, or no memory pool.
            OutOfMemory: with ``LLM_DEVICE_OUT_OF_MEMORY``, or ``LLM_BLOCKS_OUT_OF_MEMORY`` with paged attention, if the
                pool has no room.
            Exception: whatever ``on_cache_allocated`` raises.
        """
        self._running_here()
        manager = self._v1("add_model")
        if self._role is LLMRole.MIX:
            raise ParamInvalid("add_model is for PROMPT and DECODER: this cluster is LLMRole.MIX")
        layout = Layout.of(model_options)
        if model_runner is None:
            raise FeatureNotEnabled("there is no built-in runner", hint="give add_model a ModelRunner")
        checks.instance(model_runner, "model_runner", ModelRunner)
        async with self._adding:
            model = LLMModel(
                manager, manager._v1_engine, self._calls, self.cluster_id, len(self._models), layout, model_runner
            )
            with self._calls.open("add_model"):
                await model.open(self._role)
            self._models.append(model)
        return model

    async def complete_request(self, llm_req: LLMReq) -> None:
        """End a request and release what it still has here. An unknown request is ignored.

        On PROMPT that is a cache that was not pulled, on DECODER its staged cache and its slot. A running ``pull_kv``
        or ``merge_kv`` of the request ends with ``LLM_REQUEST_ALREADY_COMPLETED``.

        Raises:
            TypeError, ParamInvalid: if the argument or the mode is wrong.
            TransferTimeout: with ``LLM_WAIT_PROCESS_TIMEOUT`` if its cache is still in use; the cache is released
                later.
        """
        self._running_here()
        manager = self._v1("complete_request")
        checks.instance(llm_req, "llm_req", LLMReq)
        if llm_req.is_idle:
            return
        for key in [model.complete(llm_req) for model in self._models]:
            if self._role is LLMRole.PROMPT and manager._v1_engine.registry.table.is_bound(key):
                await manager.remove_cache_key(key)

    def check_capacity(self, seq_len: int) -> CapacityState:
        """Return the room for a request of this many tokens. For PROMPT, and for the first model that was added.

        For several requests pass the longest length times their number. The model needs a ``kv_tensor_format``.

        Raises:
            TypeError, ValueError, ParamInvalid: if the argument or the role is wrong, or there is no such model.
        """
        manager = self._v1("check_capacity")
        manager._v1_engine.want_role(LLMRole.PROMPT, "check_capacity")
        if checks.integer(seq_len, "seq_len", checks.INT64) < 1:
            raise ParamInvalid(f"seq_len is {seq_len}: must be above 0")
        if not self._models:
            raise ParamInvalid("there is no model: add_model() says how large a token is")
        return self._models[0].capacity(seq_len)


def _not_alone(operation: str) -> LLMException:
    return LLMException(
        "another call that links or unlinks did not end in time",
        status_code=LLMStatusCode.LLM_PROCESSING_LINK,
        operation=operation,
    )


def _check(clusters: Any) -> LLMStatusCode | None:
    """Return what is wrong with the list as a whole, or None."""
    ids = [info.remote_cluster_id for info in checks.sequence(clusters, "clusters", LLMClusterInfo)]
    for each in ids:
        checks.integer(each, "remote_cluster_id", checks.UINT64)
    if not ids:
        return LLMStatusCode.LLM_PARAM_INVALID
    if len(ids) > MAX_CLUSTERS:
        return LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
    return None if len(set(ids)) == len(ids) else LLMStatusCode.LLM_REPEAT_REQUEST


def _check_local(clusters: Sequence[LLMClusterInfo]) -> None:
    """Raise ParamInvalid if local addresses are given that are not one list with one address: there is one device."""
    given = {tuple(info.local_ip_info_list) for info in clusters if info.local_ip_info_list}
    if len(given) > 1 or any(len(addresses) != 1 for addresses in given):
        raise ParamInvalid(
            f"local addresses are {sorted(given, key=repr)}: there is one device, and one list for all clusters"
        )


async def _gather(calls: Sequence[Coroutine[Any, Any, LLMException | None]]) -> list[LLMException | None]:
    results: list[LLMException | None] = [None] * len(calls)

    async def one(index: int, call: Coroutine[Any, Any, LLMException | None]) -> None:
        results[index] = await call

    async with anyio.create_task_group() as group:
        for index, call in enumerate(calls):
            group.start_soon(one, index, call)
    return results
