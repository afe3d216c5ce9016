"""The demo's decode process: it fetches the prompt's KV cache, continues the text, and proves that the result is right.

The proof is a second run of the same model on the same prompt, with a KV cache in ordinary memory of this process that
is never moved. It runs before the blocks are pulled, while prefill computes, too, so that it disturbs no measurement.
Equal tokens are not enough: rotated keys contain their position, so two exchanged blocks would go unnoticed. Therefore
the bytes are compared, too, block by block in the order of the sequence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

import anyio
import anyio.to_thread
import numpy as np

from aiodatadist import BlocksCacheKey, LLMDataDist, LLMRole
from aiodatadist._cli.demo.figures import portions_of
from aiodatadist._cli.demo.kv import CONFIG, Kv, allocate_tensors, open_kv
from aiodatadist._cli.demo.messages import Finished, Job, Prefilled, Progress, Pull, Receiving
from aiodatadist._cli.demo.worker import DECODE_CLUSTER, PREFILL_CLUSTER, Advance, compute, link_to, open_datadist
from aiodatadist._cli.kit.pipes import Parent
from aiodatadist.testing.small_model import Cache, Model, blocks_for, empty_cache, sample

WARM_PULLS = 15
"""Pulls of all blocks, and of one block, into memory that was written before."""


Meet = Callable[[int], Awaitable[None]]
"""Links to the other worker, as prefill's does."""


async def decode(parent: Parent) -> None:
    """Do one job, then stay linked until the parent ends this process."""
    job = await parent.order(Job)
    async with open_datadist(LLMRole.DECODER, DECODE_CLUSTER, 0, job.decode_at, job.transport) as datadist:

        async def meet(port: int) -> None:
            await link_to(datadist, PREFILL_CLUSTER, port)

        async with decoded(parent, job, datadist, meet) as finished:
            await parent.report(finished)
            await anyio.sleep_forever()


@asynccontextmanager
async def decoded(parent: Parent, job: Job, datadist: LLMDataDist, meet: Meet) -> AsyncIterator[Finished]:
    """Fetch the prompt's cache, continue the text, and yield that with the proof. The caches last as long as the block."""
    prompt = job.prompt.encode("latin-1")
    model = await anyio.to_thread.run_sync(Model, CONFIG, job.seed)
    async with open_kv(datadist, DECODE_CLUSTER, len(prompt) + job.tokens, job.seed) as kv:
        warm: list[Pull] = []
        reference = await compute(parent, "reference", lambda advance: _reference(model, job, prompt, advance))
        if job.layered:
            ready, pulls = await _receive(parent, datadist, kv, blocks_for(len(prompt)))
        else:
            ready = await parent.order(Prefilled)
            await meet(ready.port)
            pulls, warm = await _pull(parent, datadist, ready.blocks, kv)
        await kv.fetch(range(CONFIG.layers))
        kv_equal = await kv.digest(kv.block_table[: len(ready.blocks)]) == ready.digest
        start = _Start(ready.first_token, len(prompt), job.tokens, job.seed)
        text = await compute(
            parent, "decode", lambda advance: _continued(model, start, kv.tensors, kv.block_table, advance)
        )
        yield Finished(
            text=text.decode("latin-1"),
            reference=reference.decode("latin-1"),
            kv_equal=kv_equal,
            pulls=pulls,
            warm=warm,
            runtime=runtime_of(datadist),
            layers=ready.layers,
        )


async def _receive(parent: Parent, datadist: LLMDataDist, kv: Kv, count: int) -> tuple[Prefilled, list[Pull]]:
    """Let prefill fill the first blocks of the table, layer by layer, and copy as much for comparison."""
    limit = await anyio.to_thread.run_sync(MemcpyLimit, datadist, count)
    _, port = datadist.listen_address or ("", 0)  # decode of another machine listens nowhere
    await parent.report(Receiving(port=port, blocks=kv.block_table[:count]))
    await datadist.wait_linked(PREFILL_CLUSTER)
    async with datadist.cache_manager.receive_layers(PREFILL_CLUSTER, kv.cache) as receiver:
        await datadist.notify(PREFILL_CLUSTER, b"begin")
        for layer in range(CONFIG.layers):
            await receiver.layer(layer)
            await parent.report(Progress(phase="pull", done=layer + 1, total=CONFIG.layers))
    ready = await parent.order(Prefilled)
    pull = Pull(
        blocks=count,
        ranges=ready.ranges,
        bytes=ready.bytes,
        seconds=ready.transfer_seconds,
        memcpy_seconds=await anyio.to_thread.run_sync(limit.seconds, range(count)),
    )
    return ready, [pull]


async def _pull(parent: Parent, datadist: LLMDataDist, remote: Sequence[int], kv: Kv) -> tuple[list[Pull], list[Pull]]:
    """Fetch the prompt's blocks in several pulls. Then fetch them again and again, warm, all together and one alone."""
    limit = await anyio.to_thread.run_sync(MemcpyLimit, datadist, len(remote))
    pulls: list[Pull] = []
    for portion in portions_of(len(remote)):
        pulls.append(await _timed(datadist, remote, kv, portion, limit))
        await parent.report(Progress(phase="pull", done=portion.stop, total=len(remote)))
    portions = [range(len(remote))] * WARM_PULLS + [range(1)] * WARM_PULLS
    return pulls, [await _timed(datadist, remote, kv, portion, limit) for portion in portions]


async def _timed(datadist: LLMDataDist, remote: Sequence[int], kv: Kv, portion: range, limit: MemcpyLimit) -> Pull:
    """Pull a portion of the blocks, then copy as much inside this process for comparison."""
    source = remote[portion.start : portion.stop]
    target = kv.block_table[portion.start : portion.stop]
    started = perf_counter()
    report = await datadist.cache_manager.pull_blocks(
        BlocksCacheKey(PREFILL_CLUSTER), kv.cache, src_blocks=source, dst_blocks=target
    )
    seconds = perf_counter() - started
    memcpy_seconds = await anyio.to_thread.run_sync(limit.seconds, portion)
    ranges = len(source) * CONFIG.num_tensors
    return Pull(blocks=len(source), ranges=ranges, bytes=report.bytes, seconds=seconds, memcpy_seconds=memcpy_seconds)


class MemcpyLimit:
    """Plain copies of the same number of ranges as in a pull, by one thread: the baseline for pulls.

    Between two private caches in the same kind of memory, from scattered blocks. ``np.take`` is one ``memcpy`` per block
    and tensor with nothing in between; into consecutive ranges, which if anything is faster than a pull's scattered ones.
    """

    def __init__(self, datadist: LLMDataDist, num_blocks: int) -> None:
        self._source = allocate_tensors(datadist, num_blocks)
        self._target = allocate_tensors(datadist, num_blocks)
        self._blocks = np.random.default_rng(0).permutation(num_blocks)

    def seconds(self, portion: range) -> float:
        """Return the seconds to copy a portion of the blocks of every tensor, each portion to its own place."""
        blocks = self._blocks[portion.start : portion.stop]
        started = perf_counter()
        for source, target in zip(self._source, self._target, strict=True):
            # "clip" because the default mode copies once more, into a buffer.
            np.take(source, blocks, axis=0, out=target[portion.start : portion.stop], mode="clip")
        return perf_counter() - started


@dataclass(frozen=True)
class _Start:
    """The point where a text continues. Its first new token is at ``position``; it has ``count`` tokens in all."""

    first_token: int
    position: int
    count: int
    seed: int


def _reference(model: Model, job: Job, prompt: bytes, advance: Advance) -> bytes:
    """Return the text of a single process that never moves its cache. Uses nothing of the library."""
    steps = CONFIG.layers + job.tokens
    num_blocks = blocks_for(len(prompt) + job.tokens)
    cache, table = empty_cache(CONFIG, num_blocks), range(num_blocks)
    advance(0, steps)
    logits = model.prefill(prompt, cache, table, lambda layers: advance(layers, steps))
    start = _Start(sample(logits, job.seed, len(prompt)), len(prompt), job.tokens, job.seed)
    return _continued(model, start, cache, table, lambda done, _: advance(CONFIG.layers + done, steps))


def _continued(model: Model, start: _Start, cache: Cache, block_table: Sequence[int], advance: Advance) -> bytes:
    """Generate the text token by token, and return it. The cache must contain everything before ``start.position``."""
    text = bytearray([start.first_token])
    advance(1, start.count)
    while len(text) < start.count:
        position = start.position + len(text)
        logits = model.decode_step(text[-1], position - 1, cache, block_table)
        text.append(sample(logits, start.seed, position))
        advance(len(text), start.count)
    return bytes(text)


def runtime_of(datadist: LLMDataDist) -> str:
    runtime = datadist.runtime
    if runtime.name == "soft":
        return f"soft {runtime.version}: the software NPU, all on the CPU; an NPU's figures will differ"
    return f"{runtime.name} {runtime.version}"
