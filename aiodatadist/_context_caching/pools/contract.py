"""The contract of a pool: opaque bytes by key, in a cache that is never a store of record.

Bytes travel through memory that the pool lends. To store, a caller asks for a :class:`Stage`, fills it and puts it. To
read, it gets a :class:`Value` and gives it back. Only a pool knows when its engine has released memory, and the
caller's memory is never shown to an engine: whatever an engine does after a deadline or a cancellation, it does to the
pool's memory.

A pool reports what happens to one key for that key. It raises only if the whole call is impossible:
:class:`PoolTimeout` at the deadline, :class:`PoolUnreachable` without an answer. A cancelled or failed call has taken
back everything that it lent, and what it put may or may not be there.

``deadline`` is a time of the event loop's clock (``anyio.current_time()``), or ``math.inf``. If it has passed, the pool
does what needs no waiting, and otherwise raises ``PoolTimeout``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol


class PoolKey(NamedTuple):
    """The name of a value. All keys of one ``distribute_key`` (and namespace) are on the same node."""

    namespace: str
    distribute_key: str
    attribute_key: str


class PutStatus(IntEnum):
    """The outcome for one value. The first writer wins: ``PRESENT`` is success, too."""

    STORED = 0
    PRESENT = 1
    REJECTED = -1
    """The pool has no room and could evict nothing, or the value is too large.

    Also if the value was evicted again at once, or another process is putting it now.
    """
    FAILED = -2
    """The engine reported a fault for this key; the value may or may not be there."""


class GetStatus(IntEnum):
    """The reason why there is no value."""

    MISS = -1
    """Absent, evicted, expired, or its node has gone."""
    WRONG_LENGTH = -2
    """The pool has a value of another length."""
    FAILED = -3
    """The engine reported a fault for this key."""
    NO_ROOM = -4
    """The value was not looked up: the pool has no memory for it beside the values before it.

    For a call's first value: it is larger than the pool.
    """
    FORGED = -5
    """In a sealed pool: no member sealed the value under this name, or it was changed since."""
    EXPIRED = -6
    """In a sealed pool: a member sealed the value longer ago than ``seal_seconds``."""


class PoolTimeout(TimeoutError):
    """The deadline has passed. The caller's memory was not touched, and will not be."""


class PoolUnreachable(ConnectionError):
    """The pool does not answer at all."""


class PoolRefused(PoolUnreachable):
    """The pool answers and refuses this caller: a wrong password, another protocol. Trying again does not help."""


class Stage(Protocol):
    """Writable memory for one value, lent until it is put or released.

    Attributes:
        address: address of its first byte in this process; the host can access it, and the device can copy to it.
        nbytes: its length, as asked for.
    """

    address: int
    nbytes: int

    def view(self) -> memoryview:
        """Return the bytes, writable. Views must be gone when it is put or released."""

    def release(self) -> None:
        """Release it unused. No effect after ``put_many`` has taken it."""


class Value(Protocol):
    """A value that was found. Its bytes do not change until :meth:`release`, even if it is evicted meanwhile.

    Attributes:
        address: address of its first byte in this process.
        nbytes: its length.
    """

    address: int
    nbytes: int

    def view(self) -> memoryview:
        """Return the bytes, read-only."""

    def release(self) -> None:
        """Release it. A second call has no effect."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node of a pool. ``capacity`` and ``used`` are bytes, or None if unknown."""

    name: str
    capacity: int | None = None
    used: int | None = None
    is_alive: bool = True


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a pool.

    Attributes:
        name: name of the engine, for messages and metrics.
        in_process: its memory is this process's own, so that values need no proof of being complete.
        lease: ``exists_many(lease=...)`` protects what it finds.
        placement: there are several nodes, and all values of one distribute key are on one of them.
        auth: the engine checks access.
        sealed: values are sealed: without the group's key they can neither be written nor read.
        private_values: each value that is lent is a copy for its borrower alone, who may change it.
        cancel_is_immediate: nothing of a cancelled call continues. Otherwise its memory is set aside until the engine
            releases it.
    """

    name: str
    in_process: bool = False
    lease: bool = False
    placement: bool = False
    auth: bool = False
    sealed: bool = False
    private_values: bool = False
    cancel_is_immediate: bool = True


class KVPool(ABC):
    """Values by key. A pool belongs to the event loop on which it was opened; any number of tasks may call it."""

    capabilities: Capabilities

    @abstractmethod
    async def stage(self, sizes: Sequence[int], *, deadline: float) -> list[Stage | None]:
        """Return memory for values of these sizes, in order; None for a value that is too large or finds no room.

        May wait for memory that other calls of this process hold, and may evict values.

        Raises:
            PoolTimeout: if the deadline passed while it waited.
        """

    def keeps(self, sizes: Sequence[int]) -> int:
        """Return how many of these values, from the first on, the pool can hold together.

        Values saved behind them would evict them. One that is larger than the pool takes no room. Return all, unless
        the pool knows better without asking a server. A pool in front of another one must pass this on.
        """
        return len(sizes)

    def why_no_room(self, nbytes: int) -> str:
        """Return why a value of this size was rejected: the limit and its name. Does not ask the pool."""
        return "the pool does not say why"

    @abstractmethod
    async def put_many(self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float) -> list[PutStatus]:
        """Store the filled stages, and take them, whatever happens.

        If this reports a value as stored, it is there for every client. No client ever sees a part of it.

        Raises:
            PoolTimeout, PoolUnreachable: see the module.
        """

    @abstractmethod
    async def get_many(
        self, keys: Sequence[PoolKey], sizes: Sequence[int], *, deadline: float
    ) -> list[Value | GetStatus]:
        """Return values of exactly these sizes. The caller releases each value that it is given.

        Raises:
            PoolTimeout, PoolUnreachable: see the module.
        """

    @abstractmethod
    async def exists_many(self, keys: Sequence[PoolKey], *, lease: float = 0.0, deadline: float) -> list[bool]:
        """Return for each key True if it is there now: a hint, not a lock.

        Values found are protected for ``lease`` seconds, if the engine can do that.

        Raises:
            PoolTimeout, PoolUnreachable: see the module.
        """

    @abstractmethod
    async def remove_many(self, keys: Sequence[PoolKey], *, deadline: float) -> int:
        """Remove values; return how many there were.

        Raises:
            PoolTimeout, PoolUnreachable: see the module.
        """

    @abstractmethod
    async def nodes(self, *, deadline: float) -> list[NodeInfo]:
        """Return the nodes that the pool knows of now.

        Raises:
            PoolTimeout, PoolUnreachable: see the module.
        """

    @abstractmethod
    async def healthy(self, *, deadline: float) -> bool:
        """Return True if the pool works right now. Never raises.

        It need not try a write: after :attr:`PutStatus.FAILED` the cache itself writes a small value and removes it
        again, and counts the pool as unhealthy until the pool accepts one.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections, threads and memory. Lent values must have been released before. May be called twice."""
