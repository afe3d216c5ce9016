"""The decode end of a room."""

from __future__ import annotations

from itertools import count
from typing import Any
from zlib import crc32

from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVPoll

from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.rendezvous import SECONDS
from aiodatadist._adapters.sglang.manager import AioDataDistKVManager, name_of_room
from aiodatadist._values.foreign import printable
from aiodatadist.errors import IncompatiblePeer, TransferError

ASK_SECONDS = SECONDS + 1.0
"""Seconds to wait for a bootstrap server's answer, or for the reason why there is none."""
_RECEIVERS = count()
"""Numbers in the names of receivers: a room may have several, one after the other or by mistake."""


class AioDataDistKVReceiver(BaseKVReceiver):  # type: ignore[misc]  # SGLang has no types here
    """A receiver: it tells where pages belong, and waits for them. :meth:`poll` never waits.

    It returns Failed only once no more bytes of the room can land: then its pages are free.
    """

    require_staging = False

    def __init__(self, mgr: AioDataDistKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self.conclude_state: int | None = None
        self.abort_notified = True  # the service itself tells the prefill engine
        self._room = self._reason = ""
        try:
            self._room = name_of_room(bootstrap_room)
        except ValueError as error:  # the room comes from a request, which must not end SGLang's scheduler
            self._conclude(KVPoll.Failed, str(error))
        self._request = f"{self._room} {next(_RECEIVERS)}"
        mgr.follow(self._request)
        self._workers: tuple[PeerAddress, ...] = ()  # kept here, because another room may make the manager forget them
        self._is_expecting = self._is_aborted = False

    def init(self, prefill_dp_rank: int) -> None:
        """Find the prefill engine. If the manager does not know it yet, this waits for its bootstrap server."""
        try:
            is_known = self.kv_mgr.find_ranks(self.bootstrap_addr, ASK_SECONDS)
        except IncompatiblePeer as error:
            self._conclude(KVPoll.Failed, printable(error))
            return
        if is_known:
            self._workers = self.kv_mgr.prefill_info_table[self.bootstrap_addr].workers
        else:
            self._conclude(KVPoll.Failed, f"the ranks of {printable(self.bootstrap_addr)} are unknown")

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = None,
    ) -> None:
        """Tell the prefill engine where the pages after the first ``decode_prefix_len`` tokens belong.

        Raises:
            ValueError: if the prefix is not a whole number of pages, the destination is host memory, or state is asked
                for.
        """
        page_size, prefix = int(self.kv_mgr.kv_args.page_size), int(decode_prefix_len or 0)
        if prefix % page_size:
            raise ValueError(f"decode_prefix_len is {prefix}: must be a multiple of the page size, {page_size}")
        if str(getattr(destination, "value", destination or "device")) != "device":
            raise ValueError(f"destination is {destination}: pages can only be received in device memory")
        if state_indices and any(each is not None and len(each) for each in state_indices):
            raise ValueError(f"room {self._room}: state_indices were given: aiodatadist's backend moves no state")
        if self.conclude_state is not None:
            return
        sources = self.kv_mgr.sources_among(self._workers)
        source = sources.pop(crc32(self._room.encode()) % len(sources))
        aux = None if aux_index is None else int(aux_index)
        pages = tuple(map(int, kv_indices))
        self._is_expecting = True
        first, workers = prefix // page_size, len(self._workers)
        order = ExpectOrder(self._request, source, self._room, first, pages, aux, workers=workers)
        for each in (order, *order.at_replicas(sources)):
            self.kv_mgr.service.expect(each)

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        if not self._is_expecting:
            return int(KVPoll.WaitingForInput if self._workers else KVPoll.Bootstrapping)
        outcome = self.kv_mgr.outcome(self._request)
        if outcome is None:
            return int(KVPoll.Transferring)
        is_here = outcome == "push_arrived" and not self._is_aborted
        if not is_here:
            self.kv_mgr.forget_prefill(self.bootstrap_addr)
        return self._conclude(KVPoll.Success if is_here else KVPoll.Failed, outcome)

    def _conclude(self, state: int, reason: str) -> int:
        self.conclude_state, self._reason = state, self._reason or reason
        return state

    def failure_exception(self) -> None:
        """Raise TransferError with the reason of the failure."""
        raise TransferError(f"room {self._room}: {self._reason or 'it has not failed'}")

    def abort(self) -> None:
        """Tell the prefill engine; :meth:`poll` says when the pages are free."""
        self._is_aborted, self._reason = True, "it was aborted"
        if self._is_expecting:
            self.kv_mgr.service.cancel(self._request)
        else:
            self._conclude(KVPoll.Failed, self._reason)

    def ensure_abort_notified(self) -> bool:
        return True

    def is_abort_release_safe(self) -> bool:
        """Return True if no more bytes of the room can land."""
        return self.poll() in {KVPoll.Failed, KVPoll.Success}

    def clear(self) -> None:
        self.kv_mgr.forget(self._request)
