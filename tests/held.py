"""Transfers that stand half-way, so that a test acts on them while they are under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import anyio

from aiodatadist.testing import Cluster, SoftHold, soft_faults_cleared, soft_hold

PULL, PUSH = "HcclBatchGet", "HcclBatchPut"
"""What moves the bytes. A pull in request/response mode is a push of the owner's."""


class HeldTransfer:
    """The next transfer that a call moves, which stands half-way until it is released."""

    def __init__(self, copy: SoftHold, abort: SoftHold) -> None:
        self._copy, self._abort = copy, abort

    async def arrived(self) -> None:
        """Wait until half of its bytes are there."""
        await self._copy.arrived()

    def release(self) -> None:
        """Let it move the rest. The device can be told to stop it again."""
        self._abort.release()
        self._copy.release()

    def let_abort(self) -> None:
        """Let the device begin to stop it. It stands half-way until it is released."""
        self._abort.release()

    async def stopped(self, stop: Callable[[], object]) -> None:
        """Call something that stops it, and release it when the device has been told: it does not succeed."""
        stop()
        await self.told_to_stop()
        self.release()

    async def told_to_stop(self) -> None:
        """Wait until the device has been told to stop something; it has not begun to."""
        await self._abort.arrived()


@contextmanager
def held_transfer(function: str = PULL) -> Iterator[HeldTransfer]:
    """Hold the next transfer of one of the two calls half-way."""
    with soft_faults_cleared(), soft_hold(function, at="half") as copy, soft_hold("aclrtStreamAbort") as abort:
        yield HeldTransfer(copy, abort)


async def there_and_back(one: Cluster, other: Cluster) -> None:
    """Send a notification to the other cluster and one back: what was said before has arrived, and was acted on."""
    for sender, taker in ((one, other), (other, one)):
        await sender.datadist.notify(taker.datadist.cluster_id, b"behind it")
        await anext(taker.datadist.notifications())


@asynccontextmanager
async def each_held(function: str, pause: Callable[[], int] = lambda: 0) -> AsyncIterator[None]:
    """Make each call stand until the event loop has had a turn: none ends in the call that starts it.

    Args:
        pause: returns how many more turns a call stands. Others that come meanwhile pass.
    """
    async with anyio.create_task_group() as group:
        with soft_faults_cleared(), ExitStack() as holds:

            async def pass_on(hold: SoftHold) -> None:
                while True:
                    await hold.arrived()
                    await turns(pause())
                    following = holds.enter_context(soft_hold(function))
                    hold.release()
                    hold = following

            group.start_soon(pass_on, holds.enter_context(soft_hold(function)))
            yield
            group.cancel_scope.cancel()


async def turns(count: int = 20) -> None:
    """Give the event loop turns, in which all that waits for nothing else goes on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def let_pass(seconds: float) -> None:
    """Let time pass that C or another process counts, or in which nothing must happen: no wait for something that must."""
    await anyio.sleep(seconds)
