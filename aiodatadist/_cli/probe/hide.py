"""Hashes in place of addresses and host names, which a report must not show.

They are the same within a report, but differ between reports.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from pathlib import Path

_ADDRESS = re.compile(r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|(?:[0-9a-fA-F]{1,4}:){2,7}:?[0-9a-fA-F]{1,4})(?![\w:])")
_POINTER = re.compile(r"0x[0-9a-fA-F]{6,}")
_KEPT = ("HCCL_", "ASCEND_", "SOFTNPU_")
_SECRET = re.compile(r"KEY|TOKEN|PASS|SECRET", re.IGNORECASE)


class Hider:
    """A source of hashes with its own salt."""

    def __init__(self) -> None:
        self._salt = os.urandom(16)
        self._host = socket.gethostname()

    def hashed(self, word: str) -> str:
        return hashlib.sha256(self._salt + word.encode()).hexdigest()[:10]

    def text(self, text: str) -> str:
        """Return the text without IP addresses, the host's name and pointers."""
        text = _ADDRESS.sub(lambda found: f"address-{self.hashed(found[0])}", text)
        if len(self._host) > 3:
            text = text.replace(self._host, f"host-{self.hashed(self._host)}")
        return _POINTER.sub("0x...", text)

    def environment(self) -> dict[str, str]:
        """Return the variables HCCL_*, ASCEND_*, SOFTNPU_*, and the choice of the runtime."""
        kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
        kept = {name: "hidden" if _SECRET.search(name) else self.text(value) for name, value in sorted(kept.items())}
        return kept | {name: os.environ[name] for name in ("AIODATADIST_RUNTIME",) if name in os.environ}

    def this_host(self) -> str:
        try:
            identity = Path("/etc/machine-id").read_text(encoding="ascii")
        except OSError:
            identity = self._host
        return self.hashed(identity)
