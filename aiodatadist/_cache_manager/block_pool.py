"""BlockPool: the free blocks of a cache, for requests that take some, and for leases that give them back.

Who owns what
    The pool owns the free numbers. A request owns what it took, until its ``async with`` ends, or until it leases the
    blocks: from then on the lease owns them, and its end gives them back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import TYPE_CHECKING

import anyio

from aiodatadist._concurrency.fair_queue import FairQueue
from aiodatadist._values import checks
from aiodatadist._values.descriptors import Cache
from aiodatadist._values.durations import check_seconds
from aiodatadist.errors import OutOfMemory, ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._cache_manager.manager import CacheManager
    from aiodatadist._link import BlockLease


class _Owner(Enum):
    """The owner of blocks that were taken."""

    REQUEST = "the request"
    LEASE = "a lease"
    POOL = "the pool"


class TakenBlocks:
    """Blocks that one request has taken out of a :class:`BlockPool`.

    Attributes:
        blocks: their numbers.
    """

    def __init__(self, pool: BlockPool, blocks: list[int]) -> None:
        self._pool = pool
        self._owner = _Owner.REQUEST
        self._lease: BlockLease | None = None
        self.blocks: Sequence[int] = blocks
        self._blocks = tuple(blocks)  # the caller may change its list

    def lease(
        self,
        timeout: float,
        *,
        name: str | None = None,
        pull_timeout: float | None = None,
        prompt_digest: bytes | None = None,
    ) -> BlockLease:
        """Keep the blocks for a peer, as ``CacheManager.lease_blocks`` does. The end of the lease gives them back.

        The blocks then belong to the lease, also after the ``async with``. If that ends with an exception, the lease is
        withdrawn, because its ticket may never have reached the peer.

        Raises:
            ParamInvalid: if the blocks are leased already, or no longer taken, or if ``blocks`` was changed other than in its
                order.

        It also raises what ``lease_blocks`` raises; the blocks then stay with the request.
        """
        if self._owner is not _Owner.REQUEST:
            raise ParamInvalid(
                f"these blocks belong to {self._owner.value}: they can be leased once, while they are taken"
            )
        if Counter(self.blocks) != Counter(self._blocks):
            raise ParamInvalid(
                f"blocks was changed, and has {len(self.blocks)} numbers: they must be those that were taken, "
                f"{len(self._blocks)} in any order",
                hint="to lease some of them, use CacheManager.lease_blocks()",
            )
        lease = self._pool.manager.lease_blocks(
            self._pool.cache,
            self.blocks,
            timeout,
            name=name,
            pull_timeout=pull_timeout,
            prompt_digest=prompt_digest,
        )
        self._lease, self._owner = lease, _Owner.LEASE
        lease.add_done_callback(lambda _: self._give_back(_Owner.LEASE))
        return lease

    async def _withdraw(self) -> None:
        """Withdraw the lease, without waiting for a pull that is under way."""
        if self._lease is not None and self._lease.ended is None:
            with anyio.move_on_after(0, shield=True):  # takes effect at once: only the wait for a pull is cut off
                await self._lease.withdraw()

    def _give_back(self, owner: _Owner) -> None:
        """Give the blocks back if they are still the owner's."""
        if self._owner is owner:
            self._owner = _Owner.POOL
            self._pool._put_back(self._blocks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {list(self.blocks)} of {self._owner.value}>"


class BlockPool:
    """The free blocks of a blocks cache. All are free at first.

    ::

        pool = BlockPool(manager, cache)
        async with pool.take(4, timeout=10) as taken:  # waits for its turn
            ...  # write keys and values into taken.blocks
            lease = taken.lease(timeout=60)
            await send(lease.ticket())

    The blocks come back exactly once: when the ``async with`` ends, or, if they were leased, when the lease ends,
    whichever way. A request that pulls into blocks needs no lease. It must not end its ``async with`` before its pull
    has ended, which awaiting the pull ensures, also if that fails or is cancelled.

    Requests are served in the order in which they came, so a large one is not overtaken by small ones for ever. One
    that is cancelled while it waits takes nothing. Use the pool on the event loop of its cluster.

    Args:
        manager: the cache manager that made the cache.
        cache: a blocks cache. Nothing else may hand out its blocks.

    Raises TypeError or ParamInvalid if an argument is wrong.
    """

    def __init__(self, manager: CacheManager, cache: Cache) -> None:
        self.manager = manager
        self.cache: Cache = checks.instance(cache, "cache", Cache)
        if not cache.is_blocks_cache:
            raise ParamInvalid("cache is a contiguous cache: a BlockPool has blocks")
        self._free = list(range(cache.cache_desc.shape[0]))
        self._count = len(self._free)
        self._line = FairQueue()

    @property
    def count(self) -> int:
        """The number of blocks in the cache."""
        return self._count

    @property
    def free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for blocks."""
        return len(self._line)

    @asynccontextmanager
    async def take(self, count: int, *, timeout: float = math.inf) -> AsyncIterator[TakenBlocks]:
        """Take blocks for the time of an ``async with``, or until the end of the lease that is made inside it.

        Args:
            count: the number of blocks; 0 takes none.
            timeout: seconds to wait for them; 0 means at once or not at all.

        Raises:
            TypeError, ValueError, ParamInvalid: if an argument is wrong, or the cache has fewer blocks.
            OutOfMemory: if the blocks were not free in time.
        """
        if checks.integer(count, "count", checks.INT64) < 0 or count > self._count:
            raise ParamInvalid(f"count is {count}: the cache has {self._count} blocks")
        taken = TakenBlocks(self, await self._take(count, timeout))
        try:
            yield taken
        except BaseException:
            await taken._withdraw()
            raise
        finally:
            taken._give_back(_Owner.REQUEST)

    async def wait_all_free(self) -> None:
        """Wait until all blocks are free, behind the requests that wait already."""
        await self._line.take(lambda: True if self.free == self._count else None)

    async def _take(self, count: int, timeout: float) -> list[int]:
        def attempt() -> list[int] | None:
            if len(self._free) < count:
                return None
            return [self._free.pop() for _ in range(count)]

        seconds = timeout if timeout == math.inf else check_seconds(timeout, "timeout", may_be_zero=True)
        try:
            return await self._line.take(attempt, anyio.current_time() + seconds)
        except TimeoutError:
            raise OutOfMemory(
                f"{count} blocks were not free within {seconds:g} s: {self.free} of {self._count} are free,"
                f" and {self.waiting} requests wait"
            ) from None

    def _put_back(self, blocks: Sequence[int]) -> None:
        self._free.extend(blocks)
        self._line.call()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of cache {self.cache.cache_id}: {self.free} of {self._count} blocks are free>"
