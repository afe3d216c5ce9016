"""The asyncio interface: KV blocks saved into a pool, and loaded by callers that have the same prefix later."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence, Sized
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, Self

import anyio
import anyio.abc
import anyio.lowlevel

from aiodatadist.concurrency.byte_budget import ByteBudget
from aiodatadist.concurrency.resident import Misuse, Resident
from aiodatadist.concurrency.spawner import Spawner
from aiodatadist.context_caching import checks as rules
from aiodatadist.context_caching.block_index import BlockIndex, ExistsQuery
from aiodatadist.context_caching.calls import CacheFigures, CallRecords
from aiodatadist.context_caching.errors import (
    EmsException,
    EmsInternalError,
    EmsInvalidArgument,
    EmsTimeout,
    refusal,
    translated,
)
from aiodatadist.context_caching.health_gate import HealthGate
from aiodatadist.context_caching.identity.config import MIB, CcCacheConfig, CcConfig, CcConfig_v1, check_access
from aiodatadist.context_caching.identity.names import Names, PrimaryKey, check_groups, check_hashes, parts_of
from aiodatadist.context_caching.memory.kv_layout import LayerGroup, Layout
from aiodatadist.context_caching.memory.regions import BufferMemory, KvBufferWrapper, Memory, SlotMemory
from aiodatadist.context_caching.pool_guard import PoolGuard
from aiodatadist.context_caching.pools.contract import KVPool, PoolKey, PoolTimeout, PoolUnreachable
from aiodatadist.context_caching.pools.deferred import open_deferred
from aiodatadist.context_caching.pools.open import open_pool
from aiodatadist.context_caching.results import CcResult, CcStatus, Statistics
from aiodatadist.context_caching.transfer.copies import CopyStreams
from aiodatadist.context_caching.transfer.handle import BlockTransfer
from aiodatadist.context_caching.transfer.pipeline import LATE_TOLERANCE, SaveLoadCall, TransferPipeline, in_time
from aiodatadist.context_caching.transfer.read_cache import LocalReadCache
from aiodatadist.context_caching.transfer.start_limiter import StartLimiter
from aiodatadist.counting import Incident, Observer
from aiodatadist.counting.callbacks import current_task, is_delivered
from aiodatadist.device import give_way
from aiodatadist.errors import LLMException, TransferTimeout

logger = logging.getLogger(__name__)

_UNKNOWN: dict[type[EmsException], CcStatus] = {EmsTimeout: CcStatus.TIMEOUT, EmsInvalidArgument: CcStatus.SKIPPED}
"""What became of values that nothing else is known of, by what ended the call; else it is an I/O error."""

TIMEOUT: Final = 5.0

Chunks = Sequence[Sequence[tuple[int, int]]]
Buffers = Sequence[Sequence[KvBufferWrapper | Any]]
Key = PrimaryKey | str


class ContextCache:
    """A cache of KV blocks over a pool. It may lose anything at any time, and what it lost is a miss.

    ``cache = await ContextCache.open(config)``, then ``async with cache:``. It belongs to the event loop it was opened on;
    any number of tasks may call it at the same time, and every call on another loop is refused. Times are seconds from the
    call on, None is no limit, and 0 means no waiting at all.

    Every data call raises :class:`EmsInvalidArgument` before anything starts when an argument is wrong, ``EmsTimeout`` at its
    deadline, ``EmsIoError`` when the pool does not answer, ``EmsInternalError`` when the device fails; the last three carry
    what was done as ``partial``. When it has raised, also because it was cancelled, no byte of the caller's memory is touched
    any more.
    """

    def __init__(self, config: CcConfig, settings: CcCacheConfig, access_id: str | None) -> None:
        """Use :meth:`open`."""
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
        self._transfers: set[BlockTransfer] = set()
        self._in_slots: set[BlockTransfer] = set()  # of the registered cache; those that got stuck stay
        self._group: anyio.abc.TaskGroup | None = None
        self._start_limiter = StartLimiter()
        self._records = CallRecords()

    # ---- life ----

    @classmethod
    async def open(
        cls,
        config: CcConfig,
        pool: KVPool | str = "memory:",
        read_cache_bytes: int = 0,
        *,
        fill_on_read: bool = True,
        bytes_in_flight: int = 256 * MIB,
        access_id: str | None = None,
        gate: HealthGate | None = None,
    ) -> Self:
        """Open a cache.

        Args:
            config: who we are: :class:`CcConfig_v1` for block hashes, :class:`CcConfig` for keys of the caller's only.
            pool: a pool, which stays the caller's; or a URL, see :func:`open_pool`, whose pool is closed with the cache.
            read_cache_bytes: host memory for copies of what is read and written; 0 for none.
            fill_on_read: what is read from the pool is kept there, too.
            bytes_in_flight: host memory that calls may hold together; who wants more waits, and that counts as its time.
            access_id: the tenant, part of every name. That keeps tenants apart who do not lie; it is no protection.
            gate: ends the use of a pool that fails, and probes it until it may be used again. Without one every call tries.
                It is this cache's until that has ended. With one the pool of a URL need not be there yet: the gate is closed
                then, every call misses, and each probe tries to open the pool.

        Raises:
            EmsInvalidArgument: an argument is wrong, the gate another cache's, the engine's extra not installed, or no event
                loop runs in this thread.
            EmsIoError, EmsTimeout: the pool does not answer, and there is no gate; or it answers, and refuses us.
            EmsInternalError: the memory cannot be had.
        """
        if not isinstance(config, CcConfig):
            raise EmsInvalidArgument(f"config is of type {type(config).__name__}: must be a CcConfig_v1 or CcConfig")
        if not isinstance(pool, (KVPool, str)):
            raise EmsInvalidArgument(f"pool is of type {type(pool).__name__}: must be a KVPool or a URL")
        if gate is not None and not isinstance(gate, HealthGate):
            raise EmsInvalidArgument(f"gate is of type {type(gate).__name__}: must be a HealthGate")
        check_access(access_id, None)
        cache = cls(config, CcCacheConfig(read_cache_bytes, fill_on_read, bytes_in_flight), access_id)
        try:
            await cache._resident.start(partial(cache._live, pool, gate))
        except EmsException:
            raise
        except Exception as error:
            raise translated(error, "the pool cannot be opened") from error
        return cache

    async def _live(self, pool: KVPool | str, gate: HealthGate | None, started: asyncio.Future[None]) -> None:
        try:
            async with AsyncExitStack() as stack:
                self._guard = PoolGuard(gate)
                stack.callback(self._guard.give)
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
                stack.push_async_callback(self._copy_streams.aclose)
                self._group = await stack.enter_async_context(anyio.create_task_group())
                if gate is not None:
                    self._guard.begin(self._pipeline)
                    probe = partial(self._guard.probe, self._pipeline)
                    self._group.start_soon(self._resident.keep, probe, name="aiodatadist health probe")
                started.set_result(None)
                try:
                    await self._resident.stopping.wait()
                finally:
                    self._resident.stopping.set()
                    self._group.cancel_scope.cancel()
        finally:  # also when closing something has failed, which aclose() will say
            for transfer in list(self._transfers):  # those whose task never began
                transfer.finish(None, self._failure())
            if not self._in_slots:
                self._layout = None

    async def aclose(self) -> None:
        """Cancel what is under way, and give everything back. May be called twice. In a forked child it does nothing: the
        cache is the parent's. When its event loop was closed, the cache has ended with it, and this says only how.

        Raises:
            EmsInvalidArgument: the cache belongs to another event loop, which is not closed.
            EmsIoError, EmsTimeout: its own pool could not be closed properly; everything was given back.
            EmsInternalError: the device did not let go of memory, while everything else was given back; or the cache had
                ended of an error; or its event loop was closed without ending its tasks, and nothing was given back.
        """
        if self._resident.is_abandoned:
            self._guard.give()
        if await self._resident.stop():
            self._tell_end()

    def _tell_end(self) -> None:
        """Raises EmsException: it had ended of an error, or with its event loop; or to end it failed."""
        if self._resident.is_abandoned:
            raise EmsInternalError("the event loop of this cache was closed before the cache: nothing was given back")
        if (error := self._resident.error) is not None:
            failure = self._failure() or translated(error, "the cache was not closed properly")
            raise failure from (None if failure is error else error)

    def _failure(self, partial: CcResult | None = None) -> EmsException | None:
        """Why the cache has ended though it was not closed; None if it has not."""
        if self._resident.reason is None:
            return None
        failure = refusal(Misuse.FAILED, self._resident.reason)
        failure.partial = partial
        return failure

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # ---- the registered cache ----

    async def register_kvcache(
        self, layers: Sequence[Sequence[Any]], groups: Sequence[Sequence[int] | LayerGroup] | None = None
    ) -> None:
        """Say where the KV cache is, in place of one that was registered before. Moves nothing; the tensors are kept alive
        until the cache is closed.

        Args:
            layers: for each layer its tensors, ``[num_blocks, block_size, ...]`` each, contiguous and writable: torch
                tensors, numpy arrays, other buffers, or what gives host memory by DLPack 1; in memory of the host or of the
                device. No items that are references.
            groups: layers that share a block table; each layer is in one group. One group of all by default. Layers of one
                group agree in ``num_blocks`` and ``block_size``; all else may differ.

        Raises:
            EmsInvalidArgument: a rule is broken, or saves or loads are under way.
            EmsInternalError: the device cannot be opened.
        """
        self._check_v1()
        self._check_quiet()
        try:
            placements_of = await self._copy_streams.placements()
            self._resident.check()
            self._check_quiet()
            layout = Layout(layers, groups, placements_of)
        except LLMException as error:
            raise EmsInternalError(f"the device cannot be used: {error}") from error
        self._layout = layout
        self._block_index.register(layout.shape)

    def unregister_kvcache(self) -> None:
        """Forget the KV cache; its memory is not used any more. Without one this does nothing.

        Raises:
            EmsInvalidArgument: saves or loads are under way, or the device did not let go after one.
        """
        self._check_v1()
        self._check_quiet()
        self._layout = None
        self._block_index.register(None)

    def _check_quiet(self) -> None:
        if self._in_slots:
            raise EmsInvalidArgument(
                f"{len(self._in_slots)} saves and loads use the registered cache: wait until they have ended"
            )

    def _check_v1(self) -> CcConfig_v1:
        self._resident.check()
        if not isinstance(self._config, CcConfig_v1):
            raise EmsInvalidArgument("block hashes need a CcConfig_v1: this cache was opened with a CcConfig")
        return self._config

    # ---- saving and loading by hash ----

    async def save(
        self,
        hashes: Sequence[int],
        *,
        slots: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        chunks: Chunks | None = None,
        timeout: float | None = TIMEOUT,
        write_rcache: bool = True,
    ) -> CcResult:
        """Store blocks. What is there already counts as stored; what cannot be stored does not make the call fail.

        A slot is a token's place in the cache, ``block * block_size + offset``. Where the tokens are is said in one of two
        ways: with ``slots``, one for each token, and ``offsets``, how many tokens each hash has; or with ``chunks``, for each
        layer group a list of ``(start_slot, length)``, one for each hash. Of a length of 0 a group stores nothing; a hash
        of which no group stores anything counts as stored, and as read.

        Args:
            hashes: -2**63 to 2**64 - 1, distinct. Equal hashes mean equal contents.
            write_rcache: the local read cache gets a copy of what is written.

        Raises:
            EmsException: see the class.
        """
        self.check_registered()
        seconds, left = await self._time_left("save", timeout, hashes)
        transfer = self.start_save(
            hashes, slots=slots, offsets=offsets, chunks=chunks, timeout=left, write_rcache=write_rcache
        )
        transfer.seconds = seconds
        return await transfer

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
        """Start :meth:`save`. The slots must not be written before it has ended.

        Raises:
            EmsInvalidArgument: an argument is wrong, or a load uses one of the slots.
        """
        layout = self.check_registered()
        seconds = rules.seconds(timeout)
        rules.flag(write_rcache, "write_rcache")
        keys, memory, total = self._checked(layout, hashes, slots, offsets, chunks)
        call = self._call(keys, memory, total, seconds)
        call.write_local = write_rcache
        return self._begin("save", seconds, call, self._save_blocks)

    async def load(
        self,
        hashes: Sequence[int],
        *,
        slots: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        chunks: Chunks | None = None,
        timeout: float | None = TIMEOUT,
        read_local_only: bool = False,
    ) -> CcResult:
        """Read blocks, up to the first that is not there; it and those behind it may hold anything afterwards.

        A block that was saved with another number of tokens is not there. Slots are said as for :meth:`save`.

        Args:
            read_local_only: read the local read cache and nothing else.

        Raises:
            EmsException: see the class.
        """
        self.check_registered()
        seconds, left = await self._time_left("load", timeout, hashes)
        transfer = self.start_load(
            hashes, slots=slots, offsets=offsets, chunks=chunks, timeout=left, read_local_only=read_local_only
        )
        transfer.seconds = seconds
        return await transfer

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
        """Start :meth:`load`. The slots must be neither read nor written before it has ended.

        Raises:
            EmsInvalidArgument: an argument is wrong, or another save or load uses one of the slots.
        """
        layout = self.check_registered()
        seconds = rules.seconds(timeout)
        rules.flag(read_local_only, "read_local_only")
        keys, memory, total = self._checked(layout, hashes, slots, offsets, chunks)
        call = self._call(keys, memory, total, seconds)
        call.local_only = read_local_only
        return self._begin("load", seconds, call, self._pipeline.load)

    def check_registered(self) -> Layout:
        """The layout of the registered cache.

        Raises:
            EmsInvalidArgument: there is none.
        """
        self._check_v1()
        if self._layout is None:
            raise EmsInvalidArgument("no KV cache is registered: call register_kvcache() first")
        return self._layout

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
        before = self._pipeline.counts["saved"]  # by other calls, too: that costs a question more
        await self._pipeline.save(call, beside)
        if beside:
            await self._block_index.record_layout(self._pipeline.counts["saved"] > before, call.deadline)

    # ---- saving and loading by key ----

    async def save_values(
        self,
        keys: Sequence[Key],
        buffers: Buffers,
        *,
        timeout: float | None = TIMEOUT,
        write_rcache: bool = True,
    ) -> CcResult:
        """Store values of the caller's own names. As :meth:`save`, without a registered cache.

        Args:
            keys: :class:`PrimaryKey` or strings, distinct.
            buffers: for each key the regions that its value is made of, one behind the other: :class:`KvBufferWrapper` or
                writable buffers.
        """
        seconds, left = await self._time_left("save_values", timeout, keys)
        transfer = self.start_save_values(keys, buffers, timeout=left, write_rcache=write_rcache)
        transfer.seconds = seconds
        return await transfer

    def start_save_values(
        self,
        keys: Sequence[Key],
        buffers: Buffers,
        *,
        timeout: float | None = TIMEOUT,
        write_rcache: bool = True,
    ) -> BlockTransfer:
        """Start :meth:`save_values`. The regions must not be written before it has ended.

        Raises:
            EmsInvalidArgument: an argument is wrong.
        """
        self._resident.check()
        seconds = rules.seconds(timeout)
        rules.flag(write_rcache, "write_rcache")
        call = self._call(*self._checked_values(keys, buffers), seconds)
        call.write_local = write_rcache
        return self._begin("save_values", seconds, call, self._pipeline.save)

    async def load_values(
        self,
        keys: Sequence[Key],
        buffers: Buffers,
        *,
        timeout: float | None = TIMEOUT,
        read_local_only: bool = False,
    ) -> CcResult:
        """Read values of the caller's own names. As :meth:`load`; a value of another length than its regions is not there."""
        seconds, left = await self._time_left("load_values", timeout, keys)
        transfer = self.start_load_values(keys, buffers, timeout=left, read_local_only=read_local_only)
        transfer.seconds = seconds
        return await transfer

    def start_load_values(
        self,
        keys: Sequence[Key],
        buffers: Buffers,
        *,
        timeout: float | None = TIMEOUT,
        read_local_only: bool = False,
    ) -> BlockTransfer:
        """Start :meth:`load_values`. The regions must be neither read nor written before it has ended; that is not checked.

        Raises:
            EmsInvalidArgument: an argument is wrong.
        """
        self._resident.check()
        seconds = rules.seconds(timeout)
        rules.flag(read_local_only, "read_local_only")
        call = self._call(*self._checked_values(keys, buffers), seconds)
        call.local_only = read_local_only
        return self._begin("load_values", seconds, call, self._pipeline.load)

    def _checked_values(self, keys: Any, buffers: Any) -> tuple[list[PoolKey], Memory, int]:
        names = self._pool_keys(keys)
        memory = BufferMemory(buffers, len(names))
        if len(set(names)) != len(names):  # said with the caller's keys
            rules.distinct([PrimaryKey(*own) if own[1] else own[0] for _, *own in names], "keys")
        return names, memory, len(names)

    def _pool_keys(self, keys: Any) -> list[PoolKey]:
        return [self._names.of_key(parts_of(key, f"keys[{i}]")) for i, key in enumerate(rules.some(keys, "keys"))]

    # ---- under way ----

    async def _time_left(self, operation: str, timeout: float | None, wanted: Any) -> tuple[float, float]:
        """Wait for a turn to begin; seconds that the call has in all, and has left then.

        Raises:
            EmsInvalidArgument: the cache is closed, or the timeout no time.
            EmsTimeout: none. What is wanted was not looked at, and the pool not asked.
        """
        self._resident.check()
        seconds = rules.seconds(timeout)
        left = await self._start_limiter.wait(seconds)
        if left is None:
            count = len(wanted) if isinstance(wanted, Sized) else 0
            with self._records.of(operation, count):
                raise EmsTimeout(f"not begun within {seconds:g} s", partial=CcResult.of([CcStatus.TIMEOUT] * count))
        return seconds, left

    def _call(self, keys: list[PoolKey], memory: Memory, total: int, seconds: float) -> SaveLoadCall:
        deadline = asyncio.get_running_loop().time() + seconds  # a done callback may start it, too: no task is needed
        return SaveLoadCall(keys, memory, total, deadline, deadline if seconds else math.inf)

    def _begin(
        self, what: str, seconds: float, call: SaveLoadCall, work: Callable[[SaveLoadCall], Coroutine[Any, Any, None]]
    ) -> BlockTransfer:
        """Run it in a task of the cache's."""

        def ended(done: BlockTransfer) -> None:
            self._transfers.discard(done)
            if not done.is_stuck:
                self._in_slots.discard(done)
                call.memory.give()

        group = self._group
        if group is None:
            raise EmsInternalError("the cache has no task group")
        transfer = BlockTransfer(f"{what} of {call.total} keys", seconds)
        if not self._guard.is_open:
            transfer.finish(CcResult.of([CcStatus.SKIPPED] * call.total), None)
            self._records.follow(what, call.total, transfer)
            return transfer
        call.memory.take(writes="load" in what)
        self._records.follow(what, call.total, transfer)
        transfer.add_done_callback(ended)
        self._transfers.add(transfer)
        if isinstance(call.memory, SlotMemory):
            self._in_slots.add(transfer)
        Spawner(group).start_soon(self._resident.keep, partial(self._drive, transfer, call, work), name=transfer.what)
        return transfer

    async def _drive(
        self, transfer: BlockTransfer, call: SaveLoadCall, work: Callable[[SaveLoadCall], Coroutine[Any, Any, None]]
    ) -> None:
        result: CcResult | None = None
        error: EmsException | None = None
        task = current_task()
        try:
            transfer.scope.deadline = call.copying + LATE_TOLERANCE
            with transfer.scope:
                await self._start_limiter.wait()
                if not transfer.is_asked_to_stop:
                    await work(call)
                    result = call.result()
            if result is None and not transfer.is_asked_to_stop:
                raise EmsTimeout(f"{transfer.what}: not done within {transfer.seconds:g} s")
        except BaseException as problem:
            if is_delivered(problem, task):
                raise
            if not isinstance(problem, (EmsException, PoolTimeout, PoolUnreachable, LLMException)):
                told = "%r failed", transfer
                self._pipeline.incidents.add(Incident.DEFECT, logger, *told, level=logging.ERROR, exc_info=True)
            error = _translated(problem, transfer.what, transfer.seconds)
            if error is not problem:
                error.__cause__ = problem
            error.partial = call.result(_UNKNOWN.get(type(error), CcStatus.IO_ERROR))
            if not isinstance(error, EmsInvalidArgument):
                self._failed(transfer.seconds)
        finally:
            if call.is_stuck:
                result = None
                error = EmsInternalError("the device did not let go of the memory", partial=call.result())
            elif result is None and error is None and not transfer.is_asked_to_stop:
                error = self._failure(call.result())
            transfer.finish(result, error, is_stuck=call.is_stuck)
            del transfer, error  # which the error's traceback would keep: a failure that is dropped is told at once

    def _failed(self, seconds: float) -> None:
        """The pool failed, or may have. A call without any time did not ask it for much, and a gate may be another
        cache's when this one is closed."""
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
        lease_ms: int = 0,
        groups: Sequence[int] | None = None,
    ) -> CcResult:
        """How many blocks are there, counted from the first without a gap. A hint: they may be gone a moment later.

        A pool that is slow or fails has nothing. It works without a registered cache, as soon as this rank has saved with
        one: the pool knows its layout.

        Args:
            read_local_only: ask the local read cache alone.
            all_ranks: all ranks' shards have to be there; else this rank's.
            lease_ms: ask the engine to keep what was found for so long, if it can.
            groups: layer groups that all have to be there. None: any one is enough, since a group may store nothing of a
                block.

        Raises:
            EmsInvalidArgument: an argument is wrong.
        """
        self._check_v1()
        wanted = check_hashes(hashes)
        groups = None if groups is None else check_groups(groups)
        seconds = rules.seconds(timeout)
        rules.flag(read_local_only, "read_local_only")
        rules.flag(all_ranks, "all_ranks")
        rules.integer(lease_ms, "lease_ms", 0)
        await give_way()
        shards = self._names.shards() if all_ranks else [self._names.shard]
        with self._records.of("exists", len(wanted)) as record:
            record.result = await self._exists(wanted, seconds, shards, groups, read_local_only, lease_ms)
            return record.result

    async def _exists(
        self,
        wanted: Sequence[int],
        seconds: float,
        shards: Sequence[str],
        groups: Sequence[int] | None,
        local_only: bool,
        lease_ms: int,
    ) -> CcResult:
        if not self._guard.is_open:
            return CcResult.of([CcStatus.SKIPPED] * len(wanted))
        left = await self._start_limiter.wait(seconds)
        if left is None:
            return CcResult.of([CcStatus.TIMEOUT] * len(wanted))
        deadline = anyio.current_time() + left
        try:
            question = ExistsQuery(shards, groups, local_only, lease_ms, deadline)
            return await in_time(self._block_index.exists(wanted, question), deadline)
        except (PoolTimeout, PoolUnreachable) as problem:
            what = f"exists of {len(wanted)} hashes found nothing"
            told = _translated(problem, what, seconds).message()
            self._pipeline.incidents.add(Incident.LOOKUP_FAILED, logger, "%s", told)
            self._failed(seconds)
            failure = CcStatus.TIMEOUT if isinstance(problem, PoolTimeout) else CcStatus.IO_ERROR
            return CcResult.of([failure] * len(wanted))

    async def exists_values(
        self, keys: Sequence[Key], *, timeout: float | None = TIMEOUT, lease_ms: int = 0
    ) -> CcResult:
        """Which values of the caller's own names are there: ``details`` has all of them. A hint, as :meth:`exists`; a pool
        that is slow or fails has nothing.

        Args:
            lease_ms: ask the engine to keep what was found for so long, if it can.

        Raises:
            EmsInvalidArgument: an argument is wrong.
        """
        self._resident.check()
        names = self._pool_keys(keys)
        seconds = rules.seconds(timeout)
        rules.integer(lease_ms, "lease_ms", 0)
        await give_way()
        with self._records.of("exists_values", len(names)) as record:
            record.result = await self._exists_values(names, seconds, lease_ms)
            return record.result

    async def _exists_values(self, names: Sequence[PoolKey], seconds: float, lease_ms: int) -> CcResult:
        if not self._guard.is_open:
            return CcResult.of([CcStatus.SKIPPED] * len(names))
        deadline = anyio.current_time() + seconds
        try:
            found = await in_time(self._block_index.exists_keys(names, lease_ms, deadline), deadline)
        except (PoolTimeout, PoolUnreachable) as problem:
            told = "exists of %d keys found nothing: %s", len(names), problem
            self._pipeline.incidents.add(Incident.LOOKUP_FAILED, logger, *told)
            self._failed(seconds)
            failure = CcStatus.TIMEOUT if isinstance(problem, PoolTimeout) else CcStatus.IO_ERROR
            return CcResult.of([failure] * len(names))
        return CcResult.of([CcStatus.OK if there else CcStatus.MISS for there in found])

    async def match_prefix(
        self, hashes: Sequence[int], *, timeout: float | None = TIMEOUT, groups: Sequence[int] | None = None
    ) -> int:
        """How many of them, from the first without a gap, are there: ``exists().success``."""
        return (await self.exists(hashes, timeout=timeout, groups=groups)).success

    async def remove(self, hashes: Sequence[int], *, timeout: float | None = TIMEOUT) -> int:
        """Forget blocks of this rank's shard; how many values there were in the pool.

        Raises:
            EmsInvalidArgument, EmsIoError, EmsTimeout: see the class. They are gone from the local read cache in any case.
        """
        self._check_v1()
        wanted = check_hashes(hashes)
        seconds = rules.seconds(timeout)
        await give_way()
        deadline = anyio.current_time() + seconds
        work = self._block_index.remove(wanted, deadline)
        with self._records.of("remove", len(wanted)):
            return await self._in_time(f"remove of {len(wanted)} hashes", seconds, work, deadline)

    async def remove_values(self, keys: Sequence[Key], *, timeout: float | None = TIMEOUT) -> int:
        """Forget values of the caller's own names, for instance to store others under them. Local read caches of other
        processes keep their copies. Errors as :meth:`remove`."""
        self._resident.check()
        names = self._pool_keys(keys)
        seconds = rules.seconds(timeout)
        deadline = anyio.current_time() + seconds
        work = self._block_index.remove_keys(names, deadline)
        with self._records.of("remove_values", len(names)):
            return await self._in_time(f"remove of {len(names)} keys", seconds, work, deadline)

    async def _in_time(self, what: str, seconds: float, work: Coroutine[Any, Any, int], deadline: float) -> int:
        try:
            return await in_time(work, deadline)
        except (PoolTimeout, PoolUnreachable) as problem:
            self._failed(seconds)
            raise _translated(problem, what, seconds) from problem

    # ---- health ----

    async def check_health(self) -> bool:
        """Whether the pool works right now; False when the cache is closed or has ended. Takes at most a second.

        Raises:
            EmsException: the cache belongs to another event loop, or to another process.
        """
        if self._resident.is_over:
            return False
        self._resident.check()
        await give_way()
        return await self._pipeline.is_healthy()

    @property
    def observer(self) -> Observer | None:
        """Is told of each call; see :class:`~aiodatadist.telemetry.Observer`. None, the default, costs nothing."""
        return self._records.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._records.observer = observer

    def figures(self) -> CacheFigures:
        """All that was counted so far: what a metrics endpoint needs. From any thread, also when it is closed."""
        name = self._pipeline.pool.capabilities.name
        incidents = dict(self._pipeline.incidents.counts)
        return CacheFigures(self._records.figures(), self.statistics, name, self._guard.is_open, incidents)

    @property
    def statistics(self) -> Statistics:
        """What was done so far."""
        counted = {name: self._pipeline.counts[name] for name in Statistics.__slots__ if "flight" not in name}
        return Statistics(**counted, bytes_in_flight=self._budget.taken, most_bytes_in_flight=self._budget.most)


def _translated(problem: BaseException, what: str, seconds: float) -> EmsException:
    """What callers get, with the seconds that they allowed if those were not enough."""
    is_late = isinstance(problem, (PoolTimeout, TransferTimeout)) and seconds != math.inf
    return translated(problem, f"{what} within {seconds:g} s" if is_late else what)
