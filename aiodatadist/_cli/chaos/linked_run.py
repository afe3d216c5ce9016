"""A run of an owner and a puller, with proxies between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.abc

from aiodatadist._cli.chaos.messages import Peer, Peers
from aiodatadist._cli.chaos.process import SideProcess
from aiodatadist._cli.chaos.profiles import Profile
from aiodatadist._cli.chaos.program import Step
from aiodatadist._cli.chaos.run import Length, Run
from aiodatadist._cli.chaos.sizes import LIVES, LOST
from aiodatadist.testing import ChaosProxy

NOTICED = LOST + 1.0
"""Seconds after which a puller has noticed that the owner was killed, even if it was stopped or busy itself."""


class LinkedRun(Run):
    """The owner's clusters, each behind a proxy, and a puller that links to all of them."""

    def __init__(self, profile: Profile, length: Length, logs: Path) -> None:
        super().__init__(profile, length, logs)
        self._proxies: dict[int, ChaosProxy] = {}
        self._slots: dict[int, int] = {}
        self._killed: dict[int, float] = {}

    async def open(self, stack: AsyncExitStack) -> None:
        for cluster in self.clusters:
            proxy = ChaosProxy(("127.0.0.1", 1), seed=self.result.seed + cluster)
            self._proxies[cluster] = await stack.enter_async_context(proxy)

    async def start(self, name: str, group: anyio.abc.TaskGroup) -> None:
        listening = await self.sides[name].start(group)
        for cluster, peer in listening.peers.items():
            self._proxies[cluster].upstream = ("127.0.0.1", peer.port)
            self._slots[cluster] = peer.slots
        peers = {
            cluster: Peer(port=proxy.address[1], slots=self._slots[cluster]) for cluster, proxy in self._proxies.items()
        }
        await self.sides["puller"].order(Peers(peers=peers))

    def heal(self) -> None:
        for proxy in self._proxies.values():
            proxy.heal()

    async def suffer(self, step: Step) -> None:
        proxy = self._proxies[self._cluster(step)]
        with proxy.down() if step.toxic is None else proxy.under(step.toxic):
            await anyio.sleep(step.seconds)

    def _cluster(self, step: Step) -> int:
        return self.clusters[step.number % len(self.clusters)]

    def concerned(self, step: Step) -> list[int]:
        return self.clusters if step.side else [self._cluster(step)]

    def killed(self, name: str, life: int, at: float) -> None:
        if name == "owner":
            self._killed[life] = at

    @property
    def listener(self) -> Sequence[SideProcess]:
        return [self.sides["puller"]]

    def judge(self) -> None:
        """Check that no transfer that began after the end of a cache returned a byte of it."""
        tally = self.result.tally
        for key, began in tally.seen.items():
            cluster, generation = map(int, key.split("/"))
            killed = self._killed.get(generation // LIVES)
            gone = [tally.retired[key]] if key in tally.retired else []
            gone += [] if killed is None else [killed + NOTICED]
            if gone and began > min(gone):
                late = began - min(gone)
                self.result.violated(
                    "I6", f"a transfer began {late:.3f} s after cluster {cluster}'s generation {generation} was gone"
                )
