"""The contract of whatever keeps values: opaque bytes by key, a cache and never a store of record.

Bytes travel through memory that the pool lends. To store, a caller asks for a :class:`Stage`, fills it and puts it; to read,
it gets a :class:`Value` and gives it back. Only a pool knows when its engine has let go of memory, and the caller's own is
never shown to an engine: whatever an engine does after a deadline or a cancellation, it does to memory of the pool's.

What a pool finds out about one key it reports for that key. It raises only when the whole call is impossible:
:class:`PoolTimeout` at the deadline, :class:`PoolUnreachable` without an answer. A cancelled or failed call has taken back
everything it lent during that call, and what was put may or may not be there.

``deadline`` is a time of the event loop's clock (``anyio.current_time()``), or ``math.inf``. One that has passed means: do
what takes no waiting, else raise ``PoolTimeout``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol


class PoolKey(NamedTuple):
    """What a value is called. All keys of one ``distribute_key`` (and namespace) live on the same node."""

    namespace: str
    distribute_key: str
    attribute_key: str


class PutStatus(IntEnum):
    """What became of one value. The first writer wins: ``PRESENT`` is success, too."""

    STORED = 0
    PRESENT = 1
    REJECTED = -1
    """No room, and nothing could be evicted, or it was evicted again at once; the value is larger than a value may be; or
    another process is putting it at this moment."""
    FAILED = -2
    """The engine had a fault with this key; it may or may not be there."""


class GetStatus(IntEnum):
    """Why there is no value."""

    MISS = -1
    """Absent, evicted, expired, its node gone: whatever an engine calls it."""
    WRONG_LENGTH = -2
    """There is one of another length."""
    FAILED = -3
    """The engine had a fault with this key."""
    NO_ROOM = -4
    """Not looked for: the pool has no memory for it beside those before it. The first of a call: it is larger than all."""


class PoolTimeout(TimeoutError):
    """The deadline has passed. No memory of the caller's was or will be touched."""


class PoolUnreachable(ConnectionError):
    """No answer from the pool at all."""


class PoolRefused(PoolUnreachable):
    """The pool answers, and does not let this caller in: a wrong password, another protocol. To ask again does not help."""


class Stage(Protocol):
    """Writable memory for one value, lent until it is put or released.

    Attributes:
        address: of its first byte, in this process; the host can address it, and the device can copy to it.
        nbytes: as asked for.
    """

    address: int
    nbytes: int

    def view(self) -> memoryview:
        """The bytes, writable. Views must be gone when it is put or released."""

    def release(self) -> None:
        """Give it back unused. After ``put_many`` took it this does nothing."""


class Value(Protocol):
    """A value that was found. Its bytes do not change until :meth:`release`, even when it is evicted meanwhile.

    Attributes:
        address: of its first byte, in this process.
        nbytes: its length.
    """

    address: int
    nbytes: int

    def view(self) -> memoryview:
        """The bytes, read-only."""

    def release(self) -> None:
        """Give it back. A second call does nothing."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node of a pool. ``capacity`` and ``used`` in bytes; None: not known."""

    name: str
    capacity: int | None = None
    used: int | None = None
    is_alive: bool = True


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a pool can.

    Attributes:
        name: of the engine, for messages and metrics.
        in_process: its memory is this process's own: its values need no proof of being whole.
        lease: ``exists_many(lease_ms=...)`` protects what it finds.
        placement: several nodes, and one distribute key is on one of them.
        auth: access is checked by the engine.
        cancel_is_immediate: nothing of a cancelled call goes on; else memory it used is set aside until its engine let go.
    """

    name: str
    in_process: bool = False
    lease: bool = False
    placement: bool = False
    auth: bool = False
    cancel_is_immediate: bool = True


class KVPool(ABC):
    """Values by key. Belongs to the event loop it was opened on; any number of tasks may call it at the same time."""

    capabilities: Capabilities

    @abstractmethod
    async def stage(self, sizes: Sequence[int], *, deadline: float) -> list[Stage | None]:
        """Memory for values of these sizes, in this order; None where a value is too large for the pool or finds no room.

        May wait for memory that other calls of this process have, and may evict.

        Raises:
            PoolTimeout: the deadline has passed while it waited.
        """

    def keeps(self, sizes: Sequence[int]) -> int:
        """How many of these values, from the first on, it can have together. What is saved behind them would evict them.

        One that is larger than the pool takes no room. All, unless a pool knows better without asking a server. A pool in
        front of another one has to pass this on.
        """
        return len(sizes)

    def why_no_room(self, nbytes: int) -> str:
        """Words for why a value of so many bytes was rejected: the limit and its name. Does not ask the pool."""
        return "the pool does not say why"

    @abstractmethod
    async def put_many(self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float) -> list[PutStatus]:
        """Store what was filled in. It takes the stages, whatever happens.

        A value is there for every client when this says so, and never in part.

        Raises:
            PoolTimeout, PoolUnreachable: see above.
        """

    @abstractmethod
    async def get_many(
        self, keys: Sequence[PoolKey], sizes: Sequence[int], *, deadline: float
    ) -> list[Value | GetStatus]:
        """Values of exactly these sizes. The caller releases each value that it is given.

        Raises:
            PoolTimeout, PoolUnreachable: see above.
        """

    @abstractmethod
    async def exists_many(self, keys: Sequence[PoolKey], *, lease_ms: int = 0, deadline: float) -> list[bool]:
        """Which of them are there now: a hint, not a lock. With ``lease_ms``, where the engine can, protected that long.

        Raises:
            PoolTimeout, PoolUnreachable: see above.
        """

    @abstractmethod
    async def remove_many(self, keys: Sequence[PoolKey], *, deadline: float) -> int:
        """Forget them; how many there were.

        Raises:
            PoolTimeout, PoolUnreachable: see above.
        """

    @abstractmethod
    async def nodes(self, *, deadline: float) -> list[NodeInfo]:
        """The nodes it knows of now.

        Raises:
            PoolTimeout, PoolUnreachable: see above.
        """

    @abstractmethod
    async def healthy(self, *, deadline: float) -> bool:
        """Return True if the pool works right now. Never raises.

        Whether it takes writes need not be tried here: after :attr:`PutStatus.FAILED` a cache tries that itself, with a small
        value that it removes again, and counts the pool as unhealthy until one is taken.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Let go of connections, threads and memory. Values that are lent must have been released. May be called twice."""
