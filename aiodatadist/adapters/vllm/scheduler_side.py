"""The half that lives beside vLLM's scheduler: decides, moves nothing, waits for nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from aiodatadist.adapters.block_service import Settings
from aiodatadist.adapters.leased_blocks import WorkerAddress
from aiodatadist.adapters.vllm.computed import ComputedBlocks
from aiodatadist.adapters.vllm.offer import Offer, Offers, PushOffer
from aiodatadist.adapters.vllm.orders import Expect, Keep, Load, Orders, Push
from aiodatadist.values.foreign import Unreadable, printable
from aiodatadist.values.lease_ticket import MAX_TICKET_BLOCKS, new_lease_name

logger = logging.getLogger(__name__)

_WHOLE = frozenset({RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED})


class SchedulerSide:
    """One engine's.

    Args:
        block_size: tokens of a block.
        ranks: workers.
    """

    def __init__(self, settings: Settings, block_size: int, ranks: int = 1) -> None:
        self._settings = settings
        self._block_size = block_size
        self._offers = Offers(ranks, settings.allowed_peers(), settings.max_offer_workers)
        self._workers: tuple[WorkerAddress, ...] = ()
        self._orders = Orders()
        self._loading: set[str] = set()
        self._pushed: dict[str, str] = {}
        self._pushers: dict[str, str] = {}
        self._computed = ComputedBlocks(block_size)

    def meet(self, addresses: Mapping[int, WorkerAddress]) -> None:
        """The workers, by rank."""
        self._workers = tuple(addresses[rank] for rank in sorted(addresses))

    # ---- decode ----

    def matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens more than ``computed`` are to be had, and that they come by and by."""
        offer = self._offers.offer_of(request.request_id, request.kv_transfer_params)
        count = 0 if offer is None else self._offered(request, offer) - computed
        return (count, True) if count > 0 else (0, False)

    @staticmethod
    def _offered(request: Any, offer: Offer | PushOffer) -> int:
        tokens = int(request.num_prompt_tokens)
        return tokens if isinstance(offer, PushOffer) else min(offer.tokens, tokens)

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """Blocks for the tokens are there. Called a second time for a request, there is nothing to do."""
        transfer = self._offers.transfer_to_push(request.kv_transfer_params)
        if transfer is not None and self._is_pusher(request.request_id, transfer):
            self._pushed[request.request_id] = transfer
            self._computed.add(request.request_id, block_ids, end=int(request.num_prompt_tokens))
        offer = self._offers.offer_of(request.request_id, request.kv_transfer_params)
        if offer is None:
            return
        request.kv_transfer_params["do_remote_prefill"] = False
        if not external_tokens:  # this engine has all of it
            self._refuse(offer)
            return
        stop = self._offered(request, offer)
        begin = stop - external_tokens
        first, last = begin // self._block_size, -(-stop // self._block_size)
        request_id, into = request.request_id, tuple(map(int, block_ids[first:last]))
        if isinstance(offer, PushOffer):
            self._orders.expects.append(Expect(request_id, offer, first, into))
        else:
            blocks, skip = offer.blocks(begin, stop)
            self._orders.loads.append(Load(request_id, offer, blocks, into, skip, external_tokens))
        self._loading.add(request_id)

    def _is_pusher(self, request_id: str, transfer: str) -> bool:
        """The first request of a transfer: others, which a router's retry makes, keep and push nothing."""
        first = self._pushers.setdefault(transfer, request_id)
        if first != request_id:
            words = "request %s: transfer_id is %s: request %s has it"
            logger.warning(words, printable(request_id), printable(transfer), printable(first))
        return first == request_id

    def _refuse(self, offer: Offer | PushOffer) -> None:
        """The other engine need not keep it."""
        if isinstance(offer, PushOffer):
            self._orders.declines.append(offer)
        else:
            self._orders.releases.append(offer)

    def received(self, request_ids: Iterable[str]) -> None:
        self._loading.difference_update(request_ids)

    # ---- prefill, and the end of a request ----

    def finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are kept, and what the next engine is to be told."""
        request_id, params = request.request_id, request.kv_transfer_params or {}
        offer = self._offers.offer_of(request_id, params)
        if offer is not None:  # it was never scheduled here
            self._refuse(offer)
        if request_id in self._loading:
            self._orders.cancels.append(request_id)
        is_whole = request.status in _WHOLE and bool(block_ids)
        transfer = self._offers.transfer_to_push(params)
        if transfer is not None:
            return self._end_push(request_id, transfer, is_whole)
        if not params.get("do_remote_decode") or not is_whole:
            return False, None
        tokens = int(request.num_computed_tokens)
        blocks = tuple(map(int, block_ids[: -(-tokens // self._block_size)]))
        if len(blocks) > MAX_TICKET_BLOCKS:
            words = "request %s: its %d blocks are not kept: a lease keeps at most %d"
            logger.warning(words, printable(request_id), len(blocks), MAX_TICKET_BLOCKS)
            return False, None
        made = Offer(
            remote_request_id=request_id,
            remote_block_ids=blocks,
            remote_num_tokens=tokens,
            remote_block_size=self._block_size,
            lease=new_lease_name(),
            lease_seconds=self._settings.lease_seconds,
            workers=self._workers,
        )
        try:
            sent = made.to_send()
        except Unreadable as error:
            logger.warning("request %s: its blocks are not kept: the offer of them: %s", printable(request_id), error)
            return False, None
        self._orders.keeps.append(Keep(request_id, made.lease, blocks))
        return True, sent

    def _end_push(self, request_id: str, transfer: str, is_whole: bool) -> tuple[bool, dict[str, Any] | None]:
        self._pushed.pop(request_id, None)
        self._computed.remove(request_id)
        if self._pushers.get(transfer, request_id) != request_id:
            return False, None
        self._pushers.pop(transfer, None)
        if is_whole:
            self._orders.pushed.append((transfer, request_id))
        else:
            self._orders.abandons.append(transfer)
        return is_whole, None

    def take_orders(self, scheduled: Any) -> Orders:
        """Those of this step, which is a scheduler's output."""
        for done in self._computed.completed(scheduled):
            self._orders.pushes.append(Push(self._pushed[done.request_id], done.first, done.blocks))
        orders, self._orders = self._orders, Orders()
        return orders
