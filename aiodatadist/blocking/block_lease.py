"""A lease of blocks, for code that does not await."""

from __future__ import annotations

import anyio

from aiodatadist.concurrency.loop_thread import LoopThread
from aiodatadist.link import block_leases as awaitable
from aiodatadist.link.block_leases import LeaseEnd
from aiodatadist.values.lease_ticket import LeaseTicket


class BlockLease:
    """As :class:`aiodatadist.BlockLease`. May be used from any thread but the loop's own.

    Attributes:
        name: what peers call it.
    """

    def __init__(self, thread: LoopThread, inner: awaitable.BlockLease) -> None:
        self._thread = thread
        self._inner = inner
        self.name = inner.name

    @property
    def ended(self) -> LeaseEnd | None:
        """Why it ended; None: the blocks are to be left alone. Never waits."""
        return self._inner.ended

    def ticket(self) -> LeaseTicket:
        """What a peer needs to pull them. Raises ParamInvalid: no peer may claim them any more."""

        async def make() -> LeaseTicket:
            return self._inner.ticket()

        return self._thread.call(make)

    def wait_ended(self, timeout: float | None = None) -> LeaseEnd | None:
        """Wait until the blocks may be used again, at most ``timeout`` seconds, and why; None: they may not."""

        async def wait() -> None:
            with anyio.move_on_after(timeout):
                await self._inner.wait_ended()

        if self._inner.ended is None:
            self._thread.call(wait)
        return self._inner.ended

    def withdraw(self) -> LeaseEnd:
        """Take the blocks back, and wait for a pull that is under way, as long as it may take."""
        return self._thread.call(self._inner.withdraw)

    def __repr__(self) -> str:
        return repr(self._inner)
