"""A client that came to a listener, until it is known."""

from __future__ import annotations

from typing import Protocol

import anyio

HANDSHAKE_TIMEOUT = 60.0
"""Seconds that a client has, from connecting to the end of the handshake, whatever it asks for."""
CLIENT_TIMEOUT = 5.0
"""Seconds that a client has for saying who it is."""
MAX_PENDING_CLIENTS = 64
"""Connections that have not said so yet, before the next one gets a fiftieth of the time."""


class ClientHost(Protocol):
    """What it has to know of the engine: how many there are."""

    pending_clients: int


class PendingClient:
    """A client that has not said yet who it is: it has little time for that, and less when many others have not either."""

    def __init__(self, engine: ClientHost) -> None:
        self._engine = engine
        self._seconds = CLIENT_TIMEOUT / 50 if engine.pending_clients >= MAX_PENDING_CLIENTS else CLIENT_TIMEOUT
        self._is_known = False
        self.scope = anyio.CancelScope(deadline=anyio.current_time() + self._seconds)
        engine.pending_clients += 1

    def is_known(self) -> None:
        """It proved who it is, or is gone: from here on it has the time of a handshake."""
        if not self._is_known:
            self._is_known = True
            self._engine.pending_clients -= 1
            self.scope.deadline = anyio.current_time() + HANDSHAKE_TIMEOUT

    @property
    def wanted(self) -> str:
        if self._is_known:
            return f"open its channel within {HANDSHAKE_TIMEOUT:g} s"
        return f"say who it is within {self._seconds:g} s"
