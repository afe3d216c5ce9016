"""A lease of blocks, for code that does not await."""

from __future__ import annotations

import anyio

from aiodatadist._concurrency.loop_thread import LoopThread
from aiodatadist._link.control import block_leases as awaitable
from aiodatadist._link.control.block_leases import LeaseEnd
from aiodatadist._values.lease_ticket import LeaseTicket


class BlockLease:
    """A lease of blocks, like :class:`aiodatadist.BlockLease`. May be used from any thread but the loop's own.

    Attributes:
        name: the name under which peers claim it.
    """

    def __init__(self, thread: LoopThread, inner: awaitable.BlockLease) -> None:
        self._thread = thread
        self._inner = inner
        self.name: str = inner.name

    @property
    def ended(self) -> LeaseEnd | None:
        """The reason why it ended; None while the blocks must be left alone. Never waits."""
        return self._inner.ended

    def ticket(self) -> LeaseTicket:
        """Return the ticket with which a peer pulls the blocks. Raises ParamInvalid if no peer can claim them now."""

        async def make() -> LeaseTicket:
            return self._inner.ticket()

        return self._thread.call(make)

    def wait_ended(self, timeout: float | None = None) -> LeaseEnd | None:
        """Wait until the blocks may be used again, at most ``timeout`` seconds.

        Returns the reason why the lease ended, or None if the blocks must still be left alone.
        """

        async def wait() -> None:
            with anyio.move_on_after(timeout):
                await self._inner.wait_ended()

        if self._inner.ended is None:
            self._thread.call(wait)
        return self._inner.ended

    def renew(self, timeout: float) -> bool:
        """Let peers begin within ``timeout`` seconds from now. Return False if the lease can no longer be claimed."""

        async def renew() -> bool:
            return self._inner.renew(timeout)

        return self._thread.call(renew)

    def withdraw(self) -> LeaseEnd:
        """Take the blocks back. Waits for a running pull, as long as that may take; returns the reason of the end."""
        return self._thread.call(self._inner.withdraw)

    def __repr__(self) -> str:
        return repr(self._inner)
