"""Running calls of models. finalize() ends them and waits: a model must not run on memory that is released."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from aiodatadist.errors import LLMException, LLMStatusCode

PATIENCE_SECONDS = 60.0
"""Seconds in which calls must end before finalize() continues without them."""


class RunningModels:
    """The calls of one LLMDataDist that run a model, or wait for bytes on behalf of one."""

    def __init__(self) -> None:
        self._scopes: set[anyio.CancelScope] = set()
        self._idle = anyio.Event()
        self._is_over = False

    @contextmanager
    def open(self, what: str) -> Iterator[None]:
        """Run one call inside this context.

        Raises LLMException with ``LLM_ENGINE_FINALIZED`` if the cluster was finalized before, or is finalized meanwhile.
        """
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
        """Cancel all calls and wait for their end; return False if some have not ended after ``PATIENCE_SECONDS``."""
        self._is_over = True
        # shielded: memory is released afterwards that a running model may still use
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
