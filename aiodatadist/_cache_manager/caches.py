"""Caches of this cluster: made, viewed, copied and released here; and the steps that transfers with peers share with that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiodatadist._cache.names import Form, Key, Name, name_of
from aiodatadist._cache.plan import inside, plan
from aiodatadist._cache.pool import PoolUsage
from aiodatadist._cache.table import Entry
from aiodatadist._cache.task import CacheTask, StartedTask
from aiodatadist._cache_manager.arguments import check_blocks_key
from aiodatadist._cache_manager.short_way import ShortWay, pairs_of
from aiodatadist._concurrency.origin import Origin
from aiodatadist._counting import Call, Ended, Observer, tell
from aiodatadist._device import MAX_COPY_SECONDS, TransferCompletion, TransferState, give_way, tensors
from aiodatadist._link import AwaitedLink
from aiodatadist._values import checks
from aiodatadist._values.audience import Audience
from aiodatadist._values.descriptors import (
    UNSET,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    MemInfo,
    Memtype,
    Placement,
    check_cache_key,
)
from aiodatadist._values.grid import Grid, indexes
from aiodatadist._values.selection import Selection
from aiodatadist._values.transfer_priority import TransferPriority, check_deadline, check_priority
from aiodatadist.errors import CacheNotFound, FeatureNotEnabled, LinkError, NotLinked, ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._cache.registry import CacheRegistry
    from aiodatadist._cluster.engine import Engine
    from aiodatadist._link import Transfers

Tensor = Any
"""An address, a numpy array, a torch or torch_npu tensor, or another writable buffer."""


class Caches:
    """The lower half of :class:`~aiodatadist.CacheManager`, which adds transfers with peers."""

    def __init__(self, engine: Engine, copy_seconds: float = MAX_COPY_SECONDS) -> None:
        self._engine = engine
        self._flows = engine.totals.transfers
        self._copy_seconds = copy_seconds
        self._short_way = ShortWay(engine, self._task, self._observe, self._limit)

    @property
    def _registry(self) -> CacheRegistry:
        self._engine.check_running()
        return self._engine.registry

    @property
    def _registry_here(self) -> CacheRegistry:
        """The registry, for calls that only the event loop may make. Raises ForkError or LLMException if made elsewhere."""
        self._engine.check_here()
        return self._registry

    # ---- making caches ----

    async def allocate_cache(
        self,
        cache_desc: CacheDesc,
        cache_keys: Sequence[CacheKey] = (),
        *,
        timeout: float | None = None,
        readers: Collection[int] | None = None,
        writers: Collection[int] | None = None,
    ) -> Cache:
        """Make a contiguous cache from pool memory. Its contents are undefined.

        Args:
            cache_keys: the i-th key names batch slot i for peers; placeholders name nothing. The memory returns to the
                pool once the id and all keys have been released.
            timeout: seconds to wait for room, ``math.inf`` for no limit. Callers are served in the order in which they
                came, so a small cache can wait behind a large one. If None, the cache is made at once or not at all;
                while others wait, it is not made.
            readers, writers: must be None. A link reaches a pool as a whole, so a cache with its own readers or writers
                needs its own memory: see :meth:`register_cache`.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong, if a key is bound already or has been bound by
                the time it is this caller's turn, or if there is no pool for this placement.
            FeatureNotEnabled: if there is no pool at all.
            OutOfMemory: if the pool has no room, or had none in time. The message names free, largest and pinned bytes,
                the oldest pin, how long the call waited, and behind which caller. If even the empty pool would be too
                small, it is raised without waiting.
            LLMException: with ``LLM_ENGINE_FINALIZED`` if the cluster was finalized during the wait.

        After failure and cancellation no memory has been taken, and the next caller in the queue has its turn.
        """
        checks.instance(cache_desc, "cache_desc", CacheDesc)
        _check_pooled(Audience.of(readers, writers))
        keys = checks.sequence(cache_keys, "cache_keys", CacheKey)
        return await self._allocate(
            cache_desc, False, timeout, lambda: self._registry.table.check_slots(cache_desc, keys)
        )

    async def allocate_blocks_cache(
        self,
        cache_desc: CacheDesc,
        blocks_cache_key: BlocksCacheKey | None = None,
        *,
        timeout: float | None = None,
        readers: Collection[int] | None = None,
        writers: Collection[int] | None = None,
    ) -> Cache:
        """Make a blocks cache from pool memory: ``cache_desc.shape[0]`` blocks in each tensor. Its contents are undefined.

        Without a key it can be a destination, and peers can name it by id. For ``timeout``, ``readers``, ``writers``,
        errors, failure and cancellation see :meth:`allocate_cache`.
        """
        checks.instance(cache_desc, "cache_desc", CacheDesc)
        _check_pooled(Audience.of(readers, writers))
        key = check_blocks_key(blocks_cache_key)
        return await self._allocate(cache_desc, True, timeout, lambda: self._registry.table.check_blocks(key))

    async def _allocate(
        self, desc: CacheDesc, blocks: bool, timeout: float | None, naming: Callable[[], dict[Name, int]]
    ) -> Cache:
        seconds = None if timeout is None else checks.seconds(timeout, "timeout")
        registry = self._registry_here
        await give_way()
        if seconds is None:
            return registry.allocate(desc, blocks, naming)
        return await registry.allocate_in_turn(desc, blocks, naming, seconds)

    async def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[Tensor],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
        *,
        readers: Collection[int] | None = None,
        writers: Collection[int] | None = None,
    ) -> Cache:
        """Make a contiguous cache from memory that the caller owns. It can be called at any time, also after linking.

        Args:
            addrs: for each tensor a torch or torch_npu tensor, a numpy array, another writable buffer, or the address
                of ``cache_desc.size`` bytes. Objects are kept alive as long as the cache; memory behind addresses is
                not. On an NPU, host memory should be pinned, and must be if links may be over HCCS: take it from
                :meth:`allocate_cache`, ``tensor.pin_memory()`` of torch_npu, or ``aclrtMallocHost``.
            cache_keys: the i-th key names batch slot i for peers; placeholders name nothing.
            remote_accessible: True if the cache takes part in transfers with peers, as source or destination. By
                default device memory does; host memory can only be the destination of this cluster's own pulls.
            readers: ids of the clusters that may read the cache. If None, each peer that may read caches.
            writers: ids of the clusters that may write into it: push, or in request/response mode deliver what this
                cluster pulls. If None, each peer that may write into caches.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong. Nothing was registered.
            LLMException: if the transport refused the memory. Nothing was registered.
        """
        keys = checks.sequence(cache_keys, "cache_keys", CacheKey)
        return await self._register(
            cache_desc,
            addrs,
            False,
            remote_accessible,
            lambda: self._registry.table.check_slots(cache_desc, keys),
            Audience.of(readers, writers),
        )

    async def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[Tensor],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
        *,
        readers: Collection[int] | None = None,
        writers: Collection[int] | None = None,
    ) -> Cache:
        """Make a blocks cache from memory that the caller owns: ``cache_desc.shape[0]`` blocks in each tensor.

        For arguments and errors see :meth:`register_cache`. Without a key, peers can name it by id only.
        """
        key = check_blocks_key(blocks_cache_key)
        return await self._register(
            cache_desc,
            addrs,
            True,
            remote_accessible,
            lambda: self._registry.table.check_blocks(key),
            Audience.of(readers, writers),
        )

    async def _register(
        self,
        desc: CacheDesc,
        addrs: Sequence[Tensor],
        blocks: bool,
        accessible: bool | None,
        naming: Callable[[], Any],
        audience: Audience,
    ) -> Cache:
        checks.instance(desc, "cache_desc", CacheDesc)
        spans = tensors.spans(addrs, "addrs", desc, host_as_device=self._engine.device.runtime.is_soft)
        if accessible is not None:
            checks.instance(accessible, "remote_accessible", bool)
        keep = [span.keep for span in spans if span.keep is not None]
        return await self._registry_here.register(
            desc, [span.address for span in spans], keep, blocks, naming, accessible, audience
        )

    def _task(self, what: str, peer: int, transfer: TransferCompletion, about: object) -> CacheTask:
        """Return the task that the caller of a transfer gets. From here on the transfer is counted and observed."""
        engine, origin = self._engine, None
        if transfer.state is TransferState.DONE:
            self._flows[what].ran(transfer.nbytes, transfer.ranges, transfer.transfer_seconds)
        else:
            engine.totals.begun(what, transfer)
            origin = Origin()
        if engine.observer is not None:
            self._observe(engine.observer, what, peer, transfer)
        return StartedTask(what, peer, transfer, engine.check_here, about, origin)

    def _observe(self, observer: Observer, what: str, peer: int, transfer: TransferCompletion) -> None:
        _observe(observer, Call("transfer", what, self._engine.cluster_id, peer, None, transfer.elapsed), transfer)

    # ---- looking into them ----

    def arrays(self, cache: Cache) -> list[Any]:
        """Return a numpy array of ``cache_desc.shape`` over each tensor of an allocated cache, without a copy.

        bfloat16 comes as uint16. The cache cannot be deallocated while an array is alive. The host must be able to
        address the memory: host placement, or softnpu.

        Raises:
            FeatureNotEnabled: if it cannot, or numpy is not installed.
            ParamInvalid: if the memory is the caller's.
        """
        return self._views(cache, tensors.as_arrays)

    def tensors(self, cache: Cache) -> list[Any]:
        """Return a torch tensor over each tensor of an allocated cache, without a copy; torch_npu tensors on an NPU.

        The rules of :meth:`arrays` apply. Tensors on an NPU are an exception: they do not keep the memory, and must not
        be used after deallocation.
        """
        entry = self._local(cache, "cache", remote=False)
        if entry.placement is Placement.DEVICE and not self._engine.device.runtime.is_soft:
            return tensors.npu_tensors(cache.cache_desc, cache.tensor_addrs)
        return self._views(cache, tensors.as_tensors)

    def _views(self, cache: Cache, make: Callable[[memoryview, CacheDesc, Sequence[int]], list[Any]]) -> list[Any]:
        entry = self._local(cache, "cache", remote=False)
        return [
            make(memoryview(buffer).cast("B"), cache.cache_desc, [0])[0] for buffer in self._registry.buffers(entry)
        ]

    def pool_usage(self) -> dict[Placement, PoolUsage]:
        """Return total, free, largest and pinned bytes of each memory pool."""
        return self._registry.pools.usage()

    # ---- giving them up ----

    async def deallocate_cache(self, cache: Cache) -> None:
        """Release the id of an allocated contiguous cache; its ``tensor_addrs`` are empty afterwards.

        As long as keys are bound to it, peers can pull by them; the memory returns to the pool with the last key. The
        call waits until no transfer and no peer uses the memory. A cache that is unknown, deallocated or registered is
        left alone.

        Raises:
            ParamInvalid: if it is a blocks cache or another cluster's, or if arrays over its memory are alive.
            FeatureNotEnabled: if there is no memory pool.
            LLMException: with ``LLM_FAILED`` if the device never released the memory, which is lost.

        If the call is cancelled during the wait, the memory returns to the pool all the same.
        """
        await self._registry_here.deallocate(checks.instance(cache, "cache", Cache), False)
        await give_way()

    async def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Release an allocated blocks cache, and its key. Waits and raises as :meth:`deallocate_cache`."""
        await self._registry_here.deallocate(checks.instance(cache, "cache", Cache), True)
        await give_way()

    async def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key from its slot: once this returns, no peer can pull by it.

        Unknown keys and registered caches are left alone. If cancelled during the wait, the key is removed all the
        same; call it again to wait for that.

        Raises:
            FeatureNotEnabled: if there is no memory pool.
        """
        checks.instance(cache_key, "cache_key", CacheKey)
        await self._registry_here.remove_key(name_of(cache_key))
        await give_way()

    async def unregister_cache(self, cache_id: int) -> None:
        """Release a registered cache; afterwards its memory is the caller's again. An unknown id is accepted.

        The call waits for transfers of this cluster that use the cache; no new one starts in the meantime. It also
        waits for a peer that lost its link and was stopped in the middle of writing there, until that peer's process
        continues or ends, however long that takes. If cancelled during the wait, the cache is released all the same;
        call it again to wait for that.

        Raises:
            LLMException: with ``LLM_EXIST_LINK`` if peers may reach the cache through a link, or through one that is
                being made, whichever end made it; unlink first. With ``LLM_FAILED`` if the device never released the
                cache; its memory must not be used again.
        """
        checks.integer(cache_id, "cache_id", checks.INT64)
        self._engine.check_here()
        await self._engine.links.wait_parted()
        await self._registry_here.unregister(cache_id, self._engine.links.has_any)
        await give_way()

    async def wait_usable(self, cache: Cache) -> None:
        """Wait until no lost peer can write into a local cache any longer.

        That is so once the link is closed, which takes moments. If the peer was stopped (SIGSTOP, a frozen container)
        in the middle of a write, it takes until the peer has continued or ended.

        Afterwards the memory that the peer was to write can be overwritten safely. A lost link alone does not allow
        that.

        Raises:
            CacheNotFound: if there is no such cache.
            LLMException: if the peer may write at any time; never use the memory again.
        """
        await self._registry_here.wait_usable(checks.instance(cache, "cache", Cache))

    # ---- copying within this cluster ----

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
        *,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> CacheTask:
        """Copy one batch slot to another, in every tensor, within this cluster. Any placement can be copied to any other.

        Args:
            offset: bytes to skip at the start of both slots.
            size: bytes of each tensor; -1 is all that the source has from ``offset``.
            req_id: for diagnosis only.
            priority: the order among this cluster's copies, as in :meth:`pull_blocks` on a link.
            deadline: seconds from now, waiting included; then the copy fails with ``LLM_TIMEOUT``. If None, there is no
                limit.

        Raises:
            CacheNotFound: if a cache is not known, or no longer.
            TypeError, ValueError, ParamInvalid: if an argument is wrong, or the bytes do not fit. Nothing was started.

        After failure, cancellation and a missed deadline no byte lands any longer, and the contents of the destination
        are undefined.
        """
        form = "copy_cache", offset, size
        if req_id is None or (type(req_id) is int and 0 <= req_id <= UNSET):  # otherwise it is refused below
            task = self._short_way.copy(form, dst, src, (dst_batch_index,), (src_batch_index,), priority, deadline)
            if task is not None:
                return task
        target, source = self._local(dst, "dst", remote=False), self._local(src, "src", remote=False)
        checks.integer(dst_batch_index, "dst_batch_index", checks.UINT32)
        checks.integer(src_batch_index, "src_batch_index", checks.UINT32)
        checks.integer(offset, "offset", checks.UINT64)
        if req_id is not None:
            checks.integer(req_id, "req_id", checks.UINT64)
        if checks.integer(size, "size", checks.INT64) != -1 and size <= 0:
            raise ParamInvalid(f"size is {size}: must be -1 or above 0")
        nbytes = source.stride - offset if size == -1 else size
        selection = Selection(
            src_slot=src_batch_index, dst_slot=dst_batch_index, nbytes=nbytes, offsets=(offset, offset)
        )
        return self._copy(form, source, target, plan(selection, source, target), priority, deadline)

    def copy_blocks(
        self,
        cache: Cache,
        copy_block_info: Mapping[int, Sequence[int]],
        *,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> CacheTask:
        """Copy blocks within one blocks cache: block ``src`` to each of ``copy_block_info[src]``, in every tensor.

        A block can be the target of only one pair. If it is the source of another pair, the order of the two is
        undefined. For priority, deadline, errors, failure and cancellation see :meth:`copy_cache`.
        """
        form = ("copy_blocks",)
        task = self._short_way.copy(form, cache, cache, *pairs_of(copy_block_info), priority, deadline)
        if task is not None:
            return task
        entry = self._local(cache, "cache", remote=False)
        checks.instance(copy_block_info, "copy_block_info", dict)
        for source, targets in copy_block_info.items():
            checks.integer(source, "copy_block_info", checks.UINT64)
            checks.sequence(targets, f"copy_block_info[{source}]", int)
        if not any(copy_block_info.values()):
            raise ParamInvalid("copy_block_info names no pair of blocks")
        return self._copy(form, entry, entry, inside(entry, copy_block_info), priority, deadline)

    def swap_blocks(
        self,
        src_cache: Cache,
        dst_cache: Cache,
        src_to_dst: Mapping[int, int],
        *,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> CacheTask:
        """Copy blocks from host to device (swap in) or from device to host (swap out): ``src`` to ``src_to_dst[src]``.

        It copies; it does not exchange. A block can be the target of only one pair. One of the two caches may be
        ``Cache.create_cpu_cache(...)``; its memory must stay until the task is done.

        For priority, deadline, errors, failure and cancellation see :meth:`copy_cache`.
        """
        form, pairs = ("swap_blocks",), src_to_dst if type(src_to_dst) is dict else {}
        numbers = list(pairs.values()), list(pairs)
        task = self._short_way.copy(form, dst_cache, src_cache, *numbers, priority, deadline)
        if task is not None:
            return task
        source, target = self._swappable(src_cache, "src_cache"), self._swappable(dst_cache, "dst_cache")
        if source.placement is target.placement:
            raise ParamInvalid(f"both caches are {source.placement}: one must be HOST, the other DEVICE")
        checks.instance(src_to_dst, "src_to_dst", dict)
        for pair in src_to_dst.items():
            checks.sequence(pair, "src_to_dst", int)
        if not src_to_dst:
            raise ParamInvalid("src_to_dst names no pair of blocks")
        sources, targets = indexes(list(src_to_dst), "src_blocks"), indexes(list(src_to_dst.values()), "dst_blocks")
        grid = plan(Selection(src_blocks=sources, dst_blocks=targets), source, target)
        return self._copy(form, source, target, grid, priority, deadline)

    def _swappable(self, cache: Cache, name: str) -> Entry:
        if checks.instance(cache, name, Cache).cache_id == -1:
            return Entry(cache, False, {}, None)
        return self._local(cache, name, remote=False)

    def _copy(
        self,
        form: Form,
        source: Entry,
        target: Entry,
        grid: Grid,
        priority: TransferPriority,
        deadline: float | None,
    ) -> CacheTask:
        check_priority(priority)
        seconds = check_deadline(deadline)
        self._engine.check_here()
        transfer = self._engine.local_copies.start(source, target, grid, self._copy_seconds, priority, form)
        self._limit(transfer, seconds)
        return self._task(form[0], self._engine.cluster_id, transfer, grid)

    def _limit(self, transfer: TransferCompletion, deadline: float | None) -> None:
        """Stop the transfer after this many seconds, unless it has ended by then."""
        if deadline is not None and not transfer.is_done:
            self._engine.deadlines.add(transfer, deadline)

    # ---- other ----

    def remap_registered_memory(self, mem_infos: MemInfo | Sequence[MemInfo]) -> None:
        """Check the arguments and raise: memory cannot be repaired here after a hardware fault.

        Raises:
            ParamInvalid: if an argument is wrong.
            NotLinked: if nothing is linked.
            FeatureNotEnabled: otherwise.
        """
        infos = [mem_infos] if isinstance(mem_infos, MemInfo) else mem_infos
        if not isinstance(infos, (list, tuple)) or not all(isinstance(info, MemInfo) for info in infos):
            raise ParamInvalid(f"mem_infos is a {type(mem_infos).__name__}: must be a MemInfo or a list of them")
        for info in infos:
            if info.mem_type is not Memtype.MEM_TYPE_DEVICE or info.addr == 0 or info.size <= 0:
                raise ParamInvalid(
                    f"mem_infos has {info.mem_type.name} at {info.addr:#x}, {info.size} bytes: must be device memory"
                )
        if not self._engine.links.has_any:
            raise NotLinked("nothing is linked: there is no memory to map again")
        raise FeatureNotEnabled("remap_registered_memory is not available", hint="restart the process")

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Raise ParamInvalid unless exactly one of ``req_id`` and ``prefix_id`` is valid."""
        check_cache_key(checks.instance(cache_key, "cache_key", CacheKey))

    # ---- finding things ----

    def _local(self, cache: Cache, name: str, remote: bool = True) -> Entry:
        """Return the cache behind the object.

        Raises ParamInvalid if ``remote`` and the cache takes no part in transfers with peers.
        """
        entry = self._registry.local(checks.instance(cache, name, Cache), name)
        if remote and not entry.remote_accessible:
            raise _not_accessible(cache, name)
        return entry

    def _destination(self, cache: Cache, name: str) -> Entry:
        """Return the cache behind the object for a pull into it, which peers need not see.

        Raises ParamInvalid if it cannot receive bytes from peers.
        """
        entry = self._local(cache, name, remote=False)
        if not entry.may_receive:
            raise _not_accessible(cache, name)
        return entry

    def _is_checked(self, checksum: bool | None) -> bool:
        """Return True if checksums are to be compared. Raises TypeError if ``checksum`` is not a bool or None."""
        if checksum is not None:
            checks.instance(checksum, "checksum", bool)
        return self._engine.transfer_checksum if checksum is None else checksum

    def _transfers(self, key: Key) -> Transfers:
        cluster_id = key.cluster_id
        if cluster_id == self._engine.cluster_id:
            raise ParamInvalid(f"{key} names this cluster itself: name a peer, or copy")
        if isinstance(key, CacheKey):
            check_cache_key(key)
        if isinstance(key, CacheKeyByIdAndIndex) and key.cache_id < 0:
            raise CacheNotFound(f"{key}: peers can reach no cache with such an id")
        transfers = self._engine.links.find(cluster_id).transfers
        transfers.session.check_ready()
        return transfers

    def _link_or_wait(self, key: Key) -> Transfers | AwaitedLink:
        """Return the transfers of the key's cluster. If its link is being re-established, return those that wait for it."""
        try:
            return self._transfers(key)
        except (NotLinked, LinkError):
            awaited = self._engine.relinker.awaited(key.cluster_id)
            if awaited is None:
                raise
            return awaited


def _observe(observer: Observer, call: Call, transfer: TransferCompletion) -> None:
    end = tell(observer, call)

    def ended(done: TransferCompletion) -> None:
        figures = (done.nbytes, done.ranges, done.queue_seconds, done.transfer_seconds)
        end(Ended(done.status, done.error, *figures))

    transfer.add_done_callback(ended)


def _check_pooled(audience: Audience) -> None:
    """Raise ParamInvalid if readers or writers are given for a cache in pool memory."""
    if not audience.is_every_cluster:
        raise ParamInvalid(
            "readers or writers cannot be given for memory of a pool: a link reaches a pool as a whole",
            hint="give the cache its own memory: register_cache() or register_blocks_cache() with readers or writers",
        )


def _not_accessible(cache: Cache, name: str) -> ParamInvalid:
    return ParamInvalid(f"{name} {cache.cache_id} is not remote accessible: register it with remote_accessible=True")
