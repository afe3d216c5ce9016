"""Whether a cache uses its pool just now: what fails closes its gate, good health checks open it."""

from __future__ import annotations

import logging
import math

import anyio

from aiodatadist.context_caching.health_gate import HealthGate
from aiodatadist.context_caching.pools.deferred import DeferredPool
from aiodatadist.context_caching.transfer.pipeline import TransferPipeline

logger = logging.getLogger(__name__)


class PoolGuard:
    """Takes the gate, and has it until :meth:`give`. Without one the pool is always used.

    Raises:
        EmsInvalidArgument: another cache has the gate.
    """

    def __init__(self, gate: HealthGate | None) -> None:
        if gate is not None:
            gate.take()
        self._gate = gate
        self._next_probe = math.inf

    @property
    def is_open(self) -> bool:
        """The pool may be used."""
        return self._gate is None or self._gate.is_open

    def failed(self, pipeline: TransferPipeline) -> None:
        """The pool failed, or may have: a call to it failed."""
        if self._gate is not None:
            was_open = self._gate.is_open
            self._gate.failed(anyio.current_time())
            self._say(self._gate, pipeline, was_open)

    def begin(self, pipeline: TransferPipeline) -> None:
        """The pool is there, or late."""
        if self._gate is not None:
            self._next_probe = anyio.current_time() + self._gate.rules.probe_every
        if isinstance(pipeline.pool, DeferredPool):
            self.failed(pipeline)

    async def probe(self, pipeline: TransferPipeline) -> None:
        """Ask the pool for its health, as often as the gate wants it; without one this ends at once."""
        while (gate := self._gate) is not None:
            await anyio.sleep_until(self._next_probe)
            if isinstance(pipeline.pool, DeferredPool):
                await pipeline.pool.arrive()
            is_healthy = await pipeline.is_healthy()
            self._next_probe = anyio.current_time() + gate.rules.probe_every
            was_open = gate.is_open
            gate.probed(is_healthy, anyio.current_time())
            self._say(gate, pipeline, was_open)

    def _say(self, gate: HealthGate, pipeline: TransferPipeline, was_open: bool) -> None:
        """Once, when the gate has changed."""
        name = pipeline.pool.capabilities.name
        if was_open and not gate.is_open:
            left = max(self._next_probe - anyio.current_time(), 0.0)
            logger.warning("the %s pool is not used for now, and every call misses: it is probed in %.1f s", name, left)
        elif gate.is_open and not was_open:
            logger.info("the %s pool is used again", name)

    def give(self) -> None:
        """Give the gate back, if that was not done before."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.give()
