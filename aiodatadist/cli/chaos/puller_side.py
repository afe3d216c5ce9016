"""The common part of the pullers of all doors: one cluster that links to the owner's, and the checks of what came."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from aiodatadist import LLMClusterInfo, LLMStatusCode
from aiodatadist.cli.chaos.mail import Content
from aiodatadist.cli.chaos.messages import Peer, SideSettings
from aiodatadist.cli.chaos.side import Side
from aiodatadist.cli.chaos.tally import GOOD
from aiodatadist.testing import BlockLedger, BlockStamp


class PullerSide(Side):
    """A cluster that links to all of the owner's."""

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        self.peers: dict[int, Peer] = {}

    async def meet(self, peers: dict[int, Peer]) -> None:
        self.peers = peers

    async def resumed(self) -> None:
        """Do nothing: each operation opens the blocks that it needs."""

    async def drained(self) -> None:
        """Do nothing: operations wait for what they ask for."""

    async def part(self) -> None:
        status, each = await self.unlink([self.info(cluster) for cluster in self.settings.clusters])
        if status != LLMStatusCode.LLM_SUCCESS:
            self.violated("I3", f"nothing is under way, and unlinking says {[one.name for one in each]}")

    @abstractmethod
    async def unlink(self, infos: list[LLMClusterInfo]) -> tuple[int, Sequence[LLMStatusCode]]:
        """Unlink from clusters, and return the statuses."""

    def info(self, cluster_id: int) -> LLMClusterInfo:
        """Return the id of a cluster, and where it listens if that is known."""
        info = LLMClusterInfo(cluster_id)
        peer = self.peers.get(cluster_id)
        if peer is not None:
            info.append_remote_ip_info("127.0.0.1", peer.port)
        return info

    async def pulled(
        self,
        cluster_id: int,
        ledger: BlockLedger,
        sources: Sequence[int],
        targets: Sequence[int],
        pull: Callable[[], Awaitable[str]],
        wait_usable: Callable[[], Awaitable[None]],
        tensors: range | None = None,
    ) -> list[BlockStamp] | None:
        """Let a transfer write into ``targets``, and check what came. Returns None if it failed."""
        self.open(ledger, targets, tensors)
        began = time.monotonic()
        if await pull() == GOOD:
            return self.came(cluster_id, ledger, sources, targets, began, tensors)
        await wait_usable()
        ledger.reclaim(targets, tensors)
        return None

    def came(
        self,
        cluster_id: int,
        ledger: BlockLedger,
        sources: Sequence[int],
        targets: Sequence[int],
        began: float,
        tensors: range | None = None,
    ) -> list[BlockStamp]:
        """Check the blocks that a transfer brought, and return their stamps."""
        stamps = ledger.landed(targets, cluster_id, sources, tensors)
        generations = {stamp.generation for stamp in stamps}
        if len(generations) > 1:
            self.violated("I6", f"one transfer from {cluster_id} brought generations {generations}")
        self.good(cluster_id, began, stamps[0].generation)
        return stamps

    def check_between(self, cluster_id: int, ledger: BlockLedger, blocks: Sequence[int]) -> None:
        """Check blocks beside those of a pull, which it must not touch."""
        for words in ledger.wrong(blocks):
            self.violated("I1", f"beside a pull from {cluster_id}: {words}")


async def no_answer(_: int, __: Content) -> Content:
    """Answer nothing: the owner asks nothing."""
    return {}
