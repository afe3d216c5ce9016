"""Layered transfers for attention code that does not await: it declares layers final, and waits for layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread

from aiodatadist._blocking.submitted import Handle, Submissions
from aiodatadist._cache.task import CacheTask
from aiodatadist._concurrency.loop_thread import LoopThread
from aiodatadist._counting.callbacks import shown
from aiodatadist._layered.synchronizers import AwaitableLayerSynchronizer
from aiodatadist._link import LayerReceiver as AwaitableReceiver
from aiodatadist.errors import LLMException, ParamInvalid, TransferError, TransferTimeout


class LayerSynchronizer(ABC):
    """The source of layers of a layered transfer, for users to subclass."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Block until the layer is final and return True, or return False to give it up.

        Called in its own thread, with the source layers that some destination wants, in ascending order.
        ``timeout_in_millis`` is always None.
        """


class _Announced(AwaitableLayerSynchronizer):
    """Layers as :meth:`LayersHandle.layer_ready` announces them, some of them behind an event."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.waits: dict[int, Callable[[], object]] = {}

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None = None) -> bool:
        is_ready = await super().synchronize_layer(layer_index, timeout_in_millis)
        wait = self.waits.get(layer_index)
        if is_ready and wait is not None:
            await anyio.to_thread.run_sync(_wait_for, wait, layer_index, abandon_on_cancel=True)
        return is_ready


def _wait_for(wait: Callable[[], object], layer_index: int) -> None:
    """Wait for an event, in a worker thread.

    SystemExit and the like would end the event loop that awaits this, and all clusters with it. TransferError is raised
    in their place; every other exception of the event's code is raised as it is.
    """
    try:
        wait()
    except Exception:
        raise
    except BaseException as error:
        raise TransferError(f"the event of layer {layer_index} raised {shown(error)}") from error


class LayersHandle(Handle):
    """A submitted layered transfer. The producer's attention calls :meth:`layer_ready`, which never waits."""

    __slots__ = ("_announced", "_layers")

    def __init__(self, submissions: Submissions, layers: int, blocks: list[int], tag: object) -> None:
        super().__init__(submissions, "transfer_cache_async", _not_yet, blocks, tag)
        self._layers = layers
        self._announced: _Announced | None = None

    def start_with(self, start: Callable[[_Announced], CacheTask]) -> None:
        """Set the call that starts the transfer."""
        self._start = lambda: start(self._synchronizer())

    def _synchronizer(self) -> _Announced:
        """Return the announced layers. Made on the loop by whichever comes first, the transfer or a ready layer."""
        if self._announced is None:
            self._announced = _Announced(self._layers)
        return self._announced

    def layer_ready(self, layer_index: int, event: Any = None) -> None:
        """Declare the layer final, now or once ``event`` has happened. Never blocks. Ignored if the transfer has ended.

        Args:
            event: a worker thread waits for it: with ``event.synchronize()`` of torch's and torch_npu's events, which
                must be recorded already, or ``event.wait()`` of ``threading.Event``. If that raises, SystemExit
                included, the transfer fails.

        Raises:
            ParamInvalid: if there is no such layer.
            TypeError: if the event has neither method.
            ForkError: if this is a child of the process that submitted it.
        """
        self._say(layer_index, True, _wait_of(event))

    def layer_failed(self, layer_index: int) -> None:
        """Declare that the layer will not come: the transfer ends with ``LLM_PARAM_INVALID``. Never blocks.

        Raises ParamInvalid and ForkError like :meth:`layer_ready`.
        """
        self._say(layer_index, False, None)

    def _say(self, layer_index: int, is_ready: bool, wait: Callable[[], object] | None) -> None:
        if not 0 <= layer_index < self._layers:
            raise ParamInvalid(f"layer_index is {layer_index}: there are {self._layers} layers")

        def say() -> None:
            synchronizer = self._synchronizer()
            if wait is not None:
                synchronizer.waits.setdefault(layer_index, wait)
            (synchronizer.ready if is_ready else synchronizer.fail)(layer_index)

        if not self.done():
            self._submissions.post(say)


def _not_yet() -> CacheTask:
    raise LLMException("a handle without a transfer")


def _wait_of(event: Any) -> Callable[[], object] | None:
    if event is None:
        return None
    for name in ("synchronize", "wait"):
        wait = getattr(event, name, None)
        if callable(wait):
            return wait  # type: ignore[no-any-return]
    raise TypeError(f"event is {event!r} of type {type(event).__name__}: must have synchronize() or wait()")


class LayerReceiver:
    """The layers of one cache as a peer's transfer fills them. The consumer's attention calls :meth:`wait_layer`."""

    def __init__(self, thread: LoopThread, inner: AbstractAsyncContextManager[AwaitableReceiver]) -> None:
        self._thread = thread
        self._context = inner
        self._receiver: AwaitableReceiver | None = None
        self._here: set[int] = set()

    def __enter__(self) -> Self:
        self._receiver = self._thread.call(self._context.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def leave() -> None:
            await self._context.__aexit__(None, None, None)

        with suppress(LLMException):  # the cluster was finalized meanwhile, and the watch ended with it
            self._thread.call(leave)

    @property
    def landed(self) -> list[int]:
        """The layers that have landed. Never waits."""
        return [] if self._receiver is None else self._receiver.landed

    def wait_layer(self, layer_index: int, timeout: float | None = None) -> None:
        """Wait until all bytes of a layer have landed, at most ``timeout`` seconds.

        Raises:
            ParamInvalid: if there is no such layer, or the receiver is not open.
            TransferTimeout: if the layer has not landed in time. The transfer continues.
            TransferError: if the peer's transfer failed, with its status.
            LinkError: if the link ended first.
        """
        receiver = self._receiver
        if receiver is None:
            raise ParamInvalid("this receiver is not open: use with manager.receive_layers(...) as receiver")
        if layer_index not in self._here:
            self._thread.call(lambda: _layer(receiver, layer_index, timeout))
            self._here.update(receiver.landed)


async def _layer(receiver: AwaitableReceiver, layer_index: int, seconds: float | None) -> None:
    with anyio.move_on_after(seconds) as limit:
        await receiver.layer(layer_index)
    if limit.cancelled_caught:
        raise TransferTimeout(f"layer {layer_index} has not landed within {seconds:g} s")
