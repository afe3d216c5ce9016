"""The CacheManager without await: calls that wait, and submissions that do not."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

from aiodatadist import _cache_manager as awaitable
from aiodatadist._blocking.block_lease import BlockLease
from aiodatadist._blocking.facade import blocking, moving, starting
from aiodatadist._blocking.layers import LayerReceiver, LayersHandle
from aiodatadist._blocking.submitted import Handle, Submissions
from aiodatadist._cache import task as awaitable_task
from aiodatadist._cache.names import Key
from aiodatadist._cache.plan import check_below
from aiodatadist._cache_manager import blocks_to_pull, blocks_to_push
from aiodatadist._concurrency.loop_thread import LoopThread
from aiodatadist._link.control.notifications import check_payload
from aiodatadist._values import checks
from aiodatadist._values.descriptors import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex
from aiodatadist._values.grid import BlockNumbers, indexes
from aiodatadist._values.selection import layers_of
from aiodatadist._values.transfer_config import TransferConfig, TransferWithCacheKeyConfig
from aiodatadist._values.transfer_priority import TransferPriority, check_deadline, check_priority
from aiodatadist.errors import ParamInvalid, TransferTimeout


class CacheManager:
    """The caches and transfers of a cluster, without await: ``LLMDataDist.cache_manager``.

    Usable from any thread but the loop's own. Calls with upstream's names return when everything is done. ``submit_*``
    returns a :class:`Handle` at once, and :meth:`drain` returns the handle once it has ended, with any outcome.
    Arguments that are certainly wrong make ``submit_*`` itself raise, and then nothing was submitted; every other error
    is in the handle.

    Transfers that one thread calls or submits to one peer start in that order. A ``synchronize_layer`` is called in its
    own thread, and may block.
    """

    def __init__(self, thread: LoopThread, inner: awaitable.CacheManager, submissions: Submissions) -> None:
        self._thread = thread
        self._inner = inner
        self._submissions = submissions

    # ---- upstream's calls ----

    allocate_cache: Final = blocking(awaitable.CacheManager.allocate_cache)
    allocate_blocks_cache: Final = blocking(awaitable.CacheManager.allocate_blocks_cache)
    register_cache: Final = blocking(awaitable.CacheManager.register_cache)
    register_blocks_cache: Final = blocking(awaitable.CacheManager.register_blocks_cache)
    deallocate_cache: Final = blocking(awaitable.CacheManager.deallocate_cache)
    deallocate_blocks_cache: Final = blocking(awaitable.CacheManager.deallocate_blocks_cache)
    remove_cache_key: Final = blocking(awaitable.CacheManager.remove_cache_key)
    unregister_cache: Final = blocking(awaitable.CacheManager.unregister_cache)
    pull_cache: Final = moving(awaitable.CacheManager.pull_cache)
    pull_blocks: Final = moving(awaitable.CacheManager.pull_blocks)
    push_cache: Final = moving(awaitable.CacheManager.push_cache)
    push_blocks: Final = moving(awaitable.CacheManager.push_blocks)
    copy_cache: Final = moving(awaitable.CacheManager.copy_cache)
    copy_blocks: Final = moving(awaitable.CacheManager.copy_blocks)
    swap_blocks: Final = moving(awaitable.CacheManager.swap_blocks)
    remap_registered_memory: Final = blocking(awaitable.CacheManager.remap_registered_memory)
    transfer_cache_async: Final = starting(awaitable.CacheManager.transfer_cache_async)
    check_cache_key: Final = staticmethod(awaitable.CacheManager.check_cache_key)

    def set_is_call_linked(self) -> None:
        """Have no effect: kept for compatibility, because memory can be registered at any time here."""

    # ---- ours ----

    arrays: Final = blocking(awaitable.CacheManager.arrays)
    tensors: Final = blocking(awaitable.CacheManager.tensors)
    pool_usage: Final = blocking(awaitable.CacheManager.pool_usage)
    pull_leased: Final = moving(awaitable.CacheManager.pull_leased)
    release_lease: Final = blocking(awaitable.CacheManager.release_lease)

    def lease_blocks(
        self,
        cache: Cache,
        blocks: BlockNumbers,
        timeout: float,
        *,
        name: str | None = None,
        pull_timeout: float | None = None,
        prompt_digest: bytes | None = None,
        for_cluster: int | None = None,
        takers: int = 1,
    ) -> BlockLease:
        """Reserve blocks of a cache for one peer, like :meth:`aiodatadist.CacheManager.lease_blocks`."""

        async def make() -> BlockLease:
            inner = self._inner.lease_blocks(
                cache,
                blocks,
                timeout,
                name=name,
                pull_timeout=pull_timeout,
                prompt_digest=prompt_digest,
                for_cluster=for_cluster,
                takers=takers,
            )
            return BlockLease(self._thread, inner)

        return self._thread.call(make)

    def receive_layers(self, cluster_id: int, cache: Cache, *, tensor_num_per_layer: int = 2) -> LayerReceiver:
        """Return a context in which a cache is watched while a peer's layered transfer fills it.

        Use it as ``with manager.receive_layers(1, cache) as receiver:``. Enter it before the peer's transfer can have
        ended. Entering raises what the awaitable one raises.
        """
        watching = self._inner.receive_layers(cluster_id, cache, tensor_num_per_layer=tensor_num_per_layer)
        return LayerReceiver(self._thread, watching)

    # ---- submitting ----

    @property
    def max_submitted(self) -> int:
        """The most handles that may be submitted and not drained.

        One more raises :class:`~aiodatadist.blocking.QueueFull`.
        """
        return self._submissions.limit

    @max_submitted.setter
    def max_submitted(self, value: int) -> None:
        if checks.integer(value, "max_submitted", checks.UINT32) == 0:
            raise ParamInvalid("max_submitted is 0: at least one handle is needed")
        self._submissions.limit = value

    def submit_pull_blocks(
        self,
        src_cache_key: Key,
        dst_cache: Cache,
        src_blocks: BlockNumbers = (),
        dst_blocks: BlockNumbers = (),
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        notify: bytes | None = None,
        tag: object = None,
        checksum: bool | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> Handle:
        """Submit a ``pull_blocks``. Never waits.

        The lists are copied. ``tag`` is the caller's own, and an attribute of the handle. ``deadline`` is seconds from
        this call.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is certainly wrong. Nothing was submitted.
            QueueFull: if too many handles are not drained. Nothing was submitted.
            LLMException: with ``LLM_ENGINE_FINALIZED`` if the cluster is finalized.
        """
        checks.instance(src_cache_key, "src_cache_key", (BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex))
        sources, targets = blocks_to_pull(src_cache_key, src_blocks, dst_blocks)
        _check_blocks(targets, dst_cache, "dst_cache", "dst_blocks", "destination")
        layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        args = (
            self._inner.pull_blocks, src_cache_key, dst_cache, sources, targets, src_layer_range, dst_layer_range,
            tensor_num_per_layer, notify, checksum, check_priority(priority), _end_of(deadline),
        )  # fmt: skip
        return self._submit("pull_blocks", _start, targets, tag, notify, args)

    def submit_pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        notify: bytes | None = None,
        tag: object = None,
        checksum: bool | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> Handle:
        """Submit a ``pull_cache``, like :meth:`submit_pull_blocks`. The handle's block is ``batch_index``."""
        checks.instance(cache_key, "cache_key", (CacheKey, CacheKeyByIdAndIndex))
        checks.integer(size, "size", checks.INT64)
        _check_slot(cache, "cache", batch_index, "batch_index")
        layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        args = (
            self._inner.pull_cache, cache_key, cache, batch_index, size, src_layer_range, dst_layer_range,
            tensor_num_per_layer, notify, checksum, check_priority(priority), _end_of(deadline),
        )  # fmt: skip
        return self._submit("pull_cache", _start, (batch_index,), tag, notify, args)

    def submit_push_blocks(
        self,
        dst_cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_blocks: BlockNumbers = (),
        dst_blocks: BlockNumbers = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        *,
        notify: bytes | None = None,
        tag: object = None,
        checksum: bool | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> Handle:
        """Submit a ``push_blocks``, like :meth:`submit_pull_blocks`. The handle's blocks are the peer's."""
        checks.instance(dst_cache_key, "dst_cache_key", (BlocksCacheKey, CacheKeyByIdAndIndex))
        sources, targets = blocks_to_push(src_blocks, dst_blocks)
        _check_blocks(sources, src_cache, "src_cache", "src_blocks", "source")
        layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        args = (
            self._inner.push_blocks, dst_cache_key, src_cache, sources, targets, src_layer_range, dst_layer_range,
            tensor_num_per_layer, notify, checksum, check_priority(priority), _end_of(deadline),
        )  # fmt: skip
        return self._submit("push_blocks", _start, targets, tag, notify, args)

    def submit_push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
        *,
        notify: bytes | None = None,
        tag: object = None,
        checksum: bool | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> Handle:
        """Submit a ``push_cache``, like :meth:`submit_pull_blocks`. The handle's block is the peer's slot."""
        checks.instance(dst_cache_key, "dst_cache_key", CacheKeyByIdAndIndex)
        checks.integer(size, "size", checks.INT64)
        _check_slot(src_cache, "src_cache", src_batch_index, "src_batch_index")
        layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        args = (
            self._push_cache, dst_cache_key, src_cache, src_batch_index, size, src_layer_range, dst_layer_range,
            tensor_num_per_layer, notify, checksum, check_priority(priority), _end_of(deadline),
        )  # fmt: skip
        return self._submit("push_cache", _start, (dst_cache_key.batch_index,), tag, notify, args)

    def submit_layers(
        self,
        src_cache: Cache,
        transfer_configs: Sequence[TransferConfig | TransferWithCacheKeyConfig],
        src_block_indices: BlockNumbers | None = None,
        dst_block_indices: BlockNumbers | None = None,
        dst_block_memory_size: int | None = None,
        *,
        tag: object = None,
        tensor_num_per_layer: int = 2,
        checksum: bool | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> LayersHandle:
        """Submit a ``transfer_cache_async`` whose layers the caller declares ready with ``handle.layer_ready(i, event)``.

        Works like :meth:`submit_pull_blocks`. The handle's blocks are the peers'.
        """
        kind = (TransferConfig, TransferWithCacheKeyConfig)
        for i, config in enumerate(checks.sequence(transfer_configs, "transfer_configs", object)):
            checks.instance(config, f"transfer_configs[{i}]", kind)
        tensors = layers_of(None, None, tensor_num_per_layer).tensors_per_layer
        layers = checks.instance(src_cache, "src_cache", Cache).cache_desc.num_tensors // tensors
        sources = None if src_block_indices is None else indexes(src_block_indices, "src_block_indices")
        targets = None if dst_block_indices is None else indexes(dst_block_indices, "dst_block_indices")
        handle = LayersHandle(self._submissions, layers, list(targets or ()), tag)
        urgency, end = check_priority(priority), _end_of(deadline)
        handle.start_with(
            lambda synchronizer: self._inner.transfer_cache_async(
                src_cache, synchronizer, transfer_configs, sources, targets, dst_block_memory_size,
                tensor_num_per_layer=tensors, checksum=checksum, priority=urgency, deadline=_time_left(end),
            )
        )  # fmt: skip
        self._submissions.submit(handle)
        return handle

    def drain(self, max_items: int | None = None) -> list[Handle]:
        """Return handles that have ended since the last call, oldest first, at most ``max_items``. Never waits.

        Each handle is returned once. This also works after the cluster was finalized; then all submitted handles have
        ended.
        """
        return self._submissions.drain(max_items)

    def _push_cache(
        self, key: CacheKeyByIdAndIndex, cache: Cache, slot: int, size: int, **terms: Any
    ) -> awaitable_task.CacheTask:
        """Call ``push_cache`` with its arguments in the order of the other calls."""
        return self._inner.push_cache(key, cache, slot, size=size, **terms)

    def _submit(
        self,
        operation: str,
        start: Callable[..., awaitable_task.CacheTask],
        blocks: Sequence[int],
        tag: object,
        notify: bytes | None,
        args: tuple[Any, ...],
    ) -> Handle:
        if notify is not None:
            check_payload(notify)
        handle = Handle(self._submissions, operation, start, blocks, tag, args)
        self._submissions.submit(handle)
        return handle

    def _watched(self, task: awaitable_task.CacheTask) -> awaitable_task.CacheTask:
        self._submissions.counters.watch(task)
        return task


def _start(
    call: Callable[..., awaitable_task.CacheTask],
    key: Key,
    cache: Cache,
    source: object,
    target: object,
    src_layers: range | None,
    dst_layers: range | None,
    tensors: int,
    notify: bytes | None,
    checksum: bool | None,
    priority: TransferPriority,
    end: _End | None,
) -> awaitable_task.CacheTask:
    """Start the transfer, on the loop."""
    return call(
        key, cache, source, target, src_layer_range=src_layers, dst_layer_range=dst_layers, tensor_num_per_layer=tensors,
        notify=notify, checksum=checksum, priority=priority, deadline=_time_left(end),
    )  # fmt: skip


class _End(NamedTuple):
    """The end of a deadline, and the seconds that it had from the call."""

    at: float
    seconds: float


def _end_of(deadline: float | None) -> _End | None:
    """Return the end of a deadline that starts now. Raises TypeError or ParamInvalid if it is no deadline."""
    seconds = check_deadline(deadline)
    return None if seconds is None else _End(monotonic() + seconds, seconds)


def _time_left(end: _End | None) -> float | None:
    """Return the seconds until the end. Raises TransferTimeout if there are none."""
    if end is None:
        return None
    rest = end.at - monotonic()
    if rest <= 0:
        raise TransferTimeout(f"not begun within the deadline, {end.seconds:g} s from the call")
    return rest


def _pieces(cache: Cache, name: str, blocks: bool) -> int:
    """Return the number of blocks or slots of a cache. Raises TypeError or ParamInvalid if it is not of this kind."""
    if checks.instance(cache, name, Cache).is_blocks_cache is not blocks:
        kind, other = ("blocks", "contiguous") if blocks else ("contiguous", "blocks")
        raise ParamInvalid(f"{name} is a {other} cache: must be a {kind} cache here")
    return cache.cache_desc.shape[0]


def _check_blocks(numbers: array[int], cache: Cache, name: str, numbers_name: str, whose: str) -> None:
    blocks = _pieces(cache, name, True)
    if max(numbers) >= blocks:  # max() keeps the GIL, which the check in C releases
        check_below(numbers, blocks, numbers_name, whose)


def _check_slot(cache: Cache, name: str, batch_index: int, index_name: str) -> None:
    slots = _pieces(cache, name, False)
    if checks.integer(batch_index, index_name, checks.UINT32) >= slots:
        raise ParamInvalid(f"{index_name} is {batch_index}: the cache has {slots} slots")
