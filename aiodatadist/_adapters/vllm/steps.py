"""The layers of a step that the model has computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from aiodatadist._layered.synchronizers import AwaitableLayerSynchronizer, TorchNpuLayerSynchronizer


class LayerSteps:
    """The steps of one worker, on its thread.

    On an NPU an event is recorded behind each layer, for which the device waits.

    Args:
        names: names of the layers, in the order of the cache.
        device: the device's name in torch.
    """

    def __init__(self, names: Sequence[str], device: str = "cpu") -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._is_npu = device.startswith("npu")
        self._synchronizer: AwaitableLayerSynchronizer | None = None
        self._events: list[Any] = []
        self._left: set[int] = set()

    def begin(self) -> AwaitableLayerSynchronizer:
        """Return the synchronizer of the step that is about to be computed."""
        self._left = set(self._numbers.values())
        if self._is_npu:
            torch = import_module("torch")
            self._events = [torch.npu.Event() for _ in self._numbers]
            self._synchronizer = TorchNpuLayerSynchronizer(self._events)
        else:
            self._synchronizer = AwaitableLayerSynchronizer(len(self._numbers))
        return self._synchronizer

    def computed(self, name: str) -> Iterator[tuple[AwaitableLayerSynchronizer, int]]:
        """Yield the layer that becomes ready; nothing if the step pushes nothing."""
        number = self._numbers.get(name)
        if self._synchronizer is not None and number in self._left:
            yield self._ready(self._synchronizer, number)

    def end(self) -> Iterator[tuple[AwaitableLayerSynchronizer, int]]:
        """Yield all layers that are left: they become ready now."""
        synchronizer, self._synchronizer = self._synchronizer, None
        if synchronizer is not None:
            for number in sorted(self._left):
                yield self._ready(synchronizer, number)

    def _ready(self, synchronizer: AwaitableLayerSynchronizer, number: int) -> tuple[AwaitableLayerSynchronizer, int]:
        self._left.discard(number)
        if self._is_npu:
            self._events[number].record()
        return synchronizer, number
