"""The decode service: pulls a prompt's blocks from where they were computed, and writes the rest of the answer.

``python -m examples.serving.decode --port 8002 --prefill 1@127.0.0.1:26001``
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
from fastapi import FastAPI
from starlette.responses import Response

from aiodatadist import LeaseTicket, LLMClusterInfo, LLMException, LLMRole, ParamInvalid, prompt_digest
from aiodatadist.testing.small_model import blocks_for

from .answer import Answer, Pieces, Refused
from .api import DONE, DecodeJob, completion, event
from .kv import Kv, open_kv
from .links import PrefillLinks
from .metrics import Metrics
from .service import EVENTS, JSON, add_kv_arguments, add_routes, kv_settings, parser_of, run
from .tracing import OWN_SPANS, spans_to, tracer
from .vllm_server import add_vllm_argument, parse

TELL_SECONDS = 5.0


class Decode:
    """Requests of one service."""

    def __init__(self, kv: Kv, links: PrefillLinks, metrics: Metrics) -> None:
        self._kv = kv
        self._links = links
        self._tokens = metrics.counter("serving_tokens", "Tokens written")

    async def answer(self, job: DecodeJob) -> Pieces:
        """Yield events of one token each, or all of the text at once."""
        ticket, position = job.kv_transfer_params.ticket, len(job.tokens)
        if len(ticket.blocks) != blocks_for(position):
            raise Refused(400, f"the ticket is for {len(ticket.blocks)} blocks, the prompt has {blocks_for(position)}")
        prompt, is_here = prompt_digest(job.tokens), False  # of this request, whatever prompt the ticket is for
        try:
            with tracer.start_as_current_span("wait for link"):
                await self._links.wait_up(ticket.cluster_id)
            async with AsyncExitStack() as stack:
                with tracer.start_as_current_span("wait for blocks"):
                    wanted = self._kv.blocks.take(blocks_for(position + job.max_tokens))
                    table = (await stack.enter_async_context(wanted)).blocks
                await self._pull(ticket, table, prompt)
                is_here = True
                await self._kv.fetch(table[: len(ticket.blocks)])
                token, text = job.kv_transfer_params.first_token, ""
                with tracer.start_as_current_span("write tokens"):
                    for written in range(job.max_tokens):
                        if written:
                            token = await self._kv.next_token(token, position, table, job.seed)
                            position += 1
                        self._tokens.inc()
                        if job.stream:
                            yield event(chr(token))
                        else:
                            text += chr(token)
                    yield DONE if job.stream else completion(text)
        finally:
            if not is_here:
                await self._release(ticket, prompt)

    async def _pull(self, ticket: LeaseTicket, table: Sequence[int], prompt: bytes) -> None:
        """Pull the blocks; prefill then no longer keeps them. After failure or cancellation nothing more lands in ours.

        Raises:
            Refused: 410 if the prompt must be computed again.
        """
        try:
            blocks = table[: len(ticket.blocks)]
            await self._kv.manager.pull_leased(ticket, self._kv.device, blocks, prompt_digest=prompt)
        except ParamInvalid as error:
            raise Refused(400, str(error)) from error
        except LLMException as error:  # no link, or no such lease: it was started again, or took the blocks back
            raise Refused(410, str(error)) from error

    async def _release(self, ticket: LeaseTicket, prompt: bytes) -> None:
        """Release the lease, so that prefill can reuse the blocks at once. If prefill cannot be told, the lease expires."""
        with anyio.move_on_after(TELL_SECONDS, shield=True):
            try:
                await self._kv.manager.release_lease(ticket, prompt_digest=prompt)
            except LLMException:
                return


def app_of(arguments: Namespace) -> FastAPI:
    metrics = Metrics()
    service: Decode
    links: PrefillLinks

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal service, links
        made = metrics.counter("serving_links_made", "Links made, the first ones and others")
        async with (
            spans_to(arguments.spans, "decode"),
            open_kv(LLMRole.DECODER, kv_settings(arguments), metrics) as kv,
        ):
            links = PrefillLinks(kv.datadist, arguments.prefill, arguments.link_seconds, made)
            service = Decode(kv, links, metrics)
            async with anyio.create_task_group() as group:
                group.start_soon(links.keep)
                yield
                group.cancel_scope.cancel()

    app = FastAPI(lifespan=lifespan, telemetry=OWN_SPANS)

    @app.post("/v1/completions")
    async def completions(job: DecodeJob) -> Response:
        return Answer(service.answer(job), EVENTS if job.stream else JSON, metrics.ended)

    async def health() -> dict[str, str]:
        return {"status": "ok" if links.number_up else "there is no link to a prefill service"}

    add_routes(app, metrics, health)
    return app


def peer(text: str) -> LLMClusterInfo:
    """Parse ``1@127.0.0.1:26001``: a cluster id, and the address at which it listens."""
    parts = re.fullmatch(r"([0-9]+)@(.+):([0-9]+)", text)
    if parts is None:
        raise ArgumentTypeError(f"{text!r} is not ID@IP:PORT: must be like 1@127.0.0.1:26001")
    try:
        info = LLMClusterInfo(int(parts[1]))
        info.append_remote_ip_info(parts[2], int(parts[3]))
    except (ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"{text!r} is not ID@IP:PORT: {error}") from None
    return info


def main() -> None:
    parser = parser_of(__doc__, port=8002)
    add_kv_arguments(parser, cluster_id=2)
    parser.add_argument(
        "--prefill", type=peer, nargs="+", default=[], metavar="ID@IP:PORT", help="cluster and --kv-listen"
    )
    parser.add_argument("--link-seconds", type=float, default=5.0, help="that a request waits for a link that is down")
    add_vllm_argument(parser)
    arguments = parse(parser, needed="prefill")
    run(app_of(arguments), arguments)


if __name__ == "__main__":
    main()
