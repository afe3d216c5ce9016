"""The router: each request goes to a prefill service, and with what that one keeps to a decode service.

``python -m examples.serving.router --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002``

The services may be those beside this file or ``vllm serve`` with aiodatadist's connector: both are asked the same way.
"""

from __future__ import annotations

import itertools
import json
import random
from argparse import ArgumentTypeError, Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
from fastapi import FastAPI
from starlette.responses import Response

from aiodatadist import new_lease_name

from .answer import Answer, Pieces, Refused
from .api import Keep, failure
from .metrics import Metrics
from .service import EVENTS, JSON, add_routes, parser_of, run
from .tracing import OWN_SPANS, asking, spans_to

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
RETRY_AFTER = 1
TELL_SECONDS = 5.0
GONE = 410
PARAMS = "kv_transfer_params"
Job = dict[str, Any]
ONLY_DECODE = (
    "stream_options", "n", "best_of", "use_beam_search", "min_tokens", "logprobs", "prompt_logprobs", "echo",
)  # fmt: skip
"""Fields that prefill is not told. It would keep the blocks once for each answer, of which decode takes one, and refuse a
request for more tokens than the one that it is asked for."""


class Gone(Exception):
    """A request whose blocks are no longer kept: the prompt must be computed again."""


class Transport(httpx.AsyncHTTPTransport):
    """A transport that raises ConnectError even if a service is killed during the connection attempt."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:  # anyio asks a socket for its peer that was closed meanwhile, and is None
            raise httpx.ConnectError("the connection was reset while it was made", request=request) from error


def without_blocks(job: Job) -> Job:
    """Return a client's request without what it says about blocks. vLLM would take that from ``vllm_xargs``, too."""
    made = {name: value for name, value in job.items() if name != PARAMS}
    more = job.get("vllm_xargs")
    if isinstance(more, dict):
        made["vllm_xargs"] = {name: value for name, value in more.items() if name != PARAMS}
    return made


class Router:
    """A router that keeps nothing of a request but its connections.

    Args:
        prefills, decodes: addresses, taken in turn.
        seconds: time for which a request may be retried if a service ended or is not there.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        prefills: Sequence[str],
        decodes: Sequence[str],
        seconds: float,
        metrics: Metrics,
    ) -> None:
        self._client = client
        self._prefills, self._decodes = prefills, decodes
        self._next_prefill, self._next_decode = itertools.cycle(prefills), itertools.cycle(decodes)
        self._seconds = seconds
        self._retried = metrics.counter("serving_retries", "Requests that were sent to prefill once more")

    async def answer(self, job: Job) -> Pieces:
        """Yield the answer of decode. Retry until a part of it was sent on: until then a request has no effect."""
        job = without_blocks(job)
        until, pause = anyio.current_time() + self._seconds, FIRST_PAUSE
        while True:
            asked = prefill = next(self._next_prefill)
            lease = new_lease_name()
            may_be_kept, has_begun = True, False
            try:
                try:
                    kept = await self._prefill(prefill, job, lease)
                except Refused:
                    may_be_kept = False
                    raise
                asked = next(self._next_decode)
                url = f"{asked}/v1/completions"
                body = json.dumps({**job, PARAMS: kept})
                with asking("decode") as headers:
                    async with self._client.stream("POST", url, content=body, headers=headers) as response:
                        await _check(response)
                        has_begun, may_be_kept = True, False  # decode has the blocks
                        async for piece in response.aiter_bytes():
                            yield piece
            except (Gone, httpx.TransportError) as error:
                if has_begun:
                    yield failure(f"the decode service ended: {error!r}")
                    return
                if anyio.current_time() + pause > until:
                    why = f"not answered within {self._seconds:g} s: {asked}: {error!r}"
                    raise Refused(503, why, RETRY_AFTER) from error
            else:
                return
            finally:
                if may_be_kept:
                    await self._take_back(prefill, lease)
            self._retried.inc()
            await anyio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _prefill(self, prefill: str, job: Job, lease: str) -> Any:
        keep = Keep(lease=lease).model_dump()
        asked = {name: value for name, value in job.items() if name not in ONLY_DECODE}
        ask = {**asked, "max_tokens": 1, "stream": False, PARAMS: keep}
        with asking("prefill") as headers:
            response = await self._client.post(f"{prefill}/v1/completions", content=json.dumps(ask), headers=headers)
            await _check(response)
        return response.json()[PARAMS]

    async def _take_back(self, prefill: str, lease: str) -> None:
        """Tell prefill to give the blocks up, even if its answer is on its way. If that fails, the lease expires."""
        with anyio.move_on_after(TELL_SECONDS, shield=True):
            try:
                await self._client.delete(f"{prefill}/v1/leases/{lease}")
            except httpx.TransportError:
                return

    async def health(self) -> dict[str, Any]:
        """Return the status: ``ok`` if at least one service of each kind is ``ok``."""
        found: dict[str, bool] = {}

        async def look(service: str) -> None:
            try:
                found[service] = (await self._client.get(f"{service}/health", timeout=2.0)).is_success
            except httpx.TransportError:
                found[service] = False

        async with anyio.create_task_group() as group:
            for service in (*self._prefills, *self._decodes):
                group.start_soon(look, service)
        is_ok = all(any(found[service] for service in kind) for kind in (self._prefills, self._decodes))
        return {"status": "ok" if is_ok else "services are missing", "services": found}


async def _check(response: httpx.Response) -> None:
    """Check the response. Raises Gone, or Refused as the service did."""
    if response.is_success:
        return
    reason = _reason(await response.aread())
    if response.status_code == GONE:
        raise Gone(reason)
    after = response.headers.get("Retry-After")
    raise Refused(response.status_code, reason, int(after) if after else None)


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")


def app_of(arguments: Namespace) -> FastAPI:
    metrics = Metrics()
    router: Router

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal router
        # As many connections as there are requests: the services decide how many of them wait.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=4.0)
        times = httpx.Timeout(arguments.read_seconds, connect=2.0)
        async with (
            spans_to(arguments.spans, "router"),
            httpx.AsyncClient(transport=Transport(limits=limits), timeout=times) as client,
        ):
            router = Router(client, arguments.prefill, arguments.decode, arguments.retry_seconds, metrics)
            yield

    app = FastAPI(lifespan=lifespan, telemetry=OWN_SPANS)

    @app.post("/v1/completions")
    async def completions(job: Job) -> Response:
        return Answer(router.answer(job), EVENTS if job.get("stream") else JSON, metrics.ended)

    async def health() -> dict[str, Any]:
        return await router.health()

    add_routes(app, metrics, health)
    return app


def service_url(text: str) -> str:
    """Return the URL of a service. Raises ArgumentTypeError if it is none, as an address without ``http://``."""
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        is_bare = not parts.query and not parts.fragment and parts.path in {"", "/"}
    except ValueError:
        is_url = is_bare = False
    if not is_url or not is_bare:
        raise ArgumentTypeError(f"{text!r} is no URL of a service: must be like http://127.0.0.1:8001")
    return text.rstrip("/")


def main() -> None:
    parser = parser_of(__doc__, port=8000)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", type=service_url)
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", type=service_url)
    parser.add_argument("--retry-seconds", type=float, default=10.0, help="that a request may be tried again")
    parser.add_argument("--read-seconds", type=float, default=60.0, help="that a service may say nothing")
    arguments = parser.parse_args()
    run(app_of(arguments), arguments)


if __name__ == "__main__":
    main()
