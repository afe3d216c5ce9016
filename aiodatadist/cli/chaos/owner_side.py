"""The common part of the owners of all doors: clusters that listen, answer the puller, and write layers to it."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Protocol

import anyio
import anyio.abc

from aiodatadist import AwaitableLayerSynchronizer, CacheTask, LLMDataDist, NotLinked
from aiodatadist.cli.chaos.mail import Mail
from aiodatadist.cli.chaos.messages import Peer, SideSettings
from aiodatadist.cli.chaos.side import Side
from aiodatadist.cli.chaos.sizes import LAYERS, PULLER


class OwnerEnd(Protocol):
    """A cluster of an owner's."""

    mail: Mail
    cluster_id: int

    async def open(self) -> None:
        """Allocate the caches."""

    def as_peer(self) -> Peer:
        """Return what the puller must know."""

    def start(self, group: anyio.abc.TaskGroup) -> None:
        """Start the cluster's tasks."""

    async def drained(self) -> None:
        """Wait, after the end of all operations, for what the puller asked for."""

    async def resumed(self) -> None:
        """Prepare for operations."""

    async def parted(self) -> None:
        """Take back what the puller could reach: the link has ended."""


class OwnerSide(Side):
    """Several clusters in one process."""

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        self._ends: list[OwnerEnd] = []

    @abstractmethod
    async def initialised(self, stack: AsyncExitStack, device: int, cluster_id: int) -> tuple[LLMDataDist, OwnerEnd]:
        """Initialise a cluster that listens, and finalize it with the stack."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[dict[int, Peer]]:
        async with AsyncExitStack() as stack:
            for device, cluster_id in enumerate(self.settings.clusters):
                datadist, end = await self.initialised(stack, device, cluster_id)
                self.datadists.append(datadist)
                self._ends.append(end)
                await end.open()
            yield {end.cluster_id: end.as_peer() for end in self._ends}

    def start(self, group: anyio.abc.TaskGroup) -> None:
        for end in self._ends:
            group.start_soon(end.mail.read)
            end.start(group)

    async def meet(self, peers: dict[int, Peer]) -> None:
        """Do nothing: the puller links to the owner."""

    async def drained(self) -> None:
        for end in self._ends:
            await end.mail.wait_idle()
            await end.drained()

    async def resumed(self) -> None:
        for end in self._ends:
            await end.resumed()

    async def part(self) -> None:
        for datadist in self.datadists:
            with suppress(NotLinked):
                await datadist.wait_link_closed(PULLER)
        for end in self._ends:
            await end.parted()

    async def send_layers(
        self,
        name: str,
        begin: Callable[[AwaitableLayerSynchronizer], CacheTask],
        chance: random.Random,
        deadline: float | None = None,
    ) -> str:
        """Send a cache layer by layer while its layers become final, and return the status."""
        synchronizer = AwaitableLayerSynchronizer(LAYERS)
        async with anyio.create_task_group() as group:
            group.start_soon(_compute_layers, synchronizer, chance)
            status = await self.outcome(name, lambda: begin(synchronizer), chance, may_fail=True, deadline=deadline)
            group.cancel_scope.cancel()
        return status


async def _compute_layers(synchronizer: AwaitableLayerSynchronizer, chance: random.Random) -> None:
    """Make one layer after the other final; now and then one fails."""
    for layer in range(LAYERS):
        await anyio.sleep(chance.choice((0, 0.0005, 0.01)) * chance.random())
        if chance.random() < 0.03:
            synchronizer.fail(layer)
        else:
            synchronizer.ready(layer)


def peer_of(datadist: LLMDataDist, slots: int = 0) -> Peer:
    """Return where a cluster listens. ``slots`` is the id of its contiguous cache."""
    address = datadist.listen_address
    assert address is not None
    return Peer(port=address[1], slots=slots)
