"""The asyncio interface: saves KV blocks into a pool, and loads them for later calls with the same prefix."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, Self

import anyio
import anyio.abc
import anyio.lowlevel

from aiodatadist._concurrency.byte_budget import ByteBudget
from aiodatadist._concurrency.resident import Resident
from aiodatadist._context_caching import checks as rules
from aiodatadist._context_caching.awaited import awaited
from aiodatadist._context_caching.block_index import BlockIndex
from aiodatadist._context_caching.calls import CacheFigures, CallRecords
from aiodatadist._context_caching.errors import (
    EmsException,
    EmsInternalError,
    EmsInvalidArgument,
    refusal,
    translated,
)
from aiodatadist._context_caching.health_gate import HealthGate
from aiodatadist._context_caching.identity.config import MIB, CcCacheConfig, CcConfig, CcConfig_v1, check_access
from aiodatadist._context_caching.identity.names import Names, PrimaryKey, check_groups, check_hashes, parts_of
from aiodatadist._context_caching.lookups import Lookups
from aiodatadist._context_caching.memory.kv_layout import LayerGroup, Layout
from aiodatadist._context_caching.memory.regions import BufferMemory, KvBufferWrapper, Memory, SlotMemory
from aiodatadist._context_caching.pool_guard import PoolGuard
from aiodatadist._context_caching.pools.contract import KVPool, PoolKey
from aiodatadist._context_caching.pools.deferred import open_deferred
from aiodatadist._context_caching.pools.open import open_pool
from aiodatadist._context_caching.results import CcResult, Statistics
from aiodatadist._context_caching.running import RunningTransfers
from aiodatadist._context_caching.transfer.copies import CopyStreams
from aiodatadist._context_caching.transfer.handle import BlockTransfer
from aiodatadist._context_caching.transfer.pipeline import SaveLoadCall, TransferPipeline
from aiodatadist._context_caching.transfer.read_cache import LocalReadCache
from aiodatadist._context_caching.transfer.start_limiter import StartLimiter
from aiodatadist._counting import Observer
from aiodatadist._device import give_way
from aiodatadist.errors import LLMException

logger = logging.getLogger(__name__)

TIMEOUT: Final = 5.0

Chunks = Sequence[Sequence[tuple[int, int]]]
Buffers = Sequence[Sequence[KvBufferWrapper | Any]]
Key = PrimaryKey | str


class ContextCache:
    """A cache of KV blocks over a pool. It may lose anything at any time; a lost value is a miss.

    Open one with ``cache = await ContextCache.open(config)``, then use ``async with cache:``. It belongs to the event
    loop on which it was opened: any number of tasks may call it at the same time, and calls on another loop are
    refused. Times are seconds from the call. None means no limit, and 0 means that the call does not wait at all.

    Every data call raises :class:`EmsInvalidArgument` before anything starts if an argument is wrong, ``EmsTimeout`` at
    its deadline, ``EmsIoError`` if the pool does not answer, and ``EmsInternalError`` if the device fails. The last
    three carry what was done so far as ``partial``. Once a call has raised, cancellation included, it no longer touches
    the caller's memory.
    """

    def __init__(self, config: CcConfig, settings: CcCacheConfig, access_id: str | None) -> None:
        """Keep the settings. Callers use :meth:`open`."""
        self._config = config
        self._settings = settings
        self._names = Names(config, access_id)
        rules.on_a_loop("a ContextCache")
        self._resident = Resident(
            "aiodatadist context cache",
            refusal,
            what="this cache",
            unfinished="a ContextCache was never closed: use async with, or await aclose()",
        )
        self._guard: PoolGuard
        self._pipeline: TransferPipeline
        self._block_index: BlockIndex
        self._copy_streams = CopyStreams(config.device_id)
        self._budget = ByteBudget(settings.bytes_in_flight)
        self._layout: Layout | None = None
        self._running: RunningTransfers
        self._lookups: Lookups
        self._start_limiter = StartLimiter()
        self._records = CallRecords()

    # ---- life ----

    @classmethod
    async def open(
        cls,
        config: CcConfig,
        pool: KVPool | str = "memory:",
        read_cache_bytes: int | str = 0,
        *,
        fill_on_read: bool = True,
        bytes_in_flight: int | str = 256 * MIB,
        access_id: str | None = None,
        gate: HealthGate | None = None,
    ) -> Self:
        """Open a cache.

        Args:
            config: the identity of this rank: :class:`CcConfig_v1` for block hashes, :class:`CcConfig` if there are
                only the caller's own keys.
            pool: a pool, which stays the caller's; or a URL (see :func:`open_pool`), whose pool is closed with the
                cache.
            read_cache_bytes: host memory for copies of values that were read and written, in bytes or as a text like
                ``"1GiB"``; 0 for none.
            fill_on_read: if true, values read from the pool are copied into that memory, too.
            bytes_in_flight: host memory that all calls together may hold, in bytes or as a text. A call that needs more
                waits, and its time runs.
            access_id: the tenant, part of every name. It keeps honest tenants apart; it is no protection.
            gate: stops the use of a failing pool, and probes the pool until it can be used again. Without a gate every
                call tries. The gate is this cache's until the cache has ended. With a gate the pool of a URL may still
                be down: then the gate is closed, every call misses, and each probe tries to open the pool.

        Raises:
            EmsInvalidArgument: if an argument is wrong, the gate is another cache's, the pool's extra is not installed,
                or no event loop runs in this thread.
            EmsIoError, EmsTimeout: if the pool does not answer and there is no gate, or if the pool answers and refuses
                us.
            EmsInternalError: if the memory cannot be allocated.
        """
        if not isinstance(config, CcConfig):
            raise EmsInvalidArgument(f"config is of type {type(config).__name__}: must be a CcConfig_v1 or CcConfig")
        if not isinstance(pool, (KVPool, str)):
            raise EmsInvalidArgument(f"pool is of type {type(pool).__name__}: must be a KVPool or a URL")
        if gate is not None and not isinstance(gate, HealthGate):
            raise EmsInvalidArgument(f"gate is of type {type(gate).__name__}: must be a HealthGate")
        check_access(access_id, None)
        local = rules.size(read_cache_bytes, "read_cache_bytes", 0)
        limits = CcCacheConfig(local, fill_on_read, rules.size(bytes_in_flight, "bytes_in_flight", 1))
        cache = cls(config, limits, access_id)
        try:
            await cache._resident.start(partial(cache._live, pool, gate))
        except EmsException:
            raise
        except Exception as error:
            raise translated(error, "the pool cannot be opened") from error
        return cache

    async def _live(self, pool: KVPool | str, gate: HealthGate | None, started: asyncio.Future[None]) -> None:
        async with AsyncExitStack() as stack:
            self._guard = guard = PoolGuard(gate)
            records, limiter = self._records, self._start_limiter
            self._running = RunningTransfers(self._resident, guard, records, limiter, self._failed)
            stack.callback(self._forget)  # last, also if closing something has failed, which aclose() will report
            stack.callback(guard.give)
            if isinstance(pool, str):
                pool = await (open_pool(pool) if gate is None else open_deferred(pool))
                stack.push_async_callback(pool.aclose)
            settings = self._settings
            local = await LocalReadCache.open(settings.read_cache_bytes, self._config.device_id)
            stack.push_async_callback(local.aclose)
            self._pipeline = TransferPipeline(
                pool, local, self._copy_streams, self._budget, fill_on_read=settings.fill_on_read
            )
            stack.callback(self._pipeline.wrapping.close)
            self._block_index = BlockIndex(self._names, self._pipeline)
            incidents = self._pipeline.incidents
            self._lookups = Lookups(guard, self._block_index, records, limiter, incidents, self._failed)
            stack.push_async_callback(self._copy_streams.aclose)
            group = await stack.enter_async_context(anyio.create_task_group())
            self._running.serve(group, incidents)
            if gate is not None:
                guard.begin(self._pipeline)
                probe = partial(guard.probe, self._pipeline)
                group.start_soon(self._resident.keep, probe, name="aiodatadist health probe")
            started.set_result(None)
            try:
                await self._resident.stopping.wait()
            finally:
                self._resident.stopping.set()
                group.cancel_scope.cancel()

    def _forget(self) -> None:
        """Forget the registered cache once everything has ended, unless the device still uses it."""
        self._running.end()
        if not self._running.in_slots:
            self._layout = None

    async def aclose(self) -> None:
        """Cancel running calls and release everything. May be called twice.

        In a forked child it does nothing, because the cache is the parent's. If the cache's event loop was closed, the
        cache has ended with it, and this only reports how.

        Raises:
            EmsInvalidArgument: if the cache belongs to another event loop that is still open.
            EmsIoError, EmsTimeout: if the cache's own pool could not be closed properly. Everything was released.
            EmsInternalError: if the device did not release memory (everything else was released), if an error had ended
                the cache, or if its event loop was closed before its tasks had ended (nothing was released).
        """
        if self._resident.is_abandoned:
            self._guard.give()
        if await self._resident.stop():
            self._tell_end()

    def _tell_end(self) -> None:
        """Raise EmsException if an error or its closed event loop ended the cache, or if closing it failed."""
        if self._resident.is_abandoned:
            raise EmsInternalError("the event loop of this cache was closed before the cache: nothing was released")
        if (error := self._resident.error) is not None:
            failure = self._running.failure() or translated(error, "the cache was not closed properly")
            raise failure from (None if failure is error else error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # ---- the registered cache ----

    async def register_kvcache(
        self, layers: Sequence[Sequence[Any]], groups: Sequence[Sequence[int] | LayerGroup] | None = None
    ) -> None:
        """Register the KV cache that saves and loads use, in place of an earlier one.

        Moves no data. The tensors are kept alive until the cache is closed or another one is registered.

        Args:
            layers: for each layer its tensors, ``[num_blocks, block_size, ...]`` each, contiguous and writable: torch
                tensors, numpy arrays, other buffers, or objects that export host memory through DLPack 1; in host or
                device memory. Their items must be values, not references.
            groups: layers that share a block table; each layer is in one group. By default there is one group of all
                layers. The layers of a group agree in ``num_blocks`` and ``block_size``; everything else may differ.

        Raises:
            EmsInvalidArgument: if a rule is broken, or saves or loads are running.
            EmsInternalError: if the device cannot be opened.
        """
        self._check_v1()
        self._running.check_quiet()
        try:
            placements_of = await self._copy_streams.placements()
            self._resident.check()
            self._running.check_quiet()
            layout = Layout(layers, groups, placements_of)
        except LLMException as error:
            raise EmsInternalError(f"the device cannot be used: {error}") from error
        self._layout = layout
        self._block_index.register(layout.shape)

    def unregister_kvcache(self) -> None:
        """Forget the KV cache: its memory is no longer used. Does nothing if none is registered.

        Raises:
            EmsInvalidArgument: if saves or loads are running, or the device has not released the memory of one that
                ended.
        """
        self._check_v1()
        self._running.check_quiet()
        self._layout = None
        self._block_index.register(None)

    def _check_v1(self) -> CcConfig_v1:
        self._resident.check()
        if not isinstance(self._config, CcConfig_v1):
            raise EmsInvalidArgument("block hashes need a CcConfig_v1: this cache was opened with a CcConfig")
        return self._config

    def check_registered(self) -> Layout:
        """Return the layout of the registered cache.

        Raises:
            EmsInvalidArgument: if no cache is registered.
        """
        self._check_v1()
        if self._layout is None:
            raise EmsInvalidArgument("no KV cache is registered: call register_kvcache() first")
        return self._layout

    # ---- saving and loading by hash ----

    def start_save(
        self,
        hashes: Sequence[int],
        *,
        slots: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        chunks: Chunks | None = None,
        timeout: float | None = TIMEOUT,
        write_rcache: bool = True,
    ) -> BlockTransfer:
        """Start :meth:`save`. The slots must not be written until the transfer has ended.

        Raises:
            EmsInvalidArgument: if an argument is wrong, or a load uses one of the slots.
        """
        layout = self.check_registered()
        seconds = rules.seconds(timeout)
        rules.flag(write_rcache, "write_rcache")
        call = self._running.call(*self._checked(layout, hashes, slots, offsets, chunks), seconds)
        call.write_local = write_rcache
        return self._running.begin("save", seconds, call, self._save_blocks)

    save: Final = awaited(
        start_save,
        """Store blocks. What the pool has already counts as stored; what cannot be stored does not fail the call.

        A slot is a token's place in the cache, ``block * block_size + offset``. Pass the places of the tokens in one of
        two ways: ``slots``, one for each token, with ``offsets``, the number of tokens of each hash; or ``chunks``, for
        each layer group a list of ``(start_slot, length)``, one for each hash. A group stores nothing for a length of
        0. A hash for which no group stores anything counts as stored, and later as read.

        Args:
            hashes: distinct integers from -2**63 to 2**128 - 1. Equal hashes mean equal contents.
            write_rcache: if true, the local read cache gets a copy of the values.

        Raises:
            EmsException: see the class.
        """,
        check=check_registered,
    )

    def start_load(
        self,
        hashes: Sequence[int],
        *,
        slots: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        chunks: Chunks | None = None,
        timeout: float | None = TIMEOUT,
        read_local_only: bool = False,
    ) -> BlockTransfer:
        """Start :meth:`load`. The slots must be neither read nor written until the transfer has ended.

        Raises:
            EmsInvalidArgument: if an argument is wrong, or another save or load uses one of the slots.
        """
        layout = self.check_registered()
        seconds = rules.seconds(timeout)
        rules.flag(read_local_only, "read_local_only")
        call = self._running.call(*self._checked(layout, hashes, slots, offsets, chunks), seconds)
        call.local_only = read_local_only
        return self._running.begin("load", seconds, call, self._pipeline.load)

    load: Final = awaited(
        start_load,
        """Read blocks, up to the first one that is missing.

        Its slots, and those of later blocks, are undefined afterwards. A block that was saved with another number of
        tokens is missing. Slots are given as for :meth:`save`.

        Args:
            read_local_only: if true, read only the local read cache.

        Raises:
            EmsException: see the class.
        """,
        check=check_registered,
    )

    def _checked(
        self, layout: Layout, hashes: Any, slots: Any, offsets: Any, chunks: Any
    ) -> tuple[list[PoolKey], Memory, int]:
        wanted = check_hashes(hashes)
        memory = SlotMemory.of(layout, slots, offsets, chunks, len(wanted))
        owners = (wanted[i] for i in memory.owners)
        keys = self._names.of_blocks(zip(owners, memory.groups, strict=True), layout.shape)
        return keys, memory, len(wanted)

    async def _save_blocks(self, call: SaveLoadCall) -> None:
        beside = self._block_index.layout_record_bytes(call)
        # other calls count here, too: at worst the pool is asked once more
        before = self._pipeline.counts["saved"]
        await self._pipeline.save(call, beside)
        if beside:
            await self._block_index.record_layout(self._pipeline.counts["saved"] > before, call.deadline)

    # ---- saving and loading by key ----

    def start_save_values(
        self,
        keys: Sequence[Key],
        buffers: Buffers,
        *,
        timeout: float | None = TIMEOUT,
        write_rcache: bool = True,
    ) -> BlockTransfer:
        """Start :meth:`save_values`. The regions must not be written until the transfer has ended.

        Raises:
            EmsInvalidArgument: if an argument is wrong.
        """
        self._resident.check()
        seconds = rules.seconds(timeout)
        rules.flag(write_rcache, "write_rcache")
        call = self._running.call(*self._checked_values(keys, buffers), seconds)
        call.write_local = write_rcache
        return self._running.begin("save_values", seconds, call, self._pipeline.save)

    save_values: Final = awaited(
        start_save_values,
        """Store values under the caller's own keys. Works like :meth:`save`, without a registered cache.

        Args:
            keys: :class:`PrimaryKey` or strings, distinct.
            buffers: for each key the regions whose bytes, one after the other, are its value: :class:`KvBufferWrapper`
                or writable buffers.

        Raises:
            EmsException: see the class.
        """,
    )

    def start_load_values(
        self,
        keys: Sequence[Key],
        buffers: Buffers,
        *,
        timeout: float | None = TIMEOUT,
        read_local_only: bool = False,
    ) -> BlockTransfer:
        """Start :meth:`load_values`. The regions must be neither read nor written until the transfer has ended.

        This is not checked.

        Raises:
            EmsInvalidArgument: if an argument is wrong.
        """
        self._resident.check()
        seconds = rules.seconds(timeout)
        rules.flag(read_local_only, "read_local_only")
        call = self._running.call(*self._checked_values(keys, buffers), seconds)
        call.local_only = read_local_only
        return self._running.begin("load_values", seconds, call, self._pipeline.load)

    load_values: Final = awaited(
        start_load_values,
        """Read values of the caller's own keys. Works like :meth:`load`.

        A value whose length differs from that of its regions is missing.

        Raises:
            EmsException: see the class.
        """,
    )

    def _checked_values(self, keys: Any, buffers: Any) -> tuple[list[PoolKey], Memory, int]:
        names = self._pool_keys(keys)
        memory = BufferMemory(buffers, len(names))
        if len(set(names)) != len(names):  # the message names the caller's keys, not the pool's
            rules.distinct([PrimaryKey(*own) if own[1] else own[0] for _, *own in names], "keys")
        return names, memory, len(names)

    def _pool_keys(self, keys: Any) -> list[PoolKey]:
        return [self._names.of_key(parts_of(key, f"keys[{i}]")) for i, key in enumerate(rules.some(keys, "keys"))]

    def _failed(self, seconds: float) -> None:
        """Report to the guard that the pool failed, or may have.

        A call without any time did not ask the pool for much. Once this cache is closing, its gate may be another
        cache's.
        """
        if seconds and not self._resident.stopping.is_set():
            self._guard.failed(self._pipeline)

    # ---- what is there ----

    async def exists(
        self,
        hashes: Sequence[int],
        *,
        timeout: float | None = TIMEOUT,
        read_local_only: bool = False,
        all_ranks: bool = False,
        lease: float = 0.0,
        groups: Sequence[int] | None = None,
    ) -> CcResult:
        """Count the blocks that are there, from the first one without a gap. A hint: they may be gone a moment later.

        A pool that is slow or fails counts as empty. No registered cache is needed once this rank has saved with one,
        because the pool knows its layout.

        Args:
            read_local_only: if true, ask only the local read cache.
            all_ranks: if true, the shards of all ranks must be there; otherwise only this rank's.
            lease: seconds for which the pool is asked to keep what was found, if it can.
            groups: layer groups that must all be there. If None, any one group is enough, because a group may store
                nothing of a block.

        Raises:
            EmsInvalidArgument: if an argument is wrong.
        """
        self._check_v1()
        wanted = check_hashes(hashes)
        groups = None if groups is None else check_groups(groups)
        seconds = rules.seconds(timeout)
        rules.flag(read_local_only, "read_local_only")
        rules.flag(all_ranks, "all_ranks")
        lease = rules.lease(lease)
        await give_way()
        shards = self._names.shards() if all_ranks else [self._names.shard]
        return await self._lookups.blocks(wanted, seconds, shards, groups, read_local_only, lease)

    async def exists_values(
        self, keys: Sequence[Key], *, timeout: float | None = TIMEOUT, lease: float = 0.0
    ) -> CcResult:
        """Look up values of the caller's own keys: ``details`` has a status for each. A hint, as in :meth:`exists`.

        A pool that is slow or fails counts as empty.

        Args:
            lease: seconds for which the pool is asked to keep what was found, if it can.

        Raises:
            EmsInvalidArgument: if an argument is wrong.
        """
        self._resident.check()
        names = self._pool_keys(keys)
        seconds = rules.seconds(timeout)
        lease = rules.lease(lease)
        await give_way()
        return await self._lookups.keys(names, seconds, lease)

    async def match_prefix(
        self, hashes: Sequence[int], *, timeout: float | None = TIMEOUT, groups: Sequence[int] | None = None
    ) -> int:
        """Return how many blocks are there, from the first one without a gap: ``exists().success``."""
        return (await self.exists(hashes, timeout=timeout, groups=groups)).success

    async def remove(self, hashes: Sequence[int], *, timeout: float | None = TIMEOUT) -> int:
        """Remove blocks of this rank's shard; return how many values the pool had of them.

        Raises:
            EmsInvalidArgument, EmsIoError, EmsTimeout: see the class. The local read cache has forgotten the blocks in
                any case.
        """
        self._check_v1()
        wanted = check_hashes(hashes)
        seconds = rules.seconds(timeout)
        await give_way()
        work = partial(self._block_index.remove, wanted)
        return await self._lookups.remove("remove", len(wanted), "hashes", seconds, work)

    async def remove_values(self, keys: Sequence[Key], *, timeout: float | None = TIMEOUT) -> int:
        """Remove values of the caller's own keys, for instance to store others; return how many the pool had.

        Local read caches of other processes keep their copies. Errors as in :meth:`remove`.
        """
        self._resident.check()
        names = self._pool_keys(keys)
        seconds = rules.seconds(timeout)
        work = partial(self._block_index.remove_keys, names)
        return await self._lookups.remove("remove_values", len(names), "keys", seconds, work)

    # ---- health ----

    async def check_health(self) -> bool:
        """Return True if the pool works right now, False also if the cache is closed or has ended. Takes at most a second.

        Raises:
            EmsException: if the cache belongs to another event loop or another process.
        """
        if self._resident.is_over:
            return False
        self._resident.check()
        await give_way()
        return await self._pipeline.is_healthy()

    @property
    def observer(self) -> Observer | None:
        """The observer that is notified of each call, see :class:`~aiodatadist.telemetry.Observer`.

        None, the default, costs nothing.
        """
        return self._records.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._records.observer = observer

    def figures(self) -> CacheFigures:
        """Return all counts so far, for a metrics endpoint. Callable from any thread, also when the cache is closed."""
        name = self._pipeline.pool.capabilities.name
        incidents = dict(self._pipeline.incidents.counts)
        return CacheFigures(self._records.figures(), self.statistics, name, self._guard.is_open, incidents)

    @property
    def statistics(self) -> Statistics:
        """Counts of the values moved so far."""
        counted = {name: self._pipeline.counts[name] for name in Statistics.__slots__ if "flight" not in name}
        return Statistics(**counted, bytes_in_flight=self._budget.taken, most_bytes_in_flight=self._budget.most)
