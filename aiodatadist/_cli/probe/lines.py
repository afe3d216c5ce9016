"""JSON lines over a socket between the two ends of a step."""

from __future__ import annotations

import json
import socket
from typing import Any

MAX_LINE = 1 << 20
"""The longest line in bytes: a rank table, or 64 KiB of memory in hexadecimal, with some room to spare."""


class Lines:
    """A socket with one JSON object per line, both ways."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._rest = b""

    def send(self, **message: Any) -> None:
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Wait for the next object, and return it.

        Raises:
            ConnectionError: if the other end has closed, or sent what is not a line of JSON.
        """
        while b"\n" not in self._rest:
            data = self._link.recv(65536)
            if not data:
                raise ConnectionError("the other end has closed the connection")
            self._rest += data
            if len(self._rest) > MAX_LINE:
                raise ConnectionError(f"the other end sent a line of more than {MAX_LINE} bytes")
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConnectionError(f"the other end sent what is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise ConnectionError("the other end sent JSON that is not an object")
        return message
