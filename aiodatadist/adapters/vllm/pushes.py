"""At the prefill engine's scheduler: which blocks of pushed requests the next step completes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aiodatadist.adapters.vllm.orders import Push


@dataclass
class _Pushed:
    """A request that is being computed. ``done``: blocks that steps so far have completed."""

    transfer: str
    tokens: int
    blocks: list[int]
    done: int = 0

    def portion(self, computed: int, block_size: int) -> Push | None:
        """What is complete when so many tokens are computed, and was not."""
        is_whole = computed >= self.tokens
        stop = -(-self.tokens // block_size) if is_whole else computed // block_size
        first, self.done = self.done, max(self.done, stop)
        return Push(self.transfer, first, tuple(self.blocks[first:stop])) if first < stop else None


class PushedRequests:
    """Those of one engine that were not computed to the end yet."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._requests: dict[str, _Pushed] = {}

    def add(self, request: Any, transfer: str, blocks: Sequence[int]) -> None:
        """It is about to be computed, for the first time or anew: all of its blocks, also those that were found computed."""
        self._requests[request.request_id] = _Pushed(transfer, int(request.num_prompt_tokens), list(map(int, blocks)))

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def portions(self, scheduled: Any) -> Iterator[Push]:
        """Of a scheduler's output."""
        for new in scheduled.scheduled_new_reqs:
            yield from self._portion(scheduled, new.req_id, new.num_computed_tokens)
        again = scheduled.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            again.req_ids, again.new_block_ids, again.num_computed_tokens, strict=True
        ):
            if blocks and request_id in self._requests and request_id not in again.resumed_req_ids:
                self._requests[request_id].blocks += map(int, blocks[0])
            yield from self._portion(scheduled, request_id, computed)

    def _portion(self, scheduled: Any, request_id: str, computed: int) -> Iterator[Push]:
        pushed = self._requests.get(request_id)
        if pushed is not None:
            after = computed + scheduled.num_scheduled_tokens.get(request_id, 0)
            portion = pushed.portion(after, self._block_size)
            if portion is not None:
                yield portion
