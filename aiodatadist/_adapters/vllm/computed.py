"""The blocks of requests that the next step completes, at a scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Completed(NamedTuple):
    """Blocks ``first``, ``first + 1``, ... of a request, which a step completes."""

    request_id: str
    first: int
    blocks: tuple[int, ...]


@dataclass
class _Computed:
    """A request that is being computed. ``end``: number of tokens after which a block counts that is not full."""

    blocks: list[int]
    done: int
    end: int | None

    def advance(self, request_id: str, computed: int, block_size: int) -> Completed | None:
        """Note that this many tokens will be computed; return the blocks that this completes."""
        is_whole = self.end is not None and computed >= self.end
        stop = -(-(self.end or 0) // block_size) if is_whole else computed // block_size
        first, self.done = self.done, max(self.done, stop)
        return Completed(request_id, first, tuple(self.blocks[first:stop])) if first < stop else None


class ComputedBlocks:
    """The requests of an engine whose blocks are of interest."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._requests: dict[str, _Computed] = {}

    def add(self, request_id: str, blocks: Sequence[int], done: int = 0, end: int | None = None) -> None:
        """Add a request that is about to be computed, for the first time or again.

        Args:
            blocks: all blocks that it has by now.
            done: number of these that are complete already, and of no interest.
            end: number of tokens after which a block counts that is not full; no block beyond them counts. With None
                only full blocks count.
        """
        self._requests[request_id] = _Computed(list(map(int, blocks)), done, end)

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def completed(self, scheduled: Any) -> Iterator[Completed]:
        """Yield the blocks that the step of this scheduler output completes."""
        for new in scheduled.scheduled_new_reqs:
            yield from self._advance(scheduled, new.req_id, new.num_computed_tokens)
        again = scheduled.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            again.req_ids, again.new_block_ids, again.num_computed_tokens, strict=True
        ):
            if blocks and request_id in self._requests and request_id not in again.resumed_req_ids:
                self._requests[request_id].blocks += map(int, blocks[0])
            yield from self._advance(scheduled, request_id, computed)

    def take_back(self, request_id: str, first: int) -> None:
        """Let the next step report blocks from this one on again: they are complete, but their tokens are unknown yet."""
        request = self._requests.get(request_id)
        if request is not None:
            request.done = min(request.done, first)

    def _advance(self, scheduled: Any, request_id: str, computed: int) -> Iterator[Completed]:
        request = self._requests.get(request_id)
        if request is not None:
            after = computed + scheduled.num_scheduled_tokens.get(request_id, 0)
            found = request.advance(request_id, after, self._block_size)
            if found is not None:
                yield found
