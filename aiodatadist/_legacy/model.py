"""The LLMModel: a user's model and its KV cache, from the prompt to the slot of a batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from aiodatadist._legacy.kv_cache import KvCache
from aiodatadist._legacy.kv_cache_manager import KvCacheManager
from aiodatadist._legacy.model_config import Layout
from aiodatadist._legacy.requests import CapacityState, LLMReq, check_requests
from aiodatadist._legacy.runner import ModelRunner, call
from aiodatadist._legacy.running_models import RunningModels
from aiodatadist._legacy.v1_engine import V1Engine
from aiodatadist._values import checks
from aiodatadist._values.descriptors import UNSET, BlocksCacheKey, CacheDesc, CacheKey, LLMRole
from aiodatadist.errors import CacheNotFound, FeatureNotEnabled, LLMException, LLMStatusCode, OutOfMemory, ParamInvalid


@dataclass(slots=True, eq=False)
class _Move:
    """A request on its way into the staging area of a DECODER, or out of it."""

    req_id: int
    is_completed: bool = False

    def check(self) -> None:
        """Raise LLMException if the request was completed meanwhile."""
        if self.is_completed:
            raise _completed(self.req_id, "meanwhile")


class LLMModel:
    """A model, from ``LLMDataDist.add_model``. The n-th model of a PROMPT and the n-th of a DECODER are the same model.

    On PROMPT each ``predict`` makes a cache, slot ``i`` for the i-th request, which can then be pulled by
    ``CacheKey(cluster_id, req_id, model_id)``. On DECODER there is one cache, with a slot for each request of the
    batch, and beside it a staging area of one slot. With paged attention there is one blocks cache at either end, and
    the user keeps the tables.
    """

    def __init__(
        self,
        manager: KvCacheManager,
        engine: V1Engine,
        calls: RunningModels,
        cluster_id: int,
        model_id: int,
        layout: Layout,
        runner: ModelRunner,
    ) -> None:
        self._manager = manager
        self._v1_engine = engine
        self._calls = calls
        self._cluster_id = cluster_id
        self._model_id = model_id
        self._layout = layout
        self._runner = runner
        self._cache: KvCache | None = None  # of a DECODER, or with paged attention
        self._is_told = False
        self._staging: KvCache | None = None
        self._staged: tuple[int, int] | None = None  # request id, and bytes of each tensor
        self._stage = anyio.Lock()
        self._moves: list[_Move] = []
        self._slots: dict[int, int] = {}
        self._scheduled: set[int] = set()
        self._completed: set[int] = set()
        self._prefixes: dict[int, KvCache | None] = {}  # None while it is being loaded

    @property
    def model_id(self) -> int:
        """The number of the model in its keys."""
        return self._model_id

    # ---- its life ----

    async def open(self, role: LLMRole) -> None:
        """Allocate the caches that live as long as the model, and notify the runner on DECODER.

        If this fails, nothing is left behind.
        """
        layout = self._layout
        if (role is LLMRole.DECODER or layout.has_paged_attention) and (layout.is_dynamic or layout.shape[0] < 1):
            raise ParamInvalid(f"the shape is {layout.shape}: DECODER, and paged attention, need all dimensions")
        try:
            if layout.has_paged_attention:
                await self._open_blocks(role)
            elif role is LLMRole.DECODER:
                self._cache = await self._manager.allocate_cache(layout.desc(layout.shape[0], 0))
                one = CacheDesc(layout.num_tensors, [1, *layout.shape[1:]], layout.data_type)
                self._staging = await self._manager.allocate_cache(one)
            if role is LLMRole.DECODER and self._cache is not None:
                await call(self._runner.on_cache_allocated, self._cache)
                self._is_told = True
        except BaseException:
            await self.close()
            raise

    async def _open_blocks(self, role: LLMRole) -> None:
        key = BlocksCacheKey(self._cluster_id, self._model_id) if role is LLMRole.PROMPT else None
        desc = self._layout.desc(self._layout.shape[0], 0)
        try:
            self._cache = await self._manager.allocate_blocks_cache(desc, key)
        except OutOfMemory as error:
            raise error.with_status(LLMStatusCode.LLM_BLOCKS_OUT_OF_MEMORY) from error

    async def close(self) -> None:
        """Notify the runner if it was notified of the cache, and release everything. Raises what the runner raises."""
        try:
            if self._is_told and self._cache is not None:
                self._is_told = False
                await call(self._runner.on_cache_deallocated, self._cache)
        finally:
            await self._give_back()

    async def _give_back(self) -> None:
        mine = [cache for cache in (self._cache, self._staging, *self._prefixes.values()) if cache is not None]
        self._cache = self._staging = self._staged = None
        self._prefixes.clear()
        for cache in mine:
            self._v1_engine.registry.drop(cache)
        for cache in mine:
            await self._v1_engine.give_up(cache)

    # ---- both roles ----

    async def predict(self, llm_req: LLMReq | list[LLMReq] | tuple[LLMReq, ...], inputs: Any, **kwargs: Any) -> Any:
        """Run the model over the KV cache of these requests, and return what it returns.

        On PROMPT the i-th request has slot ``i`` of a new cache; a shared prefix is in it before the model runs. When
        the model has returned, the cache can be pulled. Trailing idle slots may be left out. A request that is
        completed meanwhile leaves no cache.

        On DECODER there is a request for each slot; an idle one has req_id 2**64-1, the others are where ``merge_kv``
        put them.

        Args:
            inputs, kwargs: for the runner.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong, or a request is not at its slot.
            LLMException: with ``LLM_REPEAT_REQUEST`` if a request occurs twice or has a cache already,
                ``LLM_PREFIX_NOT_EXIST``, ``LLM_DEVICE_OUT_OF_MEMORY``, ``LLM_REQUEST_ALREADY_COMPLETED`` if a request
                was completed before the model ran, ``LLM_SEQ_LENOVERLIMIT`` for more tokens than all blocks hold,
                ``LLM_ENGINE_FINALIZED`` if the cluster was finalized meanwhile.
            Exception: whatever the runner raises.

        If this raises or is cancelled, keys and slots are as before, and on PROMPT the cache has been released. A
        cancellation is delivered once the runner has returned. On DECODER the contents of the slots are then up to the
        runner.
        """
        self._v1_engine.check_here()
        requests = check_requests(llm_req)
        if not requests:
            raise ParamInvalid("llm_req is empty: there is no request to predict for")
        self._check_twice([each.req_id for each in requests if not each.is_idle])
        with self._calls.open("predict"):
            if self._layout.has_paged_attention:
                return await self._run_paged(requests, inputs, kwargs)
            if self._cache is None:
                return await self._predict_prompt(requests, inputs, kwargs)
            self._check_slots(requests)
            return await call(self._runner.run_model, self._shared(), inputs, **kwargs)

    @staticmethod
    def _check_twice(req_ids: Sequence[int]) -> None:
        twice = sorted({each for each in req_ids if req_ids.count(each) > 1})
        if twice:
            raise _repeated(twice[0], "it is named twice")

    def _shared(self) -> KvCache:
        if self._cache is None:
            raise ParamInvalid("this model has no cache: it was added in another role")
        return self._cache

    async def _run_paged(self, requests: list[LLMReq], inputs: Any, kwargs: dict[str, Any]) -> Any:
        limit = self._layout.shape[0] * self._layout.slot_tokens
        for request in requests:
            if limit and request.prompt_length > limit:
                raise LLMException(
                    f"prompt_length is {request.prompt_length}: {self._layout.shape[0]} blocks hold {limit} tokens",
                    status_code=LLMStatusCode.LLM_SEQ_LENOVERLIMIT,
                )
        return await call(self._runner.run_model, self._shared(), inputs, **kwargs)

    def complete(self, llm_req: LLMReq) -> CacheKey:
        """End a request: its slot and its staged cache are free. Return the key to be removed."""
        req_id = llm_req.req_id
        if req_id in self._scheduled:
            self._completed.add(req_id)
        self._slots = {slot: each for slot, each in self._slots.items() if each != req_id}
        if self._staged is not None and self._staged[0] == req_id:
            self._staged = None
        for move in self._moves:
            if move.req_id == req_id:
                move.is_completed = True
        return CacheKey(self._cluster_id, req_id, self._model_id)

    # ---- PROMPT ----

    async def _predict_prompt(self, requests: list[LLMReq], inputs: Any, kwargs: dict[str, Any]) -> Any:
        if all(each.is_idle for each in requests):
            raise ParamInvalid("all requests of llm_req are idle: there is no request to predict for")
        keys = [CacheKey(self._cluster_id, each.req_id, self._model_id) for each in requests]
        prefixes = [(slot, self._prefix(each)) for slot, each in enumerate(requests) if each.has_prefix]
        desc = self._layout.desc(len(requests), max(each.prompt_length for each in requests))
        mine = {each.req_id for each in requests if not each.is_idle}
        self._check_new(mine, keys)
        self._scheduled |= mine
        try:
            async with self._cache_for_now(desc) as cache:
                await self._copy_prefixes(prefixes, cache)
                self._check_not_completed(mine)
                result = await call(self._runner.run_model, cache, inputs, **kwargs)
                self._leave(cache, desc, [self._unless_completed(key) for key in keys])
                return result
        finally:
            self._scheduled -= mine
            self._completed -= mine

    def _check_new(self, req_ids: set[int], keys: list[CacheKey]) -> None:
        for req_id in sorted(req_ids & self._scheduled):
            raise _repeated(req_id, "it is being predicted")
        table = self._v1_engine.registry.table
        for key in keys:
            if not key.is_placeholder and table.is_bound(key):
                raise _repeated(key.req_id, "it has a cache that was not pulled yet")

    def _check_not_completed(self, req_ids: set[int]) -> None:
        for req_id in sorted(req_ids & self._completed):
            raise _completed(req_id, "before the model ran")

    def _unless_completed(self, key: CacheKey) -> CacheKey:
        return CacheKey(self._cluster_id, UNSET) if key.req_id in self._completed else key

    @asynccontextmanager
    async def _cache_for_now(self, desc: CacheDesc) -> AsyncIterator[KvCache]:
        """Allocate a cache whose id ends with this context. Keys bound to it keep its memory."""
        cache = await self._manager.allocate_cache(desc)
        try:
            yield cache
        finally:
            await self._v1_engine.give_up(cache)

    def _leave(self, cache: KvCache, desc: CacheDesc, keys: list[CacheKey]) -> None:
        """Bind the keys, so that peers find the cache."""
        registry = self._v1_engine.registry
        registry.bind(cache, lambda: registry.table.check_slots(desc, keys))

    def _prefix(self, request: LLMReq) -> KvCache:
        prefix = self._prefixes.get(request.prefix_id)
        if prefix is None:
            raise _no_prefix(request.prefix_id)
        if self._layout.is_dynamic and not self._layout.is_prefix_of_slot:
            raise ParamInvalid(f"the shape is {self._layout.shape}: with a shared prefix tokens must be dimension 1")
        if prefix.cache_desc.shape[self._layout.seq_dim] > request.prompt_length and self._layout.is_dynamic:
            raise ParamInvalid(f"prompt_length is {request.prompt_length}: its prefix alone is longer")
        return prefix

    async def _copy_prefixes(self, prefixes: Sequence[tuple[int, KvCache]], cache: KvCache) -> None:
        """Copy shared prefixes into the cache.

        All copies start before the first wait, and hold their sources: a prefix may be released meanwhile.
        """
        copies = [
            self._manager.copy_cache(cache, prefix, dst_batch_index=slot, size=prefix.cache_desc.stride)
            for slot, prefix in prefixes
        ]
        try:
            for copy in copies:
                await copy
        finally:
            for copy in copies:
                copy.cancel()

    async def preload_prompt_prefix(self, llm_req: LLMReq, inputs: Any, **kwargs: Any) -> None:
        """Run the model once, on a cache of one slot, and keep the cache as prefix ``llm_req.prefix_id``. For PROMPT.

        Requests with this ``prefix_id`` begin with it, and a DECODER can pull it by ``CacheKey(cluster_id, 2**64-1,
        model_id, prefix_id)`` any number of times.

        Raises:
            TypeError, ParamInvalid: if an argument or the role is wrong.
            LLMException: with ``LLM_PREFIX_ALREADY_EXIST``, ``LLM_FEATURE_NOT_ENABLED`` (see
                ``ModelConfig.enable_shared_system_prefix``), ``LLM_DEVICE_OUT_OF_MEMORY`` or ``LLM_ENGINE_FINALIZED``.
            Exception: whatever the runner raises.

        If this raises or is cancelled, there is no such prefix.
        """
        self._want_prefixes("preload_prompt_prefix", llm_req)
        prefix_id = llm_req.prefix_id
        if prefix_id in self._prefixes:
            raise LLMException(
                f"prefix {prefix_id} is loaded",
                status_code=LLMStatusCode.LLM_PREFIX_ALREADY_EXIST,
                hint="use it, or release_prompt_prefix() first",
            )
        desc = self._layout.desc(1, llm_req.prompt_length)
        one = CacheDesc(desc.num_tensors, [1, *desc.shape[1:]], desc.data_type)
        self._prefixes[prefix_id] = None
        try:
            with self._calls.open("preload_prompt_prefix"):
                self._prefixes[prefix_id] = await self._loaded(one, prefix_id, inputs, kwargs)
        finally:
            if self._prefixes.get(prefix_id) is None:
                self._prefixes.pop(prefix_id, None)

    async def _loaded(self, desc: CacheDesc, prefix_id: int, inputs: Any, kwargs: dict[str, Any]) -> KvCache:
        cache = await self._manager.allocate_cache(desc)
        try:
            await call(self._runner.run_model, cache, inputs, **kwargs)
            self._leave(cache, desc, [self._prefix_key(prefix_id)])
        except BaseException:
            await self._v1_engine.give_up(cache)
            raise
        return cache

    def _prefix_key(self, prefix_id: int) -> CacheKey:
        return CacheKey(self._cluster_id, UNSET, self._model_id, prefix_id)

    def _want_prefixes(self, what: str, llm_req: LLMReq) -> None:
        self._v1_engine.check_here()
        self._v1_engine.want_role(LLMRole.PROMPT, what)
        checks.instance(llm_req, "llm_req", LLMReq)
        if not self._layout.has_prefixes or self._layout.has_paged_attention:
            raise FeatureNotEnabled(
                "this model has no shared prefixes",
                hint="set ModelConfig.enable_shared_system_prefix; paged attention has none",
            )
        if not llm_req.has_prefix:
            raise ParamInvalid(f"prefix_id is {llm_req.prefix_id}: must be below 2**64-1")

    async def release_prompt_prefix(self, llm_req: LLMReq) -> None:
        """Release a shared prefix. For PROMPT. Requests that were predicted with it, or are now, have their own copies.

        Raises:
            TypeError, ParamInvalid, FeatureNotEnabled: as :meth:`preload_prompt_prefix`.
            LLMException: with ``LLM_PREFIX_NOT_EXIST`` if it is not loaded; with ``LLM_WAIT_PROCESS_TIMEOUT`` if it is
                still being copied. In that case it is released, and its memory follows later.
        """
        self._want_prefixes("release_prompt_prefix", llm_req)
        cache = self._prefixes.get(llm_req.prefix_id)
        if cache is None:
            raise _no_prefix(llm_req.prefix_id)
        del self._prefixes[llm_req.prefix_id]
        self._v1_engine.registry.drop(cache)
        await self._manager.remove_cache_key(self._prefix_key(llm_req.prefix_id))

    # ---- DECODER ----

    def _check_slots(self, requests: list[LLMReq]) -> None:
        batch = self._layout.shape[0]
        if len(requests) != batch:
            raise ParamInvalid(f"{len(requests)} requests: the batch has {batch} slots, idle ones count")
        for slot, request in enumerate(requests):
            if not request.is_idle and self._slots.get(slot) != request.req_id:
                raise ParamInvalid(
                    f"request {request.req_id} is at index {slot}: merge_kv() put {self._slots.get(slot, 'none')} there"
                )

    async def pull_kv(self, llm_req: LLMReq) -> None:
        """Pull a request's cache from ``prompt_cluster_id`` into the staging area. For DECODER. The key is consumed.

        If tokens are the dimension after the batch, only ``prompt_length`` of them travel, unless it is 0. Pulls run
        one after the other; each replaces what was staged before.

        Raises:
            TypeError, ParamInvalid: if an argument or the role is wrong, or the two caches do not fit together.
            CacheNotFound: if the peer has no such request, or no longer.
            LLMException: with ``LLM_NOT_YET_LINK``, ``LLM_LINK_BUSY``, ``LLM_WAIT_PROCESS_TIMEOUT`` and the like;
                ``LLM_REQUEST_ALREADY_COMPLETED`` if the request was completed meanwhile.

        If this raises or is cancelled, nothing is staged, and the peer still has the request, unless all bytes had
        arrived.
        """
        key = self._staged_key("pull_kv", llm_req)
        size = self._pull_bytes(llm_req)
        async with self._move(llm_req.req_id) as move:
            if self._staging is None:
                raise ParamInvalid("this model has no staging area: it was added in another role")
            self._staged = None
            with self._calls.open("pull_kv"):
                await self._manager.pull_cache(key, self._staging, size=size)
            move.check()
            self._staged = move.req_id, size

    @asynccontextmanager
    async def _move(self, req_id: int) -> AsyncIterator[_Move]:
        """Wait for the staging area and hold it alone, for a request that is not completed yet."""
        move = _Move(req_id)
        self._moves.append(move)
        try:
            async with self._stage:
                move.check()
                yield move
        finally:
            self._moves.remove(move)

    def _staged_key(self, what: str, llm_req: LLMReq) -> CacheKey:
        self._v1_engine.check_here()
        self._v1_engine.want_role(LLMRole.DECODER, what)
        checks.instance(llm_req, "llm_req", LLMReq)
        if llm_req.is_idle:
            raise ParamInvalid("req_id is 2**64-1: an idle slot has no cache")
        if self._layout.has_paged_attention:
            raise ParamInvalid(f"{what} with paged attention: use pull_blocks")
        return CacheKey(llm_req.prompt_cluster_id, llm_req.req_id, self._model_id)

    def _pull_bytes(self, llm_req: LLMReq) -> int:
        layout, tokens = self._layout, llm_req.prompt_length
        if tokens > layout.slot_tokens > 0:
            raise ParamInvalid(f"prompt_length is {tokens}: a slot has {layout.slot_tokens} tokens")
        return tokens * layout.token_bytes if tokens and layout.is_prefix_of_slot else -1

    async def merge_kv(self, llm_req: LLMReq, batch_index: int, batch_id: int = 0) -> None:
        """Copy the staged cache into a slot, which is then this request's, and empty the staging area. For DECODER.

        Args:
            batch_id: must be 0, the only batch.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument or the role is wrong, or there is no such slot or batch.
            CacheNotFound: if the staged cache is not this request's.
            TransferTimeout: with ``LLM_WAIT_PROCESS_TIMEOUT``.
            LLMException: with ``LLM_REQUEST_ALREADY_COMPLETED`` if the request was completed meanwhile. Then nothing of
                it is staged, and the slot has no request.

        If the copy fails or is cancelled, it can be repeated; until then the slot has no request.
        """
        self._staged_key("merge_kv", llm_req)
        checks.integer(batch_index, "batch_index", checks.UINT32)
        if checks.integer(batch_id, "batch_id", checks.UINT32) != 0:
            raise ParamInvalid(f"batch_id is {batch_id}: there is one batch, 0")
        if batch_index >= self._layout.shape[0]:
            raise ParamInvalid(f"batch_index is {batch_index}: the batch has {self._layout.shape[0]} slots")
        async with self._move(llm_req.req_id) as move:
            if self._staging is None or self._staged is None or self._staged[0] != llm_req.req_id:
                whose = "nothing" if self._staged is None else f"request {self._staged[0]}"
                raise CacheNotFound(f"request {llm_req.req_id} is not staged: {whose} is", hint="pull_kv() first")
            size = self._staged[1]
            self._slots.pop(batch_index, None)
            with self._calls.open("merge_kv"):
                await self._manager.copy_cache(self._shared(), self._staging, dst_batch_index=batch_index, size=size)
            move.check()
            self._slots[batch_index] = move.req_id
            self._staged = None

    async def pull_blocks(
        self,
        llm_req: LLMReq,
        prompt_blocks: list[int] = [],  # noqa: B006 - upstream's default, which is never changed
        decoder_blocks: list[int] = [],  # noqa: B006
    ) -> None:
        """Pull ``prompt_blocks[i]`` of ``prompt_cluster_id`` into ``decoder_blocks[i]``. For DECODER with paged attention.

        Errors as in :meth:`KvCacheManager.pull_blocks`. If this raises or is cancelled, the contents of these blocks
        are undefined.
        """
        self._v1_engine.check_here()
        self._v1_engine.want_role(LLMRole.DECODER, "pull_blocks")
        checks.instance(llm_req, "llm_req", LLMReq)
        if not self._layout.has_paged_attention:
            raise ParamInvalid("pull_blocks needs paged attention: use pull_kv and merge_kv instead")
        key = BlocksCacheKey(llm_req.prompt_cluster_id, self._model_id)
        with self._calls.open("pull_blocks"):
            await self._manager.pull_blocks(key, self._shared(), prompt_blocks, decoder_blocks)

    # ---- capacity ----

    def capacity(self, seq_len: int) -> CapacityState:
        """Return the room for this many tokens. Raises ParamInvalid if the model does not say what a token is."""
        layout = self._layout
        if layout.tensor_format is None or layout.seq_dim < 1:
            raise ParamInvalid("kv_tensor_format is not set, or has no S: check_capacity needs to know what a token is")
        used = self._manager.pool_usage()
        if used is None:
            return CapacityState(False, 0, 0)
        whole = 0 if layout.is_dynamic else layout.slot_tokens * max(1, layout.shape[0])
        total = used.total // layout.num_tensors // layout.token_bytes
        free = bisect_right(range(1, total + 1), False, key=lambda tokens: not self._is_room_for(tokens))
        is_available = seq_len <= free if not whole else seq_len <= whole <= free
        return CapacityState(is_available, free, total)

    def _is_room_for(self, tokens: int) -> bool:
        return self._v1_engine.room_for(tokens * self._layout.token_bytes) >= self._layout.num_tensors


def _repeated(req_id: int, why: str) -> LLMException:
    return LLMException(
        f"request {req_id}: {why}",
        status_code=LLMStatusCode.LLM_REPEAT_REQUEST,
        hint="give each request its own id; complete_request() ends a request",
    )


def _completed(req_id: int, when: str) -> LLMException:
    return LLMException(
        f"request {req_id} was completed {when}", status_code=LLMStatusCode.LLM_REQUEST_ALREADY_COMPLETED
    )


def _no_prefix(prefix_id: int) -> LLMException:
    return LLMException(
        f"prefix {prefix_id} is not loaded",
        status_code=LLMStatusCode.LLM_PREFIX_NOT_EXIST,
        hint="preload_prompt_prefix() first",
    )
