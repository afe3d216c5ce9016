"""Checksums of the layers of one destination: a layer counts as landed once it equals what was sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from aiodatadist._concurrency.scope import Scope
from aiodatadist.errors import InternalError, LLMException

if TYPE_CHECKING:
    from aiodatadist._link import Transfers


class LayerComparison:
    """A comparison of layers as they land, in order, one at a time.

    It runs in a task of the link's that exists as long as some layers wait.

    Args:
        compare: compares one layer, counted from the first that is sent. Raises LLMException if it is not what was
            sent, or that cannot be determined.
        hold: entered while comparing, so that the peer's cache stays.
        verified: called with the number of verified layers.
        failed: called with the error that ended it.
        ended: called when nothing reads the source any longer.

    Attributes:
        is_running: True while the source is being read.
    """

    def __init__(
        self,
        link: Transfers,
        compare: Callable[[int], Awaitable[None]],
        hold: Callable[[], AbstractContextManager[None]],
        verified: Callable[[int], None],
        failed: Callable[[LLMException], None],
        ended: Callable[[], None],
    ) -> None:
        self._link = link
        self._compare = compare
        self._hold = hold
        self._verified = verified
        self._failed = failed
        self._ended = ended
        self._scope = Scope()
        self._landed = 0
        self._compared = 0
        self._has_task = False
        self.is_running = False

    def landed(self, layers: int) -> None:
        """Note that this number of layers is at the destination, as far as the device says."""
        self._landed = max(layers, self._landed)
        if self._landed > self._compared and not self._has_task and not self._scope.cancel_called:
            self._has_task = True
            self._link.session.spawn(self._run)

    def stop(self) -> None:
        """Verify no further layers. One that is being compared ends in a moment."""
        self._scope.cancel()

    async def _run(self) -> None:
        # stopped before the task ran: nothing is held yet, and the source is not being read
        if self._scope.cancel_called:
            return
        self.is_running = True
        try:
            with self._scope, self._hold():
                await self._compare_all()
        except LLMException as error:
            self._failed(error)
        except Exception as error:
            failure = InternalError(f"checksums of layers failed: {error!r}")
            failure.__cause__ = error
            self._failed(failure)
        finally:
            self._has_task = self.is_running = False
            self._ended()

    async def _compare_all(self) -> None:
        while self._compared < self._landed:
            await self._compare(self._compared)
            self._compared += 1
            self._verified(self._compared)
