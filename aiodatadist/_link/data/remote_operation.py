"""Remote operations: transfers for which the peer must be asked first, or asked to move the bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from aiodatadist._cache.catalogue import RemoteCache
from aiodatadist._cache.names import Form, Key, Name, name_of
from aiodatadist._cache.plan import plan, want_slot_there
from aiodatadist._cache.table import Entry
from aiodatadist._concurrency.scope import Scope
from aiodatadist._device import TransferCompletion, TransferState
from aiodatadist._values.descriptors import CacheKeyByIdAndIndex
from aiodatadist._values.grid import Grid
from aiodatadist._values.selection import Selection
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist._wire.messages import MAX_INDEXES, MAX_SECONDS, KeyName, PartNumbers, Pull
from aiodatadist.errors import InternalError, LLMException, ProtocolError


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """The transfer that a caller wants.

    Attributes:
        entry: the cache at this end, source or destination.
        key: the key of the cache at the other end.
        selection: what to move.
        direction: ``get`` reads the peer's memory, ``put`` writes it.
        seconds: the time limit of the transfer. Asking the peer first may take as long again.
        is_request: True in request/response mode: the peer is asked to write.
        checksum: True if what arrived is compared with what was sent. That may take as long again.
        priority: which transfers go first on the link.
        form: the words of its call that the next call may have in common with it, besides the two caches; None if it is not
            made of whole blocks or a slot.
    """

    entry: Entry
    key: Key
    selection: Selection
    direction: Literal["get", "put"]
    seconds: float
    is_request: bool = False
    checksum: bool = False
    priority: TransferPriority = TransferPriority.NORMAL
    form: Form | None = None

    @property
    def pieces(self) -> int:
        """The number of checksums of the transfer: one for each block or part of a block, or one for the slot."""
        selection = self.selection
        return len(selection.dst_blocks) or 1 if selection.parts is None else len(selection.parts.dst)

    @property
    def most_bytes(self) -> int:
        """The number of bytes that the transfer moves at most, if it fills this end's cache."""
        selection, parts = self.selection, self.selection.parts
        if parts is not None:
            each = len(parts.dst) * parts.nbytes
        else:
            each = len(selection.dst_blocks) * self.entry.stride or selection.nbytes
        return len(selection.layers.of_target(self.entry)) * each

    @property
    def least_bytes(self) -> int:
        """The number of bytes that the transfer moves at least: all, unless a slot may fill the last block in part."""
        selection, most = self.selection, self.most_bytes
        if not selection.dst_blocks or selection.src_blocks or selection.parts is not None:
            return most
        return most - len(selection.layers.of_target(self.entry)) * (self.entry.stride - 1)

    def grid(self, remote: RemoteCache, slot: int) -> Grid:
        """Return the grid of bytes to move, given the peer's cache and slot. The destination is its local side.

        Raises:
            CacheNotFound: if the peer's cache has no such slot.
            ParamInvalid: if the two caches do not fit together.
        """
        if self.direction == "get":
            return plan(self.selection, want_slot_there(remote, slot), self.entry, src_slot=slot)
        return plan(self.selection, self.entry, remote, dst_slot=slot)

    def portions(self, nbytes: int) -> list[TransferSpec]:
        """Split the transfer into portions of whole blocks, each of about ``nbytes``. Parts of blocks stay together."""
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
        """Return True if the two requests differ only in their blocks, so that one message can carry both."""
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
        """Return the message that asks the peer for this transfer. Raises ProtocolError if it names too many blocks."""
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
    """Return a name as messages carry it. Cached, because most requests of a link name the same few caches."""
    return KeyName(kind=name.kind, id=name.id, model_id=name.model_id)


class RemoteOperation(TransferCompletion):
    """A transfer that runs in callbacks and tasks of the link, and may become a transfer on one of its streams.

    Attributes:
        scope: the scope of its task. It has one task at a time.
        is_doubtful: True if the peer may still write for it, until the channel is closed.
    """

    __slots__ = ("_name", "_patience", "_transfer", "is_doubtful", "scope")

    def __init__(self, name: str, patience: float) -> None:
        super().__init__()
        self._name = name
        self._patience = patience
        self._transfer: TransferCompletion | None = None
        self.is_doubtful: bool = False
        self.scope: Scope = Scope()

    @property
    def quiesce_seconds(self) -> float:
        return self._patience

    def _cancel(self) -> bool:
        if self._transfer is not None:
            return self._transfer.cancel()
        self._interrupt()
        return True

    def _interrupt(self) -> None:
        """Cancel the task: there is no transfer on a stream to be cancelled instead."""
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
        """Do the work, in a task. Cancelling the scope stops it, and whatever it raises fails the operation."""
        try:
            with self.scope:
                await work()
            # A doubtful operation ends with the channels: until then the peer may write.
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
        """Follow a transfer on a stream: the operation ends as the transfer does."""
        if transfer.state is not TransferState.PENDING:
            self._take_over(transfer)
            return
        self._transfer = transfer
        transfer.add_done_callback(self._take_over)
        if self.scope.cancel_called:  # in the tick in which the last answer came, so that nothing was interrupted
            transfer.cancel()

    def _take_over(self, transfer: TransferCompletion) -> None:
        self.take_figures(transfer)
        self._finish(transfer.state, transfer.error)

    def take_figures(self, transfer: TransferCompletion) -> None:
        """Take over the bytes and times of a transfer on a stream, which has ended."""
        self.nbytes: int = transfer.nbytes
        self.ranges: int = transfer.ranges
        self.queue_seconds: float = transfer.queue_seconds
        self.transfer_seconds: float = transfer.transfer_seconds
        self._transfer = None

    def finish(self, state: TransferState, error: LLMException | None = None) -> None:
        """End the operation. No effect if it has ended."""
        self._finish(state, error)

    def _let_go(self) -> None:
        pass

    def _what(self) -> str:
        return self._name


def failed(name: str, error: LLMException) -> RemoteOperation:
    """Return an operation that failed before it began."""
    operation = RemoteOperation(name, 0)
    operation.finish(TransferState.FAILED, error)
    return operation
