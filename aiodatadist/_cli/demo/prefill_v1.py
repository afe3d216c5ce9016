"""The v1 demo's prefill process: half of the prompt is a shared prefix, the rest is one request's, and decode pulls both."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import Any

from aiodatadist import LLMRole, NotLinked
from aiodatadist._cli.demo.kv import CONFIG
from aiodatadist._cli.demo.messages import Job, Prefilled
from aiodatadist._cli.demo.worker import DECODE_CLUSTER, HOST, PREFILL_CLUSTER, Advance, compute, opened
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
from aiodatadist.legacy import KvCache, KvCacheManager, LLMDataDist, LLMReq, ModelRunner
from aiodatadist.testing.small_model import Array, Model, sample


class PromptRunner(ModelRunner):
    """A runner that computes tokens behind those in the cache, in a thread, and reports its progress."""

    def __init__(self, parent: Parent, manager: KvCacheManager, model: Model) -> None:
        self._parent = parent
        self._manager = manager
        self._model = model
        self.digest = ""

    async def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Array:
        """Compute the tokens in ``input_tensors``. ``start=`` is the position of the first one."""
        start = int(kwargs["start"])

        def run(advance: Advance) -> Array:
            advance(0, CONFIG.layers)
            blocks = blocks_of(self._manager, kv_cache, 0)
            table = range(len(blocks[0]))
            logits = self._model.prefill(input_tensors, blocks, table, lambda done: advance(done, CONFIG.layers), start)
            self.digest = digest(blocks, start + len(input_tensors))
            return logits

        return await compute(self._parent, "prefill", run)


async def prefill_v1(parent: Parent) -> None:
    """Do one job, then hold its cache for as long as decode is linked."""
    job = await parent.order(Job)
    prompt = job.prompt.encode("latin-1")
    prefix = prefix_of(prompt)
    config = config_for(
        padded(len(prompt)) + len(prefix),
        listen_ip_info=f"{HOST}:{job.port}",
        transport=job.transport,
        **await place_options(job.prefill_at),
    )
    async with opened(LLMDataDist(LLMRole.PROMPT, PREFILL_CLUSTER, config)) as datadist:
        check_memory(datadist)
        runner = PromptRunner(parent, datadist.kv_cache_manager, Model(CONFIG, job.seed))
        model = await datadist.add_model(model_options(1, -1), runner)
        started = perf_counter()
        shared = request(PREFILL_CLUSTER, len(prompt), prefix)
        if prefix:
            loading = LLMReq(prompt_length=len(prefix), prefix_id=shared.prefix_id)
            await model.preload_prompt_prefix(loading, prefix, start=0)
        logits = await model.predict(shared, prompt[len(prefix) :], start=len(prefix))
        assert datadist.listen_address is not None
        await parent.report(
            Prefilled(
                port=datadist.listen_address[1],
                blocks=[],
                digest=runner.digest,
                first_token=sample(logits, job.seed, len(prompt)),
                seconds=perf_counter() - started,
            )
        )
        await datadist.wait_linked(DECODE_CLUSTER)
        with suppress(NotLinked):  # the end that ended the link, decode or the parent, says so
            await datadist.wait_link_closed(DECODE_CLUSTER)
