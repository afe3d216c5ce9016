"""Samples of one prompt, which vLLM computes as requests of their own: ``n`` of a request's parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_SAMPLE = re.compile(r"(0|[1-9][0-9]{0,8})_(.+)", re.DOTALL)


def parent_of(request_id: str) -> str | None:
    """Return the name of the request that has this sample, or None if it is no sample.

    vLLM names sample ``i`` of request ``r`` ``i_r``, and appends random characters to the name of each request.
    """
    found = _SAMPLE.fullmatch(request_id)
    return None if found is None else found[2]


@dataclass
class _Family:
    """The samples of one request that have not finished; ``offer`` is what their answer tells the next engine."""

    running: set[str] = field(default_factory=set)
    count: int = 0
    offer: tuple[bytes, dict[str, Any]] | None = None


class Siblings:
    """The samples of an engine's requests. Of each request, the blocks of one sample are kept.

    The answer has the parameters of one sample, of the last one that finishes. All have those of the first one.
    """

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def __len__(self) -> int:
        return len(self._families)

    def add(self, request_id: str) -> None:
        """Note a request that arrived."""
        parent = parent_of(request_id)
        if parent is not None:
            family = self._families.setdefault(parent, _Family())
            family.running.add(request_id)
            family.count += 1

    def count(self, request_id: str) -> int:
        """Return how many samples its request has, as far as they have arrived."""
        family = self._family(request_id)
        return 1 if family is None else family.count

    def offer(self, request_id: str, prompt_digest: bytes) -> dict[str, Any] | None:
        """Return what an earlier sample of the same prompt offered; None if there is none."""
        family = self._family(request_id)
        if family is None or family.offer is None or family.offer[0] != prompt_digest:
            return None
        return family.offer[1]

    def offered(self, request_id: str, prompt_digest: bytes, sent: dict[str, Any]) -> None:
        """Note what a sample offers, for those that finish later."""
        family = self._family(request_id)
        if family is not None:
            family.offer = prompt_digest, sent

    def remove(self, request_id: str) -> None:
        """Note the end of a request."""
        family = self._family(request_id)
        if family is not None:
            family.running.discard(request_id)
            if not family.running:
                del self._families[parent_of(request_id) or ""]

    def _family(self, request_id: str) -> _Family | None:
        parent = parent_of(request_id)
        family = None if parent is None else self._families.get(parent)
        return family if family is not None and request_id in family.running else None
