"""The use of a cache's pool: failures close the gate, successful health checks open it."""

from __future__ import annotations

import logging
import math

import anyio

from aiodatadist._context_caching.health_gate import HealthGate
from aiodatadist._context_caching.pools.deferred import DeferredPool
from aiodatadist._context_caching.transfer.pipeline import TransferPipeline

logger = logging.getLogger(__name__)


class PoolGuard:
    """The holder of a cache's gate, until :meth:`give`. Without a gate the pool is always used.

    Raises:
        EmsInvalidArgument: if another cache has the gate.
    """

    def __init__(self, gate: HealthGate | None) -> None:
        if gate is not None:
            gate.take()
        self._gate = gate
        self._next_probe = math.inf

    @property
    def is_open(self) -> bool:
        """True if the pool may be used."""
        return self._gate is None or self._gate.is_open

    def failed(self, pipeline: TransferPipeline) -> None:
        """Tell the gate that a call to the pool failed, or may have."""
        if self._gate is not None:
            was_open = self._gate.is_open
            self._gate.failed(anyio.current_time())
            self._say(self._gate, pipeline, was_open)

    def begin(self, pipeline: TransferPipeline) -> None:
        """Start the schedule of health checks. A pool that has not been reached yet closes the gate."""
        if self._gate is not None:
            self._next_probe = anyio.current_time() + self._gate.rules.probe_every
        if isinstance(pipeline.pool, DeferredPool):
            self.failed(pipeline)

    async def probe(self, pipeline: TransferPipeline) -> None:
        """Check the pool's health as often as the gate's rules say. Without a gate this returns at once."""
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
        """Log that the gate has opened or closed, once for each change."""
        name = pipeline.pool.capabilities.name
        if was_open and not gate.is_open:
            left = max(self._next_probe - anyio.current_time(), 0.0)
            logger.warning("the %s pool is not used for now, and every call misses: it is probed in %.1f s", name, left)
        elif gate.is_open and not was_open:
            logger.info("the %s pool is used again", name)

    def give(self) -> None:
        """Give the gate back, if that has not been done yet."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.give()
