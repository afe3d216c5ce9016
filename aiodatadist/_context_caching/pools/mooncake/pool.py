"""Mooncake Store as a pool.

Its calls block, know no deadline and cannot be stopped. So they run in the pool's own threads (``worker_threads``), and
see only the memory of a registered arena (``arena``): if a caller gives up, the memory that the engine may still write
to is set aside until its call has returned, and the caller's own memory is never shown to it.

All values of one distribute key go to one *segment* (the memory that one process lends), which is chosen here; a reader
asks the master. The master's own state is asked over HTTP, because the client library reports success when its master
is dead.
"""

from __future__ import annotations

import logging
import math
import os
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Final, TypeVar

import anyio
import anyio.lowlevel
from pydantic import BaseModel, ConfigDict, Field

from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._context_caching.pools import lending
from aiodatadist._context_caching.pools.arena import Arena, Piece
from aiodatadist._context_caching.pools.contract import (
    Capabilities,
    GetStatus,
    KVPool,
    NodeInfo,
    PoolKey,
    PoolTimeout,
    PoolUnreachable,
    PutStatus,
    Stage,
    Value,
)
from aiodatadist._context_caching.pools.keys import flat, group, rendezvous
from aiodatadist._context_caching.pools.mooncake import master_http
from aiodatadist._context_caching.pools.mooncake import store as mooncake_store
from aiodatadist._context_caching.pools.mooncake.pieces import MooncakeStage, MooncakeValue
from aiodatadist._context_caching.pools.mooncake.place import Place, find_master, read_url
from aiodatadist._context_caching.pools.mooncake.store import (
    MISSES,
    NO_MASTER,
    NO_ROOM,
    NODE_GONE,
    NOT_FOUND,
    OWNER_GONE,
    WRONG_LENGTH,
)
from aiodatadist._context_caching.pools.worker_threads import TooManyHang, WorkerThreads
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.foreign import printable, read_foreign

logger = logging.getLogger(__name__)

T = TypeVar("T")

MASTER: Final = "the master"
ANY_SEGMENT: Final = "any segment"
REFUSED: Final = -1
"""Our own code for a key that was not asked for because its peer hangs. Not one of Mooncake's."""
NOT_THERE: Final = -2
"""Our own code for a key that was put and is not there.

Either another process is putting it now, or it was evicted at once, as happens to young values that no reader has asked
for. Mooncake does not say which; neither is a fault.
"""
BATCH_BYTES: Final = (8 << 20) + (64 << 10)
"""Most bytes in one call of the engine: a value of 8 MiB with its header, or smaller ones that take no longer."""
BATCH_KEYS: Final = 8
"""Most values in one call of the engine: a hanging peer blocks it for 3 seconds, and nearly one more for each value."""
AT_ONCE: Final = max(1, (os.cpu_count() or 1) // 2)
"""Batches of one call that run at a time: each keeps one core busy here, and one at the other end."""
FRESH_SECONDS: Final = 2.0
"""Seconds for which the list of segments is used without asking again."""
WATCH: Final = 0.5
"""Seconds after which a running call checks that the master is still there."""
SUSPECT_SECONDS: Final = 10.0
"""Seconds for which a segment that refused a value gets no others, and an unreadable key counts as absent.

It is the master's own patience with an owner.
"""
MAX_HEALTH: Final = 4096
"""Most bytes of a master's answer about its health."""
CLOSE_TIMEOUT: Final = 30.0
"""Seconds that closing waits for calls that hang in the engine."""

_kept: list[Arena] = []
"""Memory of pools that were closed while calls hung in the engine. It is never freed."""


class _Health(BaseModel):
    """A master's health, as far as it is checked."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=True)

    status: Annotated[str, Field(max_length=64)] = ""
    service_ready: bool | None = None


@dataclass(eq=False)
class _Batch:
    """Values that travel in one call of the engine, to or from one peer.

    Its pieces are free once that call has returned and no caller wants them.
    """

    peer: str
    places: list[int]  # positions in the caller's lists
    keys: list[str]
    pieces: list[Piece]
    groups: list[str]
    segments: list[str]  # the segment of each
    codes: list[int] = field(default_factory=list)
    proven: set[str] = field(default_factory=set)  # keys that were put, read or removed while this read hung
    is_over: bool = False
    is_wanted: bool = True

    def over(self) -> None:
        self.is_over = True
        self._settle()

    def unwanted(self) -> None:
        self.is_wanted = False
        self._settle()

    def _settle(self) -> None:
        if self.is_over and not self.is_wanted:
            for piece in self.pieces:
                piece.release()


class MooncakePool(KVPool):
    """A pool over Mooncake Store, opened with :meth:`open`."""

    capabilities = Capabilities("mooncake", lease=True, placement=True, private_values=True, cancel_is_immediate=False)

    def __init__(self, place: Place, module: Any, store: Any, arena: Arena) -> None:
        self._place = place
        self._module = module
        self._store = store
        self._arena = arena
        self._calls = WorkerThreads(place.threads, max(1, place.threads // 2))
        self._segments: list[str] = []
        self._seen = -math.inf  # time of the master's last answer
        self._suspects: dict[str, float] = {}  # segment: until when
        self._lost = mooncake_store.Lost(SUSPECT_SECONDS)
        self._incidents = Incidents()
        self._hung: set[_Batch] = set()  # reads that no caller waits for any longer
        self._is_closed = False

    @classmethod
    async def open(cls, url: str, *, timeout: float = 10.0) -> MooncakePool:
        """Connect to ``mooncake://host[:port]``, the master's RPC address.

        Options in the query: ``metrics=9003`` (the master's HTTP port), ``segment=0`` (bytes that this process lends to
        the pool), ``memory=256MiB`` (registered memory for values on their way), ``threads=8`` (concurrent calls),
        ``replicas=1``, ``protocol=tcp``, ``device=`` (for RDMA), ``hostname=`` (this machine's, by which others reach
        it).

        Args:
            timeout: seconds for finding the master. The set-up of the engine cannot be stopped and takes its own time:
                a minute or more if something else listens at the RPC port.

        Raises:
            TypeError, ValueError: if the URL is wrong.
            ImportError: if the engine, or a library that it needs, is not installed.
            ParamInvalid: if this process has a pool with other settings.
            PoolTimeout, PoolUnreachable: if no master answers, or it refuses.
        """
        place, settings = read_url(url)
        module = await in_thread(mooncake_store.load)
        here = await find_master(place, anyio.current_time() + timeout)
        settings = settings._replace(host=settings.host or here)
        arena = Arena(place.memory)
        store = await in_thread(_set_up, settings, arena, undo=partial(_let_go, arena))
        return cls(place, module, store, arena)

    # ---- the contract ----

    async def stage(self, sizes: Sequence[int], *, deadline: float) -> list[Stage | None]:
        fits = self._arena.fitting(sizes)
        with lending.until(deadline, "memory for values"):
            pieces = iter(await self._arena.lend([size for size, fit in zip(sizes, fits, strict=True) if fit]))
        return [MooncakeStage(next(pieces)) if fit else None for fit in fits]

    def why_no_room(self, nbytes: int) -> str:
        if nbytes > self._arena.room:
            return f"values on their way have {self._arena.room} bytes: see memory= in the URL"
        if not self._segments:
            return "no process lends memory to this master: see segment= in the URL"
        return "no segment that is lent to this master has room"

    async def put_many(self, keys: Sequence[PoolKey], stages: Sequence[Stage], *, deadline: float) -> list[PutStatus]:
        try:
            lending.same_length(keys, stages, "stages")
            await self._look(deadline)
            pieces = self._take(stages)
        finally:
            for stage in stages:
                stage.release()
        batches = self._batches(keys, pieces, self._segments_to_write())
        for batch in batches:
            batch.unwanted()  # its pieces are freed when the call returns
        await self._run(batches, self._put, deadline, "put", self._was_put)
        statuses = [PutStatus.FAILED] * len(keys)
        for batch in batches:
            for place, code in zip(batch.places, batch.codes, strict=True):
                statuses[place] = _put_status(code)
        failed = [code for batch in batches for code in batch.codes if _put_status(code) is PutStatus.FAILED]
        if failed:
            words = ", ".join("a node hangs" if code == REFUSED else f"code {code}" for code in sorted({*failed}))
            told = "Mooncake refuses to store %d of %d values: %s", len(failed), len(keys), words
            self._incidents.add(Incident.WRITE_REFUSED, logger, *told)
        return statuses

    async def get_many(
        self, keys: Sequence[PoolKey], sizes: Sequence[int], *, deadline: float
    ) -> list[Value | GetStatus]:
        lending.same_length(keys, sizes, "sizes")
        fits = self._arena.fitting(sizes)
        found: list[Value | GetStatus] = [GetStatus.NO_ROOM] * len(keys)
        await self._look(deadline)
        with lending.until(deadline, "memory for values"):
            pieces = await self._arena.lend([size for size, fit in zip(sizes, fits, strict=True) if fit])
        places = [i for i, fit in enumerate(fits) if fit]
        batches = self._batches([keys[i] for i in places], pieces, self._segments)
        try:
            await self._run(batches, self._get, deadline, "get", self._was_read)
        except BaseException:
            for batch in batches:
                if not batch.is_over:
                    self._hung.add(batch)
                batch.unwanted()
            raise
        for batch in batches:
            for place, piece, code in zip(batch.places, batch.pieces, batch.codes, strict=True):
                found[places[place]] = _value(piece, code)
        return found

    async def exists_many(self, keys: Sequence[PoolKey], *, lease: float = 0.0, deadline: float) -> list[bool]:
        """Return for each key True if it is there.

        What is found is protected for the master's ``default_kv_lease_ttl``, whatever ``lease`` says. For some
        seconds the master also lists what was on a dead node: values that this pool failed to read in the last 10
        seconds count as absent until they are put again or read.
        """
        await self._look(deadline)
        batch = _Batch(MASTER, list(range(len(keys))), [flat(key) for key in keys], [], [], [])
        await self._run([batch], lambda asked: list(self._store.batch_is_exist(asked.keys)), deadline, "exists")
        return [code == 1 and key not in self._lost for key, code in zip(batch.keys, batch.codes, strict=True)]

    async def remove_many(self, keys: Sequence[PoolKey], *, deadline: float) -> int:
        await self._look(deadline)
        batch = _Batch(MASTER, list(range(len(keys))), [flat(key) for key in keys], [], [], [])
        await self._run(
            [batch],
            lambda asked: list(self._store.batch_remove(asked.keys, True)),
            deadline,
            "remove",
            self._was_removed,
        )
        return sum(code == 0 for code in batch.codes)

    async def nodes(self, *, deadline: float) -> list[NodeInfo]:
        found: dict[str, NodeInfo] = {}

        async def look(segment: str) -> None:
            text = await self._ask("/query_segment?segment=" + urllib.parse.quote(segment, safe=":"))
            numbers = [line.rpartition(":")[2].strip() for line in text.decode().splitlines()]
            used, capacity = (int(number) for number in numbers[1:3])
            found[segment] = NodeInfo(segment, capacity, used)

        with lending.until(deadline, "asking for the segments"):
            self._check_open()
            segments = (await self._ask("/get_all_segments")).decode().split()
            for segment in segments:
                try:
                    await look(segment)
                except (PoolUnreachable, ValueError):  # it has gone meanwhile
                    found[segment] = NodeInfo(segment, is_alive=False)
        return [found[segment] for segment in segments]

    async def healthy(self, *, deadline: float) -> bool:
        try:
            with lending.until(deadline, "asking for the master's health"):
                self._check_open()
                body = await self._ask("/health")
                answer = read_foreign(body, _Health, limit_bytes=MAX_HEALTH, limit_chars=MAX_HEALTH)
        except (PoolTimeout, PoolUnreachable, ValueError):
            return False
        return answer.status == "ok" and answer.service_ready is not False

    async def aclose(self) -> None:
        """Close the pool. Waits up to 30 seconds for calls that hang in the engine.

        If they do not return, their threads, their memory and the process's store object are kept for ever, and the log
        says so.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if await self._calls.aclose(CLOSE_TIMEOUT):
            await in_thread(_let_go, self._arena, self._store)
        else:
            _kept.append(self._arena)
            logger.warning("%d calls hang in Mooncake: their memory and threads are not released", self._calls.running)

    # ---- calls of the engine ----

    async def _run(
        self,
        batches: Sequence[_Batch],
        call: Callable[[_Batch], list[int]],
        deadline: float,
        what: str,
        learn: Callable[[_Batch], object] = lambda _: None,
    ) -> None:
        """Fill in the codes of batches, and ``learn`` from each.

        Raises:
            PoolTimeout, PoolUnreachable: see :class:`KVPool`. Started batches are over when their call returns.
            Exception: the first exception of the engine.
        """
        batches = [batch for batch in batches if batch.keys]
        begun: set[_Batch] = set()
        queue = iter(batches)
        failure: Exception | None = None

        async def work(others: anyio.CancelScope | None = None) -> None:
            nonlocal failure
            try:
                for batch in queue:
                    begun.add(batch)
                    await self._fill_in(batch, partial(call, batch))
                    learn(batch)
            except Exception as error:  # raised below: leaving the task group would wrap it in an ExceptionGroup
                failure = failure or error
                if others is not None:
                    others.cancel()

        try:
            with lending.until(deadline, f"mooncake: {what} of {sum(len(batch.keys) for batch in batches)} keys"):
                if min(AT_ONCE, len(batches)) == 1:
                    await work()
                else:
                    async with anyio.create_task_group() as group:
                        for _ in range(min(AT_ONCE, len(batches))):
                            group.start_soon(work, group.cancel_scope)
        finally:
            for batch in batches:
                if batch not in begun:
                    batch.over()
        if failure is not None:
            raise failure
        for batch in batches:
            self._suspect(batch)
        codes = [code for batch in batches for code in batch.codes]
        if codes and all(code in NO_MASTER for code in codes):
            self._seen = -math.inf
            raise PoolUnreachable(f"no answer from Mooncake's master at {self._place.host}")

    async def _fill_in(self, batch: _Batch, call: Callable[[], list[int]]) -> None:
        """Make the call of a batch.

        Raises PoolUnreachable if the master has gone or the pool is closed; then the call is not waited for.
        """

        def called() -> None:
            batch.codes = call()

        try:
            await self._calls.run(batch.peer, called, partial(self._over, batch), partial(self._ask, "/health"), WATCH)
        except TooManyHang as refused:
            logger.debug("%s", printable(refused))
            batch.codes = [REFUSED] * len(batch.keys)

    # ---- what becomes of keys ----

    def _over(self, batch: _Batch) -> None:
        batch.over()
        if batch in self._hung:
            self._hung.discard(batch)
            self._was_read(batch)

    def _was_read(self, batch: _Batch) -> None:
        pairs = list(zip(batch.keys, batch.codes, strict=False))  # a failed call has no codes
        # a refusal does not tell which segment hangs
        gone = OWNER_GONE if batch.peer == ANY_SEGMENT else OWNER_GONE | {REFUSED}
        self._lost.add(key for key, code in pairs if code in gone and key not in batch.proven)
        self._known(key for key, code in pairs if code >= 0)

    def _was_put(self, batch: _Batch) -> None:
        self._known(key for key, code in zip(batch.keys, batch.codes, strict=True) if code >= 0)

    def _was_removed(self, batch: _Batch) -> None:
        self._known(batch.keys)

    def _known(self, keys: Iterable[str]) -> None:
        """Trust the master about these keys again."""
        keys = set(keys)
        self._lost.forget(keys)
        for batch in self._hung:
            batch.proven |= keys  # its outcome is out of date for these

    def _put(self, batch: _Batch) -> list[int]:
        """Store a batch, in a thread; return a code for each key, 1 if it was there already.

        Putting a key that Mooncake knows does nothing and reports success. For some seconds Mooncake also knows keys
        whose only copy is on a dead node: so one byte of each listed key is read, and what cannot be read is removed
        and put again. And Mooncake knows keys that another process has only begun to put: so what was put must be
        listed afterwards.
        """
        store, codes = self._store, [1] * len(batch.keys)
        listed = [i for i, code in enumerate(store.batch_is_exist(batch.keys)) if code == 1]
        broken = self._unreadable([batch.keys[i] for i in listed])
        if broken:
            store.batch_remove(broken, True)
        present = {batch.keys[i] for i in listed} - set(broken)
        wanted = [i for i, key in enumerate(batch.keys) if key not in present]
        for segment in dict.fromkeys(batch.segments[i] for i in wanted):
            places = [i for i in wanted if batch.segments[i] == segment]
            for i, code in zip(places, self._store_at(segment, batch, places), strict=True):
                codes[i] = code
        return codes

    def _store_at(self, segment: str, batch: _Batch, places: Sequence[int]) -> list[int]:
        config = self._module.ReplicateConfig()
        config.replica_num = self._place.replicas
        config.group_ids = [batch.groups[i] for i in places]
        if segment != ANY_SEGMENT:
            config.preferred_segment = segment
        keys, pieces = [batch.keys[i] for i in places], [batch.pieces[i] for i in places]
        addresses, sizes = [piece.address for piece in pieces], [piece.nbytes for piece in pieces]
        codes = self._store.batch_put_from(keys, addresses, sizes, config)
        there = self._store.batch_is_exist(keys)  # at once, before it can be evicted
        return [NOT_THERE if code == 0 and is_there != 1 else code for code, is_there in zip(codes, there, strict=True)]

    def _unreadable(self, keys: list[str]) -> list[str]:
        """Return the keys whose owners do not answer for one of their keys. In a thread: a dead owner costs a second."""
        by_owners = self._by_owners(keys)
        return [key for owners, theirs in by_owners.items() if owners and not self._gives(theirs[0]) for key in theirs]

    def _by_owners(self, keys: list[str]) -> dict[tuple[str, ...], list[str]]:
        """Group keys by the peers that have them in memory, as the master says. In a thread."""
        found: dict[tuple[str, ...], list[str]] = {}
        for key, replicas in self._store.batch_get_replica_desc(keys).items() if keys else ():
            memory = [replica.get_memory_descriptor() for replica in replicas if replica.is_memory_replica()]
            owners = tuple(sorted(place.buffer_descriptor.transport_endpoint for place in memory))
            found.setdefault(owners, []).append(key)
        return found

    def _gives(self, key: str) -> bool:
        ranges = self._store.get_into_ranges([self._arena.scratch], [[key]], [[[0]]], [[[0]]], [[[1]]])
        return bool(ranges == [[[1]]])

    def _get(self, batch: _Batch) -> list[int]:
        """Read a batch, in a thread; return lengths, or codes.

        One dead owner fails a call for all owners, or delays it until the read leases of the others have expired; and a
        dead copy is not replaced by another. So what failed is read again, each owner's values by themselves.
        """
        codes = self._read(batch, range(len(batch.keys)))
        if NODE_GONE not in codes:
            return codes
        failed = {batch.keys[i]: i for i, code in enumerate(codes) if code in MISSES and code != NOT_FOUND}
        by_owners = self._by_owners(list(failed))
        if len(by_owners) > 1 or self._place.replicas > 1:
            for keys in by_owners.values():
                places = [failed[key] for key in keys]
                for i, code in zip(places, self._read(batch, places), strict=True):
                    codes[i] = code
        return codes

    def _read(self, batch: _Batch, places: Sequence[int]) -> list[int]:
        pieces = [batch.pieces[i] for i in places]
        return list(
            self._store.batch_get_into(
                [batch.keys[i] for i in places], [p.address for p in pieces], [p.nbytes for p in pieces]
            )
        )

    # ---- segments ----

    def _take(self, stages: Sequence[Stage]) -> list[Piece]:
        """Take over all of the stages, or none."""
        pieces: list[Piece] = []
        try:
            for stage in stages:
                if not isinstance(stage, MooncakeStage):
                    raise TypeError(f"a stage is a {type(stage).__name__}: must be one of this pool's")
                pieces.append(stage.piece.taken(self._arena))
        except BaseException:
            for piece in pieces:
                piece.release()
            raise
        return pieces

    def _batches(self, keys: Sequence[PoolKey], pieces: Sequence[Piece], segments: Sequence[str]) -> list[_Batch]:
        """Cut a call into batches that are not large.

        If a peer hangs, or may hang, each batch is for one segment, so that it delays no others. Otherwise the values
        stay in order, because fewer calls are faster.
        """
        is_well = not self._calls.abandoned and not self._suspects
        batches: list[_Batch] = []
        open_ones: dict[str, tuple[_Batch, int]] = {}
        for place, (key, piece) in enumerate(zip(keys, pieces, strict=True)):
            name = group(key)
            segment = rendezvous(name, segments) or ANY_SEGMENT
            peer = ANY_SEGMENT if is_well else segment
            batch, nbytes = open_ones.get(peer, (None, 0))
            if batch is None or nbytes + piece.nbytes > BATCH_BYTES or len(batch.keys) == BATCH_KEYS:
                batch, nbytes = _Batch(peer, [], [], [], [], []), 0
                batches.append(batch)
            batch.places.append(place)
            batch.keys.append(flat(key))
            batch.pieces.append(piece)
            batch.groups.append(name)
            batch.segments.append(segment)
            open_ones[peer] = batch, nbytes + piece.nbytes
        return batches

    def _segments_to_write(self) -> list[str]:
        return [segment for segment in self._segments if segment not in self._suspects] or self._segments

    def _suspect(self, batch: _Batch) -> None:
        for segment, code in zip(batch.segments, batch.codes, strict=False):
            if code == NODE_GONE:
                self._suspects[segment] = anyio.current_time() + SUSPECT_SECONDS

    async def _look(self, deadline: float) -> None:
        """Learn the segments, and check the master. Raises PoolTimeout or PoolUnreachable if it does not answer."""
        with lending.until(deadline, "asking for the segments"):
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            now = anyio.current_time()
            self._suspects = {segment: until for segment, until in self._suspects.items() if until > now}
            if now > self._seen + FRESH_SECONDS:
                self._segments = (await self._ask("/get_all_segments")).decode().split()
                self._seen = anyio.current_time()

    def _check_open(self) -> None:
        if self._is_closed:
            raise PoolUnreachable("this pool is closed")

    async def _ask(self, path: str) -> bytes:
        try:
            return await master_http.get(self._place.host, self._place.metrics, path)
        except OSError as error:
            self._seen = -math.inf
            raise PoolUnreachable(f"Mooncake's master: {error}") from error


def _set_up(settings: mooncake_store.Settings, arena: Arena) -> Any:
    """Return the store, with the arena registered. In a thread."""
    store = mooncake_store.borrow(settings)
    if (code := store.register_buffer(arena.address, arena.nbytes)) != 0:
        mooncake_store.give_back()
        raise PoolUnreachable(f"Mooncake does not register {arena.nbytes} bytes of memory: code {code}")
    return store


def _let_go(arena: Arena, store: Any) -> None:
    """Unregister the arena and give the store back. In a thread."""
    store.unregister_buffer(arena.address)
    mooncake_store.give_back()


def _put_status(code: int) -> PutStatus:
    if code in {0, 1}:
        return PutStatus.PRESENT if code else PutStatus.STORED
    return PutStatus.REJECTED if code in {NO_ROOM, NOT_THERE} else PutStatus.FAILED


def _value(piece: Piece, code: int) -> Value | GetStatus:
    if code == piece.nbytes:
        return MooncakeValue(piece)
    piece.release()
    if code >= 0 or code == WRONG_LENGTH:
        return GetStatus.WRONG_LENGTH
    return GetStatus.MISS if code in MISSES else GetStatus.FAILED
