"""The end that links and pulls, and says at last what was lost."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from aiodatadist import (
    BlocksCacheKey,
    Cache,
    CacheKey,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    blocking,
    legacy,
)
from tests.soak.context import soak_context
from tests.soak.kit import STAMPED, Footprint, Hog, Settings, misplaced, parse, spin
from tests.soak.owner import DECODE, options_of, vars_of

AT_A_TIME = 16
"""Clusters that are linked in one call: v1 takes no more."""
PERIODS = {"idle": 3600.0, "load": 0.0, "busy": 0.1}
"""Seconds between two transfers of a task."""


@dataclass
class Outcome:
    """The outcome of a soak."""

    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    transfers: int = 0
    link_seconds: float = 0.0
    footprints: list[Any] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.lost and not self.wrong


class Owners:
    """Processes of ``tests.soak.owner``."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._processes = []
        for number in range(settings.processes):
            command = [sys.executable, "-m", "tests.soak.owner", *settings.arguments(), f"--first={number}"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.enter_context(process)  # closes its pipes when it has ended
            stack.enter_context(ended(process))
            self._processes.append(process)
        self.infos: list[LLMClusterInfo] = []
        for process in self._processes:
            for cluster_id, port in json.loads(self._line(process)).items():
                info = LLMClusterInfo(int(cluster_id))
                info.append_remote_ip_info("127.0.0.1", port)
                self.infos.append(info)

    @staticmethod
    def _line(process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        return process.stdout.readline()

    def report(self, outcome: Outcome) -> None:
        """Collect what the owners report of their own losses. This blocks: nothing is soaked any more."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"report\n")
            process.stdin.flush()
            line = self._line(process)
            if not line:
                outcome.lost.append(f"an owner's process ended: {process.wait()}")
                continue
            answer = json.loads(line)
            outcome.lost += [f"at the owner: {each}" for each in answer["lost"]]
            outcome.footprints.append([answer["before"], answer["after"]])


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError("an owner did not end within 60 s") from None


# ---- await ----


async def soak_await(settings: Settings, owners: Owners, outcome: Outcome) -> None:
    options = options_of(settings, 0)
    async with LLMDataDist(LLMRole.DECODER, DECODE, LLMConfig(**options)) as datadist:
        cache = await datadist.cache_manager.allocate_blocks_cache(settings.desc, BlocksCacheKey(DECODE))
        async with linked(datadist, owners, outcome):
            puller = Puller(settings, datadist, cache, outcome)
            before = Footprint.now()
            with anyio.move_on_after(settings.seconds):
                async with anyio.create_task_group() as group:
                    for number in range(4):
                        group.start_soon(puller.pull_on, number)
                    group.start_soon(puller.make_and_give_up)
                    group.start_soon(block_the_loop, settings)
            outcome.footprints.insert(0, [vars_of(before), vars_of(Footprint.now())])
            for info in owners.infos:
                await puller.pull(info.remote_cluster_id or 0, random.Random(1), STAMPED)
            await anyio.to_thread.run_sync(owners.report, outcome)


@asynccontextmanager
async def linked(datadist: LLMDataDist, owners: Owners, outcome: Outcome) -> AsyncIterator[None]:
    """To all owners; each link that ends before the end is lost."""

    async def watch(cluster_id: int) -> None:
        why = await datadist.wait_link_closed(cluster_id)
        outcome.lost.append(f"link to cluster {cluster_id}: {why}")

    begin = time.monotonic()
    for first in range(0, len(owners.infos), AT_A_TIME):
        status, each = await datadist.link_clusters(owners.infos[first : first + AT_A_TIME], 30_000)
        if status is not LLMStatusCode.LLM_SUCCESS:
            raise AssertionError(f"not linked: {[one.name for one in each]}")
    outcome.link_seconds = time.monotonic() - begin
    async with anyio.create_task_group() as group:
        for info in owners.infos:
            group.start_soon(watch, info.remote_cluster_id or 0)
        yield
        group.cancel_scope.cancel()


async def block_the_loop(settings: Settings) -> None:
    while settings.mode == "busy":
        await anyio.sleep(0.7)
        spin(0.3)


class Puller:
    """Pulls blocks of any peer into blocks of its own part of the cache, and looks at them."""

    def __init__(self, settings: Settings, datadist: LLMDataDist, cache: Cache, outcome: Outcome) -> None:
        self._settings = settings
        self._manager = datadist.cache_manager
        self._cache = cache
        self._outcome = outcome

    async def pull_on(self, number: int) -> None:
        chance = random.Random(self._settings.seed + number)
        while True:
            await anyio.sleep(PERIODS[self._settings.mode])
            await self.pull(chance.randint(1, self._settings.peers), chance, number)

    async def pull(self, peer: int, chance: random.Random, number: int) -> None:
        """Into the ``number``-th of the blocks that are used."""
        count = chance.randint(1, STAMPED)
        source = chance.sample(range(STAMPED), count)
        target = [number * STAMPED + i for i in range(count)]
        try:
            await self._manager.pull_blocks(BlocksCacheKey(peer), self._cache, source, target)
        except LLMException as error:
            self._outcome.lost.append(f"a pull from {peer}: {error}")
            await anyio.sleep(1)
            return
        self._outcome.transfers += 1
        if wrong := misplaced(self._manager.arrays(self._cache), peer, source, target):
            self._outcome.wrong.append(f"pull from {peer} of {source} to {target}: {wrong[:5]}")

    async def make_and_give_up(self) -> None:
        """Make a small cache that peers never hear of, and give it up, again and again."""
        desc = self._settings.desc
        desc.update_dim(0, 2)
        while True:
            await anyio.sleep(max(0.05, PERIODS[self._settings.mode]))
            cache = await self._manager.allocate_blocks_cache(desc)
            await self._manager.copy_blocks(cache, {0: [1]})
            await self._manager.deallocate_blocks_cache(cache)


# ---- without await ----


def soak_blocking(settings: Settings, owners: Owners, outcome: Outcome) -> None:
    config = blocking.LLMConfig()
    for name, each in options_of(settings, 0).items():
        setattr(config, name, each)
    config.enable_cache_manager = config.enable_remote_cache_accessible = True
    datadist = blocking.LLMDataDist(blocking.LLMRole.DECODER, DECODE)
    datadist.init(config.generate_options())
    try:
        begin = time.monotonic()
        status, each = datadist.link_clusters(owners.infos, 30_000)
        outcome.link_seconds = time.monotonic() - begin
        if status != LLMStatusCode.LLM_SUCCESS:
            outcome.lost.append(f"links: {each}")
            return
        manager = datadist.cache_manager
        cache = manager.allocate_blocks_cache(settings.desc, BlocksCacheKey(DECODE))
        before = Footprint.now()
        chance = random.Random(settings.seed)
        end = time.monotonic() + settings.seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, PERIODS[settings.mode]))
            one_blocking(manager, cache, chance.randint(1, settings.peers), chance, outcome)
            many_submitted(manager, cache, settings, chance, outcome)
        outcome.footprints.insert(0, [vars_of(before), vars_of(Footprint.now())])
        for info in owners.infos:
            one_blocking(manager, cache, info.remote_cluster_id or 0, chance, outcome)
        owners.report(outcome)
    finally:
        datadist.finalize()


def one_blocking(manager: Any, cache: Any, peer: int, chance: random.Random, outcome: Outcome) -> None:
    source = chance.sample(range(STAMPED), chance.randint(1, STAMPED))
    target = list(range(len(source)))
    try:
        manager.pull_blocks(BlocksCacheKey(peer), cache, source, target)
    except LLMException as error:
        outcome.lost.append(f"a pull from {peer}: {error}")
        time.sleep(1)
        return
    outcome.transfers += 1
    if wrong := misplaced(manager.arrays(cache), peer, source, target):
        outcome.wrong.append(f"pull from {peer} of {source} to {target}: {wrong[:5]}")


def many_submitted(manager: Any, cache: Any, settings: Settings, chance: random.Random, outcome: Outcome) -> None:
    """Submit, go on and drain, as a serving worker does."""
    handles = {}
    for number in range(4):
        peer = chance.randint(1, settings.peers)
        target = [STAMPED * (1 + number) + i for i in range(STAMPED)]
        handle = manager.submit_pull_blocks(BlocksCacheKey(peer), cache, range(STAMPED), target, tag=(peer, target))
        handles[handle] = False
    end = time.monotonic() + 60
    while not all(handles.values()):
        if time.monotonic() > end:
            outcome.lost.append(
                f"submitted pulls that never ended: {[each.tag for each, over in handles.items() if not over]}"
            )
            return
        for handle in manager.drain():
            handles[handle] = True
            peer, target = handle.tag
            if handle.exception() is not None:
                outcome.lost.append(f"a submitted pull from {peer}: {handle.exception()}")
            elif wrong := misplaced(manager.arrays(cache), peer, list(range(STAMPED)), target):
                outcome.wrong.append(f"submitted pull from {peer}: {wrong[:5]}")
            outcome.transfers += 1
        time.sleep(0.0005)


# ---- v1 ----


async def soak_v1(settings: Settings, owners: Owners, outcome: Outcome) -> None:
    options = options_of(settings, 0)
    del options["mem_pool_cfg"], options["listen_ip_info"]
    config = legacy.LLMConfig(**options, ge_options={"ge.flowGraphMemMaxSize": str(settings.pool)})
    async with legacy.LLMDataDist(LLMRole.DECODER, DECODE, config) as datadist:
        manager = datadist.kv_cache_manager
        desc = settings.desc
        desc.update_dim(0, STAMPED)
        cache = await manager.allocate_cache(desc)
        asked: dict[int, int] = {}

        async def pull(peer: int) -> None:
            request = asked[peer] = asked.get(peer, -1) + 1
            try:
                await pull_v1(manager, peer, request, cache)
            except LLMException as error:
                outcome.lost.append(f"a pull from {peer} of request {request}: {error}")
                await anyio.sleep(1)
                return
            outcome.transfers += 1
            if wrong := misplaced(manager.arrays(cache), peer, [request % STAMPED], [0]):
                outcome.wrong.append(f"pull from {peer} of request {request}: {wrong[:5]}")

        async with linked(datadist, owners, outcome):
            before = Footprint.now()
            chance = random.Random(settings.seed)
            with anyio.move_on_after(settings.seconds):
                async with anyio.create_task_group() as group:
                    group.start_soon(block_the_loop, settings)
                    while True:
                        await anyio.sleep(PERIODS[settings.mode])
                        with anyio.CancelScope(shield=True):
                            await pull(chance.randint(1, settings.peers))
            outcome.footprints.insert(0, [vars_of(before), vars_of(Footprint.now())])
            for info in owners.infos:
                await pull(info.remote_cluster_id or 0)
            await anyio.to_thread.run_sync(owners.report, outcome)


async def pull_v1(manager: legacy.KvCacheManager, peer: int, request: int, cache: Any) -> None:
    """Pull a cache that may not be there yet: the owner makes its caches one after the other."""
    for attempt in range(100):
        try:
            await manager.pull_cache(CacheKey(peer, request), cache, 0)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_KV_CACHE_NOT_EXIST or attempt == 99:
                raise
            await anyio.sleep(0.05)
        else:
            return


# ---- the demo ----


def soak_demo(settings: Settings, outcome: Outcome) -> None:
    """All of its ways, again and again."""
    ways: tuple[list[str], ...] = ([], ["--layered"], ["--v1"], ["--context-cache"])
    end = time.monotonic() + settings.seconds
    while time.monotonic() < end:
        way = ways[outcome.transfers % len(ways)]
        command = [sys.executable, "-m", "aiodatadist", "demo", "--json", *way]
        run = subprocess.run(command, capture_output=True, check=False, timeout=300)
        if run.returncode:
            outcome.lost.append(f"demo {way}: {run.returncode}: {run.stderr[-500:].decode()}")
        outcome.transfers += 1
        if settings.mode == "idle":
            time.sleep(min(30.0, max(0.0, end - time.monotonic())))


# ---- one of them ----

Soak = Callable[[Settings, Owners, Outcome], Awaitable[None]]


def run(settings: Settings) -> Outcome:
    outcome = Outcome()
    hog = Hog()
    if settings.mode == "busy":
        hog.start()
    try:
        if settings.door == "demo":
            soak_demo(settings, outcome)
        elif settings.door == "context":
            soak_context(settings, outcome)
        else:
            with ExitStack() as stack:
                owners = Owners(settings, stack)
                if settings.door == "blocking":
                    soak_blocking(settings, owners, outcome)
                else:
                    soak: Soak = soak_v1 if settings.door == "v1" else soak_await
                    _run(soak(settings, owners, outcome), settings.loop)
    finally:
        hog.over.set()
    return outcome


def _run(work: Any, loop: str) -> None:
    if loop == "uvloop":
        import uvloop  # noqa: PLC0415 - an extra

        uvloop.run(work)
    else:
        asyncio.run(work)


def main() -> int:
    settings, _ = parse()
    begin = time.monotonic()
    outcome = run(settings)
    answer = {
        "door": settings.door,
        "mode": settings.mode,
        "seconds": round(time.monotonic() - begin, 1),
        **vars(outcome),
    }
    answer["lost"], answer["wrong"] = outcome.lost[:20], outcome.wrong[:20]
    print(json.dumps(answer))
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
