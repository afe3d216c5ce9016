"""The puller once more, without await: its calls are made by threads."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread

from aiodatadist import BlocksCacheKey, Cache, LLMClusterInfo, LLMException, LLMRole, LLMStatusCode, blocking
from aiodatadist.blocking import Handle, HandleState
from aiodatadist.cli.chaos.messages import Peer
from aiodatadist.cli.chaos.patch import Patch
from aiodatadist.cli.chaos.puller_side import PullerSide
from aiodatadist.cli.chaos.sizes import (
    INBOX_MODEL,
    LINK_MILLIS,
    PATCH,
    PULLER,
    PULLER_DEVICE,
    SOURCE,
    SOURCE_MODEL,
    config,
    desc,
    some,
)
from aiodatadist.cli.chaos.tally import GOOD
from aiodatadist.testing import BlockLedger

TASKS = 2
WIDE = 2 * PATCH + 1

Call = Callable[[], Any]


class BlockingPuller(PullerSide):
    """A cluster of :mod:`aiodatadist.blocking` that links to all of the owner's."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[dict[int, Peer]]:
        self.datadist = blocking.LLMDataDist(LLMRole.DECODER, PULLER)
        await anyio.to_thread.run_sync(self.datadist.init, config(self.profile, PULLER_DEVICE, None).generate_options())
        try:
            self._targets = [await self._target(cluster) for cluster in self.settings.clusters]
            yield {}
        finally:
            with anyio.CancelScope(shield=True):  # bounded by finalize()
                await anyio.to_thread.run_sync(self.datadist.finalize)

    async def _target(self, cluster: int) -> BlockingTarget:
        manager = self.datadist.cache_manager
        pulled = await anyio.to_thread.run_sync(manager.allocate_blocks_cache, desc((TASKS + 1) * WIDE))
        out = await anyio.to_thread.run_sync(manager.allocate_blocks_cache, desc(PATCH))
        return BlockingTarget(self, cluster, pulled, out)

    def figures(self) -> Iterable[Any]:
        return [self.datadist.figures()]

    def entries(self) -> Iterable[Any]:
        """Return nothing: the table of caches is another thread's."""
        return []

    def start(self, group: anyio.abc.TaskGroup) -> None:
        for target in self._targets:
            target.start(group)

    async def unlink(self, infos: list[LLMClusterInfo]) -> tuple[int, Sequence[LLMStatusCode]]:
        return await anyio.to_thread.run_sync(self.datadist.unlink_clusters, infos, LINK_MILLIS)


class BlockingTarget:
    """A cluster of the owner's, as the blocking puller uses it."""

    def __init__(self, side: BlockingPuller, cluster: int, pulled: Cache, out: Cache) -> None:
        self._side, self._cluster = side, cluster
        self._datadist, self._manager = side.datadist, side.datadist.cache_manager
        ledger = BlockLedger(pulled, PULLER)
        self._patches = [Patch(pulled, ledger, i * WIDE) for i in range(TASKS + 1)]
        for patch in self._patches:
            ledger.write(patch.between)
        self._out, self._out_ledger = out, BlockLedger(out, PULLER, side.settings.life)
        side.ledgers |= {f"pulled {cluster}": ledger, f"pushed {cluster}": self._out_ledger}
        self._version = 0

    def start(self, group: anyio.abc.TaskGroup) -> None:
        work, name = self._side.work, self._cluster
        group.start_soon(work, f"link {name}", self._link)
        for number, patch in enumerate(self._patches[:TASKS]):
            group.start_soon(work, f"pull {name} {number}", partial(self._pull, patch))
        group.start_soon(work, f"push {name}", partial(self._push, self._patches[TASKS]))

    async def _link(self, chance: random.Random) -> None:
        """Link if there is no link, and end the link now and then."""
        states, info = self._datadist.figures().links, self._side.info(self._cluster)
        is_all = sum(states.values()) == len(self._side.settings.clusters)
        if is_all and chance.random() < 0.05:
            await self._status("unlink", lambda: self._datadist.unlink_clusters([info], LINK_MILLIS))
        elif not is_all:
            await self._status("link", lambda: self._datadist.link_clusters([info], LINK_MILLIS))
        await anyio.sleep(0.05)

    async def _status(self, operation: str, call: Call) -> None:
        status, _ = await anyio.to_thread.run_sync(call)
        self._side.tally.ended(operation, LLMStatusCode(status).name)

    async def _pull(self, patch: Patch, chance: random.Random) -> None:
        targets = some(chance, patch.blocks)
        sources = chance.sample(range(SOURCE), len(targets))
        await self._pulled(patch, SOURCE_MODEL, sources, targets, self._cluster, chance)
        self._side.check_between(self._cluster, patch.ledger, chance.sample(patch.between, 3))

    async def _pulled(
        self, patch: Patch, model: int, sources: list[int], targets: list[int], owner: int, chance: random.Random,
        stamped: list[int] | None = None,
    ) -> list[int] | None:  # fmt: skip
        """Return the versions that came, or None if the pull failed."""
        self._side.open(patch.ledger, targets)
        began, key = time.monotonic(), BlocksCacheKey(self._cluster, model)
        if chance.random() < 0.5:
            call = partial(self._manager.pull_blocks, key, patch.cache, sources, targets)
            status = await self._called("pull_blocks", call)
        else:
            submit = partial(self._manager.submit_pull_blocks, key, patch.cache, sources, targets)
            status = await self._submitted("submit_pull_blocks", submit, chance)
        if status != GOOD:
            patch.ledger.reclaim(targets)
            return None
        stamps = patch.ledger.landed(targets, owner, sources if stamped is None else stamped)
        if owner == self._cluster:
            self._side.good(self._cluster, began, stamps[0].generation)
        return [stamp.version for stamp in stamps]

    async def _push(self, patch: Patch, chance: random.Random) -> None:
        """Push, and pull it back to see what is there."""
        sources = some(chance, range(PATCH))
        theirs = chance.sample(range(1, 2 * PATCH, 2), len(sources))
        self._version += 1
        self._out_ledger.write(sources, self._version)
        key = BlocksCacheKey(self._cluster, INBOX_MODEL)
        submit = partial(self._manager.submit_push_blocks, key, self._out, sources, theirs)
        if await self._submitted("submit_push_blocks", submit, chance) != GOOD:
            return
        targets = patch.blocks[: len(sources)]
        versions = await self._pulled(patch, INBOX_MODEL, theirs, targets, PULLER, chance, sources)
        if versions is not None and versions != [self._version] * len(sources):
            self._side.violated("I6", f"pushed was version {self._version}, there is {versions}")

    async def _called(self, operation: str, call: Call) -> str:
        """Make a call that blocks a thread until it has ended."""
        try:
            await anyio.to_thread.run_sync(call)
        except LLMException as error:
            return self._side.ended(operation, error)
        return self._side.ended(operation, None)

    async def _submitted(self, operation: str, submit: Callable[[], Handle], chance: random.Random) -> str:
        """Submit a call, cancel it now and then, and wait for it."""
        handle = submit()
        if chance.random() < 0.2:
            await anyio.sleep(chance.choice((0.0, 0.001, 0.02)) * chance.random())
            handle.cancel()
        if not await anyio.to_thread.run_sync(handle.wait, self._side.profile.patience):
            self._side.violated("I3", f"{operation}: {handle!r} does not end")
        self._manager.drain()
        if handle.poll() is HandleState.CANCELLED:
            self._side.tally.ended(operation, "CANCELLED")
            return "CANCELLED"
        report = handle.report()
        if report is not None:
            self._side.tally.moved += report.bytes
        return self._side.ended(operation, handle.exception())
