"""Parts that every service has: ``/health``, ``/metrics``, options, and uvicorn."""

from __future__ import annotations

import logging
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from .kv import KvSettings
from .metrics import TEXT, Metrics

JSON = "application/json"
EVENTS = "text/event-stream"


def add_routes(app: FastAPI, metrics: Metrics, health: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    """Add the routes. The ``status`` of ``health`` must be ``ok`` if the service can answer requests just now."""

    @app.exception_handler(RequestValidationError)
    async def refuse(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return JSONResponse({"error": {"message": f"{where}: {first['msg']}"}}, 400)

    @app.exception_handler(HTTPException)
    async def say(_: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": {"message": error.detail}}, error.status_code, error.headers)

    @app.get("/health")
    async def look() -> Response:
        found = await health()
        return JSONResponse(found, 200 if found["status"] == "ok" else 503)

    @app.get("/metrics")
    async def count() -> Response:
        return Response(metrics.text(), media_type=TEXT)


def parser_of(text: str | None, port: int) -> ArgumentParser:
    parser = ArgumentParser(description=text, formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1", help="where HTTP is served")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--spans", type=Path, default=None, metavar="FILE", help="where spans go, a line of JSON each")
    parser.add_argument(
        "--shutdown-seconds",
        type=int,
        default=20,
        help="for requests under way, and then for leases, when it shall end",
    )
    return parser


def add_kv_arguments(parser: ArgumentParser, cluster_id: int) -> None:
    parser.add_argument("--cluster-id", type=int, default=cluster_id, help="unique among all services")
    parser.add_argument("--kv-listen", default=None, help="ip:port for services that link to this one")
    parser.add_argument("--device", type=int, default=cluster_id - 1)
    parser.add_argument("--blocks", type=int, default=1024, help="of the KV cache, 16 tokens each")
    parser.add_argument("--longest-line", type=int, default=256, help="requests that may wait for blocks")
    parser.add_argument("--wait-seconds", type=float, default=10.0, help="that one may wait for blocks")
    parser.add_argument(
        "--kv-peers",
        nargs="+",
        default=[],
        metavar="HOST",
        help="with --vllm: addresses, networks and names that it dials",
    )
    parser.add_argument(
        "--trust", metavar="FOLDER", default=None, help="keys that all services share; needed beyond one machine"
    )


def kv_settings(arguments: Namespace) -> KvSettings:
    return KvSettings(
        cluster_id=arguments.cluster_id,
        listen=arguments.kv_listen,
        device_id=arguments.device,
        blocks=arguments.blocks,
        longest_line=arguments.longest_line,
        wait_seconds=arguments.wait_seconds,
        drain_seconds=arguments.shutdown_seconds,
        trust=arguments.trust,
    )


def run(app: FastAPI, arguments: Namespace) -> None:
    """Serve until SIGTERM or SIGINT. New requests are then refused, and those under way have some time to end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it tells of each request
    uvicorn.run(
        app,
        host=arguments.host,
        port=arguments.port,
        access_log=False,
        timeout_graceful_shutdown=arguments.shutdown_seconds,
    )
