"""A run of the context cache demo: load the blocks that an earlier run saved, compute the rest, save what is new."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter

import anyio
import anyio.to_thread
import numpy as np

from aiodatadist._cli.demo.messages import ContextJob, ContextRun
from aiodatadist._cli.kit.pipes import die_with_parent
from aiodatadist.context_caching import CcConfig_v1, CcResult, CcStatus, ContextCache, EmsException, KVPool, open_pool
from aiodatadist.errors import LLMException
from aiodatadist.testing.small_model import BLOCK, Array, Cache, Model, ModelConfig, blocks_for, empty_cache, sample

CONFIG = ModelConfig()


def run_context_worker() -> int:
    """Run a worker process: read a job from stdin, and print a run."""
    die_with_parent()
    job = ContextJob.model_validate_json(sys.stdin.buffer.read())
    print(anyio.run(_run_alone, job).model_dump_json())
    return 0


async def _run_alone(job: ContextJob) -> ContextRun:
    try:
        return await _run(job, job.url, 1)
    except (EmsException, LLMException) as error:
        return _failed(error)


def _failed(error: EmsException | LLMException) -> ContextRun:
    return ContextRun(error=f"the context cache failed: {error}", exit_code=2 if isinstance(error, ValueError) else 1)


async def run_twice(job: ContextJob) -> tuple[ContextRun, ContextRun]:
    """Do both runs in this process, over one pool; nothing else is shared."""
    try:
        pool = await open_pool(job.url)
    except (EmsException, LLMException) as error:
        return _failed(error), _failed(error)
    try:
        return await _run(job, pool, 1), await _run(job, pool, 2)
    finally:
        await pool.aclose()


async def _run(job: ContextJob, pool: KVPool | str, number: int) -> ContextRun:
    """Do a run. Raises EmsException or LLMException if the pool or the device does not work."""
    prompt = job.prompt.encode("latin-1")
    model = await anyio.to_thread.run_sync(Model, CONFIG, job.seed)
    async with _open_kv(job, pool, number, len(prompt)) as (cache, tensors, table):
        hashes = block_hashes(prompt)
        chunks = [(block * BLOCK, BLOCK) for block in table[: len(hashes)]]
        started = perf_counter()
        # one token at least is computed, because it gives the first one of the answer
        usable = min(await cache.match_prefix(hashes), (len(prompt) - 1) // BLOCK) if hashes else 0
        if usable:
            usable = (await cache.load(hashes[:usable], chunks=[chunks[:usable]])).success
        loaded = perf_counter()
        logits = await anyio.to_thread.run_sync(_prefilled, model, prompt, usable * BLOCK, tensors, table)
        computed = perf_counter()
        not_saved = ""
        if usable < len(hashes):  # all of them: what is there is not stored again, and counts as used
            not_saved = _reasons(await cache.save(hashes, chunks=[chunks]))
        saved = perf_counter()
        text = await anyio.to_thread.run_sync(_continued, model, job, logits, tensors, table)
        counts = cache.statistics
    return ContextRun(
        text=text.decode("latin-1"),
        loaded_tokens=usable * BLOCK,
        loaded_bytes=counts.loaded_bytes,
        load_seconds=loaded - started,
        computed_tokens=len(prompt) - usable * BLOCK,
        compute_seconds=computed - loaded,
        saved_tokens=counts.saved * BLOCK,
        not_saved=not_saved,
        saved_bytes=counts.saved_bytes,
        save_seconds=saved - computed,
    )


def _reasons(result: CcResult) -> str:
    counts = Counter(status for status in result.details if status is not CcStatus.OK)
    return ", ".join(f"{n} blocks: {status.name.lower().replace('_', ' ')}" for status, n in counts.items())


@asynccontextmanager
async def _open_kv(
    job: ContextJob, pool: KVPool | str, number: int, tokens: int
) -> AsyncIterator[tuple[ContextCache, list[Array], list[int]]]:
    """Open a KV cache of zeros in ordinary memory.

    Yields it with the blocks of this run's sequence, which are scattered at random.
    """
    num_blocks = blocks_for(tokens + job.tokens)
    tensors = empty_cache(CONFIG, num_blocks)
    table = np.random.default_rng((job.seed, number)).permutation(num_blocks).tolist()
    config = CcConfig_v1(0, job.device, f"aiodatadist demo, seed {job.seed}", llm_engine="demo")
    async with await ContextCache.open(config, pool) as cache:
        await cache.register_kvcache([tensors[i : i + 2] for i in range(0, len(tensors), 2)])
        yield cache, tensors, table


def block_hashes(prompt: bytes) -> list[int]:
    """Return a hash for each full block, over it and all earlier ones: equal hashes mean equal prefixes."""
    state, hashes = hashlib.blake2b(digest_size=16), []
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        state.update(prompt[end - BLOCK : end])
        hashes.append(int.from_bytes(state.digest(), "little"))
    return hashes


def _prefilled(model: Model, prompt: bytes, start: int, cache: Cache, table: Sequence[int]) -> Array:
    return model.prefill(prompt[start:], cache, table, start=start)


def _continued(model: Model, job: ContextJob, logits: Array, cache: Cache, table: Sequence[int]) -> bytes:
    """Generate the text token by token, and return it."""
    text, position = bytearray(), len(job.prompt)
    while True:
        text.append(sample(logits, job.seed, position))
        if len(text) == job.tokens:
            return bytes(text)
        logits = model.decode_step(text[-1], position, cache, table)
        position += 1
