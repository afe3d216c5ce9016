"""A layered transfer: all its destinations, and the source of readiness."""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import anyio
import anyio.to_thread

from aiodatadist._cache.table import Entry
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.signal import Signal
from aiodatadist._counting.callbacks import Raised, attempt, attempt_awaiting, shown
from aiodatadist._device import CLEAN_SECONDS, TransferCompletion, TransferState, give_way
from aiodatadist._layered.destination import Destination
from aiodatadist._layered.progress import Event, Stage
from aiodatadist._layered.request import Wanted
from aiodatadist._layered.synchronizers import EventLayerSynchronizer, marks_of
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist.errors import InternalError, LinkClosed, LLMException, ParamInvalid, TransferError

Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]
"""Starts one of the engine's tasks."""


@dataclass(frozen=True, slots=True)
class LayerDone:
    """The landing of one layer at one destination.

    Attributes:
        config_index: the destination's place in ``transfer_configs``.
        cluster_id: the peer.
        layer_index: the layer of the source.
        seconds: time since the call.
    """

    config_index: int
    cluster_id: int
    layer_index: int
    seconds: float


class LayeredTransfer(TransferCompletion):
    """A transfer that ends when all its destinations have.

    A destination that fails, or is slow to be found, affects no other.
    """

    __slots__ = ("_changed", "_entry", "_has_concluded", "_has_waited", "_landed", "_marks", "_ready_seconds", "_scopes",
                 "_spawn", "_started", "_synchronizer", "_verdicts", "parts")  # fmt: skip

    def __init__(
        self,
        entry: Entry,
        synchronizer: object,
        wanted: Sequence[Wanted],
        seconds: float,
        priority: TransferPriority = TransferPriority.NORMAL,
        *,
        checksum: bool = False,
    ) -> None:
        super().__init__()
        self._entry = entry
        self._synchronizer = synchronizer
        self._marks = marks_of(synchronizer)  # None if it does not notify the transfer of layers
        self._scopes: set[Scope] = set()  # one for each of its tasks
        self._spawn: Spawn | None = None
        self._changed: Signal | None = None
        self._started = perf_counter()
        self._has_waited = self._has_concluded = False
        # layers of a destination: first, stop, when the loop was told
        self._landed: list[tuple[Destination, int, int, float]] = []
        self._verdicts: dict[int, LLMException | None] = {}
        self._ready_seconds: dict[int, float] = {}
        event = getattr(synchronizer, "device_event", None)  # see GatedByEvent
        self.parts: list[Destination] = [
            Destination(i, each, entry, event, seconds, self._news, priority, checksum=checksum)
            for i, each in enumerate(wanted)
        ]
        entry.lease()

    @property
    def quiesce_seconds(self) -> float:
        """The longest time of its streams, plus a little for its own tasks."""
        links = [part.link for part in self.parts if part.has_link]
        streams = max((link.running.quiesce_seconds for link in links), default=0.0)
        return (
            streams
            + 1.0
            + (CLEAN_SECONDS if any(link.session.channels.traits.has_one_queue for link in links) else 0.0)
        )

    def _cancel(self) -> bool:
        self._stop_tasks()
        for part in self.parts:
            part.cancel()
        return True

    def expire(self) -> None:
        """End each destination that has not ended with ``LLM_TIMEOUT``."""
        for part in self.parts:
            part.expire(self.late_after)

    def _what(self) -> str:
        return f"layered transfer of cache {self._entry.cache_id}"

    def _let_go(self) -> None:
        pass

    def results(self) -> list[tuple[TransferState, LLMException | None]]:
        return [(part.progress.stage.state, part.error) for part in self.parts]

    # ---- the beginning ----

    def start(self, spawn: Spawn) -> None:
        """Begin at once with the destinations that are known.

        A task looks for the others, and waits for layers if that is needed. Destinations whose link is being
        re-established begin when it is ready.
        """
        self._spawn = spawn
        awaited = [part for part in self.parts if part.progress.stage is Stage.LINKING]
        linked = [part for part in self.parts if part.progress.stage is not Stage.LINKING]
        unknown = [part for part in linked if not self._begin_at_once(part)]
        for part in awaited:
            self._has_waited = True
            part.wait_for_link(self._linked)
        if self._marks is not None and not self.is_done:
            self._ready_seconds.clear()  # layers that were ready before say nothing about compute
            self._marks.listen(self._offer_ready)
            self._offer_ready()  # for layers that a thread has marked since the destinations began
        if (unknown or self._walks) and not self.is_done:
            self._start_task(unknown, walks=self._walks)

    def _begin_at_once(self, part: Destination) -> bool:
        """Begin with a destination; return False if it must be looked for."""
        is_known = part.prepare_at_once()
        if is_known:
            self._prepared(part)
        return is_known

    def _linked(self, part: Destination) -> None:
        if not self._begin_at_once(part):
            self._start_task([part], walks=False)

    def _start_task(self, unknown: Sequence[Destination], *, walks: bool) -> None:
        if self._spawn is not None:
            scope = Scope()
            self._scopes.add(scope)
            self._spawn(lambda: self._run(scope, unknown, walks))

    @property
    def _walks(self) -> bool:
        """True if a task must wait for the layers."""
        return self._marks is None and not isinstance(self._synchronizer, EventLayerSynchronizer)

    async def _run(self, scope: Scope, unknown: Sequence[Destination], walks: bool) -> None:
        """Find destinations, and wait for layers, in one of the engine's tasks."""
        try:
            with scope:
                async with anyio.create_task_group() as group:
                    for part in unknown:  # each in its own task, so that a slow peer holds up no other destination
                        group.start_soon(self._find, part)
                    if walks:
                        group.start_soon(self._walk)
        except Exception as error:
            failure = InternalError(f"{self._what()} failed: {error!r}")
            failure.__cause__ = error
            self.fail(failure)
        finally:
            self._scopes.discard(scope)
            if walks:
                self._fail_unjudged()
            self._check_end()

    def _fail_unjudged(self) -> None:
        """Fail destinations with layers that the walk has not reached: it has ended, so they will never be ready."""
        for part in self.parts:
            layer = next((layer for layer in part.layers if layer not in self._verdicts), None)
            if part.progress.is_open and layer is not None:
                part.fail(LinkClosed(f"{self._what()} was stopped before layer {layer} was ready"))

    async def _find(self, part: Destination) -> None:
        await part.prepare()
        self._prepared(part)

    def _prepared(self, part: Destination) -> None:
        """Send what is ready to a destination that was found, unless it has failed."""
        if part.progress.is_sending and isinstance(self._synchronizer, EventLayerSynchronizer):
            try:
                gate = self._synchronizer.gate(part.layers)
            except LLMException as error:
                part.fail(error)
            else:
                part.launch_gated(gate, self._synchronizer.seconds)
        elif part.progress.is_sending:
            self._offer(part)

    # ---- layers become ready ----

    def _offer_ready(self) -> None:
        """Offer every known destination the layers that it can have, in order."""
        for part in self.parts:
            if part.progress.is_sending:
                self._offer(part)

    def _offer(self, part: Destination) -> None:
        """Offer a destination the layers that are ready in order. Fail it if the next one can never be ready."""
        offered, count = part.progress.offered, 0
        error = None
        for layer in part.layers[offered:]:
            if not self._is_judged(layer):
                break
            error = self._verdicts[layer]
            if error is not None:
                break
            count += 1
        if count:
            part.offer(offered + count)
        if error is not None:
            part.fail(error)

    def _is_judged(self, layer: int) -> bool:
        """Return True if it is known whether the layer is ready or never will be. Look at what the synchronizer was told."""
        if layer not in self._verdicts and self._marks is not None:
            said = self._marks.said(layer)
            if said is not None:
                self._judge(layer, None if said else _given_up(layer))
        return layer in self._verdicts

    def _judge(self, layer: int, error: LLMException | None) -> None:
        """Note that the layer is ready, or with an error that it will not be."""
        self._verdicts[layer] = error
        self._ready_seconds[layer] = perf_counter()

    async def _walk(self) -> None:
        """Wait for each layer that a destination wants, in ascending order."""
        limiter = anyio.CapacityLimiter(1)  # a function that blocks holds up its own transfer only
        for layer in sorted({layer for part in self.parts for layer in part.layers}):
            if any(part.progress.is_open and layer in part.layers for part in self.parts):
                error = await self._synchronize(layer, limiter)
                self._judge(layer, error)
                self._offer_ready()
                if error is not None:
                    self._fail_wanting(layer, error)

    def _fail_wanting(self, layer: int, error: LLMException) -> None:
        """Fail all destinations that want this layer, even those not found yet: no later layer is of use to them."""
        for part in self.parts:
            if layer in part.layers:
                part.fail(error)

    async def _synchronize(self, layer: int, limiter: anyio.CapacityLimiter) -> LLMException | None:
        """Wait until a layer is final; return None, or the error because of which it will not be."""
        synchronizer: Any = self._synchronizer
        try:
            # Guarded, because whatever the caller's code raises would end the engine's tasks, and with them all links. A
            # CancelledError from a plain function would look like a cancellation of this walk.
            call = attempt(lambda: synchronizer.synchronize_layer)
            if inspect.iscoroutinefunction(call):
                said = await attempt_awaiting(lambda: call(layer, None))
            else:
                in_thread = partial(attempt, lambda: call(layer, None))
                # Abandoned if cancelled: a function that blocks cannot be interrupted, and must not hold up the end.
                said = await anyio.to_thread.run_sync(in_thread, abandon_on_cancel=True, limiter=limiter)
                if inspect.isawaitable(said):
                    awaitable = said
                    said = await attempt_awaiting(lambda: awaitable)
        except Raised as raised:
            failure = TransferError(f"synchronize_layer({layer}) {raised}")
            failure.__cause__ = raised.__cause__
            return failure
        return _verdict(layer, said)

    # ---- the end ----

    def _news(self, part: Destination) -> None:
        first, stop = part.progress.told, part.progress.landed
        if part.progress.on(Event.TELL, stop):
            self._landed.append((part, first, stop, perf_counter()))
        self._wake()
        if not any(each.progress.is_open for each in self.parts):
            self._stop_tasks()  # no destination wants further layers
            self._check_end()

    def _stop_tasks(self) -> None:
        for scope in self._scopes:
            scope.cancel()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def fail(self, error: LLMException) -> None:
        """Fail every destination that has not ended."""
        for part in self.parts:
            part.fail(error)

    def abandon(self) -> None:
        """End it without its tasks, which will never run."""
        self._scopes.clear()
        self.fail(LinkClosed("the cluster was finalized"))
        self._check_end()

    def _check_end(self) -> None:
        if not self._scopes and not self._has_concluded and all(part.is_quiet for part in self.parts):
            self._has_concluded = True
            self._conclude()

    def _conclude(self) -> None:
        portions = [part.portions for part in self.parts if part.portions is not None]
        for each in portions:
            each.give_back_gate()
        if self._marks is not None:
            self._marks.unlisten(self._offer_ready)
        self.nbytes: int = sum(each.nbytes for each in portions)
        self.ranges: int = sum(each.ranges for each in portions)
        self.transfer_seconds: float = max((each.transfer_seconds for each in portions), default=0.0)
        self._remember_compute()
        # before the end is reported: callbacks may use the source again
        self._entry.release()
        # a stuck destination first: its end is the one after which the source must never be used again
        stuck = next((part for part in self.parts if part.progress.stage is Stage.STUCK), None)
        failed = stuck or next((part for part in self.parts if part.error is not None), None)
        if failed is not None:
            self._finish(failed.progress.stage.state, failed.error)
        elif any(part.progress.stage is Stage.CANCELLED for part in self.parts):
            self._finish(TransferState.CANCELLED, None)
        else:
            self._finish(TransferState.DONE, None)
        self._wake()

    def _remember_compute(self) -> None:
        """Note how long a layer took to be computed, by which the next transfer of this cache is planned.

        If a destination waited for its link that is not known, because layers were looked at only when the link was
        there.
        """
        stamps = self._ready_seconds.values()
        if len(stamps) > 1 and not self._has_waited:
            self._entry.layer_seconds = (max(stamps) - min(stamps)) / (len(stamps) - 1)

    async def progress(self) -> AsyncIterator[LayerDone]:
        """Yield each layer that has landed at a destination, then each one as it lands. End with the transfer."""
        told = 0
        for part in self.parts:
            part.watch()
        while True:
            while told < len(self._landed):
                part, first, stop, heard = self._landed[told]
                for layer, at in zip(part.layers[first:stop], part.landed_at(first, stop, heard), strict=True):
                    yield LayerDone(part.index, part.cluster_id, layer, at - self._started)
                told += 1
                await give_way()
            if self.is_done:
                return
            if self._changed is None:
                self._changed = Signal()
            await self._changed.wait()


def _verdict(layer: int, said: object) -> LLMException | None:
    """Return the error that a synchronizer's answer means; None if the layer is final."""
    # Booleans only: a generator or a coroutine is true as well, and its layer would leave before it was computed.
    if said is None or _is_bool(said):
        return None if said else _given_up(layer)
    if inspect.iscoroutine(said):
        said.close()  # otherwise it warns that it was never awaited
    return ParamInvalid(
        f"synchronize_layer({layer}) returned {shown(said)} of type {type(said).__name__}: must be True, False or None, or"
        " an awaitable of one of them"
    )


def _is_bool(said: object) -> bool:
    """Return True for Python's booleans, and for numpy's, which its comparisons return, if it is imported."""
    numpys = getattr(sys.modules.get("numpy"), "bool_", bool)
    return type(said) is bool or type(said) is numpys


def _given_up(layer: int) -> ParamInvalid:
    return ParamInvalid(f"synchronize_layer({layer}) gave the layer up")
