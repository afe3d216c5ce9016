"""Calls that a finalize() ends, and waits for: a model must not run on memory that is given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from aiodatadist.errors import LLMException, LLMStatusCode

PATIENCE_SECONDS = 60.0
"""Seconds that calls have to end, before finalize() goes on without them."""


class RunningModels:
    """Those of one LLMDataDist that run a model, or wait for bytes on behalf of one."""

    def __init__(self) -> None:
        self._scopes: set[anyio.CancelScope] = set()
        self._idle = anyio.Event()
        self._is_over = False

    @contextmanager
    def open(self, what: str) -> Iterator[None]:
        """Around one call. Raises LLMException: ``LLM_ENGINE_FINALIZED``: before it, or meanwhile."""
        if self._is_over:
            raise _finalized(what)
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        try:
            with scope:
                yield
        finally:
            self._scopes.discard(scope)
            if not self._scopes:
                self._idle.set()
        if scope.cancelled_caught:
            raise _finalized(what)

    async def end(self) -> bool:
        """Cancel them all, and wait until they are over; False: some are not within ``PATIENCE_SECONDS`` seconds."""
        self._is_over = True
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + PATIENCE_SECONDS):
            while self._scopes:
                for scope in list(self._scopes):
                    scope.cancel()
                self._idle = anyio.Event()
                await self._idle.wait()
        return not self._scopes


def _finalized(what: str) -> LLMException:
    return LLMException(
        "the cluster was finalized meanwhile", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED, operation=what
    )
