"""A transfer that has to talk to the peer before, or instead of, moving bytes itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from aiodatadist.cache.catalogue import RemoteCache
from aiodatadist.cache.names import Key, Name, name_of
from aiodatadist.cache.plan import plan, want_slot_there
from aiodatadist.cache.table import Entry
from aiodatadist.concurrency.scope import Scope
from aiodatadist.device import TransferCompletion, TransferState
from aiodatadist.errors import InternalError, LLMException, ProtocolError
from aiodatadist.values.descriptors import CacheKeyByIdAndIndex
from aiodatadist.values.grid import Grid
from aiodatadist.values.selection import Selection
from aiodatadist.values.transfer_priority import TransferPriority
from aiodatadist.wire.messages import MAX_INDEXES, MAX_SECONDS, KeyName, PartNumbers, Pull


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """What a caller wants of a link.

    Attributes:
        entry: the cache at this end, source or destination.
        key: what the one at the other end is called.
        selection: what to move.
        direction: ``get`` reads the peer's memory, ``put`` writes it.
        seconds: for the transfer, and once more for talking before it.
        is_request: request/response mode: the peer is asked to write.
        checksum: compare what arrived with what was sent, within as many seconds again.
        priority: what goes first on the link.
    """

    entry: Entry
    key: Key
    selection: Selection
    direction: Literal["get", "put"]
    seconds: float
    is_request: bool = False
    checksum: bool = False
    priority: TransferPriority = TransferPriority.NORMAL

    @property
    def pieces(self) -> int:
        """Checksums of it: one of each block, or part of a block, or of the slot."""
        selection = self.selection
        return len(selection.dst_blocks) or 1 if selection.parts is None else len(selection.parts.dst)

    def grid(self, remote: RemoteCache, slot: int) -> Grid:
        """The bytes, once the peer's cache and the slot are known; the destination is the grid's local side.

        Raises:
            CacheNotFound: the peer's cache has no such slot.
            ParamInvalid: the two caches do not fit together.
        """
        if self.direction == "get":
            return plan(self.selection, want_slot_there(remote, slot), self.entry, src_slot=slot)
        return plan(self.selection, self.entry, remote, dst_slot=slot)

    def portions(self, nbytes: int) -> list[TransferSpec]:
        """Whole blocks, so many bytes at a time; parts of blocks together."""
        selection, entry = self.selection, self.entry
        count = len(selection.dst_blocks)
        step = max(1, nbytes // (entry.stride * len(entry.addresses)))
        if selection.parts is not None or step >= count:
            return [self]
        return [
            replace(
                self,
                selection=replace(
                    selection,
                    src_blocks=selection.src_blocks[first : first + step],
                    dst_blocks=selection.dst_blocks[first : first + step],
                ),
            )
            for first in range(0, count, step)
        ]

    def is_like(self, other: TransferSpec) -> bool:
        """Return True if the two requests differ in their blocks alone, so that one message can carry both."""
        mine, theirs = self.selection, other.selection
        return (
            self.entry is other.entry
            and self.key == other.key
            and self.priority is other.priority
            and self.seconds == other.seconds
            and not (self.checksum or other.checksum)
            and mine.parts is None is theirs.parts
            and (mine.layers is theirs.layers or mine.layers == theirs.layers)
            and (mine.dst_slot, mine.nbytes, mine.offsets) == (theirs.dst_slot, theirs.nbytes, theirs.offsets)
        )

    def message(self, call: int) -> Pull:
        """The request, as the peer is told it. Raises ProtocolError: it names more blocks than a request may."""
        key, selection, layers = self.key, self.selection, self.selection.layers
        parts = selection.parts
        if len(selection.dst_blocks) > MAX_INDEXES:
            raise ProtocolError(f"{len(selection.dst_blocks)} blocks: the limit of one request is {MAX_INDEXES}")
        if parts is not None and len(parts.src) > MAX_INDEXES:
            raise ProtocolError(f"{len(parts.src)} parts: the limit of one request is {MAX_INDEXES}")
        return Pull(
            call=call,
            name=_key_name(name_of(key)),
            slot=key.batch_index if isinstance(key, CacheKeyByIdAndIndex) else 0,
            target=self.entry.cache_id,
            src_layers=None if layers.src is None else (layers.src.start, layers.src.stop),
            dst_layers=None if layers.dst is None else (layers.dst.start, layers.dst.stop),
            tensors_per_layer=layers.tensors_per_layer,
            seconds=min(self.seconds, MAX_SECONDS),
            priority=self.priority.value,
            src_blocks=selection.src_blocks.tolist(),
            dst_blocks=selection.dst_blocks.tolist(),
            dst_slot=selection.dst_slot,
            nbytes=selection.nbytes,
            offsets=selection.offsets,
            parts=None if parts is None else PartNumbers(nbytes=parts.nbytes, src=list(parts.src), dst=list(parts.dst)),
            checksum=self.checksum,
        )

    def __str__(self) -> str:
        return f"{self.key}, {self.selection}"


@lru_cache(maxsize=1024)
def _key_name(name: Name) -> KeyName:
    """As it is told the peer. Most requests of a link name the same few caches."""
    return KeyName(kind=name.kind, id=name.id, model_id=name.model_id)


class RemoteOperation(TransferCompletion):
    """Under way in callbacks and tasks of the link's; from some moment on, perhaps, as a transfer on its stream.

    Attributes:
        scope: of its tasks, of which it has one at a time.
        is_doubtful: it ended, but the peer may still write: only closing the channel makes sure.
    """

    __slots__ = ("_name", "_patience", "_transfer", "is_doubtful", "scope")

    def __init__(self, name: str, patience: float) -> None:
        super().__init__()
        self._name = name
        self._patience = patience
        self._transfer: TransferCompletion | None = None
        self.is_doubtful = False
        self.scope = Scope()

    @property
    def quiesce_seconds(self) -> float:
        return self._patience

    def _cancel(self) -> bool:
        if self._transfer is not None:
            return self._transfer.cancel()
        self._interrupt()
        return True

    def _interrupt(self) -> None:
        """There is no transfer that could be cancelled."""
        self.scope.cancel()

    def attempt(self, step: Callable[[], object]) -> None:
        """Take a step in a callback. Whatever it raises fails the operation."""
        try:
            step()
        except LLMException as error:
            self.finish(TransferState.FAILED, error)
        except Exception as error:
            self.finish(TransferState.FAILED, self._unforeseen(error))

    async def run(self, work: Callable[[], Awaitable[object]]) -> None:
        """In a task: do the work, which :meth:`cancel` of the scope stops. Whatever it raises fails the operation."""
        try:
            with self.scope:
                await work()
            if self.scope.cancelled_caught and not self.is_doubtful:
                self.finish(TransferState.CANCELLED)
        except LLMException as error:
            self.finish(TransferState.FAILED, error)
        except Exception as error:
            self.finish(TransferState.FAILED, self._unforeseen(error))

    def _unforeseen(self, error: Exception) -> InternalError:
        failure = InternalError(f"{self._name} failed: {error!r}")
        failure.__cause__ = error
        return failure

    def follow(self, transfer: TransferCompletion) -> None:
        """From now on this is what happens to it."""
        self._transfer = transfer
        transfer.add_done_callback(self._take_over)
        if self.scope.cancel_called:  # in the tick in which the last answer came: nothing was left to be interrupted
            transfer.cancel()

    def _take_over(self, transfer: TransferCompletion) -> None:
        self.take_figures(transfer)
        self._finish(transfer.state, transfer.error)

    def take_figures(self, transfer: TransferCompletion) -> None:
        self.nbytes, self.ranges = transfer.nbytes, transfer.ranges
        self.queue_seconds, self.transfer_seconds = transfer.queue_seconds, transfer.transfer_seconds
        self._transfer = None

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
