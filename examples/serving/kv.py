"""The model and its KV cache: what prefill and decode have in common.

numpy computes on the host, and peers reach the device, so there are two caches with the same block numbers, and blocks are
copied from one to the other. A model that computes on the device needs one cache and neither copy.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np

from aiodatadist import (
    BlockPool,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
    empty,
)
from aiodatadist.telemetry.otel import SpanObserver
from aiodatadist.telemetry.prometheus import MetricsCollector
from aiodatadist.testing.small_model import Array, Model, ModelConfig, sample

from .blocks import Blocks
from .metrics import Metrics
from .tracing import tracer

CONFIG = ModelConfig(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, hidden=128)
WEIGHTS_SEED = 7
PAGE = 2 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class KvSettings:
    """Settings of one service.

    Attributes:
        listen: ``ip:port`` where peers link; if None, this service links to others.
        blocks: number of blocks of 16 tokens.
        longest_line, wait_seconds: requests that may wait for blocks, and how long.
        drain_seconds: time after the last request for leases to give their blocks back.
        trust: a folder with keys that all services share; needed unless ``listen`` is a loopback address.
    """

    cluster_id: int
    listen: str | None
    device_id: int
    blocks: int
    longest_line: int
    wait_seconds: float
    drain_seconds: float
    trust: str | None

    def config(self) -> LLMConfig:
        # Each tensor starts with a page: what an NPU's peers reach is mapped by pages.
        tensor = -(-self.blocks * CONFIG.block_bytes // PAGE) * PAGE
        return LLMConfig(
            device_id=self.device_id,
            listen=self.listen,
            mem_pool_cfg=json.dumps({"memory_size": CONFIG.num_tensors * tensor, "page_shift": PAGE.bit_length() - 1}),
            sync_kv_timeout=10_000,  # milliseconds of one transfer, once it runs
            trust=self.trust,
        )


class Kv:
    """An open cluster, its blocks, and a model that computes in them in a thread."""

    def __init__(self, datadist: LLMDataDist, device: Cache, host: Cache, tensors: list[Array], blocks: Blocks) -> None:
        self.datadist = datadist
        self.manager = datadist.cache_manager
        self.device = device
        self.blocks = blocks
        self._host = host
        self._tensors = tensors
        self._model = Model(CONFIG, WEIGHTS_SEED)
        self._processor = anyio.CapacityLimiter(1)  # requests take turns, token by token

    async def first_token(self, prompt: bytes, table: Sequence[int], seed: int) -> int:
        """Compute a prompt and return its first token.

        Its keys and values are then in the blocks of ``table``, where peers can read them.
        """

        def work() -> int:
            stop = anyio.from_thread.check_cancelled  # between two layers
            return sample(self._model.prefill(prompt, self._tensors, table, lambda _: stop()), seed, len(prompt))

        with tracer.start_as_current_span("compute"):
            token = await self._compute(work)
        await self.manager.swap_blocks(self._host, self.device, {block: block for block in table})
        return token

    async def fetch(self, table: Sequence[int]) -> None:
        """Copy blocks that were pulled to where the model reads them."""
        await self.manager.swap_blocks(self.device, self._host, {block: block for block in table})

    async def next_token(self, token: int, position: int, table: Sequence[int], seed: int) -> int:
        """Compute the token after ``token``, which stands at ``position``."""
        return await self._compute(
            lambda: sample(self._model.decode_step(token, position, self._tensors, table), seed, position + 1)
        )

    async def _compute(self, work: Callable[[], T]) -> T:
        """Run work in a thread. If cancelled, wait for the thread: no block is given back while the model writes to it."""
        return await anyio.to_thread.run_sync(work, limiter=self._processor)


@asynccontextmanager
async def open_kv(role: LLMRole, settings: KvSettings, metrics: Metrics) -> AsyncIterator[Kv]:
    """Open until the end of the block, and until all blocks are back or their time is over."""
    shape = CONFIG.cache_shape(settings.blocks)
    tensors = [
        empty(shape, np.float32, placement=Placement.HOST, device_id=settings.device_id)
        for _ in range(CONFIG.num_tensors)
    ]
    for tensor in tensors:
        tensor.fill(0)  # touches every page, so that no request pays for that
    async with LLMDataDist(role, settings.cluster_id, settings.config()) as datadist:
        datadist.observer = SpanObserver()
        metrics.registry.register(MetricsCollector(datadist))
        manager = datadist.cache_manager
        desc = CacheDesc(CONFIG.num_tensors, shape, DataType.DT_FLOAT)
        device = await manager.allocate_blocks_cache(desc, BlocksCacheKey(settings.cluster_id))
        on_host = CacheDesc(CONFIG.num_tensors, shape, DataType.DT_FLOAT, Placement.HOST)
        host = await manager.register_blocks_cache(on_host, tensors)
        pool = BlockPool(manager, device)
        blocks = Blocks(pool, settings.longest_line, settings.wait_seconds)
        metrics.gauge("serving_blocks", "Blocks of the KV cache", lambda: pool.count)
        metrics.gauge("serving_blocks_free", "Blocks that hold nothing", lambda: pool.free)
        metrics.gauge("serving_requests_waiting", "Requests that wait for blocks", lambda: pool.waiting)
        yield Kv(datadist, device, host, tensors, blocks)
        with anyio.move_on_after(settings.drain_seconds):
            await pool.wait_all_free()
