"""A transfer that has to talk to the peer before, or instead of, moving bytes itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from aiodatadist.cache.catalogue import RemoteCache
from aiodatadist.cache.names import Key, name_of
from aiodatadist.cache.plan import Layers
from aiodatadist.cache.table import Entry
from aiodatadist.concurrency.in_callbacks import Scope
from aiodatadist.device import Completion, TransferState
from aiodatadist.errors import LLMException, ProtocolError
from aiodatadist.values.descriptors import CacheKeyByIdAndIndex
from aiodatadist.values.grid import Grid
from aiodatadist.wire.messages import MAX_INDEXES, MAX_SECONDS, KeyName, Pull


@dataclass(frozen=True, slots=True)
class Ranges:
    """What a request asks for: blocks, or so many bytes of each tensor of a slot.

    ``offsets``: where these bytes begin in the peer's slot and in ours. Given, even as 0, no key is consumed.
    """

    src_blocks: list[int] = field(default_factory=list)
    dst_blocks: list[int] = field(default_factory=list)
    dst_slot: int = 0
    nbytes: int = 0
    offsets: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A request, as the peer is told it. ``target``: the cache at this end that the peer is to write."""

    key: Key
    target: int
    layers: Layers
    seconds: float
    ranges: Ranges

    def __call__(self, call: int) -> Pull:
        """Raises ProtocolError: it names more blocks than a request may."""
        key, layers, ranges = self.key, self.layers, self.ranges
        if len(ranges.dst_blocks) > MAX_INDEXES:
            raise ProtocolError(f"{len(ranges.dst_blocks)} blocks: the limit of one request is {MAX_INDEXES}")
        return Pull(
            call=call,
            name=KeyName(**name_of(key)._asdict()),
            slot=key.batch_index if isinstance(key, CacheKeyByIdAndIndex) else 0,
            target=self.target,
            src_layers=None if layers.src is None else (layers.src.start, layers.src.stop),
            dst_layers=None if layers.dst is None else (layers.dst.start, layers.dst.stop),
            tensors_per_layer=layers.tensors_per_layer,
            seconds=min(self.seconds, MAX_SECONDS),
            src_blocks=ranges.src_blocks,
            dst_blocks=ranges.dst_blocks,
            dst_slot=ranges.dst_slot,
            nbytes=ranges.nbytes,
            offsets=ranges.offsets,
        )


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """What a caller wants of a link.

    Attributes:
        entry: the cache at this end, source or destination.
        key: what the one at the other end is called.
        plan: what to move, once the peer's cache and the slot are known; the destination is the grid's local side.
            Raises LLMException: the two do not fit.
        direction: ``get`` reads the peer's memory, ``put`` writes it.
        seconds: for the transfer, and once more for talking before it.
        request: in request/response mode: the words for the peer, given a call id and the name of the key.
    """

    entry: Entry
    key: Key
    plan: Callable[[RemoteCache, int], Grid]
    direction: Literal["get", "put"]
    seconds: float
    request: Callable[[int], Pull] | None = None


class RemoteOperation(Completion):
    """Under way in a task of the link's; from some moment on, perhaps, as a transfer on its stream.

    Attributes:
        scope: of the task.
        is_doubtful: it ended, but the peer may still write: only closing the channel makes sure.
    """

    __slots__ = ("_name", "_patience", "_transfer", "is_doubtful", "scope")

    def __init__(self, name: str, patience: float) -> None:
        super().__init__()
        self._name = name
        self._patience = patience
        self._transfer: Completion | None = None
        self.is_doubtful = False
        self.scope = Scope()

    @property
    def quiesce_seconds(self) -> float:
        return self._patience

    def _cancel(self) -> bool:
        if self._transfer is not None:
            return self._transfer.cancel()
        self.scope.cancel()
        return True

    def follow(self, transfer: Completion) -> None:
        """From now on this is what happens to it."""
        self._transfer = transfer
        transfer.add_done_callback(self._take_over)
        if self.scope.cancel_called:  # in the tick in which the last answer came: nothing was left to be interrupted
            transfer.cancel()

    def _take_over(self, transfer: Completion) -> None:
        self.nbytes, self.ranges = transfer.nbytes, transfer.ranges
        self.queue_seconds, self.transfer_seconds = transfer.queue_seconds, transfer.transfer_seconds
        self._transfer = None
        self._finish(transfer.state, transfer.error)

    def finish(self, state: TransferState, error: LLMException | None = None) -> None:
        self._finish(state, error)

    def _let_go(self) -> None:
        pass

    def _what(self) -> str:
        return self._name


def failed(name: str, error: LLMException) -> RemoteOperation:
    """One that ended before it began."""
    operation = RemoteOperation(name, 0)
    operation.finish(TransferState.FAILED, error)
    return operation
