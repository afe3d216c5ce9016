"""Checksums of the layers of one destination: a layer counts as landed once it equals what was sent."""

from __future__ import annotations

from collections.abc import Callable

from aiodatadist._concurrency.scope import Scope
from aiodatadist._layered.route import Route
from aiodatadist.errors import CacheNotFound, InternalError, LLMException


class LayerComparison:
    """A comparison of layers as they land, in order, one at a time.

    It runs in a task of the link's that exists as long as some layers wait.

    Args:
        verified: called with the number of verified layers.
        failed: called with the error that ended it.
        ended: called when nothing reads the source any longer.

    Attributes:
        is_running: True while the source is being read.
    """

    def __init__(
        self,
        route: Route,
        verified: Callable[[int], None],
        failed: Callable[[LLMException], None],
        ended: Callable[[], None],
    ) -> None:
        self._route = route
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
            self._route.link.session.spawn(self._run)

    def stop(self) -> None:
        """Verify no further layers. One that is being compared ends in a moment."""
        self._scope.cancel()

    async def _run(self) -> None:
        # stopped before the task ran: nothing is held yet, and the source is not being read
        if self._scope.cancel_called:
            return
        self.is_running = True
        try:
            # the peer's cache stays while it is compared
            with self._scope, self._route.link.requester.holding(self._route.remote, self._taken_back):
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

    def _taken_back(self) -> None:
        self._failed(CacheNotFound("the peer revoked the destination"))

    async def _compare_all(self) -> None:
        route = self._route
        while self._compared < self._landed:
            number = self._compared
            name = f"layer {route.layers[number]}"
            grid = route.part(number, number + 1)
            await route.link.requester.checks.compare_layer(name, route.entry, route.remote, grid, route.seconds)
            self._compared += 1
            self._verified(self._compared)
