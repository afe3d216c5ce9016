"""The half beside vLLM's scheduler: it decides, moves nothing, and waits for nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from vllm.v1.request import RequestStatus

from aiodatadist._adapters.lease_room import LeaseRoom
from aiodatadist._adapters.pull_orders import GroupOrder, WorkerAddress
from aiodatadist._adapters.settings import Settings
from aiodatadist._adapters.vllm.computed import ComputedBlocks
from aiodatadist._adapters.vllm.model import Model
from aiodatadist._adapters.vllm.offer import MAX_OFFER_TEXT, GroupBlocks, Offer, Offers, PushOffer
from aiodatadist._adapters.vllm.orders import Decline, Expect, Hold, Keep, Load, Orders, Push, Release, Transfer
from aiodatadist._adapters.vllm.prompts import as_offered, digest_of
from aiodatadist._adapters.vllm.siblings import Siblings
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.foreign import Unreadable, printable
from aiodatadist._values.lease_ticket import MAX_TICKET_BLOCKS, new_lease_name

logger = logging.getLogger(__name__)

SHORTEST_NAME = 16
"""Fewest characters of a ``transfer_id`` if engines have keys: a random name of this length is not guessed."""
NO_BLOCK = 0
"""vLLM's number for a block that a request does not have, because no later token attends to its tokens."""
_WHOLE = frozenset({RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED})


class SchedulerSide:
    """The scheduler half of one engine.

    Args:
        block_size: tokens of a block.
        blocks: blocks of the KV cache, of which ``settings.max_leased`` may be kept for peers, and
            ``settings.max_awaited`` may wait for them.
        ranks: number of workers.
        model: its groups of layers and its pipeline; one of each if it is None.
    """

    def __init__(
        self, settings: Settings, block_size: int, blocks: int, ranks: int = 1, model: Model | None = None
    ) -> None:
        self._sizes = (block_size,) if model is None else model.sizes
        self._windows = (None,) if model is None else model.windows
        no_pulls, no_pushes = ("", "") if model is None else (model.why_not_pulled, model.why_not_pushed)
        self._settings = settings
        self._room = LeaseRoom(blocks, settings.max_leased, settings.max_leased_per_client)
        self._awaited = LeaseRoom(blocks, settings.max_awaited)
        self._counted: Counter[str] = Counter()
        self._block_size = block_size
        shortest = SHORTEST_NAME if settings.have_key else 1
        self.incidents = Incidents()
        self._offers = Offers(
            ranks, settings.allowed_peers(), settings.max_offer_workers, shortest, self.incidents, no_pulls, no_pushes
        )
        self._workers: tuple[WorkerAddress, ...] = ()
        self._orders = Orders()
        self._pushed: dict[str, Transfer] = {}
        self._pushers: dict[tuple[str, bytes], str] = {}
        self._computed = ComputedBlocks(block_size)
        self._siblings = Siblings()
        self._arrived: dict[str, tuple[Any, Offer]] = {}

    def meet(self, addresses: Mapping[int, WorkerAddress]) -> None:
        """Note the workers, by rank."""
        self._workers = tuple(addresses[rank] for rank in sorted(addresses))
        self._offers.meet(each.cluster_id for each in self._workers)

    # ---- decode ----

    def arrived(self, request: Any) -> None:
        """Note a request, which may wait for long before it is asked for."""
        self._siblings.add(request.request_id)
        offer = self._offer_of(request)
        if isinstance(offer, Offer):
            self._arrived[request.request_id] = request, offer

    def _holds(self) -> Iterator[Hold]:
        """Yield orders to keep alive what is offered to requests that arrived, and were not scheduled at once."""
        arrived, self._arrived = self._arrived, {}
        for request_id, (request, offer) in arrived.items():
            yield Hold(request_id, offer, self._digest(request, offer))

    def matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Return how many tokens more than ``computed`` are offered, and True if they come later.

        An offer is declined if it is without tokens that a group of layers needs, and if too many blocks would then
        wait for other engines.
        """
        offer = self._offer_of(request)
        if offer is None or (stop := self._offered(request, offer)) <= computed:
            return 0, False
        if isinstance(offer, Offer) and (why := self._why_not_whole(offer, computed, stop)):
            words = "request %s: its blocks are computed here: %s"
            self.incidents.add(Incident.OFFER_INCOMPLETE, logger, words, printable(request.request_id, 64), why)
            self._decline(request, offer)
            return 0, False
        if not self._awaited.fits(-(-stop // self._block_size)):
            self._counted["offer_no_room"] += 1
            self._decline(request, offer)
            return 0, False
        return stop - computed, True

    def _why_not_whole(self, offer: Offer, begin: int, stop: int) -> str:
        """Return which tokens a group of layers needs that its first offered block does not have; empty if it has all.

        A window moves on while the prefill engine answers, and begins at another token if blocks have another size.
        """
        for number, (theirs, size, window) in enumerate(zip(offer.groups, self._sizes, self._windows, strict=False)):
            skipped = 0 if window is None else window.skipped(stop)
            since, offered = max(begin, skipped // size * size), theirs.first * theirs.size
            if since < min(stop, offered):
                return f"group {number} of layers needs token {since}, and is offered those from {offered} on"
        return ""

    def _offer_of(self, request: Any) -> Offer | PushOffer | None:
        params = self._offers.params_of(request)
        return self._offers.offer_of(request.request_id, params, int(request.num_prompt_tokens))

    @staticmethod
    def _offered(request: Any, offer: Offer | PushOffer) -> int:
        tokens = int(request.num_prompt_tokens)
        return tokens if isinstance(offer, PushOffer) else min(offer.tokens, tokens)

    def _digest(self, request: Any, offer: Offer | PushOffer) -> bytes:
        """Return the digest that the other engine must have: of this request's own prompt, and of what is offered of it."""
        digest = digest_of(request, self._offered(request, offer))
        return digest if isinstance(offer, PushOffer) else as_offered(digest, offer.firsts)

    def allocated(
        self, request: Any, block_ids: Sequence[int], external_tokens: int, others: Sequence[Sequence[int]] = ()
    ) -> None:
        """Note the blocks of a request, and order its load. Does nothing the second time.

        ``others`` are the blocks of further groups of layers.
        """
        name = self._offers.transfer_to_push(self._offers.params_of(request))
        if name is not None and self._is_pusher(transfer := _transfer_of(request, name)):
            self._pushed[request.request_id] = transfer
            self._computed.add(request.request_id, block_ids, end=int(request.num_prompt_tokens))
        offer = self._offer_of(request)
        if offer is None:
            return
        if not external_tokens:  # this engine has all of it already
            self._decline(request, offer)
            return
        self._is_read(request)
        stop = self._offered(request, offer)
        begin = stop - external_tokens
        first, last = begin // self._block_size, -(-stop // self._block_size)
        request_id, digest = request.request_id, self._digest(request, offer)
        taken = {int(block) for block in block_ids[:last]}
        if isinstance(offer, PushOffer):
            into = tuple(map(int, block_ids[first:last]))
            self._orders.expects.append(Expect(request_id, offer, first, into, digest))
        else:
            one, *more = self._group_orders(offer, (block_ids, *others), begin, stop)
            load = Load(request_id, offer, one.first, one.into, digest, one.skip, one.tokens, tuple(more))
            self._orders.loads.append(load)
            taken.update(block for group in more for block in group.into)
        self._awaited.take(request_id, taken)

    def _group_orders(self, offer: Offer, ids: Sequence[Sequence[int]], begin: int, stop: int) -> Iterator[GroupOrder]:
        """Yield what is to be loaded of each group: the tokens from ``begin`` to ``stop``, or those of them it has room for.

        A group that is not offered, or not from its first wanted token on, is ordered without any of its blocks: then the
        load fails, and says why.
        """
        for number, (mine, size, window) in enumerate(zip(ids, self._sizes, self._windows, strict=True)):
            theirs = offer.groups[number] if number < len(offer.groups) else None
            into = tuple(map(int, mine[begin // size : -(-stop // size)]))
            holes = next((at for at, block in enumerate(into) if block != NO_BLOCK), len(into)) if window else 0
            since = max(begin, (begin // size + holes) * size)
            if theirs is None or since >= stop:
                yield GroupOrder(theirs.blocks if theirs else (), into[holes:])
                continue
            at, skip = divmod(since, theirs.size)
            if at < theirs.first:
                yield GroupOrder(theirs.blocks, into[holes:], len(theirs.blocks))
            else:
                yield GroupOrder(theirs.blocks, into[holes:], at - theirs.first, skip, stop - since)

    def _is_pusher(self, transfer: Transfer) -> bool:
        """Return True for the first request of a transfer. Others come from a router's retries, and push nothing."""
        request_id = transfer.request_id
        first = self._pushers.setdefault((transfer.name, transfer.prompt_digest), request_id)
        if first != request_id:
            words, told = "request %s: transfer_id is %s: request %s has it", (request_id, transfer.name, first)
            self.incidents.add(Incident.NAME_TAKEN, logger, words, *map(printable, told))
        return first == request_id

    def _is_read(self, request: Any) -> None:
        """Drop the offer of a request."""
        # another dictionary: samples of one prompt may share this one
        request.kv_transfer_params = {**request.kv_transfer_params, "do_remote_prefill": False}
        self._offers.forget(request.request_id)
        self._arrived.pop(request.request_id, None)

    def _decline(self, request: Any, offer: Offer | PushOffer) -> None:
        """Drop the offer of a request, and release it at the other engine."""
        self._is_read(request)
        self._refuse(request, offer)

    def _refuse(self, request: Any, offer: Offer | PushOffer) -> None:
        """Release an offer at the other engine, if it keeps it for this request."""
        digest = self._digest(request, offer)
        if isinstance(offer, PushOffer):
            self._orders.declines.append(Decline(offer, digest))
        else:
            self._orders.releases.append(Release(request.request_id, offer, digest))

    def received(self, request_ids: Iterable[str]) -> None:
        """Note that loads have ended."""
        for request_id in request_ids:
            self._awaited.give_back(request_id)

    def sent(self, request_ids: Iterable[str]) -> None:
        """Note that blocks of these requests are no longer kept."""
        for request_id in request_ids:
            self._room.give_back(request_id)

    def take_counters(self) -> Counter[str]:
        """Return what this half counted since the last call."""
        taken, self._counted = self._counted, Counter()
        return taken + self.incidents.take()

    # ---- prefill, and the end of a request ----

    def finished(
        self,
        request: Any,
        block_ids: Sequence[int],
        others: Sequence[Sequence[int]] = (),
        not_moved: Sequence[int] = (),
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request; return True if its blocks are kept, and the parameters for the next engine.

        Args:
            others: the blocks of further groups of layers.
            not_moved: those of groups that no other engine gets. vLLM keeps all blocks of a request, or none.
        """
        try:
            return self._finished(request, (block_ids, *others), not_moved)
        finally:
            self._siblings.remove(request.request_id)

    def _finished(
        self, request: Any, ids: Sequence[Sequence[int]], not_moved: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id, params = request.request_id, self._offers.params_of(request)
        every = [int(block) for block in chain(*ids, not_moved) if block != NO_BLOCK]
        offer = self._offer_of(request)
        self._offers.forget(request_id)
        self._arrived.pop(request_id, None)
        if offer is not None:  # it was never scheduled here
            self._refuse(request, offer)
        if request_id in self._awaited:
            self._orders.cancels.append(request_id)
        is_whole = request.status in _WHOLE and bool(ids[0])
        name = self._offers.transfer_to_push(params)
        if name is not None:
            return self._end_push(request, name, every if is_whole else ())
        if not params.get("do_remote_decode") or not is_whole:
            return False, None
        return self._keep(request, params, ids, every)

    def _keep(
        self, request: Any, params: Mapping[str, Any], ids: Sequence[Sequence[int]], every: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep a request's blocks; return True, and the parameters for the next engine. Of samples, keep the first one's.

        The blocks of its answer, which are not offered, count as kept, too, because vLLM keeps ``every`` block.
        """
        request_id = request.request_id
        # The next engine knows the prompt, and perhaps not what this one answered: the digest ends where the prompt does.
        tokens = min(int(request.num_computed_tokens), int(request.num_prompt_tokens))
        first, *more = groups = [*self._offered_groups(ids, tokens)]
        most = max(len(group.blocks) for group in groups)
        if most > MAX_TICKET_BLOCKS:
            words = "request %s: its %d blocks are not kept: a lease keeps at most %d"
            told = printable(request_id), most, MAX_TICKET_BLOCKS
            self.incidents.add(Incident.KEEP_FAILED, logger, words, *told)
            return False, None
        digest = digest_of(request, tokens)
        sent = self._siblings.offer(request_id, digest)
        if sent is not None:
            return False, sent
        takers = self._offers.takers_of(request_id, params, self._settings.max_takers)
        if takers is None:
            return False, None
        takers = max(takers, min(self._siblings.count(request_id), self._settings.max_takers))
        made = Offer(
            remote_request_id=printable(request_id, MAX_OFFER_TEXT),
            remote_block_ids=first.blocks,
            remote_num_tokens=tokens,
            remote_block_size=self._block_size,
            remote_first_block=first.first,
            remote_groups=tuple(more),
            lease=new_lease_name(),
            lease_seconds=self._settings.lease_seconds,
            workers=self._workers,
            takers=takers,
        )
        try:
            sent = made.to_send()
        except Unreadable as error:
            words = "request %s: its blocks are not kept: the offer: %s"
            self.incidents.add(Incident.KEEP_FAILED, logger, words, printable(request_id), error)
            return False, None
        if not self._has_room(request, every):
            return False, None
        kept = tuple(group.blocks for group in more)
        claimed = as_offered(digest, made.firsts)
        self._orders.keeps.append(Keep(request_id, made.lease, first.blocks, claimed, takers, kept))
        self._siblings.offered(request_id, digest, sent)
        return True, sent

    def _offered_groups(self, ids: Sequence[Sequence[int]], tokens: int) -> Iterator[GroupBlocks]:
        """Yield the blocks of each group that hold the first tokens, without those that are not there."""
        for mine, size, window in zip(ids, self._sizes, self._windows, strict=True):
            blocks = tuple(map(int, mine[: -(-tokens // size)]))
            first = next((at for at, block in enumerate(blocks) if block != NO_BLOCK), len(blocks)) if window else 0
            yield GroupBlocks.model_construct(first=first, blocks=blocks[first:], size=size)

    def _end_push(self, request: Any, name: str, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """End the push of a request. Without blocks it was not computed to its end."""
        request_id = request.request_id
        begun = self._pushed.pop(request_id, None)
        transfer = begun or _transfer_of(request, name)
        self._computed.remove(request_id)
        key = transfer.name, transfer.prompt_digest
        if self._pushers.get(key, request_id) != request_id or (begun is None and block_ids):
            return False, None  # another request pushes or pushed it
        self._pushers.pop(key, None)
        is_kept = bool(block_ids) and self._has_room(request, block_ids)  # until the peer has asked for them
        if is_kept:
            self._orders.pushed.append(transfer)
        else:
            self._orders.abandons.append(transfer)
        return is_kept, None

    def _has_room(self, request: Any, blocks: Iterable[int]) -> bool:
        """Count the blocks as kept, unless too many are; return True if they are."""
        is_kept = self._room.take(request.request_id, blocks, _client_of(request))
        if not is_kept:
            self._counted["lease_no_room"] += 1
        return is_kept

    def take_orders(self, scheduled: Any) -> Orders:
        """Return the orders of this step, given as a scheduler's output."""
        for done in self._computed.completed(scheduled):
            self._orders.pushes.append(Push(self._pushed[done.request_id], done.first, done.blocks))
        self._orders.holds.extend(self._holds())
        orders, self._orders = self._orders, Orders()
        return orders


def _transfer_of(request: Any, name: str) -> Transfer:
    return Transfer(name, request.request_id, digest_of(request, int(request.num_prompt_tokens)))


def _client_of(request: Any) -> str:
    """Return the client that sent a request, if known: a tenant by its ``cache_salt``, or the router's word."""
    named = (request.kv_transfer_params or {}).get("client")
    return str(request.cache_salt or (named if isinstance(named, str) else ""))
