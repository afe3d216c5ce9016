"""A cluster on a machine, as a program: it obeys orders, a line each, and answers each with a line.

Its argument is JSON: ``cluster_id``, and the ``options`` of :class:`LLMConfig`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
from contextlib import suppress
from typing import Any

import anyio

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheTask,
    DataType,
    LinkPhase,
    LLMException,
    PeerLost,
    TransferWithCacheKeyConfig,
)
from aiodatadist.testing import Cluster, open_cluster, soft_faults_cleared, soft_hold, verify
from tests.machines.orders import serve

LAYERS, BLOCKS, BLOCK = 2, 16, 4096
POISON = 255
"""The byte that a source has when nothing may read it any longer."""


class Immediate:
    """A synchronizer for layers that are computed already."""

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


class End:
    """A cluster with a cache of blocks, each stamped with its own pattern. Its public methods are orders."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._datadist = cluster.datadist
        self._manager = cluster.datadist.cache_manager
        self._changes = cluster.datadist.link_changes()
        self._notes = cluster.datadist.notifications()
        self._cache: Cache | None = None
        self._copy = b""
        self._begun: CacheTask | None = None

    # ---- links ----

    async def link(self, peer: int, host: str, port: int, timeout: float = 30.0) -> None:
        """Link to a peer that listens."""
        await self._datadist.link_to(peer, (host, port), timeout=timeout)

    async def way(self, peer: int) -> str:
        """Return how the bytes of the link to a peer travel."""
        return next(link.transport for link in self._datadist.statistics().links if link.cluster_id == peer)

    async def unlink(self, peer: int) -> None:
        """End the link to a peer."""
        await self._datadist.unlink_from(peer, timeout=30.0)

    async def wait_linked(self, peer: int) -> None:
        """Wait until there is a link to the peer."""
        await self._datadist.wait_linked(peer)

    async def ping(self, peer: int) -> None:
        """Exchange a message with a peer."""
        await self._datadist.check_link_status(peer)

    async def closed(self, peer: int) -> str:
        """Wait until the link has ended, and return the reason."""
        return await self._datadist.wait_link_closed(peer)

    async def until(self, phase: str) -> list[list[Any]]:
        """Wait for a change to this phase; return all up to it, each as peer, phase, and class and words of the reason."""
        told = []
        async for change in self._changes:
            reason = change.reason
            words = ["", ""] if reason is None else [type(reason).__name__, str(reason)]
            told.append([change.cluster_id, change.state.name, *words])
            if change.state is LinkPhase[phase]:
                break
        return told

    async def notify(self, peer: int, text: str) -> None:
        """Send a notification."""
        await self._datadist.notify(peer, text.encode())

    async def note(self) -> list[Any]:
        """Wait for a notification; return its sender and its text."""
        note = await anext(self._notes)
        return [note.cluster_id, note.payload.decode()]

    async def held(self) -> list[int]:
        """Return how many descriptors and threads this process has."""
        return [len(os.listdir("/proc/self/fd")), threading.active_count()]  # noqa: PTH208

    # ---- blocks ----

    async def cache(self, blocks: int = BLOCKS, block: int = BLOCK) -> None:
        """Register a cache of blocks, two tensors for each layer."""
        self._cache = await self._cluster.blocks(CacheDesc(2 * LAYERS, [blocks, block], DataType.DT_UINT8))

    async def pull(self, peer: int, src: list[int], dst: list[int], deadline: float | None = None) -> int:
        """Pull blocks of a peer's cache; return the bytes. A deadline, in seconds, replaces the cluster's."""
        return (await self._manager.pull_blocks(BlocksCacheKey(peer), self._own, src, dst, deadline=deadline)).bytes

    async def push(self, peer: int, src: list[int], dst: list[int]) -> int:
        """Push blocks into a peer's cache; return the bytes."""
        return (await self._manager.push_blocks(BlocksCacheKey(peer), self._own, src, dst)).bytes

    async def push_layers(self, peer: int, src: list[int], dst: list[int]) -> None:
        """Push blocks layer by layer."""
        config = TransferWithCacheKeyConfig(BlocksCacheKey(peer), range(LAYERS), range(LAYERS))
        await self._manager.transfer_cache_async(self._own, Immediate(), [config], src, dst)

    async def verify(self, moved: dict[str, list[int]]) -> None:
        """Check every block. ``moved`` names the owner, and its block, of those that came from elsewhere.

        Raises AssertionError if one has other contents.
        """
        verify(self._memory, self._own, _places(moved), owner=self._datadist.cluster_id)

    async def verify_blocks(self, moved: dict[str, list[int]]) -> None:
        """Do the same, but look at no other blocks."""
        verify(self._memory, self._own, _places(moved))

    async def fail(self, what: str, peer: int, src: list[int], dst: list[int]) -> list[str]:
        """Pull or push blocks until that fails, and keep a copy of memory; return class and words of the error."""
        try:
            await getattr(self, what)(peer, src, dst)
        except LLMException as error:
            await self.keep()
            return [type(error).__name__, str(error)]
        raise AssertionError(f"{what} has succeeded")

    async def begin(self, what: str, peer: int, src: list[int], dst: list[int]) -> None:
        """Begin to pull or push blocks."""
        call = self._manager.pull_blocks if what == "pull" else self._manager.push_blocks
        self._begun = call(BlocksCacheKey(peer), self._own, src, dst)

    async def cancel(self) -> bool:
        """Cancel what was begun, and keep a copy of memory; return True if it had not ended.

        Raises LLMException if it fails instead.
        """
        assert self._begun is not None
        self._begun.cancel()
        try:
            await self._begun
        except asyncio.CancelledError:
            return True
        finally:
            await self.keep()
        return False

    async def cancel_held(self, peer: int) -> bool:
        """Cancel a pull of all blocks half-way; return True if it was cancelled, and nothing has changed since."""
        blocks = list(range(self._own.cache_desc.shape[0]))
        with soft_faults_cleared(), soft_hold("HcclBatchGet", at="half") as hold, soft_hold("aclrtStreamAbort") as stop:
            await self.begin("pull", peer, blocks, blocks)
            await hold.arrived()
            async with anyio.create_task_group() as group:

                async def release() -> None:
                    await stop.arrived()
                    stop.release()
                    hold.release()

                group.start_soon(release)
                was_cancelled = await self.cancel()
        await self._datadist.check_link_status(peer)
        return was_cancelled and await self.unchanged()

    async def keep(self) -> None:
        """Keep a copy of memory as it is now."""
        self._copy = bytes(self._memory.view())

    async def unchanged(self) -> bool:
        """Return True if memory is as it was when the last copy was made."""
        return bytes(self._memory.view()) == self._copy

    async def cancel_pulls(self, peer: int, count: int, seconds: float, seed: int = 1) -> int:
        """Cancel pulls of all blocks, each within ``seconds``, some after microseconds; return how many had not ended.

        Raises AssertionError if memory changes after a cancellation was delivered.
        """
        chance, cancelled = random.Random(seed), 0
        blocks = list(range(self._own.cache_desc.shape[0]))
        for _ in range(count):
            task = self._manager.pull_blocks(BlocksCacheKey(peer), self._own, blocks, blocks)
            with anyio.move_on_after(seconds * 10 ** (-4 * chance.random())) as scope:  # most of them soon
                await task
            copy = bytes(self._memory.view())
            cancelled += scope.cancelled_caught
            await self._datadist.check_link_status(peer)
            assert bytes(self._memory.view()) == copy, "memory changed after the cancellation"
            self._memory.view()[:] = bytes(len(copy))
        return cancelled

    async def cancel_pushes(self, peer: int, count: int, seconds: float, seed: int = 1) -> list[int]:
        """Cancel pushes of all blocks as :meth:`cancel_pulls` does, while the peer obeys :meth:`watch_pushes`.

        Return how many had not ended, and how many the peer did not confirm in time: that is no cancellation, and the link
        was made again. Memory of this end is filled with ``POISON`` as soon as a cancellation is delivered.
        """
        chance, cancelled, lost = random.Random(seed), 0, 0
        blocks = list(range(self._own.cache_desc.shape[0]))
        view = self._memory.view()
        for number in range(count):
            view[:] = bytes([1 + number % 200]) * len(view)
            task = self._manager.push_blocks(BlocksCacheKey(peer), self._own, blocks, blocks)
            with anyio.move_on_after(seconds * 10 ** (-4 * chance.random())), suppress(PeerLost):
                await task
            view[:] = bytes([POISON]) * len(view)
            cancelled += task.cancelled()
            if task.exception() is not None:
                lost += 1
                await self.until("LINKED")
                await self._ask(peer, b"forget")
                continue
            await self._ask(peer, b"keep")
            assert await self._ask(peer, b"compare") == b"unchanged"
        await self._ask(peer, b"end")
        return [cancelled, lost]

    async def _ask(self, peer: int, words: bytes) -> bytes:
        await self._datadist.notify(peer, words)
        return (await anext(self._notes)).payload

    async def watch_pushes(self, peer: int) -> None:
        """Say, as often as the peer asks, whether memory is unchanged since the last copy, and nothing in it was poisoned."""
        while True:
            note = await anext(self._notes)
            view, answer = self._memory.view(), b"yes"
            if note.payload == b"keep":
                await self.keep()
            elif note.payload == b"compare":
                answer = b"unchanged" if await self.unchanged() and POISON not in bytes(view) else b"changed"
            if note.payload != b"keep":
                view[:] = bytes(len(view))
            await self._datadist.notify(peer, answer)
            if note.payload == b"end":
                return

    @property
    def _own(self) -> Cache:
        assert self._cache is not None, "cache() comes first"
        return self._cache

    @property
    def _memory(self) -> Any:
        return self._cluster.memory(self._own)


def _places(moved: dict[str, list[int]]) -> list[tuple[int, int, int, int]]:
    return [
        (tensor, int(block), owner, source) for tensor in range(2 * LAYERS) for block, (owner, source) in moved.items()
    ]


async def main(cluster_id: int, options: dict[str, Any]) -> None:
    async with open_cluster(cluster_id, **options) as cluster:
        await serve(End(cluster), cluster.datadist.listen_address)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
