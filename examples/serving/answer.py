"""Answers as asynchronous generators, one per request. Each releases what it holds in its own ``finally``.

FastAPI does not end a handler whose client has gone, and Starlette's StreamingResponse leaves its generator to the garbage
collector when it is cancelled. Blocks of a KV cache cannot wait for either.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import anyio
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .tracing import request_span

Pieces = AsyncGenerator[bytes, None]


class Refused(Exception):
    """A request that is not answered. Raised before the first piece.

    Args:
        status: of HTTP.
        retry_after: seconds after which it may be asked again; None: it will not be answered then either.
    """

    def __init__(self, status: int, reason: str, retry_after: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}


class Answer(Response):
    """A response that runs a request's generator, sends what it yields, and cancels it when the client goes.

    The status is decided by the first piece: before it the generator may raise :class:`Refused`. However this ends, the
    generator has ended as well.

    Args:
        count: is told how it ended: ``answered``, ``refused``, ``disconnected`` or ``failed``.
    """

    def __init__(self, pieces: Pieces, media_type: str, count: Callable[[str], object]) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "failed"
        with request_span(Headers(raw=scope["headers"])) as span:
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
                    # The only thing that cancels, but for a shutdown that does not wait any more.
                    outcome = "disconnected"
                    try:
                        outcome = await self._send(scope, receive, send)
                    except Exception:
                        outcome = "failed"
                        raise
                    group.cancel_scope.cancel()
            finally:
                span.set_attribute("serving.outcome", outcome)
                self._count(outcome)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> str:
        async with aclosing(self._pieces) as pieces:
            try:
                piece = await anext(pieces)
            except Refused as refused:
                text = {"error": {"message": str(refused)}}
                await JSONResponse(text, refused.status, refused.headers)(scope, receive, send)
                return "refused"
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return "answered"


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel the scope when the client disconnects. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
