"""All transfers of one link: those that this end asks for begin here, and those that the peer asks for are served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiodatadist._device import StreamTransfer, TransferCompletion, TransferState
from aiodatadist._link.control.notifications import check_payload
from aiodatadist._link.data.remote_operation import RemoteOperation, TransferSpec, failed
from aiodatadist._link.transfers.leased_pull import KeptBlocks, LeasedPull
from aiodatadist._link.transfers.ranges import RangeTransfers
from aiodatadist._link.transfers.requester import Requester
from aiodatadist._link.transfers.responder import Responder
from aiodatadist._link.transfers.running import RunningTransfers
from aiodatadist._link.transfers.shortcuts import Shortcuts
from aiodatadist._values.digests import LeaseDigests
from aiodatadist._wire.messages import DIGESTS_SINCE, PLAIN_PROTOCOL
from aiodatadist.errors import FeatureNotEnabled, LinkError, LLMException

if TYPE_CHECKING:
    from aiodatadist._cache.catalogue import RemoteCache
    from aiodatadist._device import Device
    from aiodatadist._link.session import Session

PORTION_BYTES = 64 << 20
"""The size of one portion of a leased pull. Portions that have landed stay valid if a later one fails."""


class Transfers:
    """The transfers of one link.

    Attributes:
        session: the peer.
        running: the transfers on the link's streams.
        requester: the transfers for which the peer must be asked.
        responder: the transfers that the peer asks for.
        shortcuts: the short way for small transfers that are repeated.
        ranges: the transfers of ranges by address.
    """

    def __init__(self, session: Session, device: Device) -> None:
        self.session = session
        self.running: RunningTransfers = RunningTransfers(session, device)
        self.requester: Requester = Requester(self.running)
        self.shortcuts: Shortcuts = Shortcuts(self.running, self.requester.compare)
        self.responder: Responder = Responder(self.running, self.shortcuts)
        self.ranges: RangeTransfers = RangeTransfers(self.requester)

    @property
    def cluster_id(self) -> int:
        """The peer's cluster id."""
        return self.session.cluster_id

    def start(self, spec: TransferSpec, what: str) -> StreamTransfer | RemoteOperation:
        """Start a transfer. Never raises for what goes wrong with it: the completion reports that.

        If the peer's cache is known and within reach, the transfer is on its stream when this returns. Otherwise the peer is
        asked first.
        """
        if spec.is_request:
            return self.requester.begin(spec, what)
        known = self.running.within_reach(spec.entry, spec.key)
        if known is None:
            return self.requester.begin(spec, what)
        remote, slot, link_channel = known
        try:
            grid = spec.grid(remote, slot)
            transfer = self.running.submit(
                spec.direction, link_channel, spec.entry, remote, grid, spec.seconds, "ours", spec.priority
            )
        except LLMException as error:
            error.peer = self.cluster_id
            return failed(what, error)
        if transfer.state is TransferState.DONE:
            self.shortcuts.learn(spec, what, remote, slot, link_channel, grid)
        if spec.checksum:
            return self.requester.compare(spec, what, remote, grid, transfer)
        return transfer

    def begin(self, spec: TransferSpec, what: str, notify: bytes | None) -> StreamTransfer | RemoteOperation:
        """Start a transfer, as :meth:`start` does, and notify the peer if it succeeds.

        Raises:
            TypeError, ParamInvalid: if ``notify`` cannot be a notification's payload.
            FeatureNotEnabled: if the peer is too old for checksums.
        """
        if spec.checksum:
            self.requester.checks.want_peer()
        # before the transfer starts: a payload that cannot be sent moves no bytes
        if notify is not None:
            check_payload(notify)
        transfer = self.start(spec, what)
        if notify is not None:
            self.session.notification_queue.send_after(transfer, notify)
        return transfer

    def start_leased(self, spec: TransferSpec, kept: KeptBlocks, seconds: float, what: str) -> LeasedPull:
        """Start a pull of blocks that the peer keeps, and claim them. ``seconds`` is the limit for both together.

        In one-sided mode the claim costs no time: this end reads meanwhile, and uses nothing before it is confirmed. The
        transfer starts only after the confirmation if the peer writes, or if ``kept.parts`` names the parts then.

        Raises:
            FeatureNotEnabled: if the peer is too old for checksums, or for comparing the prompt.
        """
        if spec.checksum:
            self.requester.checks.want_peer()
        self._check_compares(kept.digests)

        def start() -> list[tuple[TransferCompletion, int]]:
            portions = kept.parts_of(spec).portions(PORTION_BYTES)
            return [(self.start(portion, what), len(portion.selection.dst_blocks)) for portion in portions]

        pull = LeasedPull(self.running, kept, seconds, what, start)
        if spec.is_request or kept.parts is not None:  # no transfer leases the destination until the claim is confirmed
            spec.entry.lease()
            pull.add_done_callback(lambda _: spec.entry.release())
        else:
            pull.begin()
        return pull

    def _check_compares(self, digests: LeaseDigests) -> None:
        """Raise FeatureNotEnabled if the caller's prompt must be compared, and the peer's version has no digests."""
        session = self.session
        if session.peer_minor >= DIGESTS_SINCE:
            return
        version = f"{PLAIN_PROTOCOL}.{session.peer_minor}"
        if digests.prompt:
            raise FeatureNotEnabled(
                f"cluster {self.cluster_id} cannot compare prompts: its protocol has version {version}, and digests came "
                f"with {PLAIN_PROTOCOL}.{DIGESTS_SINCE}",
                hint="update that cluster",
            )
        session.host.block_leases.warn_of(self.cluster_id, version)

    # ---- how they end ----

    def withdrawn(self, remote: RemoteCache) -> None:
        """Let no further transfer find a cache that the peer takes back. Those under way may end."""
        self.shortcuts.forget(remote)

    def take_back(self, remote: RemoteCache) -> None:
        """Stop what still uses a cache that the peer takes back."""
        self.running.take_back(remote)
        self.requester.take_back(remote)

    async def finish(self) -> None:
        """Wait until all transfers under way have ended. Call it only while the link ends, when no other can start."""
        await self.responder.wait_served()
        await self.running.wait_idle()

    async def stop(self) -> None:
        """Stop the transfers under way, refuse the requests in line, and wait until all have ended."""
        self.responder.refuse_line()
        self.running.stop()
        await self.running.wait_idle()  # bounded: they answer a cancellation within their grace

    def end(self, failure: LinkError) -> None:
        """Drop what is left, because the link has ended, and fail it."""
        self.responder.end()
        self.requester.end(failure)
