"""Layered transfer: a future made of futures. Prefill computes the next layer while the last one travels."""

from __future__ import annotations

import asyncio
import inspect
import logging
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from aiodatadist import checks
from aiodatadist.cache.catalogue import RemoteCache
from aiodatadist.cache.names import AddressKey, Key
from aiodatadist.cache.plan import Geometry, Layers, blocks_to_blocks, check_below, slot_to_blocks, slot_to_slot
from aiodatadist.cache.table import Entry
from aiodatadist.descriptors import Placement
from aiodatadist.device import Gate, Layering, Outcome, Program, Transfer, TransferState
from aiodatadist.errors import (
    CacheNotFound,
    InternalError,
    LinkClosed,
    LinkError,
    LLMException,
    ParamInvalid,
    TransferError,
)
from aiodatadist.layout import Grid, indexes
from aiodatadist.overlap import group_size
from aiodatadist.synchronizers import AwaitableLayerSynchronizer, EventLayerSynchronizer
from aiodatadist.transfer_config import TransferConfig, TransferWithCacheKeyConfig

if TYPE_CHECKING:
    from aiodatadist.link import Link

logger = logging.getLogger(__name__)

TENSORS = 2
"""In a layer: K and V."""
AHEAD = 2
"""Portions of one destination on its stream at a time; layers that become ready meanwhile travel together."""
STREAM = "layers"


@dataclass(frozen=True, slots=True)
class LayerDone:
    """One layer is at one destination.

    Attributes:
        config_index: the destination's place in ``transfer_configs``.
        cluster_id: the peer.
        layer_index: of the source.
        seconds: since the transfer was asked for.
    """

    config_index: int
    cluster_id: int
    layer_index: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """One destination, as far as this end knows.

    Attributes:
        layers: of the source.
        first: destination layer of the first of them; None: the one that the key's address lies in.
        plan: all layers' ranges at once, once the peer's cache is known; raises LLMException when they do not fit.
    """

    link: Link
    key: Key
    layers: range
    first: int | None
    plan: Callable[[RemoteCache, int], Grid]


class Part:
    """One destination under way. Layers go out in order, in portions; one failure ends it, and it alone."""

    def __init__(
        self,
        index: int,
        wanted: Wanted,
        entry: Entry,
        synchronizer: object,
        seconds: float,
        news: Callable[[Part], None],
    ) -> None:
        self.index = index
        self._device_event = getattr(synchronizer, "device_event", None)  # see GatedByEvent
        self.link = wanted.link
        self.layers = wanted.layers
        self.state = TransferState.PENDING
        self.error: LLMException | None = None
        self.landed = 0
        self.told = 0
        self.nbytes = 0
        self.ranges = 0
        self.transfer_seconds = 0.0
        self._wanted = wanted
        self._entry = entry
        self._seconds = seconds
        self._news = news
        self._remote: RemoteCache | None = None
        self._grid: Grid | None = None
        self.group = 1
        self._base = 0
        self._ready = 0
        self._sent = 0
        self._transfers: dict[Transfer, int] = {}
        self._layering: Layering | None = None
        self._is_watched = False

    @property
    def is_open(self) -> bool:
        return self.state is TransferState.PENDING

    @property
    def cluster_id(self) -> int:
        return self.link.cluster_id

    def prepare_at_once(self) -> bool:
        """Whether the destination is known and within reach. What goes wrong ends this part."""
        known = self.link.within_reach(self._entry, self._wanted.key)
        if known is not None:
            remote, slot, _ = known
            try:
                self._begin(remote, self._plan(remote, slot))
            except LLMException as error:
                self.fail(error)
        return known is not None

    async def prepare(self) -> None:
        """Find the destination, and how to reach it. What goes wrong ends this part."""
        errands, wanted = self.link.errands, self._wanted
        try:
            remote, _, grid = await self.link.while_it_lasts(
                lambda: errands.locate(self._entry, wanted.key, self._plan, self._seconds)
            )
            self._begin(remote, grid)
        except LLMException as error:
            self.fail(error)

    def _plan(self, remote: RemoteCache, slot: int) -> Grid:
        self._base = _first_layer(self._wanted, remote)
        self._remote = remote  # who watches it hears also that it does not fit
        return self._wanted.plan(remote, slot)

    def _begin(self, remote: RemoteCache, grid: Grid) -> None:
        self._grid = grid.mirrored()
        if self.is_open:
            self.link.arrivals.begin(self, remote.cache_id)

    @property
    def total(self) -> int:
        """Bytes of all its layers."""
        return self._grid.total if self._grid is not None else 0

    def choose_group(self, compute: float | None) -> None:
        """How many layers to send at a time, as far as was measured on this link."""
        self.group = group_size(len(self.layers), self.total, compute, self.link.estimate.costs)

    # ---- sending ----

    def offer(self, layer: int) -> None:
        """This layer is ready, and all wanted ones before it."""
        if self.is_open:
            self._ready = layer - self.layers.start + 1
            self._send()

    @property
    def unready(self) -> range:
        """Layers that nobody has offered so far."""
        return self.layers[self._ready :]

    def _send(self) -> None:
        waiting = self._ready - self._sent
        is_last = self._ready == len(self.layers)
        if not waiting or len(self._transfers) >= AHEAD or (waiting < self.group and not is_last):
            return
        first, self._sent = self._sent, self._ready
        started = perf_counter()
        try:
            self._launch(first, self._ready)
        except LLMException as error:
            self.fail(error)
        self.link.estimate.add_interference(perf_counter() - started)

    def _launch(self, first: int, stop: int) -> None:
        way, remote, grid = self._usable()
        program = Program()
        if self._device_event is not None:
            program.wait_number(self._device_event(self.layers.start + stop - 1))
        way.channel.add_put(program, _layers_of(grid, first, stop))
        transfer = self.link.launch(program, "put", way, self._entry, remote, self._seconds * (stop - first), STREAM)
        self._transfers[transfer] = stop
        transfer.add_done_callback(self._ended)

    def _usable(self) -> tuple[Any, RemoteCache, Grid]:
        self.link.check_ready()
        remote, grid = self._remote, self._grid
        if remote is None or grid is None or remote.is_withdrawn:
            raise CacheNotFound("the peer took the destination back while it was being filled")
        way = self.link.ways.find(self._entry.epoch, remote.epoch)
        if way is None:
            raise InternalError("the channel got older")
        return way, remote, grid

    def launch_gated(self, gate: Gate, seconds: float) -> None:
        """All layers as one program, which the device holds at each gate."""
        try:
            way, remote, grid = self._usable()
            program, count = Program(), len(self.layers)
            self._layering = Layering(count, TENSORS, self.group, gate.notifies)
            way.channel.add_put(program, grid, self._layering)
            limit = seconds + self._seconds * self.group
            transfer = self.link.launch(program, "put", way, self._entry, remote, limit, STREAM)
        except LLMException as error:
            self.fail(error)
            return
        self._sent = count
        self._transfers[transfer] = count
        if self._is_watched or self.link.arrivals.is_watched(remote.cache_id):
            self.watch()
        transfer.add_done_callback(self._ended)

    def watch(self) -> None:
        """From now on each layer is news when it lands, not only the last."""
        self._is_watched = True
        if self._layering is not None:
            for transfer in self._transfers:
                self._arrived(transfer.watch(self._arrived))

    def landed_at(self, layer: int, heard: float) -> float:
        """When a layer, counted from our first, was known to have landed; ``heard``: when the loop was told."""
        return heard if self._layering is None else self._layering.landed_ns[layer] / 1e9

    # ---- what becomes of it ----

    def _ended(self, transfer: Transfer) -> None:
        stop = self._transfers.pop(transfer)
        self.nbytes += transfer.nbytes
        self.ranges += transfer.ranges
        self.transfer_seconds += transfer.transfer_seconds
        if transfer.state is TransferState.DONE:
            self._arrived(stop)
            if self.is_open:
                self._send()
        else:
            self._close(transfer.state, transfer.error)
        self._news(self)

    def _arrived(self, landed: int) -> None:
        if (
            landed <= self.landed or self._remote is None or not self.is_open
        ):  # a portion behind one that failed says nothing
            return
        first, self.landed = self.landed, landed
        self.link.arrivals.tell(self._remote.cache_id, self._base + first, self._base + landed)
        self._news(self)
        if landed == len(self.layers):
            self._close(TransferState.DONE, None)

    def on_watched(self) -> list[tuple[int, int]]:
        self.watch()
        return [(self._base, self._base + self.landed)] if self.landed else []

    def on_link_ended(self, failure: LinkError) -> None:
        """What is on the device already may end well; the rest cannot be sent."""
        if self._sent < len(self.layers):
            self.fail(failure)

    def fail(self, error: LLMException) -> None:
        """It cannot go on. What is on the device is stopped."""
        own = type(error)(*error.args, status_code=error.status_code, hint=error.hint)  # others may fail with the same
        own.__cause__ = error.__cause__
        self._close(TransferState.FAILED, own)

    def cancel(self) -> None:
        self._close(TransferState.CANCELLED, None)

    def _close(self, state: TransferState, error: LLMException | None) -> None:
        if not self.is_open:
            return
        self.state, self.error = state, error
        if error is not None:
            error.peer = self.cluster_id
            logger.warning("layered transfer to cluster %d: %s", self.cluster_id, error)
        if self._remote is not None:
            self.link.arrivals.finish(self)
            if state is not TransferState.DONE:
                failure = error or TransferError("the transfer was cancelled")
                self.link.arrivals.tell(self._remote.cache_id, 0, 0, failure)
        if state is not TransferState.DONE:  # else all has landed, and the device says so in a moment
            for transfer in list(self._transfers):
                transfer.cancel()
        self._news(self)

    @property
    def is_quiet(self) -> bool:
        """It ended, and the device let go."""
        return not self.is_open and not self._transfers


class LayeredTransfer(Outcome):
    """All destinations of one ``transfer_cache_async``. It ends when all have; one that fails does not concern the others."""

    __slots__ = ("_changed", "_entry", "_gates", "_has_task", "_landed", "_scope", "_started",
                 "_synchronizer", "parts", "ready_seconds")  # fmt: skip

    def __init__(self, entry: Entry, synchronizer: object, wanted: Sequence[Wanted], seconds: float) -> None:
        super().__init__()
        self._entry = entry
        self._synchronizer = synchronizer
        self._scope = anyio.CancelScope()
        self._changed: anyio.Event | None = None
        self._started = perf_counter()
        self._gates: list[tuple[Part, Gate]] = []
        self._has_task = False
        self._landed: list[tuple[Part, int, int, float]] = []  # some layers of a part: first, stop, when we heard of it
        self.ready_seconds: dict[int, float] = {}
        self.parts = [Part(i, each, entry, synchronizer, seconds, self._news) for i, each in enumerate(wanted)]
        entry.lease()

    @property
    def quiesce_seconds(self) -> float:
        return 6.0

    def _cancel(self) -> bool:
        self._scope.cancel()
        for part in self.parts:
            part.cancel()
        return True

    def _what(self) -> str:
        return f"layered transfer of cache {self._entry.cache_id}"

    def _let_go(self) -> None:
        pass

    # ---- the beginning ----

    def start(self, spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], object]) -> None:
        """Begin at once, if all destinations are known and nobody has to wait for layers. Else a task does the waiting."""
        unknown = [part for part in self.parts if not part.prepare_at_once()]
        if unknown or not self._tells:
            self._has_task = True
            spawn(lambda: self._run(unknown))
        else:
            self._begin()
            self._check_end()

    @property
    def _tells(self) -> bool:
        """Nobody has to wait for the layers."""
        synchronizer = self._synchronizer
        if isinstance(synchronizer, AwaitableLayerSynchronizer):
            return synchronizer.is_plain
        return isinstance(synchronizer, EventLayerSynchronizer)

    async def _run(self, unknown: Sequence[Part]) -> None:
        """In a task of the engine's: find the destinations, then wait for the layers, where that takes somebody."""
        try:
            with self._scope:
                async with anyio.create_task_group() as group:
                    for part in unknown:
                        group.start_soon(part.prepare)
                self._begin()
                if not self._tells:
                    await self._walk()
        except Exception as error:
            logger.exception("%s failed", self._what())
            self.fail(InternalError(repr(error)))
        finally:
            self._has_task = False
            self._check_end()

    def _begin(self) -> None:
        """All destinations are known, or have failed."""
        for part in self.parts:
            part.choose_group(self._entry.compute_seconds)
        synchronizer = self._synchronizer
        if isinstance(synchronizer, EventLayerSynchronizer):
            self._launch_gated(synchronizer)
        elif isinstance(synchronizer, AwaitableLayerSynchronizer) and synchronizer.is_plain:
            synchronizer.listen(self._offer_ready)
            self._offer_ready()

    def results(self) -> list[tuple[TransferState, LLMException | None]]:
        return [(part.state, part.error) for part in self.parts]

    # ---- layers become ready ----

    def _launch_gated(self, synchronizer: EventLayerSynchronizer) -> None:
        for part in self.parts:
            if part.is_open:
                try:
                    gate = synchronizer.gate(part.layers)
                except LLMException as error:
                    part.fail(error)
                    continue
                self._gates.append((part, gate))
                part.launch_gated(gate, synchronizer.seconds)

    def _offer_ready(self) -> None:
        """The synchronizer said something: every destination takes what it can have, in order."""
        for part in self.parts:
            for layer in part.unready if part.is_open else ():
                said = self._synchronizer.said(layer)  # type: ignore[attr-defined]
                if said is None:
                    break
                self._got_ready(layer)
                if not said:
                    part.fail(_given_up(layer))
                    break
                part.offer(layer)

    def _got_ready(self, layer: int) -> None:
        self.ready_seconds.setdefault(layer, perf_counter() - self._started)

    async def _walk(self) -> None:
        """Layer by layer, in ascending order, those that somebody wants."""
        limiter = anyio.CapacityLimiter(1)  # a function that blocks holds up its own transfer only
        for layer in sorted({layer for part in self.parts for layer in part.layers}):
            wanting = [part for part in self.parts if part.is_open and layer in part.layers]
            if wanting:
                error = await self._synchronize(layer, limiter)
                self._got_ready(layer)
                for part in wanting:
                    if error is None:
                        part.offer(layer)
                    else:
                        part.fail(error)

    async def _synchronize(self, layer: int, limiter: anyio.CapacityLimiter) -> LLMException | None:
        """Wait until a layer is final; why it will not be."""
        call: Any = self._synchronizer.synchronize_layer  # type: ignore[attr-defined]
        try:
            if inspect.iscoroutinefunction(call):
                is_ready = await _apart(call(layer, None))
            else:
                is_ready = await anyio.to_thread.run_sync(call, layer, None, abandon_on_cancel=True, limiter=limiter)
                if inspect.isawaitable(is_ready):
                    is_ready = await _apart(is_ready)
        except Exception as error:
            logger.exception("synchronize_layer(%d) failed", layer)
            failure = TransferError(f"synchronize_layer({layer}) raised {error!r}")
            failure.__cause__ = error
            return failure
        return None if is_ready else _given_up(layer)

    # ---- the end ----

    def _news(self, part: Part) -> None:
        if part.told < part.landed:
            self._landed.append((part, part.told, part.landed, perf_counter()))
            part.told = part.landed
        self._wake()
        if not any(each.is_open for each in self.parts):
            if self._has_task:
                self._scope.cancel()  # nobody wants further layers
            self._check_end()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def fail(self, error: LLMException) -> None:
        """Whatever has not ended yet ends with this."""
        for part in self.parts:
            part.fail(error)

    def abandon(self) -> None:
        """Its task will never run, if it had one."""
        self._has_task = False
        self.fail(LinkClosed("the cluster was finalized"))
        self._check_end()

    def _check_end(self) -> None:
        if not self._has_task and not self.is_done and all(part.is_quiet for part in self.parts):
            self._conclude()

    def _conclude(self) -> None:
        for part, gate in self._gates:
            gate.close(part.landed)
        if isinstance(self._synchronizer, AwaitableLayerSynchronizer):
            self._synchronizer.unlisten(self._offer_ready)
        self.nbytes = sum(part.nbytes for part in self.parts)
        self.ranges = sum(part.ranges for part in self.parts)
        self.transfer_seconds = max((part.transfer_seconds for part in self.parts), default=0.0)
        self._remember_compute()
        self._entry.release()
        stuck = next((part for part in self.parts if part.state is TransferState.STUCK), None)
        failed = stuck or next((part for part in self.parts if part.error is not None), None)
        if failed is not None:
            self._finish(failed.state, failed.error)
        elif any(part.state is TransferState.CANCELLED for part in self.parts):
            self._finish(TransferState.CANCELLED, None)
        else:
            self._finish(TransferState.DONE, None)
        self._wake()

    def _remember_compute(self) -> None:
        """How long the layers took to be computed: the next transfer of this cache is planned with it."""
        stamps = self.ready_seconds
        if len(stamps) > 1:
            span = max(stamps.values()) - min(stamps.values())
            self._entry.compute_seconds = span * len(stamps) / (len(stamps) - 1)

    async def progress(self) -> AsyncIterator[LayerDone]:
        """What has arrived, and what arrives, layer by layer and destination by destination; ends with the transfer."""
        told = 0
        for part in self.parts:
            part.watch()
        while True:
            while told < len(self._landed):
                part, first, stop, heard = self._landed[told]
                for offset in range(first, stop):
                    seconds = part.landed_at(offset, heard) - self._started
                    yield LayerDone(part.index, part.cluster_id, part.layers[offset], seconds)
                told += 1
            if self.is_done:
                return
            if self._changed is None:
                self._changed = anyio.Event()
            await self._changed.wait()


def _given_up(layer: int) -> ParamInvalid:
    return ParamInvalid(f"synchronize_layer({layer}) gave the layer up")


def _first_layer(wanted: Wanted, remote: RemoteCache) -> int:
    if wanted.first is None and isinstance(wanted.key, AddressKey):
        return remote.tensor_at(wanted.key.address) // TENSORS
    return wanted.first or 0


async def _apart(call: Any) -> Any:
    """Await somebody else's code in a task of its own: what it does with cancellation stays its own affair.

    Raises RuntimeError: it was cancelled, and not by us.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.cancelled():
        raise RuntimeError("it was cancelled")
    return task.result()


def _layers_of(grid: Grid, first: int, stop: int) -> Grid:
    """Some layers of a grid over all of them."""
    if first == 0 and stop * TENSORS == len(grid.local):
        return grid
    a, b = first * TENSORS, stop * TENSORS
    return Grid(grid.local[a:b], grid.remote[a:b], grid.local_index, grid.remote_index,
                grid.local_stride, grid.remote_stride, grid.nbytes, grid.tail)  # fmt: skip


# ---- what was asked for ----


@dataclass(frozen=True, slots=True)
class _Target:
    """Tensors of a peer, given by addresses, as a plan sees them."""

    cache_id: int
    blocks: bool
    pieces: int
    stride: int
    addresses: array[int]


@dataclass(frozen=True, slots=True)
class LayeredRequest:
    """The arguments that all destinations share, checked."""

    entry: Entry
    src_blocks: array[int]
    dst_blocks: array[int]
    block_size: int

    @classmethod
    def of(
        cls, entry: Entry, src: Sequence[int] | None, dst: Sequence[int] | None, block_size: int | None
    ) -> LayeredRequest:
        """Raises TypeError, ValueError, ParamInvalid: they make no sense together."""
        sources = indexes(() if src is None else src, "src_block_indices")
        targets = indexes(() if dst is None else dst, "dst_block_indices")
        size = 0 if block_size is None else checks.integer(block_size, "dst_block_memory_size", checks.UINT64)
        if entry.placement is Placement.HOST:
            raise ParamInvalid("src_cache is in host memory: layered transfers start from device memory")
        if len(entry.addresses) % TENSORS:
            raise ParamInvalid(f"src_cache has {len(entry.addresses)} tensors: a layer is {TENSORS} of them")
        if entry.blocks:
            if not targets or len(sources) != len(targets):
                raise ParamInvalid(
                    f"{len(sources)} src_block_indices for {len(targets)} dst_block_indices: as many are needed, and some"
                )
            check_below(sources, entry.pieces, "src_block_indices", "source")
            if size not in {0, entry.stride}:
                raise ParamInvalid(f"dst_block_memory_size is {size}: a block of the source has {entry.stride} bytes")
        elif sources:
            raise ParamInvalid(f"{len(sources)} src_block_indices: a contiguous source has no blocks")
        elif targets and not size:
            raise ParamInvalid("dst_block_memory_size is missing: it says how large the destination's blocks are")
        elif size and not targets:
            raise ParamInvalid(f"dst_block_memory_size is {size}, but there are no dst_block_indices")
        return cls(entry, sources, targets, size or (entry.stride if entry.blocks else 0))

    def wanted(self, config: TransferConfig | TransferWithCacheKeyConfig, find_link: Callable[[Any], Link]) -> Wanted:
        """One destination. Raises ParamInvalid: it does not fit the source. NotLinked and the like: nobody is there."""
        count = len(self.entry.addresses) // TENSORS
        layers = range(count) if config.src_layer_range is None else config.src_layer_range
        if layers.stop > count:
            raise ParamInvalid(f"src_layer_range is {layers}, but the cache has {count} layers")
        slot = config.src_batch_index
        if slot >= (1 if self.entry.blocks else self.entry.pieces):
            raise ParamInvalid(f"src_batch_index is {slot}: the source has {self.entry.pieces}, and blocks only 0")
        if isinstance(config, TransferWithCacheKeyConfig):
            key, dst_layers = config.cache_key, config.dst_layer_range
            if len(dst_layers) != len(layers):
                raise ParamInvalid(
                    f"src_layer_range {layers} and dst_layer_range {dst_layers}: they have to be equally long"
                )
            return Wanted(find_link(key), key, layers, dst_layers.start, self._plan_by_key(slot, layers, dst_layers))
        return self._wanted_by_address(config, layers, find_link)

    def _plan_by_key(self, slot: int, src: range, dst: range) -> Callable[[RemoteCache, int], Grid]:
        layers = Layers(src, dst, TENSORS)

        def plan(remote: RemoteCache, dst_slot: int) -> Grid:
            if self.block_size and remote.stride != self.block_size:
                raise ParamInvalid(f"the peer's blocks have {remote.stride} bytes, not {self.block_size}")
            return self._plan(slot, remote, dst_slot, layers)

        return plan

    def _plan(self, slot: int, target: Geometry, dst_slot: int, layers: Layers) -> Grid:
        if target.blocks and dst_slot:
            raise ParamInvalid(f"batch index {dst_slot}: the destination is a blocks cache, which has only 0")
        if self.entry.blocks:
            return blocks_to_blocks(self.entry, target, self.src_blocks, self.dst_blocks, layers)
        if self.dst_blocks:
            return slot_to_blocks(self.entry, slot, target, self.dst_blocks, layers)
        return slot_to_slot(self.entry, slot, target, dst_slot, self.entry.stride, layers)

    def _wanted_by_address(self, config: TransferConfig, layers: range, find_link: Callable[[Any], Link]) -> Wanted:
        addresses = array("Q", config.dst_addrs)
        if len(addresses) != TENSORS * len(layers):
            raise ParamInvalid(
                f"{len(addresses)} dst_addrs for {len(layers)} layers: there have to be {TENSORS} for each"
            )
        key = AddressKey(config.dst_cluster_id, addresses[0])
        stride = self.block_size or self.entry.stride
        slot = config.src_batch_index

        def plan(remote: RemoteCache, _: int) -> Grid:
            pieces = min(remote.room_at(address) for address in addresses) // stride
            target = _Target(remote.cache_id, bool(self.dst_blocks), pieces, stride, addresses)
            if pieces < 1:
                raise ParamInvalid(
                    f"less than {stride} bytes of the peer's cache {remote.cache_id} follow an address of dst_addrs"
                )
            return self._plan(slot, target, 0, Layers(layers, None, TENSORS))

        return Wanted(find_link(key), key, layers, None, plan)
