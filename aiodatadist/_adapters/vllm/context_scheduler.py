"""The context connector's half beside vLLM's scheduler: looks prefixes up, and decides what is loaded and saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from aiodatadist._adapters.cache_service import CacheService
from aiodatadist._adapters.vllm.computed import ComputedBlocks
from aiodatadist._adapters.vllm.context_orders import Blocks, ContextOrders
from aiodatadist._adapters.vllm.lora import weights_of

HASH_BYTES = 16
"""Bytes that are used of vLLM's hash of a block, which covers the blocks before it and all else that matters."""


def hashes_of(request: Any, first: int, stop: int) -> tuple[int, ...]:
    """Return the hashes of full blocks, together with the weights of the request's adapter: vLLM's hash has its name only."""
    weights = weights_of(request).encode()
    return tuple(
        int.from_bytes(_with(whole, weights) if weights else whole[:HASH_BYTES], "big")
        for whole in request.block_hashes[first:stop]
    )


def _with(block_hash: bytes, weights: bytes) -> bytes:
    return blake2b(block_hash, digest_size=HASH_BYTES, key=weights, person=b"adist adapter").digest()


@dataclass
class _Known:
    """A request that is known here.

    Attributes:
        there: number of blocks that the cache has, as far as is known: they need not be saved.
        has_saves: True if its blocks may still be read when it ends.
    """

    request: Any
    there: int = 0
    has_saves: bool = False
    is_loading: bool = False


class ContextScheduler:
    """The scheduler half of one engine.

    Args:
        service: for look-ups only.
        can_load, can_save: from ``kv_role``.
    """

    def __init__(self, service: CacheService, block_size: int, can_load: bool = True, can_save: bool = True) -> None:
        self._service = service
        self._block_size = block_size
        self._can_load, self._can_save = can_load, can_save
        self._requests: dict[str, _Known] = {}
        self._computed = ComputedBlocks(block_size)
        self._orders = ContextOrders()

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens more than ``computed`` can be loaded, and True if they come later.

        The number is None if it is not known yet.
        """
        request_id = request.request_id
        blocks = min(int(request.num_prompt_tokens) // self._block_size, len(request.block_hashes))
        if not self._can_load or blocks * self._block_size <= computed or self._is_underway(request_id):
            return 0, False
        if not self._service.is_looked_up(request_id):
            self._service.look_up(request_id, hashes_of(request, 0, blocks))
        found = self._service.found(request_id)
        if found is None:
            return None, False
        count = found * self._block_size - computed
        return (count, True) if count > 0 else (0, False)

    def _is_underway(self, request_id: str) -> bool:
        """Return True if the request was scheduled before, and preempted or not loaded: its missing tokens are computed."""
        return request_id in self._requests

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """Note the blocks of a request, and order its load."""
        request_id = request.request_id
        known = self._requests.setdefault(request_id, _Known(request))
        if self._service.is_looked_up(request_id):
            known.there = self._service.found(request_id) or 0
            self._service.forget(request_id)
        if external_tokens:
            known.is_loading = True
            self._order_load(request, block_ids, known.there, external_tokens)
        if self._can_save:
            self._computed.add(request_id, block_ids, done=known.there)

    def _order_load(self, request: Any, block_ids: Sequence[int], found: int, external_tokens: int) -> None:
        first = found - external_tokens // self._block_size
        into = tuple(map(int, block_ids[first:found]))
        self._orders.loads.append(Blocks(request.request_id, hashes_of(request, first, found), into))

    def received(self, request_ids: Iterable[str], is_whole: bool) -> None:
        """Note that loads have ended. ``is_whole`` is True if none of their blocks is missing."""
        for request_id in request_ids:
            known = self._requests.get(request_id)
            if known is not None:
                known.is_loading = False
                known.there = known.there if is_whole else 0

    def finished(self, request: Any) -> bool:
        """Forget a request; return True if its blocks are still needed."""
        request_id = request.request_id
        self._service.forget(request_id)
        self._computed.remove(request_id)
        known = self._requests.pop(request_id, None)
        if known is None:
            return False
        if known.is_loading:
            self._orders.cancels.append(request_id)
        if known.has_saves:
            self._orders.finished.append(request_id)
        return known.has_saves

    def take_orders(self, scheduled: Any) -> ContextOrders:
        """Return the orders of this step, given as a scheduler's output."""
        for done in self._computed.completed(scheduled):
            known = self._requests[done.request_id]
            hashes = hashes_of(known.request, done.first, done.first + len(done.blocks))
            # Blocks without a hash come again: a token becomes known one step later, or never.
            self._computed.take_back(done.request_id, done.first + len(hashes))
            if hashes:
                self._orders.saves.append(Blocks(done.request_id, hashes, done.blocks[: len(hashes)]))
                known.has_saves = True
        self._orders.preempted += scheduled.preempted_req_ids or ()
        orders, self._orders = self._orders, ContextOrders()
        return orders

    def close(self) -> None:
        """Close the service."""
        self._service.close()
