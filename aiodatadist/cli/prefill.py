"""The demo's prefill process: computes the prompt's KV cache and lets decode fetch it."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter

from aiodatadist import LLMRole, NotLinked
from aiodatadist.cli.messages import Job, Prefilled
from aiodatadist.cli.model import Array, Model, sample
from aiodatadist.cli.pipes import Parent
from aiodatadist.cli.worker import (
    CONFIG,
    DECODE_CLUSTER,
    PREFILL_CLUSTER,
    Advance,
    Kv,
    compute,
    open_datadist,
    open_kv,
)


async def prefill(parent: Parent) -> None:
    """Do one job, then hold the blocks for as long as decode is linked."""
    job = await parent.order(Job)
    prompt = job.prompt.encode("latin-1")
    async with (
        open_datadist(LLMRole.PROMPT, PREFILL_CLUSTER, job.port) as datadist,
        open_kv(datadist, PREFILL_CLUSTER, len(prompt), job.seed) as kv,
    ):
        started = perf_counter()
        logits = await compute(parent, "prefill", lambda advance: _prompt_logits(job.seed, prompt, kv, advance))
        assert datadist.listen_address is not None
        ready = Prefilled(
            port=datadist.listen_address[1],
            blocks=kv.block_table,
            digest=await kv.digest(kv.block_table),
            first_token=sample(logits, job.seed, len(prompt)),
            seconds=perf_counter() - started,
        )
        await parent.report(ready)
        await datadist.wait_linked(DECODE_CLUSTER)
        with suppress(NotLinked):  # whoever ended the link: decode or the parent knows, and says so
            await datadist.wait_link_closed(DECODE_CLUSTER)


def _prompt_logits(seed: int, prompt: bytes, kv: Kv, advance: Advance) -> Array:
    advance(0, CONFIG.layers)
    model = Model(CONFIG, seed)
    return model.prefill(prompt, kv.tensors, kv.block_table, lambda done: advance(done, CONFIG.layers))
