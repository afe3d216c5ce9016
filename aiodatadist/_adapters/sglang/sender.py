"""The prefill end of a room."""

from __future__ import annotations

from itertools import count
from time import monotonic
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVSender, KVPoll, KVTransferMetric

from aiodatadist._adapters.sendings import Portion
from aiodatadist._adapters.sglang.manager import AioDataDistKVManager, name_of_room
from aiodatadist.errors import TransferError

_SENDERS = count()
"""Numbers in the names of senders: a room may have several, one after the other or by mistake."""


class AioDataDistKVSender(BaseKVSender):  # type: ignore[misc]  # SGLang has no types here
    """A sender: pages are sent as they are given, once the decode engine has said where they belong.

    :meth:`poll` never waits.
    """

    def __init__(
        self,
        mgr: AioDataDistKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.conclude_state: int | None = None
        self._room = self._reason = ""
        try:
            self._room = name_of_room(bootstrap_room)
        except ValueError as error:  # the room comes from a request, which must not end SGLang's scheduler
            self._conclude(KVPoll.Failed, str(error))
        self._request = f"{self._room} {next(_SENDERS)}"
        mgr.follow(self._request)
        self._aux: int | None = None
        self._wanted = self._sent = 0
        self._began = monotonic()
        self._sent_at: float | None = None
        self._seconds: float | None = None

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._wanted = int(num_kv_indices)
        self._aux = None if aux_index is None else int(aux_index)

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        """Send the next pages of the request; with the last of them what goes with it.

        Raises:
            ValueError: if there are more than were announced, or indices of state.
        """
        pages = tuple(map(int, kv_indices))
        if state_indices and any(each is not None and len(each) for each in state_indices):
            raise ValueError(f"room {self._room}: state_indices were given: aiodatadist's backend moves no state")
        if self._sent + len(pages) > self._wanted:
            raise ValueError(f"room {self._room}: {self._sent + len(pages)} pages: {self._wanted} were announced")
        if self.conclude_state is not None:
            return
        self._sent_at = self._sent_at or monotonic()
        self.kv_mgr.service.push(self._room, Portion(self._sent, pages), request=self._request)
        self._sent += len(pages)
        if self._sent == self._wanted:
            self.kv_mgr.service.pushed(self._room, self._request, self._aux)

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def poll(self) -> int:
        if self.conclude_state is None:
            return self._look()
        return self.conclude_state

    def _look(self) -> int:
        manager, room = self.kv_mgr, self._room
        outcome = manager.outcome(self._request)
        if outcome is not None:
            self._seconds = monotonic() - (self._sent_at or self._began)
            return self._conclude(KVPoll.Success if outcome == "push_done" else KVPoll.Failed, outcome)
        if self._sent_at is not None:
            return int(KVPoll.Transferring)
        if manager.is_wanted(room):
            return int(KVPoll.WaitingForInput)
        if monotonic() - self._began > manager.settings.bootstrap_seconds:
            manager.service.abandon(room, request=self._request)
            return self._conclude(
                KVPoll.Failed, f"no decode engine asked within {manager.settings.bootstrap_seconds:g} s"
            )
        return int(KVPoll.Bootstrapping)

    def poll_pp_consensus(self) -> int:
        return self.poll()

    def _conclude(self, state: int, reason: str) -> int:
        self.conclude_state, self._reason = state, reason
        return state

    def failure_exception(self) -> None:
        """Raise TransferError with the reason of the failure."""
        raise TransferError(f"room {self._room}: {self._reason or 'it has not failed'}")

    def mark_prefill_complete(self) -> None:
        """Do nothing: the pages have been sent by then, or are on their way."""

    def get_transfer_metric(self) -> KVTransferMetric:
        nbytes = self._sent * sum(self.kv_mgr.kv_args.kv_item_lens)
        return KVTransferMetric(transfer_latency_s=self._seconds, transfer_total_bytes=nbytes)

    def abort(self) -> None:
        """Tell the decode engine. No effect if the room has ended."""
        self.poll()
        if self.conclude_state is None:
            self.kv_mgr.service.abandon(self._room, request=self._request)
            self._conclude(KVPoll.Failed, "it was aborted")

    def clear(self) -> None:
        self.kv_mgr.forget(self._request)
