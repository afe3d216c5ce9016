"""CacheManager: transfers between this cluster and its peers, on top of the caches that this cluster has."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiodatadist._cache.names import Form, Key
from aiodatadist._cache.plan import check_below, check_once
from aiodatadist._cache.table import Entry
from aiodatadist._cache.task import CacheTask
from aiodatadist._cache_manager.arguments import Terms, blocks_to_pull, blocks_to_push, check_offset, leased_to_pull
from aiodatadist._cache_manager.caches import Caches
from aiodatadist._device import give_way
from aiodatadist._layered import LayeredRequest, LayeredTransfer, check_apart
from aiodatadist._layered.synchronizers import AwaitableLayerSynchronizer, EventLayerSynchronizer, check_synchronizer
from aiodatadist._link import AwaitedLink, BlockLease, KeptBlocks, LayerReceiver, TransferSpec
from aiodatadist._values import checks
from aiodatadist._values.descriptors import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex
from aiodatadist._values.digests import LeaseDigests, check_prompt_digest
from aiodatadist._values.durations import check_seconds
from aiodatadist._values.grid import BlockNumbers, indexes
from aiodatadist._values.lease_ticket import MAX_TICKET_BLOCKS, LeaseTicket, check_lease_name, check_takers
from aiodatadist._values.selection import BlockParts, Selection, layers_of, whole_layers
from aiodatadist._values.transfer_config import TransferConfig, TransferWithCacheKeyConfig
from aiodatadist._values.transfer_priority import TransferPriority, check_deadline, check_priority
from aiodatadist.errors import FeatureNotEnabled, ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._link import Transfers

LEASED_SECONDS = 60.0
"""Seconds that a pull of leased blocks may take, unless its caller sets a limit."""


class CacheManager(Caches):
    """The caches of a cluster, and its transfers. Obtained from ``LLMDataDist.cache_manager``.

    A contiguous cache is cut into batch slots, a blocks cache into blocks. Memory comes from a pool (``allocate_*``),
    or belongs to the caller (``register_*``); the caller's memory must stay in place until :meth:`unregister_cache` has
    returned.

    Calls that move bytes return a :class:`~aiodatadist.CacheTask` that has started. An error that this end can detect
    is raised by the call itself, before anything starts. An error that only the peer can detect is raised by awaiting
    the task.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of cluster {self._engine.cluster_id}>"

    # ---- pulling ----

    def pull_blocks(
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
        checksum: bool | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> CacheTask:
        """Read a peer's blocks into local ones: ``src_blocks[i]`` goes to ``dst_blocks[i]``, in every tensor.

        In one-sided mode the peer's CPU takes no part; in request/response mode the peer writes. The source is blocks,
        named by a :class:`BlocksCacheKey`, or by a :class:`CacheKeyByIdAndIndex` together with ``src_blocks``. Without
        ``src_blocks``, a :class:`CacheKey` or :class:`CacheKeyByIdAndIndex` names a batch slot of a contiguous cache,
        which is cut into one chunk for each of ``dst_blocks``. Blocks can be pulled any number of times.

        Args:
            src_blocks: block numbers at the peer; a block may be named several times.
            dst_blocks: local block numbers, without repetition.
            src_layer_range, dst_layer_range: half-open, step 1; all layers if omitted.
            tensor_num_per_layer: tensors in a layer, if a range is given.
            notify: what the peer's ``notifications()`` yield once everything has landed here; at most 64 KiB.
            checksum: True to compare what arrives with what was sent before the task succeeds, within another
                ``sync_kv_timeout``. If None, ``LLMConfig.transfer_checksum`` decides.
            priority: what goes first on the link; see :class:`~aiodatadist.TransferPriority`.
            deadline: seconds from now, waiting included; then the transfer fails with ``LLM_TIMEOUT``. If None, only
                ``sync_kv_timeout`` applies.

        Returns:
            The transfer, already started. ``sync_kv_timeout`` counts from when it begins to run, and stands still while
                a more urgent transfer runs. If the link broke and is being re-established, and ``LLMConfig.relink`` has
                ``wait``, the transfer first waits that many seconds for the link.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong.
            CacheNotFound: if the local cache is not known.
            NotLinked, PeerLost, LinkClosed: if the cluster is not linked, or no longer.

        Awaiting the task raises:
            CacheNotFound: if the peer has no such cache, slot or key, or no longer.
            ParamInvalid: if the two caches do not fit together.
            TransferTimeout, PeerLost, LinkClosed, ...: if the transfer failed.
            DataCorrupted: with ``checksum``, if bytes changed in transit. It names all damaged blocks.

        If the call raises, nothing was started. While the transfer runs, and after failure or cancellation, the
        contents of the destination blocks are undefined; all other blocks are untouched.
        """
        form = "pull_blocks", src_layer_range, dst_layer_range, tensor_num_per_layer
        task = self._short_way.transfer(
            form, src_cache_key, dst_cache, dst_blocks, src_blocks, notify, checksum, priority, deadline
        )
        if task is not None:
            return task
        checks.instance(src_cache_key, "src_cache_key", (BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex))
        entry = self._destination(dst_cache, "dst_cache")
        if not entry.blocks:
            raise ParamInvalid("dst_cache is a contiguous cache: pull_blocks fills blocks, use pull_cache")
        sources, targets = blocks_to_pull(src_cache_key, src_blocks, dst_blocks)
        check_below(targets, entry.pieces, "dst_blocks", "destination")
        layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        layers.of_target(entry)

        terms = Terms(notify, checksum, priority, deadline)
        return self._pull(form, src_cache_key, entry, Selection(layers, sources, targets), terms)

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        src_cache_offset: int | None = None,
        dst_cache_offset: int | None = None,
        notify: bytes | None = None,
        checksum: bool | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> CacheTask:
        """Read a batch slot of a peer's contiguous cache into a slot of a local one, in every tensor.

        In request/response mode, pulling by a request's key consumes the key. Once every tensor of an allocated slot
        has been pulled by it, even if ``size`` was only a part of the slot, the key is removed, and the memory is
        released with its last reference. In one-sided mode keys are not consumed.

        Args:
            batch_index: the local slot.
            size: bytes of each tensor, from the offset in the slot; -1 is all that the local slot has from there.
            src_cache_offset, dst_cache_offset: bytes to skip at the start of the peer's slot and of the local one. If
                either is given, even as 0, no key is consumed.

        For layers, notification, checksum, priority, deadline, return value, errors, failure and cancellation see
        :meth:`pull_blocks`.
        """
        form = (
            "pull_cache", src_layer_range, dst_layer_range, tensor_num_per_layer, size, src_cache_offset, dst_cache_offset
        )  # fmt: skip
        task = self._short_way.transfer(form, cache_key, cache, batch_index, None, notify, checksum, priority, deadline)
        if task is not None:
            return task
        checks.instance(cache_key, "cache_key", (CacheKey, CacheKeyByIdAndIndex))
        entry = self._destination(cache, "cache")
        checks.integer(batch_index, "batch_index", checks.UINT32)
        if checks.integer(size, "size", checks.INT64) != -1 and size <= 0:
            raise ParamInvalid(f"size is {size}: must be -1 or above 0")
        if entry.blocks:
            raise ParamInvalid("cache is a blocks cache: pull_cache fills a batch slot, use pull_blocks")
        src_offset, dst_offset = check_offset(src_cache_offset, "src_"), check_offset(dst_cache_offset, "dst_")
        nbytes = entry.stride - dst_offset if size == -1 else size
        if batch_index >= entry.pieces or nbytes <= 0 or nbytes > entry.stride - dst_offset:
            where = f" from {dst_offset}" if dst_offset else ""
            raise ParamInvalid(
                f"{nbytes} bytes{where} of slot {batch_index}: the cache has {entry.pieces} slots of {entry.stride} bytes"
            )
        layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        layers.of_target(entry)

        offsets = None if src_cache_offset is None and dst_cache_offset is None else (src_offset, dst_offset)
        selection = Selection(layers, dst_slot=batch_index, nbytes=nbytes, offsets=offsets)
        return self._pull(form, cache_key, entry, selection, Terms(notify, checksum, priority, deadline))

    def _pull(self, form: Form, key: Key, entry: Entry, selection: Selection, terms: Terms) -> CacheTask:
        link, engine = self._link_or_wait(key), self._engine
        is_checked = engine.transfer_checksum if terms.checksum is None else self._is_checked(terms.checksum)
        is_request, priority = not engine.one_sided, check_priority(terms.priority)
        spec = TransferSpec(entry, key, selection, "get", engine.timeout, is_request, is_checked, priority, form)
        return self._start(form[0], link, spec, terms)

    # ---- blocks that are kept for a peer ----

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
        """Keep blocks of a cache for one peer, which gets the lease's ticket and calls :meth:`pull_leased`.

        The lease ends when a peer has the blocks; when the peer does not want them (it cancels its pull, or calls
        :meth:`release_lease`); when the link to the peer that was pulling ends; or after the timeout, but not before a
        pull that is under way. In the meantime only the caller can keep the blocks from being overwritten.
        :meth:`BlockLease.wait_ended` or a callback tells the caller of the end.

        A pull is refused unless its ticket names these blocks of this cache. The lease then continues, for the peer
        that has the true ticket. A peer whose version is too old to name its blocks is accepted with one warning in the
        log, unless there is a ``prompt_digest``.

        Args:
            blocks: block numbers, at most 65536.
            timeout: seconds that a peer has to begin.
            name: 32 hexadecimal digits, for a caller that has written the ticket before; generated if omitted.
            pull_timeout: seconds that a pull has once it has begun, whatever limit its peer sets. A pull that takes
                longer fails there, and the blocks are given up 5 seconds later. If omitted, a minute, or twice
                ``sync_kv_timeout`` if that is more.
            prompt_digest: of the tokens that the blocks hold, as :func:`aiodatadist.prompt_digest` returns it. A pull
                with another one, or none, is refused.
            for_cluster: the only cluster that may claim the lease, or release it. If omitted, each peer may.
            takers: the number of requests that may take the blocks. If there are several, one that does not want them
                or is lost ends nothing. The ``takers`` of their pulls must be a multiple.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong, or there is a lease of this name.
            CacheNotFound: if the cache is not known.
        """
        entry = self._local(cache, "cache")
        if not entry.blocks:
            raise ParamInvalid("cache is a contiguous cache: lease_blocks keeps blocks")
        numbers = indexes(blocks, "blocks")
        if not numbers:
            raise ParamInvalid("blocks is empty: there is nothing to keep")
        if len(numbers) > MAX_TICKET_BLOCKS:
            raise ParamInvalid(f"blocks has {len(numbers)} numbers: a lease keeps at most {MAX_TICKET_BLOCKS}")
        check_below(numbers, entry.pieces, "blocks", "cache")
        seconds = check_seconds(timeout, "timeout")
        limit = self._pull_seconds() if pull_timeout is None else check_seconds(pull_timeout, "pull_timeout")
        self._engine.check_here()
        self._engine.check_running()
        engine = self._engine
        check_prompt_digest(prompt_digest)
        if for_cluster is not None:
            checks.integer(for_cluster, "for_cluster", checks.UINT64)
        check_takers(takers)
        return engine.block_leases.open(
            engine.cluster_id,
            entry,
            numbers,
            seconds,
            limit,
            check_lease_name(name),
            prompt_digest,
            for_cluster,
            takers,
        )

    def _pull_seconds(self) -> float:
        """Return the time limit of a pull of leased blocks, if its caller sets none."""
        return max(LEASED_SECONDS, 2 * self._engine.timeout)

    def pull_leased(
        self,
        ticket: LeaseTicket | Mapping[str, Any],
        dst_cache: Cache,
        dst_blocks: BlockNumbers,
        *,
        first: int = 0,
        parts: BlockParts | Callable[[], BlockParts] | None = None,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        takers: int = 1,
        patience: float = 0.0,
        checksum: bool | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
        prompt_digest: bytes | None = None,
    ) -> CacheTask:
        """Read blocks that a peer keeps: ``ticket.blocks[first + i]`` goes to ``dst_blocks[i]``, in every tensor.

        If the task succeeds, the owner kept the blocks until the last byte had landed, and is told that it can release
        them. If the task is cancelled, the owner is told that the blocks are not wanted. After a failure the owner
        keeps them as before, for another attempt or :meth:`release_lease`. The error's ``landed_blocks`` is the number
        of destination blocks, from the first, that have landed all the same, in portions of 64 MiB.

        The ticket is not trusted, because routers and clients may have changed it. The owner compares all its blocks
        with those of the lease, including those that ``first`` leaves out. If they differ, the task fails with
        :class:`~aiodatadist.LeaseMismatch`, none of the destination's blocks may be used, and the lease continues.

        Args:
            first: the number of blocks to leave out at the beginning, because this end has them.
            parts: which parts of ``ticket.blocks[first:]`` go to which parts of ``dst_blocks``, if the blocks of the
                two caches differ in size; ``dst_blocks`` can then have any length. A function that returns them is
                called once the owner has confirmed the claim.
            takers: the number of pulls, of this cluster and of others, that share the blocks. All must pass the same
                number. The blocks are kept until all pulls have them, or one does not want them.
            patience: seconds for which the owner waits for a lease that it does not know yet.
            checksum: as in :meth:`pull_blocks`, for each portion. ``landed_blocks`` counts no damaged block.
            priority: as in :meth:`pull_blocks`.
            deadline: seconds from now for the whole pull; if None, a minute, or twice ``sync_kv_timeout`` if that is
                more. The owner has its own limit (``lease_blocks(pull_timeout=)``): the smaller one counts.
            prompt_digest: of the tokens for which the caller wants the blocks, as :func:`aiodatadist.prompt_digest`
                returns it. The owner must have been given the same one.

        Raises:
            FeatureNotEnabled: if the peer's version cannot compare a ``prompt_digest``.

        For other errors see :meth:`pull_blocks`. Awaiting the task also raises CacheNotFound if the owner does not keep
        the blocks, or no longer, or if another peer pulls them; and LeaseMismatch, a CacheNotFound, if the lease has
        other blocks or another prompt.
        """
        kept = LeaseTicket.of(ticket)
        entry = self._destination(dst_cache, "dst_cache")
        if not entry.blocks:
            raise ParamInvalid("dst_cache is a contiguous cache: pull_leased fills blocks")
        if not 0 <= checks.integer(first, "first", checks.INT64) < len(kept.blocks):
            raise ParamInvalid(f"first is {first}: the ticket has {len(kept.blocks)} blocks")
        wanted = indexes(dst_blocks, "dst_blocks")
        if parts is None:
            sources, targets = leased_to_pull(kept, first, wanted)
        else:
            sources, targets = indexes(kept.blocks[first:], "blocks"), wanted
            check_once(targets, "dst_blocks")
        later, now = (parts, None) if callable(parts) else (None, parts)
        if now is not None:
            check_once(array("Q", checks.instance(now, "parts", BlockParts).dst), "parts.dst")
        check_below(targets, entry.pieces, "dst_blocks", "destination")
        check_takers(takers)
        layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        layers.of_target(entry)
        engine, link = self._engine, self._link_or_wait(kept.key)
        seconds = check_deadline(deadline) or self._pull_seconds()
        patience = check_seconds(patience, "patience", may_be_zero=True)
        selection = Selection(layers, sources, targets, parts=now)
        is_checked = self._is_checked(checksum)
        is_request, priority = not engine.one_sided, check_priority(priority)
        spec = TransferSpec(entry, kept.key, selection, "get", engine.timeout, is_request, is_checked, priority)
        digests = LeaseDigests.of(kept.cache_id, kept.blocks, check_prompt_digest(prompt_digest))
        pull = link.start_leased(spec, KeptBlocks(kept.lease, digests, patience, takers, later), seconds, "pull_leased")
        return self._task("pull_leased", link.cluster_id, pull, spec)

    async def release_lease(
        self, ticket: LeaseTicket | Mapping[str, Any], *, prompt_digest: bytes | None = None
    ) -> None:
        """Tell the owner that its blocks are not wanted.

        The lease ends only if the ticket names its blocks, and ``prompt_digest`` is the one that the owner has.
        Otherwise nothing happens. A pull of this end that is under way is left alone: cancel it instead.

        Raises:
            TypeError, ValueError, ParamInvalid: if it is not a ticket, or not a digest.
            NotLinked, PeerLost, LinkClosed: if the owner is not linked, or no longer.
        """
        kept = LeaseTicket.of(ticket)
        digests = LeaseDigests.of(kept.cache_id, kept.blocks, check_prompt_digest(prompt_digest))
        self._transfers(kept.key).session.release_lease(kept.lease, digests)
        await give_way()

    # ---- pushing ----

    def push_blocks(
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
        checksum: bool | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> CacheTask:
        """Write local blocks into a peer's: ``src_blocks[i]`` goes to ``dst_blocks[i]``, in every tensor of the layers.

        One-sided mode only: the peer's CPU takes no part. Layers are written in ascending order; ranges are half-open
        and of the same length, all layers if omitted. For LLM-DataDist's C++ ``PushKvBlocks``, which names the peer's cache
        by id, use a :class:`CacheKeyByIdAndIndex` with batch index 0 and ``range(first, last + 1)``.

        Args:
            notify: what the peer's ``notifications()`` yield once everything has landed there; at most 64 KiB.
            checksum: as in :meth:`pull_blocks`; the blocks of a :class:`~aiodatadist.errors.DataCorrupted` are the
                peer's.
            priority, deadline: as in :meth:`pull_blocks`.

        Returns:
            The transfer, already started. It has ``sync_kv_timeout`` for each layer. The time counts from when the
                transfer begins to run, and stands still while a more urgent transfer runs.

        Raises:
            FeatureNotEnabled: if this is request/response mode.

        For other errors see :meth:`pull_blocks`. After failure or cancellation, some of the peer's blocks may have been
        written.
        """
        form = "push_blocks", src_layer_range, dst_layer_range, tensor_num_per_layer
        task = self._short_way.transfer(
            form, dst_cache_key, src_cache, src_blocks, dst_blocks, notify, checksum, priority, deadline
        )
        if task is not None:
            return task
        checks.instance(dst_cache_key, "dst_cache_key", (BlocksCacheKey, CacheKeyByIdAndIndex))
        entry = self._pushable(src_cache)
        if not entry.blocks:
            raise ParamInvalid("src_cache is a contiguous cache: push_blocks takes blocks, use push_cache")
        sources, targets = blocks_to_push(src_blocks, dst_blocks)
        check_below(sources, entry.pieces, "src_blocks", "source")
        layers = whole_layers(entry, src_layer_range, dst_layer_range, tensor_num_per_layer)

        terms = Terms(notify, checksum, priority, deadline)
        return self._push(form, dst_cache_key, entry, Selection(layers, sources, targets), terms)

    def push_cache(
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
        checksum: bool | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> CacheTask:
        """Write a batch slot of a local contiguous cache into a slot of a peer's, in every tensor of the layers.

        Args:
            size: must be -1, a whole slot of the source. The slot must fit into the destination's.

        For the rest see :meth:`push_blocks`.
        """
        form = "push_cache", src_layer_range, dst_layer_range, tensor_num_per_layer, size
        task = self._short_way.transfer(
            form, dst_cache_key, src_cache, src_batch_index, None, notify, checksum, priority, deadline
        )
        if task is not None:
            return task
        checks.instance(dst_cache_key, "dst_cache_key", CacheKeyByIdAndIndex)
        entry = self._pushable(src_cache)
        checks.integer(src_batch_index, "src_batch_index", checks.UINT32)
        if checks.integer(size, "size", checks.INT64) != -1:
            raise ParamInvalid(f"size is {size}: must be -1")
        if entry.blocks:
            raise ParamInvalid("src_cache is a blocks cache: push_cache takes a batch slot, use push_blocks")
        if src_batch_index >= entry.pieces:
            raise ParamInvalid(f"src_batch_index is {src_batch_index}: the cache has {entry.pieces} slots")
        layers = whole_layers(entry, src_layer_range, dst_layer_range, tensor_num_per_layer)

        selection = Selection(layers, src_slot=src_batch_index, nbytes=entry.stride)
        return self._push(form, dst_cache_key, entry, selection, Terms(notify, checksum, priority, deadline))

    def _pushable(self, cache: Cache) -> Entry:
        if not self._engine.one_sided:
            raise FeatureNotEnabled(
                "push_* needs the one-sided mode", hint="set enable_remote_cache_accessible=True at both ends"
            )
        return self._local(cache, "src_cache")

    def _push(self, form: Form, key: Key, entry: Entry, selection: Selection, terms: Terms) -> CacheTask:
        link, layers = self._link_or_wait(key), selection.layers
        seconds = self._engine.timeout * max(1, len(layers.of_source(entry)) // layers.tensors_per_layer)
        is_checked, priority = self._is_checked(terms.checksum), check_priority(terms.priority)
        spec = TransferSpec(entry, key, selection, "put", seconds, False, is_checked, priority, form)
        return self._start(form[0], link, spec, terms)

    def _start(self, what: str, link: Transfers | AwaitedLink, spec: TransferSpec, terms: Terms) -> CacheTask:
        seconds = None if terms.deadline is None else check_deadline(terms.deadline)
        transfer = link.begin(spec, what, terms.notify)
        if seconds is not None:
            self._limit(transfer, seconds)
        return self._task(what, spec.key.cluster_id, transfer, spec)

    # ---- layer by layer ----

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: Any,
        transfer_configs: Sequence[TransferConfig | TransferWithCacheKeyConfig],
        src_block_indices: BlockNumbers | None = None,
        dst_block_indices: BlockNumbers | None = None,
        dst_block_memory_size: int | None = None,
        *,
        tensor_num_per_layer: int = 2,
        checksum: bool | None = None,
        priority: TransferPriority = TransferPriority.NORMAL,
        deadline: float | None = None,
    ) -> CacheTask:
        """Write a cache to one or more peers, each layer as soon as it is ready.

        Args:
            layer_synchronizer: any object with ``synchronize_layer(layer_index, timeout_in_millis)``: see
                :class:`~aiodatadist.LayerSynchronizer`. With an :class:`~aiodatadist.EventLayerSynchronizer` the device
                itself waits.
            transfer_configs: the destinations: :class:`TransferWithCacheKeyConfig` in one-sided mode,
                :class:`TransferConfig` (addresses) in request/response mode. Each has its own result, and one that
                fails does not stop the others.
            src_block_indices, dst_block_indices: for a blocks source; of the same length, and the same for all
                destinations. If both are omitted, one stride of the source travels, which is block 0. With a contiguous
                source and destination blocks, the slot is cut into chunks of ``dst_block_memory_size``.
            tensor_num_per_layer: tensors in a layer: 1 if keys and values are packed.
            checksum: as in :meth:`pull_blocks`, layer by layer: a layer counts as landed, here and for the peer's
                ``receive_layers``, once it equals what was sent. Keep the source unchanged until the transfer has
                ended.
            priority: as in :meth:`pull_blocks`. Layers that wait for the device do not hold up more urgent transfers.
            deadline: as in :meth:`pull_blocks`, for all destinations; those that have ended by then have succeeded.

        Returns:
            The transfer, already started: await it for everything, or use ``async for done in task.progress()``. Each
                portion has ``sync_kv_timeout`` for each of its layers, from when it begins to run. A destination whose
                link broke and is being re-established first waits for the link, as :meth:`pull_blocks` does, and sends what
                the source holds then; the other destinations continue. While it waits, it leases the source, and
                nothing of the peer's.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong. Nothing was started.
            CacheNotFound: if the source is not known.
            NotLinked, PeerLost, LinkClosed: if a destination is not linked.
            FeatureNotEnabled: with ``checksum``, if a peer does not know checksums.

        Awaiting the task raises the first destination's error; ``get_results()`` has the status of each.
        ``LLM_PARAM_INVALID``: the synchronizer gave a layer up. ``LLM_FAILED``: it raised; or, with ``checksum``, a
        layer is not what was sent (DataCorrupted, which names the layer). None: the transfer was cancelled. A
        destination that waited for its link gets NotLinked if the link came too late, and CacheNotFound if the
        destination is given by addresses and another process than before answers to its name.
        After failure and cancellation no byte lands any longer, and the contents of the destinations are undefined.
        """
        entry = self._local(src_cache, "src_cache")
        request = LayeredRequest.of(
            entry, src_block_indices, dst_block_indices, dst_block_memory_size, tensor_num_per_layer
        )
        check_synchronizer(layer_synchronizer)
        kind: type[Any] = TransferWithCacheKeyConfig if self._engine.one_sided else TransferConfig
        configs = checks.sequence(transfer_configs, "transfer_configs", kind)
        if not configs:
            raise ParamInvalid("transfer_configs is empty: there is nothing to transfer")
        wanted = [request.wanted(config, self._link_or_wait) for config in configs]
        check_apart(wanted)
        needed = max(each.layers.stop for each in wanted)
        ours = isinstance(layer_synchronizer, (AwaitableLayerSynchronizer, EventLayerSynchronizer))
        if ours and layer_synchronizer.num_layers < needed:
            raise ParamInvalid(
                f"layer_synchronizer has {layer_synchronizer.num_layers} layers: must have at least {needed}"
            )
        seconds, priority = check_deadline(deadline), check_priority(priority)
        is_checked = self._is_checked(checksum)
        if is_checked:
            for each in wanted:
                if not isinstance(each.link, AwaitedLink):
                    each.link.requester.checks.want_peer()
        transfer = LayeredTransfer(
            entry, layer_synchronizer, wanted, self._engine.timeout, priority, checksum=is_checked
        )
        self._engine.start_layered(transfer)
        self._limit(transfer, seconds)
        return self._task("transfer_cache_async", wanted[0].link.cluster_id, transfer, wanted[0])

    @asynccontextmanager
    async def receive_layers(
        self, cluster_id: int, cache: Cache, *, tensor_num_per_layer: int = 2
    ) -> AsyncIterator[LayerReceiver]:
        """Watch a local cache being filled layer by layer by a peer's ``transfer_cache_async``.

        The context is entered once the peer knows that the cache is watched. Transfers that begin from then on are
        reported completely; what landed before is not reported::

            async with manager.receive_layers(1, cache) as receiver:
                ...                           # ask the peer to begin
                await receiver.layer(0)       # its tensors are complete

        Raises:
            NotLinked, PeerLost, LinkClosed: if there is no link, or it ended before the peer answered.
            ParamInvalid: if this cache is being watched already, takes no part in transfers with peers, or the peer
                may not write into it.
        """
        tensors = layers_of(None, None, tensor_num_per_layer).tensors_per_layer
        entry = self._local(cache, "cache")
        link = self._engine.links.find(checks.integer(cluster_id, "cluster_id", checks.UINT64))
        link.session.check_ready()
        link.session.check_writer(entry, "it has no layers to report")
        receiver = link.session.layer_events.watch(entry.cache_id, len(entry.addresses), tensors)
        try:
            await link.session.announce(receiver)
            yield receiver
        finally:
            link.session.layer_events.unwatch(entry.cache_id)
