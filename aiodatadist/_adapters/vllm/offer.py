"""The offers that a router carries in ``kv_transfer_params``: blocks that a prefill engine keeps, or will push.

Nothing in them is trusted: the sender may be any client of the engine. An offer is bounded before it is parsed, and the
addresses that it makes this engine dial must be among ``peers``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, TypeAdapter

from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.peers import Peers
from aiodatadist._adapters.pull_orders import WorkerAddress
from aiodatadist._adapters.push_messages import TransferName
from aiodatadist._adapters.regions import MAX_PLANES
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.foreign import Unreadable, printable, read_foreign, scan_foreign, shown
from aiodatadist._values.lease_ticket import Blocks, LeaseName
from aiodatadist._wire.messages import MAX_SECONDS

AnyParams = TypeVar("AnyParams", bound=BaseModel)

logger = logging.getLogger(__name__)

MAX_OFFER = 256 << 10
"""Most bytes of an offer as JSON: blocks of half a million tokens, in blocks of 16."""
MAX_OFFER_TEXT = 256
"""Most characters of each text in it."""
MAX_WORKERS = 1024
"""Upper limit of :attr:`Settings.max_offer_workers`."""
MAX_TAKERS = 64
"""Upper limit of :attr:`Settings.max_takers`."""
MAX_WAITING = 64
"""Most offers that are kept as they were read. Of the requests that wait, a scheduler tries the first one again and again."""


class _Params(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class GroupBlocks(_Params):
    """The blocks of one more group of layers: ``first`` ones are not there, because no later token attends to them."""

    first: int = Field(default=0, ge=0, lt=2**31)
    blocks: Blocks
    size: int = Field(ge=1, lt=2**31)

    @property
    def stop(self) -> int:
        """Number of the block behind the last one."""
        return self.first + len(self.blocks)


class Offer(_Params):
    """Blocks of a finished request that a prefill engine keeps. JSON-safe.

    Attributes:
        do_remote_prefill, do_remote_decode: as in vLLM's own connectors: the next engine is to decode.
        remote_request_id: the prefill engine's name of the request.
        remote_block_ids: in order, from the first token.
        remote_num_tokens: tokens whose keys and values they have.
        remote_block_size: tokens of a block.
        remote_first_block: number of blocks in front of these that are not there, as in :class:`GroupBlocks`.
        remote_groups: the blocks of further groups of layers.
        lease: the name under which each worker keeps them.
        lease_seconds: seconds for which they are kept, from when this was written. An engine whose request waits asks for
            them again and again.
        workers: by tensor-parallel rank.
        takers: number of requests that may take the blocks. The prefill engine knows it, and refuses another one.
    """

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_request_id: Annotated[str, Field(max_length=MAX_OFFER_TEXT)]
    remote_block_ids: Blocks
    remote_num_tokens: int = Field(ge=1, lt=2**31)
    remote_block_size: int = Field(ge=1, lt=2**31)
    remote_first_block: int = Field(default=0, ge=0, lt=2**31)
    remote_groups: Annotated[tuple[GroupBlocks, ...], Strict(False), Field(max_length=MAX_PLANES - 1), FailFast()] = ()
    lease: LeaseName
    lease_seconds: float = Field(ge=0, le=MAX_SECONDS)
    workers: Annotated[
        tuple[WorkerAddress, ...], Strict(False), Field(min_length=1, max_length=MAX_WORKERS), FailFast()
    ]
    takers: int = Field(default=1, ge=1, le=MAX_TAKERS)

    def to_send(self) -> dict[str, Any]:
        """Return what travels. Raises Unreadable if it is larger than another engine reads."""
        content = self.model_dump(mode="json")
        scan_foreign(content, limit_bytes=MAX_OFFER, limit_chars=MAX_OFFER_TEXT)
        return content

    @property
    def tokens(self) -> int:
        """Tokens that are in the blocks."""
        return min(self.remote_num_tokens, *(group.size * group.stop for group in self.groups))

    @property
    def groups(self) -> tuple[GroupBlocks, ...]:
        """All groups of layers."""
        first = GroupBlocks.model_construct(
            first=self.remote_first_block, blocks=self.remote_block_ids, size=self.remote_block_size
        )
        return (first, *self.remote_groups)

    @property
    def firsts(self) -> list[int]:
        """The number of each group's first block in the prompt."""
        return [group.first for group in self.groups]

    @property
    def blocks_by_group(self) -> list[tuple[int, ...]]:
        """The blocks of each group."""
        return [group.blocks for group in self.groups]

    def why_too_long(self, prompt_tokens: int) -> str:
        """Return why a request with a prompt of this length refuses the offer; empty if it does not.

        The owner would refuse the pull of blocks beyond the prompt, and until then each number is kept.
        """
        tokens = min(self.tokens, prompt_tokens)
        for number, group in enumerate(self.groups):
            most, count = -(-tokens // group.size), group.stop
            if count > most:
                name = f"remote_groups[{number - 1}]" if number else "remote_block_ids"
                return f"{name} has {count} entries: the limit is {most}, which hold the {tokens} tokens of the prompt"
        return ""


class PushOffer(_Params):
    """A promise of a prefill engine that computes this request at the same time, and pushes it. JSON-safe.

    Attributes:
        transfer_id: the router's name of the request, which it gives both engines, and no other request.
        prefill: address of rank 0 of that engine; rank r has the port and the cluster id plus r.
        prefill_workers: number of its tensor-parallel workers, if it is not the number of the decode engine's.
    """

    transfer_id: TransferName
    prefill: PeerAddress
    prefill_workers: int | None = Field(default=None, ge=1, le=MAX_WORKERS)

    def ranks(self, ranks: int) -> int:
        """Return the number of the prefill engine's workers, for an engine of ``ranks`` workers."""
        return self.prefill_workers or ranks

    def asked(self, ranks: int) -> int:
        """Return the number of the prefill engine's workers that an engine of ``ranks`` workers may ask, from rank 0.

        A worker may ask for that of its own rank, also if the router says that there are fewer.
        """
        return max(self.ranks(ranks), ranks)

    def has_workers(self, ranks: int) -> bool:
        """Return True if there can be this many ranks: their ports and cluster ids are in range."""
        rank0 = self.prefill
        return rank0.port + ranks - 1 <= 65535 and rank0.cluster_id + ranks - 1 < 2**64

    def worker(self, rank: int) -> PeerAddress:
        """Return the address of a rank."""
        rank0 = self.prefill
        return PeerAddress(cluster_id=rank0.cluster_id + rank, host=rank0.host, port=rank0.port + rank)


class _Known(NamedTuple):
    """An offer, and what it was read from."""

    params: Mapping[str, Any]
    prompt_tokens: int
    offer: Offer | PushOffer


class Offers:
    """A reader of what a router sends to one engine. Each refusal is at most one line in the log.

    Args:
        ranks: workers of this engine.
        peers: the peers that it dials.
        max_workers: most workers that an offer may name.
        shortest_name: fewest characters of a ``transfer_id``.
        no_pulls, no_pushes: why this engine cannot pull, and why its requests cannot be pushed; empty if they can.
    """

    def __init__(
        self,
        ranks: int,
        peers: Peers,
        max_workers: int,
        shortest_name: int = 1,
        incidents: Incidents | None = None,
        no_pulls: str = "",
        no_pushes: str = "",
    ) -> None:
        self._no_pulls, self._no_pushes = no_pulls, no_pushes
        self._shortest_name = shortest_name
        self._ranks = ranks
        self._peers = peers
        self._max_workers = max_workers
        self._incidents = incidents or Incidents()
        self._waiting: dict[str, _Known] = {}
        self._own: frozenset[int] = frozenset()

    def meet(self, cluster_ids: Iterable[int]) -> None:
        """Note the cluster ids of this engine's workers. It pulls nothing from them."""
        self._own = frozenset(cluster_ids)

    def params_of(self, request: Any) -> dict[str, Any]:
        """Return the parameters of one of vLLM's requests; empty if it has none.

        A client can send values of any type in ``vllm_xargs``. Wrong ones are refused once: from then on the request
        has none.
        """
        params = request.kv_transfer_params
        if isinstance(params, dict):
            return params
        if params is not None:
            request.kv_transfer_params = None
            why = f"it is {shown(params)}: must be an object"
            self._refuse(Incident.OFFER_UNREADABLE, request.request_id, "kv_transfer_params", why)
        return {}

    def offer_of(
        self, request_id: str, params: Mapping[str, Any] | None, prompt_tokens: int
    ) -> Offer | PushOffer | None:
        """Return the offer of a request, or None if it brings no blocks, or they are refused, which is logged.

        It is refused once: from then on the request has no offer. An accepted offer is kept until :meth:`forget`: to read
        it again at each step in which its request waits for blocks would take milliseconds of each.
        """
        if not params or not params.get("do_remote_prefill"):
            return None
        known = self._waiting.get(request_id)
        if known is not None and known.params is params and known.prompt_tokens == prompt_tokens:
            return known.offer
        offer = self._accepted(request_id, params, prompt_tokens)
        if offer is not None:
            self._waiting[request_id] = _Known(params, prompt_tokens, offer)
            if len(self._waiting) > MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
        elif isinstance(params, dict):
            params["do_remote_prefill"] = False
        return offer

    def forget(self, request_id: str) -> None:
        """Forget the offer of a request that got its blocks, or has ended."""
        self._waiting.pop(request_id, None)

    def _accepted(self, request_id: str, params: Mapping[str, Any], prompt_tokens: int) -> Offer | PushOffer | None:
        """Return the offer, or None if it is refused, which is logged."""
        try:
            offer = self._read(params)
            if isinstance(offer, Offer) and (excess := offer.why_too_long(prompt_tokens)):
                raise Unreadable(excess)
        except Unreadable as error:
            self._refuse(Incident.OFFER_UNREADABLE, request_id, "kv_transfer_params", error)
        else:
            for peer in self._places_of(offer):
                if why := self._why_not(peer):
                    self._refuse(Incident.OFFER_ELSEWHERE, request_id, "offer refused", why)
                    break
            else:
                return offer
        return None

    def _why_not(self, peer: PeerAddress) -> str:
        """Return why nothing may be pulled from a place; empty if that is allowed.

        An engine cannot link to itself. If a router chose it for both halves of a request, the load would fail, and
        with vLLM's default policy the request, too.
        """
        if peer.cluster_id in self._own:
            return f"cluster {peer.cluster_id} is one of this engine's workers"
        return self._peers.why_not(peer.host, peer.port, peer.cluster_id)

    def _read(self, params: Mapping[str, Any]) -> Offer | PushOffer:
        """Return the offer. Raises Unreadable if it is none, or too large."""
        if why := self._no_pushes if "transfer_id" in params else self._no_pulls:
            raise Unreadable(why)
        if "transfer_id" in params:
            pushed = _read(params, PushOffer)
            self._check_name(pushed.transfer_id)
            ranks = pushed.asked(self._ranks)
            if not pushed.has_workers(ranks):
                raise Unreadable(f"prefill: there cannot be {ranks} workers from this address upwards")
            if ranks > max(self._max_workers, self._ranks):
                raise Unreadable(f"prefill_workers is {ranks}: the limit is {self._max_workers}")
            return pushed
        workers = params.get("workers")
        if isinstance(workers, (list, tuple)) and len(workers) > self._max_workers:
            raise Unreadable(f"it has {len(workers)} workers: the limit is {self._max_workers}")
        offer = _read(params, Offer)
        found: dict[int, set[int]] = {}
        for each in offer.workers:
            for number, some in each.memory.sizes_by_group().items():
                found.setdefault(number, set()).update(some)
        for number, group in enumerate(offer.groups):
            sizes = found.get(number, set())
            if not sizes <= {group.size}:
                other = max(map(str, sizes - {group.size}))
                name = f"remote_groups[{number - 1}].size" if number else "remote_block_size"
                raise Unreadable(f"{name} is {group.size}: a worker has block_size {other}")
        return offer

    def _places_of(self, offer: Offer | PushOffer) -> Sequence[PeerAddress]:
        return (
            offer.workers
            if isinstance(offer, Offer)
            else [offer.worker(rank) for rank in range(offer.asked(self._ranks))]
        )

    def transfer_to_push(self, params: Mapping[str, Any] | None) -> str | None:
        """Return the router's name of a request that is to be pushed, or None if its blocks are kept for a pull.

        A name that is refused is refused once: from then on the request has none.
        """
        if not params or not params.get("do_remote_decode") or "transfer_id" not in params:
            return None
        try:
            if self._no_pushes:
                raise Unreadable(self._no_pushes)
            name = read_foreign(params["transfer_id"], _NAME, limit_bytes=MAX_OFFER, limit_chars=MAX_OFFER_TEXT)
            self._check_name(name)
        except Unreadable as error:
            told = printable(f"kv_transfer_params: transfer_id is ignored: {error}")
            self._incidents.add(Incident.OFFER_UNREADABLE, logger, "%s", told)
            if isinstance(params, dict):
                del params["transfer_id"]
            return None
        return name

    def takers_of(self, request_id: str, params: Mapping[str, Any], limit: int) -> int | None:
        """Return how many requests may take the blocks, as the router says; None if that is refused, which is logged."""
        takers = params.get("takers", 1)
        if type(takers) is int and 1 <= takers <= limit:
            return takers
        why = f"takers is {shown(takers)}: must be from 1 to {limit}, the setting max_takers"
        self._refuse(Incident.OFFER_UNREADABLE, request_id, "its blocks are not kept", why)
        return None

    def _check_name(self, name: str) -> None:
        """Raise Unreadable if the name is too short to be drawn at random by a router."""
        if len(name) < self._shortest_name:
            raise Unreadable(
                f"transfer_id has {len(name)} characters: must have at least {self._shortest_name} if engines have keys"
            )

    def _refuse(self, kind: Incident, request_id: str, what: str, why: object) -> None:
        """Count and log a refusal. The sender is unknown, because the request came through the engine's endpoint."""
        self._incidents.add(kind, logger, "%s", printable(f"request {printable(request_id, 64)}: {what}: {why}"))


_NAME: TypeAdapter[str] = TypeAdapter(TransferName)


def _read(params: Mapping[str, Any], kind: type[AnyParams]) -> AnyParams:
    return read_foreign(params, kind, limit_bytes=MAX_OFFER, limit_chars=MAX_OFFER_TEXT)
