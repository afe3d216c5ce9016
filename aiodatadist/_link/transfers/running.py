"""Transfers under way on the streams of one link, and what their ends mean for the link.

Transfers of this end run one after the other, and so do those that the peer asks for.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import anyio

from aiodatadist._concurrency.signal import Signal
from aiodatadist._counting import Incident
from aiodatadist._device import Program, Stream, StreamTransfer, TransferState
from aiodatadist._link.data.cost_model import Estimate
from aiodatadist._link.data.statistics import LinkCounters
from aiodatadist._link.lifecycle import Cause, LinkState
from aiodatadist._values.descriptors import type_name
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist.errors import CacheNotFound, LinkError, LLMException, LLMStatusCode, PeerLost, StuckError

if TYPE_CHECKING:
    from aiodatadist._cache.catalogue import RemoteCache
    from aiodatadist._cache.names import Key
    from aiodatadist._cache.table import Entry
    from aiodatadist._device import Device
    from aiodatadist._link.data.link_channel import LinkChannel
    from aiodatadist._link.data.remote_operation import RemoteOperation
    from aiodatadist._link.session import Session
    from aiodatadist._values.grid import Grid

logger = logging.getLogger(__name__)

ALONE_SECONDS = 1e-4
"""Seconds in a stream's queue. A transfer that waited less had the stream to itself, so its time shows the link's costs."""
ONE_QUEUE = "one queue"
"""The only stream of a link whose channels have one queue: a request of any stream starts those of all others."""
BROKEN_TIMEOUT = 30.0
"""Seconds for closing a channel on which a transfer was stopped half-way: the peer's transfers on it end first."""

DONE = {"get": "pulled", "put": "pushed"}
CALLS = {"get": "pull_blocks", "put": "push_blocks"}
"""The calls that move blocks, by direction."""


def _is_suspect(error: LLMException | None) -> bool:
    """Return True if the device reports that the other end failed."""
    return error is not None and error.status_code is LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR


LANES: Final = {
    (end, priority): f"{end}, critical" if priority is TransferPriority.CRITICAL else end
    for end in ("ours", "served")
    for priority in TransferPriority
}
"""The names of the streams, by the end that asks for a transfer and by priority.

Critical transfers have their own stream. They wait for no window there, and small ones run in the submitting call while all
others continue.
"""


class _Running:
    """A transfer that is under way, with the peer's cache and the channel, which is None while the transfer waits for one.

    ``others`` are further caches of the peer that it uses.
    """

    __slots__ = ("link_channel", "others", "program", "remote", "transfer")

    def __init__(
        self, transfer: StreamTransfer, program: Program, remote: RemoteCache, link_channel: LinkChannel
    ) -> None:
        self.transfer = transfer
        self.program = program
        self.remote = remote
        self.link_channel: LinkChannel | None = link_channel
        self.others: Sequence[RemoteCache] = ()


class RunningTransfers:
    """The transfers that are under way on one link, and the streams that they run on.

    Attributes:
        session: the peer.
        transfers: those that the device has not let go of.
        operations: the transfers for which the peer is asked, until they end.
        streams: the link's, by name.
        counters: what the link has done.
        estimate: the measured costs of the link.
        quiesce_seconds: the most seconds that the device takes to let go after a cancellation.
    """

    def __init__(self, session: Session, device: Device) -> None:
        self.session = session
        self._device = device
        self._unclean: dict[StreamTransfer, Callable[[bool], object]] = {}
        self._taken_back: set[StreamTransfer] = set()
        self._idle = Signal()
        self.streams: dict[str, Stream] = {}
        self.transfers: dict[StreamTransfer, _Running] = {}
        self.operations: set[RemoteOperation] = set()
        self.counters: LinkCounters = LinkCounters()
        self.estimate: Estimate = Estimate()
        self.quiesce_seconds: float = device.limits.quiesce
        session.call_when_broken(self.stop)
        session.channels.out_of_use = self.on_out_of_use

    def within_reach(self, entry: Entry, key: Key) -> tuple[RemoteCache, int, LinkChannel] | None:
        """Return what a key stands for at the peer, and a channel that reaches it from this end's cache.

        None if the peer must be asked first.
        """
        session = self.session
        found = session.catalogue.find(key) if entry.is_known else None
        link_channel = None if found is None else session.channels.find(entry.epoch, found[0].epoch)
        return None if found is None or link_channel is None else (*found, link_channel)

    def submit(
        self,
        direction: str,
        link_channel: LinkChannel,
        entry: Entry,
        remote: RemoteCache,
        grid: Grid,
        seconds: float,
        stream: str,
        priority: TransferPriority = TransferPriority.NORMAL,
    ) -> StreamTransfer:
        """Hand bytes to the device; the destination is the grid's local side.

        Raises:
            ParamInvalid: if the peer's cache is in memory that the link does not reach, or may not be used so.
        """
        session = self.session
        remote.check_access(direction)
        session.channels.traits.check_reaches(remote, f"cluster {session.cluster_id}", entry)
        program = Program()
        if direction == "get":
            link_channel.channel.add_get(program, grid)
        else:
            link_channel.channel.add_put(program, grid.mirrored())
        return self.launch(program, direction, link_channel, entry, remote, seconds, LANES[stream, priority], priority)

    def launch(
        self,
        program: Program,
        direction: str,
        link_channel: LinkChannel,
        entry: Entry,
        remote: RemoteCache,
        seconds: float,
        stream: str,
        priority: TransferPriority = TransferPriority.NORMAL,
        is_ordered: bool = False,
    ) -> StreamTransfer:
        """Start a program on one of the streams. Both caches are leased until the device lets go.

        If ``is_ordered``, programs of the stream end in the order in which they are launched.
        """
        if entry.data_type != remote.data_type:
            self._warn_of_types(entry, remote)
        if link_channel.channel.has_one_queue:
            opened = self.stream(ONE_QUEUE, link_channel, is_serial=True)
            transfer = opened.submit(program, seconds, self._break_channel, priority)
        else:
            opened = self.streams.get(stream) or self.stream(stream, link_channel, is_ordered=is_ordered)
            transfer = opened.submit(program, seconds, priority=priority)
        what = "served" if stream.startswith("served") else DONE[direction]
        self.watch_over(transfer, program, what, link_channel, entry, remote)
        return transfer

    def watch_over(
        self,
        transfer: StreamTransfer,
        program: Program,
        what: str,
        link_channel: LinkChannel,
        entry: Entry,
        remote: RemoteCache,
    ) -> None:
        """Lease both caches, and use the channel, until the device lets go. A transfer that has succeeded is only counted.

        Args:
            what: pulled, pushed or served.
        """
        session = self.session
        if transfer.state is TransferState.DONE:
            is_critical = transfer.priority is TransferPriority.CRITICAL
            self.ran(what, transfer.nbytes, transfer.transfer_seconds, is_critical=is_critical)
            if what == "served":
                session.totals.begun(what, transfer)
            return
        entry.lease()
        remote.use()
        link_channel.uses += 1
        running = self.transfers[transfer] = _Running(transfer, program, remote, link_channel)
        self.counters.started()

        def ended(done: StreamTransfer) -> None:
            self._settle(done, entry)
            del self.transfers[transfer]
            remote.release()
            if running.link_channel is not None:
                session.channels.release(running.link_channel)
            # a critical transfer shared the device with these, so its time does not show the link's costs
            was_beside = done.priority is TransferPriority.CRITICAL and bool(self.transfers)
            if done.state is TransferState.DONE and done.queue_seconds < ALONE_SECONDS and not was_beside:
                self.estimate.add(done.nbytes, done.transfer_seconds)
            self.counters.ended(what, done)
            self.check_idle()

        transfer.add_done_callback(ended)
        if what == "served":
            session.totals.begun(what, transfer)

    def also_uses(self, transfer: StreamTransfer, entries: Sequence[Entry], remotes: Sequence[RemoteCache]) -> None:
        """Lease further caches of both ends until the device lets go of a transfer that is under way."""
        if not entries and not remotes:
            return
        self.transfers[transfer].others = remotes
        for entry in entries:
            entry.lease()
        for remote in remotes:
            remote.use()

        def ended(done: StreamTransfer) -> None:
            for entry in entries:
                if done.state is TransferState.STUCK:
                    self.lose(entry)
                else:
                    entry.release()
            for remote in remotes:
                remote.release()

        transfer.add_done_callback(ended)

    def ran(self, what: str, nbytes: int, seconds: float, *, is_critical: bool) -> None:
        """Count a transfer that started and finished in one call."""
        if not is_critical or not self.transfers:  # otherwise it shared the device, so its time does not show the costs
            self.estimate.add(nbytes, seconds)
        self.counters.ran(what, nbytes, seconds)

    def _warn_of_types(self, entry: Entry, remote: RemoteCache) -> None:
        """Warn once for each cache of the peer whose elements have another type: bytes are moved without conversion."""
        if entry.stride == remote.stride and not remote.is_of_other_type:
            remote.is_of_other_type = True
            self.session.incidents.add(
                Incident.TYPES_DIFFER,
                logger,
                "cache %d is %s, and cache %d of cluster %d is %s: bytes are moved, and not converted",
                *(entry.cache_id, type_name(entry.data_type)),
                *(remote.cache_id, self.session.cluster_id, type_name(remote.data_type)),
            )

    def stream(
        self, name: str, link_channel: LinkChannel, *, is_serial: bool = False, is_ordered: bool = False
    ) -> Stream:
        """Return a stream of the link for programs that use its channels; open it, for one of them, if it is not open."""
        if name not in self.streams:
            title = f"link to {self.session.cluster_id}, {name}"
            self.streams[name] = link_channel.channel.open_stream(title, is_serial=is_serial, is_ordered=is_ordered)
        return self.streams[name]

    def device_stream(self, name: str) -> Stream:
        """Return a stream of the link for programs that wait for the device only; open it if it is not open yet."""
        if name not in self.streams:
            self.streams[name] = self._device.open_stream(f"link to {self.session.cluster_id}, {name}")
        return self.streams[name]

    def idle_stream(self, kind: str) -> str:
        """Return the name of a stream on which nothing is under way."""
        for number in itertools.count():
            name = f"{kind} {number}"
            if name not in self.streams or self.streams[name].is_idle:
                return name
        raise AssertionError

    # ---- channels with one queue: a transfer that was stopped half-way ----

    def _break_channel(self, transfer: StreamTransfer, error: LLMException | None, finish: Callable[[], None]) -> None:
        """Take a channel out of use whose queue still has requests of a transfer that was stopped.

        The next request would start them, so none comes, and the transfer ends, with its leases, when the channel is closed.
        If the peer is what failed, no further channel is opened with it: HCCL would wait for the peer, and no call could end
        that.
        """
        session = self.session
        if _is_suspect(error):
            self._peer_failed(error)
        running = self.transfers[transfer]
        closed = Signal()

        def over(is_closed: bool) -> None:
            closed.set()
            if self._unclean.pop(transfer, None) is not None and not is_closed:
                words = f"cluster {session.cluster_id}: a channel with requests in it could not be closed"
                transfer.stick(StuckError(words))
            finish()

        async def insist() -> None:
            with anyio.move_on_after(BROKEN_TIMEOUT):
                await closed.wait()
            if not closed.is_set():
                session.give_up(f"did not leave a broken channel within {BROKEN_TIMEOUT:g} s")

        self._unclean[transfer] = over
        if running.link_channel is not None:
            session.channels.broken(running.link_channel, over)
        # The peer is no longer heard, so it cannot say that it left the channel, and the end of the link waits for this
        # transfer.
        if not session.life.is_listening:
            session.channels.close_broken()
        session.spawn(insist)
        self.check_idle()

    def on_out_of_use(self, link_channel: LinkChannel) -> None:
        """Open the next channel, unless the link ends anyway, and move the transfers that wait for this one to it.

        If the channel has more than one queue, transfers that wait for it may start at any moment, and so they stay. The
        channel is closed after them.
        """
        self.session.spawn(lambda: self._open_next(link_channel))
        if not link_channel.channel.has_one_queue:
            return
        waiting = [r for r in self.transfers.values() if r.link_channel is link_channel and r.transfer.is_waiting]
        if waiting:
            stream = self.stream(ONE_QUEUE, link_channel)
            # until the next channel is open: what started on the old one now would be closed with it
            stream.hold()
            for running in waiting:
                running.link_channel = None
                link_channel.uses -= 1
            self.session.spawn(lambda: self._move_on(stream, link_channel, waiting))

    async def _open_next(self, old: LinkChannel) -> None:
        if self.session.is_ready:
            await self.session.channels.open_next(old)

    async def _move_on(self, stream: Stream, old: LinkChannel, waiting: Sequence[_Running]) -> None:
        session = self.session
        try:
            fresh = await session.channels.reach(old.mine, old.theirs)
        except LinkError as error:
            for running in waiting:
                running.transfer.fail(type(error)(*error.args, peer=session.cluster_id))
        else:
            for running in waiting:
                if not running.transfer.is_done:
                    fresh.channel.take_over(running.program)
                    running.link_channel = fresh
                    fresh.uses += 1
        finally:
            for running in waiting:
                if running.link_channel is None:  # it has failed, or the link ends: nothing starts on the old channel
                    running.transfer.cancel()
            stream.go_on()

    # ---- how transfers end ----

    def _settle(self, transfer: StreamTransfer, entry: Entry) -> None:
        """Release the lease, if the device has let go, and let a failure have its effect on the link."""
        session = self.session
        if transfer.state is TransferState.STUCK:
            self.lose(entry)
            why = transfer.error.args[0] if transfer.error is not None else "a transfer is stuck"
            session.break_off(LinkError(f"cluster {session.cluster_id}: {why}"))
        else:
            entry.release()
        if transfer in self._taken_back:
            self._taken_back.discard(transfer)
            if transfer.is_cancelled:
                transfer.replace_error(
                    CacheNotFound(f"cluster {session.cluster_id} took its cache back", peer=session.cluster_id)
                )
        suspect = _is_suspect(transfer.error)
        # The end of the link is the reason: a CancelledError would look like the caller's own.
        if session.life.failure is not None and (suspect or transfer.state is TransferState.CANCELLED):
            transfer.replace_error(session.copy_of_failure())
        elif suspect:
            transfer.replace_error(PeerLost(self._peer_failed(transfer.error), peer=session.cluster_id))
        elif transfer.error is not None:
            transfer.error.peer = session.cluster_id

    def _peer_failed(self, error: LLMException | None) -> str:
        """End the link: a transfer has found out before the heartbeats did that the peer failed. Return why, in words."""
        words = "" if error is None else error.args[0]
        name = f"cluster {self.session.cluster_id}"
        if self.session.channels.traits.has_connections:
            died, cause = f"{name}: a data connection was lost: {words}", Cause.DATA_CONNECTION_LOST
        else:
            died, cause = f"{name}: the peer's process is gone, or gave up its memory: {words}", Cause.DEVICE_ERROR
        self.session.break_off(PeerLost(died), cause)
        return died

    def take_back(self, remote: RemoteCache) -> None:
        """Cancel the transfers that use a cache which the peer takes back: they fail with CacheNotFound."""
        using = [t for t, running in self.transfers.items() if running.remote is remote or remote in running.others]
        for transfer in using:
            self._taken_back.add(transfer)
            transfer.cancel()

    def lose(self, entry: Entry) -> None:
        """Never use a cache again, because it is not known when bytes stop to land in it."""
        entry.poison()
        for region in entry.regions():
            self._device.mark_stuck(region.address, region.nbytes)

    # ---- the end of the link ----

    def stop(self) -> None:
        """Ask the transfers under way to stop. They end with the failure of the link."""
        for transfer in list(self.transfers):
            transfer.cancel()
        for operation in list(self.operations):
            operation.cancel()

    def end_unclean(self) -> None:
        """End the transfers that only a closed channel could have ended. They are stuck, because the link has ended."""
        for over in list(self._unclean.values()):
            over(False)

    @property
    def is_idle(self) -> bool:
        """True if nothing is under way, apart from what only the end of a channel can end."""
        return self.transfers.keys() <= self._unclean.keys() and all(
            operation.is_doubtful for operation in self.operations
        )

    async def wait_idle(self) -> None:
        """Wait until no transfer is under way. Call it only while the link ends."""
        while not self.is_idle:
            await self._idle.wait()

    def check_idle(self) -> None:
        """Note that something has ended. Only a link that ends waits for the last of them."""
        if self.session.life.state is not LinkState.READY and self.is_idle:
            self._idle.wake()
