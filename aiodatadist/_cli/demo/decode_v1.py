"""The v1 demo's decode process: pulls the request's cache, merges it into a slot of its batch, and continues the text.

The proof is as in ``decode.py``: a second run of the same model in ordinary memory, in the same two steps, and the bytes.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import anyio
import anyio.to_thread

from aiodatadist import LLMRole
from aiodatadist._cli.demo.decode import MemcpyLimit, runtime_of
from aiodatadist._cli.demo.kv import CONFIG
from aiodatadist._cli.demo.messages import Finished, Job, Prefilled, Progress, Pull
from aiodatadist._cli.demo.worker import DECODE_CLUSTER, PREFILL_CLUSTER, Advance, compute, link_to, opened
from aiodatadist._cli.demo.worker_v1 import (
    blocks_of,
    check_memory,
    config_for,
    digest,
    model_options,
    padded,
    prefix_of,
    request,
)
from aiodatadist._cli.kit.pipes import Parent
from aiodatadist._cli.kit.place import place_options
from aiodatadist.legacy import KvCache, KvCacheManager, LLMDataDist, LLMModel, LLMReq, ModelRunner
from aiodatadist.testing.small_model import Array, Model, blocks_for, empty_cache, sample

BATCH = 2
SLOT = 1


class TokenRunner(ModelRunner):
    """A runner that writes one token of one slot. Its method is a plain function, which the library calls in a thread."""

    def __init__(self, manager: KvCacheManager, model: Model) -> None:
        self._manager = manager
        self._model = model
        self.cache: KvCache | None = None

    def on_cache_allocated(self, kv_cache: KvCache) -> None:
        self.cache = kv_cache

    def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Array:
        """Return the logits of the last token.

        ``input_tensors`` has a token and its position for each slot, or None for an idle one.
        """
        logits = None
        for slot, step in enumerate(input_tensors):
            if step is not None:
                token, position = step
                blocks = blocks_of(self._manager, kv_cache, slot)
                logits = self._model.decode_step(token, position, blocks, range(len(blocks[0])))
        assert logits is not None
        return logits

    def digest(self, tokens: int) -> str:
        assert self.cache is not None
        return digest(blocks_of(self._manager, self.cache, SLOT), tokens)


async def decode_v1(parent: Parent) -> None:
    """Do one job, then stay linked until the parent ends this process."""
    job = await parent.order(Job)
    prompt = job.prompt.encode("latin-1")
    tokens = padded(len(prompt) + job.tokens)
    model = await anyio.to_thread.run_sync(Model, CONFIG, job.seed)
    config = config_for((BATCH + 1) * tokens, transport=job.transport, **await place_options(job.decode_at))
    async with opened(LLMDataDist(LLMRole.DECODER, DECODE_CLUSTER, config)) as datadist:
        check_memory(datadist)
        runner = TokenRunner(datadist.kv_cache_manager, model)
        decoder = await datadist.add_model(model_options(BATCH, tokens), runner)
        reference = await compute(parent, "reference", lambda advance: _reference(model, job, prompt, advance))
        ready = await parent.order(Prefilled)
        await link_to(datadist, PREFILL_CLUSTER, ready.port)
        mine = request(PREFILL_CLUSTER, len(prompt))
        pull = await _fetch(parent, datadist, decoder, mine)
        kv_equal = await anyio.to_thread.run_sync(runner.digest, len(prompt)) == ready.digest
        text = await _continued(parent, decoder, mine, ready.first_token, len(prompt), job)
        await datadist.complete_request(mine)
        await parent.report(
            Finished(
                text=text.decode("latin-1"),
                reference=reference.decode("latin-1"),
                kv_equal=kv_equal,
                pulls=[pull],
                runtime=runtime_of(datadist),
            )
        )
        await anyio.sleep_forever()


async def _fetch(parent: Parent, datadist: LLMDataDist, decoder: LLMModel, mine: LLMReq) -> Pull:
    """Pull and merge; and copy as much inside this process for comparison."""
    count = blocks_for(mine.prompt_length)
    limit = await anyio.to_thread.run_sync(MemcpyLimit, datadist, count)
    started = perf_counter()
    await decoder.pull_kv(mine)
    seconds = perf_counter() - started
    await parent.report(Progress(phase="pull", done=1, total=2))
    await decoder.merge_kv(mine, SLOT)
    await parent.report(Progress(phase="pull", done=2, total=2))
    return Pull(
        blocks=count,
        ranges=CONFIG.num_tensors,
        bytes=count * CONFIG.block_bytes * CONFIG.num_tensors,
        seconds=seconds,
        memcpy_seconds=await anyio.to_thread.run_sync(limit.seconds, range(count)),
    )


async def _continued(
    parent: Parent, decoder: LLMModel, mine: LLMReq, first_token: int, position: int, job: Job
) -> bytes:
    """Generate the text, with one ``predict`` for each token, of a batch whose other slot is idle."""
    text = bytearray([first_token])
    batch = [LLMReq(), mine]
    while len(text) < job.tokens:
        at = position + len(text)
        logits = await decoder.predict(batch, [None, (text[-1], at - 1)])
        text.append(sample(logits, job.seed, at))
        await parent.report(Progress(phase="decode", done=len(text), total=job.tokens))
    return bytes(text)


def _reference(model: Model, job: Job, prompt: bytes, advance: Advance) -> bytes:
    """Return the text of a single process that never moves its cache: the prefix first, then the rest."""
    steps, prefix = 2 + job.tokens, prefix_of(prompt)
    num_blocks = blocks_for(len(prompt) + job.tokens)
    cache, table = empty_cache(CONFIG, num_blocks), range(num_blocks)
    advance(0, steps)
    if prefix:
        model.prefill(prefix, cache, table)
    advance(1, steps)
    logits = model.prefill(prompt[len(prefix) :], cache, table, start=len(prefix))
    text = bytearray([sample(logits, job.seed, len(prompt))])
    while len(text) < job.tokens:
        position = len(prompt) + len(text)
        logits = model.decode_step(text[-1], position - 1, cache, table)
        text.append(sample(logits, job.seed, position))
        advance(1 + len(text), steps)
    return bytes(text)
