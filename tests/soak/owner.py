"""Clusters that are pulled from, in a process of their own.

Prints where each listens. Then, a line on its standard input asks what was lost until now; the end of input ends it.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread

from aiodatadist import (
    BlocksCacheKey,
    CacheKey,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    blocking,
    legacy,
)
from tests.soak.kit import STAMPED, Footprint, Hog, Settings, parse, spin, stamp

DECODE = 10_000
"""The cluster that links to all of these."""
OFFERED = 1
"""Caches that wait for being pulled, of each cluster."""


class Owner:
    """Clusters of one process, with a list of what was lost."""

    def __init__(self, settings: Settings, first: int) -> None:
        self.settings = settings
        share = settings.peers // settings.processes
        self.ids = range(1 + first * share, 1 + (first + 1) * share)
        self.lost: list[str] = []
        self.ports: dict[int, int] = {}

    def say(self, answer: Any) -> None:
        print(json.dumps(answer), flush=True)

    async def listen(self) -> None:
        """Answer each line of the standard input with a report, until it ends."""
        self.say(self.ports)
        before = Footprint.now()
        while await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            self.say({"lost": self.lost, "before": vars_of(before), "after": vars_of(Footprint.now())})

    async def watch(self, datadist: LLMDataDist) -> None:
        await datadist.wait_linked(DECODE)
        why = await datadist.wait_link_closed(DECODE)
        self.lost.append(f"cluster {datadist.cluster_id}: {why}")


def vars_of(footprint: Footprint) -> dict[str, int]:
    return {"files": footprint.files, "threads": footprint.threads, "resident": footprint.resident}


def options_of(settings: Settings, cluster_id: int) -> dict[str, Any]:
    return {
        "listen_ip_info": "127.0.0.1:0",
        "device_id": cluster_id % 8,
        "mem_pool_cfg": settings.pool_cfg,
        "heartbeat_interval": settings.interval / 1000,
        "sync_kv_timeout": 60_000,
    }


async def block_the_loop_now_and_then(settings: Settings) -> None:
    """Compute on the event loop now and then, as some callers do."""
    while settings.mode == "busy":
        await anyio.sleep(0.7)
        spin(0.3)


async def own(owner: Owner) -> None:
    """Clusters of the asynchronous front door, each with a blocks cache."""
    settings = owner.settings
    async with AsyncExitStack() as stack:
        owned = []
        for cluster_id in owner.ids:
            config = LLMConfig(**options_of(settings, cluster_id))
            datadist = await stack.enter_async_context(LLMDataDist(LLMRole.PROMPT, cluster_id, config))
            manager = datadist.cache_manager
            cache = await manager.allocate_blocks_cache(settings.desc, BlocksCacheKey(cluster_id))
            stamp(manager.arrays(cache), cluster_id, range(STAMPED))
            owned.append(datadist)
            address = datadist.listen_address
            owner.ports[cluster_id] = address[1] if address else 0
        async with anyio.create_task_group() as group:
            for datadist in owned:
                group.start_soon(owner.watch, datadist)
            group.start_soon(block_the_loop_now_and_then, settings)
            await owner.listen()
            group.cancel_scope.cancel()


async def own_v1(owner: Owner) -> None:
    """Clusters of the v1 interface; their caches are made anew when a pull has consumed them."""
    settings = owner.settings
    pool = {"ge.flowGraphMemMaxSize": str(settings.pool)}
    async with AsyncExitStack() as stack:
        owned = []
        for cluster_id in owner.ids:
            options = options_of(settings, cluster_id)
            del options["mem_pool_cfg"]
            config = legacy.LLMConfig(**options, ge_options=pool)
            datadist = await stack.enter_async_context(legacy.LLMDataDist(LLMRole.PROMPT, cluster_id, config))
            owned.append(datadist)
            address = datadist.listen_address
            owner.ports[cluster_id] = address[1] if address else 0
        async with anyio.create_task_group() as group:
            for datadist in owned:
                group.start_soon(owner.watch, datadist)
                group.start_soon(offer_v1, settings, datadist)
            group.start_soon(block_the_loop_now_and_then, settings)
            await owner.listen()
            group.cancel_scope.cancel()


async def offer_v1(settings: Settings, datadist: legacy.LLMDataDist) -> None:
    """Request after request, a few at a time: a pull makes room for the next."""
    manager, request = datadist.kv_cache_manager, 0
    desc = settings.desc
    desc.update_dim(0, STAMPED)
    while True:
        usage = manager.pool_usage()
        assert usage is not None
        if usage.total - usage.free > OFFERED * desc.size * desc.num_tensors:
            await anyio.sleep(0.02)
            continue
        keys = [CacheKey(datadist.cluster_id, request + slot) for slot in range(STAMPED)]
        cache = await manager.allocate_cache(desc, keys)
        stamp(manager.arrays(cache), datadist.cluster_id, range(STAMPED))
        await manager.deallocate_cache(cache)  # the keys keep it
        request += STAMPED


def own_blocking(owner: Owner) -> None:
    """Clusters of the blocking front door."""
    settings = owner.settings
    with ExitStack() as stack:
        for cluster_id in owner.ids:
            config = blocking.LLMConfig()
            for name, each in options_of(settings, cluster_id).items():
                setattr(config, name, each)
            config.enable_cache_manager = config.enable_remote_cache_accessible = True
            datadist = blocking.LLMDataDist(blocking.LLMRole.PROMPT, cluster_id)
            datadist.init(config.generate_options())
            stack.callback(datadist.finalize)
            cache = datadist.cache_manager.allocate_blocks_cache(settings.desc, BlocksCacheKey(cluster_id))
            stamp(datadist.cache_manager.arrays(cache), cluster_id, range(STAMPED))
            address = datadist.listen_address
            owner.ports[cluster_id] = address[1] if address else 0
        anyio.run(owner.listen)


def main() -> None:
    settings, others = parse()
    owner = Owner(settings, others.first)
    hog = Hog()
    if settings.mode == "busy":
        hog.start()
    if settings.door == "blocking":
        own_blocking(owner)
    else:
        anyio.run(
            own_v1 if settings.door == "v1" else own, owner, backend_options={"use_uvloop": settings.loop == "uvloop"}
        )
    hog.over.set()


if __name__ == "__main__":
    main()
