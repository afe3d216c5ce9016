"""The manager of one rank: its memory, its links, and the outcomes of its rooms."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVManager

from aiodatadist._adapters import rendezvous
from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.meaning import differences
from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.push_messages import MAX_NAME
from aiodatadist._adapters.regions import WORKERS
from aiodatadist._adapters.rendezvous import Ranks, Registered
from aiodatadist._adapters.rendezvous_asks import RendezvousAsks
from aiodatadist._adapters.sglang.buffers import check_no_state, groups_of, layout_of
from aiodatadist._adapters.sglang.identity import meaning_of
from aiodatadist._adapters.sglang.settings import SglangSettings, from_environment, on_device
from aiodatadist._blocking import shared_loop
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.foreign import printable, shown
from aiodatadist.errors import IncompatiblePeer, LLMException

logger = logging.getLogger(__name__)

MAX_ENGINES = 1024
"""Most prefill engines that are known by the addresses in requests, which can be spelt in many ways."""


@dataclass(frozen=True)
class PrefillInfo:
    """A prefill engine, with the names that SGLang's decode queue looks at."""

    workers: tuple[PeerAddress, ...]
    dp_size: int = 1
    pp_size: int = 1
    follow_bootstrap_room: bool = True

    @property
    def attn_tp_size(self) -> int:
        """Number of ranks."""
        return len(self.workers)


def name_of_room(bootstrap_room: object) -> str:
    """Return a room's name, as a request gives it.

    Raises:
        ValueError: if it cannot be pushed: it is neither a number nor a text, too long, not printable, or a number that
            Python does not write. Requests that have no room, or a list of rooms, would share one name.
    """
    if not isinstance(bootstrap_room, (int, str)):
        raise ValueError(  # noqa: TRY004  # as for any other room that a request may have
            f"the room is {shown(bootstrap_room)}: must be a number or a text"
        )
    name = str(bootstrap_room)
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"the room has {len(name)} characters: the limits are 1 and {MAX_NAME}")
    if not (name.isascii() and name.isprintable()):
        raise ValueError(f"the room is {shown(name)}: must be printable ASCII")
    return name


class AioDataDistKVManager(BaseKVManager):  # type: ignore[misc]  # SGLang has no types here
    """A KV manager: prefill engines push pages into those that decode engines name.

    Raises:
        ValueError: if a buffer or a setting is wrong, or the model has state beside its KV cache.
        LLMException, OSError: if there is no such device, port or key file, if others may read or write that file, or,
            at a prefill engine, if there is no bootstrap server.
    """

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        check_no_state(args)
        self.kv_args = args
        self.server_args = server_args
        self.rank: int = int(args.engine_rank)
        self.settings: SglangSettings = on_device(from_environment(), int(args.gpu_id) - self.rank)
        self._ranks = int(getattr(server_args, "tp_size", 1))
        self._is_replicated = bool(is_mla_backend)
        self._layout = {**layout_of(args, self._ranks), **meaning_of(args, server_args, self.settings.model_id)}
        self._peers = self.settings.allowed_peers()
        self._credential = self.settings.credential()
        self.prefill_info_table: dict[str, PrefillInfo] = {}
        self._wanted: set[str] = set()
        self._followed: set[str] = set()
        self._outcomes: dict[str, str] = {}
        self.incidents: Incidents = Incidents()
        self.service: BlockService = BlockService(self.settings, self.rank, self._ranks)
        with ExitStack() as opened:
            opened.callback(self.service.close)
            self._asks = RendezvousAsks(self._credential)
            opened.callback(self._asks.close)
            self.address: PeerAddress = self.service.open_groups(
                groups_of("kv_data_ptrs", args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens),
                groups_of("aux_data_ptrs", args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens),
                self._layout,
            )
            if getattr(disaggregation_mode, "value", disaggregation_mode) == "prefill":
                self.register_to_bootstrap()
            self._opened = opened.pop_all()

    # ---- the bootstrap server ----

    def register_to_bootstrap(self) -> None:
        """Register this rank at the bootstrap server. Waits."""
        host, port = self.server_args.host, int(self.server_args.disaggregation_bootstrap_port)
        worker = Registered(rank=self.rank, ranks=self._ranks, address=self.address, layout=self._layout)
        _wait(lambda: rendezvous.register(host, port, worker, self._credential))

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Return True if the ranks of that engine are known, and they fit.

        Otherwise its bootstrap server is asked, and a later call has the answer: SGLang's scheduler calls this once a
        second. It neither waits nor raises, because a request decides which server this is.
        """
        try:
            return self.find_ranks(bootstrap_addr, 0.0)
        except IncompatiblePeer as error:
            self.incidents.add(Incident.RANKS_DIFFER, logger, "%s", printable(error))
            return False

    def find_ranks(self, bootstrap_addr: str, seconds: float) -> bool:
        """Return the same, and wait for at most this many seconds.

        Raises:
            IncompatiblePeer: if the engine differs from this one, with both values.
        """
        if bootstrap_addr not in self.prefill_info_table:
            ranks = self._ask(bootstrap_addr, seconds)
            if ranks is None:
                return False
            self._check_layout(bootstrap_addr, ranks.layout)
            self.prefill_info_table[bootstrap_addr] = PrefillInfo(tuple(ranks.addresses))
            if len(self.prefill_info_table) > MAX_ENGINES:
                del self.prefill_info_table[next(iter(self.prefill_info_table))]
        return True

    def _ask(self, bootstrap_addr: str, seconds: float) -> Ranks | None:
        """Ask the bootstrap server that a request names. It must be among ``peers``, and have the key."""
        host, _, port = bootstrap_addr.rpartition(":")
        host = host.strip("[]")
        try:
            self._peers.check(host, int(port))
            return self._asks.ask(host, int(port), seconds)
        except (LLMException, ValueError) as error:
            told = "bootstrap server %s: %s", printable(bootstrap_addr), printable(error)
            self.incidents.add(Incident.RANKS_UNKNOWN, logger, *told)
            return None

    def sources_among(self, workers: Sequence[PeerAddress]) -> list[PeerAddress]:
        """Return the prefill ranks that have what this one needs, of whom it alone asks."""
        if not self._is_replicated:
            return [workers[self.rank % len(workers)]]
        return list(workers[self.rank :: self._ranks])

    def _check_layout(self, bootstrap_addr: str, theirs: dict[str, str | int]) -> None:
        found = differences(self._layout, theirs, self.settings.accept_differences)
        ranks = theirs.get(WORKERS)
        if self._is_replicated and isinstance(ranks, int) and ranks and ranks % self._ranks == 0:
            found.pop(WORKERS, None)
        for name, (ours, other) in found.items():
            raise IncompatiblePeer(
                f"{printable(name)} is {shown(ours)} here and {shown(other)} at the engine of {printable(bootstrap_addr)}"
            )

    def forget_prefill(self, bootstrap_addr: str) -> None:
        """Ask again next time: the engine may have been started again."""
        self.prefill_info_table.pop(bootstrap_addr, None)

    # ---- rooms ----

    def is_wanted(self, room: str) -> bool:
        """Return True if a decode engine has said where the room's pages belong, and still wants them."""
        self._take()
        return room in self._wanted

    def follow(self, request: str) -> None:
        """Keep the outcome of this request until it is forgotten."""
        self._followed.add(request)

    def outcome(self, request: str) -> str | None:
        """Return how a sender's or a receiver's request ended, or None if it has not."""
        self._take()
        return self._outcomes.get(request)

    def forget(self, request: str) -> None:
        """Forget a request."""
        self._followed.discard(request)
        self._outcomes.pop(request, None)

    def _take(self) -> None:
        ended = self.service.take()
        self._wanted |= ended.wanted
        self._wanted -= ended.unwanted
        self._outcomes |= {request: how for request, how in ended.outcomes.items() if request in self._followed}

    def teardown(self) -> None:
        """Stop running orders, and release the memory."""
        self._opened.close()


def _wait(ask: Any) -> Any:
    thread = shared_loop.acquire()
    try:
        return thread.call(ask)
    finally:
        shared_loop.release(thread)
