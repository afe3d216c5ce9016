"""The contract of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from aiodatadist.errors import LinkError
from aiodatadist.values.descriptors import Placement

if TYPE_CHECKING:
    from aiodatadist.device import Device, Layering, Program
    from aiodatadist.values.grid import Grid


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process that a peer may read and write once it is registered."""

    address: int
    nbytes: int
    placement: Placement

    def overlaps(self, other: Region) -> bool:
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a peer has to know of us to open a channel. Plain text: it travels in the handshake.

    Attributes:
        transport, runtime: have to be the same on both ends.
        host: identifies the machine (its boot id and user); a runtime that cannot leave the machine compares it.
        server_id, device_id, device_ip: this device in a rank table.
        process: the process id on its machine.
        super_device_id, super_pod_id: on super-pod hardware, else empty.
        device_port, host_ip, backup_device_ip: further words of the rank table, if they were given.
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


@dataclass(frozen=True, slots=True)
class ChannelOffer:
    """Both ends open a channel at the same time with the same offer, apart from ``rank``.

    Attributes:
        name: unique among all channels; at most 127 characters.
        rank: ours, 0 or 1. ``endpoints[rank]`` is ours.
    """

    name: str
    rank: int
    endpoints: tuple[Endpoint, Endpoint]

    @property
    def peer_rank(self) -> int:
        return 1 - self.rank


class RdmaConfig(NamedTuple):
    """What the packets of a channel over RDMA are marked with. None: the environment's ``HCCL_RDMA_TC`` and
    ``HCCL_RDMA_SL``, or the vendor's defaults, 132 and 4."""

    traffic_class: int | None = None
    service_level: int | None = None


DEFAULT_RDMA: Final = RdmaConfig()


class StillWritten(LinkError):
    """A channel is closed, but the peer was stopped in the middle of writing into our memory, and finishes that piece when it
    goes on; or it is the other end in this process, which has not ended a transfer."""


class Channel(ABC):
    """A way to one peer's registered memory. One-sided: the peer takes no part in a transfer.

    A channel covers the regions that both ends had registered when it was opened.

    Attributes:
        has_one_queue: all gets and puts wait in one queue, which any later one starts, from whatever stream. So all of one
            end go through one stream, one at a time, and what was stopped half-way is over only when the channel is closed.
            True over RDMA, and over HCCS if HCCL unfolds batches on the device.
        reaches_host: the peer's HOST memory can be read and written, too; else DEVICE memory only.
    """

    has_one_queue: bool = False
    reaches_host: bool = True

    @abstractmethod
    def add_get(self, program: Program, grid: Grid) -> None:
        """Add a step that reads the grid's remote side into its local side."""

    @abstractmethod
    def add_put(self, program: Program, grid: Grid, layering: Layering | None = None) -> None:
        """Add a step that writes the grid's local side to its remote side; layer by layer, if it says so."""

    def take_over(self, program: Program) -> None:
        """Make a program that was made for another channel to this peer, and has not started, one of this channel. For
        channels that have one queue."""
        raise NotImplementedError

    @abstractmethod
    async def aclose(self) -> None:
        """Give the channel back; its transfers have to be done. May be called twice.

        Whatever the peer does, no byte of its lands in our memory after this returned.

        Raises:
            StillWritten: that cannot be promised yet. Call it again after :meth:`wait_let_go`.
            LLMException: the runtime refused; whether the peer can still write is never known.
        """

    async def wait_let_go(self) -> None:  # noqa: B027 - who never raises it has nothing to wait for
        """After ``StillWritten``: until :meth:`aclose` is worth another try, as long as that takes. May be cancelled."""

    def abandon(self) -> None:  # noqa: B027 - the same
        """After ``StillWritten``: give everything back without waiting. The memory that the peer may write is withheld.

        Memory of the device stays mapped for as long as a peer in this process copies there, even if the device is closed.
        """


class Transport(ABC):
    """Opens channels for one device. Regions are counted: as many ``unregister`` as ``register`` give one back.

    Attributes:
        rdma: for channels over RDMA.
        epoch: grows whenever a region becomes known. A channel reaches the regions of the epoch in which it was opened.

    Raises, from every method: LLMException for what the runtime refuses.
    """

    name: ClassVar[str]

    def __init__(self, device: Device, resource: str | None = None, rdma: RdmaConfig = DEFAULT_RDMA) -> None:
        self.device = device
        self.rdma = rdma
        self.epoch = 0

    @property
    @abstractmethod
    def endpoint(self) -> Endpoint:
        """How to reach this device."""

    @abstractmethod
    async def register(self, regions: Sequence[Region]) -> None:
        """Make regions known, all or, when it fails or is cancelled, none. Channels opened later cover them.

        Raises:
            ParamInvalid: one overlaps another region without being the same.
        """

    def withdraw(self, regions: Sequence[Region]) -> None:  # noqa: B027 - who binds nothing has nothing to leave out
        """They will be unregistered, once each: channels that are opened from now on do not cover what is not registered
        besides. Registering them once more, or an ``unregister`` that fails, undoes it."""

    @abstractmethod
    async def unregister(self, regions: Sequence[Region]) -> None:
        """Forget regions, also when cancelled. No open channel may cover them.

        Raises:
            LLMException: the runtime refused one; it stays registered, the others are forgotten.
        """

    @abstractmethod
    async def open_channel(self, offer: ChannelOffer, timeout: float) -> Channel:
        """Open a channel together with the peer, which calls this at about the same time.

        If cancelled, returns only when the runtime let go: on an NPU, and on strict softnpu, when it gave up waiting for the
        peer by itself, which is up to three times ``timeout``; else at once. What failed is not tried again: a further call
        makes everything anew.

        Raises:
            LinkTimeout: the peer did not come in time.
            LinkError: the channel could not be made.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Forget all regions. Channels have to be closed."""
