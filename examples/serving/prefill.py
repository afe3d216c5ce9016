"""The prefill service: computes prompts, and keeps their blocks until a decode service has them.

``python -m examples.serving.prefill --port 8001 --kv-listen 127.0.0.1:26001``
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
from fastapi import FastAPI
from starlette.responses import Response

from aiodatadist import BlockLease, LLMRole, TakenBlocks, prompt_digest
from aiodatadist.testing.small_model import blocks_for

from .answer import Answer, Pieces, Refused
from .api import Kept, LeaseName, PrefillJob, completion
from .kv import Kv, open_kv
from .metrics import Metrics
from .service import JSON, add_kv_arguments, add_routes, kv_settings, parser_of, run
from .tracing import OWN_SPANS, spans_to, tracer
from .vllm_server import add_vllm_argument, parse

TELL_SECONDS = 5.0
MAX_UNWANTED = 4096


class Prefill:
    """Requests of one service, and the leases that they have become.

    Args:
        lease_seconds: time within which a decode service must begin to pull the kept blocks.
    """

    def __init__(self, kv: Kv, metrics: Metrics, lease_seconds: float) -> None:
        self._kv = kv
        self._lease_seconds = lease_seconds
        self._leases: dict[str, BlockLease] = {}
        self._unwanted: OrderedDict[str, None] = OrderedDict()
        self._ended = metrics.counter("serving_leases_ended", "Leases, by how they ended", "how")
        metrics.gauge("serving_leases", "Leases that last", lambda: len(self._leases))

    async def answer(self, job: PrefillJob) -> Pieces:
        """Yield the first token and the ticket for the blocks."""
        tokens, blocks = job.tokens, self._kv.blocks
        async with AsyncExitStack() as stack:
            with tracer.start_as_current_span("wait for blocks"):
                taken = await stack.enter_async_context(blocks.take(blocks_for(len(tokens))))
            first = await self._kv.first_token(tokens, taken.blocks, job.seed)
            lease = self._keep(job.kv_transfer_params.lease, taken, prompt_digest(tokens))
            # If the router has gone, no decode service will ever know this lease: an exception here withdraws it.
            yield completion(chr(first), Kept(ticket=lease.ticket(), first_token=first))

    def _keep(self, name: str, taken: TakenBlocks, prompt: bytes) -> BlockLease:
        """Keep the blocks for a decode service with the same prompt.

        Raises Refused: the router does not want it any more, or has given its name to another one.
        """
        if name in self._unwanted:
            raise Refused(410, "the request was taken back")
        if name in self._leases:
            raise Refused(409, f"there is a lease {name} already")
        lease = taken.lease(self._lease_seconds, name=name, prompt_digest=prompt)
        self._leases[name] = lease
        span = tracer.start_span("lease", attributes={"serving.blocks": len(taken.blocks)})  # a child of its request's

        def over(lease: BlockLease) -> None:
            span.set_attribute("serving.how", str(lease.ended))
            span.end()
            self._over(lease)

        lease.add_done_callback(over)
        return lease

    def _over(self, lease: BlockLease) -> None:
        """Forget a lease that has ended. Its blocks are back in the pool."""
        del self._leases[lease.name]
        self._ended.labels(str(lease.ended)).inc()

    async def take_back(self, name: str) -> None:
        """Give up a request that the router no longer wants. It may be computing still, or not have begun."""
        lease = self._leases.get(name)
        if lease is not None:
            await self._withdraw(lease)
            return
        self._unwanted[name] = None
        if len(self._unwanted) > MAX_UNWANTED:
            self._unwanted.popitem(last=False)

    async def _withdraw(self, lease: BlockLease) -> None:
        """Withdraw a lease. If a peer is pulling its blocks, the lease ends once the pull has ended."""
        with anyio.move_on_after(TELL_SECONDS, shield=True):
            await lease.withdraw()


def app_of(arguments: Namespace) -> FastAPI:
    metrics = Metrics()
    service: Prefill

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal service
        async with (
            spans_to(arguments.spans, "prefill"),
            open_kv(LLMRole.PROMPT, kv_settings(arguments), metrics) as kv,
        ):
            service = Prefill(kv, metrics, arguments.lease_seconds)
            yield

    app = FastAPI(lifespan=lifespan, telemetry=OWN_SPANS)

    @app.post("/v1/completions")
    async def completions(job: PrefillJob) -> Response:
        return Answer(service.answer(job), JSON, metrics.ended)

    @app.delete("/v1/leases/{name}")
    async def take_back(name: LeaseName) -> Response:
        await service.take_back(name)
        return Response(status_code=204)

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    add_routes(app, metrics, health)
    return app


def main() -> None:
    parser = parser_of(__doc__, port=8001)
    add_kv_arguments(parser, cluster_id=1)
    parser.add_argument("--lease-seconds", type=float, default=30.0, help="that blocks are kept for a decode service")
    add_vllm_argument(parser)
    arguments = parse(parser, needed="kv_listen")
    run(app_of(arguments), arguments)


if __name__ == "__main__":
    main()
