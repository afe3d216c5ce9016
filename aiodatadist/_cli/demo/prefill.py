"""The demo's prefill process: it computes the prompt's KV cache, and lets decode fetch it or sends it layer by layer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Any

import anyio
import anyio.from_thread

from aiodatadist import (
    AwaitableLayerSynchronizer,
    BlocksCacheKey,
    LLMDataDist,
    LLMRole,
    NotLinked,
    TransferWithCacheKeyConfig,
)
from aiodatadist._cli.demo.kv import CONFIG, Kv, open_kv
from aiodatadist._cli.demo.messages import Job, LayerTimes, Prefilled, Receiving
from aiodatadist._cli.demo.worker import DECODE_CLUSTER, PREFILL_CLUSTER, Advance, compute, link_to, open_datadist
from aiodatadist._cli.kit.pipes import Parent
from aiodatadist.testing.small_model import Array, Model, sample

Meet = Callable[[int], Awaitable[None]]
"""Links to the other worker, which listens on this port of this machine; no effect if the two are linked already."""


async def prefill(parent: Parent) -> None:
    """Do one job, then hold the blocks for as long as decode is linked."""
    job = await parent.order(Job)
    async with open_datadist(LLMRole.PROMPT, PREFILL_CLUSTER, job.port, job.prefill_at, job.transport) as datadist:

        async def meet(port: int) -> None:
            await link_to(datadist, DECODE_CLUSTER, port)

        async with prefilled(parent, job, datadist, meet):
            await datadist.wait_linked(DECODE_CLUSTER)
            with suppress(NotLinked):  # the end that ended the link, decode or the parent, says so
                await datadist.wait_link_closed(DECODE_CLUSTER)


@asynccontextmanager
async def prefilled(parent: Parent, job: Job, datadist: LLMDataDist, meet: Meet) -> AsyncIterator[None]:
    """Compute the prompt, and report that decode may fetch its cache, which lasts until the end of the block."""
    prompt = job.prompt.encode("latin-1")
    async with open_kv(datadist, PREFILL_CLUSTER, len(prompt), job.seed) as kv:
        started = perf_counter()
        if job.layered:
            logits, sent = await _send_layers(parent, datadist, job.seed, prompt, kv, meet)
        else:
            sent = {}
            logits = await compute(
                parent, "prefill", lambda advance: _prompt_logits(job.seed, prompt, kv, advance, _no_layer_is_awaited)
            )
            await kv.publish(range(CONFIG.layers))
        assert datadist.listen_address is not None
        ready = Prefilled(
            port=datadist.listen_address[1],
            blocks=kv.block_table,
            digest=await kv.digest(kv.block_table),
            first_token=sample(logits, job.seed, len(prompt)),
            seconds=perf_counter() - started,
            **sent,
        )
        await parent.report(ready)
        yield


async def _send_layers(
    parent: Parent, datadist: LLMDataDist, seed: int, prompt: bytes, kv: Kv, meet: Meet
) -> tuple[Array, dict[str, Any]]:
    """Compute the prompt while its layers travel to decode, each as soon as it is ready."""
    receiving = await parent.order(Receiving)
    await meet(receiving.port)
    async for _ in datadist.notifications():  # decode watches its cache
        break
    synchronizer = AwaitableLayerSynchronizer(CONFIG.layers)
    layers = range(CONFIG.layers)
    target = TransferWithCacheKeyConfig(BlocksCacheKey(DECODE_CLUSTER), layers, layers)
    task = datadist.cache_manager.transfer_cache_async(
        kv.cache, synchronizer, [target], kv.block_table, receiving.blocks
    )
    loop, stamps, landed = asyncio.get_running_loop(), [perf_counter()], [0.0] * CONFIG.layers

    def on_layer(done: int) -> None:
        if kv.copies:
            anyio.from_thread.run(kv.publish, [done - 1])
        stamps.append(perf_counter())
        loop.call_soon_threadsafe(synchronizer.ready, done - 1)

    async def watch() -> None:
        async for done in task.progress():
            landed[done.layer_index] = perf_counter()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        logits = await compute(parent, "prefill", lambda advance: _prompt_logits(seed, prompt, kv, advance, on_layer))
        report = await task
    times = [LayerTimes(layer=i, began=stamps[i], ready=stamps[i + 1], landed=landed[i]) for i in range(CONFIG.layers)]
    return logits, {
        "layers": times,
        "bytes": report.bytes,
        "ranges": report.ranges,
        "transfer_seconds": report.transfer_seconds,
    }


def _no_layer_is_awaited(_: int) -> None:
    """Do nothing: no caller waits for single layers."""


def _prompt_logits(seed: int, prompt: bytes, kv: Kv, advance: Advance, on_layer: Callable[[int], None]) -> Array:
    advance(0, CONFIG.layers)
    model = Model(CONFIG, seed)

    def layer_done(done: int) -> None:
        on_layer(done)
        advance(done, CONFIG.layers)

    return model.prefill(prompt, kv.tensors, kv.block_table, layer_done)
