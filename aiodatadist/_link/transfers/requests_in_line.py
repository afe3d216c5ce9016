"""Requests of a peer that wait in line for a task: each is one object, however many blocks it names.

A task, with what it waits for, is some seventy objects, and every collection of garbage holds the event loop while it looks
at all of them. A peer may have thousands of requests under way, so only ``peer_budget.REQUEST_TASKS`` of a link's requests
of one priority have a task. Further ones stand in line, first come, first served. Each priority has its own line and its own
tasks, so requests that are less urgent are never in the way.

Ownership
    :class:`RequestLines` owns the requests in it, and counts tasks. The responder owns a request again when its turn comes,
    when the peer stops it, or when the link ends. A link that ends in good order serves its lines first, if there is time.
    The lines know nothing of what a request keeps in use.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from aiodatadist._values import peer_budget
from aiodatadist._values.selection import BlockParts, Layers, Selection
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist._wire.messages import KeyName, PartNumbers, Pull

if TYPE_CHECKING:
    from aiodatadist._cache.catalogue import RemoteCache

_NESTED: Final = {"name", "src_blocks", "dst_blocks", "parts", "also"}
_PLAIN: Final = tuple(name for name in Pull.model_fields if name not in _NESTED)
"""Fields whose values are numbers, words and pairs of numbers: the garbage collector looks at none of them."""


class RequestInLine:
    """A request in line.

    Attributes:
        call: the peer's number for it.
        priority: whose line it stands in.
        blocks: how many numbers of blocks, and of parts of blocks, it names.
        target: the destination.
    """

    __slots__ = ("_name", "_numbers", "_part", "_plain", "blocks", "call", "priority", "target")

    def __init__(self, message: Pull, selection: Selection, target: RemoteCache) -> None:
        name, parts = message.name, selection.parts
        self.call = message.call
        self.priority = message.priority
        self.blocks = selection.count_blocks()
        self.target = target
        self._plain = tuple(getattr(message, field) for field in _PLAIN)
        self._name = name.kind, name.id, name.model_id
        self._part = 0 if parts is None else parts.nbytes
        lists = [selection.src_blocks, selection.dst_blocks]
        if parts is not None:
            lists += [array("Q", parts.src), array("Q", parts.dst)]
        # bytes, because the garbage collector looks at none of them, however many blocks they name
        self._numbers = tuple(each.tobytes() for each in lists)

    def message(self) -> Pull:
        """Return the message that it came in, with arrays in place of lists."""
        kind, key, model = self._name
        src, dst, *parts = (array("Q", each) for each in self._numbers)
        return Pull.model_construct(
            **dict(zip(_PLAIN, self._plain, strict=True)),
            name=KeyName.model_construct(kind=kind, id=key, model_id=model),
            src_blocks=src,
            dst_blocks=dst,
            parts=PartNumbers.model_construct(nbytes=self._part, src=parts[0], dst=parts[1]) if parts else None,
            also=[],
        )


class RequestLines:
    """The lines of one link. ``len()`` is how many requests stand in them."""

    def __init__(self) -> None:
        self._tasks = [0] * len(TransferPriority)
        self._lines = tuple(OrderedDict[int, RequestInLine]() for _ in TransferPriority)

    def __len__(self) -> int:
        return sum(map(len, self._lines))

    def enter(self, priority: int) -> bool:
        """Count a task and return True, unless there are as many as allowed. Then return False."""
        if self._tasks[priority] >= peer_budget.REQUEST_TASKS:
            return False
        self._tasks[priority] += 1
        return True

    def add(self, request: RequestInLine) -> None:
        """Put a request at the end of its line."""
        self._lines[request.priority][request.call] = request

    def has(self, priority: int) -> bool:
        """Return True if a request of this priority stands in line."""
        return bool(self._lines[priority])

    def next(self, priority: int) -> RequestInLine | None:
        """Take the next request out of its line for the place of a task that has ended, and return it.

        If the line is empty, count one task less and return None.
        """
        line = self._lines[priority]
        if line:
            return line.popitem(last=False)[1]
        self._tasks[priority] -= 1
        return None

    def remove(self, call: int) -> RequestInLine | None:
        """Take a request out of its line and return it; None if it is not in one."""
        return next((line.pop(call) for line in self._lines if call in line), None)

    def clear(self) -> Iterator[RequestInLine]:
        """Take all requests out of their lines, and yield them."""
        for line in self._lines:
            while line:
                yield line.popitem(last=False)[1]


def selection_of(message: Pull) -> Selection:
    """Return the selection of a request, without the source's slot, which depends on the cache that the name stands for."""
    src, dst = (None if pair is None else range(*pair) for pair in (message.src_layers, message.dst_layers))
    parts = message.parts
    return Selection(
        Layers(src, dst, message.tensors_per_layer),
        array("Q", message.src_blocks),
        array("Q", message.dst_blocks),
        0,
        message.dst_slot,
        message.nbytes,
        message.offsets,
        None if parts is None else BlockParts(parts.nbytes, parts.src, parts.dst),
    )
