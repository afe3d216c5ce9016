"""The contract of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import LinkError

if TYPE_CHECKING:
    import socket

    from aiodatadist._device import Device, Layering, Program, Stream
    from aiodatadist._values.grid import Grid


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process that a peer may read and write once it is registered."""

    address: int
    nbytes: int
    placement: Placement

    def overlaps(self, other: Region) -> bool:
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes


class Access(IntFlag):
    """The uses that a peer may make of a region."""

    NONE = 0
    READ = 1
    WRITE = 2
    ALL = 3


class Reach:
    """The regions of this end that a channel shows to its peer. This one shows all of them."""

    def access(self, region: Region) -> Access:
        """Return what the peer may do with a region."""
        return Access.ALL

    def is_used(self, region: Region) -> bool:
        """Return True if either end may use a region in a transfer with this peer."""
        return True


EVERYTHING: Final = Reach()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The properties of this end that a peer needs to open a channel. Plain text: it travels in the handshake.

    Attributes:
        transport, runtime: must be the same at both ends.
        host: identifies the machine (its boot id and user); a runtime that cannot leave the machine compares it.
        server_id, device_id, device_ip: this device in a rank table.
        process: the process id on its machine.
        super_device_id, super_pod_id: for super-pod hardware, otherwise empty.
        device_port, host_ip, backup_device_ip: further fields of the rank table, if they were given.
        streams: the most data connections that this end uses for one channel; 0 if its channels need none.
        meeting: identifies, on its machine, where its process can be found by others of softnpu; empty if that is not known.
    """

    transport: str
    runtime: str
    host: str
    server_id: str
    device_id: str
    device_ip: str
    process: int
    super_device_id: str = ""
    super_pod_id: str = ""
    device_port: str = ""
    host_ip: str = ""
    backup_device_ip: str = ""
    streams: int = 0
    meeting: str = ""


@dataclass(frozen=True, slots=True)
class DataConnection:
    """A connected socket for bytes of a channel. Both ends have proved to each other that they are the ends of its link.

    Attributes:
        sock: the non-blocking socket, which belongs to the channel from here on. Nothing of the channel's was read from it.
        seals: the keys of this connection, 32 bytes each: one for what this end sends, and one for what the peer sends. None
            if the bytes travel without seals.
    """

    sock: socket.socket
    seals: tuple[bytes, bytes] | None = field(repr=False)


OpenSockets = Callable[[int, float], Awaitable[list[DataConnection]]]
"""Returns this number of data connections within this number of seconds, in the same order at both ends.

Raises LinkTimeout if they have not come by then, or LinkError. Those that came are then closed. Call it once for a channel.
"""


@dataclass(frozen=True, slots=True)
class ChannelOffer:
    """The terms of a channel, which both ends open at the same time. They are the same apart from ``rank``.

    Attributes:
        name: unique among all channels; at most 127 characters.
        rank: this end's, 0 or 1. ``endpoints[rank]`` is this end's.
        reach: what this end shows of its memory. Each end has its own, and the peer does not see it.
        sockets: opens the channel's data connections, at most the smaller number of the two endpoints' ``streams``; None if
            that is 0, or if the channel shall have none.
    """

    name: str
    rank: int
    endpoints: tuple[Endpoint, Endpoint]
    reach: Reach = EVERYTHING
    sockets: OpenSockets | None = None

    @property
    def streams(self) -> int:
        """The number of data connections that both ends can use."""
        return min(end.streams for end in self.endpoints)

    @property
    def peer_rank(self) -> int:
        return 1 - self.rank


class RdmaConfig(NamedTuple):
    """The marks of a channel's RDMA packets.

    None means the environment's ``HCCL_RDMA_TC`` and ``HCCL_RDMA_SL``, or the vendor's defaults, 132 and 4.
    """

    traffic_class: int | None = None
    service_level: int | None = None


DEFAULT_RDMA: Final = RdmaConfig()


class TcpConfig(NamedTuple):
    """The options of channels over TCP: ``tcp_streams`` and ``tcp_threads`` of ``LLMConfig``.

    Attributes:
        silence: seconds that what was sent may stay unacknowledged, before its connection is lost; 0 for the kernel's rule.
    """

    streams: int = 4
    threads: int = 2
    silence: float = 0.0


DEFAULT_TCP: Final = TcpConfig()


class StillWritten(LinkError):
    """A channel is closed, but the peer may still write into our memory.

    The peer was stopped in the middle of a write, and finishes that piece when it continues; or it is the other end in
    this process, and has not ended a transfer.
    """


class Channel(ABC):
    """A way to one peer's registered memory. One-sided: the peer takes no part in a transfer.

    A channel covers the regions that both ends had registered when it was opened, and shows each end those of the other
    that the other's ``reach`` lets it use. Not every transport can tell reading from writing: see ``tells_access``.

    Attributes:
        has_one_queue: True if all gets and puts wait in one queue, which any later one starts, whatever its stream. So
            all transfers of one end use one stream, one at a time, and a transfer that was stopped half-way has ended
            only when the channel is closed. True over RDMA, and over HCCS if HCCL unfolds batches on the device.
        takes_gates: True if a program may also wait for gates and events of the device. Otherwise those must be waited for
            in another program, on a stream of the device.
        runs_blocks: True if its streams can run a :class:`~aiodatadist._device.BlockRun`.
        needs_loans: True if the peer reaches only what :meth:`lend` has lent. Otherwise it reaches what ``reach`` shows, and
            nothing is lent.
        has_connections: True if it moves bytes over data connections of the link: if the peer fails a transfer, one is lost.
        tells_access: True if a peer that may read a region cannot write it. Otherwise it can do both, or neither.
        reaches_host: True if the peer's HOST memory can be read and written, too; otherwise only DEVICE memory.
        reaches_device: True if DEVICE memory of this end can be read and written, too; otherwise only HOST memory.
    """

    has_one_queue: bool = False
    takes_gates: bool = True
    runs_blocks: bool = True
    needs_loans: bool = False
    has_connections: bool = False
    tells_access: bool = True
    reaches_host: bool = True
    reaches_device: bool = True

    def __init__(self, device: Device) -> None:
        self.device = device

    def open_stream(self, name: str, *, is_serial: bool = False, is_ordered: bool = False) -> Stream:
        """Return a new stream for programs with gets and puts of this channel. The caller must close it before the channel.

        Args:
            is_serial: as in :meth:`~aiodatadist._device.Device.open_stream`.
            is_ordered: True if programs of one priority must end in the order of their submission. Those of a device always
                do.
        """
        return self.device.open_stream(name, is_serial=is_serial)

    def lend(self, regions: Sequence[Region], access: Access) -> None:  # noqa: B027 - what is shown needs no loan
        """Let the peer reach regions from now on. Each call needs its own :meth:`take_back`, unless the channel is closed."""

    def take_back(self, regions: Sequence[Region], access: Access) -> None:  # noqa: B027 - the same
        """Undo one :meth:`lend` with the same arguments. Once this returns, no byte of them moves, unless still lent."""

    @abstractmethod
    def add_get(self, program: Program, grid: Grid) -> None:
        """Add a step that reads the grid's remote side into its local side."""

    @abstractmethod
    def add_put(self, program: Program, grid: Grid, layering: Layering | None = None) -> None:
        """Add a step that writes the grid's local side to its remote side, layer by layer if there is a ``layering``."""

    def take_over(self, program: Program) -> None:
        """Move a program that was made for another channel to this peer, and has not started, to this channel.

        For channels that have one queue.
        """
        raise NotImplementedError

    def when_broken(self, call: Callable[[str], object]) -> None:  # noqa: B027 - most channels have no connections to lose
        """Call ``call`` if a connection of the channel ends before the channel is closed: once, on the event loop.

        Its argument says why, in words. If a connection has ended already, it is called soon.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close the channel; its transfers must have ended. May be called twice.

        Whatever the peer does, none of its bytes lands in our memory after this has returned.

        Raises:
            StillWritten: if that cannot be promised yet. Call it again after :meth:`wait_let_go`.
            LLMException: if the runtime refused. It then stays unknown if the peer can still write.
        """

    async def wait_let_go(self) -> None:  # noqa: B027 - a channel that never raises it has nothing to wait for
        """Wait, after ``StillWritten``, until :meth:`aclose` is worth another try. There is no limit. May be cancelled."""

    def abandon(self) -> None:  # noqa: B027 - the same
        """Release everything without waiting, after ``StillWritten``. Memory that the peer may write is withheld.

        Memory of the device stays mapped as long as a peer in this process copies there, even if the device is closed.
        """


class Transport(ABC):
    """A factory of channels for one device. Regions are counted: each ``register`` needs its own ``unregister``.

    Attributes:
        rdma: options for channels over RDMA.
        tcp: options for channels over TCP.
        epoch: grows whenever a region becomes known. A channel reaches the regions of the epoch in which it was opened.

    Every method raises LLMException if the runtime refuses.
    """

    name: ClassVar[str]

    def __init__(
        self,
        device: Device,
        resource: str | None = None,
        rdma: RdmaConfig = DEFAULT_RDMA,
        tcp: TcpConfig = DEFAULT_TCP,
    ) -> None:
        self.device = device
        self.rdma = rdma
        self.tcp = tcp
        self.epoch = 0

    @property
    @abstractmethod
    def endpoint(self) -> Endpoint:
        """The endpoint by which peers reach this device."""

    @abstractmethod
    async def register(self, regions: Sequence[Region]) -> None:
        """Register regions: all of them or, after failure and cancellation, none. Channels opened later cover them.

        Raises:
            ParamInvalid: if one overlaps another region without being the same.
        """

    def is_private(self, region: Region) -> bool:
        """Return True if a peer can reach a region only together with all memory of this process."""
        return False

    def withdraw(self, regions: Sequence[Region]) -> None:  # noqa: B027 - a transport that binds nothing has nothing to leave out
        """Announce that each of these will be unregistered once. Channels that are opened from now on leave them out.

        A region that others have registered, too, stays covered. Registering a region again, or an ``unregister`` that
        fails, undoes this.
        """

    @abstractmethod
    async def unregister(self, regions: Sequence[Region]) -> None:
        """Unregister regions, even if cancelled. No open channel may cover them.

        Raises:
            LLMException: if the runtime refused one; it stays registered, and the others are released.
        """

    @abstractmethod
    async def open_channel(self, offer: ChannelOffer, timeout: float) -> Channel:
        """Open a channel together with the peer, which calls this at about the same time.

        If cancelled, it returns only when the runtime has let go. On an NPU, and on strict softnpu, that is when the
        runtime has given up waiting for the peer by itself, after up to three times ``timeout``; otherwise at once. A
        failed attempt is not retried: a further call starts from the beginning.

        Raises:
            LinkTimeout: if the peer did not come in time.
            LinkError: if the channel could not be made.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release all regions. Channels must be closed."""
