"""The end that moves blocks and measures. Transfers and plain memcpy take turns, so that a slow minute affects both."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    CacheTask,
    LLMClusterInfo,
    LLMDataDist,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from aiodatadist._cli.bench.against.contender import Contender, open_contenders
from aiodatadist._cli.bench.caches import BenchCache, moved, open_cache
from aiodatadist._cli.bench.figures import MEMCPY, Row, Window
from aiodatadist._cli.bench.lateness import ticking
from aiodatadist._cli.bench.messages import ANSWER, Check, Clear, Done, Open, Question, Spent
from aiodatadist._cli.bench.workload import Case, Moves, Op
from aiodatadist._cli.kit.errors import CommandError
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._device.plain_copy import plain_copy_seconds

LINK_MILLISECONDS = 30_000
ANSWER_SECONDS = 120.0
"""Seconds for the owner to allocate and fill a cache of many GiB, or to compare it."""
MEMCPY_BYTES = 64 << 20
"""The fewest bytes of one memcpy measurement: copying 16 KiB takes less time than the call."""

Start = Callable[[Moves], CacheTask]


@dataclass(frozen=True)
class Lengths:
    """The time for which a case is measured.

    Attributes:
        seconds: time for transfers.
        windows: number of windows, with memcpy in between; spreads are over the windows.
        warmup: seconds of transfers before that, which do not count; at least one transfer.
        check: True to check every byte of one round of transfers at the end.
    """

    seconds: float = 2.0
    windows: int = 10
    warmup: float = 0.2
    check: bool = True


class RemoteOwner:
    """The other end, as the initiator sees it.

    Attributes:
        address: the address on which it listens.
        way: how the bytes of the last link to it travelled; empty if there was none.
    """

    def __init__(self, datadist: LLMDataDist, cluster_id: int, address: tuple[str, int]) -> None:
        self.cluster_id = cluster_id
        self.address = address
        self.way = ""
        self._datadist = datadist
        self._answers = datadist.notifications()
        self._peer = LLMClusterInfo(cluster_id)
        self._peer.append_remote_ip_info(*address)

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[None]:
        """Keep a link to the owner. Raises CommandError if there is none; the reason is logged."""
        status, _ = await self._datadist.link_clusters([self._peer], LINK_MILLISECONDS)
        if status is not LLMStatusCode.LLM_SUCCESS:
            raise CommandError(f"no link to the owner at {self.address[0]}:{self.address[1]}: {status.name}")
        self.way = next((link.transport for link in self._datadist.statistics().links), "")
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):  # bounded by its own timeout
                await self._datadist.unlink_clusters([self._peer], LINK_MILLISECONDS)

    async def ask(self, question: Question) -> Done:
        """Ask the owner, and return its answer.

        Raises:
            CommandError: if the owner refused, or did not answer in time.
            LLMException: if the link to the owner ended.
        """
        await self._datadist.notify(self.cluster_id, question.payload())
        with anyio.move_on_after(ANSWER_SECONDS):
            answer = ANSWER.validate_json((await anext(self._answers)).payload)
            if isinstance(answer, Done):
                return answer
            raise CommandError(f"the owner refused: {answer.message}")
        raise CommandError(f"the owner did not answer within {ANSWER_SECONDS:.0f} s")


class Checked:
    """The same transfers with checksums, in turns with those without.

    Attributes:
        owner_seconds: CPU time of the owner for these.
    """

    name = "with checksums"
    what = "CRC-32C of every block"

    def __init__(self, owner: RemoteOwner, case: Case, start: Start) -> None:
        self._owner, self._case, self._start = owner, case, start
        self.owner_seconds = 0.0

    async def window(self, seconds: float) -> Window:
        before = (await self._owner.ask(Spent())).cpu_seconds
        window = await _window(self._case, self._start, seconds)
        spent = (await self._owner.ask(Spent())).cpu_seconds - before
        self.owner_seconds += spent
        window.cpu_seconds += spent
        return window

    async def wrong(self) -> None:
        """Return no blocks: a transfer with checksums that succeeded is correct."""


async def measure(
    datadist: LLMDataDist,
    owner: RemoteOwner,
    case: Case,
    lengths: Lengths,
    against: Sequence[str] = (),
    checksum: bool = False,
) -> list[Row]:
    """Return the rows of a case, measured in turns.

    There is a row for this library, one with checksums if asked for, and one for each other library and memcpy if asked
    for.

    Raises:
        CommandError: if there is no link, the owner refused the case or did not answer, or another library, or memcpy,
            does not work here.
        LLMException: if a transfer failed, or there is not enough memory.
    """
    async with AsyncExitStack() as stack:
        libraries = [name for name in against if name != MEMCPY]
        contenders: list[Contender | Checked] = [*await stack.enter_async_context(open_contenders(libraries, case))]
        cache = await _opened(stack, datadist, case)
        shadow = None if cache.staging is not None else await _opened(stack, datadist, case)
        if MEMCPY in against and shadow is None:
            raise CommandError(
                "--against memcpy: the host cannot address this memory; --memory host or user has a memcpy"
            )
        await stack.enter_async_context(owner.linked())
        model_id = secrets.randbelow(2**62)
        await owner.ask(Open(case=case, model_id=model_id))
        if case.op is not Op.PULL:
            await cache.fill(datadist.cluster_id)
        key = BlocksCacheKey(owner.cluster_id, model_id)
        start = _starter(datadist, key, cache)
        await _window(case, start, lengths.warmup)
        checked = Checked(owner, case, _starter(datadist, key, cache, checksum=True))
        if checksum:
            await checked.window(lengths.warmup)
            checked.owner_seconds = 0.0
            contenders.insert(0, checked)
        turns = _Turns(case, start, None if shadow is None else _limit(cache, shadow), contenders)
        before = (await owner.ask(Spent())).cpu_seconds
        for _ in range(lengths.windows):
            await turns.take(lengths.seconds / lengths.windows)
        spent = (await owner.ask(Spent())).cpu_seconds - before - checked.owner_seconds
        wrong = await _check(datadist, owner, cache, start) if lengths.check else None
        rows = [Row.of(case, turns.windows, turns.limits, spent, wrong)]
        for contender in contenders:
            wrong = await contender.wrong() if lengths.check else None
            by = contender.name, contender.what
            rows.append(Row.of(case, turns.others[contender.name], turns.limits, 0.0, wrong, by))
        if MEMCPY in against:
            rows.append(Row.of(case, turns.memcpy, turns.limits, 0.0, None, (MEMCPY, "one thread, in this process")))
        return rows


class _Turns:
    """Transfers, memcpy and other libraries, which take turns."""

    def __init__(
        self, case: Case, start: Start, limit: Callable[[], Window] | None, contenders: Sequence[Contender | Checked]
    ) -> None:
        self._case, self._start, self._limit, self._contenders = case, start, limit, contenders
        self.windows: list[Window] = []
        self.memcpy: list[Window] = []
        self.others: dict[str, list[Window]] = {contender.name: [] for contender in contenders}

    @property
    def limits(self) -> list[float]:
        """The bytes per second of memcpy."""
        return [window.transfers * self._case.nbytes / window.seconds for window in self.memcpy]

    async def take(self, seconds: float) -> None:
        self.windows.append(await _window(self._case, self._start, seconds))
        if self._limit is not None:
            self.memcpy.append(await in_thread(self._limit))
        for contender in self._contenders:
            self.others[contender.name].append(await contender.window(seconds))


async def _opened(stack: AsyncExitStack, datadist: LLMDataDist, case: Case) -> BenchCache:
    cache = await open_cache(datadist, case, None)
    stack.push_async_callback(cache.aclose)
    return cache


def _starter(datadist: LLMDataDist, key: BlocksCacheKey, cache: BenchCache, checksum: bool = False) -> Start:
    """Return a function that starts a transfer of the case. ``key`` names the owner's cache."""
    manager, case, local = datadist.cache_manager, cache.case, cache.cache
    layers = range(case.layers)

    def layered(moves: Moves) -> CacheTask:
        synchronizer = AwaitableLayerSynchronizer(case.layers)
        for layer in layers:
            synchronizer.ready(layer)
        config = TransferWithCacheKeyConfig(key, layers, layers)
        return manager.transfer_cache_async(local, synchronizer, [config], moves.sources, moves.targets)

    starters: dict[Op, Start] = {
        Op.PULL: lambda moves: manager.pull_blocks(key, local, moves.sources, moves.targets, checksum=checksum),
        Op.PUSH: lambda moves: manager.push_blocks(key, local, moves.sources, moves.targets, checksum=checksum),
        Op.LAYERED: layered,
        Op.COPY: lambda moves: manager.copy_blocks(local, {a: [b] for a, b in zip(*moves, strict=True)}),
    }
    return starters[case.op]


async def _window(case: Case, start: Start, seconds: float) -> Window:
    """Transfer for ``seconds``, and at least once in each concurrent task."""
    window = Window()
    with ticking() as window.late:
        began, cpu = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as tasks:
            for moves in case.moves:
                tasks.start_soon(_transfers, window, start, moves, began + seconds)
        window.seconds, window.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return window


async def _transfers(window: Window, start: Start, moves: Moves, until: float) -> None:
    """Do transfers one after the other."""
    now = time.perf_counter
    while True:
        began = now()
        task = start(moves)
        posted = now()
        report = await task
        done = now()
        window.post.append(posted - began)
        window.latency.append(done - began)
        window.transfer.append(report.transfer_seconds)
        if done >= until:
            return


def _limit(cache: BenchCache, shadow: BenchCache) -> Callable[[], Window]:
    """Return a function that measures a window of plain memcpy of the same ranges, from or to memory of the same kind."""
    into, out_of = (cache, shadow) if cache.case.op is Op.PULL else (shadow, cache)
    targets, sources = _addresses(into, 1), _addresses(out_of, 0)
    block = cache.case.block
    rounds = -(-MEMCPY_BYTES // (len(targets) * block))

    def window() -> Window:
        cpu = time.thread_time()
        seconds = plain_copy_seconds(targets, sources, block, rounds)
        return Window(seconds, time.thread_time() - cpu, untimed=rounds * len(cache.case.moves))

    return window


def _addresses(cache: BenchCache, side: int) -> array[int]:
    """Return the addresses of the sources (0) or targets (1) of all transfers, in the order in which they move."""
    case, starts = cache.case, cache.cache.tensor_addrs
    return array("Q", [start + block * case.block for moves in case.moves for start in starts for block in moves[side]])


async def _check(datadist: LLMDataDist, owner: RemoteOwner, cache: BenchCache, start: Start) -> list[str]:
    """Clear the targets, move everything once, and return which blocks have wrong contents."""
    case, ours = cache.case, datadist.cluster_id
    if case.op is Op.PULL:
        await cache.fill(0)
    elif case.op is Op.COPY:
        await cache.fill(ours)  # no target holds what is its source's
    else:
        await owner.ask(Clear())
    await _window(case, start, 0)
    if case.op in {Op.PULL, Op.COPY}:
        return await cache.wrong(owner.cluster_id if case.op is Op.PULL else ours, moved(case))
    return (await owner.ask(Check())).wrong
